"""docs/architectures.md: a line per module of `mlx_lm.models`, each measured when the document is written.

What is written hardly depends on the machine: times are left out, and errors are rounded up to a power of ten. A module
that cannot be built is tried in a process of its own; where that succeeds it is measured there like the others.
"""

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.architectures.catalogue import ALIASES, CUT_SENSITIVE, REFUSALS, class_name, modules, subject_of
from benchmarks.architectures.catalogue import models as buildable
from benchmarks.architectures.right_state import (
    PROMPT_A,
    PROMPT_LENGTH,
    ROUNDING,
    STEP_SIZE,
    WRONG_STATE,
    Agreement,
    Subject,
    control,
    fetched_error,
    timeline,
)
from radixcache import UnsupportedCacheError
from radixcache.adapters.contract import tokens_in
from radixcache.groups.passes import way_of
from radixcache.layers.layout import Layout

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
ATTEMPT_SECONDS = 300
COLUMNS = ("type", "layers", "bytes per token", "bytes per checkpoint", "reuse", "largest error", "together", "notes")
UNKNOWN = "-"

HEADER = """# Architectures

How `PrefixCache` handles each module in `mlx_lm/models`. `make architectures` writes this page, and
`make architectures ARGS=--check` checks it. Measured with mlx {mlx} and mlx-lm {mlx_lm}.

Each type is a tiny random model in float32: about 64 wide, two to six layers, windows of 16 tokens and chunks of 32, so
that they wrap. All types run the same requests: a prompt of 72 tokens, a second prompt that shares 48 of them, the
first prompt grown by a turn, a branch at token 30, and both prompts again; then `fetch`. Each request is compared with
a cold run in fresh caches: the state of every layer in temporal order, the logits, and the greedy continuation.

- **layers**: the caches that the model makes.
- **bytes per token**, **bytes per checkpoint**: of the tiny model, all layers together. The checkpoint is at the end of
  the prompt of 72 tokens, with 20 tokens per forward pass.
- **reuse**: `token-exact` resumes at any token of a shared prefix; `checkpoint` resumes where a checkpoint was taken.
- **largest error**: the largest difference from the cold runs in states and logits, rounded up to a power of ten. It is
  rounding error: the forward passes of a cold run have other lengths. The bound is {bound}.
- **together**: how several requests decode (`begin_many`), determined by a trial: on `segments` of the tree, on
  mlx-lm's own `batch` caches, or in a `single` pass for each. The reason against a faster way is in brackets.
- The control: with the state of another prompt in any one cache, the logits move by more than {wrong}, for every type.

{counts}

"""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    type: str
    layers: str = UNKNOWN
    token_bytes: str = UNKNOWN
    checkpoint_bytes: str = UNKNOWN
    reuse: str = UNKNOWN
    largest_error: str = UNKNOWN
    together: str = UNKNOWN
    notes: str = ""

    @property
    def is_measured(self) -> bool:
        return self.largest_error != UNKNOWN

    def __str__(self) -> str:
        cells = (self.type, self.layers, self.token_bytes, self.checkpoint_bytes, self.reuse, self.largest_error)
        return f"| {' | '.join((*cells, self.together, self.notes))} |"


class WrongStateError(Exception):
    """A type got another state than its cold run, or the procedure could not tell."""


def document(on_row: Callable[[Row], None] = lambda row: None) -> str:
    """Measure every module and return the document.

    Raises:
        WrongStateError: the cache gave a type a wrong state, or a wrong state would not have shown.
    """
    rows = []
    for name in modules():
        rows.append(_row(name))
        on_row(rows[-1])
    head = HEADER.format(
        mlx=metadata.version("mlx"),
        mlx_lm=metadata.version("mlx-lm"),
        bound=f"{ROUNDING:g}",
        wrong=f"{WRONG_STATE:g}",
        counts=_counts(rows),
    )
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'|'.join(' --- ' for _ in COLUMNS)}|", *map(str, rows)]
    return head + "\n".join(table) + "\n"


