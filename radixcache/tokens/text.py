"""token_text: keys of the tree as text, for people. Never imports MLX."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

#: Keys above are digests of something else than text.
LARGEST_ID = (1 << 31) - 1


def token_text(keys: Iterable[int], tokenizer: Any) -> str:
    """The text of a run of keys, also where the tokenizer does not know them.

    A key that stands for something else than a token, an image say, is named by its first digits; ids of the caller's
    own making, of which the tokenizer knows nothing, by their numbers.
    """
    parts: list[str] = []
    for is_id, group in groupby(map(int, keys), lambda key: 0 <= key <= LARGEST_ID):
        run = list(group)
        parts += [_decoded(run, tokenizer)] if is_id else [f"[key {key & (1 << 64) - 1:016x}]" for key in run]
    return "".join(parts)


def _decoded(ids: list[int], tokenizer: Any) -> str:
    try:
        return str(tokenizer.decode(ids))
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return f"[ids {' '.join(map(str, ids))}]"
