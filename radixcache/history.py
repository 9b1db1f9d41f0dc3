"""History: what was evicted of late, and which prompts came of late, as far as `explain` needs them. Never imports MLX.

An evicted piece is kept as the edges of its path, which are shared with the tree and copied nowhere, and as the ticks
at which its parts went. A leaf that loses its tail step by step, and then its parent the same way, make one piece:

    root ── a [0, 40) ── b [40, 100)      b loses [80, 100) at tick 5, the rest at 6; a goes at 7
    piece   edges a, b    parts [80, 100) 5, [40, 80) 6, [0, 40) 7

Nothing is hashed or compared when something is evicted: that is left to whoever asks.

Invariants, asserted by `check`:

  H1  Pieces and the keys on their paths, prompts and their keys stay within their bounds; the oldest are forgotten.
  H2  The parts of a piece follow each other, the deepest first, and end where its edges end.

`evicted` is O(depth of the node), `asked` O(1). Not thread-safe: PrefixCache holds the only lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from radixcache.tree import Keys, Node, common_length

#: Evicted pieces that are remembered, and the keys on their paths: 8 bytes each where no other piece has them too.
MAX_PIECES = 1024
MAX_PIECE_KEYS = 1 << 22
#: Prompts of each namespace that are remembered, and the keys of all of them, 8 bytes each.
MAX_PROMPTS = 8
MAX_PROMPT_KEYS = 1 << 20
#: Namespaces of which prompts are remembered.
MAX_NAMESPACES = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens [start, end), or with start == end the checkpoint there, evicted at a tick."""

    start: int
    end: int
    tick: int


@dataclass(slots=True, eq=False)
class Piece:
    """An evicted stretch of one path.

    Attributes:
        namespace: of the path.
        edges: from the root to the end of what was evicted.
        parts: what went when, the deepest first.
        probe, probe_key: an offset of the path and the key there, to tell most other paths from this one.
        below: the node that the stretch hung on when it was evicted; None once another piece came.
    """

    namespace: str
    edges: list[Keys]
    parts: list[Part]
    probe: int
    probe_key: int
    below: Node[Any] | None = None

    @property
    def start(self) -> int:
        return self.parts[-1].start

    @property
    def end(self) -> int:
        return self.parts[0].end


@dataclass(slots=True)
class Evicted:
    """What the history knows of one prompt: parts that it begins with, cut to where it parts from them."""

    tokens: list[Part] = field(default_factory=list)
    checkpoints: list[Part] = field(default_factory=list)


class History:
    """Evicted pieces and recent prompts of one cache, bounded."""

    def __init__(
        self,
        max_pieces: int = MAX_PIECES,
        max_piece_keys: int = MAX_PIECE_KEYS,
        max_prompts: int = MAX_PROMPTS,
        max_prompt_keys: int = MAX_PROMPT_KEYS,
    ) -> None:
        self._max_pieces = max_pieces
        self._max_piece_keys = max_piece_keys
        self._max_prompts = max_prompts
        self._max_prompt_keys = max_prompt_keys
        self._pieces: deque[Piece] = deque()
        self._piece_keys = 0
        self._prompts: dict[str, deque[Keys]] = {}
        self._prompt_keys = 0

    def evicted(self, node: Node[Any], start: int, tick: int) -> None:
        """The tokens [start, node.end), on the node's edge, are about to go."""
        end = node.end
        part = Part(start, end, tick)
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.below is node and last.start == end:
            if last.parts[-1].tick == tick:
                part = Part(start, last.parts.pop().end, tick)
            last.parts.append(part)
        else:
            last = self._add(node, part, start)
        last.probe, last.probe_key = start, int(node.edge[start - node.start])
        last.below = node.parent if start == node.start else node

    def dropped_checkpoint(self, node: Node[Any], tick: int) -> None:
        """The checkpoint at a node's end is about to go, its tokens stay."""
        self._add(node, Part(node.end, node.end, tick), node.end - 1)

    def asked(self, namespace: str, keys: Keys) -> None:
        """A prompt came."""
        ring = self._prompts.get(namespace)
        if ring is None:
            while len(self._prompts) >= MAX_NAMESPACES:
                self._forget_prompt()
            ring = self._prompts[namespace] = deque()
        ring.append(keys)
        self._prompt_keys += len(keys)
        if len(ring) > self._max_prompts:
            self._prompt_keys -= len(ring.popleft())
        while self._prompt_keys > self._max_prompt_keys:
            self._forget_prompt()

    def prompts(self, namespace: str) -> list[Keys]:
        """The recent prompts of a namespace, the newest first."""
        return list(reversed(self._prompts.get(namespace, ())))

    def look_up(self, keys: Keys, namespace: str, stored: int) -> Evicted:
        """What of a prompt, of which the first `stored` keys are in the tree, was evicted."""
        found = Evicted()
        known: dict[tuple[int, int], int] = {}
        length = len(keys)
        for piece in self._pieces:
            if piece.probe >= length or piece.probe_key != keys[piece.probe] or piece.namespace != namespace:
                continue
            is_checkpoint = piece.start == piece.end
            if piece.end <= stored and not is_checkpoint:
                continue
            agreed = _agreement(piece.edges, keys, known)
            if is_checkpoint:
                found.checkpoints += piece.parts if piece.end <= agreed else []
                continue
            for part in piece.parts:
                if part.start < agreed > stored < part.end:
                    found.tokens.append(Part(max(part.start, stored), min(part.end, agreed), part.tick))
        return found

    def check(self) -> None:
        """Assert H1 and H2."""
        assert len(self._pieces) <= self._max_pieces, len(self._pieces)
        held = sum(piece.end for piece in self._pieces)
        assert held == self._piece_keys, (held, self._piece_keys)
        assert held <= self._max_piece_keys, held
        asked = sum(len(keys) for ring in self._prompts.values() for keys in ring)
        assert asked == self._prompt_keys <= self._max_prompt_keys, (asked, self._prompt_keys)
        assert all(0 < len(ring) <= self._max_prompts for ring in self._prompts.values()), self._prompts
        for piece in self._pieces:
            for lower, upper in zip(piece.parts, piece.parts[1:], strict=False):
                assert upper.end == lower.start and upper.start < upper.end, piece.parts
            assert 0 <= piece.start <= piece.end == sum(map(len, piece.edges)), piece.parts

    def _add(self, node: Node[Any], part: Part, probe: int) -> Piece:
        if self._pieces:
            self._pieces[-1].below = None
        edges = [each.edge for each in node.path()]
        piece = Piece(node.namespace, edges, [part], probe, int(node.edge[probe - node.start]))
        self._pieces.append(piece)
        self._piece_keys += node.end
        while len(self._pieces) > self._max_pieces or self._piece_keys > self._max_piece_keys:
            self._piece_keys -= self._pieces.popleft().end
        return piece

    def _forget_prompt(self) -> None:
        """The oldest prompt of the namespace that came first."""
        namespace, ring = next(iter(self._prompts.items()))
        self._prompt_keys -= len(ring.popleft())
        if not ring:
            del self._prompts[namespace]


def _agreement(edges: list[Keys], keys: Keys, known: dict[tuple[int, int], int]) -> int:
    """How far a path and a prompt go together; `known` has, by array and offset, what was compared before."""
    offset = 0
    for edge in edges:
        place = (id(edge), offset)
        common = known.get(place)
        if common is None:
            common = known[place] = common_length(edge, keys[offset : offset + len(edge)])
        offset += common
        if common < len(edge):
            break
    return offset
