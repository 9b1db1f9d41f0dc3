"""one_each: the next tokens of rows that step together."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from radixcache.tokens.ids import token_ids


def one_each(tokens: Any, row_count: int, vocab_size: int | None) -> mx.array:
    """Tokens (N,) or (N, 1) of so many rows as an array (N, 1); ValueError: other shapes, or no integers."""
    ids = tokens if isinstance(tokens, mx.array) else mx.array(token_ids(tokens, vocab_size))
    if not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(f"tokens are of dtype {ids.dtype}; wanted integers.")
    if row_count == 0 or ids.shape not in ((row_count,), (row_count, 1)):
        raise ValueError(f"tokens of shape {ids.shape} for {row_count} rows; wanted one each, and at least one.")
    return ids.reshape(row_count, 1)
