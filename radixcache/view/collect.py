"""collect: the description of a tree. What is copied under the lock is little; the rest is worked out after it.

Edges are arrays that are replaced and never written, so a reference to one is a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixcache.tree import Keys, below
from radixcache.view.description import NodeView, TreeView

if TYPE_CHECKING:
    from radixcache.state_tree import StateNode

#: Tokens of an edge that are decoded, at its beginning and at its end.
HEAD_TOKENS = 64
TAIL_TOKENS = 16

#: Keys above are digests of something else than text.
LARGEST_ID = (1 << 31) - 1


@dataclass(slots=True)
class _Seen:
    """A node as it stood when the lock was held, and what is worked out about it."""

    parent: int
    namespace: int
    start: int
    edge: Keys
    span_bytes: int
    is_live: bool
    is_paged: bool
    slots: tuple[int, ...]
    checkpoint: str
    checkpoint_bytes: int
    is_pinned: bool
    pin_names: tuple[str, ...]
    is_open: bool
    uses: int
    last_used: int
    below: int = 0
    below_tokens: int = 0
    below_bytes: int = 0


def collect(
    lock: AbstractContextManager[Any],
    roots: Callable[[], Sequence[StateNode]],
    *,
    token_bytes: int,
    pin_names: Callable[[], Mapping[int, Sequence[str]]] = dict,
    tokenizer: Any = None,
    about: Iterable[tuple[str, str]] = (),
    slot_count: int = 1,
) -> TreeView:
    """Describe the trees below some roots.

    Args:
        lock: held while the nodes are gone through, and no longer.
        roots: the roots, one per namespace; called under the lock, as is `pin_names`.
        token_bytes: bytes of a token that is in the live buffers alone.
        pin_names: names of pins by the id() of the node at which they end.
        tokenizer: decodes how edges begin and end; None: no text.
    """
    with lock:
        found = list(roots())
        seen = _walk(found, token_bytes, slot_count, pin_names())
    for node in reversed(seen):
        if node.parent >= 0:
            parent = seen[node.parent]
            parent.below += 1 + node.below
            parent.below_tokens += len(node.edge) + node.below_tokens
            parent.below_bytes += node.span_bytes + node.checkpoint_bytes + node.below_bytes
    nodes = _in_order(seen, tokenizer)
    return TreeView(tuple(root.namespace for root in found), nodes, tuple(about), slot_count)


def _walk(
    roots: Sequence[StateNode], token_bytes: int, slot_count: int, pin_names: Mapping[int, Sequence[str]]
) -> list[_Seen]:
    seen: list[_Seen] = []
    for namespace, root in enumerate(roots):
        index = {id(root): -1}
        for node in below(root):
            state = node.payload
            assert state is not None, node
            index[id(node)] = len(seen)
            checkpoint = state.checkpoint
            length = node.end - node.start
            seen.append(
                _Seen(
                    parent=index[id(node.parent)],
                    namespace=namespace,
                    start=node.start,
                    edge=node.edge,
                    span_bytes=token_bytes * length if state.spans is None else state.spans.nbytes,
                    is_live=state.live,
                    is_paged=state.spans is not None,
                    slots=tuple(slot for slot in range(slot_count) if state.live_mask >> slot & 1),
                    checkpoint="" if checkpoint is None else checkpoint.kind,
                    checkpoint_bytes=0 if checkpoint is None else checkpoint.nbytes,
                    is_pinned=state.pins > 0,
                    pin_names=tuple(pin_names.get(id(node), ())),
                    is_open=state.guards > 0,
                    uses=state.entry.uses,
                    last_used=state.entry.last_used,
                )
            )
    return seen


def _in_order(seen: list[_Seen], tokenizer: Any) -> tuple[NodeView, ...]:
    """The nodes in preorder, of siblings the one with the most tokens to its name first."""
    children: dict[int, list[int]] = {}
    for old, node in enumerate(seen):
        children.setdefault(node.parent, []).append(old)
    for siblings in children.values():
        # The last of them is taken off the stack first. Namespaces stay in their order.
        siblings.sort(key=lambda old: (-seen[old].namespace, len(seen[old].edge) + seen[old].below_tokens, -old))
    stack, new_index = list(children.get(-1, ())), {-1: -1}
    nodes: list[NodeView] = []
    while stack:
        old = stack.pop()
        node = seen[old]
        new_index[old] = len(nodes)
        stack.extend(children.get(old, ()))
        text, text_end = (None, None) if tokenizer is None else _texts(node.edge, tokenizer)
        values = {name: getattr(node, name) for name in _COPIED}
        end = node.start + len(node.edge)
        nodes.append(NodeView(parent=new_index[node.parent], end=end, text=text, text_end=text_end, **values))
    return tuple(nodes)


_COPIED = [name for name in _Seen.__slots__ if name not in ("parent", "edge")]


def _texts(edge: Keys, tokenizer: Any) -> tuple[str, str | None]:
    if len(edge) <= HEAD_TOKENS + TAIL_TOKENS:
        return _decoded(edge, tokenizer), None
    return _decoded(edge[:HEAD_TOKENS], tokenizer), _decoded(edge[-TAIL_TOKENS:], tokenizer)


def _decoded(keys: Keys, tokenizer: Any) -> str:
    """Text of a run of keys; what stands for something else than a token is named by its first digits."""
    parts: list[str] = []
    ids: list[int] = []
    for key in [*map(int, keys), -1]:
        if 0 <= key <= LARGEST_ID:
            ids.append(key)
            continue
        if ids:
            parts.append(_decoded_ids(ids, tokenizer))
            ids = []
        if key != -1:
            parts.append(f"[key {key & (1 << 64) - 1:016x}]")
    return "".join(parts)


def _decoded_ids(ids: list[int], tokenizer: Any) -> str:
    try:
        return str(tokenizer.decode(ids))
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return f"[ids {' '.join(map(str, ids))}]"  # keys of the caller's own making, which its tokenizer does not know
