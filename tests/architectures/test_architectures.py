"""Every architecture of mlx-lm gets the state of a cold run from the cache, and docs/architectures.md says so.

The procedure is in benchmarks/architectures/right_state.py. It runs for every type that can be built, for every tiny
kind, and for caches of the classes that no tiny kind has. The control shows that the state of another prompt in any one
place moves the same logits far beyond what the tests accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from benchmarks.architectures.__main__ import main
from benchmarks.architectures.catalogue import (
    ALIASES,
    CUT_SENSITIVE,
    REFUSALS,
    distinct_models,
    models,
    modules,
    subject_of,
    wrapped_module,
)
from benchmarks.architectures.document import (
    DOCUMENT,
    Row,
    WrongStateError,
    measured_row,
    power_of_ten_above,
    row_of,
    rows_in,
    without_errors,
)
from benchmarks.architectures.kinds import kind_of
from benchmarks.architectures.right_state import (
    BRANCH_OFFSET,
    PROMPT_A,
    PROMPT_LENGTH,
    ROUNDING,
    SHARED_LENGTH,
    STEP_SIZE,
    WRONG_STATE,
    Subject,
    control,
    fetched_error,
    timeline,
)
from benchmarks.architectures.temporal import (
    LayerCache,
    largest_difference,
    largest_error,
    leaf_at,
    places,
    temporal_state,
)
from radixcache import PrefixCache
from runner.models.tiny import TINY_KINDS, build
from tests.groups.cold import shared_model

#: Types with caches that are never written, and with layers without any cache.
REPRESENTATIVE = {"gear", "nemotron-nas"}
OTHERS = sorted(set(distinct_models()) - set(TINY_KINDS))
#: Two layers of the tiny llama with caches of a class that no tiny kind has, and tokens per forward pass.
VARIANTS: dict[str, tuple[Callable[[], Any], int]] = {
    # Two bit patterns differ by far more than rounding: forward passes of other lengths do not give the same state.
    "llama in 8 bits": (lambda: QuantizedKVCache(group_size=64, bits=8), 1),
    # What a window with `keep` lets a token see depends on how mlx-lm was fed; one token at a time is the same for all.
    "llama in a window that keeps its first 4": (lambda: RotatingKVCache(max_size=24, keep=4), 1),
    "llama in a window too large to wrap": (lambda: RotatingKVCache(max_size=512, keep=4), STEP_SIZE),
    "llama in joined arrays": (ConcatenateKVCache, STEP_SIZE),
}
#: Also full attention, a sliding window, recurrent layers beside attention, a class of its own, and quantized.
FAST = {*REPRESENTATIVE, "llama", "gemma4_text", "falcon_h1", "deepseek_v41", "llama in 8 bits"}
NAMES = [*OTHERS, *sorted(TINY_KINDS), *VARIANTS]


def made(name: str) -> Subject:
    if name not in VARIANTS:
        return subject_of(name)
    kind, (layer, step_size) = kind_of("llama"), VARIANTS[name]
    llama: Any = build(replace(kind, overrides={**kind.overrides, "num_hidden_layers": 2}))

    def fresh() -> list[Any]:
        return [layer() for _ in llama.layers]

    def open_cache() -> PrefixCache:
        in_bits = isinstance(layer(), QuantizedKVCache)
        return PrefixCache(llama, kv_bits=8) if in_bits else PrefixCache(llama, caches=fresh)

    return Subject(llama, open_cache, fresh, step_size)


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each request decode two tokens behind its prompt, as the document's figures do not depend on more."""
    monkeypatch.setattr("benchmarks.architectures.right_state.REPLY_LENGTH", 2)


@cache
def documented() -> dict[str, Row]:
    return rows_in(DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in NAMES])
def test_every_request_gets_the_state_of_a_cold_run_and_the_document_says_so(name: str) -> None:
    subject = made(name)
    found, fetched = timeline(subject), fetched_error(subject) if name in {*OTHERS, *FAST} else 0.0
    assert max(found.state_error, found.logits_error, fetched) < ROUNDING, found
    assert not found.other_replies
    resumed = found.resumed_tokens
    assert min(resumed["A grown"], resumed["B again"], resumed["A again"]) >= PROMPT_LENGTH - 16, resumed
    if found.is_token_exact:
        assert (resumed["B"], resumed["branch"]) == (SHARED_LENGTH, BRANCH_OFFSET), resumed
    if name in OTHERS:
        measured = row_of(name, subject, found, max(found.largest_error, fetched))
        assert without_errors(str(measured)) == without_errors(str(documented()[name]))


# A type whose control shows nothing has no line in the document.
@pytest.mark.parametrize(
    "name",
    [
        *(*sorted(REPRESENTATIVE), "llama in 8 bits", "llama in joined arrays"),
        *(pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in sorted(TINY_KINDS)),
    ],
)
def test_the_state_of_another_prompt_in_any_one_place_would_have_been_noticed(name: str) -> None:
    moved = control(made(name))
    assert moved
    assert min(moved.values()) > WRONG_STATE, moved


