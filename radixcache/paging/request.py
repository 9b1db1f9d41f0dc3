"""Request: what was asked for, checked and never changed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixcache.tokens.ids import TokenIds
from radixcache.tokens.keys import Keys
from radixcache.tree.state_tree import Use


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and what goes with it.

    Attributes:
        prompt: int32 token ids.
        keys: int64, one per token: what the tree goes by.
        namespace: nothing is shared across namespaces.
        use: who asks, and when.
        marks: offsets worth a checkpoint.
        reserve: tokens of room beyond the prompt.
    """

    prompt: TokenIds
    keys: Keys
    namespace: str
    use: Use
    marks: Sequence[int] = ()
    reserve: int = 0

    @property
    def limit(self) -> int:
        """The most tokens that may be restored: one at least is evaluated."""
        return len(self.prompt) - 1
