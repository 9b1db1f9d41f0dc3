"""A tiny configuration of any architecture of mlx-lm, found from its `ModelArgs`.

A configuration is made field by field. Sizes are known by their names, which most architectures share; a field that has
a default of its own and is no size keeps it; of the others the type decides. What no rule can know (which layers are of
which kind, sizes that hang together, odd names) stands in the table of runner/models/exceptions.py and wins.

Windows and chunks are short enough to wrap within a test's prompt, and layers come in fours, so that every kind of
layer that an architecture mixes occurs.
"""

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import ModuleType
from typing import Any

VOCABULARY_LENGTH = 256
CONTEXT_LENGTH = 32_768
WINDOW_LENGTH = 16
CHUNK_LENGTH = 32
LAYER_COUNT = 4

WIDTH = 64
INNER_WIDTH = 128
EXPERT_WIDTH = 32
HEAD_WIDTH = 32

#: Value of a field by its name, whether it has a default or not.
SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY_LENGTH, "vocab_size num_vocab vocab_size_per_layer_input"),
        (CONTEXT_LENGTH, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
        (WINDOW_LENGTH, "sliding_window sliding_window_size attention_window_size window_size loop_window_size"),
        (CHUNK_LENGTH, "attention_chunk_size"),
        (WIDTH, "hidden_size hidden_dim d_model model_dim n_embd dim_model_base"),
        (INNER_WIDTH, "intermediate_size intermediate_size_mlp dense_intermediate_size ff_intermediate_size"),
        (INNER_WIDTH, "ffn_hidden_size n_inner"),
        (EXPERT_WIDTH, "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size"),
        (EXPERT_WIDTH, "shared_intermediate_size expert_ffn_hidden_size share_expert_dim moe_hidden_size"),
        (HEAD_WIDTH, "head_dim global_head_dim hidden_size_per_head index_head_dim swa_head_dim swa_v_head_dim"),
        (HEAD_WIDTH, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
        (32, "kv_lora_rank q_lora_rank ssm_state_size mamba_d_state state_size"),
        (16, "qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim hidden_size_per_layer_input"),
        # Fewer than a test's prompt has.
        (24, "index_topk"),
        (LAYER_COUNT, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
        (4, "num_attention_heads num_heads n_heads n_head swa_num_attention_heads linear_num_value_heads"),
        (4, "mamba_num_heads mamba_n_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
        (4, "conv_kernel mamba_d_conv conv1d_width linear_conv_kernel_dim"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups swa_num_key_value_heads n_shared_head"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k zero_expert_num"),
        (2, "sliding_window_pattern full_attention_interval layer_group_size num_kv_shared_layers"),
        (2, "linear_num_key_heads index_n_heads loop_num num_loops"),
        (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts n_group n_groups topk_group"),
        (1, "num_expert_group mamba_n_groups"),
        (1, "first_k_dense_replace num_dense_layers decoder_sparse_step moe_layer_freq"),
        (1e-5, "rms_norm_eps"),
        (10_000.0, "rope_theta rope_local_base_freq rotary_emb_base"),
    )
    for name in names.split()
}

#: Fields without a default, by name.
STRINGS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu"}
EMPTY_LISTS = ("mlp_only_layers",)
#: What the dataclass of a nested configuration is called, in the modules that have one of their own.
TEXT_ARGS = ("TextConfig", "TextArgs", "TextModelArgs")
SLIDING_AND_FULL = ("sliding_attention", "full_attention")


def architecture(module: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{module}")


def tiny_config(module: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration from which `ModelArgs.from_dict` of `mlx_lm.models.MODULE` makes a tiny model.

    Args:
        module: name of a module of `mlx_lm.models`.
        overrides: fields that the rules cannot know. Of a nested `text_config` they name the fields inside; its
            `model_type` is the module whose `ModelArgs` it belongs to, if not of this one.
    """
    loaded = architecture(module)
    config = {"model_type": module, **_joined(loaded.ModelArgs, overrides)}
    if "text_config" in {field.name for field in fields(loaded.ModelArgs)}:
        config["text_config"] = _text_config(loaded, overrides.get("text_config", {}))
    return config


def _text_config(loaded: ModuleType, overrides: Mapping[str, Any]) -> dict[str, Any]:
    module = loaded.__name__.rpartition(".")[2]
    inner = overrides.get("model_type", module)
    return {"model_type": inner, **_joined(text_args(module, inner), overrides)}


def text_args(module: str, inner: str | None) -> Any:
    """The dataclass of the text part of `mlx_lm.models.MODULE`, whose own model_type is `inner`."""
    candidates = [architecture(module), architecture(inner or module)]
    found = (getattr(each, name) for each in candidates for name in TEXT_ARGS if hasattr(each, name))
    return next(found, candidates[-1].ModelArgs)


def _joined(args: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Give every field that needs one its value by the rules, then the overrides."""
    values = {field.name: _value(field) for field in fields(args) if field.name != "model_type" and _is_wanted(field)}
    values |= overrides
    if values.get("layer_types", ()) is None and "layer_types" not in overrides:
        values["layer_types"] = [SLIDING_AND_FULL[index % 2] for index in range(values["num_hidden_layers"])]
    return values


def _is_wanted(field: "Field[Any]") -> bool:
    has_default = field.default is not MISSING or field.default_factory is not MISSING
    return field.name in SIZES or field.name == "layer_types" or not has_default


def _value(field: "Field[Any]") -> Any:
    name, kind = field.name, str(field.type)
    if name in SIZES:
        return SIZES[name]
    if name in STRINGS:
        return STRINGS[name]
    if name in EMPTY_LISTS:
        return []
    if "eps" in name:
        return 1e-5
    if "theta" in name:
        return 10_000.0
    if "Optional" in kind or "None" in kind or "ict" in kind:
        return None
    return {"bool": False, "float": 1.0}.get(getattr(field.type, "__name__", kind))
