"""Tier: connects a cache to its stores: reads state before a request is planned, and writes state.

    read             if a store has more of a prompt than memory, and reading is expected to be faster than prefill, add
                     the state to the tree as PAGED; the request then finds it like any paged state
    write            the state that a request left (write_on="close") or had found (write_on="second_use")
    write_evicted    the state that is about to be evicted (write_on="eviction")

Several stores are read as one (`Tiers`); each is written at its own moment. A store error never fails a request. Bytes
that wait to be written do not count against the budget; the store limits them. Callers hold the lock. `read` releases
it while a store is asked or read, so a slow store delays only the requests that read from it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from radixcache.adapters.contract import Checkpoint, Spans
from radixcache.adapters.span import segment_bounds
from radixcache.layers.sizes import AnyLayout
from radixcache.layers.stored import Buffers, shapes_in
from radixcache.paging.budget import Evictor
from radixcache.paging.pager import Pager
from radixcache.paging.rates import StoreRates
from radixcache.paging.resume import PrefixRequest, Slots, deepest_whole, floor, plan_resume
from radixcache.stores.block import Block, Head, Identity, Kind, root_key
from radixcache.stores.index import Link, chain_end
from radixcache.stores.store import Store, moments
from radixcache.tokens import Keys
from radixcache.tree.radix_tree import Match
from radixcache.tree.state_tree import NodeState, StateNode, StateTree, Use

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: How often a chain is read again after one of its blocks was found damaged or gone.
ATTEMPTS = 8


class Disk(NamedTuple):
    """A store, and the names of this cache's state there.

    Attributes:
        grid: the step size of an exact cache, which is part of the names of its blocks; 0: not exact.
        clock: returns seconds; times prefill and reading.
        block_tokens: the most tokens of a block; None: as many as a segment of the tree.
        takes: whether a namespace may be written; None: all may.
        finer: identities of state with more bits than this cache stores; the cache may read it too.
    """

    store: Store
    identity: Identity
    grid: int = 0
    clock: Callable[[], float] = time.perf_counter
    block_tokens: int | None = None
    takes: Callable[[str], bool] | None = None
    finer: Sequence[Identity] = ()


class Foreseen(NamedTuple):
    """What `Tier.read` would read of a prompt.

    Attributes:
        tokens: end of the stored tokens; 0: the stores have no more than memory.
        read_tokens: end of the tokens to read; 0: none, as prefill is expected to be faster.
        tiers: each store with the end of the tokens that it has, in reading order.
    """

    tokens: int = 0
    read_tokens: int = 0
    tiers: tuple[tuple[str, int], ...] = ()


class ReadBlock(NamedTuple):
    """A block that was read. `spans` end where `link` ends. Only a path's first block has `shapes`, of all leaves."""

    link: Link
    shapes: Sequence[Any]
    spans: list[Any]
    windows: Spans


