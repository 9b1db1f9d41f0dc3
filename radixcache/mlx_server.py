"""What takes the place of mlx-lm's classes in servers, on a PrefixCache.

    RadixPromptCache      LRUPromptCache: a PrefixCache per model on one budget
    RadixBatchGenerator   BatchGenerator
    plan_prefill          for engines with caches of their own: what to evaluate, and where to pause to store state

mlx_lm.server takes a RadixPromptCache after two lines:

    import mlx_lm.server, radixcache.mlx_server
    mlx_lm.server.LRUPromptCache = radixcache.mlx_server.RadixPromptCache

A beginning that several prompts share is held once. A prompt finds its longest usable beginning even where it differs
from what is stored, with sliding windows and recurrent layers too.

A PrefillPlan:

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

import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from mlx_lm.generate import BatchGenerator
from numpy.typing import NDArray

from policies import Entry, OrderedPolicy
from radixcache.adapters.registry import adapter_for, leaves
from radixcache.core import Core, insert_offsets
from radixcache.errors import SnapshotError
from radixcache.layers.layout import NATIVE_ERRORS
from radixcache.ledger import Ledger
from radixcache.paging.resume import PrefixRequest
from radixcache.prefix_cache import PrefixCache
from radixcache.tokens import Keys, TokenIds, common_length
from radixcache.tree.state_tree import StateNode

logger = logging.getLogger(__name__)

#: mlx-lm's types of caches, and the priority that the state of each has.
PRIORITIES = {"assistant": 0, "user": 1, "system": 2}
LAST = PRIORITIES["system"]  # the type that goes last
#: For each step of priority, state counts as used so many calls later. A larger number finds less: system prompts that
#: begin with the time of day would fill the budget.
HEAD_START_CALLS = 10


class RadixPromptCache:
    """Takes the place of mlx-lm's LRUPromptCache. Thread-safe. `len` and `max_size` count leaves of trees.

    Args:
        max_size: the most sequences held. They go by type, as in mlx-lm: an assistant's while there are at least as
            many as of users, a user's while there are at least as many as system prompts. Of one type, those used
            longest ago go first.
        max_bytes: the most bytes held, of all models together; unlimited by default, as in mlx-lm.

    Raises:
        ValueError: max_bytes is not a positive whole number.
    """

    def __init__(self, max_size: int = 10, max_bytes: int = 1 << 63) -> None:
        self.max_size, self.max_bytes = max_size, max_bytes
        self._ledger = Ledger(max_bytes)
        # The model used last is at the end. A model may have caches of several classes: --kv-bits quantizes long ones.
        self._models: dict[Any, dict[tuple[type, ...], PrefixCache]] = {}

    def __len__(self) -> int:
        return sum(each["n_sequences"] for each in self.stats_by_type().values())

    @property
    def nbytes(self) -> int:
        return self._ledger.total_bytes

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """Return caches with the longest usable beginning of `tokens`, and the tokens left to evaluate, at least one.

        The caller owns the caches, which are outside of the budget. (None, tokens): nothing usable is stored.

        Args:
            model: any hashable that tells models apart.
            tokens: token ids; negative ones stand for an image, as in mlx_lm.server.
        """
        keys = np.array(tokens, np.int64)  # An image's token id is 0; its keys tell it from other images.
        end = len(keys)
        with self._ledger.lock:
            caches = self._used(model).values()
            while caches and end > 0:
                found = (cache.fetch(np.maximum(keys[:end], 0), keys=keys[:end]) for cache in caches)
                restored, rest = min(found, key=lambda each: len(each[1]))
                offset = end - len(rest)
                start = _image_start(keys, offset)
                if start == offset > 0:
                    return restored, tokens[offset:]
                end = start + 1 if start < offset else 0  # A part of an image cannot be embedded.
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Store the state that `prompt_cache` has of `tokens` and the tree lacks; copies it.

        A draft model's caches may follow the model's: then as much is stored as both have.

        Args:
            prompt_cache: mlx-lm caches, batch 1; recurrent ones must be at the end of `tokens`.

        Raises:
            KeyError: cache_type is not in PRIORITIES.
            UnsupportedCacheError: a class of cache that has no adapter, or cannot be emptied.
            SnapshotError: the caches do not fit the tokens, or what is stored; nothing was changed.
        """
        priority, classes = PRIORITIES[cache_type], tuple(map(type, leaves(prompt_cache)))
        keys = np.array(tokens, np.int64)
        if len(keys) == 0:
            return
        with self._ledger.lock:
            caches = self._used(model)
            if classes not in caches:
                empty = copy.deepcopy(list(prompt_cache))  # The arrays share their buffers with the originals.
                for layer, cache in enumerate(leaves(empty)):
                    adapter_for(cache, layer).free(cache)
                fresh = partial(copy.deepcopy, empty)
                caches[classes] = PrefixCache(caches=fresh, budget_bytes=self._ledger, policy=_HeadStart())
            caches[classes].insert(np.maximum(keys, 0), prompt_cache, priority=priority, keys=keys)
            self.trim_to(n_sequences=self.max_size)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict until at most `n_sequences` and `n_bytes` are left: sequences by type, then least recently used models.

        O(nodes), and O(log(sequences)) for each that goes.
        """
        with self._ledger.lock:
            if n_sequences is not None:
                self._trim_sequences(max(0, n_sequences))
            if n_bytes is not None:
                for core in self._cores():
                    held_bytes = core.states.account.total_bytes
                    core.evictor.shrink_to(max(0, held_bytes - self.nbytes + max(0, n_bytes)))

    def _trim_sequences(self, most: int) -> None:
        # Of each type, in the order of use: models first, as each counts its own calls.
        stored: list[list[tuple[int, int, int, Core, StateNode]]] = [[] for _ in PRIORITIES]

        def add(model: int, core: Core, node: StateNode) -> None:
            entry = node.payload.entry
            heappush(stored[entry.priority], (model, entry.last_used, entry.entry_id, core, node))

        for model, core in enumerate(self._cores()):
            for node in core.states.tree.nodes():
                if node.is_leaf:
                    add(model, core, node)
        while sum(map(len, stored)) > most:
            pairs = enumerate(pairwise(stored))
            rank = next((each for each, (ours, more) in pairs if len(ours) >= max(1, len(more))), LAST)
            model, _, _, core, node = heappop(stored[rank])
            node = core.states.remove(node)
            # So do the nodes above that lead to no other leaf. A system prompt stays as a sequence of its own.
            while node.is_leaf and not node.is_root:
                is_kept = rank < LAST == node.payload.entry.priority
                if is_kept and not core.states.is_useless(node):
                    break
                node = core.states.remove(node)
            core.evictor.tidy(node)
            if node.payload is not None and node.is_leaf:
                add(model, core, node)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes of each type; state of several types counts for the last of them in PRIORITIES."""
        found = {cache_type: {"n_sequences": 0, "n_bytes": 0} for cache_type in PRIORITIES}
        by_priority = list(found.values())
        with self._ledger.lock:
            for core in self._cores():
                for node in core.states.tree.nodes():
                    entry = node.payload.entry
                    by_priority[entry.priority]["n_sequences"] += node.is_leaf
                    by_priority[entry.priority]["n_bytes"] += entry.weight_bytes
        return found

    def check(self) -> None:
        """Assert the limits, that the bytes of all types are nbytes, and the invariants of all trees and the ledger."""
        with self._ledger.lock:
            assert self.nbytes <= self.max_bytes, (self.nbytes, self.max_bytes)
            assert len(self) <= self.max_size, (len(self), self.max_size)
            assert sum(each["n_bytes"] for each in self.stats_by_type().values()) == self.nbytes, self.stats_by_type()
            for core in self._cores():
                core.check()

    def _used(self, model: Any) -> dict[tuple[type, ...], PrefixCache]:
        """The caches of a model; marks the model as used last."""
        self._models[model] = caches = self._models.pop(model, {})
        return caches

    def _cores(self) -> Iterator[Core]:
        return (cache._core for caches in self._models.values() for cache in caches.values())


