"""Checks of what callers pass as tokens, keys and namespaces, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


def checked_prompt(
    tokens: Any, keys: Any = None, marks: Sequence[int] = (), vocab_size: int | None = None
) -> tuple[TokenIds, NDArray[np.int64]]:
    """Return the ids of a prompt and the keys they go by in the tree, which are the ids where none are given.

    ValueError: ids or keys as `token_ids` and `edge_keys` say; a mark that is no offset in the prompt.
    """
    ids = token_ids(tokens, vocab_size)
    own_keys = ids.astype(np.int64) if keys is None else edge_keys(keys, len(ids))
    if not isinstance(marks, Iterable):
        raise ValueError(f"marks is a {type(marks).__name__}; wanted offsets in the prompt.")
    for mark in marks:
        if isinstance(mark, bool) or not isinstance(mark, Integral):
            raise ValueError(f"mark {mark!r} is a {type(mark).__name__}; wanted an int.")
        if not 0 <= mark <= len(ids):
            raise ValueError(f"mark {mark} is outside the prompt of {len(ids)} tokens.")
    return ids, own_keys


def token_ids(tokens: Any, vocab_size: int | None = None, name: str = "tokens") -> TokenIds:
    """Return `tokens` (list, tuple, np.ndarray or mx.array of integers, one-dimensional) as int32.

    ValueError: empty, not one-dimensional, not integers, or an id outside [0, vocab_size).
    """
    array = _integers(tokens, name)
    ceiling = min(vocab_size or 1 << 31, 1 << 31)
    wrong = (array < 0) | (array >= ceiling)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"{name}[{index}] is {int(array[index])}; wanted a token id in [0, {ceiling}).")
    return array.astype(np.int32)


def edge_keys(keys: Any, length: int) -> NDArray[np.int64]:
    """Return `keys` as int64. ValueError: not one-dimensional integers that fit 64 bits, one for each token."""
    array = _integers(keys, "keys")
    if len(array) != length:
        raise ValueError(f"keys has {len(array)} entries; wanted {length}, one for each token.")
    return array.astype(np.int64)


def require_namespace(namespace: Any) -> None:
    """Raise ValueError unless this is a str, and one that UTF-8 can spell: digests and files are made of it."""
    if not isinstance(namespace, str):
        raise ValueError(f"namespace is a {type(namespace).__name__}; wanted a str.")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"namespace is {namespace!r}; wanted one that UTF-8 can spell, without surrogates.") from error


def require_namespace_or_all(namespace: Any) -> None:
    """Raise ValueError unless this is a namespace, or None for all of them."""
    require_namespace("" if namespace is None else namespace)


def vocabulary_size(model: Any) -> int | None:
    """Number of token ids the model's own arguments state; None when they do not."""
    args = getattr(model, "args", None)
    size = getattr(args, "vocab_size", None)
    if size is None:
        text = getattr(args, "text_config", None)
        size = text.get("vocab_size") if isinstance(text, dict) else getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _integers(values: Any, name: str) -> NDArray[Any]:
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} is a {type(values).__name__}; wanted token ids: encode the text first.")
    kinds = set(map(type, values)) if isinstance(values, (list, tuple)) else set()
    try:
        # NumPy would read a truth value as 0 or 1, and a mix of signed and unsigned integers as floating point.
        is_mixed = len(kinds) > 1 and all(issubclass(kind, (int, np.integer)) for kind in kinds)
        array = np.asarray(values, dtype=object if bool in kinds else np.int64 if is_mixed else None)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not a sequence of integers: {error}.") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; wanted 1.")
    if len(array) == 0:
        raise ValueError(f"{name} is empty; wanted at least 1.")
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and int(array.max()) >= 1 << 63):
        given = list(values) if isinstance(values, (list, tuple)) else array.tolist()
        odd = next((i for i, value in enumerate(given) if not _is_int64(value)), 0)
        raise ValueError(f"{name}[{odd}] is {given[odd]!r}; wanted an integer of at most 64 bits.")
    return array


def _is_int64(value: Any) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and -(1 << 63) <= int(value) < 1 << 63
