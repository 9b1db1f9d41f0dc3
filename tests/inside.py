"""What tests look at or change behind the calls that users have: a rebuild of the inside changes this file alone.

The parts of one class that has tests of its own (a policy's books, a tree's nodes) are looked at in those tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from policies import Entry
from radixcache import PrefixCache, Row, Session, prefix_cache
from radixcache.adapters.registry import adapter_for, leaves
from radixcache.cells import causal
from radixcache.cells.causal import CausalCache
from radixcache.cells.table import CellPlan, CellTable
from radixcache.groups import passes
from radixcache.groups.tails import GROWTH_COLUMNS, TailLayer
from radixcache.paging.live_path import LivePath
from radixcache.settings import Settings
from radixcache.tokens import Quarantine
from radixcache.tree.entries import StateNode
from radixcache.tree.history import History
from runner.models import demo as demo_model


@contextmanager
def settings(**more: Any) -> Iterator[None]:
    """Have caches of models made with settings that a simulator alone gives."""
    with patch.object(prefix_cache, "Settings", partial(Settings, **more)):
        yield


# The tree of a cache


def nodes(cache: PrefixCache, namespace: str | None = None) -> list[StateNode]:
    """All nodes, of all namespaces or of one."""
    return list(cache._open.states.tree.nodes(namespace))


def stored_path(cache: PrefixCache, tokens: Any, namespace: str = "") -> list[StateNode]:
    """The nodes that some tokens go along, root side first."""
    return cache._open.states.match(np.asarray(tokens, np.int64), namespace).node.path()


def stored_tokens(cache: PrefixCache, tokens: Any, namespace: str = "") -> int:
    """How many of these tokens, from the first on, the tree holds."""
    return cache._open.states.match(np.asarray(tokens, np.int64), namespace).offset


def spans_of(node: StateNode) -> Any:
    """A node's snapshot of the span layers; None: it has none of its own, being live."""
    return node.payload.spans


def checkpoint_of(node: StateNode) -> Any:
    """The checkpoint at a node's end; None: there is none."""
    return node.payload.checkpoint


def window_pieces(cache: PrefixCache) -> int:
    """In how many pieces the tree has its state of windows."""
    stored = [node.payload.windows for node in cache._open.states.tree.nodes()]
    return sum(len(leaf.pieces) for spans in stored if spans is not None for leaf in spans.leaves if leaf is not None)


def slots_of(snapshot: Any) -> list[Any]:
    """The arrays in a checkpoint of an ArraysCache, to be changed in place."""
    return snapshot.state[0]  # type: ignore[no-any-return]


def is_in_use(node: StateNode) -> bool:
    """Whether a node is live, pinned, or stood on by a session."""
    state = node.payload
    return state.live or state.is_kept


def entries(cache: PrefixCache) -> list[Entry]:
    """What the policy was told of the tokens in the tree."""
    return [entry for node in nodes(cache) if (entry := node.payload.entry) is not None]


