"""What the random walks over a PrefixCache share: sequences, small steps, and what was told of stored state."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings

import radixcache.adapters.span
import radixcache.layers.layout
import radixcache.paging.pager
import radixcache.settings
import radixcache.tree.state_tree
import radixcache.verify
from radixcache import Event, PrefixCache
from tests import inside

NAMESPACES = ("", "tenant")

short = st.lists(st.integers(0, 3), min_size=1, max_size=14)


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Segments, trims and cuts so small that short sequences cross them; in effect where a module imports it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (radixcache.adapters.span, radixcache.tree.state_tree):
            patch.setattr(module, "SEGMENT_TOKENS", 8)
        patch.setattr(radixcache.verify, "ROWS", 4)
        patch.setattr(radixcache.settings, "TRIM_TOKENS", 4)
        patch.setattr(radixcache.paging.pager, "CUT_TOKENS", 8)
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of mismatches, which the walks look for themselves; a check that broke off is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("error", message="verification failed")
        yield


def walking(machine: Any, examples: int, steps: int = 20) -> Any:
    """The test case of a state machine, with so many walks of at most so many steps."""

    class Walking(machine.TestCase):  # type: ignore[misc]
        settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)

    return Walking


class Told:
    """A listener that counts what it is told.

    Attributes:
        kinds: how many events of each kind.
        held: what they say there is, tokens and checkpoints by namespace.
    """

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.held: dict[str, Counter[str]] = {name: Counter() for name in NAMESPACES}

    def __call__(self, event: Event) -> None:
        self.kinds[event.kind] += 1
        if event.kind in ("stored", "evicted"):
            sign = 1 if event.kind == "stored" else -1
            count = event.end - event.start if event.detail["state"] == "tokens" else 1
            self.held[event.namespace][event.detail["state"]] += sign * count

    def check(self, cache: PrefixCache) -> None:
        """What was told of the tokens of each namespace, and of requests, is what there is."""
        stats = cache.stats
        assert (stats.event_failures, stats.dropped_events) == (0, 0)
        for namespace, held in self.held.items():
            nodes: list[Any] = inside.nodes(cache, namespace)
            assert held["tokens"] == sum(len(node.edge) for node in nodes), namespace
            # A checkpoint that goes with its tokens is not told of apart.
            assert held["checkpoint"] >= sum(node.payload.checkpoint is not None for node in nodes), namespace
        assert self.kinds["resumed"] == stats.requests
