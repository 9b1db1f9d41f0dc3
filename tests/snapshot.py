"""everything: all that a PrefixCache keeps, as values that can be compared before and after a call."""

from __future__ import annotations

from typing import Any

from radixcache import PrefixCache
from radixcache.tree.state_tree import state_of


def everything(cache: PrefixCache) -> dict[str, Any]:
    """Tree, entries, victim, bytes, slots, ticks, history and counters of a cache."""
    states, history = cache._states, cache._states.history
    nodes = list(states.tree.nodes())
    victim = states.victim()
    return {
        "dump": cache.dump(),
        "stats": cache.stats,
        "tick": cache._tick,
        "entries": [
            _entry(entry)
            for node in nodes
            for entry in (state_of(node).entry, state_of(node).checkpoint_entry)
            if entry is not None
        ],
        "edges": [(id(node), id(node.edge), id(state_of(node).spans), id(state_of(node).checkpoint)) for node in nodes],
        "held": [(state_of(node).pins, state_of(node).guards, state_of(node).live_mask) for node in nodes],
        "victim": None if victim is None else (id(victim[0]), victim[1]),
        "next_entry_id": states._next_entry_id,
        "namespaces": states.tree.namespaces(),
        "slots": [
            (path.offset, path.nbytes, path.is_open, path.used, id(path.guarded), [id(each) for each in path.caches])
            for path in cache._slots.paths
        ],
        "sessions": [
            (session.is_lost, session.is_closed, session.thread)
            for path in cache._slots.paths
            if (session := cache._slots.session_on(path)) is not None
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
