"""What replay asks of a cache: begin a run for a prompt, and say what is held."""

from contextlib import AbstractContextManager
from typing import Protocol

from radixcache import PrefixCache
from runner.replies.pipeline import LiveRun
from runner.script.script import Prompt


class Backend(Protocol):
    """One cache under comparison. Bytes are those of the arrays held, spare capacity included."""

    @property
    def shown(self) -> PrefixCache | None:
        """The cache whose tree can be shown; None where there is no tree."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the live caches, those a forward pass reads and writes."""

    @property
    def paged_bytes(self) -> int:
        """Bytes of everything stored beside the live caches."""

    @property
    def evictions(self) -> int:
        """How many stored entries the budget has cost so far."""

    def begin(self, prompt: Prompt) -> AbstractContextManager[LiveRun]:
        """Restore what is known of the prompt. Leaving the block stores what the run evaluated."""

    def close(self) -> None:
        """Let go of every array."""
