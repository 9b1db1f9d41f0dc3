"""One request at a time: what cannot run among others, through a Session. Belongs to the generation thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx

from radixcache import PrefixCache, stream_generate
from runner.serve.asked import FinishReason
from runner.serve.images import embedder
from runner.serve.work import Work


class _CancelledError(Exception):
    """Leaves a prefill between two chunks."""


def serve_alone(
    work: Work, model: Any, tokenizer: Any, draft_model: Any, cache: PrefixCache, step_size: int
) -> Iterator[None]:
    """Serve a request, a token between two yields.

    A cancelled one ends within a chunk or a token. What was evaluated is stored, whatever ends it.
    """
    answering, job, prompt = work.answering, work.answering.job, work.prompt

    def progress(done_tokens: int, prompt_tokens: int) -> None:
        answering.progress(done_tokens, prompt_tokens)
        if job.is_cancelled:
            raise _CancelledError

    answering.foresee(cache.explain(prompt.tokens, job.asked.namespace, keys=prompt.keys))
    replies = stream_generate(
        model,
        tokenizer,
        prompt.tokens,
        work.max_tokens,
        draft_model,
        mx.default_stream(mx.default_device()),
        cache=cache,
        namespace=job.asked.namespace,
        marks=prompt.marks,
        keys=prompt.keys,
        embed=None if prompt.vision is None else embedder(model, prompt.tokens, prompt.vision),
        sampler=work.sampler,
        logits_processors=work.logits_processors,
        prefill_step_size=step_size,
        prompt_progress_callback=progress,
        num_draft_tokens=job.asked.num_draft_tokens,
    )
    outcome: FinishReason | None = None
    with closing(replies):
        try:
            for each in replies:
                answering.cached_tokens = each.cached_tokens
                outcome = "stop" if work.is_stop(each.token) else each.finish_reason
                logprob = each.logprobs[each.token].item()
                answering.step(tokenizer, each.text, each.token, logprob, each.logprobs, outcome)
                if outcome is not None or job.is_cancelled:
                    break
                yield
        except _CancelledError:
            pass
    answering.end(outcome or "cancelled")