@pytest.mark.parametrize("kind", sorted(TINY_KINDS))
def test_every_parameter_of_a_tiny_model_is_float32_and_none_is_constant(kind: str) -> None:
    for name, value in tree_flatten(shared_model(kind).parameters()):
        assert value.dtype == mx.float32, name
        assert value.size == 1 or np.std(np.array(value)) > 0, name


def test_every_cache_class_of_mlx_lm_is_some_kinds() -> None:
    caches = {kind: make_prompt_cache(shared_model(kind)) for kind in TINY_KINDS}
    classes = {type(leaf_at(layers, place)) for layers in caches.values() for place in places(layers)}
    assert classes == {ArraysCache, ChunkedKVCache, KVCache, LayerCache, RotatingKVCache}
    lists = (layer for layers in caches.values() for layer in layers if isinstance(layer, CacheList))
    nested = {tuple(type(leaf) for leaf in layer.caches) for layer in lists}
    assert nested == {(KVCache, KVCache), (ArraysCache, KVCache), (ArraysCache, RotatingKVCache)}
    # Layers that share another's cache: fewer caches than layers. A cache that is no layer's: more.
    assert len(caches["gemma3n"]) < len(shared_model("gemma3n").layers)
    assert len(caches["longcat_flash_ngram"]) > len(shared_model("longcat_flash_ngram").layers)


def test_two_states_with_other_arrays_or_other_shapes_are_infinitely_far_apart() -> None:
    llama = subject_of("llama")
    right, shorter = (temporal_state(llama.cold_caches(tokens)) for tokens in (PROMPT_A, PROMPT_A[:-1]))
    assert largest_error(right, right) == 0
    for other in (shorter, {}):
        assert largest_error(right, other) == float("inf")
    assert largest_error({}, {}) == float("inf"), "no layer holds any state"


def test_at_least_60_distinct_types_go_through_the_procedure() -> None:
    tiny = {kind.module for kind in TINY_KINDS.values()}
    assert tiny | set(OTHERS) == set(distinct_models())
    assert len(distinct_models()) >= 60


def test_every_module_has_a_line_in_the_document() -> None:
    assert sorted(documented()) == sorted(modules())


def test_every_model_in_the_document_was_measured_or_has_a_reason() -> None:
    unmeasured = {name: row.notes for name, row in documented().items() if not row.is_measured}
    assert set(unmeasured) == set(modules()) - set(models())
    assert all(notes == "not a model" for name, notes in unmeasured.items() if name not in REFUSALS)
    assert all(REFUSALS[name] in unmeasured[name] for name in REFUSALS)
    assert all(f"alias of {of}" in documented()[name].notes for name, of in ALIASES.items())


@pytest.mark.slow
def test_the_aliases_are_the_modules_that_wrap_the_layers_of_another() -> None:
    found = {name: wrapped_module(name) for name in models()}
    assert {name: of for name, of in found.items() if of is not None} == ALIASES


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CUT_SENSITIVE))
def test_a_type_that_is_fed_one_token_at_a_time_needs_it_without_any_cache(name: str) -> None:
    alone = subject_of(name)
    at_once = Subject(alone.model, alone.open_cache, alone.fresh)
    assert (alone.step_size, at_once.step_size) == (1, STEP_SIZE)
    assert largest_difference(at_once.cold(PROMPT_A).logits, alone.cold(PROMPT_A).logits) > ROUNDING


def test_errors_are_rounded_up_to_a_power_of_ten_and_left_out_where_documents_are_compared() -> None:
    assert [power_of_ten_above(error) for error in (0, 9e-6, 1.1e-5, 3e-5)] == ["0", "<1e-5", "<1e-4", "<1e-4"]
    one, other = (str(Row("llama", "3 KVCache", "3,072", "-", "token-exact", error)) for error in ("<1e-5", "<1e-4"))
    assert one != other
    assert without_errors(one) == without_errors(other)
    assert without_errors(one) != without_errors(one.replace("3,072", "3,073"))


def test_a_document_that_says_other_than_measured_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two modules are measured and the document is written, checked, and checked again after a change by hand."""
    monkeypatch.setattr("benchmarks.architectures.document.modules", lambda: ("cache", "gpt2"))
    monkeypatch.setattr("benchmarks.architectures.document.measured_row", cache(measured_row))
    monkeypatch.setattr("benchmarks.architectures.__main__.DOCUMENT", tmp_path / "docs" / "architectures.md")
    assert main(["--check"]) == 1, "there is none yet"
    assert main([]) == 0
    assert main(["--check"]) == 0
    written = (tmp_path / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert [row.type for row in rows_in(written).values()] == ["cache", "gpt2"]
    assert str(documented()["gpt2"]).rpartition("<")[0] in written
    (tmp_path / "docs" / "architectures.md").write_text(written.replace("4 KVCache", "5 KVCache"), encoding="utf-8")
    assert main(["--check"]) == 1
    assert "is stale" in capsys.readouterr().err


def test_a_control_that_shows_nothing_is_an_error_and_not_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.architectures.document.control", lambda subject: {(0, None): 0.0})
    with pytest.raises(WrongStateError, match=r"^gpt2: a wrong state moves the logits by no more than 0"):
        measured_row("gpt2")
