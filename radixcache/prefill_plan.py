"""PrefillPlan: what an engine with caches of its own evaluates of a prompt, and where it pauses to store state.

    0            start         stop          stop              end    length
    |  restored  |  segment    |  segment    |  segment        |  last |
                               insert()      insert()          insert()

At a stop, the engine calls PrefixCache.insert() and sets `position`. Then other prompts can resume there. Stops are
where another prompt leaves this prompt, the offsets at which layers with point state need a checkpoint, and the end,
before the last token. The end is no stop if few tokens were evaluated since the last stop, and all layers are span
layers: the engine stores these tokens with the reply.

A prompt waits while another prompt evaluates the same tokens, if its first token comes no later in this way than if
both are evaluated at the same time. A prompt never waits for a few tokens, or for another namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from radixcache.core import Core
from radixcache.paging.resume import PrefixRequest, checkpoint_stops
from radixcache.prefix_cache import PrefixCache
from radixcache.tokens import Keys, TokenIds, common_length

#: A stop costs a forward pass, so stops are at least so many tokens apart. A prompt waits for at least so many tokens.
LEAST_TOKENS = 64


@dataclass(eq=False, slots=True)
class PrefillPlan:
    """The prefill of one prompt; made by plan_prefill().

    Attributes:
        tokens: token ids of the whole prompt.
        caches: fresh mlx-lm caches with the first `start` tokens, which the caller owns.
        start: how many tokens were restored.
        stops: ascending offsets after `start`, at which the engine calls insert().
        position: how many tokens the engine has given to insert(). The engine sets it.
    """

    tokens: TokenIds
    caches: list[Any]
    start: int
    stops: tuple[int, ...]
    _keys: Keys = field(repr=False)
    _namespace: str = field(repr=False)
    _has_points: bool = field(repr=False)
    position: int = field(init=False)

    def __post_init__(self) -> None:
        self.position = self.start

    def segments(self, more_stops: Iterable[int] = ()) -> list[list[int]]:
        """The token ids to evaluate, cut at the stops and at `more_stops`. The last segment is the last token alone."""
        length = len(self.tokens)
        cuts = {self.start, *self.stops, *(stop for stop in more_stops if stop > self.start), length - 1, length}
        return [self.tokens[low:high].tolist() for low, high in pairwise(sorted(cuts))]

    def helps(self, keys: Keys, namespace: str, found: int) -> bool:
        """Whether a prompt of which `found` tokens are stored should wait for this prefill."""
        if namespace != self._namespace:
            return False
        shared = min(common_length(self._keys, keys), len(keys) - 1)
        for stop in self.stops:
            gained = min(stop, shared) - found
            if stop <= self.position or gained < LEAST_TOKENS or (self._has_points and stop > shared):
                continue
            # Without the wait, both prefills share the device.
            if stop - self.position <= gained + len(keys) - found:
                return True
        return False


def plan_prefill(
    cache: PrefixCache,
    tokens: Any,
    namespace: str = "",
    marks: Sequence[int] = (),
    *,
    keys: Any = None,
    running: Iterable[PrefillPlan] = (),
    waiting: Iterable[Any] = (),
) -> PrefillPlan | None:
    """cache.fetch() for an engine that serves many prompts: what to evaluate, and where to pause for cache.insert().

    Returns None if the prompt should wait: a running prefill soon has more of its tokens than the cache has now. Ask
    again after the next insert().

    Args:
        tokens, namespace, keys: as for PrefixCache.fetch().
        marks: offsets worth a checkpoint, as for PrefixCache.begin().
        running: the plans of the prompts that are in prefill, of any namespace.
        waiting: the keys of other prompts that wait. The prefill pauses where they leave this prompt.
    """
    prompt, prompt_keys = cache._checked(tokens, keys, namespace, marks)
    core, plans = cache._core, list(running)
    with core.lock:
        found = core.lookup(prompt_keys, namespace, len(prompt) - 1).plan.resume if plans else 0
        if any(each.helps(prompt_keys, namespace, found) for each in plans):
            return None
        request = PrefixRequest(prompt, prompt_keys, namespace, core.next_use(), tuple(map(int, marks)))
        caches, rest = core.fetch(request)
        start = len(prompt) - len(rest)
        stops = _stops(core, request, start, waiting)
        return PrefillPlan(prompt, caches, start, stops, prompt_keys, namespace, core.layout.has_points)


def _stops(core: Core, request: PrefixRequest, start: int, waiting: Iterable[Any]) -> tuple[int, ...]:
    end, interval = request.limit, core.settings.checkpoint_interval
    others = [np.asarray(each, np.int64) for each in waiting]
    wanted = {min(common_length(request.keys, each), len(each) - 1) for each in others}
    if core.layout.has_points:
        matched = core.lookup(request.keys, request.namespace, end).plan.matched
        kept = core.budget.kept_tokens(len(request.prompt))
        wanted |= {*checkpoint_stops(core.settings, request, start, end, matched=matched, resumed=start, kept=kept)}
    else:  # Other prompts can resume anywhere; the stops only store state soon.
        wanted |= {*request.marks, *range(interval, end, interval)}
    stops = [start]
    for stop in sorted(wanted):
        if stops[-1] + LEAST_TOKENS <= stop < end:
            stops.append(stop)
    if end - stops[-1] >= (1 if core.layout.has_points else LEAST_TOKENS):
        stops.append(end)
    return tuple(stops[1:])
