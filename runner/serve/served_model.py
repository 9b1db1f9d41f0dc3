"""ServedModel: a model that is loaded, and the requests that it answers. The generation thread's alone.

Requests run together in a ParallelGenerator. What that cannot take goes through a Session, one at a time: quantized and
exact caches, draft models, layers that no two sequences can share, images, and what is drawn for verification. It waits
until those that run are through, and those behind it wait for it: each kind has the whole budget, as if there were no
other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from radixcache import PrefixCache
from runner.models.load import LoadedModel
from runner.serve import border
from runner.serve.answering import Answering
from runner.serve.asked import Asked, ModelNames
from runner.serve.errors import ApiError
from runner.serve.options import ServeOptions
from runner.serve.prompts import Prompt, prompt_of
from runner.serve.reading import Reading
from runner.serve.sampling import processors_of, sampler_of
from runner.serve.single import serve_alone
from runner.serve.together import Together
from runner.serve.work import Work


class ServedModel:
    """Answers requests with one model.

    Args:
        is_parallel: whether requests may run together.

    Attributes:
        key: the names of what was loaded; model, tokenizer, processor and draft_model (or None), name: that.
        context_length: tokens; None: not known, or without bound.
        cache: the model's PrefixCache, which outlives this.
    """

    def __init__(
        self,
        key: ModelNames,
        loaded: LoadedModel,
        draft_model: Any,
        cache: PrefixCache,
        options: ServeOptions,
        *,
        is_parallel: bool,
    ) -> None:
        self.key, self.name, self.cache = key, loaded.name, cache
        self.tokenizer, self.processor = loaded.tokenizer, loaded.processor
        self.model: Any = loaded.model
        self.draft_model: Any = draft_model
        self.context_length = loaded.context_length
        self._vocabulary_length = loaded.vocabulary_length
        self._options = options
        self._together = Together(cache, self.model, self.tokenizer, options) if is_parallel else None
        # In order of arrival: what cannot begin before others are through.
        self._queue: deque[Work] = deque()
        self._alone: tuple[Answering, Iterator[None]] | None = None
        self._draws = random.Random(0)
        # Where every layer can be cut at any token, marks would be worked out for nothing.
        fresh = border.make_prompt_cache(self.model)
        self._is_marked = options.context is not None or any(type(each) is not border.KVCache for each in fresh)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._queue and self._is_free

    def begin(self, answering: Answering) -> None:
        """Take a request in; what is wrong with it is its own failure."""
        try:
            self._begin(answering)
        except ApiError as error:
            answering.fail(error.status, error.message)
        except ValueError as error:  # of mlx-lm's makers
            answering.fail(400, str(error))

    def prompt(self, asked: Asked) -> Prompt:
        """What is asked, in tokens. ApiError: it cannot be made."""
        kwargs = self._options.chat_template_args
        return prompt_of(asked, self.tokenizer, kwargs, processor=self.processor, with_messages=self._is_marked)

    def round(self) -> None:
        """Let each request go one step on."""
        for work in [each for each in self._queue if each.answering.job.is_cancelled]:
            self._queue.remove(work)
            work.answering.end("cancelled")
        self._advance()
        if self._alone is not None:
            self._step_alone(*self._alone)
        elif self._together is not None and not self._together.is_idle:
            self._together.round()

    def warm(
        self, tokens: Any, namespace: str = "", *, name: str | None = None, ttl_requests: int | None = None
    ) -> int:
        """Have a prefix stored, and pinned with a name or a time, as PrefixCache.warm does; raises what it raises."""
        return self.cache.warm(
            self.model, tokens, namespace, name=name, ttl_requests=ttl_requests, draft_model=self.draft_model
        )

    def close(self) -> None:
        """End what runs, and let go of the model; what was evaluated stays in the cache."""
        if self._alone is not None:
            answering, steps = self._alone
            steps.close()  # type: ignore[attr-defined]
            answering.end("cancelled")
        if self._together is not None:
            self._together.close()
        for work in self._queue:
            work.answering.end("cancelled")
        self._queue.clear()
        self.model = self.draft_model = self._together = self._alone = None

    # Taking in

    def _begin(self, answering: Answering) -> None:
        asked, tokenizer = answering.job.asked, self.tokenizer
        prompt = self.prompt(asked)
        has_images = prompt.vision is not None
        if has_images and self.draft_model is not None:
            raise ApiError(400, "a draft model cannot draft replies to images; ask with draft_model null.")
        self._require_context(prompt, is_shifted=self._options.context is not None and not has_images)
        stop_words = list(asked.stop_words)
        reading = Reading(
            border.make_text_state_machine(tokenizer, stop_words),
            prompt.initial_state,
            border.ToolCallFormatter(tokenizer.tool_parser, asked.tools),
        )
        work = Work(
            answering,
            prompt,
            sampler_of(asked, tokenizer, self._vocabulary_length),
            processors_of(asked, self._vocabulary_length),
            border.make_stop_sequences(tokenizer, stop_words).matcher().advance,
            asked.max_tokens,
            is_alone=self._together is None or has_images or self._draws.random() < self._options.verify,
        )
        self._queue.append(work)
        self._advance()
        if not answering.is_over:
            answering.start(len(prompt.tokens), reading)

    @property
    def _is_free(self) -> bool:
        """Whether nothing runs."""
        return self._alone is None and (self._together is None or self._together.is_idle)

    def _advance(self) -> None:
        """Begin what may run beside what does."""
        while self._queue and self._alone is None:
            work = self._queue[0]
            if self._together is not None and not work.is_alone:
                self._together.begin(work)
            elif self._is_free:
                models = self.model, self.tokenizer, self.draft_model
                self._alone = work.answering, serve_alone(work, *models, self.cache, self._options.prefill_step_size)
            else:
                return
            self._queue.popleft()

    def _step_alone(self, answering: Answering, steps: Iterator[None]) -> None:
        try:
            if next(steps, answering) is None:
                return
        except Exception as error:
            answering.raised(error)
        self._alone = None

    def _require_context(self, prompt: Prompt, *, is_shifted: bool) -> None:
        longest = self.context_length
        if not is_shifted and longest is not None and len(prompt.tokens) > longest:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.tokens)} tokens; the model's context length is {longest} tokens.",
                code="context_length_exceeded",
            )
