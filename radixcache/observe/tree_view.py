"""TreeView: the contents of a tree as plain values, to be shown now or saved as JSON.

Nodes come in preorder, siblings with the most tokens first. So all nodes below a node follow it directly. `collect`
copies little under the lock and does the rest afterwards. The tree replaces the array of an edge and never writes into
it, so a reference is a copy.

Invariants, asserted by `read_view`:

  D1  The parent of a node comes before it, or is -1; a node starts where its parent ends, in the same namespace.
  D2  The nodes below a node are the next `below` nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from radixcache.tokens import Keys, token_text
from radixcache.tree.radix_tree import Node, below

FORMAT, VERSION = "radixcache-tree", 1
#: Tokens of an edge that are decoded, at its start and at its end.
HEAD_TOKENS, TAIL_TOKENS = 64, 16


class ViewError(Exception):
    """The content is no saved TreeView; the message says why."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node.

    Attributes:
        parent, namespace: index of the parent, -1 at the top of a namespace; index into TreeView.namespaces.
        start, end: offsets of its tokens from the start of the sequence.
        span_bytes: of its spans, wherever they are.
        is_live, slots, is_paged: whether its spans are in live buffers, of which slots; whether it has a snapshot.
        checkpoint, checkpoint_bytes: kind and bytes of the checkpoint at its end; "": there is none.
        window_bytes, windows: bytes of its sliding windows, and their tokens [start, end).
        is_pinned, pin_names: whether a pin holds it; names of the pins that end here.
        is_open: whether an open session stands on it.
        uses, last_used: how many requests used its spans, and the tick of the last use.
        below, below_tokens, below_bytes: the nodes below it, with their tokens and bytes.
        text, text_end: its start, decoded, and its end if that is not in `text`; None: there was no tokenizer.
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
        return "both" if self.is_live and self.is_paged else "live" if self.is_live else "paged"


@dataclass(frozen=True, slots=True)
class TreeView:
    """A tree: its nodes in preorder, namespaces in the same order, and facts such as the policy and the budget."""

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
        """The view as JSON, with a list for each node in the order of `columns`."""
        columns = [field.name for field in fields(NodeView)]
        document = {"format": FORMAT, "version": VERSION, "namespaces": self.namespaces, "about": dict(self.about)}
        document |= {"slot_count": self.slot_count, "columns": columns}
        head = json.dumps(document, indent=1)[: -len("\n}")]
        rows = ",\n".join(json.dumps([getattr(node, name) for name in columns]) for node in self.nodes)
        return f'{head},\n "nodes": [\n{rows}\n ]\n}}\n'


def read_view(content: str | bytes) -> TreeView:
    """Read what `to_json` wrote. ViewError: it is something else, another version, or damaged."""
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
    row = {"window_bytes": 0, "windows": (), **row}  # older files have no windows
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
    path: list[tuple[int, int]] = []  # for each ancestor of the node: its index, and where the nodes below it end
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


class _Copy(NamedTuple):
    """The copy of a node that is made under the lock. `about`: fields of NodeView."""

    node_id: int
    parent_id: int
    edge: Keys
    live_mask: int
    about: dict[str, Any]


def collect(
    states: Any, pins: Any, namespace: str | None, slot_count: int, tokenizer: Any, meanwhile: Any = dict
) -> TreeView:
    """Describe a StateTree with its Pins; `meanwhile` is called under the lock too."""
    with states.account.ledger.lock:
        roots = list(states.tree.roots(namespace))
        copies, names = _copied(roots, states.layout), pins.names_at()
        meanwhile()
    index = {node.node_id: number for number, node in enumerate(copies)}
    parents = [index.get(node.parent_id, -1) for node in copies]
    below_nodes, below_tokens, below_bytes = ([0] * len(copies) for _ in range(3))
    for number, node in reversed([*enumerate(copies)]):
        if (above := parents[number]) >= 0:
            nbytes = sum(node.about[name] for name in ("span_bytes", "checkpoint_bytes", "window_bytes"))
            below_nodes[above] += 1 + below_nodes[number]
            below_tokens[above] += len(node.edge) + below_tokens[number]
            below_bytes[above] += nbytes + below_bytes[number]
    nodes: list[NodeView] = []
    new_index = {-1: -1}
    for number in _order(copies, parents, below_tokens):
        node = copies[number]
        new_index[number] = len(nodes)
        text, text_end = (None, None) if tokenizer is None else _texts(node.edge, tokenizer)
        nodes.append(
            NodeView(
                parent=new_index[parents[number]],
                slots=tuple(slot for slot in range(slot_count) if node.live_mask >> slot & 1),
                pin_names=tuple(names.get(node.node_id, ())),
                below=below_nodes[number],
                below_tokens=below_tokens[number],
                below_bytes=below_bytes[number],
                text=text,
                text_end=text_end,
                **node.about,
            )
        )
    return TreeView(tuple(root.namespace for root in roots), tuple(nodes), slot_count=slot_count)


def _copied(roots: Sequence[Node[Any]], layout: Any) -> list[_Copy]:
    """The nodes below the roots, parents first."""
    copies: list[_Copy] = []
    for namespace, root in enumerate(roots):
        for node in below(root):
            state, edge = node.payload, node.edge
            assert state is not None, node
            spans, checkpoint, windows = state.spans, state.checkpoint, state.windows
            about = {
                "namespace": namespace,
                "start": node.start,
                "end": node.start + len(edge),
                "span_bytes": layout.token_bytes * len(edge) if spans is None else spans.nbytes,
                "is_live": state.live_mask != 0,
                "is_paged": spans is not None,
                "checkpoint": "" if checkpoint is None else checkpoint.kind,
                "checkpoint_bytes": 0 if checkpoint is None else checkpoint.nbytes,
                "window_bytes": 0 if windows is None else windows.nbytes,
                "windows": () if windows is None else tuple(layout.stored(windows, max(layout.windows))),
                "is_pinned": state.pins > 0,
                "is_open": state.guards > 0,
                "uses": state.entry.uses,
                "last_used": state.entry.last_used,
            }
            copies.append(_Copy(id(node), id(node.parent), edge, state.live_mask, about))
    return copies


def _order(copies: Sequence[_Copy], parents: Sequence[int], below_tokens: Sequence[int]) -> Iterator[int]:
    """Numbers of the nodes in preorder, siblings with the most tokens first."""
    children: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        children.setdefault(parent, []).append(number)
    for siblings in children.values():
        # The last sibling leaves the stack first. Namespaces stay in their order.
        siblings.sort(key=lambda n: (-copies[n].about["namespace"], len(copies[n].edge) + below_tokens[n], -n))
    stack = children.get(-1, [])
    while stack:
        number = stack.pop()
        yield number
        stack.extend(children.get(number, ()))


def _texts(edge: Keys, tokenizer: Any) -> tuple[str, str | None]:
    if len(edge) <= HEAD_TOKENS + TAIL_TOKENS:
        return token_text(edge, tokenizer), None
    return token_text(edge[:HEAD_TOKENS], tokenizer), token_text(edge[-TAIL_TOKENS:], tokenizer)
