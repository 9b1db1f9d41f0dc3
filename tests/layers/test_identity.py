"""What state belongs to: equal for a model that is made again, another one for whatever changes what it computes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache.layers import stored
from radixcache.layers.layout import Layout
from radixcache.layers.stored import state_identities, weights_identity
from radixcache.settings import STORED_BITS
from radixcache.stores.block import Identity
from runner.models.tiny import tiny_model
from tests.adapters.cases import DigestCache


def layout(model: Any, kv_bits: int | None = None, group_size: int = 32) -> list[Any]:
    return Layout(lambda: make_prompt_cache(model), kv_bits, group_size).fresh()


def scale_one(model: Any) -> None:
    model.layers[0].mlp.up_proj.weight *= 1.0001


def add_an_adapter(model: Any) -> None:
    from mlx_lm.tuner.lora import LoRALinear

    model.layers[0].self_attn.q_proj = LoRALinear.from_base(model.layers[0].self_attn.q_proj)


def negated_row(model: Any) -> None:
    model.model.embed_tokens.weight[1] *= -1.0


def other_layer_types(model: Any) -> None:
    model.model.layer_types = ["sliding_attention", *model.model.layer_types[1:]]


def half(model: Any) -> None:
    model.set_dtype(mx.bfloat16)


def other_arguments(model: Any) -> None:
    model.args.rope_theta = 5.0


def one_row(model: Any) -> None:
    model.model.embed_tokens.weight[37] += 1.0


def other_setting(model: Any) -> None:
    model.layers[1].self_attn.rope.base *= 2


@pytest.mark.parametrize(
    "change",
    [
        scale_one,
        one_row,
        negated_row,
        other_layer_types,
        add_an_adapter,
        half,
        nn.quantize,
        other_arguments,
        other_setting,
    ],
)
def test_what_changes_a_model_changes_its_identity(change: Callable[[Any], object]) -> None:
    model = tiny_model("llama")
    before = weights_identity(model)
    assert before == weights_identity(tiny_model("llama"))
    assert before.model == "llama"
    change(model)
    assert weights_identity(model).digest != before.digest


def test_the_scale_of_an_adapter_counts_and_arguments_by_the_name_of_config_and_a_pass_does_not() -> None:
    adapted = tiny_model("llama")
    add_an_adapter(adapted)
    before = weights_identity(adapted)
    adapted.layers[0].self_attn.q_proj.scale *= 2
    assert weights_identity(adapted).digest != before.digest
    model = tiny_model("plamo2")
    before = weights_identity(model)
    model(mx.array([[1, 2, 3]]))
    assert weights_identity(model) == before
    model.config.rms_norm_eps = 0.5
    assert weights_identity(model).digest != before.digest
    found = set()
    for theta in (1e4, 1e6):
        model = tiny_model("llama")
        del model.model.args
        for layer in model.layers:
            del layer.args
        model.args = SimpleNamespace(model_type="llama", rope_theta=theta)
        found.add(weights_identity(model).digest)
    assert len(found) == 2


def test_models_that_make_state_together_are_told_apart_by_all_and_their_order() -> None:
    one, other = tiny_model("llama"), tiny_model("llama", 1)
    found = {weights_identity(*models).digest for models in ((one,), (other,), (one, other), (other, one))}
    assert len(found) == 4
    assert weights_identity(one, other, name="pair").model == "pair"


def test_caches_quantization_versions_and_exactness_count(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    def found() -> list[bytes]:
        given = [(layout(llama), "a"), (layout(llama, 8), "a"), (layout(llama, 4), "a"), (layout(llama, 8, 64), "a")]
        given += [(layout(tiny_model("mamba2")), "a"), (layout(llama), "b")]
        exact, *_ = state_identities(layout(llama), None, "a", exact=True)
        rounded = state_identities(layout(llama), None, "a", stored_bits=4)[:2]
        others = [state_identities(each, None, name)[0] for each, name in given]
        return [its.digest for its in (exact, *rounded, *others)]

    before = found()
    assert before == found()
    monkeypatch.setattr(stored, "STATE_VERSION", 2)
    assert not set(before) & set(found())
    monkeypatch.undo()
    assert len(set(before)) == len(before)


def test_another_mlx_lm_reads_state_unless_a_class_hands_it_out_itself_or_bits_count(
    monkeypatch: Any, llama: Any
) -> None:
    def found() -> list[Identity]:
        caches = (layout(llama), layout(tiny_model("mamba2")), [DigestCache()])
        return [
            *(state_identities(each, None, "a")[0] for each in caches),
            *state_identities(caches[0], None, "a", exact=True),
        ]

    before, here = found(), metadata.version("mlx-lm")
    monkeypatch.setattr(stored, "version", lambda name: "0.99.0")
    is_same = [one.digest == other.digest for one, other in zip(before, found(), strict=True)]
    assert is_same == [True, True, False, False]
    assert [each.maker for each in (before[0], found()[0])] == [f"mlx-lm {here}", "mlx-lm 0.99.0"]


def test_what_is_given_stands_for_the_model(llama: Any) -> None:
    (own,) = state_identities(layout(llama), llama, None)
    (mine,) = state_identities(layout(llama), llama, "mine")
    assert [own] == state_identities(layout(llama), None, weights_identity(llama))
    assert own.digest != mine.digest
    assert mine.model == "mine"
    assert state_identities(layout(llama), None, b"mine") == state_identities(layout(llama), None, Identity(b"mine"))


def test_state_in_more_bits_may_be_read_and_state_in_fewer_may_not(llama: Any) -> None:
    four, eight, all_of_them = (state_identities(layout(llama), None, "a", stored_bits=bits) for bits in STORED_BITS)
    assert (four[1:], eight[1:], len(all_of_them)) == (eight, all_of_them, 1)