class Tier:
    """The stores of one cache."""

    def __init__(
        self, disk: Disk, layout: AnyLayout, states: StateTree, evictor: Evictor, slots: Slots, pager: Pager
    ) -> None:
        self.store = disk.store
        self.rates = StoreRates(states.cost, disk.clock)
        self._states = states
        self._reader = StoreReader(disk, layout, states, evictor, pager, self.rates)
        self._writers = {
            moment: StoreWriter(disk._replace(store=store), layout, states, slots)
            for moment, store in moments(disk.store).items()
        }
        self._has_failed = False

    def read(self, namespace: str, asked: Callable[[], tuple[Keys, Use]]) -> bool:
        """Add to the tree stored state of a prompt that memory lacks, if worth it. Return whether state was added.

        Releases the lock while a store is asked or read.

        Args:
            asked: returns the keys that may be read now, and their use; other requests may change both meanwhile.
        """
        for _ in range(ATTEMPTS):
            decision = self._safely(lambda: self._reader.read(namespace, asked))
            if decision is not None:
                self._states.tally.add_to("store_decisions", decision)
            if decision not in ("damaged", "changed"):
                break
        return decision == "brought"

    def foresee(self, keys: Keys, namespace: str) -> Foreseen:
        return self._safely(lambda: self._reader.foresee(keys, namespace)) or Foreseen()

    def write(self, keys: Keys, request: PrefixRequest, used: int) -> None:
        """Write what a request left in the tree. The first `used` keys were there when it began."""
        mark = min(request.marks, default=0)
        for moment, writer in self._writers.items():
            end = {"close": len(keys), "second_use": used}.get(moment, 0)
            if end:
                match = self._states.match(keys[:end], request.namespace)
                self._safely(lambda its=writer, at=match: its.write(at.node, at.offset, mark))  # type: ignore[misc]

    def write_evicted(self, node: StateNode) -> None:
        self._safely(lambda: self._writers["eviction"].write(node, node.end))

    def remove(self, keys: Keys, start: int, namespace: str) -> None:
        """Delete wrong state of these keys from offset `start` on, even state that waits to be written."""

        def delete() -> None:
            self.store.flush()
            chains = self._reader.matches(keys, namespace)
            self.store.remove(each.key for chain in chains for each in chain if each.end > start)

        self._safely(delete)

    def write_all(self) -> None:
        """Write all state to the stores that write at eviction, most recently used first. Wait if a queue is full."""
        writer = self._writers.get("eviction")
        if writer is not None:
            leaves = [node for node in self._states.tree.nodes() if node.is_leaf]
            for leaf in sorted(leaves, key=lambda each: -each.payload.entry.last_used):
                self._safely(lambda its=leaf: writer.write(its, its.end, wait=True))  # type: ignore[misc]

    def _safely(self, call: Callable[[], R]) -> R | None:
        """Return what `call` returns, or None if it raises: a store error never fails a request."""
        try:
            return call()
        except Exception:
            self._states.tally.add_to("store_decisions", "failed")
            if not self._has_failed:
                logger.exception("a store failed; requests are served without it")
            self._has_failed = True
            return None


