"""What the layers of a model keep, told by one forward pass that is never evaluated.

MLX knows shape and dtype of an array before there is one: a model of any size is built in a moment, without weights,
and its caches fill with arrays that nobody computes. What they look like is what mlx-lm makes of the configuration.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, List, get_type_hints  # noqa: UP035

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from radixcache.adapters.cache_list import leaves
from radixcache.adapters.registry import adapter_for
from runner.files.excerpt import shortened, shown
from runner.models.configuration import text_args
from runner.models.footprint import INSTEAD, ModelConfigError

#: Tokens of the forward pass: what a layer keeps per token does not depend on it.
PROMPT_LENGTH = 40
#: Far more than any model has; a larger number is a mistake and would take for ever.
MOST_LAYERS = 10_000
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
#: How a dataclass hints at a whole number, and at a list of kinds.
NUMBERS = (int, int | None)
TEXT_LISTS = (list[str], list[str] | None, List[str], List[str] | None)  # noqa: UP006


@dataclass
class KeptState:
    """State of all layers.

    Attributes:
        spans: each array that grows by the token, as (heads, elements per head, bytes per element).
        windows: bytes of one token over all sliding windows, by the windows' length in tokens.
        fixed_bytes: bytes that do not depend on the length.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    windows: dict[int, int] = field(default_factory=dict)
    fixed_bytes: int = 0


def kept_state(config: Mapping[str, Any], dtype: str) -> KeptState:
    """Build the model of a configuration and look at its caches.

    Raises:
        ModelConfigError: the type is not known, a field is missing or wrong, or a layer keeps what has no rule here.
    """
    try:
        with redirect_stdout(sys.stderr):
            model_class, args_class = _get_classes(config)
    except (Exception, SystemExit) as error:  # one module of mlx-lm ends the process where a package is not installed
        raise ModelConfigError(f"model_type {config['model_type']!r} is not known to this mlx-lm. {INSTEAD}") from error
    try:
        _check_fields(args_class, config)
        model = model_class(args_class.from_dict(deepcopy(dict(config))))
        model.set_dtype(getattr(mx, dtype))
        caches = make_prompt_cache(model)
        if caches:
            model(mx.zeros((1, PROMPT_LENGTH), mx.int32), cache=caches)
        found = _state_in(leaves(caches))
    except ModelConfigError as error:
        raise ModelConfigError(f"{error} {INSTEAD}") from error
    except Exception as error:  # mlx-lm checks no configuration: whatever comes is about this one
        raise ModelConfigError(f"{_what_is_wrong(args_class, config, error)} {INSTEAD}") from error
    if not (found.spans or found.windows or found.fixed_bytes):
        raise ModelConfigError(f"model_type {config['model_type']!r}: no layer keeps any state. {INSTEAD}")
    return found


def _state_in(caches: Sequence[Any]) -> KeptState:
    found = KeptState()
    for layer, cache in enumerate(caches):
        adapter = adapter_for(cache, layer)
        if adapter.is_empty(cache):  # a model may leave some unused
            continue
        arrays = adapter.buffers(cache)
        if isinstance(cache, (RotatingKVCache, ChunkedKVCache)):
            tokens = cache.max_size if isinstance(cache, RotatingKVCache) else cache.chunk_size
            token_bytes = sum(array.nbytes // array.shape[2] for array in arrays)
            found.windows[tokens] = found.windows.get(tokens, 0) + token_bytes
        elif isinstance(cache, ArraysCache):
            found.fixed_bytes += sum(array.nbytes for array in arrays)
        elif adapter.is_point:
            raise ModelConfigError(f"layer {layer} is a {type(cache).__name__}, whose size follows no rule known here.")
        else:
            found.spans += [(array.shape[1], array.shape[3], array.itemsize) for array in arrays]
    return found


def _what_is_wrong(args_class: Any, config: Mapping[str, Any], error: Exception) -> str:
    model_type, text = config["model_type"], shortened(str(error), 200)
    said = re.search(r"missing \d+ required positional arguments?: (.+)", text)
    missing = said[1].replace("'", "") if said else _missing(args_class, config)
    if missing is not None:
        part = " or its text part" if config.get("text_config") else ""
        return f"model_type {model_type!r}{part} has no {missing}; wanted it."
    return f"model_type {model_type!r}: its fields do not fit together ({type(error).__name__}: {text})."


# Fields --------------------------------------------------------------------------------------------------------------


def _check_fields(args_class: Any, config: Mapping[str, Any]) -> None:
    """Find what is plainly wrong before a model is built of it, in the text part of a multimodal one too.

    mlx-lm's own hints are not to be trusted further: some fields are lists or null where they name a number.
    """
    for part_class, part in _parts(args_class, config):
        for name in LAYER_COUNTS:
            if isinstance(part.get(name), int) and part[name] > MOST_LAYERS:
                raise ModelConfigError(f"there are {part[name]} layers; wanted at most {MOST_LAYERS:,}.")
        for name, hint in get_type_hints(part_class).items():
            value = part.get(name)
            if hint in NUMBERS and isinstance(value, str):
                raise ModelConfigError(f"{name} is {shown(value)}; wanted a whole number.")
            is_text = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
            if hint in TEXT_LISTS and not (is_text or value is None):
                raise ModelConfigError(f"{name} is {shown(value)}; wanted a list of kinds.")


def _missing(args_class: Any, config: Mapping[str, Any]) -> str | None:
    """A number that is null and has no default."""
    for part_class, part in _parts(args_class, config):
        hints = get_type_hints(part_class)
        for each in fields(part_class):
            if hints[each.name] is int and each.default is MISSING and part.get(each.name, 0) is None:
                return each.name
    return None


def _parts(args_class: Any, config: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    yield args_class, config
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "text_config" in {each.name for each in fields(args_class)}:
        # What a text part calls itself need be no module of mlx-lm.
        with suppress(ImportError):
            yield text_args(args_class.__module__.rpartition(".")[2], inner.get("model_type")), inner
