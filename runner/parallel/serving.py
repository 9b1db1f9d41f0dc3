"""Server: who serves the requests of a replay several at a time."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from radixcache import PrefixCache, TreeView
from runner.models.load import LoadedModel
from runner.parallel.generator import ParallelGenerator
from runner.parallel.request import Ticket
from runner.replies.reply import Completion
from runner.script.script import RenderedRequest


class Answer(NamedTuple):
    """What came of a request; `waited_ms` went by before its prefill began."""

    completion: Completion
    text: str
    cached_tokens: int
    matched_tokens: int
    reason: str | None
    waited_ms: float


class Server(Protocol):
    """Takes requests in and serves them together.

    Attributes:
        name: of the cache.
        peak_bytes, peak_tokens: the most that caches and running rows held so far; tokens where they are counted.
        evictions: entries given up so far.
    """

    @property
    def name(self) -> str: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def peak_tokens(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    def submit(self, index: int, request: RenderedRequest) -> None: ...

    def answers(self) -> Iterator[tuple[int, Answer]]: ...

    def close(self) -> None: ...


class Tree:
    """A ParallelGenerator on a PrefixCache."""

    name = "radix"

    def __init__(
        self,
        loaded: LoadedModel,
        policy: str,
        budget_bytes: int,
        *,
        capacity: int,
        users: int,
        step_size: int,
        max_tokens: int,
    ) -> None:
        self.cache = PrefixCache(loaded.model, budget_bytes=budget_bytes, policy=policy)
        self.peak_tokens = 0
        self._max_tokens = max_tokens
        self._generator = ParallelGenerator(
            self.cache, loaded.model, loaded.tokenizer, capacity=capacity, max_rows=users, step_size=step_size
        )
        self._indices: dict[Ticket, int] = {}
        self._texts: dict[Ticket, str] = {}

    @property
    def evictions(self) -> int:
        """Entries that were given up."""
        return self.cache.stats.evictions

    @property
    def peak_bytes(self) -> int:
        """The most that tree and rows held."""
        return self.cache.stats.peak_bytes

    def submit(self, index: int, request: RenderedRequest) -> None:
        """Hand a request in."""
        ticket = self._generator.submit(
            request.prompt.tokens,
            marks=request.prompt.marks,
            max_tokens=self._max_tokens,
            arrived_at_s=time.perf_counter(),
        )
        self._indices[ticket], self._texts[ticket] = index, ""

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Serve until all that was handed in is done."""
        for ticket, piece in self._generator:
            self._texts[ticket] += piece.text
            self.peak_tokens = max(self.peak_tokens, self._generator.group.used_tokens)
            done = piece.completion
            if done is not None:
                if done.error is not None:
                    raise done.error
                assert done.ttft_ms is not None, "nothing cancels a replayed request"
                assert done.prompt_ms is not None, done
                about = done.cached_tokens, ticket.matched_tokens, ticket.reason, done.ttft_ms - done.prompt_ms
                yield self._indices.pop(ticket), Answer(done, self._texts.pop(ticket), *about)

    def shown(self, tokenizer: Any, *, dump: bool, view: bool) -> tuple[str | None, TreeView | None]:
        """The tree as text and as a description, where they are asked for."""
        text = self.cache.dump(tokenizer) if dump else None
        return text, self.cache.view(tokenizer=tokenizer) if view else None

    def close(self) -> None:
        """Let go of every array."""
        self._generator.close()
        self.cache.close()
