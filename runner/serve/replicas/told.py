"""What a replica tells: how requests ended, and which prefixes it stores, by digests at block borders, changes alone.

    edges of the tree ──▶ digests, the shorter prefix before the longer ──▶ added, removed since the last time

At most MAX_DIGESTS are told of, parents before children; who listens anew is told all of them. Never imports MLX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from radixcache.watch.edges import Edge
from runner.routing.digests import BLOCK_TOKENS, chain_digests, root_digest
from runner.routing.directory import MAX_DIGESTS
from runner.serve.asked import Record


@dataclass(frozen=True)
class Told:
    """Since the last time. `added` has shorter prefixes before longer ones."""

    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    records: Sequence[Record] = ()


@dataclass
class Telling:
    """What one listener was told so far.

    Attributes:
        model: the name that digests are made with; `secret` too.
    """

    model: str
    secret: bytes
    max_digests: int = MAX_DIGESTS
    _told: dict[int, None] = field(default_factory=dict)

    def changes(self, edges: Iterable[Edge]) -> tuple[list[int], list[int]]:
        """What was added and removed, given all that is stored now."""
        found = dict.fromkeys(islice(self._digests(edges), self.max_digests))
        added = [digest for digest in found if digest not in self._told]
        removed = [digest for digest in self._told if digest not in found]
        self._told = found
        return added, removed

    def _digests(self, edges: Iterable[Edge]) -> Iterable[int]:
        # Of each edge: the digest at its last border, and the keys behind that.
        ends: list[tuple[int, np.ndarray]] = []
        for edge in edges:
            if edge.parent < 0:
                digest, keys = root_digest(self.model, edge.namespace, self.secret), edge.keys
            else:
                digest, before = ends[edge.parent]
                keys = np.concatenate([before, edge.keys])
            digests = chain_digests(keys, digest)
            yield from digests
            rest = keys[len(digests) * BLOCK_TOKENS :]
            ends.append((digests[-1] if digests else digest, rest))
