"""owned: a copy of an array that shares its buffer with nothing.

A slice keeps its whole parent alive, and `mx.contiguous` returns its input when the slice covers it, or nearly so.
Joining two pieces always writes a fresh buffer of exactly the result's size, whatever the input looks like.
"""

from __future__ import annotations

import math

import mlx.core as mx


def owned_span(buffer: mx.array, start: int, end: int) -> mx.array:
    """Return a copy of `buffer[..., start:end, :]` in a buffer of its own, unevaluated.

    The rows of several heads do not lie together, so that `mx.contiguous` has to copy: two operations instead of four.
    """
    part = buffer[..., start:end, :]
    if math.prod(buffer.shape[:-2]) > 1 and end - start < buffer.shape[-2]:
        return mx.contiguous(part)
    return owned(part)


def owned(array: mx.array) -> mx.array:
    """Return a copy of `array` (any shape and dtype) in a buffer of its own, unevaluated."""
    if array.size == 0:
        return mx.zeros(array.shape, dtype=array.dtype)
    axes = [*range(array.ndim - 2, -1, -1), array.ndim - 1] if array.ndim > 1 else [*range(array.ndim)]
    for axis in axes:
        if array.shape[axis] > 1:
            return mx.concatenate(list(mx.split(array, [array.shape[axis] // 2], axis=axis)), axis=axis)
    # One element: a view of two is the smallest buffer that is not the parent's.
    flat = array.reshape(1)
    return mx.concatenate([flat, flat])[:1].reshape(array.shape)
