"""Is what a request is handed the state that its own prompt would have produced? A procedure that measures it.

One timeline: a prompt, another that shares a prefix with it, the first grown by a turn, a branch inside it, and back to
both. Each request goes through a PrefixCache and is compared with a cold run in fresh caches: the state of every layer
in temporal order, the logits of the prompt's last token, the greedy continuation, and the state after it. Caches that
are fetched are held to the same. The control puts the state of another prompt in one place at a time and measures how
far the same logits move: an error that no logit shows would prove nothing.

The procedure measures and judges nothing; tests/architectures/ and the document of architectures do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from benchmarks.architectures.temporal import (
    Arrays,
    Place,
    largest_difference,
    largest_error,
    leaf_at,
    places,
    stand_in,
    temporal_state,
)
from radixcache import PrefixCache, Session
from runner.models.tiny import VOCABULARY_LENGTH

#: What the order of sums may cost in float32.
ROUNDING = 1e-4
#: What the state of another prompt must come to in the logits: 100 times more.
WRONG_STATE = 100 * ROUNDING

SHARED_LENGTH = 48
PROMPT_LENGTH = 72
BRANCH_OFFSET = 30
REPLY_LENGTH = 6
NEXT_TOKEN = 77
#: Off the grid of the prompts, so that prefill is cut where nothing else ends.
STEP_SIZE = 20

_random = np.random.default_rng(3)
SHARED, TAIL_A, TAIL_B, TURN, BRANCH = (
    _random.integers(0, VOCABULARY_LENGTH, length).tolist()
    for length in (SHARED_LENGTH, PROMPT_LENGTH - SHARED_LENGTH, PROMPT_LENGTH - SHARED_LENGTH, 18, 25)
)
PROMPT_A, PROMPT_B = SHARED + TAIL_A, SHARED + TAIL_B
BRANCHED = PROMPT_A[:BRANCH_OFFSET] + BRANCH
OTHER = _random.integers(0, VOCABULARY_LENGTH, 160).tolist()


@dataclass
class Subject:
    """A model and how its caches are made.

    Attributes:
        step_size: tokens per forward pass of a prompt; 1 also for the cold runs, which otherwise take one pass.
    """

    model: Any
    open_cache: Callable[[], PrefixCache]
    fresh: Callable[[], list[Any]]
    step_size: int = STEP_SIZE
    _cold: dict[tuple[int, ...], Answer] = field(default_factory=dict, repr=False)

    def cold(self, prompt: list[int]) -> Answer:
        """Answer a prompt from nothing, in fresh caches. Kept: the answer is the same every time."""
        key = tuple(prompt)
        if key not in self._cold:
            self._cold[key] = self._answer_cold(prompt)
        return self._cold[key]

    def cold_caches(self, tokens: list[int]) -> list[Any]:
        """Fresh caches that hold the state of `tokens`, from as few forward passes as may be."""
        caches = self.fresh()
        self.forward(tokens, caches)
        return caches

    def forward(self, tokens: list[int], caches: list[Any]) -> NDArray[Any]:
        """Run `tokens` through the model; the logits of the last."""
        step_size = len(tokens) if self.step_size > 1 else 1
        for start in range(0, len(tokens), step_size):
            logits = self.model(mx.array([tokens[start : start + step_size]]), cache=caches)
            mx.eval(logits)
        return np.array(logits[0, -1])

    def _answer_cold(self, prompt: list[int]) -> Answer:
        caches = self.cold_caches(prompt[:-1])
        logits = self.forward(prompt[-1:], caches)
        state = temporal_state(caches)
        reply = _greedy(logits, lambda token: self.forward([token], caches))
        return Answer(state, logits, reply, temporal_state(caches))


@dataclass(frozen=True)
class Answer:
    """What a request came to: the state after its prompt, the logits there, its greedy reply, the state after that."""

    state: Arrays
    logits: NDArray[Any]
    reply: list[int]
    end_state: Arrays


@dataclass(frozen=True)
class Agreement:
    """How far answers through the cache are from cold ones.

    Attributes:
        state_error, logits_error: the largest differences over all requests; infinite where shapes differ.
        other_replies: the requests whose greedy reply was another.
        resumed_tokens: by request, how many tokens of it were restored.
        is_token_exact: whether every layer could be cut at any token, so that no checkpoint was needed.
    """

    state_error: float
    logits_error: float
    other_replies: tuple[str, ...]
    resumed_tokens: dict[str, int]
    is_token_exact: bool

    @property
    def largest_error(self) -> float:
        return max(self.state_error, self.logits_error)


def timeline(subject: Subject) -> Agreement:
    """Run the timeline through one PrefixCache, checked after every request."""
    cache = subject.open_cache()
    first = through(cache, subject, PROMPT_A)
    requests = {
        "B": PROMPT_B,
        "A grown": [*PROMPT_A, *first.reply, *TURN],
        "branch": BRANCHED,
        "B again": [*PROMPT_B, 7],
        "A again": PROMPT_A,
    }
    answers, resumed = [("A", first, subject.cold(PROMPT_A))], {}
    for name, prompt in requests.items():
        before = cache.stats.hit_tokens
        answers.append((name, through(cache, subject, prompt), subject.cold(prompt)))
        cache.check()
        resumed[name] = cache.stats.hit_tokens - before
    return Agreement(
        state_error=max(
            max(largest_error(found.state, cold.state), largest_error(found.end_state, cold.end_state))
            for _, found, cold in answers
        ),
        logits_error=max(largest_difference(found.logits, cold.logits) for _, found, cold in answers),
        other_replies=tuple(name for name, found, cold in answers if found.reply != cold.reply),
        resumed_tokens=resumed,
        is_token_exact=not cache._core.layout.has_states,
    )


def fetched_error(subject: Subject) -> float:
    """Largest error in the state that `fetch` hands out, and in the logits that follow from it."""
    cache = subject.open_cache()
    through(cache, subject, PROMPT_A)
    through(cache, subject, PROMPT_B)
    errors = []
    for prompt in ([*PROMPT_A, *TURN], [*PROMPT_B, *TURN], BRANCHED, PROMPT_A):
        caches, remaining = cache.fetch(prompt)
        covered = prompt[: len(prompt) - len(remaining)]
        if covered:
            errors.append(largest_error(temporal_state(caches), temporal_state(subject.cold_caches(covered))))
        errors.append(largest_difference(subject.forward(remaining.tolist(), caches), subject.cold(prompt).logits))
    cache.check()
    return max(errors)


def control(subject: Subject) -> dict[Place, float]:
    """By place in use, how far the next logits move when that place holds the state of another prompt.

    Zero where the state of the other prompt is not even another state.
    """
    cache = subject.open_cache()
    grown = [*PROMPT_A, *through(cache, subject, PROMPT_A).reply, NEXT_TOKEN]
    expected = subject.cold(grown).logits
    moved = {}
    for place in _places_in_use(subject):
        with cache.begin(grown) as session:
            right = temporal_state(session.caches)
            stand_in(session.caches, subject.cold_caches(OTHER[: session.cached_tokens]), place)
            is_wrong = largest_error(temporal_state(session.caches), right) > 0
            logits = subject.forward(grown[session.cached_tokens :], session.caches)
            moved[place] = largest_difference(logits, expected) if is_wrong else 0.0
        # Wrong state is in the cache now.
        cache.clear()
        through(cache, subject, PROMPT_A)
    return moved


def through(cache: PrefixCache, subject: Subject, prompt: list[int]) -> Answer:
    """Answer a prompt through the cache."""
    with cache.begin(prompt) as session:
        session.prefill(subject.model, step_size=subject.step_size)
        logits = np.array(session.step(subject.model, prompt[-1:])[0, -1])
        state = temporal_state(session.caches)
        reply = _greedy(logits, lambda token: _stepped(session, subject.model, token))
        return Answer(state, logits, reply, temporal_state(session.caches))


def _greedy(logits: NDArray[Any], step: Callable[[int], NDArray[Any]]) -> list[int]:
    reply = []
    for _ in range(REPLY_LENGTH):
        reply.append(int(logits.argmax()))
        logits = step(reply[-1])
    return reply


def _stepped(session: Session, model: Any, token: int) -> NDArray[Any]:
    return np.array(session.step(model, [token])[0, -1])


def _places_in_use(subject: Subject) -> list[Place]:
    """Where the model writes; some models leave a cache of their list unused."""
    caches = subject.cold_caches(PROMPT_A)
    return [place for place in places(caches) if not leaf_at(caches, place).empty()]
