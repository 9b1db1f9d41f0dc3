"""Sequences that share one buffer of cells get the logits that each gets alone, whoever comes, shares and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.architectures.catalogue import CUT_SENSITIVE, distinct_models
from benchmarks.architectures.kinds import kind_of
from radixcache.cells.causal import CausalCache
from radixcache.cells.table import CellTable
from radixcache.errors import UnsupportedCacheError
from runner.models.tiny import TINY_KINDS, VOCABULARY_LENGTH, build, tiny_model
from tests.cells.causal_rows import ROUNDING, WRONG_STATE, Rows, shared_model, words

#: What cannot run on cells, and the word of the error that says why.
REFUSED = {
    "afm7": "which cells it uses",
    "deepseek_v41": "LayerCache",
    "llama4": "ChunkedKVCache",
    "minimax_m3_vl": "blocks of neighbouring slots",
}
#: Models whose rows run one after the other.
ONE_BY_ONE = {"gemma2", "gpt_bigcode"}
#: Full and latent attention, windows with sinks, layers that share, recurrent layers alone and beside attention.
KINDS = ("llama", "deepseek_v3", "gpt_oss", "gemma4_text", "mamba", "falcon_h1", "longcat_flash_ngram")
OTHER_KINDS = sorted((set(distinct_models()) | set(TINY_KINDS)) - set(KINDS) - set(REFUSED)) + sorted(REFUSED)
TIMELINE_CELLS = 118


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_sequences_get_the_logits_of_each_alone(kind: str) -> None:
    rows = Rows(shared_model(kind), capacity=TIMELINE_CELLS)
    moved = timeline(rows)
    assert rows.error <= ROUNDING
    assert moved > 0


@pytest.mark.slow
def test_all_other_architectures_get_the_logits_of_each_alone() -> None:
    errors, refused, singly = {}, {}, set()
    for name in OTHER_KINDS:
        model = build(kind_of(name))
        try:
            rows = Rows(model, TIMELINE_CELLS, step_size=1 if name in CUT_SENSITIVE else None)
            timeline(rows)
        except UnsupportedCacheError as error:
            refused[name] = str(error)
            continue
        errors[name] = rows.error
        if not rows.causal.steps_together(model):
            singly.add(name)
    assert {name: error for name, error in errors.items() if error > ROUNDING} == {}
    assert set(refused) == set(REFUSED)
    assert all(REFUSED[name] in error for name, error in refused.items()), refused
    assert singly == ONE_BY_ONE
    assert len(errors) >= 80


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "mamba"])
def test_another_sequences_state_made_visible_moves_the_logits_a_hundred_times_more(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(shared_model(kind), capacity=96)
    for sequence in range(3):
        rows.join(sequence, words(sequence, 14 + 5 * sequence))
    rows.step({0: 3, 1: 4, 2: 5})
    assert rows.error <= ROUNDING
    plant_membership(rows, monkeypatch)
    rows.step({0: 6, 1: 7, 2: 8})
    assert rows.error > WRONG_STATE


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_cannot_run_on_cells_is_refused_by_name(kind: str) -> None:
    model = build(kind_of(kind))
    with pytest.raises(UnsupportedCacheError, match=REFUSED[kind]):
        CausalCache(model, capacity=64).steps_together(model)


def test_what_cannot_run_on_cells_is_refused_before_a_second_sequence_gets_wrong_logits() -> None:
    model = build(kind_of("afm7"))
    causal = CausalCache(model, capacity=64)
    causal.add(1)
    causal.prefill(model, 1, words(1, 5))
    causal.add(2)
    for sequence in (1, 2):
        with pytest.raises(UnsupportedCacheError):
            causal.prefill(model, sequence, words(2, 5))
    causal.check()
    assert causal.table.used == 5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kind", ["afm7", "gemma2", "lfm2"])
def test_the_trial_tells_wrong_positions_in_every_dtype(kind: str, dtype: mx.Dtype) -> None:
    model = build(kind_of(kind))
    model.set_dtype(dtype)
    causal = CausalCache(model, capacity=64)
    if kind in REFUSED:
        with pytest.raises(UnsupportedCacheError):
            causal.steps_together(model)
    else:
        assert causal.steps_together(model) == (kind not in ONE_BY_ONE)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_one_sequence_with_cells_out_of_order_runs_the_trial_before_it_is_wrong(kind: str) -> None:
    rows = Rows(tiny_model(kind), capacity=64)
    rows.join(1, words(1, 10))
    rows.join(2, words(2, 10))
    rows.prefill(1, words(3, 10))
    rows.leave(2)
    rows.prefill(1, words(4, 25))
    rows.step({1: 5})
    assert rows.error <= ROUNDING
    assert len(rows.causal.table.ranges(1)) > 2


def test_a_sequence_is_tainted_from_its_first_gap_on_and_so_is_who_shares_cells_behind_it() -> None:
    model = shared_model("llama")
    causal = CausalCache(model, capacity=64)
    causal.add(1)
    causal.prefill(model, 1, words(1, 20))
    causal.remove(model, 1, 5, 8)
    causal.remove(model, 1, 10, 12)
    assert (causal.length(1), causal.clean_tokens(1)) == (15, 5)
    for sequence, length, clean in ((2, 9, 5), (3, 4, 4)):
        causal.add(sequence)
        causal.copy_prefix(1, sequence, length)
        assert causal.clean_tokens(sequence) == clean
    causal.check()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "falcon_h1"])
def test_an_overflow_in_one_sequence_stays_its_own(kind: str) -> None:
    rows, clean = Rows(shared_model(kind), capacity=64), [token % 200 for token in words(1, 9)]
    with overflow_at(rows.model, 200):
        rows.join(1, clean)
        rows.causal.add(2)
        lost = rows.causal.prefill(rows.model, 2, [5, 200, 7])
        assert not np.isfinite(np.array(lost[0, -1])).any()
        for token in range(4):
            logits = rows.causal.step(rows.model, [2, 1], [token, token])
            assert not np.isfinite(np.array(logits[0])).any()  # as it would be alone
            rows.note(1, [token], logits[1])
        rows.causal.free(2)
        rows.join(3, clean[:5])  # into cells of sequence 2, and beside them
        rows.step({1: 3, 3: 4})
        assert rows.error <= ROUNDING


def timeline(rows: Rows) -> int:
    """Joins, a shared prefix, a cancel, a defragmentation in mid-decode, a rewind; the cells that were moved."""
    rows.join(1, words(1, 21))
    rows.prefill(1, words(2, 12))
    rows.share(1, 2, 33 if rows.has_states else 20)
    rows.prefill(2, words(3, 9))
    rows.join(3, words(4, 11))
    for token in range(3):
        rows.step({1: token, 2: token + 40, 3: token + 80})
    rows.leave(2)
    rows.step({3: 1, 1: 2})
    rows.check()
    before = rows.causal.table.cells(3).tolist()
    room = rows.causal.table.capacity - rows.causal.table.used
    assert rows.causal.table.largest_free_run < room - 4
    rows.join(4, words(5, room - 4))
    moved = sum(a != b for a, b in zip(before, rows.causal.table.cells(3).tolist(), strict=True))
    rows.step({4: 5, 1: 6, 3: 7})
    if not rows.has_states:
        rows.rewind(3, 2)
        rows.step({3: 9})
    rows.leave(1)
    rows.causal.defragment()
    rows.step({4: 8, 3: 10})
    rows.check()
    return moved


def plant_membership(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every row see all cells that the fetch spans; where there are none, give each row the state of another."""
    if rows.causal._cells:
        right = CellTable.mask

        def wrong(self: CellTable, *args: Any, **kwargs: Any) -> Any:
            start, stop = self.span(*args, **kwargs)
            return right(self, *args, **kwargs) | (self._counts[start:stop] > 0)

        monkeypatch.setattr(CellTable, "mask", wrong)
    else:
        for cache in rows.causal._states.take((0, 1, 2)):
            cache.cache = [None if array is None else array[::-1] for array in cache.cache]


