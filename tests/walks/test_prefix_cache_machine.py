"""The walks of prefix_cache_machine.py with layers of all sorts, in exact mode, and with fewer bits at rest."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis.stateful import invariant

from tests import inside
from tests.walks.common import small_steps as small_steps
from tests.walks.common import walking
from tests.walks.prefix_cache_machine import ExactMachine, PrefixCacheMachine


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