class StoreReader:
    """Reads state from the stores of one cache into the tree.

        memory    |------------| match
        store     |-----------------------------| chain of blocks, and the state of point layers at its end
        read                  |-----------------|     and the window tokens for this end

    Reading ends where a request can resume. For each store, the reading time is compared with the prefill time of the
    tokens read from this store. Otherwise a fast store would hide that reading from a slow store does not pay.
    """

    def __init__(
        self, disk: Disk, layout: AnyLayout, states: StateTree, evictor: Evictor, pager: Pager, rates: StoreRates
    ) -> None:
        self._disk, self._store, self._layout, self._states = disk, disk.store, layout, states
        self._evictor, self._pager, self._rates = evictor, pager, rates
        self._grid = states.grid_tokens
        self._lock = states.account.ledger.lock

    def read(self, namespace: str, asked: Callable[[], tuple[Keys, Use]]) -> str:
        """Add to the tree what the store has of a prompt and memory lacks. Return the outcome in a few words.

        Call again after "damaged" (a block is gone) and "changed" (the tree changed, so the blocks do not fit).
        Raises what a store or its content may raise.
        """
        keys, _ = asked()
        match, resume, links = self._missing(keys, namespace)
        if not links:
            return "not stored"
        links, refused = self._worth_reading(resume, links)
        if refused:
            start = links[-1].end if links else resume
            self._rates.count_refused({each.tier for each in refused}, start, refused[-1].end)
        if not links:
            return "slower than prefill"
        with self._states.guarding(match.node):
            links = self._affordable(links)
        if match.node.payload is not None:
            self._evictor.tidy(match.node)
        return self._bring(links, namespace, keys, asked) if links else "no room"

    def foresee(self, keys: Keys, namespace: str) -> Foreseen:
        _, resume, links = self._missing(keys, namespace)
        if not links:
            return Foreseen()
        chosen, _ = self._worth_reading(resume, links)
        ends = {self._store.tiers[each.tier]: each.end for each in links}
        return Foreseen(links[-1].end, chosen[-1].end if chosen else 0, tuple(ends.items()))

    def matches(self, keys: Keys, namespace: str, *, at_checkpoints: bool = False) -> list[list[Link]]:
        """The chains of this cache's state, and of the same state in more bits; see `BlockStore.match`."""
        disk, match = self._disk, partial(self._store.match, grid=self._disk.grid, at_checkpoints=at_checkpoints)
        return [match(identity, namespace, keys) for identity in (disk.identity, *disk.finer)]

    def _missing(self, keys: Keys, namespace: str) -> tuple[Match[NodeState], int, list[Link]]:
        """The match in memory, the offset at which a request resumes with it, and the blocks that move this offset on.

        Releases the lock while the store is asked.
        """
        with self._lock.released():
            chain = max(self.matches(keys, namespace, at_checkpoints=self._layout.has_states), key=chain_end)
        match = self._states.match(keys, namespace)
        resume = plan_resume(self._layout, match, len(keys), None, grid_tokens=self._grid).resume
        end = chain_end(chain)
        if floor(end, self._grid) <= resume:
            return match, resume, []
        ranges = [(match.offset, end), *(needed for window in self._layout.windows for needed in window.needs(end))]
        needed = [link for link in chain if any(link.start < b and link.end > a for a, b in ranges)]
        return match, resume, needed or [*chain[-1:]]  # If no block is needed, only the checkpoint is missing.

    def _worth_reading(self, resume: int, links: Sequence[Link]) -> tuple[list[Link], list[Link]]:
        """The first links, store by store, that are worth reading; and the next run, if that is not worth it."""
        chosen: list[Link] = []
        for run in self._runs(links):
            start = chain_end(chosen) or resume
            if not self._is_worth(start, run):
                shortest = run[: 1 + next(index for index, link in enumerate(run) if self._can_resume(link))]
                is_tried = self._is_worth(start, shortest)
                return ([*chosen, *shortest], []) if is_tried else (chosen, run)
            chosen += run
        return chosen, []

    def _is_worth(self, start: int, links: Sequence[Link]) -> bool:
        return self._rates.is_worth_reading(self._nbytes(links), start, links[-1].end)

    def _can_resume(self, link: Link) -> bool:
        return link.has_checkpoint or not self._layout.has_states

    def _runs(self, links: Sequence[Link]) -> Iterator[list[Link]]:
        """Cut the links into runs: a run ends where the store changes and a request could resume."""
        run: list[Link] = []
        for link in links:
            if run and link.tier != run[-1].tier and self._can_resume(run[-1]):
                yield run
                run = []
            run.append(link)
        yield run

    def _affordable(self, links: Sequence[Link]) -> list[Link]:
        """Make room for the first links that fit the budget and return them. A request can resume after the last."""
        fitting, nbytes = list(links), self._nbytes(links).total()
        room = nbytes + self._evictor.budget.fits(nbytes, who="eviction").spare_bytes
        while fitting and (self._nbytes(fitting).total() > room or not self._can_resume(fitting[-1])):
            fitting.pop()
        return fitting if self._evictor.find_room(self._nbytes(fitting).total()) else []

    def _nbytes(self, links: Sequence[Link]) -> Counter[int]:
        """Bytes of these links by store; they take as many in memory, except for a few KiB."""
        found: Counter[int] = Counter()
        for each in links:
            found[each.tier] += each.block_bytes
        if links and self._layout.has_states:
            found[links[-1].tier] += links[-1].checkpoint_bytes
        return found

    def _bring(self, links: list[Link], namespace: str, keys: Keys, asked: Callable[[], tuple[Keys, Use]]) -> str:
        layout, states = self._layout, self._states
        with self._lock.released():
            found = self._load(links)
        if found is None:
            return "damaged"
        blocks, leaves, seconds = found
        if blocks[0].shapes:
            layout.take_over(blocks[0].shapes)
        now, use = asked()
        match = states.match(now, namespace)
        held, more = match.offset, [each for each in blocks if each.link.end > match.offset]
        if len(now) < len(keys) or (more and more[0].link.start > held):
            return "changed"
        windows, end = [each.windows for each in blocks], floor(links[-1].end, self._grid)
        resume = plan_resume(layout, match, len(now), None, grid_tokens=self._grid).resume
        if end <= resume:
            return "changed"
        if layout.has_states:
            end = 0 if states.windows.lacking(match.path, end, windows) else end
        elif layout.windows:
            end = deepest_whole(layout, windows, end, grid=self._grid)
        self._rates.count_read(nbytes := self._nbytes(links), seconds)
        for tier, its in nbytes.items():
            states.tally.add_to("brought_bytes", self._store.tiers[tier], its)
        if end <= resume:
            return "windows are not whole"
        with states.guarding(match.node):
            try:
                if not self._evictor.find_room(nbytes.total()):
                    return "no room"
                checkpoints = [layout.checkpoint_of(leaves, end, "end")] if layout.has_points else []
                spans = self._join([each.spans for each in more], held, end) if end > held else None
                self._pager.put(now[:end], namespace, spans, None, use, windows, checkpoints)
            finally:
                self._evictor.tidy(match.node)
        states.tally.add(brought_tokens=end - resume)
        return "brought"

    def _load(self, links: Sequence[Link]) -> tuple[list[ReadBlock], list[Any], Mapping[int, float]] | None:
        """Read these blocks, and the state of point layers at their end. Also return the seconds by store.

        None: a block is gone or damaged. Called without the lock.
        """
        layout, clock, began = self._layout, self._rates.clock, self._rates.clock()
        has_states = layout.has_states  # read once: another thread may change it in `learn`
        seconds: defaultdict[int, float] = defaultdict(float)
        wanted: list[tuple[bytes, Kind]] = [(each.key, "block") for each in links]
        files = self._store.read([*wanted, (links[-1].key, "checkpoint")] if has_states else wanted)
        blocks, points = [], [None] * layout.leaf_count
        for link, block in zip(links, files, strict=False):
            if block is None:
                return None
            about = (block.buffers, link.start, link.block_end)
            spans = [its and its.split(link.end)[0] for its in layout.spans_in(*about)]
            windows = layout.spans_of(layout.windows_in(*about), link.start, link.block_end)
            shapes = shapes_in(block.buffers["shapes"]) if "shapes" in block.buffers else ()
            blocks.append(ReadBlock(link, shapes, spans, windows))
            seconds[link.tier] += clock() - began
            began = clock()
        if has_states:
            if (block := next(files)) is None:
                return None
            points = layout.points_in(block.buffers, links[-1].end)
        seconds[links[-1].tier] += clock() - began
        return blocks, points, seconds

    def _join(self, rows: Sequence[list[Any]], start: int, end: int) -> Spans:
        """Join the snapshots of several blocks into one snapshot of the tokens [start, end)."""
        leaves = []
        for its in zip(*rows, strict=True):
            whole = None if its[0] is None else reduce(lambda upper, lower: upper.merged(lower), its)
            leaves.append(None if whole is None else whole.split(start)[1].split(end)[0])
        spans = self._layout.spans_of(leaves, start, end)
        wanted = (end - start) * self._layout.stored_token_bytes
        if spans.nbytes != wanted:
            raise ValueError(f"the store has {spans.nbytes} bytes of {end - start} tokens; wanted {wanted} bytes.")
        return spans