class _HeadStart(OrderedPolicy):
    """Least recently used first, with a head start for higher priorities; the deepest first on ties."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        return (entry.last_used + HEAD_START_CALLS * entry.priority, -entry.end)


def _image_start(keys: NDArray[np.int64], offset: int) -> int:
    """Where the image begins that an offset is inside of; the offset itself if it is in none."""
    start = offset
    while 0 < start < len(keys) and keys[start - 1] == keys[offset] < 0:
        start -= 1
    return start


# Prefill in other engines --------------------------------------------------------------------------------------------

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
        wanted |= {*insert_offsets(core, request.prompt, request.keys, request.namespace, request.marks)}
    else:  # Other prompts can resume anywhere; the stops only store state soon.
        wanted |= {*request.marks, *range(interval, end, interval)}
    stops = [start]
    for stop in sorted(wanted):
        if stops[-1] + LEAST_TOKENS <= stop < end:
            stops.append(stop)
    if end - stops[-1] >= (1 if core.layout.has_points else LEAST_TOKENS):
        stops.append(end)
    return tuple(stops[1:])


# On BatchGenerator ---------------------------------------------------------------------------------------------------


class RadixBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's BatchGenerator on a PrefixCache. It belongs to one thread.

    A prompt is looked up when its prefill begins, not when it is inserted. If another prompt is about to evaluate the
    same beginning, it waits in the queue. State is stored as soon as a part of a prompt is evaluated, and when a reply
    ends. Prompts that are inserted with caches of their own are left alone.

    Attributes:
        prefixes: the cache; None: generate without one.
        marks: by uid, offsets of a prompt worth a checkpoint, such as the ends of messages. The engine adds them before
            the next call of next().
    """

    def __init__(self, model: Any, *, prefixes: PrefixCache | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self.prefixes = prefixes
        self.marks: dict[int, Sequence[int]] = {}
        self._plans: dict[int, PrefillPlan] = {}  # of the prompts and replies that take part in passes

    def next(self) -> tuple[list[Any], list[Any]]:
        """Run one pass, as BatchGenerator does: the responses of prompts, and of replies."""
        prefixes = self.prefixes
        if prefixes is None:
            return super().next()  # type: ignore[no-any-return]
        held = self._start(prefixes)
        try:
            prompts, replies = super().next()
        finally:
            self._unprocessed_sequences.extend(held)
        for uid, tokens in zip(self._prompt_batch.uids, self._prompt_batch.tokens, strict=True):
            plan = self._plans.get(uid)
            if plan is not None and len(tokens) in plan.stops and len(tokens) > plan.position:
                _store(prefixes, tokens, self.extract_cache([uid])[uid][0])
                plan.position = len(tokens)
        for each in replies:
            if each.finish_reason is not None and each.uid in self._plans:
                _store(prefixes, each.all_tokens, each.prompt_cache)
        uids = {*self._prompt_batch.uids, *self._generation_batch.uids}
        self._plans = {uid: plan for uid, plan in self._plans.items() if uid in uids}
        return prompts, replies

    def _start(self, prefixes: PrefixCache) -> list[Any]:
        """Leave in the queue what the next pass takes out of it, with restored caches. Return the rest."""
        room = self.completion_batch_size - len(self._generation_batch)
        room = min(room, self.prefill_batch_size - len(self._prompt_batch))
        if room <= 0:
            return []
        queue: deque[Any] = self._unprocessed_sequences
        prompts = {each[0]: np.array([*chain.from_iterable(each[1])], np.int64) for each in queue if _is_new(each)}
        running = [self._plans[uid] for uid in self._prompt_batch.uids if uid in self._plans]
        started, held = list[Any](), list[Any]()
        for entry in queue:
            uid, segments, *_ = entry
            if uid in prompts and len(started) < room:
                ends = [*accumulate(map(len, segments))][:-2]
                marks = [*ends, *self.marks.get(uid, ())]
                others = [prompt for other, prompt in prompts.items() if other != uid]
                plan = plan_prefill(prefixes, prompts[uid], marks=marks, running=running, waiting=others)
                if plan is None:
                    held.append(entry)
                    continue
                logger.info(
                    "prompt %s: %d of %d tokens to evaluate", uid, len(prompts[uid]) - plan.start, len(prompts[uid])
                )
                running.append(plan)
                self._plans[uid] = plan
                entry = _planned(entry, plan, ends)
            (started if len(started) < room else held).append(entry)
        queue.clear()
        queue.extend(started)
        self.marks = {uid: self.marks[uid] for uid, *_ in held if uid in self.marks}
        return held


def _store(prefixes: PrefixCache, tokens: Sequence[int], caches: Sequence[Any]) -> None:
    """Store state. A failure never fails a request."""
    try:
        prefixes.insert(tokens, caches)
    except (SnapshotError, *NATIVE_ERRORS) as error:
        logger.warning("the state of %d tokens is not stored: %s", len(tokens), error)


def _is_new(entry: Any) -> bool:
    """Whether a sequence of the queue has no state yet."""
    return all(each.empty() for each in entry[3])


def _planned(entry: Any, plan: PrefillPlan, ends: Sequence[int]) -> Any:
    """A sequence of the queue, with restored caches and the segments of its plan, and also cut at `ends`."""
    uid, _, max_tokens, caches, _, *rest = entry
    caches, plan.caches = plan.caches if plan.start else caches, []
    return uid, plan.segments(ends), max_tokens, caches, plan.tokens[: plan.start].tolist(), *rest
