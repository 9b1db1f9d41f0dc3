"""EvictionPolicy: what the cache layer tells a policy, and the one question it asks.

The cache layer owns the entries and decides what *may* go; a policy only orders what may. Every entry is announced
once with `inserted`, may then be touched, split and merged, and leaves with `evicted` or as the first argument of
`merged`. A policy never sees an entry again after that. `victim` is asked as long as bytes are wanted; it must
answer with an entry that is evictable at that moment, and asking twice without a hook between gives the same answer.

Three attributes are optional. `ranks_whole_edges` (default True): the victim stays the victim while its tail is cut,
key by key, so that a cache may cut as much of it as it needs at once; False: ask again after each step. `bypass`
(default False): an offline bound that may also refuse what the request being served has added. `pass_over(entry,
cuts)`: the victim's tail is about to be cut at these offsets in turn, the deepest first. It says how many of them would
leave `entry` the victim, the last one never among them, and takes note of those as if it had heard of each; the next
one it hears of. Asked only where the keys of an edge cost the same.

Order of calls: the hooks of one request come deepest node first, so the root side is the newest. Ticks grow from
request to request, but with several sessions open what a request adds may be announced after hooks of later requests.
An entry's bytes, children and has_checkpoint change without a hook; so do start, cost and parent of a checkpoint whose
node is split or merged.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from policies.entry import Entry


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses which evictable entry goes first."""

    def inserted(self, entry: Entry) -> None:
        """A new entry, not evictable yet."""

    def touched(self, entry: Entry) -> None:
        """A request used the entry: `last_used`, `uses` and `priority` are already up to date."""

    def split(self, upper: Entry, lower: Entry) -> None:
        """One entry became two. Exactly one is new to the policy; it inherits the history of the other."""

    def merged(self, gone: Entry, into: Entry) -> None:
        """`gone` was joined to `into`, which now covers both edges; `gone` is never mentioned again."""

    def evicted(self, entry: Entry) -> None:
        """The entry is gone, by eviction or because its node was removed."""

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        """The entry may go from now on, or may not any more."""

    def victim(self) -> Entry | None:
        """The evictable entry that should go first; None when nothing is evictable."""
