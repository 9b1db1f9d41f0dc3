"""The same requests in mlx-lm's own batches: its BatchGenerator on its LRUPromptCache, put together as its server does.

A request comes in on a copy of the nearest stored prefix. Its prompt goes in segments, and at the end of each the row's
caches are copied into the store; what is stored keeps to what the running rows leave of the budget.

Source: mlx_lm/server.py, mlx-lm 0.32.2.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlx_lm.generate import BatchGenerator

from runner.models.load import LoadedModel
from runner.parallel.serving import Answer
from runner.replay.backends.mlx_lm import LRUPrompts
from runner.replies.reply import Reply
from runner.script.script import RenderedRequest


@dataclass
class _Running:
    """A request in the generator."""

    index: int
    reply: Reply
    kinds: list[str]
    cached_tokens: int
    arrived_s: float
    began_s: float | None = None
    text: str = ""


class Batches:
    """mlx-lm's generator and its store; see runner.parallel.serving.Server."""

    name = "mlx-lm"

    def __init__(self, loaded: LoadedModel, budget_bytes: int, *, users: int, step_size: int, max_tokens: int) -> None:
        self._loaded, self._budget_bytes, self._max_tokens = loaded, budget_bytes, max_tokens
        self._stored = LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=budget_bytes)
        self._generator = BatchGenerator(loaded.model, prefill_step_size=step_size, completion_batch_size=users)
        self._running: dict[int, _Running] = {}
        self.peak_bytes = 0
        self.peak_tokens = 0

    @property
    def evictions(self) -> int:
        """Entries that were given up."""
        return self._stored.evictions

    def submit(self, index: int, request: RenderedRequest) -> None:
        """Hand a request in."""
        arrived_s = time.perf_counter()
        tokens = request.prompt.tokens.tolist()
        caches, cached_tokens = self._stored.fetch(tokens)
        kinds = [(end, kind) for end, kind in self._stored.segments(request.prompt) if end > cached_tokens]
        ends = [cached_tokens, *(end for end, _ in kinds), len(tokens)]
        segments = [tokens[start:end] for start, end in pairwise(ends) if start < end]
        (user,) = self._generator.insert_segments(
            [segments], [self._max_tokens], caches=[caches], all_tokens=[tokens[:cached_tokens]]
        )
        reply = Reply(
            self._loaded.tokenizer,
            max_tokens=self._max_tokens,
            stop_tokens=None,
            prompt_tokens=len(tokens),
            arrived_at_s=arrived_s,
        )
        reply.cached_tokens = cached_tokens
        self._running[user] = _Running(index, reply, [kind for _, kind in kinds], cached_tokens, arrived_s)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Serve until all that was handed in is done."""
        while self._running:
            self._stored.trim_to(self._budget_bytes - int(self._generator.prompt_cache_nbytes))
            prompts, tokens = self._generator.next()
            for response in prompts:
                running = self._running[response.uid]
                if running.began_s is None:
                    running.began_s = time.perf_counter()
                    running.reply.start()
            ended = [each.uid for each in prompts if each.end_of_segment and not each.end_of_prompt]
            ended = [user for user in ended if self._running[user].kinds]
            for user, (caches, key) in self._generator.extract_cache(ended).items():
                self._stored.insert(list(key), list(caches), self._running[user].kinds.pop(0))
            held = int(self._generator.prompt_cache_nbytes) + self._stored.paged_bytes
            self.peak_bytes = max(self.peak_bytes, held)
            for response in tokens:
                yield from self._answered(response)

    def close(self) -> None:
        """Let go of every array."""
        self._generator.close()
        self._stored.close()

    def _answered(self, response: Any) -> Iterator[tuple[int, Answer]]:
        running = self._running[response.uid]
        piece = running.reply.add(response.token, response.logprobs, lambda: False)
        running.text += piece.text
        completion = piece.completion
        if completion is None:
            return
        del self._running[response.uid]
        if response.finish_reason is not None:
            self._stored.insert(list(response.all_tokens), list(response.prompt_cache), "assistant")
        else:  # a stop token, which the generator knows nothing of
            found = self._generator.remove([response.uid], return_prompt_caches=True)
            for caches, key in found.values():
                self._stored.insert(list(key), list(caches), "assistant")
        waited_s = (running.began_s or running.arrived_s) - running.arrived_s
        yield (
            running.index,
            Answer(completion, running.text, running.cached_tokens, running.cached_tokens, None, waited_s * 1e3),
        )
