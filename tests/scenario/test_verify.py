"""verify=1.0 finds state that was spoilt, quarantines it and answers cold; where nothing is wrong it changes nothing.

A fault is planted where it would come about: in a snapshot that lies in the tree, in the live buffers of an idle slot,
or in the code that writes and reads snapshots. Each is also planted with verify=0: there the answer is a wrong one, so
the fault matters.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate as plain_stream_generate
from numpy.typing import NDArray

from radixcache import PrefixCache, Session, stream_generate
from radixcache.adapters.rotating import RotatingKVAdapter
from radixcache.adapters.span import SpanAdapter, SpanSnapshot
from radixcache.comparison import Part
from radixcache.state_tree import StateNode, state_of
from runner.tiny import VOCABULARY_LENGTH, tiny_model, tiny_tokenizer

STEP_SIZE = 16
#: What a planted fault must come to in the logits, relative to the largest.
MATTERS = 1e-3

_random = np.random.default_rng(5)
SYSTEM, TAIL_A, TAIL_B, TURN, OTHER = (
    _random.integers(0, VOCABULARY_LENGTH, length).tolist() for length in (40, 30, 30, 12, 50)
)
PROMPT_A, PROMPT_B = [*SYSTEM, *TAIL_A], [*SYSTEM, *TAIL_B]

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning:radixcache")


def answer(session: Session, model: Any, reply: int = 3) -> list[NDArray[Any]]:
    """Prefill, and step through a reply that does not depend on the logits; all of these."""
    session.prefill(model, step_size=STEP_SIZE)
    logits = [session.step(model, session.prompt[-1:])]
    logits += [session.step(model, [token]) for token in range(reply)]
    return [np.array(each) for each in logits]


def serve(cache: PrefixCache, model: Any, prompt: list[int], **more: Any) -> list[NDArray[Any]]:
    with cache.begin(prompt, **more) as session:
        found = answer(session, model)
    cache.check()
    return found


def cold(model: Any, prompt: list[int], **more: Any) -> list[NDArray[Any]]:
    return serve(PrefixCache(model, **more), model, prompt)


def same_bits(left: list[NDArray[Any]], right: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def far_apart(left: list[NDArray[Any]], right: list[NDArray[Any]]) -> bool:
    error = max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
    return not error < MATTERS * max(float(np.abs(b).max()) for b in right)


# Faults


def nodes(cache: PrefixCache) -> list[StateNode]:
    return list(cache._states.tree.nodes())


def spoilt(array: mx.array, index: Any = ...) -> mx.array:
    """The same array with one byte turned over: sign and exponent of the largest number under `index`."""
    values = np.array(array)
    part = values[index].copy()
    place = np.unravel_index(np.abs(part).argmax(), part.shape)
    part.view(np.uint8).reshape(*part.shape, 4)[(*place, 3)] ^= 0x82
    values[index] = part
    return mx.array(values)


def wrong_span(part: int) -> Callable[[PrefixCache], None]:
    """A wrong byte in a key (0) or a value (1) of the last layer with spans, in a snapshot at token 20."""

    def plant(cache: PrefixCache) -> None:
        node = next(n for n in nodes(cache) if n.start <= 20 < n.end and state_of(n).spans is not None)
        snapshot = [leaf for leaf in state_of(node).spans.leaves if leaf is not None][-1]  # type: ignore[union-attr]
        arrays = list(snapshot.segments[0])
        arrays[part] = spoilt(arrays[part], (0, slice(None), 20 - node.start))
        snapshot.segments[0] = tuple(arrays)

    return plant


def wrong_recurrent_state(cache: PrefixCache) -> None:
    """A wrong byte in the recurrent state behind the reply to PROMPT_A."""
    for node in nodes(cache):
        checkpoint = state_of(node).checkpoint
        if checkpoint is not None and checkpoint.offset == len(PROMPT_A) + 3:
            snapshot = [leaf for leaf in checkpoint.leaves if leaf is not None and hasattr(leaf, "slots")][-1]
            snapshot.slots[-1] = spoilt(snapshot.slots[-1])


def swapped_spans(cache: PrefixCache) -> None:
    """The ends of two conversations of the same length have each other's snapshots."""
    first, second = (n for n in nodes(cache) if n.start == len(SYSTEM))
    one, two = state_of(first), state_of(second)
    assert one.spans is not None
    assert two.spans is not None
    one.spans.leaves, two.spans.leaves = two.spans.leaves, one.spans.leaves


def swapped_checkpoints(cache: PrefixCache) -> None:
    """The ends of two conversations of the same length have each other's checkpoints."""
    ends = [n for n in nodes(cache) if n.end in (len(PROMPT_A), len(PROMPT_A) + 3) and state_of(n).checkpoint]
    for end in {node.end for node in ends}:
        first, second = (state_of(n).checkpoint for n in ends if n.end == end)
        assert first is not None
        assert second is not None
        first.leaves, second.leaves = second.leaves, first.leaves


