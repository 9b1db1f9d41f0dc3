"""Bytes told by a lazy forward pass equal those that the cache layer counts, and those of real forward passes.

The models here are never evaluated: MLX knows shape and dtype of an array before there is one. So they can be of any
size and dtype, and every field can be varied.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from benchmarks.architectures.catalogue import models
from benchmarks.architectures.document import DOCUMENT, rows_in
from benchmarks.architectures.kinds import kind_of
from benchmarks.architectures.right_state import STEP_SIZE
from radixcache.layers.layout import Layout
from runner.models import ModelConfigError
from runner.models.sizes import model_bytes, read_model_bytes
from runner.models.tiny import CHUNK_LENGTH, architecture

#: Measured, but not told: its cache grows by compressed groups inside a class of its own.
UNKNOWN = ("deepseek_v41",)
#: Its chunks hold up to one forward pass more than a chunk.
CHUNKED = ("llama4",)
KNOWN = [name for name in models() if name not in UNKNOWN]
PROMPT_LENGTH = 40

#: Fields to double, one at a time.
VARIED = """
    hidden_size hidden_dim n_embd d_model model_dim head_dim kv_lora_rank num_key_value_heads num_kv_heads n_kv_heads
    num_attention_groups num_attention_heads num_heads n_heads n_head global_head_dim kv_channels qk_rope_head_dim
    qk_nope_head_dim v_head_dim index_head_dim swa_head_dim swa_v_head_dim swa_num_key_value_heads sliding_window
    window_size linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim conv_kernel mamba_d_conv mamba_d_state mamba_d_head mamba_head_dim mamba_n_heads
    mamba_num_heads ssm_state_size state_size intermediate_size mamba_n_groups n_groups conv1d_width conv_L_cache
    hidden_size_per_head mamba_expand num_loops attention_window_size loop_window_size sliding_window_size n_shared_head
