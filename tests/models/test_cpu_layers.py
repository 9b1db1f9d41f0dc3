"""The layers for CPUs give what those of mlx.nn give, and only models that gain from them have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama

from radixcache.groups.attention import BLOCK_TOKENS, NAME, handed_out, serve
from radixcache.layers.shift import rotation_of
from runner.models import cpu_layers
from runner.models.cpu_layers import (
    BLOCK_PRODUCT,
    BLOCK_WEIGHT,
    MOST_ROWS,
    POSITIONS,
    BlockEmbedding,
    BlockLinear,
    block_count,
)
from runner.models.load import load_model
from tests.memory import active_bytes


@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("outputs", "inputs"), [(3000, 256), (1021, 600), (7, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_blocks_is_the_product(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    plain = nn.Linear(inputs, outputs, bias)
    x = mx.random.normal((rows, 1, inputs))
    wanted = plain(x)
    plain.__class__ = BlockLinear
    found = plain(x)
    assert found.shape == wanted.shape
    assert mx.allclose(found, wanted, atol=1e-4)
    table = nn.Embedding(outputs, inputs)
    wanted = table.as_linear(x[:, 0])
    table.__class__ = BlockEmbedding
    assert mx.allclose(table.as_linear(x[:, 0]), wanted, atol=1e-4)


@pytest.fixture
def on_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let OpenBLAS state another kernel."""

    def choose(kernel: str) -> None:
        monkeypatch.setattr(cpu_layers, "blas_kernel", lambda: kernel)
        block_count.cache_clear()

    yield choose
    block_count.cache_clear()


def test_blocks_are_equal_and_small_and_no_more_than_needed(on_kernel: Callable[[str], None]) -> None:
    on_kernel("SkylakeX")
    assert block_count(49_152, 576, 1) == 64
    for rows in range(1, MOST_ROWS + 1):
        count = block_count(1536, 576, rows)
        assert 1536 % count == 0
        assert 1536 // count * 576 * rows <= BLOCK_PRODUCT < 1536 // (count // 2) * 576 * rows
    assert block_count(1536, 576, MOST_ROWS + 1) == block_count(1536, 576, 0) == block_count(64, 64, 1) == 1
    assert block_count(3, BLOCK_PRODUCT + 1, 1) == 1, "no block is small"


def test_without_kernels_for_small_products_only_large_weights_have_blocks(on_kernel: Callable[[str], None]) -> None:
    on_kernel("Zen")
    assert [block_count(49_152, 384, rows) for rows in (1, MOST_ROWS, MOST_ROWS + 1)] == [24, 24, 1]
    assert BLOCK_WEIGHT >= 49_152 // 24 * 384
    assert block_count(1536, 576, 1) == 1


@pytest.mark.parametrize(("kernel", "is_used"), [("SkylakeX", True), ("Zen", True), ("", False)])
def test_a_model_uses_blocks_if_it_multiplies_with_openblas(
    monkeypatch: pytest.MonkeyPatch, on_kernel: Callable[[str], None], kernel: str, is_used: bool
) -> None:
    on_kernel("")
    plain = load_model("tiny").model
    on_kernel(kernel)
    monkeypatch.setattr(cpu_layers, "BLOCK_PRODUCT", 512)
    monkeypatch.setattr(cpu_layers, "BLOCK_WEIGHT", 512)
    model = load_model("tiny").model
    kinds = {type(module) for module in model.modules()}
    assert (BlockLinear in kinds, BlockEmbedding in kinds, nn.Linear in kinds) == (is_used, is_used, not is_used)
    ids = mx.array([[5, 3, 7]])
    assert mx.allclose(model(ids), plain(ids), atol=1e-4)


def test_weights_that_are_not_float32_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layers, "blas_kernel", lambda: "SkylakeX")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.layers[0].set_dtype(mx.bfloat16)
    cpu_layers.use_cpu_layers(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, BlockLinear]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_rotations_are_those_of_mlx_to_the_bit(scale: float) -> None:
    plain = nn.RoPE(16, base=10_000.0, scale=scale)
    layers = [nn.RoPE(16, base=10_000.0, scale=scale) for _ in range(3)]
    other = nn.RoPE(16, base=500.0)
    cpu_layers.use_cpu_layers(nn.Sequential(*layers, other))
    assert len({id(layer.angles) for layer in layers}) == 1
    for offset, tokens in [(0, 5), (5, 1), (6, 3), (4, 1), (POSITIONS - 1, 1), (POSITIONS - 3, 7), (POSITIONS, 1)]:
        x = mx.random.normal((2, 3, tokens, 16))
        wanted = plain(x, offset=offset)
        for layer in layers:
            assert mx.array_equal(layer(x, offset=offset), wanted)
    x = mx.random.normal((2, 3, 1, 16))
    assert mx.array_equal(other(x, offset=4), nn.RoPE(16, base=500.0)(x, offset=4))


