"""EvictionPolicy: the hooks that the cache calls, and the one question that it asks.

The cache decides which entries *may* go; a policy orders them. Every entry is announced once with `inserted`, may then
be touched, split and merged, and leaves with `evicted` or as the first argument of `merged`. The hooks of one request
come deepest node first. Ticks grow from request to request, but with several open sessions a request's new entries may
be announced after hooks of later requests. No hook tells of a change of an entry's bytes, children or has_checkpoint,
or of start, cost and parent of a checkpoint whose node is split or merged.

Three attributes are optional:

- `ranks_whole_edges` (default True): the victim stays the victim while its tail is cut key by key, so the cache may cut
  as much as it needs at once. False: the cache asks again after each step.
- `bypass` (default False): an offline bound that may also refuse what the present request has added.
- `pass_over(entry, cuts)`: the cache is about to cut the victim's tail at these offsets in turn, the deepest first.
  Record the cuts after which `entry` is still the victim, never the last one, and return their number; no other hook
  tells of them. Called only if the keys of an edge cost the same.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from policies.entry import Entry


@runtime_checkable
class EvictionPolicy(Protocol):
    """Choose which evictable entry goes first."""

    def inserted(self, entry: Entry) -> None:
        """A new entry, not evictable yet."""

    def touched(self, entry: Entry) -> None:
        """A request used the entry: `last_used`, `uses` and `priority` are already up to date."""

    def split(self, upper: Entry, lower: Entry) -> None:
        """One entry became two. Exactly one is new to the policy; it inherits the history of the other."""

    def merged(self, gone: Entry, into: Entry) -> None:
        """`gone` was joined to `into`, which now covers both edges; `gone` is never mentioned again."""

    def evicted(self, entry: Entry) -> None:
        """The entry is gone."""

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        """The entry may go from now on, or no longer."""

    def victim(self) -> Entry | None:
        """The evictable entry that goes first, if any. Without a hook in between, the answer stays the same."""