@contextmanager
def overflow_at(model: Any, token: int) -> Iterator[None]:
    """Give one token an embedding that is not finite; a head that is tied to the embeddings keeps its weights."""

    class Overflowing(nn.Embedding):
        def __call__(self, ids: mx.array) -> mx.array:
            return mx.where((ids == token)[..., None], float("inf"), super().__call__(ids))

    layers = [each for each in model.modules() if type(each) is nn.Embedding and len(each.weight) == VOCABULARY_LENGTH]
    for layer in layers:
        layer.__class__ = Overflowing
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Embedding


def stepped(kind: str) -> Rows:
    """Sequences 1 and 2, which have made a step together, and 3, which has not."""
    rows = Rows(shared_model(kind), capacity=40)
    for sequence, length in ((1, 5), (2, 7), (3, 4)):
        rows.join(sequence, words(sequence, length))
    rows.step({1: 1, 2: 2})
    return rows


def cut_buffer(causal: CausalCache, name: str) -> None:
    """Leave the first layer a buffer that ends before the last cell in use."""
    layer: Any = causal._cells[0]
    setattr(layer, name, getattr(layer, name)[..., : causal.table.used - 1, :])


BREAKS: dict[str, tuple[str, Callable[[CausalCache], object]]] = {
    "K1: a sequence without state": ("lfm2", lambda c: c._states.free(3)),
    "K2: keys end before the last cell": ("llama", lambda c: cut_buffer(c, "keys")),
    "K2: values end before the last cell": ("llama", lambda c: cut_buffer(c, "values")),
    "K2: more cells than the table": ("llama", lambda c: setattr(c._cells[0], "keys", mx.zeros((1, 1, 41, 1)))),
    "K3: nobody is tainted": ("llama", lambda c: c._tainted.update({9: 0})),
    "K3: from before the start": ("llama", lambda c: c._tainted.update({1: -1})),
    "K3: from the end": ("llama", lambda c: c._tainted.update({1: c.length(1)})),
    "CS1: nobody is joined": ("lfm2", lambda c: setattr(c._states, "_joined", (1, 9))),
    "CS1: one is joined twice": ("lfm2", lambda c: setattr(c._states, "_joined", (1, 1))),
    "CS1: a row that nobody has": ("lfm2", lambda c: setattr(c._states, "_joined", (1,))),
    "CS2: a state is held twice": ("lfm2", lambda c: c._states._own[2][0].cache.__setitem__(0, mx.zeros((1,)))),
}


@pytest.mark.parametrize("case", BREAKS)
def test_check_finds_each_rule_broken(case: str) -> None:
    kind, broken = BREAKS[case]
    causal = stepped(kind).causal
    causal.check()
    broken(causal)
    with pytest.raises(AssertionError):
        causal.check()


def test_dump_says_what_cells_take_and_who_is_tainted() -> None:
    rows = stepped("llama")
    rows.causal.remove(rows.model, 2, 2, 4)
    lines = rows.causal.dump().splitlines()
    assert lines[0] == f"{rows.causal.nbytes:,} bytes, {rows.causal.nbytes // 40:,} of them per cell"
    assert lines[1:-1] == rows.causal.table.dump().splitlines()
    assert lines[-1] == "  sequence 2 is tainted from 2"
