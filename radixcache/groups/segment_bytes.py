"""segment_bytes: from how many bytes per layer on a span is worth a segment of its own in every decode step."""

from __future__ import annotations

import mlx.core as mx

#: On a CPU where two who share save about what the segment costs (benchmarks.bench_decode). Of a GPU it is an estimate:
#: what it reads while it starts the kernels more that a segment takes, at some 5 us each and 1 TB/s.
CPU_BYTES = 400 << 10
GPU_BYTES = 4 << 20


def segment_bytes() -> int:
    """The threshold for MLX's default device."""
    return CPU_BYTES if mx.default_device() == mx.cpu else GPU_BYTES
