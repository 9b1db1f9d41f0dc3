"""Bringing: state out of a store, into the tree, for a request that is about to be planned.

    memory    |------------| match
    store     |-----------------------------| chain of blocks, and what point layers need at its end
    read                  |-----------------|     and of windows what they read there

It ends where a request can resume. Of several stores each part is weighed by itself: what one has is not read for what
another one saves. The lock is held; arrays are made on the calling thread, files are read by others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from radixcache.adapters.snapshots import Spans
from radixcache.layers.layout import Layout
from radixcache.paging.disk import Disk
from radixcache.paging.evictor import Evictor
from radixcache.paging.grid import floor
from radixcache.paging.rates import Rates
from radixcache.paging.recorder import Recorder
from radixcache.paging.resume import deepest_whole, plan_resume
from radixcache.stores.block import Kind
from radixcache.stores.index import Link
from radixcache.tokens.keys import Keys
from radixcache.tree.node_state import NodeState
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import StateTree, Use


class Foreseen(NamedTuple):
    """What would be brought of a prompt.

    Attributes:
        tokens: how many of it are stored, if more than memory has.
        read_tokens: up to where they would be read; 0: none would, reading is expected to be slower than prefill.
        tiers: up to where each store has it, in the order in which they would be read.
    """

    tokens: int = 0
    read_tokens: int = 0
    tiers: tuple[tuple[str, int], ...] = ()


class Bringing:
    """Reading for one cache.

    Attributes:
        brought_tokens: that requests could resume on besides.
        read_bytes: of what was read, by the store.
    """

    def __init__(
        self, disk: Disk, layout: Layout, states: StateTree, evictor: Evictor, recorder: Recorder, rates: Rates
    ) -> None:
        self._disk, self._layout, self._states = disk, layout, states
        self._evictor, self._recorder, self._rates = evictor, recorder, rates
        self._grid = states.grid_tokens
        self.brought_tokens = 0
        self.read_bytes: Counter[str] = Counter()

    def bring(self, keys: Keys, namespace: str, use: Use) -> str:
        """Put into the tree what the store has of a prompt beyond memory; what became of it, in a few words.

        "damaged": what was found is not known any more; ask again. It raises what a store or its content may raise.
        """
        match, resume, links = self._sought(keys, namespace)
        if not links:
            return "not stored"
        links, refused = self._chosen(resume, links)
        if refused:
            start = links[-1].end if links else resume
            self._rates.was_refused({each.tier for each in refused}, start, refused[-1].end)
        if not links:
            return "slower than prefill"
        links = self._less_what_tells(resume, links)
        with self._states.guarded(match.node):
            try:
                return self._read(match, resume, links, keys, namespace, use)
            finally:
                self._evictor.tidy(match.node)

    def foresee(self, keys: Keys, namespace: str) -> Foreseen:
        """What `bring` would do."""
        _, resume, links = self._sought(keys, namespace)
        if not links:
            return Foreseen()
        chosen, _ = self._chosen(resume, links)
        names = self._disk.store.tiers
        ends = {names[each.tier]: each.end for each in links}
        return Foreseen(links[-1].end, chosen[-1].end if chosen else 0, tuple(ends.items()))

    def remove(self, keys: Keys, start: int, namespace: str) -> None:
        """Have the store give up what it has of these keys from offset `start` on, and what it is about to write."""
        self._disk.store.flush()
        self._disk.store.remove(each.key for each in self._disk.match(keys, namespace) if each.end > start)

    def _sought(self, keys: Keys, namespace: str) -> tuple[Match[NodeState], int, list[Link]]:
        """What memory has, where a request would resume on that, and the blocks that would take it further."""
        match = self._states.match(keys, namespace)
        resume = plan_resume(self._layout, match, len(keys), None, grid_tokens=self._grid).resume
        chain = self._disk.match(keys, namespace, at_checkpoints=self._layout.has_states)
        end = chain[-1].end if chain else 0
        if floor(end, self._grid) <= resume:
            return match, resume, []
        ranges = [(match.offset, end), *(needed for window in self._layout.windows for needed in window.needs(end))]
        needed = [link for link in chain if any(link.start < b and link.end > a for a, b in ranges)]
        return match, resume, needed or chain[-1:]  # memory has all of it but the checkpoint

    def _least(self, links: Sequence[Link]) -> list[Link]:
        """The first of these that can be read for themselves."""
        ends = (count for count, link in enumerate(links, 1) if link.has_checkpoint or not self._layout.has_states)
        return list(links[: next(ends)])

    def _chosen(self, resume: int, links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
        """As many of these as are worth reading, store by store; and those behind them that were found not to be."""
        chosen: list[Link] = []
        for run in self._runs(links):
            start = chosen[-1].end if chosen else resume
            if not self._is_worth_reading(start, run):
                run, refused = self._least(run), run
                is_tried = self._is_worth_reading(start, run)
                return ([*chosen, *run], []) if is_tried else (chosen, refused)
            chosen += run
        return chosen, []

    def _runs(self, links: Sequence[Link]) -> Iterator[list[Link]]:
        """These, cut where another store goes on and a request could resume."""
        run: list[Link] = []
        for link, after in zip(links, [*links[1:], None], strict=True):
            run.append(link)
            can_resume = link.has_checkpoint or not self._layout.has_states
            if after is None or (after.tier != link.tier and can_resume):
                yield run
                run = []

    def _less_what_tells(self, resume: int, links: list[Link]) -> list[Link]:
        """These, without the end that is prefilled to learn what prefill takes, where that is due."""
        tokens = self._rates.tokens_to_prefill()
        last = links[-1].end - tokens
        ends = [
            count
            for count, link in enumerate(links, 1)
            if resume < link.end <= last and (link.has_checkpoint or not self._layout.has_states)
        ]
        if not tokens or not ends:
            return links
        self._rates.was_left()
        return links[: ends[-1]]

    def _is_worth_reading(self, start: int, links: Sequence[Link]) -> bool:
        return self._rates.is_worth_reading(self._tier_bytes(links), start, links[-1].end)

    def _read(
        self,
        match: Match[NodeState],
        resume: int,
        links: list[Link],
        keys: Keys,
        namespace: str,
        use: Use,
    ) -> str:
        layout, held = self._layout, match.offset
        links = self._affordable(links)
        if not links:
            return "no room"
        seconds: defaultdict[int, float] = defaultdict(float)
        clock, began = self._rates.clock, self._rates.clock()
        files = self._disk.store.read(self._wanted(links))
        rows, windows = [], []
        for link, block in zip(links, files, strict=False):
            if block is None:
                return "damaged"
            about = (block.buffers, link.start, link.block_end)
            if link.end > held:
                rows.append([its and its.split(link.end)[0] for its in layout.spans_in(*about)])
            leaves = layout.windows_in(*about)
            windows.append(Spans(link.start, link.block_end, leaves, sum(its.nbytes for its in leaves if its)))
            seconds[link.tier] += clock() - began
            began = clock()
        end, checkpoints = floor(links[-1].end, self._grid), []
        leaves = [None] * layout.leaf_count
        if layout.has_states:
            if (block := next(files)) is None:
                return "damaged"
            if not self._states.windows.lacking(match.path, end, windows):
                leaves = layout.points_in(block.buffers, end)
            else:
                end = 0
        elif layout.windows:
            end = deepest_whole(layout, windows, end, grid=self._grid)
        seconds[links[-1].tier] += clock() - began
        self._rates.was_read(nbytes := self._tier_bytes(links), seconds)
        self.read_bytes.update({self._disk.store.tiers[tier]: its for tier, its in nbytes.items()})
        if end <= resume:
            return "windows are not whole"
        checkpoints = [layout.checkpoint_of(leaves, end, "end")] if layout.has_points else []
        spans = self._joined(rows, held, end) if end > held else None
        self._recorder.put(keys[:end], namespace, spans, None, use, windows, checkpoints)
        self.brought_tokens += end - resume
        return "brought"

    def _wanted(self, links: Sequence[Link]) -> list[tuple[bytes, Kind]]:
        """What is read of these: their blocks, and the last one's checkpoint for layers that resume nowhere else."""
        blocks: list[tuple[bytes, Kind]] = [(each.key, "block") for each in links]
        return [*blocks, (links[-1].key, "checkpoint")] if self._layout.has_states else blocks

    def _joined(self, rows: Sequence[list[Any]], start: int, end: int) -> Spans:
        """The snapshots of several blocks, one behind the other, as those of the tokens [start, end)."""
        leaves = []
        for its in zip(*rows, strict=True):
            whole = None if its[0] is None else reduce(lambda upper, lower: upper.merged(lower), its)
            leaves.append(None if whole is None else whole.split(start)[1].split(end)[0])
        spans = self._layout.spans_of(leaves, start, end)
        if spans.nbytes != (end - start) * self._layout.token_bytes:
            raise ValueError(f"{spans.nbytes} bytes are stored of {end - start} tokens.")
        return spans

    def _affordable(self, links: Sequence[Link]) -> list[Link]:
        """As many of these, from the first on, as there is room for, which is made; a checkpoint has to be last."""
        room = self._states.account.ledger.budget_bytes - self._evictor.fixed_bytes()
        fitting = list(links)
        while fitting and (self._bytes(fitting) > room or (self._layout.has_states and not fitting[-1].has_checkpoint)):
            fitting.pop()
        return fitting if self._evictor.find_room(self._bytes(fitting)) else []

    def _bytes(self, links: Sequence[Link]) -> int:
        """Bytes that reading these takes, in stores and in memory, but for a few KiB."""
        return sum(self._tier_bytes(links).values())

    def _tier_bytes(self, links: Sequence[Link]) -> Counter[int]:
        """The same, by the store."""
        found: Counter[int] = Counter()
        for each in links:
            found[each.tier] += each.block_bytes
        if links and self._layout.has_states:
            found[links[-1].tier] += links[-1].checkpoint_bytes
        return found
