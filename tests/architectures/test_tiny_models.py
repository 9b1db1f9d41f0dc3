"""The tiny models tell a right state from a wrong one, in every layer; tests that compare logits rest on this."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.deepseek_v41 import LayerCache
from numpy.typing import NDArray

from benchmarks.architectures.right_state import ROUNDING, WRONG_STATE
from benchmarks.architectures.temporal import largest_difference, leaf_at, places, stand_in
from runner.models.tiny import TINY_KINDS, VOCABULARY_LENGTH, tiny_model

PROMPT_LENGTH = 52
PROMPT, OTHER_PROMPT = np.random.default_rng(1).integers(0, VOCABULARY_LENGTH, (2, PROMPT_LENGTH))
NEXT_TOKEN = 77


#: Full attention, a sliding window, recurrent layers beside attention, and a class of its own.
FAST = {"llama", "gemma4_text", "falcon_h1", "deepseek_v41"}


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST)) for k in sorted(TINY_KINDS)]
)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def prefilled(model: Any) -> tuple[list[Any], list[Any]]:
    """Caches that hold either prompt, to be copied before anything is fed to them."""
    return _prefilled(model, PROMPT), _prefilled(model, OTHER_PROMPT)


@pytest.fixture(scope="module")
def right(model: Any, prefilled: tuple[list[Any], list[Any]]) -> NDArray[Any]:
    """The logits behind the prompt, which went through the model in one pass."""
    return _next_logits(model, deepcopy(prefilled[0]))


def test_prefill_in_chunks_gives_the_logits_of_one_pass(model: Any, right: NDArray[Any]) -> None:
    in_chunks = _next_logits(model, _prefilled(model, PROMPT, (32, 7, 7, *[1] * 6)))
    assert largest_difference(in_chunks, right) < ROUNDING


def test_the_state_of_another_prompt_in_any_one_place_changes_the_next_logits(
    model: Any, right: NDArray[Any], prefilled: tuple[list[Any], list[Any]]
) -> None:
    for place in places(make_prompt_cache(model)):
        caches, others = deepcopy(prefilled)
        stand_in(caches, others, place)
        assert largest_difference(_next_logits(model, caches), right) > WRONG_STATE, place


def test_every_parameter_is_float32_and_none_is_constant(model: Any) -> None:
    for name, value in _parameters(model).items():
        assert value.dtype == mx.float32, name
        assert value.size == 1 or np.std(np.array(value)) > 0, name


def test_every_cache_class_of_mlx_lm_is_some_kinds() -> None:
    caches = {kind: make_prompt_cache(tiny_model(kind)) for kind in TINY_KINDS}
    classes = {type(leaf_at(layers, place)) for layers in caches.values() for place in places(layers)}
    assert classes == {ArraysCache, ChunkedKVCache, KVCache, LayerCache, RotatingKVCache}
    nested = {
        tuple(type(leaf) for leaf in layer.caches)
        for layers in caches.values()
        for layer in layers
        if isinstance(layer, CacheList)
    }
    assert nested == {(KVCache, KVCache), (ArraysCache, KVCache), (ArraysCache, RotatingKVCache)}
    # Layers that share another's cache: fewer caches than layers. A cache that is no layer's: more.
    assert len(caches["gemma3n"]) < len(tiny_model("gemma3n").layers)
    assert len(caches["longcat_flash_ngram"]) > len(tiny_model("longcat_flash_ngram").layers)


def _prefilled(model: Any, tokens: NDArray[np.int64], lengths: Sequence[int] = (PROMPT_LENGTH,)) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    for chunk in np.split(tokens, np.cumsum(lengths)[:-1]):
        mx.eval(model(mx.array(chunk[None]), cache=caches))
    return caches


def _next_logits(model: Any, caches: list[Any]) -> NDArray[Any]:
    return np.array(model(mx.array([[NEXT_TOKEN]]), cache=caches)[0, -1])


def _parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))
