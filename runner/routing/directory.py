"""Directory: which prefixes each replica is thought to store, by their digests, bounded in size. Never imports MLX.

    sent, told as added ──► a replica's digests, oldest first ──► told as removed, beyond the bound, replica forgotten

What was sent to a replica counts as there at once, so that the next request with this prefix follows it; what the
replica tells later corrects that. A digest that is wrong sends a request to where it is prefilled: it costs a miss, and
nothing else.

  DI1  A replica has `max_digests` at most; the oldest went for room. Sending and telling make digests young again.
  DI2  Of digests that came together, the deepest is the oldest: a prefix loses its end first.

Matching takes O(blocks) of a replica, sending and telling O(digests). Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

#: Of a replica: at 256 tokens a block 16 million tokens, in some 20 MB.
MAX_DIGESTS = 65_536


class Directory:
    """Replicas by name, each with its digests. Nobody need say that a replica is there before it has digests.

    Args:
        max_digests: the most that are kept of one replica.

    Raises:
        ValueError: `max_digests` is below 1.
    """

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        if max_digests < 1:
            raise ValueError(f"max_digests is {max_digests}; wanted at least 1.")
        self.max_digests = max_digests
        self._digests: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica: str, digests: Sequence[int]) -> None:
        """Take digests as stored: they were sent there, or it told so.

        Args:
            digests: of one prompt, from its beginning on; or of several, one behind the other.
        """
        known = self._digests.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self.max_digests:
            known.popitem(last=False)

    def remove(self, replica: str, digests: Iterable[int]) -> None:
        """Take digests as gone: the replica told so. Unknown ones are passed over."""
        known = self._digests.get(replica, OrderedDict())
        for digest in digests:
            known.pop(digest, None)

    def forget(self, replica: str) -> None:
        """Take everything of a replica as gone: it died, or tells all anew."""
        self._digests.pop(replica, None)

    def matched_blocks(self, replica: str, digests: Iterable[int]) -> int:
        """How many blocks a prompt begins with that this replica has; 0 of one that is not known."""
        known = self._digests.get(replica, ())
        count = 0
        for digest in digests:
            if digest not in known:
                break
            count += 1
        return count

    def count(self, replica: str) -> int:
        """How many digests of a replica are known."""
        return len(self._digests.get(replica, ()))

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: DI1 does not hold.
        """
        for replica, known in self._digests.items():
            assert len(known) <= self.max_digests, (replica, len(known), self.max_digests)

    def dump(self) -> str:
        """A line per replica: its name and how many digests it has."""
        return "\n".join(f"{replica}: {len(known):,} digests" for replica, known in sorted(self._digests.items()))
