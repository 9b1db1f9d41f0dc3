"""Together: the requests of one model that run at a time, in a ParallelGenerator. The generation thread's alone."""

from __future__ import annotations

import logging
from typing import Any

from radixcache import PrefixCache
from runner.parallel import ParallelGenerator
from runner.parallel.request import Ticket
from runner.parallel.turn_taking import PARALLEL_STEP_SIZE
from runner.replies.reply import Piece
from runner.serve.answering import Answering
from runner.serve.asked import FinishReason
from runner.serve.options import ServeOptions
from runner.serve.work import Work

logger = logging.getLogger(__name__)

# Bytes bound what runs together, not a count of tokens.
CAPACITY_TOKENS = 1 << 31
# Room that is kept for a reply; few are as long as they may be, and one that is longer asks for more.
RESERVE_TOKENS = 1024


class Together:
    """Serves many requests at once."""

    def __init__(self, cache: PrefixCache, model: Any, tokenizer: Any, options: ServeOptions) -> None:
        self._cache, self._model, self._tokenizer, self._options = cache, model, tokenizer, options
        self._running: dict[Ticket, Answering] = {}
        self._generator = self._new_generator()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self._running

    def begin(self, work: Work) -> None:
        """Take a request in; what cannot be served is its own failure."""
        answering, prompt = work.answering, work.prompt
        try:
            answering.foresee(self._cache.explain(prompt.tokens, answering.job.asked.namespace))
            ticket = self._generator.submit(
                prompt.tokens,
                max_tokens=min(work.max_tokens, CAPACITY_TOKENS - len(prompt.tokens)),
                marks=prompt.marks,
                sampler=work.sampler,
                logits_processors=work.logits_processors,
                stop_tokens=work.is_stop,
                cuts_characters=False,
                namespace=answering.job.asked.namespace,
                reserve=RESERVE_TOKENS,
                on_progress=answering.progress,
                arrived_at_s=answering.job.arrived_s,
            )
        except ValueError as error:
            answering.fail(400, str(error))
        except Exception as error:
            answering.raised(error)
        else:
            self._running[ticket] = answering

    def round(self) -> None:
        """Let each request go one step on."""
        for ticket, answering in self._running.items():
            if answering.job.is_cancelled:
                ticket.cancel()
        try:
            pieces = self._generator.round()
        except Exception as error:  # not of one request: those end with what they raised
            logger.exception("a round of many requests failed; all of them end")
            self._generator.close()
            for answering in self._running.values():
                answering.raised(error)
            self._running.clear()
            self._generator = self._new_generator()
            return
        for ticket, piece in pieces:
            self._hand_out(ticket, piece)

    def close(self) -> None:
        """End what runs; what was evaluated stays in the cache."""
        self._generator.close()
        for answering in self._running.values():
            answering.end("cancelled")
        self._running.clear()

    def _new_generator(self) -> ParallelGenerator:
        options = self._options
        return ParallelGenerator(
            self._cache,
            self._model,
            self._tokenizer,
            capacity=CAPACITY_TOKENS,
            max_rows=options.decode_concurrency,
            step_size=min(options.prefill_step_size, PARALLEL_STEP_SIZE),
            context=options.context,
        )

    def _hand_out(self, ticket: Ticket, piece: Piece) -> None:
        answering, done = self._running[ticket], piece.completion
        answering.matched_tokens, answering.reason = ticket.matched_tokens, ticket.reason
        if piece.token is not None and not answering.is_over:
            ends: FinishReason | None = None
            if done is not None and (done.done_reason == "stop" or done.done_reason == "length"):
                ends = done.done_reason
            assert piece.logprob is not None, ticket
            try:
                answering.step(self._tokenizer, piece.text, piece.token, piece.logprob, piece.logprobs, ends)
            except Exception as error:
                ticket.cancel()
                answering.raised(error)
        if done is None:
            return
        del self._running[ticket]
        answering.cached_tokens = done.cached_tokens
        if done.done_reason == "error":
            answering.raised(done.error)
        else:
            answering.end(done.done_reason, done.note)
