"""Replay a script of requests through several caches, in one process, and record what each request cost.

For one user at a time, the caches take turns: each request goes through all of them. For several users at a time, each
cache serves the whole script alone. Then radix and none serve it for one user at a time, for comparison.

Invariants:

  RR2  If caches take turns, each request begins with the next cache. So a slow moment of the machine does not always
       hit the same cache. Each cache has the whole budget.
  PR1  A user's requests are submitted one after the other, in the order of the script.
  PR2  If several requests can be served next, the first of them in the script is.
  PR3  All caches get the same prompts. A reply in a prompt is the recorded one, or else that of the first cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from radixcache import TreeView
from radixcache.tokens import common_length
from runner.engine.generation import generate
from runner.models.load import LoadedModel
from runner.replay import ReplayOptions
from runner.replay.caches import PlainRun
from runner.replay.servers import BatchServer, OneAtATime, RequestRow, Server, TreeServer
from runner.script.script import Prompt, Script, ScriptError


@dataclass(frozen=True)
class CacheRun:
    """What one cache answered, in the order of the script. `view`: the tree at the end, if the options ask for it."""

    cache: str
    rows: tuple[RequestRow, ...]
    evictions: int
    wall_s: float
    view: TreeView | None = None
    users_at_a_time: int = 1
    peak_tokens: int = 0


@dataclass(frozen=True)
class AnswerDifference:
    """A reply that differs from the one without a cache. `gap`: of the two highest logits where it begins to differ."""

    cache: str
    index: int
    gap: float


class Observer(Protocol):
    def run_started(self, cache: str, requests: int) -> None: ...

    def request_advanced(self, cache: str, done_tokens: int, prompt_tokens: int) -> None: ...

    def request_done(self, cache: str, row: RequestRow) -> None: ...


class Replay:
    """Runs a script through several caches. If `run` is interrupted, `result` has what finished."""

    def __init__(
        self,
        loaded: LoadedModel,
        script: Script,
        caches: Sequence[str],
        options: ReplayOptions,
        observer: Observer,
        users_at_a_time: int | None = None,
    ) -> None:
        """Prepare a replay. `users_at_a_time` None: one request at a time, and the caches take turns."""
        self._loaded, self._script, self._options, self._observer = loaded, script, options, observer
        self._caches = tuple(caches)
        users = len({request.conversation.user for request in script.requests})
        self._users = None if users_at_a_time is None else min(users_at_a_time, users)
        self._together: list[_Run] = []
        self._alone: list[_Run] = []

    def run(self) -> list[CacheRun]:
        """Serve all requests; returns `result`. ScriptError: a prompt with generated replies is too long."""
        with wired_limit(self._loaded.model):
            _warm_up(self._loaded, self._script[0].prompt)
            if self._users is None:
                self._take_turns(map(self._open_alone, self._caches), self._alone)
                return self.result()
            for cache in self._caches:
                self._take_turns(map(partial(self._open_together, self._users), [cache]), self._together)
            # The same script once more, one request at a time, for comparison.
            self._take_turns(map(self._open_alone, ("radix", "none")), self._alone)
            return self.result()

    def result(self) -> list[CacheRun]:
        """The requests that every cache has answered; with several users at a time, all that each cache answered."""
        if self._users is None:
            return self._answered_by_all()
        return [run.result(len(run.rows)) for run in self._together if run.rows]

    def alone(self) -> list[CacheRun]:
        """With several users at a time: the same requests one at a time."""
        return [] if self._users is None else self._answered_by_all()

    def differences(self) -> list[AnswerDifference]:
        """Every reply that differs from the one without a cache, if rounding may change replies; else nothing.

        Rounding may change them with several users at a time, and with `stored_bits`.
        """
        if self._users is None and self._options.stored_bits is None:
            return []
        alone = {run.server.name: run.replies for run in self._alone}
        expected = alone.pop("none", {})
        replies = {run.server.name: run.replies for run in self._together}
        replies |= {cache if self._users is None else f"{cache} alone": found for cache, found in alone.items()}
        return [
            AnswerDifference(cache, index, self._gap(index, tokens, found[index]))
            for cache, found in replies.items()
            for index, tokens in expected.items()
            if index in found and found[index] != tokens
        ]

    def _answered_by_all(self) -> list[CacheRun]:
        requests = min((len(run.rows) for run in self._alone), default=0)
        return [run.result(requests) for run in self._alone] if requests else []

    def _open_alone(self, cache: str) -> _Run:
        on_advance = partial(self._observer.request_advanced, cache)
        return _Run(OneAtATime(cache, self._loaded, self._options, on_advance), cache, self._script, self._observer)

    def _open_together(self, users: int, cache: str) -> _Run:
        # Enough for all users, so that no request waits for capacity.
        capacity = users * self._script.longest_tokens
        server: Server
        if cache == "radix":
            server = TreeServer(self._loaded, self._options, capacity=capacity, users=users)
        else:
            server = BatchServer(self._loaded, self._options, users=users)
        label, reply_tokens = f"{cache} together", self._options.max_tokens
        return _Run(server, label, self._script, self._observer, users, capacity, reply_tokens)

    def _take_turns(self, opening: Iterable[_Run], into: list[_Run]) -> None:
        """Open runs, append each to `into` as it opens, and serve the script with all of them in turns."""
        runs: list[_Run] = []
        _release()
        try:
            for run in opening:
                runs.append(run)
                into.append(run)
            for run in runs:
                self._observer.run_started(run.label, len(self._script))
            turns = [run.serve(records_replies=run is runs[0]) for run in runs]
            for index in range(len(self._script)):
                first = index % len(turns)
                for turn in [*turns[first:], *turns[:first]]:
                    next(turn)
        finally:
            for run in runs:
                run.close(self._loaded.tokenizer, self._options)
            _release()

    def _gap(self, index: int, one: Sequence[int], other: Sequence[int]) -> float:
        """The difference of the two highest logits at the first token where two replies differ."""
        same = common_length(np.asarray(one), np.asarray(other))
        if same == min(len(one), len(other)):
            return float("inf")
        tokens = [*self._script[index].prompt.tokens.tolist(), *one[:same]]
        caches = make_prompt_cache(self._loaded.model)
        logits = self._loaded.model(mx.array([tokens]), cache=caches)[0, -1].astype(mx.float32)
        highest = mx.sort(logits)[-2:]
        return float(np.asarray(highest[1] - highest[0]))


@dataclass(eq=False)
class _Run:
    """Serves the script with one server, by default one request at a time."""

    server: Server
    label: str
    script: Script
    observer: Observer
    users: int = 1
    capacity: int = 0
    reply_tokens: int = 0

    def __post_init__(self) -> None:
        self.rows: dict[int, RequestRow] = {}
        self.replies: dict[int, list[int]] = {}
        self._left = list(range(len(self.script)))
        self._busy: set[str] = set()
        self._evictions: list[int] = []  # the count after each reply
        self._wall_s = 0.0
        self._view: TreeView | None = None

    def serve(self, *, records_replies: bool) -> Iterator[None]:
        """Serve all requests; yield after each reply. With `records_replies`, later prompts contain the replies."""
        began_s = time.perf_counter()
        while self._submit():
            for answer in self.server.answers():
                index, row = answer.index, answer.row
                self.rows[index], self.replies[index] = row, list(answer.tokens)
                self._evictions.append(self.server.evictions)
                if records_replies:
                    self.script.record_reply(index, answer.text)
                self._busy.remove(row.user)
                self._wall_s += time.perf_counter() - began_s
                self.observer.request_done(self.label, row)
                yield
                began_s = time.perf_counter()
                self._submit()

    def close(self, tokenizer: Any, options: ReplayOptions) -> None:
        """Release every array; keep the view."""
        shown = self.server.shown
        if shown is not None and options.keep_view:
            self._view = shown.view(tokenizer=tokenizer)
        self.server.close()

    def result(self, requests: int) -> CacheRun:
        return CacheRun(
            self.server.name,
            tuple(self.rows[index] for index in sorted(self.rows)[:requests]),
            self._evictions[requests - 1],
            self._wall_s,
            self._view,
            self.users,
            self.server.peak_tokens,
        )

    def _submit(self) -> bool:
        """Submit every request that can be served now; False: there was none."""
        waiting = len(self._left)
        for index in list(self._left):
            if len(self._busy) == self.users:
                break
            scheduled = self.script.requests[index]
            user = scheduled.conversation.user
            if user not in self._busy:
                self._busy.add(user)
                self._left.remove(index)
                request = self.script[index]
                needed = len(request.prompt.tokens) + self.reply_tokens
                if self.capacity and needed > self.capacity:
                    where = f"user {user}, {scheduled.conversation.conversation_id}, turn {scheduled.turn}"
                    raise ScriptError(
                        f"{where}: with generated replies, prompt and reply need {needed:,} tokens; there is room for "
                        f"{self.capacity:,}. Ask for shorter replies with --max-tokens."
                    )
                self.server.submit(index, request)
        return len(self._left) < waiting


def _release() -> None:
    gc.collect()
    mx.clear_cache()


def _warm_up(loaded: LoadedModel, prompt: Prompt) -> None:
    """Run a short prompt and a decode step, so that the first cache does not pay for compiling and loading weights."""
    tokens = prompt.tokens[:64]  # enough to compile kernels and to touch every weight
    run = PlainRun(tokens, make_prompt_cache(loaded.model))
    for _ in generate(run, loaded.model, loaded.tokenizer, max_tokens=2):
        pass
