"""Which way a model decodes several rows, found out by trial, and the attention that its layers call."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache

from radixcache import UnsupportedCacheError
from radixcache.adapters.contract import Spans
from radixcache.groups import passes
from radixcache.groups.attention import NAME, handed_out, serve
from radixcache.groups.batch import Batch, PassError
from radixcache.groups.passes import way_of
from runner.models.tiny import tiny_model
from tests.groups.cold import shared_model


def found(model: Any) -> passes.WayTrial:
    return way_of(model, lambda: make_prompt_cache(model))


def test_what_was_found_is_kept_as_long_as_the_model_lives() -> None:
    model = tiny_model("llama")
    assert found(model) is found(model)
    name = id(model)
    assert name in passes._found
    del model
    gc.collect()
    assert name not in passes._found


def test_a_model_that_is_wrong_every_way_is_refused_by_name_with_the_reasons() -> None:
    class Drifting(llama.Model):  # type: ignore[misc]
        """Answers with what its last caller asked."""

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            self.calls = getattr(self, "calls", 0) + 1
            return super().__call__(inputs, cache=cache) + self.calls

    model = Drifting(shared_model("llama").args)
    with pytest.raises(UnsupportedCacheError, match="cannot be decoded in a batch: segments: logits differ by"):
        found(model)


def test_attention_is_replaced_once_and_passes_on_what_is_not_ours() -> None:
    model = shared_model("llama")
    serve(model)
    first = getattr(llama, NAME)
    serve(model)
    assert getattr(llama, NAME) is first
    assert first.is_served
    keys = mx.ones((1, 1, 3, 4))
    for named in ({}, {"sinks": None}):
        found = first(keys, keys, keys, cache=None, scale=1.0, mask=None, **named)
        assert bool(mx.allclose(found, base.scaled_dot_product_attention(keys, keys, keys, None, 1.0, None)))
    assert not handed_out.by_keys


def test_keys_that_are_read_in_place_and_attended_elsewhere_are_an_error() -> None:
    """What a layer with an attention of its own would compute of stand-ins nobody knows."""
    caches = Batch.of_one(make_prompt_cache(shared_model("llama")), None)
    spans = Spans(0, 0, [None] * len(caches.leaves), 0)

    def fetching(ids: mx.array, cache: Any) -> mx.array:
        cache[0].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
        return mx.zeros((1, 1, 8))

    def masking(ids: mx.array, cache: Any) -> mx.array:
        keys, values = cache[0].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
        return getattr(llama, NAME)(keys, keys, values, cache=None, scale=1.0, mask=mx.array([[True]]))

    serve(shared_model("llama"))
    for model, found in ((fetching, "reads keys outside"), (masking, "mask of its own")):
        with pytest.raises(PassError, match=found):
            caches.forward(model, mx.array([[1]]), [(None, spans)], ours=True)
        assert not handed_out.by_keys
        assert caches.columns.positions == [0]