def before_each_split(cache: PrefixCache, call: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Have something called whenever a node is about to be cut in two."""
    split = cache._open.states.split

    def calling(*arguments: Any) -> Any:
        call()
        return split(*arguments)

    patch.setattr(cache._open.states, "split", calling)


def forget_history(cache: PrefixCache) -> None:
    """Forget what was evicted, and which prompts there were."""
    cache._open.states.events.history = History()


# Bytes


def has_states(cache: PrefixCache) -> bool:
    """Whether some layer's state is valid at one offset only."""
    return cache._core.layout.has_states


def token_bytes(cache: PrefixCache) -> int:
    """Bytes of a token in all span layers; 0 before the first forward pass, or where there are none."""
    return cache._core.layout.token_bytes


def window_bytes(cache: PrefixCache) -> int:
    """Bytes of a token in all layers with windows."""
    layout = cache._core.layout
    return sum(layout.window_bytes(window) for window in layout.windows)


def first_offset(cache: PrefixCache, caches: list[Any]) -> int | None:
    """Where the first layer with an offset stands."""
    return cache._core.layout.first_offset(caches)


def peak_bytes(cache: PrefixCache) -> int:
    """The most bytes that the budget's ledger had to account for."""
    return cache._core._ledger.peak_bytes


# Live slots


def paths(cache: PrefixCache) -> list[LivePath]:
    """What is live, a path per slot."""
    return cache._core._slots.paths


def live_caches(cache: PrefixCache, slot: int) -> list[Any]:
    """The mlx-lm caches of a slot."""
    return paths(cache)[slot].caches


def live_offset(cache: PrefixCache, slot: int) -> int:
    """Up to where the tree takes a slot's buffers to be filled."""
    return paths(cache)[slot].offset


def live_slots(cache: PrefixCache, namespace: str | None = None) -> list[int]:
    """The slots in which something is live, of all namespaces or of one."""
    tips = [(path.slot, path.tip.namespace) for path in paths(cache) if path.tip is not None]
    return [slot for slot, found in tips if namespace in (None, found)]


def idle_slots(cache: PrefixCache) -> list[int]:
    """The slots in which something is live and on which no session is."""
    return [slot for slot in live_slots(cache) if not paths(cache)[slot].is_open]


def restore_live_points(cache: PrefixCache, slot: int, checkpoint: Any, offset: int) -> None:
    """Restore a checkpoint into a slot's buffers."""
    cache._core.layout.restore_points(live_caches(cache, slot), checkpoint, offset, [])


def has_open_live_path(cache: PrefixCache) -> bool:
    """Whether a session is on a slot in which something is live."""
    return any(path.is_open and path.tip is not None for path in paths(cache))


def has_open_path(cache: PrefixCache) -> bool:
    """Whether a session is on one of the slots."""
    return any(path.is_open for path in paths(cache))


def has_free_path(cache: PrefixCache) -> bool:
    """Whether there is a slot without a session."""
    return not all(path.is_open for path in paths(cache))


def slots_bytes(cache: PrefixCache) -> int:
    """Bytes of the buffers of all slots."""
    return sum(path.booking.live_bytes for path in paths(cache))


# Quarantine


def quarantine(cache: PrefixCache, tokens: Any, start: int, namespace: str = "") -> None:
    """Quarantine what begins with these tokens, from an offset on, and leave the tree as it is."""
    cache._open.quarantine.add(np.asarray(tokens, np.int64), start, namespace)


def quarantined_from(cache: PrefixCache, tokens: Any, namespace: str = "") -> int | None:
    """The offset from which on these tokens are quarantined; None: they are not."""
    return cache._open.quarantine.offset(np.asarray(tokens, np.int64), namespace)


def unquarantined_tokens(cache: PrefixCache, tokens: Any, namespace: str = "") -> int:
    """How many of these tokens, from the first on, are not quarantined."""
    return cache._open.quarantine.limit(np.asarray(tokens, np.int64), namespace)


def find_wrong(cache: PrefixCache, session: Session, length: int, start: int) -> None:
    """Have a session's first `length` tokens found wrong from `start` on: quarantined, and out of the tree."""
    core = cache._core
    with core.lock:
        session.checkpoints.clear()
        session._live.booking.end_request()
        core.expel(session._live, session._request.keys[:length], start, session.namespace)


def quarantined_names(quarantine: Quarantine) -> list[bytes]:
    """Under what a quarantine keeps its prefixes."""
    return [name[2] for name in quarantine._entries]


# Sessions


def slot(session: Session) -> int:
    """The number of the slot that a session is on."""
    return session._live.slot


def checkpoints(request: Session | Row) -> list[Any]:
    """What a session or a row holds of checkpoints that the tree does not have yet."""
    return request.own.checkpoints if isinstance(request, Row) else request.checkpoints


def trim_own_windows(session: Session) -> None:
    """Give up what a session keeps of windows that none of its checkpoints needs."""
    session._progress.own.trim()


def own_window_bytes(session: Session) -> int:
    """Bytes of windows that a session keeps and the tree does not have yet."""
    return sum(each.nbytes for each in session._progress.own.windows)


def grid_end(session: Session) -> int:
    """Up to where a session of an exact cache has the state of a cold run to the bit."""
    return session._progress.grid_end


def is_lost(session: Session) -> bool:
    """Whether a session's state went with a failure."""
    return session.is_lost


def lose(session: Session) -> None:
    """Have a session's state count as lost, as after an evaluation that failed."""
    session.is_lost = True


# Groups and rows


def has_bookings(cache: PrefixCache) -> bool:
    """Whether bytes are booked for some group."""
    return bool(cache._core._bookings)


def known_tokens(row: Row) -> list[int]:
    """The prompt of a row and what was told of it since."""
    return row.known_keys().tolist()


def clean_tokens(row: Row) -> list[int]:
    """Those of a row's tokens that have the state that they would have alone."""
    return row.clean_keys().tolist()


def point_state(row: Row, model: Any) -> list[NDArray[Any]]:
    """What windows and recurrent layers hold of a row, in order of the tokens."""
    points = zip(leaves(row.batch.points(row.at, make_prompt_cache(model))), row.batch.leaves, strict=True)
    held = [leaf for leaf, its in points if not isinstance(its, TailLayer)]
    return [np.array(array) for leaf in held for array in adapter_for(leaf).buffers(leaf)]


def first_tokens(row: Row, count: int) -> list[mx.array]:
    """Keys and values of a row's first tokens, in all layers that have some per token."""
    found = []
    for index, leaf in enumerate(row.batch.leaves):
        if isinstance(leaf, TailLayer):
            snapshots = [spans.leaves[index] for spans in row.reads()]
            pairs = [segment for snapshot in snapshots if snapshot is not None for segment in snapshot.segments]
            pairs.append(leaf.columns_of(row.at, 0, row.batch.columns.lengths[row.at]))
            found += [mx.concatenate(list(arrays), axis=2)[..., :count, :] for arrays in zip(*pairs, strict=True)]
    return found


def growth_columns() -> int:
    """How many columns a batch's tails grow by."""
    return GROWTH_COLUMNS


def expel_tokens(cache: PrefixCache, tokens: Sequence[int], start: int) -> None:
    """Have what begins with these tokens count as found wrong from an offset on."""
    core = cache._core
    with core.lock:
        core.expel(core._slots.paths[0], np.array(tokens, dtype=np.int64), start, "")


def drop_unneeded_windows(cache: PrefixCache) -> None:
    """Have the tree give up all tokens of windows that no checkpoint needs."""
    cache._open.states.windows.drop_unneeded(lambda: 1)


def set_clock(cache: PrefixCache, clock: Callable[[], float]) -> None:
    """Have a cache time prefill and reading by another clock."""
    assert cache._core._tier is not None
    cache._core._tier.rates.clock = clock


def keep_on_disk(cache: PrefixCache, tokens: Sequence[int]) -> None:
    """Have a cache's store keep the path to the end of these tokens."""
    match = cache._open.states.match(np.array(tokens, dtype=np.int64), "")
    assert cache._core._tier is not None
    (writer,) = cache._core._tier._writers.values()
    writer.write(match.node, match.offset)


def first_layer(row: Row) -> dict[str, mx.array]:
    """What a row has of its first layer, in order of position, as far as a window goes back."""
    leaf = row.batch.leaves[0]
    if not isinstance(leaf, TailLayer):
        keys, values = adapter_for(leaf).state(leaf)
        return {"keys": keys, "values": values}
    keys, values = first_tokens(row, row.position)[:2]
    return {"keys": keys, "values": values}


def first_layer_alone(model: Any, tokens: Sequence[int]) -> dict[str, mx.array]:
    """What mlx-lm's own cache has of the first layer."""
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    keys, values = adapter_for(caches[0]).state(caches[0]) if hasattr(caches[0], "max_size") else caches[0].state[:2]
    return {"keys": keys[..., : len(tokens), :], "values": values[..., : len(tokens), :]}


def read_in_place(row: Row) -> list[Any]:
    """The spans that a row reads where the tree holds them."""
    return row.reads()


def found_ways() -> set[int]:
    """Ids of the models of which it is known how they decode several rows."""
    return set(passes._found)


def try_ways(model: Any) -> None:
    """Find out how rows of a model decode, before anything counts its passes."""
    passes.way_of(model, lambda: make_prompt_cache(model))


def taint_row(row: Row, offset: int) -> None:
    """Have a row's tokens count, from an offset on, as others than those they would be alone."""
    row._tainted = offset


# Cells


def cell_layers(causal: CausalCache) -> list[Any]:
    """The layers whose tokens are in cells."""
    return causal._cells


def row_states(causal: CausalCache) -> Any:
    """The states of the layers that cannot be put into cells, one per sequence."""
    return causal._states


def joined_rows(causal: CausalCache, *sequences: int) -> None:
    """Write down which sequences' states lie in one batch, whatever does."""
    causal._states._joined = sequences


def give_second_state(causal: CausalCache, sequence: int, array: mx.array) -> None:
    """Give the first layer of a sequence another state beside the one that lies in the batch."""
    causal._states._own[sequence][0].cache[0] = array


def taint(causal: CausalCache, sequence: int, offset: int) -> None:
    """Have a sequence's tokens count, from an offset on, as others than those they would be alone."""
    causal._tainted[sequence] = offset


def tries() -> dict[Any, Any]:
    """What was found out of each model by trying."""
    return dict(causal._found)


def table_fields(table: CellTable) -> dict[str, Any]:
    """Every field of a table by value, the stamp by identity: a plan made before is still good after."""
    state = dict(vars(table))
    for name in ("_is_used", "_sets"):
        state[name] = state[name].tolist()
    state["_sequences"] = {name: (each.bit, each.cells.tolist()) for name, each in table._sequences.items()}
    return state


def members(table: CellTable, cell: int) -> tuple[int, ...]:
    """Ids of the sequences that a cell belongs to; empty: the cell is free."""
    return tuple(name for name, each in table._sequences.items() if table._sets[cell][each.word] & each.flag)


def position(table: CellTable, cell: int) -> int | None:
    """Position of the token in a cell; None: the cell is free."""
    lists = (each.cells.tolist() for each in table._sequences.values())
    return next((cells.index(cell) for cells in lists if cell in cells), None)


def defragment(table: CellTable, room: int | None = None) -> CellPlan:
    """Plan a defragmentation and apply it at once."""
    plan = table.plan_defragment(room)
    table.apply(plan)
    return plan


def held_cells(table: CellTable) -> NDArray[np.bool_]:
    """Which cells hold a token of some sequence."""
    return table._is_used


# History


def piece_count(history: History) -> int:
    """How many pieces a history keeps of what was evicted."""
    return len(history._pieces)


# The runner


def mlx_lm_store(backend: Any) -> Any:
    """mlx-lm's own prompt cache, of the backend that measures it."""
    return backend._stored


def mlx_lm_segments(backend: Any, prompt: Any) -> list[tuple[int, str]]:
    """Where the mlx-lm backend stores on its way through a prompt, and as what."""
    return list(backend.segments(prompt))


def replies(replay: Any, cache: str) -> dict[int, list[int]]:
    """The tokens of the replies that a cache gave to several users at a time, by request."""
    return next(run.replies for run in replay._together if run.server.name == cache)


def set_budget(backend: Any, budget_bytes: int) -> None:
    """Give a backend another budget than it was opened with."""
    backend._budget_bytes = budget_bytes


def radix_cache(backend: Any) -> PrefixCache:
    """The PrefixCache of the backend that measures it."""
    cache: PrefixCache = backend._cache
    return cache


def float32(arrays: Any, name: str) -> mx.array:
    """A tensor of the demo model's file, as it is read."""
    return demo_model._float32(arrays, name)


def after_each_sync(call: Callable[[Any], object], patch: pytest.MonkeyPatch) -> None:
    """Have something called with the demo model's folder whenever it was written to disk."""
    sync = demo_model._sync

    def calling(folder: Any) -> None:
        sync(folder)
        call(folder)

    patch.setattr(demo_model, "_sync", calling)


# All of it


def everything(cache: PrefixCache) -> dict[str, Any]:
    """All that a cache keeps, by value: tree, entries, victim, bytes, slots, ticks, history and counters."""
    states, history = cache._open.states, cache._open.states.events.history
    found = nodes(cache)
    victim = states.victim()
    return {
        "dump": cache.dump(),
        "stats": cache.stats,
        "tick": cache._core._tick,
        "entries": [
            _entry(entry)
            for node in found
            for entry in (node.payload.entry, node.payload.checkpoint_entry)
            if entry is not None
        ],
        "edges": [(id(node), id(node.edge), id(node.payload.spans), id(node.payload.checkpoint)) for node in found],
        "held": [(node.payload.pins, node.payload.guards, node.payload.live_mask) for node in found],
        "victim": None if victim is None else (id(victim[0]), victim[1]),
        "next_entry_id": states.entries._last_id,
        "namespaces": [root.namespace for root in states.tree.roots()],
        "slots": [
            (
                path.offset,
                path.booking.live_bytes,
                path.is_open,
                path.used,
                id(path.guarded),
                [id(each) for each in path.caches],
            )
            for path in paths(cache)
        ],
        "sessions": [
            (session.is_lost, session.is_closed, session.thread)
            for path in paths(cache)
            if (session := path.tenant) is not None
        ],
        "pieces": [(piece.namespace, list(piece.parts), id(piece.below)) for piece in history._pieces],
        "prompts": {name: [id(keys) for keys in ring] for name, ring in history._prompts.items()},
        "policy": _plain(vars(states.policy)),
    }


def _entry(entry: Any) -> tuple[Any, ...]:
    return entry.entry_id, entry.start, entry.end, entry.weight_bytes, entry.last_used, entry.uses, entry.priority


def _plain(value: Any, depth: int = 3) -> Any:
    """The inner state of a policy as text, as far as it is values."""
    if isinstance(value, dict):
        return {str(key): _plain(each, depth - 1) for key, each in value.items()} if depth else len(value)
    return repr(value) if depth else ""
