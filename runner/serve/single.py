"""One request at a time: what cannot run among others, through a Session. Belongs to the generation thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx

from radixcache import PrefixCache, stream_generate
from runner.parallel.request import LogitsProcessor
from runner.replies.reply import Sampler
from runner.serve.answering import Answering
from runner.serve.asked import FinishReason


class _CancelledError(Exception):
    """Leaves a prefill between two chunks."""


def serve_alone(
    answering: Answering,
    model: Any,
    tokenizer: Any,
    draft_model: Any,
    cache: PrefixCache,
    tokens: Sequence[int],
    *,
    marks: Sequence[int],
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor],
    is_stop: Callable[[int], bool],
    hand_out: Callable[[Answering, str, int, float, mx.array, FinishReason | None], None],
    max_tokens: int,
    step_size: int,
) -> Iterator[None]:
    """Serve a request, a token between two yields.

    A cancelled one ends within a chunk or a token. What was evaluated is stored, whatever ends it.

    Args:
        is_stop: mlx-lm's matcher of stop sequences.
        hand_out: gets each token: text, id, log-probability, all log-probabilities (V,), how it ends the reply.
    """
    job = answering.job

    def progress(done_tokens: int, prompt_tokens: int) -> None:
        answering.progress(done_tokens, prompt_tokens)
        if job.is_cancelled:
            raise _CancelledError

    answering.foresee(cache.explain(tokens, job.asked.namespace))
    replies = stream_generate(
        model,
        tokenizer,
        tokens,
        max_tokens,
        draft_model,
        mx.default_stream(mx.default_device()),
        cache=cache,
        namespace=job.asked.namespace,
        marks=marks,
        sampler=sampler,
        logits_processors=logits_processors,
        prefill_step_size=step_size,
        prompt_progress_callback=progress,
        num_draft_tokens=job.asked.num_draft_tokens,
    )
    outcome: FinishReason | None = None
    with closing(replies):
        try:
            for each in replies:
                answering.cached_tokens = each.cached_tokens
                outcome = "stop" if is_stop(each.token) else each.finish_reason
                hand_out(answering, each.text, each.token, each.logprobs[each.token].item(), each.logprobs, outcome)
                if outcome is not None or job.is_cancelled:
                    break
                yield
        except _CancelledError:
            pass
    answering.end(outcome or "cancelled")