class StoreWriter:
    """Writes state of one cache's tree: blocks that end at multiples of 512 tokens, checkpoints, and a last block.

        stored      |--------|--------|--|              these blocks stay as they are
        path        |------------------------------| end
        put                              |-----|---|    new blocks continue them, so each token is written once

    A block also ends at the end of the system prompt and where the tree branches, so that other prompts can continue
    it. A path that leaves a stored block in its second half continues the first part of that block. Models with point
    layers need a block that ends at each checkpoint, so they write the first part of such a block again.

    Arrays in one piece are written without a copy. Live buffers are copied block by block, if the store accepts it.
    """

    def __init__(self, disk: Disk, layout: AnyLayout, states: StateTree, slots: Slots) -> None:
        self._disk, self._store, self._layout, self._states, self._slots = disk, disk.store, layout, states, slots
        # Blocks of exact caches begin on the grid; point layers need a block that ends at each checkpoint.
        self._cuts = disk.store.takes_cuts and not disk.grid and not layout.has_points

    def write(self, tip: StateNode, end: int, mark: int = 0, *, wait: bool = False) -> None:
        """Put what the store lacks of the path to `tip`, up to offset `end`. Stop at the first block that it refuses.

        Args:
            mark: an offset where many prompts are likely to branch.
            wait: if the queue is full, wait for room.
        """
        if self._disk.takes is not None and not self._disk.takes(tip.namespace):
            return
        path = tip.path()
        points: dict[int, Checkpoint] = {}
        if self._layout.has_states:
            found = ((node.end, node.payload.checkpoint) for node in path)
            points = {at: each for at, each in found if each is not None and at <= end}
            end = max(points, default=0)
        if end == 0:
            return
        keys = np.concatenate([node.edge for node in path])[:end]
        parent = root_key(self._disk.identity, tip.namespace)
        cuts = {mark, *points, *(node.end for node in path if len(node.children) > 1)}
        cut = 0
        for low, high, link in self._bounds(keys, tip.namespace, cuts):
            if link is not None and not link.is_whole:
                parent, cut = link.key, high - low
                continue
            about = (self._disk.identity, tip.namespace, parent, low, keys[low:high], self._disk.grid, cut)
            if link is not None and self._store.holds(link.key):
                parent = link.key
            else:
                head = Head("block", *about)
                if not self._offer(head, partial(self._state, path, low, high), wait):
                    return
                parent = head.key
            if high in points:
                self._offer(Head("checkpoint", *about), partial(self._layout.point_buffers, points[high]), wait)
            cut = 0

    def _bounds(self, keys: Keys, namespace: str, wanted: Iterable[int]) -> list[tuple[int, int, Link | None]]:
        """Cut these keys into blocks: first the stored blocks, then new ones, cut by segments and at `wanted` offsets.

        The last stored block is used if the keys follow at least half of it.
        """
        disk = self._disk
        found = self._store.known(disk.identity, namespace, keys, grid=disk.grid, is_whole=not self._cuts)
        if found and 2 * (found[-1].end - found[-1].start) < found[-1].block_end - found[-1].start:
            found.pop()
        start = chain_end(found)
        cuts = [start, *sorted(at for at in wanted if start < at < len(keys))]
        cuts += [len(keys)] if start < len(keys) else []
        new = [bounds for low, high in pairwise(cuts) for bounds in segment_bounds(low, high, disk.block_tokens)]
        return [*((each.start, each.end, each) for each in found), *((low, high, None) for low, high in new)]

    def _offer(self, head: Head, state: Callable[[], Buffers | None], wait: bool) -> bool:
        """Put a block or a checkpoint, if the store lacks it. False: the store still lacks it."""
        store, is_block = self._store, head.kind == "block"
        if store.holds(head.key, head.kind):
            return True
        token_bytes = self._layout.stored_token_bytes
        token_bytes += sum(map(self._layout.stored_window_bytes, self._layout.windows))
        nbytes = len(head.tokens) * token_bytes if is_block else 0
        if wait and not store.accepts(nbytes):
            store.flush()
        buffers = state() if store.accepts(nbytes) else None
        if buffers is None or not store.put(Block(head, buffers)):
            return False
        self._states.tally.add(kept_blocks=1)
        return True

    def _state(self, path: Sequence[StateNode], start: int, end: int) -> Buffers | None:
        """The state of the tokens [start, end) of a path; None: some of it cannot be read now."""
        nodes = [node for node in path if node.start < end and node.end > start]
        parts = [self._spans_at(node, max(start, node.start), min(end, node.end)) for node in nodes]
        whole = [each for each in parts if each is not None]
        if len(whole) < len(parts):
            return None
        return self._layout.block_buffers(whole, self._states.windows.stored(nodes), start, end)

    def _spans_at(self, node: StateNode, start: int, end: int) -> Spans | None:
        """A node's snapshot, or a copy of [start, end) from live buffers that can be read; None: neither exists."""
        state = node.payload
        if state.spans is not None:
            return state.spans
        caches = state.leaving_from
        if caches is None and state.live and self._slots.hidden_from([node], None) is None and self._layout.token_bytes:
            caches = self._slots.source(node).caches
        if caches is None:
            return None if self._layout.token_bytes else Spans(start, end, [None] * self._layout.leaf_count, 0)
        return self._layout.page_out(caches, start, end)
