"""Work: a request that is ready to be served, by itself or among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.parallel.request import LogitsProcessor
from runner.replies.reply import Sampler
from runner.serve.answering import Answering
from runner.serve.prompts import Prompt


@dataclass(frozen=True)
class Work:
    """What serving a request takes.

    Attributes:
        sampler: None: the likeliest token.
        is_stop: mlx-lm's matcher of stop sequences, which has to see each token once.
        is_alone: whether nothing else may run meanwhile.
    """

    answering: Answering
    prompt: Prompt
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor]
    is_stop: Callable[[int], bool]
    max_tokens: int
    is_alone: bool
