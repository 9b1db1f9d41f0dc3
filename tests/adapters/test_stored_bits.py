"""Quantized snapshots: bytes, error, and that rounds of storing and restoring change nothing after the first."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from radixcache.adapters.span import SpanSnapshot, segment_bounds

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_bits = pytest.mark.parametrize("bits", [8, 4])


def _snapshot(dtype: mx.Dtype = mx.float32, end: int = 700, widths: tuple[int, int] = (64, 32)) -> SpanSnapshot:
    """Keys with a different size in each channel, values around 3, both from one seed."""
    random = np.random.default_rng(0)
    scales = [np.exp(random.standard_normal(widths[0])), 0.1]
    arrays = [
        mx.array((random.standard_normal((1, 2, end, width)) * scale + shift).astype(np.float32)).astype(dtype)
        for width, scale, shift in zip(widths, scales, (0, 3), strict=True)
    ]
    cuts = segment_bounds(0, end)
    return SpanSnapshot(0, end, [tuple(a[..., low:high, :] for a in arrays) for low, high in cuts])


def _whole(snapshot: SpanSnapshot) -> list[np.ndarray]:
    """The plain arrays of all tokens, in float32."""
    parts = [arrays for _, _, arrays in snapshot.parts(snapshot.start, snapshot.end)]
    return [np.array(mx.concatenate(list(its), axis=2).astype(mx.float32)) for its in zip(*parts, strict=True)]


def _steps(snapshot: SpanSnapshot, bits: int) -> list[np.ndarray]:
    """For each value of the plain arrays the largest distance between two codes of its group."""
    found = []
    for array in _whole(snapshot):
        group = 64 if array.shape[-1] % 64 == 0 else 32
        groups = array.reshape(*array.shape[:-1], -1, group)
        spread = np.ptp(groups, axis=-1, keepdims=True) / (15 if bits == 4 else 128)
        found.append(np.broadcast_to(spread, groups.shape).reshape(array.shape))
    return found


@every_dtype
@both_bits
def test_a_value_comes_back_with_an_error_of_at_most_a_step(dtype: mx.Dtype, bits: int) -> None:
    plain = _snapshot(dtype)
    stored = plain.quantized(bits)
    rounding = {mx.float32: 2**-22, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    for before, after, step in zip(_whole(plain), _whole(stored), _steps(plain, bits), strict=True):
        assert (np.abs(after - before) <= step + np.abs(before) * rounding).all()
        assert (after != before).any() or (dtype == mx.bfloat16 and bits == 8)  # its own steps are as long


@every_dtype
@both_bits
def test_storing_again_what_was_stored_adds_no_error(dtype: mx.Dtype, bits: int) -> None:
    plain = _snapshot(dtype)
    once = snapshot = plain.quantized(bits)
    for _ in range(30):
        snapshot = snapshot.quantized(None).quantized(bits)
    for before, first, last in zip(_whole(plain), _whole(once), _whole(snapshot), strict=True):
        assert np.square(last - before).mean() <= 1.01 * np.square(first - before).mean()


@pytest.mark.parametrize(("above", "below", "wanted"), [(None, 8, 8), (8, None, 8), (8, 4, 8), (4, 8, 4)])
def test_two_forms_join_in_the_form_of_the_first_that_is_quantized(
    above: int | None, below: int | None, wanted: int
) -> None:
    upper, lower = _snapshot().split(300)
    assert upper is not None
    assert lower is not None
    joined = upper.quantized(above).merged(lower.quantized(below))
    assert {form.bits for form in joined.forms if form is not None} == {wanted}
    plain, steps = _whole(_snapshot()), _steps(_snapshot(), 4)
    for before, after, step in zip(plain, _whole(joined), steps, strict=True):
        assert (np.abs(after - before) <= 2 * step).all()


def test_a_plain_copy_is_read_cut_and_counted_beside_the_codes() -> None:
    stored = _snapshot().quantized(8)
    both = stored.with_plain()
    assert both.with_plain() is both
    assert stored.without_plain() is stored
    mx.eval(both.arrays())
    assert both.nbytes == stored.nbytes + _snapshot().nbytes
    assert both.readable[0][0].shape == (1, 2, 512, 64)
    both.join()
    assert len(both.readable) == 1
    assert len(both.segments) == 2
    for half, tokens in zip(both.split(600), (600, 100), strict=True):
        assert half is not None
        assert sum(segment[0].shape[2] for segment in half.readable) == tokens
        assert half.readable[0][0].dtype == mx.float32
        assert half.without_plain().readable[0][0].dtype == mx.uint32
