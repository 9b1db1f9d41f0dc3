"""The fields of a model's configuration by what they mean, with the defaults that mlx-lm fills in. No MLX.

The text part of a multimodal configuration lies on top of the rest. The outer type decides, as it is what mlx-lm loads;
a type whose layers are those of another goes by the other's name.
Source: mlx_lm.models, mlx-lm 0.32.2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from runner.conversations.conversation import shown


class ModelConfigError(ValueError):
    """A configuration that bytes cannot be worked out from; the message says what to give instead."""


#: How a message ends where a figure has to come from the user.
INSTEAD = "Give the size yourself with --bytes-per-token (and --bytes-per-checkpoint)."
#: Far more than any model has; a larger number is a mistake and would take for ever.
MOST_LAYERS = 10_000


class Config:
    """A model's configuration with the text part of a multimodal one on top, and the defaults of its type below."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        inner = fields.get("text_config")
        inner = inner if isinstance(inner, Mapping) else {}
        named = fields.get("model_type")
        if not isinstance(named, str):
            raise ModelConfigError(f"model_type is {shown(named)}; wanted text. {INSTEAD}")
        # The outer type decides, as it is the one that mlx-lm loads.
        self.model_type = _SAME.get(named, named)
        self.text_type = inner.get("model_type")
        defaults = {**_DEFAULTS.get(self.model_type, {}), **_OUTSIDE.get(named, {})}
        self._fields = {**defaults, **_without_none(fields), **_without_none(inner)}

    def get(self, *names: str, default: int | None = None) -> int:
        """A whole number under the first of these names that is there.

        Raises:
            ModelConfigError: there is none and no default, or it is no whole number.
        """
        for name in names:
            if name in self._fields:
                return whole_number(self._fields[name], name)
        if default is None:
            raise ModelConfigError(f"model_type {self.model_type!r} has no {names[0]}; wanted it. {INSTEAD}")
        return default

    def value(self, name: str, default: Any = None) -> Any:
        """Whatever is under this name."""
        return self._fields.get(name, default)

    def part(self, name: str) -> "Config":
        """A nested group of fields."""
        nested = self.value(name)
        if not isinstance(nested, Mapping):
            raise ModelConfigError(f"{name} is {shown(nested)}; wanted an object. {INSTEAD}")
        part = Config({"model_type": self.model_type})
        part._fields = _without_none(nested)
        return part

    @property
    def layers(self) -> int:
        """Number of layers."""
        layers = self.get("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
        if layers > MOST_LAYERS:
            raise ModelConfigError(f"there are {layers} layers; wanted at most {MOST_LAYERS:,}. {INSTEAD}")
        return layers

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.get("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim")

    @property
    def query_heads(self) -> int:
        return self.get("num_attention_heads", "num_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; as many as of queries where nothing else is said."""
        names = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups")
        return self.get(*names, default=self.query_heads)

    @property
    def head_dim(self) -> int:
        if self.value("head_dim") is not None:
            return self.get("head_dim")
        return self.get("kv_channels", default=self.hidden // self.query_heads)

    def layer_types(self, name: str = "layer_types") -> list[str] | None:
        """The list of layer kinds, or None."""
        kinds = self.value(name)
        if isinstance(kinds, str):
            kinds = list(kinds)
        if kinds is None:
            return None
        if not isinstance(kinds, Sequence) or not all(isinstance(kind, str) for kind in kinds):
            raise ModelConfigError(f"{name} is {shown(kinds)}; wanted a list of kinds. {INSTEAD}")
        return list(kinds)


#: Types whose layers are those of another.
_SAME = {
    "falcon_mamba": "mamba",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "glm_moe_dsa": "deepseek_v32",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "solar_open": "glm4_moe",
    "xverse": "llama",
}

#: Fields of the text part that a multimodal type fills in.
_OUTSIDE: dict[str, dict[str, int]] = {"gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4}}

_LATENT_DEFAULTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"num_hidden_layers": 32, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 2048},
    "bailing_moe_v3": {"num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 128, "layer_group_size": 4}
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "short_conv_kernel_size": 4},
    "cohere2": {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096}
    | {"sliding_window_pattern": 4},
    "deepseek_v2": _LATENT_DEFAULTS,
    "deepseek_v3": _LATENT_DEFAULTS,
    "deepseek_v32": _LATENT_DEFAULTS | {"index_head_dim": 128},
    "falcon_h1": {"num_hidden_layers": 36, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_conv": 4}
    | {"mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 24},
    "gear": {"sliding_window": 512, "conv_L_cache": 3},
    "gemma3_text": {"num_hidden_layers": 26, "num_attention_heads": 4, "head_dim": 256, "num_key_value_heads": 1}
    | {"sliding_window": 512, "sliding_window_pattern": 6},
    "gemma4_text": {"num_hidden_layers": 35, "head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 1}
    | {"num_kv_shared_layers": 20, "sliding_window": 512, "sliding_window_pattern": 5},
    "glm4_moe_lite": {"num_hidden_layers": 47, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "gpt_oss": {"num_hidden_layers": 36, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 64},
    "mixtral": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "nanbeige": {"num_loops": 1},
    "phi": {"num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32},
    "plamo": {"n_shared_head": 8},
    "plamo2": {"num_hidden_layers": 32, "num_key_value_heads": 4, "hidden_size_per_head": 128, "mamba_d_state": 64}
    | {"mamba_d_conv": 4, "mamba_num_heads": 64, "mamba_step": 2},
    "plamo3": {"num_hidden_layers": 32, "num_key_value_heads": 4, "head_dim": 128, "window_size": 2048}
    | {"sliding_window_pattern": 8},
    "qwen": {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 2048, "kv_channels": 128},
    "qwen3_5": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "step3p5": {"sliding_window": 512},
    "talkie": {"num_hidden_layers": 40, "num_attention_heads": 40, "head_dim": 128},
    "youtu_llm": _LATENT_DEFAULTS | {"num_hidden_layers": 32, "num_attention_heads": 16},
}


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A null is a field that is left out."""
    return {name: value for name, value in fields.items() if value is not None}


def whole_number(value: Any, name: str) -> int:
    """A field's value as a whole number, 0 or more.

    Raises:
        ModelConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelConfigError(f"{name} is {shown(value)}; wanted a whole number, 0 or more. {INSTEAD}")
    return value
