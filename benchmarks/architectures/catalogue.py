"""Which modules of `mlx_lm.models` are models, which only wrap another's layers, and which cannot be built here.

`ALIASES` is what `wrapped_module` finds; tests hold the two together, so that a new release of mlx-lm shows.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import CacheList, make_prompt_cache

from benchmarks.architectures.kinds import kind_of
from benchmarks.architectures.right_state import STEP_SIZE, Subject
from radixcache import PrefixCache
from runner.models.tiny import architecture, build

#: A module whose layers are those of another, and whose caches are too: counted as the other.
ALIASES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm_moe_dsa": "deepseek_v32",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smollm3": "llama",
    "solar_open": "glm4_moe",
}

#: Modules that are never built beside others in one process: each breaks it or ends it without a Metal device.
REFUSALS = {
    "bitnet": "its linear layers are a Metal kernel, which MLX lacks on a CPU",
    "muse_spark": "its queries and keys go through a Metal kernel, which MLX lacks on a CPU",
    "olmo": "needs the package ai2-olmo, and ends the process that imports it without",
    "phi3small": "writes past the end of an array inside MLX on a CPU: the allocator ends the process",
}

#: Types whose own result depends on where a prompt is cut into forward passes; one token at a time is the same for all.
CUT_SENSITIVE = {
    "plamo3": (
        "its mask lets a token see one more than its windows keep (window_size + 1 of window_size), so that what the "
        "first tokens of a forward pass see depends on where it starts, without any prefix cache"
    ),
}


@cache
def modules() -> tuple[str, ...]:
    """Every module of `mlx_lm.models`, models or not."""
    spec = find_spec("mlx_lm.models")
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return tuple(sorted(file.stem for folder in folders for file in folder.glob("*.py") if file.stem != "__init__"))


@cache
def models() -> tuple[str, ...]:
    """The modules that can be built here, aliases included."""
    return tuple(name for name in modules() if name not in REFUSALS and _is_model(name))


def distinct_models() -> tuple[str, ...]:
    return tuple(name for name in models() if name not in ALIASES)


def wrapped_module(name: str) -> str | None:
    """The module whose layers this one's are, if it is another and that one's caches are all that this one has."""
    model: Any = build(kind_of(name))
    inner = type(model.layers[0]).__module__.rpartition(".")[2]
    if inner == name or not cache_classes(model) <= cache_classes(build(kind_of(inner))):
        return None
    return str(inner)


def cache_classes(model: Any) -> set[str]:
    """The classes of cache that a model's layers have, a CacheList with what is in it."""
    return {class_name(layer) for layer in make_prompt_cache(model)}


def class_name(layer: Any) -> str:
    if isinstance(layer, CacheList):
        return f"CacheList({', '.join(class_name(leaf) for leaf in layer.caches)})"
    return type(layer).__name__


def subject_of(name: str) -> Subject:
    """The model of a module of `mlx_lm.models` or of a variant, in its own caches, ready for the procedure."""
    model: Any = build(kind_of(name))
    return Subject(
        model,
        open_cache=lambda: PrefixCache(model),
        fresh=lambda: list(make_prompt_cache(model)),
        step_size=1 if name in CUT_SENSITIVE else STEP_SIZE,
    )


def _is_model(name: str) -> bool:
    loaded = architecture(name)
    return hasattr(loaded, "Model") and hasattr(loaded, "ModelArgs")