def no_fault(cache: PrefixCache) -> None:
    pass


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Snapshots are taken one token too late."""
    right = SpanAdapter.snapshot

    def wrong(self: Any, live: Any, start: int, end: int) -> SpanSnapshot | None:
        if start == 0:
            return right(self, live, start, end)
        found = right(self, live, start - 1, end - 1)
        return None if found is None else SpanSnapshot(start, end, found.segments)

    patch.setattr(SpanAdapter, "snapshot", wrong)


def wrong_offset(patch: pytest.MonkeyPatch) -> None:
    """A rotating cache is restored with an offset that is one token short."""
    right = RotatingKVAdapter.restore

    def wrong(self: Any, live: Any, snapshot: Any, target: int) -> bool:
        done = right(self, live, snapshot, target)
        if done and snapshot is not None and target:
            live.offset -= 1
        return done

    patch.setattr(RotatingKVAdapter, "restore", wrong)


FAULTS = {
    "a byte of a key": ("llama", wrong_span(0), None, {Part.ROWS}),
    "a byte of a value": ("llama", wrong_span(1), None, {Part.ROWS}),
    "a byte of a key in a hybrid model": ("nemotron_h", wrong_span(0), None, {Part.ROWS}),
    "a byte of a recurrent state": ("mamba", wrong_recurrent_state, None, {Part.POINT}),
    "a byte of a recurrent state in a hybrid model": ("nemotron_h", wrong_recurrent_state, None, {Part.POINT}),
    "the offset of a rotating cache": ("llama_sliding", no_fault, wrong_offset, {Part.OFFSET}),
    "swapped snapshots": ("llama", swapped_spans, None, {Part.ROWS}),
    "swapped checkpoints": ("mamba", swapped_checkpoints, None, {Part.POINT}),
    "swapped windows": ("llama_sliding", swapped_checkpoints, None, {Part.POINT}),
    "a span stored one token off": ("llama", no_fault, off_by_one, {Part.ROWS}),
    "a span stored one token off in a hybrid model": ("nemotron_h", no_fault, off_by_one, {Part.ROWS}),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind, plant, patch, parts = FAULTS[request.param]
    model = tiny_model(kind)
    expected = cold(model, [*PROMPT_A, 0, 1, 2, *TURN])

    def make(**more: Any) -> PrefixCache:
        monkeypatch.undo()
        cache = PrefixCache(model, **more)
        serve(cache, model, PROMPT_A, marks=[len(SYSTEM)])
        with monkeypatch.context() as patched:
            if patch is off_by_one:
                patch(patched)
            serve(cache, model, PROMPT_B, marks=[len(SYSTEM)])
            serve(cache, model, OTHER)
        plant(cache)
        if patch is wrong_offset:
            patch(monkeypatch)
        return cache

    return model, make, parts, expected


def test_a_planted_fault_is_found_quarantined_and_answered_cold(fault: Any) -> None:
    model, make, parts, expected = fault
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    blind = make()
    with blind.begin(prompt) as session:
        assert session.cached_tokens > 0
        unnoticed = answer(session, model)
    assert far_apart(unnoticed, expected)

    cache = make(verify=1.0)
    warned = pytest.warns(RuntimeWarning, match="is not what a cold prefill gives")
    with cache.begin(prompt) as session:
        resumed = session.cached_tokens
        assert resumed > 0
        with warned:
            found = answer(session, model)
        assert session.cached_tokens == 0
        cache.check()
    assert same_bits(found, expected)
    cache.check()
    (mismatch,) = cache.mismatches
    assert mismatch is session.mismatch
    assert (mismatch.tokens.tolist(), mismatch.resume_offset) == (prompt, resumed)
    assert mismatch.part in parts
    assert not mismatch.error <= mismatch.tolerance
    stats = cache.stats
    assert (stats.verify_mismatches, stats.quarantined, stats.verify_bytes) == (1, 1, 0)
    assert stats.verify_largest_error >= mismatch.error
    # Nothing of it is stored any more, nor resumed: begin, fetch and insert all stop in front of it.
    start = mismatch.quarantined_from
    assert cache._quarantine.offset(np.array(prompt), "") == start < resumed
    caches, remaining = cache.fetch(prompt)
    assert len(prompt) - len(remaining) <= start
    grown = [*prompt, 5]
    model(mx.array([remaining.tolist()]), cache=caches)
    assert cache.insert(prompt, caches) <= start
    with cache.begin(grown) as session:
        assert session.matched_tokens <= start
        assert session.mismatch is None
        answer(session, model)
    cache.check()
    assert cache.stats.verify_mismatches == 1


def test_after_the_quarantine_was_cleared_the_path_is_stored_again(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make, _, expected = fault
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    cache = make(verify=1.0)
    with pytest.warns(RuntimeWarning, match="cold prefill"):
        serve(cache, model, prompt)
    monkeypatch.undo()
    cache.clear_quarantine("elsewhere")
    assert cache.stats.quarantined == 1
    cache.clear_quarantine()
    assert cache.stats.quarantined == 0
    serve(cache, model, prompt)
    with cache.begin([*prompt, 0, 1, 2, 9]) as session:
        assert session.cached_tokens >= len(prompt) - 16
        answer(session, model)
        assert session.mismatch is None
    cache.check()
    assert cache.stats.verify_mismatches == 1
    assert same_bits(expected, cold(model, prompt))
