"""What a CausalCache does with calls that make no sense, and with models that fail: an error, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.architectures.kinds import kind_of
from radixcache.cells.causal import CausalCache
from radixcache.errors import CacheFullError, UnsupportedCacheError
from runner.models.tiny import VOCABULARY_LENGTH, build, tiny_model
from tests import inside
from tests.cells.causal_rows import ROUNDING, Rows, shared_model, words

CAPACITY = 40


def busy(model: Any) -> Rows:
    """Sequences 1 and 2 with tokens, in cells out of order, and 3 without."""
    rows = Rows(model, CAPACITY)
    rows.join(1, words(1, 5))
    rows.join(2, words(2, 7))
    rows.prefill(1, words(3, 4))
    rows.causal.add(3)
    rows.tokens[3] = []
    rows.step({1: 1, 2: 2})
    return rows


def unharmed(rows: Rows) -> None:
    """The next steps are right, for all who are there."""
    rows.check()
    rows.step({1: 10, 2: 11})
    rows.prefill(3, words(6, 4))
    rows.step({3: 1, 2: 12, 1: 13})
    rows.check()
    assert rows.error <= ROUNDING


Call = Callable[[CausalCache, Any], object]
NONSENSE: dict[str, tuple[Call, str]] = {
    "add twice": (lambda c, m: c.add(1), "exists already"),
    "free unknown": (lambda c, m: c.free(9), "no sequence 9"),
    "step unknown": (lambda c, m: c.step(m, [1, 9], [1, 2]), "no sequence 9"),
    "step one without tokens": (lambda c, m: c.step(m, [1, 3], [1, 2]), "no tokens yet"),
    "step twice": (lambda c, m: c.step(m, [1, 2, 1], [1, 2, 3]), "twice"),
    "step nobody": (lambda c, m: c.step(m, [], []), "empty"),
    "step nobody lazily": (lambda c, m: c.step(m, [], mx.array([], dtype=mx.int32)), "at least one"),
    "too few tokens": (lambda c, m: c.step(m, [1, 2], [1]), "one token for each"),
    "too many tokens": (lambda c, m: c.step(m, [1, 2], mx.array([[1, 2], [3, 4]])), "one token for each"),
    "logits for tokens": (lambda c, m: c.step(m, [1, 2], mx.array([0.5, 2.0])), "wanted integers"),
    "text for tokens": (lambda c, m: c.step(m, [1, 2], "ab"), "encode the text"),
    "step past the vocabulary": (lambda c, m: c.step(m, [1, 2], [1, VOCABULARY_LENGTH]), "wanted a token id"),
    "prefill nothing": (lambda c, m: c.prefill(m, 3, []), "empty"),
    "prefill rows": (lambda c, m: c.prefill(m, 3, mx.array([[1, 2]])), "dimensions"),
    "prefill fractions": (lambda c, m: c.prefill(m, 3, [0.5]), "integer"),
    "prefill more than capacity": (lambda c, m: c.prefill(m, 3, [1] * (CAPACITY + 1)), "never fits"),
    "share to one with tokens": (lambda c, m: c.copy_prefix(1, 2, 10), "has 8 tokens"),
    "remove of unknown": (lambda c, m: c.remove(m, 9, 0, 1), "no sequence 9"),
    "room for too much": (lambda c, m: c.defragment(CAPACITY + 1), "wanted 1 to"),
}
SPANS = {
    "share more than there is": (lambda c, m: c.copy_prefix(1, 3, 11), "no prefix of 11"),
    "remove behind the end": (lambda c, m: c.remove(m, 1, 8, 11), "is outside"),
}


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_nonsense_is_refused_and_changes_nothing(kind: str) -> None:
    rows = busy(shared_model(kind))
    before = inside.table_fields(rows.causal.table)
    for name, (call, message) in (NONSENSE if rows.has_states else NONSENSE | SPANS).items():
        with pytest.raises(ValueError, match=message):
            call(rows.causal, rows.model)
        assert inside.table_fields(rows.causal.table) == before, name
    unharmed(rows)


@pytest.mark.parametrize("kind", ["llama", "gpt_bigcode"])
def test_what_does_not_fit_is_refused_with_the_numbers_until_someone_leaves(kind: str) -> None:
    rows = Rows(shared_model(kind), capacity=20)
    for sequence in range(3):
        rows.join(sequence, words(sequence, 6))
    for call in (
        lambda: rows.causal.step(rows.model, [0, 1, 2], [1, 2, 3]),
        lambda: rows.causal.prefill(rows.model, 1, [1, 2, 3]),
    ):
        with pytest.raises(CacheFullError, match="18 of 20 cells used, 2 free") as caught:
            call()
        assert caught.value.wanted == 3
        rows.check()
    rows.step({0: 4, 2: 5})
    rows.leave(1)
    rows.step({0: 6, 2: 7})
    assert rows.error <= ROUNDING


class Fuse:
    """Makes a layer raise in its n-th call from now on, after the layers before it have written."""

    def __init__(self, layer: Any) -> None:
        self.calls_left, self.error = -1, BaseException()
        kind, fuse = type(layer), self

        class Fused(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                fuse.calls_left -= 1
                if fuse.calls_left == 0:
                    raise fuse.error
                return super().__call__(*args, **kwargs)

        layer.__class__ = Fused

    def fail(self, calls: int, error: BaseException) -> None:
        self.calls_left, self.error = calls, error


@pytest.mark.parametrize(
    ("kind", "error"), [("llama", KeyboardInterrupt), ("llama_sliding", RuntimeError), ("falcon_h1", RuntimeError)]
)
def test_a_pass_that_fails_in_any_layer_leaves_no_trace(kind: str, error: type[BaseException]) -> None:
    model = tiny_model(kind)
    for layer in model.layers:
        rows = busy(model)
        failing = Fuse(layer)
        before = inside.table_fields(rows.causal.table)
        for call in (
            lambda rows=rows: rows.causal.step(rows.model, [2, 1], [3, 4]),
            lambda rows=rows: rows.causal.step(rows.model, [1], [4]),
            lambda rows=rows: rows.causal.prefill(rows.model, 3, words(4, 6)),
            lambda rows=rows: rows.causal.prefill(rows.model, 1, words(4, 6)),
        ):
            failing.fail(1, error())
            with pytest.raises(error):
                call()
            assert {**inside.table_fields(rows.causal.table), "_stamp": None} == {**before, "_stamp": None}
        unharmed(rows)


def test_a_pass_row_by_row_that_fails_in_the_second_row_takes_back_the_first() -> None:
    rows = Rows(build(kind_of("gpt_bigcode")), CAPACITY)
    rows.join(1, words(1, 5))
    rows.join(2, words(2, 7))
    rows.step({1: 1, 2: 2})
    failing = Fuse(rows.model.layers[1])
    failing.fail(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rows.causal.step(rows.model, [1, 2], [3, 4])
    assert (rows.causal.length(1), rows.causal.length(2)) == (6, 8)
    rows.step({2: 5, 1: 6})
    assert rows.error <= ROUNDING
    rows.check()


def test_a_failure_in_the_trial_itself_is_passed_on_and_the_next_call_works() -> None:
    rows = Rows(tiny_model("llama"), CAPACITY)
    rows.join(1, words(1, 5))
    failing = Fuse(rows.model.layers[1])
    rows.causal.add(2)
    rows.tokens[2] = []
    failing.fail(1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rows.causal.prefill(rows.model, 2, [1, 2])
    rows.check()
    rows.prefill(2, [1, 2])
    rows.step({1: 3, 2: 4})
    assert rows.error <= ROUNDING


def test_another_model_is_refused_while_there_is_state() -> None:
    rows, stranger = busy(shared_model("llama")), tiny_model("llama", seed=5)
    for call in (
        lambda: rows.causal.step(stranger, [1, 2], [1, 2]),
        lambda: rows.causal.step(stranger, [1], [1]),
        lambda: rows.causal.prefill(stranger, 3, [1]),
        lambda: rows.causal.steps_together(stranger),
    ):
        with pytest.raises(ValueError, match="state of another model"):
            call()
    unharmed(rows)


def test_an_empty_cache_takes_another_model_with_the_same_layers_and_tries_it_anew() -> None:
    first, second = build(kind_of("gemma2")), build(kind_of("gemma"))
    second.set_dtype(mx.bfloat16)
    causal = CausalCache(first, capacity=CAPACITY)
    assert not causal.steps_together(first)
    causal.add(1)
    causal.prefill(first, 1, [1, 2, 3])
    causal.free(1)
    assert causal.steps_together(second)
    causal.add(1)
    causal.prefill(second, 1, [1, 2, 3])
    assert {buffer.dtype for buffer in causal.state} == {mx.bfloat16}
    causal.free(1)
    before = causal.nbytes
    by_slot = build(kind_of("minimax_m3_vl"))
    for refused, why in ((tiny_model("gemma3_text"), "other layers"), (by_slot, "blocks of neighbouring slots")):
        with pytest.raises((ValueError, UnsupportedCacheError), match=why):
            causal.steps_together(refused)
        # The buffers and what was found out stay those of the model before.
        assert causal.nbytes == before > 0
        assert causal._takes_rows
    assert causal.steps_together(second)


@pytest.mark.parametrize(("kind", "dtype"), [("gemma3_text", mx.float16), ("falcon_h1", mx.bfloat16)])
def test_half_precision_rows_are_those_of_each_alone_but_for_rounding(kind: str, dtype: mx.Dtype) -> None:
    model = tiny_model(kind)
    model.set_dtype(dtype)
    rows = Rows(model, capacity=90)
    for sequence in range(3):
        rows.join(sequence, words(sequence, 12 + 7 * sequence))
    for token in range(4):
        rows.step({0: token, 2: token + 1, 1: token + 2})
    assert {buffer.dtype for layer in rows.causal._cells for buffer in layer.state} == {dtype}
    scale = max(float(mx.abs(logits).max()) for found in rows._found.values() for _, logits in found)
    assert rows.error / scale <= (1e-2 if dtype == mx.float16 else 6e-2)
    rows.check()


def test_a_row_that_is_cancelled_between_two_lazy_steps_takes_nothing_from_the_others() -> None:
    rows = Rows(shared_model("llama"), CAPACITY)
    for sequence in range(3):
        rows.join(sequence, words(sequence, 5 + sequence))
    first = rows.causal.step(rows.model, [0, 1, 2], mx.array([3, 4, 5]))
    rows.causal.free(1)
    rows.causal.add(9)
    late = rows.causal.prefill(rows.model, 9, words(9, 12))  # over the cells of 1, before anything was evaluated
    chosen = mx.argmax(first[mx.array([2, 0]), -1], axis=-1)
    second = rows.causal.step(rows.model, [2, 0], chosen)
    for sequence in range(3):
        rows.note(sequence, [3 + sequence], first[sequence])
    for row, sequence in enumerate((2, 0)):
        rows.note(sequence, chosen[row : row + 1].tolist(), second[row])
    rows.tokens[9] = []
    rows.note(9, words(9, 12), late[0])
    assert rows.error <= ROUNDING


def test_a_callable_may_come_first_and_the_model_after_it() -> None:
    model = shared_model("llama")
    causal = CausalCache(caches=lambda: make_prompt_cache(model), capacity=CAPACITY)
    causal.add(1)
    causal.prefill(lambda ids, cache: model(ids, cache=cache), 1, [1, 2, 3])
    logits = causal.step(model, [1], [4])
    expected = model(mx.array([[1, 2, 3, 4]]))[:, -1:]
    assert float(mx.abs(logits - expected).max()) < 1e-5