"""


def lazy_model(module: str, config: Mapping[str, Any], dtype: mx.Dtype) -> Any:
    loaded = architecture(module)
    model = loaded.Model(loaded.ModelArgs.from_dict(deepcopy(dict(config))))
    model.set_dtype(dtype)
    return model


def measured(model: Any, kv_bits: int | None = None, kv_group_size: int = 64) -> tuple[int, int]:
    """Bytes per token and per checkpoint with full windows, of a model that has seen a prompt and computed nothing."""
    layout = Layout(lambda: make_prompt_cache(model), kv_bits, kv_group_size)
    caches = layout.fresh()
    model(mx.array([list(range(PROMPT_LENGTH))]), cache=caches)
    checkpoint_bytes = 0
    for cache, adapter in layout.leaves(caches):
        if adapter.is_empty(cache):
            continue
        if isinstance(cache, RotatingKVCache):
            checkpoint_bytes += cache.max_size * sum(b.nbytes // b.shape[2] for b in adapter.buffers(cache))
        elif adapter.is_point:
            checkpoint_bytes += sum(buffer.nbytes for buffer in adapter.buffers(cache))
    layout.learn(caches)
    return layout.token_bytes, checkpoint_bytes


def worked_out(config: Mapping[str, Any], dtype: str, **more: Any) -> tuple[int, int]:
    found = model_bytes(config, dtype=dtype, **more)
    return found.token_bytes, found.checkpoint_bytes


def test_every_type_that_mlx_lm_has_is_known_but_those_named_here() -> None:
    unknown = []
    for name in models():
        try:
            model_bytes(kind_of(name).config)
        except ModelConfigError:
            unknown.append(name)
    assert tuple(unknown) == UNKNOWN


def test_bytes_equal_those_measured_with_real_forward_passes() -> None:
    rows = {name: row for name, row in rows_in(DOCUMENT.read_text(encoding="utf-8")).items() if row.is_measured}
    for name, row in rows.items():
        if name in UNKNOWN:
            continue
        expected = [int(cell.replace(",", "").replace("-", "0")) for cell in (row.token_bytes, row.checkpoint_bytes)]
        found = worked_out(kind_of(name).config, "float32")
        most = found[1] * (CHUNK_LENGTH + STEP_SIZE) / CHUNK_LENGTH if name in CHUNKED else found[1]
        assert found[0] == expected[0], name
        assert found[1] <= expected[1] <= most, name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in CHUNKED])
def test_bytes_follow_every_field(name: str) -> None:
    kind = kind_of(name)
    compared = 0
    for field in VARIED.split():
        config = deepcopy(dict(kind.config))
        inner = config.get("text_config", config)
        if type(inner.get(field)) is not int:
            continue
        inner[field] *= 2
        try:
            found = measured(lazy_model(kind.module, config, mx.bfloat16))
        except (ValueError, ZeroDivisionError, AssertionError, IndexError, RuntimeError, TypeError):
            continue  # sizes that do not hang together
        assert worked_out(config, "bfloat16") == found, (field, inner[field])
        compared += 1
    assert compared


LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128_256},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"},
}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
GPT2 = kind_of("gpt2").config


def test_a_model_of_any_size_takes_no_memory() -> None:
    model_bytes(LLAMA_8B)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert worked_out(LLAMA_70B, "bfloat16") == (2 * 80 * 8 * 128 * 2, 0)
    assert mx.get_active_memory() == before
    assert mx.get_peak_memory() - before < 1 << 20


def test_a_field_that_mlx_lm_fills_in_may_be_left_out() -> None:
    # As mlx-lm reads it: no heads of keys and values are as many as of queries, a head_dim of 0 is none.
    config = {**LLAMA_8B, "num_key_value_heads": None, "head_dim": 0}
    assert worked_out(config, "bfloat16") == (4 * 131_072, 0)


def test_what_a_text_part_calls_itself_need_be_no_type_of_mlx_lm() -> None:
    for name in ("gemma3n", "llama4"):
        config = deepcopy(dict(kind_of(name).config))
        expected = model_bytes(config)
        config["text_config"]["model_type"] = "text_of_its_own"
        assert model_bytes(config) == expected, name


def test_well_known_models_come_out_as_they_are_known() -> None:
    # 2 (keys, values) x 32 layers x 8 heads x 128 elements x 2 bytes.
    assert worked_out(LLAMA_8B, "bfloat16") == (131_072, 0)
    mla = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert worked_out(mla, "bfloat16") == (61 * 576 * 2, 0)
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024, "intermediate_size": 10_240}
    gemma = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    # 8 and 4 heads where the text part names none; every sixth of the 34 layers attends fully.
    assert worked_out(gemma, "bfloat16") == (5 * 2 * 4 * 256 * 2, 29 * 1024 * 2 * 4 * 256 * 2)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 64), (4, 32), (2, 64), (6, 64), (3, 32)])
def test_quantized_bytes_equal_those_of_mlx_lm(bits: int, group_size: int) -> None:
    kind = kind_of("llama")
    for dtype, text in ((mx.bfloat16, "bfloat16"), (mx.float32, "float32")):
        expected = measured(lazy_model(kind.module, kind.config, dtype), bits, group_size)
        assert worked_out(kind.config, text, kv_bits=bits, kv_group_size=group_size) == expected


def test_windows_are_not_quantized() -> None:
    kind = kind_of("llama_sliding")
    full, quantized = (model_bytes(kind.config, dtype="float32", kv_bits=bits, kv_group_size=32) for bits in (None, 8))
    assert quantized.token_bytes < full.token_bytes
    assert quantized.checkpoint_bytes == full.checkpoint_bytes > 0
    caches = make_prompt_cache(lazy_model("llama", kind.config, mx.float32))
    assert sum(type(cache) is KVCache for cache in caches) == 2


def test_dtype_comes_from_the_configuration(tmp_path) -> None:
    for names, token_bytes in (({"torch_dtype": "float32"}, 262_144), ({"dtype": "float16"}, 131_072), ({}, 131_072)):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "torch_dtype": None, **names}))
        assert read_model_bytes(tmp_path).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "brand_new"}, "model_type 'brand_new' is not known to this mlx-lm."),
        ({**LLAMA_8B, "model_type": "olmo"}, "model_type 'olmo' is not known to this mlx-lm."),
        ({**LLAMA_8B, "model_type": "cache"}, "model_type 'cache' is not known to this mlx-lm."),
        ({"hidden_size": 3}, "model_type is missing; wanted text."),
        ({**LLAMA_8B, "num_hidden_layers": None}, "model_type 'llama' has no num_hidden_layers; wanted it."),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads is str '8'; wanted a whole number"),
        ({**LLAMA_8B, "layer_types": [1]}, "layer_types is list [1]; wanted a list of kinds."),
        ({**LLAMA_8B, "num_attention_heads": 0}, "its fields do not fit together (ZeroDivisionError"),
        ({**LLAMA_8B, "vocab_size": 10**14}, "its fields do not fit together (OverflowError"),
        ({**LLAMA_8B, "model_type": "lfm2"}, "model_type 'lfm2' has no max_position_embeddings, norm_eps, conv_bias"),
        ({"model_type": "gemma3"}, "model_type 'gemma3' has no text_config; wanted it."),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "'gemma3' or its text part has no model_type;"),
        ({**LLAMA_8B, "model_type": "nemotron-nas", "block_configs": [3]}, "do not fit together (ValueError"),
        ({**GPT2, "n_layer": 0}, "model_type 'gpt2': no layer keeps any state."),
        ({"model_type": "deepseek_v41"}, "layer 0 is a LayerCache, whose size is not known."),
        ({**LLAMA_8B, "num_hidden_layers": 10**12}, "there are 1000000000000 layers; wanted at most 10,000."),
        ({**LLAMA_8B, "num_key_value_heads": 0}, "its fields do not fit together (ValueError"),
        ({**LLAMA_8B, "torch_dtype": "auto"}, "dtype is 'auto'; wanted one of"),
    ],
)
def test_what_cannot_be_worked_out_says_how_to_give_it(tmp_path, config: dict[str, Any], message: str) -> None:
    config = dict(kind_of("deepseek_v41").config) if config == {"model_type": "deepseek_v41"} else config
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ModelConfigError) as raised:
        read_model_bytes(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)
    assert "--bytes-per-token" in str(raised.value)


def test_files_and_arguments_that_are_wrong_are_one_line(tmp_path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, message in (("none.json", "cannot be read"), ("broken.json", "not JSON"), ("list.json", "found list")):
        with pytest.raises(ModelConfigError, match=message):
            read_model_bytes(tmp_path / name)
    for arguments, message in (
        ({"kv_bits": 7}, "kv_bits is 7 in groups of 64; wanted one of"),
        ({"kv_bits": 8}, "a head has 96 elements; wanted whole groups of 64"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            model_bytes({**LLAMA_8B, "head_dim": 96}, **arguments)
