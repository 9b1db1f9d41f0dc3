"""EvictionPolicy: the hooks that the cache calls to learn what to evict."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from policies.entry import Entry


@runtime_checkable
class EvictionPolicy(Protocol):
    """Choose which evictable entry goes first.

    The cache decides which entries *may* go; a policy orders them. Each entry is announced once with `inserted`. It may
    then be touched, split and merged, and leaves with `evicted` or as the first argument of `merged`. The hooks of one
    request come deepest node first. Ticks grow from request to request, but with several open sessions the new entries
    of a request may be announced after hooks of later requests. No hook reports a change of an entry's bytes, children
    or has_checkpoint, or of start, cost and parent of a checkpoint whose node is split or merged.

    Four attributes are optional:

    - `ranks_whole_edges` (default True): the victim stays the victim while its tail is cut key by key, so the cache may
      cut as much as it needs at once. False: the cache asks again after each step.
    - `bypass` (default False): an offline bound that may also refuse what the present request has added.
    - `pass_over(entry, cuts)`: the cache is about to cut the victim's tail at these offsets in turn, the deepest first.
      Record the cuts after which `entry` is still the victim, never the last one, and return their number; no other
      hook reports them. Called only if the keys of an edge cost the same.
    - `cut(entry)` (default None): the entry has lost its tail; `end`, `cost` and bytes are up to date. Without it, a
      cut is reported as a `split` into `entry` and a new entry, and `evicted` of the new one.

    The last two are asked of this package's own policies only.
    """

    def inserted(self, entry: Entry) -> None:
        """Note a new entry, which is not evictable yet."""

    def touched(self, entry: Entry) -> None:
        """Note that a request used the entry: `last_used`, `uses` and `priority` are already up to date."""

    def split(self, upper: Entry, lower: Entry) -> None:
        """Note that one entry became two. Exactly one is new to the policy; it inherits the history of the other."""

    def merged(self, gone: Entry, into: Entry) -> None:
        """Note that `gone` was joined to `into`, which now covers both edges; `gone` is never mentioned again."""

    def evicted(self, entry: Entry) -> None:
        """Forget the entry; it was evicted."""

    def evictable_changed(self, entry: Entry, evictable: bool) -> None:
        """Note that the entry became evictable, or stopped being evictable."""

    def victim(self) -> Entry | None:
        """Return the evictable entry to evict first, or None. Until the next hook, return the same entry."""
