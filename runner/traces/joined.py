"""Several traces on one time axis, each from its own beginning, without a key in common."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runner.traces.request import Trace, TraceError, TraceRequest


def join_traces(traces: Sequence[Trace], *, name: str = "") -> Trace:
    """Join traces; requests that arrive at the same time come in the order of the traces.

    Args:
        name: of the result; the names with a + between them where there is none.

    Raises:
        TraceError: their blocks differ in length.
        ValueError: there is no trace.
    """
    if not traces:
        raise ValueError("no trace to join; wanted at least one.")
    if len(traces) == 1:
        return traces[0] if not name else replace(traces[0], name=name)
    first = traces[0]
    for trace in traces:
        if trace.block_tokens != first.block_tokens:
            raise TraceError(
                f"{trace.source}: blocks of {trace.block_tokens} tokens; wanted {first.block_tokens}, as in"
                f" {first.source}."
            )
    requests: list[TraceRequest] = []
    next_key = 0
    for trace in traces:
        fresh, count = _renumbered(trace.requests, next_key)
        requests += fresh
        next_key += count
    requests.sort(key=lambda request: request.time_ms)
    return Trace(
        name or "+".join(trace.name for trace in traces),
        first.block_tokens,
        requests,
        any(trace.is_timing_synthetic for trace in traces),
        ", ".join(trace.source for trace in traces),
        tuple(line for trace in traces for line in trace.skipped),
    )


def _renumbered(requests: Sequence[TraceRequest], first_key: int) -> tuple[list[TraceRequest], int]:
    """Requests with their keys numbered from `first_key`, and how many keys there are."""
    if not requests:
        return [], 0
    distinct, inverse = np.unique(np.concatenate([request.keys for request in requests]), return_inverse=True)
    pieces = np.split(inverse.astype(np.int64) + first_key, np.cumsum([len(each.keys) for each in requests])[:-1])
    return [replace(each, keys=keys) for each, keys in zip(requests, pieces, strict=True)], len(distinct)
