"""What replay asks of a cache: begin a run for a prompt, and say what is held.

A `CachedRun` is a pipeline `Run` that also knows how much of its prompt the cache recognised and why it restored less.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radixcache import TreeView
from runner.pipeline import Run


@dataclass(frozen=True)
class Prompt:
    """One rendered request.

    `tokens` has at least one id. `marks` are offsets worth keeping, as `render_chat` gives them; `system_end` is where
    the system prompt ends, 0 without one. `ends_with_user` tells whether the last message is a user's. `reply_tokens`
    says how much room to keep for the reply.
    """

    tokens: NDArray[np.int32]
    marks: tuple[int, ...]
    system_end: int
    ends_with_user: bool
    reply_tokens: int


class CachedRun(Run, Protocol):
    """A run that a cache has begun."""

    @property
    def matched_tokens(self) -> int:
        """How many of the prompt's first tokens the cache has seen before."""

    @property
    def reason(self) -> str | None:
        """Why fewer tokens were restored than matched; None when none were lost."""


class Backend(Protocol):
    """One cache under comparison. Bytes are those of the arrays held, spare capacity included."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the live caches, those a forward pass reads and writes."""

    @property
    def paged_bytes(self) -> int:
        """Bytes of everything stored beside the live caches."""

    @property
    def evictions(self) -> int:
        """How many stored entries the budget has cost so far."""

    def begin(self, prompt: Prompt) -> AbstractContextManager[CachedRun]:
        """Restore what is known of the prompt. Leaving the block stores what the run evaluated."""

    def dump(self, tokenizer: Any) -> str | None:
        """Return what is held as text, or None when the cache has nothing to show."""

    def view(self, tokenizer: Any) -> TreeView | None:
        """Return a description of what is held, or None when the cache has nothing to show."""

    def close(self) -> None:
        """Let go of every array."""