@pytest.mark.parametrize("tokens", [1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 7])
@pytest.mark.parametrize("before", [0, 90])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "bool of rows", "later tokens", "additive", "bfloat16"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_with_powers_is_that_of_mlx(
    monkeypatch: pytest.MonkeyPatch, tokens: int, before: int, rows: int, kind: str, has_sinks: bool
) -> None:
    monkeypatch.setattr("radixcache.groups.attention.IS_X86", True)
    monkeypatch.setattr("radixcache.groups.attention.FEWEST_POWERS", 1)
    columns, dtype = before + tokens, mx.bfloat16 if kind == "bfloat16" else mx.float32
    queries = mx.random.normal((rows, 6, tokens, 16)).astype(dtype)
    keys, values = (mx.random.normal((rows, 2, columns, size)).astype(dtype) for size in (16, 8))
    seen = base.create_causal_mask(tokens, before, window_size=3)
    mask = {
        "none": None,
        "causal": "causal",
        "bool": seen,
        "bool of rows": mx.broadcast_to(seen, (rows, 1, tokens, columns)),
        "later tokens": mx.ones((tokens, columns), mx.bool_),
        "additive": mx.where(seen, 0.5, -mx.inf),
        "bfloat16": "causal",
    }[kind]
    sinks = mx.random.normal((6,)).astype(dtype) if has_sinks else None
    stock = base.scaled_dot_product_attention
    wanted = stock(queries, keys, values, None, scale=0.3, mask=mask, sinks=sinks)
    found = cpu_layers.with_powers(stock)(queries, keys, values, None, 0.3, mask, sinks=sinks)
    assert found.dtype == wanted.dtype
    assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_attention_is_replaced_once_and_leaves_rows_of_groups_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcache.groups.attention.IS_X86", True)
    monkeypatch.setattr(llama, NAME, base.scaled_dot_product_attention)
    model = load_model("tiny").model
    first = getattr(llama, NAME)
    assert first is not base.scaled_dot_product_attention
    load_model("tiny")
    assert getattr(llama, NAME) is first
    # Also where a group has replaced it before.
    monkeypatch.setattr(llama, NAME, base.scaled_dot_product_attention)
    serve(model)
    load_model("tiny")
    served = getattr(llama, NAME)
    x = mx.random.normal((1, 2, 1, 8))
    monkeypatch.setitem(handed_out.by_keys, id(x), lambda *_, **__: "the group's")
    assert served(x, x, x, None, scale=1.0, mask=None) == "the group's"


def test_a_pass_leaves_no_bytes_behind() -> None:
    model = load_model("tiny:llama").model
    model(mx.array([[5, 3, 7]]))
    before = active_bytes()
    for tokens in ([5], [5, 3], [5, 3, 7, 9]):
        mx.eval(model(mx.array([tokens])))
    assert active_bytes() == before


def test_rotations_of_offsets_in_an_array_are_never_reused() -> None:
    plain, layer = nn.RoPE(8), nn.RoPE(8)
    cpu_layers.use_cpu_layers(nn.Sequential(layer))
    offsets, x = mx.array([3, 9]), mx.random.normal((2, 1, 1, 8))
    for _ in range(2):
        assert mx.array_equal(layer(x, offset=offsets), plain(x, offset=offsets))
        offsets += 2  # the same object
    wide = mx.random.normal((1, 1, 2, 12))
    assert mx.array_equal(layer(wide, offset=3), plain(wide, offset=3)), "only a part is rotated"


def test_a_context_shift_knows_how_the_layers_rotate() -> None:
    plain, layer = nn.RoPE(8, base=500.0, scale=0.5), nn.RoPE(8, base=500.0, scale=0.5)
    cpu_layers.use_cpu_layers(nn.Sequential(layer))
    assert type(layer) is cpu_layers.SharedRoPE
    assert rotation_of(layer) == rotation_of(plain)


def test_traditional_rotations_stay_as_they_are() -> None:
    layer = nn.RoPE(8, traditional=True)
    cpu_layers.use_cpu_layers(nn.Sequential(layer))
    assert type(layer) is nn.RoPE
