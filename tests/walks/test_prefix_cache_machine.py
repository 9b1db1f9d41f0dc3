"""The walks of prefix_cache_machine.py with layers of all sorts, in exact mode, and with fewer bits at rest."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis.stateful import invariant

from tests import inside
from tests.walks.common import small_steps as small_steps
from tests.walks.common import walking
from tests.walks.prefix_cache_machine import ExactCache, PrefixCacheMachine


class ExactMachine(PrefixCacheMachine):
    """Everything above in exact mode: what is resumed, stored and checkpointed ends on the grid."""

    cache_class = ExactCache
    more: Any = {"exact": True, "step_size": 3}  # noqa: RUF012

    def open(self, data: Any, namespace: str) -> tuple[Any, list[int]]:
        self.pure = False  # not exact to the token
        session, tokens = super().open(data, namespace)
        assert session.cached_tokens % 3 == 0
        return session, tokens

    def insert_one(self, data: Any, namespace: str, beyond: int) -> None:
        tokens = self.sequence(data, namespace)
        with pytest.raises(ValueError, match="exact cache"):
            self.cache.insert(tokens, self.model.make_cache(), namespace=namespace)

    def resumes(self, tokens: list[int], namespace: str) -> None:
        """With room for everything, each prefilled chunk is there; how much of a sequence was, only the tree knows."""
        for node in inside.nodes(self.cache):
            if node.is_leaf and not (node.payload.live or node.payload.is_kept):
                assert node.end % 3 == 0, self.cache.dump()

    def pinned_length(self, tokens: list[int]) -> int:
        return (len(tokens) - 1) // 3 * 3

    def warmed_length(self, tokens: list[int]) -> int:
        return len(tokens) // 3 * 3


class StoredBitsMachine(PrefixCacheMachine):
    """Everything above with fewer bits at rest. A group of equal values comes back as it was, so it still spells."""

    more: Any = {"stored_bits": 4}  # noqa: RUF012
    width = 32

    @invariant()
    def stores_codes(self) -> None:
        for node in inside.nodes(self.cache) if hasattr(self, "cache") else ():
            for spans in (node.payload.spans, node.payload.windows):
                arrays = [leaf.arrays()[0] for leaf in ([] if spans is None else spans.leaves) if leaf is not None]
                assert {array.dtype for array in arrays} <= {mx.uint32}, node


TestAnyLayers = walking(PrefixCacheMachine, examples=12)
TestExact = walking(ExactMachine, examples=12)
TestStoredBits = walking(StoredBitsMachine, examples=12)
TestAnyLayersLonger = pytest.mark.slow(walking(PrefixCacheMachine, examples=20, steps=30))
