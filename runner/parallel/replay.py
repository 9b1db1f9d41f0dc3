"""Replay a script of requests for several users at a time, on one radix cache.

The requests are those of a serial replay, in its order, but for one thing: a request is handed in as soon as its user
has the reply to the one before, and no more than so many users have one under way.

Invariants:

  PR1  A user's requests are handed in one after the other, in the order of the script.
  PR2  Where several may come next, the first of the script does.
  PR3  Prompts are those that a serial replay renders from the same replies.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_lm.generate import wired_limit

from radixcache import PrefixCache, TreeView
from runner.models.load import LoadedModel
from runner.parallel.generator import ParallelGenerator
from runner.parallel.request import Ticket
from runner.replay.replay import (
    CacheRun,
    Observer,
    Replay,
    ReplayOptions,
    ServedRequest,
    output_hash,
    release,
    warm_up,
)
from runner.replies.reply import Completion
from runner.script.script import RenderedRequest, Script, ScriptError

#: What its progress is called, beside that of the same requests one after the other.
TOGETHER = "together"


@dataclass(frozen=True)
class ParallelRow(ServedRequest):
    """What one request cost among others. `peak_bytes` is the most that was held up to its end."""

    # What of `ttft_ms` went by before prefill began.
    waited_ms: float
    # From the first token to the last.
    decode_ms: float
    peak_bytes: int
    output_tokens: int
    output_hash: str
    done_reason: str


@dataclass(frozen=True)
class ParallelRun:
    """All requests that had their reply, in the order of the script. `wall_s` is from the first to the last of them."""

    cache: str
    users_at_a_time: int
    rows: tuple[ParallelRow, ...]
    wall_s: float
    peak_bytes: int
    peak_cells: int
    capacity_cells: int
    evictions: int
    tree: str | None = None
    view: TreeView | None = None


class ParallelReplay:
    """One run; `run` may be interrupted, and `result` then has what was finished."""

    def __init__(
        self, loaded: LoadedModel, script: Script, options: ReplayOptions, users_at_a_time: int, observer: Observer
    ) -> None:
        self._loaded = loaded
        self._script = script
        self._options = options
        self._users_at_a_time = min(users_at_a_time, len({request.user for request in script.requests}))
        self._observer = observer
        # So many that requests wait for their users and never for cells.
        self._capacity = self._users_at_a_time * script.longest_tokens
        self._left = list(range(len(script)))
        self._busy: dict[str, int] = {}
        self._texts: dict[Ticket, str] = {}
        self._indices: dict[Ticket, int] = {}
        self._rows: dict[int, ParallelRow] = {}
        self._peak_cells = 0
        self._wall_s = 0.0
        self._evictions = self._peak_bytes = 0
        self._tree: str | None = None
        self._view: TreeView | None = None
        self._alone: Replay | None = None

    def run(self) -> None:
        """Serve all requests, and then once more one after the other, for comparison.

        Raises:
            UnsupportedCacheError: the model's layers cannot be shared by several sequences.
            BudgetFullError: a request does not fit the byte budget, even alone.
            ScriptError: a prompt that waited for generated replies does not fit the model or the cells.
        """
        with wired_limit(self._loaded.model):
            warm_up(self._loaded, self._script[0].prompt)
            release()
            self._observer.run_started(TOGETHER, len(self._script))
            options = self._options
            cache = PrefixCache(self._loaded.model, budget_bytes=options.budget_bytes, policy=options.policy)
            try:
                with ParallelGenerator(
                    cache,
                    self._loaded.model,
                    self._loaded.tokenizer,
                    capacity=self._capacity,
                    max_rows=self._users_at_a_time,
                    step_size=options.step_size,
                ) as generator:
                    self._serve(generator, cache)
                self._tree = cache.dump(self._loaded.tokenizer) if options.dump_tree else None
                self._view = cache.view(tokenizer=self._loaded.tokenizer) if options.keep_view else None
            finally:
                self._evictions, self._peak_bytes = cache.stats.evictions, cache.stats.peak_bytes
                cache.close()
                release()
        self._alone = Replay(self._loaded, self._script, ["radix"], options, self._observer)
        self._alone.run()

    def alone(self) -> CacheRun | None:
        """The same requests one after the other, as far as that came."""
        runs = [] if self._alone is None else self._alone.result()
        return runs[0] if runs else None

    def result(self) -> ParallelRun:
        """What was finished."""
        return ParallelRun(
            cache="radix",
            users_at_a_time=self._users_at_a_time,
            rows=tuple(self._rows[index] for index in sorted(self._rows)),
            wall_s=self._wall_s,
            peak_bytes=self._peak_bytes,
            peak_cells=self._peak_cells,
            capacity_cells=self._capacity,
            evictions=self._evictions,
            tree=self._tree,
            view=self._view,
        )

    def _serve(self, generator: ParallelGenerator, cache: PrefixCache) -> None:
        started_s = time.perf_counter()
        while self._hand_in(generator):
            for ticket, piece in generator:
                self._texts[ticket] += piece.text
                self._peak_cells = max(self._peak_cells, generator.group.used_tokens)
                if piece.completion is not None:
                    self._finish(ticket, piece.completion, cache.stats.peak_bytes)
                    self._wall_s = time.perf_counter() - started_s
                    self._hand_in(generator)

    def _hand_in(self, generator: ParallelGenerator) -> bool:
        """Hand in what may come next; whether there was anything."""
        chosen = list(self._next())
        for index in chosen:
            request = self._script[index]
            self._require_cells(request)
            ticket = generator.submit(
                request.prompt.tokens,
                marks=request.prompt.marks,
                max_tokens=self._options.max_tokens,
                arrived_at_s=time.perf_counter(),
            )
            self._texts[ticket], self._indices[ticket] = "", index
        return bool(chosen)

    def _require_cells(self, request: RenderedRequest) -> None:
        needed = len(request.prompt.tokens) + self._options.max_tokens
        if needed > self._capacity:
            raise ScriptError(
                f"user {request.user}, {request.conversation_id}, turn {request.turn}: generated replies come to far "
                f"more tokens in a prompt than they had; with its own reply it takes {needed:,} cells of "
                f"{self._capacity:,}. Ask for shorter ones with --max-tokens."
            )

    def _next(self) -> Iterator[int]:
        for index in list(self._left):
            if len(self._busy) == self._users_at_a_time:
                return
            user = self._script.requests[index].user
            if user not in self._busy:
                self._busy[user] = index
                self._left.remove(index)
                yield index

    def _finish(self, ticket: Ticket, completion: Completion, peak_bytes: int) -> None:
        if completion.error is not None:
            raise completion.error
        index = self._indices.pop(ticket)
        request = self._script[index]
        self._rows[index] = _row(request, ticket, completion, peak_bytes)
        self._script.record_reply(index, self._texts.pop(ticket))
        del self._busy[request.user]
        self._observer.request_done(TOGETHER, completion.prompt_tokens)


def _row(request: RenderedRequest, ticket: Ticket, completion: Completion, peak_bytes: int) -> ParallelRow:
    assert completion.ttft_ms is not None, "nothing cancels a replayed request"
    assert completion.prompt_ms is not None, completion
    return ParallelRow(
        user=request.user,
        conversation_id=request.conversation_id,
        turn=request.turn,
        prompt_tokens=completion.prompt_tokens,
        matched_tokens=ticket.matched_tokens,
        cached_tokens=completion.cached_tokens,
        reason=ticket.reason,
        ttft_ms=completion.ttft_ms,
        waited_ms=completion.ttft_ms - completion.prompt_ms,
        decode_ms=completion.completion_ms,
        peak_bytes=peak_bytes,
        output_tokens=completion.completion_tokens,
        output_hash=output_hash(completion.tokens),
        done_reason=completion.done_reason,
    )
