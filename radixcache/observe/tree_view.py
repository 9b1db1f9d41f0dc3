"""TreeView: what a tree holds, as plain values, in an order that a reader can go through.

Nodes come in preorder, siblings with the most tokens behind them first, so that all that hangs below a node follows it
at once. As JSON a description can be kept, and shown again later.

Invariants, asserted when one is read back:

  D1  A node's parent comes before it, or is -1; it begins where its parent ends, in the same namespace.
  D2  The nodes below a node are those that follow it, `below` in number.

collect: the description of a tree. What is copied under the lock is little; the rest is worked out after it.

Edges are arrays that are replaced and never written, so a reference to one is a copy of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from radixcache.tokens import Keys, token_text
from radixcache.tree.radix_tree import Node, below

FORMAT = "radixcache-tree"
VERSION = 1


class ViewError(Exception):
    """What was to be a description of a tree is none; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        parent, namespace: index of the parent, -1 at the top of a namespace; index into TreeView.namespaces.
        start, end: offsets of its tokens from the start of the sequence.
        span_bytes: bytes of its spans, where they are: in the live buffers, or as a snapshot.
        is_live, is_paged: in the live buffers of a slot; as a snapshot beside them.
        slots: the slots in which it is live.
        checkpoint, checkpoint_bytes: kind of the point state kept at its end, "" for none; its bytes.
        window_bytes, windows: bytes of what it has of layers with sliding windows; the tokens [start, end) that is of.
        is_pinned: some pin holds it itself; what is above a pinned node stays with it.
        pin_names: names of the pins that end here.
        is_open: an open session stands on it.
        uses, last_used: requests that used its spans, and the tick of the last.
        below, below_tokens, below_bytes: how many nodes hang below it, and what those hold.
        text: how it begins, decoded; None where no tokenizer was at hand.
        text_end: how it ends, where that is not in `text`.
    """

    parent: int
    namespace: int
    start: int
    end: int
    span_bytes: int
    is_live: bool
    is_paged: bool
    slots: tuple[int, ...] = ()
    checkpoint: str = ""
    checkpoint_bytes: int = 0
    is_pinned: bool = False
    pin_names: tuple[str, ...] = ()
    is_open: bool = False
    uses: int = 0
    last_used: int = 0
    below: int = 0
    below_tokens: int = 0
    below_bytes: int = 0
    text: str | None = None
    text_end: str | None = None
    window_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Spans, windows and checkpoint."""
        return self.span_bytes + self.window_bytes + self.checkpoint_bytes

    @property
    def residency(self) -> str:
        """live, paged, or both."""
        return "both" if self.is_live and self.is_paged else "live" if self.is_live else "paged"


@dataclass(frozen=True, slots=True)
class TreeView:
    """A tree.

    Attributes:
        namespaces: names, in the order their nodes come.
        nodes: in preorder.
        about: what else there is to say, by what it is: the policy, the budget.
        slot_count: slots that could be live.
    """

    namespaces: tuple[str, ...]
    nodes: tuple[NodeView, ...]
    about: tuple[tuple[str, str], ...] = ()
    slot_count: int = 1

    @property
    def tokens(self) -> int:
        return sum(node.tokens for node in self.nodes)

    @property
    def nbytes(self) -> int:
        return sum(node.nbytes for node in self.nodes)

    def to_json(self) -> str:
        """The description as JSON, a list per node in the order of `columns`."""
        columns = [field.name for field in fields(NodeView)]
        document = {"format": FORMAT, "version": VERSION, "namespaces": self.namespaces, "about": dict(self.about)}
        document |= {"slot_count": self.slot_count, "columns": columns}
        head = json.dumps(document, indent=1)[: -len("\n}")]
        rows = ",\n".join(json.dumps([getattr(node, name) for name in columns]) for node in self.nodes)
        return f'{head},\n "nodes": [\n{rows}\n ]\n}}\n'


def read_view(content: str | bytes) -> TreeView:
    """Read back what `to_json` wrote.

    Raises:
        ViewError: it is something else, of another version, or does not hold together.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ViewError(f"not JSON ({error}); wanted a saved tree.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ViewError(f'no saved tree; wanted an object with "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ViewError(f"a saved tree of version {document.get('version')!r}; wanted version {VERSION}.")
    try:
        view = TreeView(
            tuple(str(name) for name in document["namespaces"]),
            tuple(_node(dict(zip(document["columns"], row, strict=True))) for row in document["nodes"]),
            tuple((str(name), str(value)) for name, value in document["about"].items()),
            int(document["slot_count"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ViewError(f"a saved tree that is damaged ({type(error).__name__}: {error}).") from error
    _require_sound(view)
    return view


def _node(row: dict[str, Any]) -> NodeView:
    # Trees that were saved before windows were told of have none.
    row = {"window_bytes": 0, "windows": (), **row}
    for field in fields(NodeView):
        value = row[field.name]
        wanted = {"int": int, "bool": bool, "str": str}.get(str(field.type))
        if wanted is not None and type(value) is not wanted:
            raise ValueError(f"{field.name} is {value!r}; wanted {wanted.__name__}")
        if wanted is None and str(field.type).startswith("str") and not isinstance(value, str | None):
            raise ValueError(f"{field.name} is {value!r}; wanted a string or null")
    row["slots"] = tuple(int(slot) for slot in row["slots"])
    row["windows"] = tuple((int(start), int(end)) for start, end in row["windows"])
    row["pin_names"] = tuple(str(name) for name in row["pin_names"])
    return NodeView(**row)


def _require_sound(view: TreeView) -> None:
    path: list[tuple[int, int]] = []  # of the ancestors of the node at hand: index, and where what is below them ends
    for index, node in enumerate(view.nodes):
        while path and index >= path[-1][1]:
            path.pop()
        above, limit = path[-1] if path else (-1, len(view.nodes))
        start, namespace = (view.nodes[above].end, view.nodes[above].namespace) if path else (0, node.namespace)
        is_below = (node.parent, node.start, node.namespace) == (above, start, namespace)
        until = index + 1 + node.below
        wrong = None
        if not is_below or not 0 <= namespace < len(view.namespaces):
            wrong = "does not fit below its parent"
        elif node.end <= node.start or node.below < 0 or until > limit:
            wrong = "has a wrong length or too much below it"
        elif min(node.span_bytes, node.checkpoint_bytes, node.window_bytes, node.below_tokens, node.below_bytes) < 0:
            wrong = "has a negative size"
        if wrong:
            raise ViewError(f"a saved tree that is damaged: node {index} {wrong}.")
        path.append((index, until))


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