def rows_in(text: str) -> dict[str, Row]:
    """The lines of a document by type."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [Row(*(cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|"))) for line in lines]
    return {row.type: row for row in rows if row.type not in ("type", "---")}


def without_errors(text: str) -> str:
    """A document but for the errors: the order of sums, and so rounding, is another on another machine."""
    return re.sub(r"\| (<1e-\d+|0) \|", "| |", text)


def measured_row(name: str) -> Row:
    """Build a type and run the procedure; see `document` for what it raises."""
    subject = subject_of(name)
    agreement, fetched, moved = timeline(subject), fetched_error(subject), control(subject)
    error = max(agreement.largest_error, fetched)
    if not error < ROUNDING or agreement.other_replies:
        raise WrongStateError(
            f"{name}: state or logits are off by {error:g}; other replies: {agreement.other_replies}."
        )
    if not min(moved.values()) > WRONG_STATE:
        raise WrongStateError(
            f"{name}: a wrong state moves the logits by no more than {min(moved.values()):g}: {moved}."
        )
    return row_of(name, subject, agreement, error)


def row_of(name: str, subject: Subject, agreement: Agreement, error: float) -> Row:
    """Put a line together from what the procedure found."""
    token_bytes, checkpoint_bytes = state_bytes(subject)
    counts = Counter(class_name(layer) for layer in subject.fresh())
    return Row(
        type=name,
        layers=", ".join(f"{count} {layer}" for layer, count in counts.items()),
        token_bytes=f"{token_bytes:,}",
        checkpoint_bytes=f"{checkpoint_bytes:,}" if checkpoint_bytes else UNKNOWN,
        reuse="token-exact" if agreement.is_token_exact else "checkpoint",
        largest_error=power_of_ten_above(error),
        together=together(subject),
        notes=_notes(name),
    )


def state_bytes(subject: Subject) -> tuple[int, int]:
    """Bytes of a token over all span layers, and of a checkpoint over all point layers after the first prompt."""
    layout = Layout(subject.fresh, kv_bits=None, kv_group_size=64)
    caches = subject.fresh()
    # As a session cuts it: how much a window holds beyond its length depends on the last forward pass.
    for start in range(0, PROMPT_LENGTH, STEP_SIZE):
        subject.forward(PROMPT_A[start : start + STEP_SIZE], caches)
    layout.learn(caches)
    end = len(PROMPT_A)
    windows = sum(tokens_in(window.needs(end)) * layout.window_bytes(window) for window in layout.windows)
    return layout.token_bytes, layout.checkpoint(caches, end, "end").nbytes + windows


def together(subject: Subject) -> str:
    """How several rows decode, and why not a faster way; no figures, which differ from machine to machine."""
    try:
        subject.open_cache().begin_many(capacity=8).close()
        found = way_of(subject.model, subject.fresh)
    except UnsupportedCacheError as error:
        return f"refused: {error}"
    reason = re.sub(r" by [0-9.e+-]+ of the largest|\.(?=;|$)", "", found.reason).replace("|", "/")
    return f"{found.way}{f' ({reason})' if reason else ''}"


def power_of_ten_above(error: float) -> str:
    """Say `error` as the power of ten above it, which another machine's rounding seldom changes."""
    return "0" if error == 0 else f"<1e{math.floor(math.log10(error)) + 1:d}"


def _row(name: str) -> Row:
    if name in REFUSALS:
        return _row_from_another_process(name)
    return measured_row(name) if name in buildable() else Row(name, notes="not a model")


def _row_from_another_process(name: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    attempt = subprocess.run(command, capture_output=True, text=True, timeout=ATTEMPT_SECONDS, check=False)
    cells = [cell.strip() for cell in attempt.stdout.strip().strip("|").split("|")]
    if attempt.returncode == 0 and len(cells) == len(COLUMNS):
        return Row(*cells)
    return Row(name, notes=f"cannot be built here: {REFUSALS[name]}")


def _notes(name: str) -> str:
    alias = f"alias of {ALIASES[name]}: the same layers" if name in ALIASES else ""
    fed = f"fed one token at a time: {CUT_SENSITIVE[name]}" if name in CUT_SENSITIVE else ""
    return "; ".join(note for note in (alias, fed) if note)


def _counts(rows: list[Row]) -> str:
    measured = [row for row in rows if row.is_measured]
    aliases = sum(row.type in ALIASES for row in measured)
    refused = sum(row.type in REFUSALS and not row.is_measured for row in rows)
    return (
        f"{len(rows)} modules: {len(measured)} types measured ({len(measured) - aliases} distinct, {aliases} aliases), "
        f"{refused} that cannot be built here, {len(rows) - len(measured) - refused} that are not models."
    )
