"""collect: the description of a tree. What is copied under the lock is little; the rest is worked out after it.

Edges are arrays that are replaced and never written, so a reference to one is a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from radixcache.tokens.keys import Keys
from radixcache.tokens.text import token_text
from radixcache.tree.radix_tree import Node, below
from radixcache.view.description import NodeView, TreeView

#: Tokens of an edge that are decoded, at its beginning and at its end.
HEAD_TOKENS = 64
TAIL_TOKENS = 16


class _Raw(NamedTuple):
    """What is copied of a node while the lock is held: as little work as can be."""

    node_id: int
    parent_id: int
    namespace: int
    start: int
    edge: Keys
    paged_bytes: int | None
    live_mask: int
    checkpoint: str
    checkpoint_bytes: int
    window_bytes: int
    windows: tuple[tuple[int, int], ...]
    pins: int
    guards: int
    uses: int
    last_used: int


def collect(
    lock: AbstractContextManager[Any],
    roots: Callable[[], Sequence[Node[Any]]],
    *,
    token_bytes: int,
    windows_of: Callable[[Any], Sequence[tuple[int, int]]] = lambda spans: (),
    pin_names: Callable[[], Mapping[int, Sequence[str]]] = dict,
    tokenizer: Any = None,
    about: Iterable[tuple[str, str]] = (),
    slot_count: int = 1,
    meanwhile: Callable[[], object] = lambda: None,
) -> TreeView:
    """Describe the trees below some roots.

    Args:
        lock: held while the nodes are gone through, and no longer.
        roots: one per namespace; called under the lock, as are `pin_names` and `meanwhile`.
        token_bytes: bytes of a token that is in the live buffers alone.
        windows_of: the tokens that state of windows is of.
        pin_names: names of pins by the id() of the node at which they end.
        tokenizer: decodes how edges begin and end; None: no text.
        meanwhile: what belongs to the same moment.
    """
    with lock:
        found = list(roots())
        raw, names = _copied(found, windows_of), pin_names()
        meanwhile()
    index = {node.node_id: number for number, node in enumerate(raw)}
    parents = [index.get(node.parent_id, -1) for node in raw]
    spans = [token_bytes * len(node.edge) if node.paged_bytes is None else node.paged_bytes for node in raw]
    below_nodes, below_tokens, below_bytes = [0] * len(raw), [0] * len(raw), [0] * len(raw)
    for number in reversed(range(len(raw))):
        if (above := parents[number]) >= 0:
            below_nodes[above] += 1 + below_nodes[number]
            below_tokens[above] += len(raw[number].edge) + below_tokens[number]
            below_bytes[above] += spans[number] + below_bytes[number]
            below_bytes[above] += raw[number].checkpoint_bytes + raw[number].window_bytes
    nodes: list[NodeView] = []
    new_index = {-1: -1}
    for number in _order(raw, parents, below_tokens):
        node = raw[number]
        new_index[number] = len(nodes)
        text, text_end = (None, None) if tokenizer is None else _texts(node.edge, tokenizer)
        nodes.append(
            NodeView(
                parent=new_index[parents[number]],
                namespace=node.namespace,
                start=node.start,
                end=node.start + len(node.edge),
                span_bytes=spans[number],
                is_live=node.live_mask != 0,
                is_paged=node.paged_bytes is not None,
                slots=tuple(slot for slot in range(slot_count) if node.live_mask >> slot & 1),
                checkpoint=node.checkpoint,
                checkpoint_bytes=node.checkpoint_bytes,
                is_pinned=node.pins > 0,
                pin_names=tuple(names.get(node.node_id, ())),
                is_open=node.guards > 0,
                uses=node.uses,
                last_used=node.last_used,
                below=below_nodes[number],
                below_tokens=below_tokens[number],
                below_bytes=below_bytes[number],
                text=text,
                text_end=text_end,
                window_bytes=node.window_bytes,
                windows=node.windows,
            )
        )
    return TreeView(tuple(root.namespace for root in found), tuple(nodes), tuple(about), slot_count)


def _copied(roots: Sequence[Node[Any]], windows_of: Callable[[Any], Sequence[tuple[int, int]]]) -> list[_Raw]:
    """The nodes below the roots, parents first."""
    raw: list[_Raw] = []
    for namespace, root in enumerate(roots):
        for node in below(root):
            state = node.payload
            assert state is not None, node
            paged_bytes = None if state.spans is None else state.spans.nbytes
            place = (id(node), id(node.parent), namespace, node.start, node.edge, paged_bytes, state.live_mask)
            kept: tuple[str, int] = (
                ("", 0) if state.checkpoint is None else (state.checkpoint.kind, state.checkpoint.nbytes)
            )
            windows = () if state.windows is None else tuple(windows_of(state.windows))
            window_bytes = 0 if state.windows is None else state.windows.nbytes
            raw.append(
                _Raw(
                    *place,
                    *kept,
                    window_bytes,
                    windows,
                    state.pins,
                    state.guards,
                    state.entry.uses,
                    state.entry.last_used,
                )
            )
    return raw


def _order(raw: Sequence[_Raw], parents: Sequence[int], below_tokens: Sequence[int]) -> Iterator[int]:
    """Numbers of the nodes in preorder, of siblings the one with the most tokens to its name first."""
    children: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        children.setdefault(parent, []).append(number)
    for siblings in children.values():
        # The last of them is taken off the stack first. Namespaces stay in their order.
        siblings.sort(key=lambda n: (-raw[n].namespace, len(raw[n].edge) + below_tokens[n], -n))
    stack = children.get(-1, [])
    while stack:
        number = stack.pop()
        yield number
        stack.extend(children.get(number, ()))


def _texts(edge: Keys, tokenizer: Any) -> tuple[str, str | None]:
    if len(edge) <= HEAD_TOKENS + TAIL_TOKENS:
        return token_text(edge, tokenizer), None
    return token_text(edge[:HEAD_TOKENS], tokenizer), token_text(edge[-TAIL_TOKENS:], tokenizer)
