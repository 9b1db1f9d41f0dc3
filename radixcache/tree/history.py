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
from typing import Any, NamedTuple

from radixcache.tokens.keys import Keys, common_length
from radixcache.tree.radix_tree import Node

#: Evicted pieces that are remembered, and the keys on their paths: 8 bytes each where no other piece has them too.
MAX_PIECES = 1024
MAX_PIECE_KEYS = 1 << 22
#: Prompts of each namespace that are remembered, and the keys of all of them, 8 bytes each.
MAX_PROMPTS = 8
MAX_PROMPT_KEYS = 1 << 20
#: Namespaces of which prompts are remembered.
MAX_NAMESPACES = 1024


class Loss(NamedTuple):
    """The tokens [start, end), or with start == end the checkpoint there, evicted at a tick, or found wrong then."""

    start: int
    end: int
    tick: int
    was_wrong: bool = False


class LostStretch:
    """An evicted stretch of one path.

    Attributes:
        edges: from the root to the end of what was evicted.
        last_start: where the last edge begins.
        parts: what went when, the deepest first; or one checkpoint.
        start, end: of all parts.
        below: the node that the stretch hung on when it was evicted; None once another piece came.
    """

    __slots__ = ("below", "edges", "end", "last_start", "namespace", "parts", "start")

    def __init__(self, node: Node[Any], start: int, tick: int, was_wrong: bool = False) -> None:
        self.namespace = node.namespace
        self.edges = edges = [node.edge]
        above = node.parent
        while above is not None and above.parent is not None:
            edges.append(above.edge)
            above = above.parent
        edges.reverse()
        self.last_start = node.start
        self.parts = [Loss(start, node.end, tick, was_wrong)]
        self.start, self.end = start, node.end
        self.below: Node[Any] | None = None

    def key_at(self, offset: int) -> int:
        """The key of the path at an offset below `end`."""
        if offset >= self.last_start:
            return int(self.edges[-1].item(offset - self.last_start))
        for edge in self.edges:
            if offset < len(edge):
                break
            offset -= len(edge)
        return int(edge.item(offset))

    def agreement(self, keys: Keys) -> int:
        """How far the path and a prompt go together."""
        offset = 0
        for edge in self.edges:
            common = common_length(edge, keys[offset : offset + len(edge)])
            offset += common
            if common < len(edge):
                break
        return offset


class History:
    """Evicted pieces and recent prompts of one cache, bounded."""

    def __init__(
        self,
        max_pieces: int = MAX_PIECES,
        max_piece_keys: int = MAX_PIECE_KEYS,
        max_prompts: int = MAX_PROMPTS,
        max_prompt_keys: int = MAX_PROMPT_KEYS,
    ) -> None:
        self._max_pieces, self._max_piece_keys = max_pieces, max_piece_keys
        self._max_prompts, self._max_prompt_keys = max_prompts, max_prompt_keys
        self._pieces: deque[LostStretch] = deque()
        self._prompts: dict[str, deque[Keys]] = {}
        self._piece_keys = self._prompt_keys = 0

    def evicted(self, node: Node[Any], start: int, tick: int, was_wrong: bool = False) -> None:
        """The tokens [start, node.end), on the node's edge, are about to go, under pressure or found wrong."""
        last = self._pieces[-1] if self._pieces else None
        if last is None or last.below is not node:
            last = self._add(LostStretch(node, start, tick, was_wrong))
        elif last.parts[-1][2:] == (tick, was_wrong):
            last.parts[-1] = last.parts[-1]._replace(start=start)
        else:
            last.parts.append(Loss(start, node.end, tick, was_wrong))
        last.start, last.below = start, node.parent if start == node.start else node

    def dropped_checkpoint(self, node: Node[Any], tick: int) -> None:
        """The checkpoint at a node's end is about to go, its tokens stay."""
        self._add(LostStretch(node, node.end, tick))

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

    def evicted_tokens(self, keys: Keys, namespace: str, stored: int) -> list[Loss]:
        """What was evicted of a prompt right behind the `stored` keys that the tree holds: parts in order, no gap."""
        # The newest first: what is nearer to the root went later. Who was passed over may follow what came after it.
        mine = [piece for piece in reversed(self._pieces) if piece.end > stored and piece.namespace == namespace]
        found: list[Loss] = []
        while parts := _next_parts(mine, keys, stored):
            found += parts
            stored = parts[-1].end
            mine = [piece for piece in mine if piece.end > stored]
        return found

    def evicted_checkpoint(self, keys: Keys, namespace: str, start: int, end: int) -> Loss | None:
        """The deepest checkpoint in (start, end] of a prompt's path that is gone; None: none is known."""
        found = [p for p in self._pieces if start < p.end == p.start <= end and p.namespace == namespace]
        for piece in sorted(found, key=lambda piece: -piece.end):
            end = piece.end
            # A few places first, so that most others need not be compared.
            is_likely = all(piece.key_at(at) == keys[at] for at in (end - 1, max(0, end - 9), end * 3 // 4, end // 2))
            if is_likely and piece.agreement(keys) == end:
                return piece.parts[0]
        return None

    def clear(self) -> None:
        """Forget all of it."""
        self._pieces.clear()
        self._prompts.clear()
        self._piece_keys = self._prompt_keys = 0

    def check(self) -> None:
        """Assert H1 and H2."""
        assert len(self._pieces) <= self._max_pieces, len(self._pieces)
        held = sum(piece.end for piece in self._pieces)
        assert held == self._piece_keys <= self._max_piece_keys, (held, self._piece_keys)
        asked = sum(len(keys) for ring in self._prompts.values() for keys in ring)
        assert asked == self._prompt_keys <= self._max_prompt_keys, (asked, self._prompt_keys)
        assert all(0 < len(ring) <= self._max_prompts for ring in self._prompts.values()), self._prompts
        for piece in self._pieces:
            for lower, upper in zip(piece.parts, piece.parts[1:], strict=False):
                assert upper.end == lower.start and upper.start < upper.end, piece.parts
            assert (piece.start, piece.end) == (piece.parts[-1].start, piece.parts[0].end), piece.parts
            assert 0 <= piece.start <= piece.end == sum(map(len, piece.edges)), piece.parts

    def _add(self, piece: LostStretch) -> LostStretch:
        pieces = self._pieces
        if pieces:
            pieces[-1].below = None
        pieces.append(piece)
        self._piece_keys += piece.end
        while len(pieces) > self._max_pieces or self._piece_keys > self._max_piece_keys:
            self._piece_keys -= pieces.popleft().end
        return piece

    def _forget_prompt(self) -> None:
        """The oldest prompt of the namespace that came first."""
        namespace, ring = next(iter(self._prompts.items()))
        self._prompt_keys -= len(ring.popleft())
        if not ring:
            del self._prompts[namespace]


def _next_parts(pieces: list[LostStretch], keys: Keys, start: int) -> list[Loss]:
    """The parts of the first of these pieces that has the prompt's keys from `start` on, in order; empty: none."""
    if start >= len(keys):
        return []
    key = int(keys[start])
    for piece in pieces:
        if piece.start <= start < piece.end and piece.key_at(start) == key:
            agreed = piece.agreement(keys)
            parts = reversed(piece.parts)
            cut = (part._replace(start=max(part.start, start), end=min(part.end, agreed)) for part in parts)
            if agreed > start:
                return [part for part in cut if part.start < part.end]
    return []
