"""How tests reach private parts of a cache and its sessions. Tests of one class read its private fields themselves."""

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

from radixcache import PrefixCache, Row, Session, prefix_cache
from radixcache.adapters.registry import adapter_for, leaves
from radixcache.cells.table import CellTable
from radixcache.groups import passes
from radixcache.groups.batch import TailLayer
from radixcache.paging.pager import OwnState
from radixcache.paging.resume import LivePath
from radixcache.settings import Settings
from radixcache.speculate.pace import DraftPace
from radixcache.tree.state_tree import StateNode
from runner.models import demo as demo_model


@contextmanager
def settings(**more: Any) -> Iterator[None]:
    """Give caches of models settings that only a simulator gives."""
    with patch.object(prefix_cache, "Settings", partial(Settings, **more)):
        yield


def core(cache: PrefixCache) -> Any:
    return cache._core


def layout(cache: PrefixCache) -> Any:
    return cache._core.layout


def states(cache: PrefixCache) -> Any:
    return cache._core.states


def suffixes(cache: PrefixCache) -> Any:
    """The suffix index; None until a request has asked for drafts."""
    return cache._core.draft_index.suffixes


def assume_pace(cache: PrefixCache, pace: DraftPace) -> None:
    """Let drafts go by this pace, before any generator of the cache is made."""
    core(cache).draft_pace = pace


def paths(cache: PrefixCache) -> list[LivePath]:
    """The live paths, one per slot."""
    return cache._core.slots.paths


def live(session: Session) -> LivePath:
    return session._live


def own_state(session: Session) -> OwnState:
    return session._own


def grid_end(session: Session) -> int:
    return session._grid_end


# The tree of a cache


def nodes(cache: PrefixCache, namespace: str | None = None) -> list[StateNode]:
    """All nodes, of all namespaces or of one."""
    return list(cache._core.states.tree.nodes(namespace))


def path_of(cache: PrefixCache, tokens: Any, namespace: str = "") -> list[StateNode]:
    """The nodes along some tokens, root side first."""
    return cache._core.states.match(np.asarray(tokens, np.int64), namespace).node.path()


def stored_tokens(cache: PrefixCache, tokens: Any, namespace: str = "") -> int:
    """How many of these tokens, from the first on, the tree holds."""
    return cache.explain(tokens, namespace).matched_tokens


def window_bytes(cache: PrefixCache) -> int:
    """Bytes of a token in all layers with windows."""
    layout = cache._core.layout
    return sum(layout.window_bytes(window) for window in layout.windows)


def slots_bytes(cache: PrefixCache) -> int:
    """Bytes of the buffers of all slots."""
    return sum(path.booking.live_bytes for path in paths(cache))


def quarantine(cache: PrefixCache, tokens: Any, start: int, namespace: str = "") -> None:
    """Quarantine what begins with these tokens, from an offset on, and leave the tree as it is."""
    cache._core.quarantine.add(np.asarray(tokens, np.int64), start, namespace)


def quarantined_from(cache: PrefixCache, tokens: Any, namespace: str = "") -> int | None:
    """The offset from which on these tokens are quarantined; None: they are not."""
    return cache._core.quarantine.offset(np.asarray(tokens, np.int64), namespace)


def unquarantined_tokens(cache: PrefixCache, tokens: Any, namespace: str = "") -> int:
    """How many of these tokens, from the first on, are not quarantined."""
    return cache._core.quarantine.limit(np.asarray(tokens, np.int64), namespace)


def find_wrong(cache: PrefixCache, session: Session, length: int, start: int) -> None:
    """Have a session's first `length` tokens found wrong from `start` on: quarantined, and out of the tree."""
    core = cache._core
    with core.lock:
        session.checkpoints.clear()
        session._live.booking.end_request()
        core.expel(session._live, session._request.keys[:length], start, session.namespace)


def checkpoints(request: Session | Row) -> list[Any]:
    """What a session or a row holds of checkpoints that the tree does not have yet."""
    return request.own.checkpoints if isinstance(request, Row) else request.checkpoints


# Groups and rows


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


def expel_tokens(cache: PrefixCache, tokens: Sequence[int], start: int) -> None:
    """Have what begins with these tokens count as found wrong from an offset on."""
    core = cache._core
    with core.lock:
        core.expel(core.slots.paths[0], np.array(tokens, dtype=np.int64), start, "")


def write_to_disk(cache: PrefixCache, tokens: Sequence[int]) -> None:
    """Write the path to the end of these tokens to a cache's store."""
    match = cache._core.states.match(np.array(tokens, dtype=np.int64), "")
    assert cache._core.tier is not None
    (writer,) = cache._core.tier._writers.values()
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


def try_ways(model: Any) -> None:
    """Find out how rows of a model decode, before anything counts its passes."""
    passes.way_of(model, lambda: make_prompt_cache(model))


def table_fields(table: CellTable) -> dict[str, Any]:
    """Every field of a table by value, the stamp by identity: a plan made before is still good after."""
    state = dict(vars(table))
    state["_counts"] = table._counts.tolist()
    state["_cells"] = {name: cells.tolist() for name, cells in table._cells.items()}
    return state


def members(table: CellTable, cell: int) -> tuple[int, ...]:
    """Ids of the sequences that a cell belongs to; empty: the cell is free."""
    return tuple(name for name, cells in table._cells.items() if cell in cells)


def position(table: CellTable, cell: int) -> int | None:
    """Position of the token in a cell; None: the cell is free."""
    lists = (cells.tolist() for cells in table._cells.values())
    return next((cells.index(cell) for cells in lists if cell in cells), None)


def after_each_sync(call: Callable[[Any], object], patch: pytest.MonkeyPatch) -> None:
    """Have something called with the demo model's folder whenever it was written to disk."""
    sync = demo_model._sync

    def calling(folder: Any) -> None:
        sync(folder)
        call(folder)

    patch.setattr(demo_model, "_sync", calling)


def everything(cache: PrefixCache) -> dict[str, Any]:
    """All that a cache keeps, by value: tree, entries, victim, bytes, slots, ticks, history and counters."""
    states, history = cache._core.states, cache._core.states.events.history
    found = nodes(cache)
    victim = states.victim()
    return {
        "dump": cache.dump(),
        "stats": cache.stats,
        "tick": cache._core._tick,
        "entries": [
            (entry.entry_id, entry.start, entry.end, entry.weight_bytes, entry.last_used, entry.uses, entry.priority)
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
            (path.offset, path.booking.live_bytes, path.is_open, path.used, id(path.guarded), [*map(id, path.caches)])
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


def _plain(value: Any, depth: int = 3) -> Any:
    """The inner state of a policy as text, as far as it is values."""
    if isinstance(value, dict):
        return {str(key): _plain(each, depth - 1) for key, each in value.items()} if depth else len(value)
    return repr(value) if depth else ""
