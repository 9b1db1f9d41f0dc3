"""RadixBatchGenerator: mlx-lm's BatchGenerator on a PrefixCache, for servers that are built on BatchGenerator.

    generator = RadixBatchGenerator(model, prefixes=PrefixCache(model), stop_tokens=...)
    (uid,) = generator.insert([tokens])
    prompts, replies = generator.next()

A prompt is looked up when its prefill begins, and not when it is inserted. If another prompt is about to evaluate the
same beginning, it waits for this beginning in the queue. State is stored as soon as a part of a prompt is evaluated,
and when a reply ends.

A generator belongs to one thread. Prompts that are inserted with caches of their own are left alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from mlx_lm.generate import BatchGenerator

from radixcache.errors import SnapshotError
from radixcache.layers.layout import NATIVE_ERRORS
from radixcache.prefill_plan import PrefillPlan, plan_prefill
from radixcache.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)


class RadixBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's BatchGenerator on a PrefixCache.

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
