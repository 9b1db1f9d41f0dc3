"""collect: the description of a tree. What is copied under the lock is little; the rest is worked out after it.

Edges are arrays that are replaced and never written, so a reference to one is a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from radixcache.tokens.text import token_text
from radixcache.tree.radix_tree import Keys, below
from radixcache.view.description import NodeView, TreeView

if TYPE_CHECKING:
    from radixcache.tree.state_tree import StateNode

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
    pins: int
    guards: int
    uses: int
    last_used: int


@dataclass(slots=True)
class _Below:
    """What hangs below a node."""

    nodes: int = 0
    tokens: int = 0
    nbytes: int = 0


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
        raw = _copied(found)
        names = pin_names()
    index = {node.node_id: number for number, node in enumerate(raw)}
    parents = [index.get(node.parent_id, -1) for node in raw]
    spans = [token_bytes * len(node.edge) if node.paged_bytes is None else node.paged_bytes for node in raw]
    below_of = [_Below() for _ in raw]
    for number in reversed(range(len(raw))):
        if parents[number] >= 0:
            above, own = below_of[parents[number]], below_of[number]
            above.nodes += 1 + own.nodes
            above.tokens += len(raw[number].edge) + own.tokens
            above.nbytes += spans[number] + raw[number].checkpoint_bytes + own.nbytes
    nodes: list[NodeView] = []
    new_index = {-1: -1}
    for number in _order(raw, parents, below_of):
        node, own = raw[number], below_of[number]
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
                below=own.nodes,
                below_tokens=own.tokens,
                below_bytes=own.nbytes,
                text=text,
                text_end=text_end,
            )
        )
    return TreeView(tuple(root.namespace for root in found), tuple(nodes), tuple(about), slot_count)


def _copied(roots: Sequence[StateNode]) -> list[_Raw]:
    """The nodes below the roots, parents first."""
    raw: list[_Raw] = []
    for namespace, root in enumerate(roots):
        for node in below(root):
            state = node.payload
            assert state is not None, node
            spans, checkpoint, entry = state.spans, state.checkpoint, state.entry
            raw.append(
                _Raw(
                    id(node),
                    id(node.parent),
                    namespace,
                    node.start,
                    node.edge,
                    None if spans is None else spans.nbytes,
                    state.live_mask,
                    "" if checkpoint is None else checkpoint.kind,
                    0 if checkpoint is None else checkpoint.nbytes,
                    state.pins,
                    state.guards,
                    entry.uses,
                    entry.last_used,
                )
            )
    return raw


def _order(raw: Sequence[_Raw], parents: Sequence[int], below_of: Sequence[_Below]) -> Iterator[int]:
    """Numbers of the nodes in preorder, of siblings the one with the most tokens to its name first."""
    children: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        children.setdefault(parent, []).append(number)
    for siblings in children.values():
        # The last of them is taken off the stack first. Namespaces stay in their order.
        siblings.sort(key=lambda n: (-raw[n].namespace, len(raw[n].edge) + below_of[n].tokens, -n))
    stack = children.get(-1, [])
    while stack:
        number = stack.pop()
        yield number
        stack.extend(children.get(number, ()))


def _texts(edge: Keys, tokenizer: Any) -> tuple[str, str | None]:
    if len(edge) <= HEAD_TOKENS + TAIL_TOKENS:
        return token_text(edge, tokenizer), None
    return token_text(edge[:HEAD_TOKENS], tokenizer), token_text(edge[-TAIL_TOKENS:], tokenizer)
