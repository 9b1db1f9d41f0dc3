"""Storing: what rows that close leave behind.

what is evaluated, known, clean and not quarantined -> copied out of the cells, layer by layer -> tree
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from radixcache.adapters.snapshots import Checkpoint
from radixcache.cells.paging import Piece
from radixcache.groups.cell_budget import CellBudget
from radixcache.groups.row import Row
from radixcache.tokens.keys import Keys, common_length


@dataclass(slots=True)
class Storable:
    """What of a row is to be stored: the tokens [start, end), and the checkpoint at `end`."""

    row: Row
    keys: Keys
    start: int
    end: int
    with_points: bool
    checkpoint: Checkpoint | None = None


class Storing:
    """Closing rows, for one group; the lock is held."""

    def __init__(self, budget: CellBudget, namespace: str) -> None:
        self._budget = budget
        self._core = budget.core
        self._namespace = namespace

    def close(self, rows: Sequence[Row], is_intact: bool, freeing: bool) -> None:
        """Store what these rows evaluated, free their cells; `freeing`: and those of all others.

        Args:
            is_intact: False: what is in the cells was lost.
        """
        budget = self._budget
        try:
            if rows and is_intact:
                self._store(rows, freeing)
        finally:
            for row in rows:
                row.is_closed = True
                budget.drop_checkpoints(row, -1)
                budget.causal.free(row.id)
                self._core.write_trace(row.request, max(0, row.known_tokens - len(row.prompt)))
            budget.book()
            self._core.keep_budget()

    def _store(self, rows: Sequence[Row], freeing: bool) -> None:
        """Copy what these rows evaluated, and the tree lacks, out of the cells into the tree."""
        core, budget = self._core, self._budget
        wanted = [each for row in rows if (each := self._storable(row)) is not None]
        nodes = [core.states.match(each.keys, self._namespace).node for each in wanted]
        try:
            with ExitStack() as stack:
                for node in nodes:
                    stack.enter_context(core.states.guarded(node))
                kept = self._fitting(wanted, freeing)
                pieces = [Piece(each.row.id, each.start, each.end, each.with_points) for each in kept]
                found = budget.pager.read(pieces, core.pager.allocating, freeing)
                budget.book()
                for each, (spans, checkpoint) in zip(kept, found, strict=True):
                    core.recorder.put(
                        each.keys[: each.end],
                        self._namespace,
                        spans if each.start < each.end else None,
                        checkpoint or each.checkpoint,
                        each.row.request.use,
                        [other for other in each.row.checkpoints if other.offset < each.end],
                    )
        finally:
            for node in nodes:
                if node.payload is not None:
                    core.evictor.tidy(node)

    def _storable(self, row: Row) -> Storable | None:
        """What of a row may become a stored prefix; None: nothing that the tree does not hold."""
        keys = self._core.allowed(row.clean_keys(), self._namespace)
        has_points = self._core.layout.has_points
        end, checkpoint, with_points = len(keys), None, False
        if has_points:
            with_points = row.has_state_at(end)
            if not with_points:
                own = [each for each in row.checkpoints if each.offset <= end]
                if not own:
                    return None
                checkpoint = max(own, key=lambda each: each.offset)
                end = checkpoint.offset
        start = self._core.states.match(keys[:end], self._namespace).offset
        if end == 0 or (start == end and (end <= row.cached_tokens or not has_points)):
            return None
        return Storable(row, keys[:end], start, end, with_points, checkpoint)

    def _fitting(self, wanted: list[Storable], freeing: bool) -> list[Storable]:
        """Make room for what is wanted; where it does not fit, for as much of it as does."""
        layout, evictor, pager = self._core.layout, self._core.evictor, self._budget.pager
        kept = list(wanted)
        while kept:
            self._start_behind_each_other(kept)
            kept = [each for each in kept if each.start < each.end or layout.has_points]
            need = sum((each.end - each.start) * layout.token_bytes for each in kept)
            need += sum(pager.point_bytes(each.row.id, each.end) for each in kept if each.with_points)
            need -= self._budget.causal.nbytes if freeing else 0
            if need <= 0 or evictor.make_room(need):
                break
            if layout.has_points:
                kept.pop()
                continue
            last = kept[-1]
            tokens = -(-evictor.over_bytes(need) // max(1, layout.token_bytes))
            last.end = max(last.start, last.end - tokens)
        return kept

    def _start_behind_each_other(self, kept: list[Storable]) -> None:
        """Let each begin where the tree will end once those before it are stored."""
        for index, each in enumerate(kept):
            keys = each.keys[: each.end]
            each.start = self._core.states.match(keys, self._namespace).offset
            for other in kept[:index]:
                each.start = max(each.start, common_length(other.keys[: other.end], keys))
