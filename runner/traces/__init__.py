"""Traces: what they are, readers for the formats they come in, writers, and made-up ones. No MLX but for tokenizers."""

from runner.traces.arrivals import Pace
from runner.traces.compact import write_compact
from runner.traces.joined import join_traces
from runner.traces.mooncake import write_mooncake
from runner.traces.reader import read_trace
from runner.traces.request import Keys, Trace, TraceError, TraceRequest
from runner.traces.turns import TurnInference, infer_turns

__all__ = [
    "Keys",
    "Pace",
    "Trace",
    "TraceError",
    "TraceRequest",
    "TurnInference",
    "infer_turns",
    "join_traces",
    "read_trace",
    "write_compact",
    "write_mooncake",
]
