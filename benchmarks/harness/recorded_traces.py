"""The recorded traces that benchmarks simulate, or a made-up trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace import Trace
from runner.traces.trace_reader import read_trace

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
TRACES = {"mooncake": "mooncake/conversation_trace.jsonl", "coding agents": "claude-code-traces/traces"}


def add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=_folder, metavar="FOLDER", help="folder with the recorded traces")


def traces_in(folder: Path | None, quick: bool) -> list[Trace]:
    """Return the traces in `folder`; None: those beside the repository, or a made-up trace if there are none."""
    if quick:
        return [synthesize(Synth(requests=60), seed=0)]
    if folder is None and not BESIDE.is_dir():
        return [synthesize(Synth(requests=5_000), seed=0)]
    return [read_trace((folder or BESIDE) / path, name=name) for name, path in TRACES.items()]


def _folder(name: str) -> Path:
    folder = Path(name)
    for path in TRACES.values():
        if not (folder / path).exists():
            raise argparse.ArgumentTypeError(f"{folder} has no {path}")
    return folder
