"""A conversation longer than the context goes on: its oldest turns go, its beginning stays, and it says so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcache import PrefixCache, RequestTooLargeError
from radixcache.groups.passes import Removal
from runner.engine.generation import OPENING_TOKENS, SINK_TOKENS, ContextError, ContextWindow, Generation, generate
from runner.engine.generator import ParallelGenerator
from runner.models.load import LoadedModel
from tests import inside
from tests.engine.generators import alone, done, drain, load, new_cache, new_generator, tokens_of

CONTEXT = 128
QUARTER = CONTEXT // 4
KINDS = ("llama", "step3p5")
_random = np.random.default_rng(9)
SYSTEM = _random.integers(20, 200, 40)
OPENING = [3, 4, 5]
MESSAGE_LENGTH = 10


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(request.param)


@pytest.fixture
def llama() -> LoadedModel:
    return load("llama")


def conversation(messages: int, seed: int = 0) -> tuple[np.ndarray, tuple[int, ...]]:
    """A system prompt, messages of 10 tokens, the opening of a reply; and their marks."""
    random = np.random.default_rng(seed)
    text = random.integers(20, 200, messages * MESSAGE_LENGTH)
    ends = [len(SYSTEM) + MESSAGE_LENGTH * count for count in range(messages + 1)]
    return np.concatenate([SYSTEM, text, OPENING]), tuple(ends)


def submit(generator: ParallelGenerator, prompt: Any, marks: Any, max_tokens: int, **more: Any) -> Generation:
    return generator.submit(prompt, marks=marks, max_tokens=max_tokens, **{"stop_tokens": (), **more})


def without(prompt: Any, begin: int, length: int) -> np.ndarray:
    return np.delete(np.asarray(prompt), slice(begin, begin + length))


def final(ticket: Generation, prompt: Any, keep: int = len(SYSTEM)) -> list[int]:
    completion = done(ticket)
    gone = completion.omitted_tokens + completion.shifted_tokens
    return [*without(prompt, keep, gone), *completion.tokens]


def require_untainted(loaded: LoadedModel, cache: PrefixCache, prompts: list[Any]) -> None:
    """All that the cache resumes of these is what a cold prefill gives, layer by layer."""
    cache.check()
    resumed, before = 0, cache.stats.verified_requests
    for prompt in prompts:
        with cache.begin(prompt) as session:
            list(generate(session, loaded.model, loaded.tokenizer, max_tokens=1, stop_tokens=()))
            assert session.mismatch is None
            resumed += session.cached_tokens
    assert resumed > 0
    assert cache.stats.verified_requests > before
    assert cache.stats.verify_mismatches == 0


def system_state(generator: ParallelGenerator) -> list[mx.array]:
    return inside.first_tokens(generator.group.rows[0], len(SYSTEM))


def test_a_reply_that_fills_the_context_goes_on_without_the_oldest_turns(loaded: LoadedModel) -> None:
    cache = new_cache(loaded, verify=1.0)
    prompt, marks = conversation(5)
    with new_generator(loaded, cache, context=CONTEXT) as generator:
        ticket = submit(generator, prompt, marks, 70)
        held: list[list[mx.array]] = []

        def look(count: int) -> None:
            if count in (2, 65):
                held.append(system_state(generator))
            if generator.group.rows:
                assert generator.group.rows[0].position <= CONTEXT

        pieces = drain(generator, look)
    completion = done(ticket)
    assert (completion.done_reason, completion.note, completion.error) == ("length", None, None)
    assert (len(completion.tokens), completion.omitted_tokens) == (70, 0)
    # A quarter of the context is 32 tokens, and the fourth message is the first one to end behind that many.
    assert completion.shifted_tokens == 40
    before, after = held
    assert all(bool(mx.array_equal(*pair)) for pair in zip(before, after, strict=True))
    # Up to the shift it is what it would be with all the context it wants.
    free = CONTEXT - len(prompt)
    assert completion.tokens[: free + 1] == alone(loaded, prompt, free + 1)
    assert [piece.token for piece in pieces[ticket]] == list(completion.tokens)
    require_untainted(loaded, cache, [final(ticket, prompt), [*prompt, *completion.tokens], [*SYSTEM, 30]])


def test_the_others_do_not_notice_a_shift_of_what_they_share(llama: LoadedModel) -> None:
    cache = new_cache(llama, verify=1.0)
    long, marks = conversation(5)
    # The second shares the system prompt and four messages with the first, which are what is shifted out.
    other = np.concatenate([long[:80], conversation(1, seed=4)[0][40:]])
    with new_generator(llama, cache, context=CONTEXT) as generator:
        tickets = [
            submit(generator, long, marks, 70),
            submit(generator, other, (40, 80, 90), 35),
            submit(generator, long, marks, 35),
        ]
        drain(generator)
    assert [done(ticket).shifted_tokens for ticket in tickets] == [40, 0, 0]
    # Windows that have gone round are taken up at the last mark.
    assert [done(ticket).cached_tokens for ticket in tickets] in ([0, 80, len(long) - 1], [0, 80, 90])
    assert tokens_of(tickets[1]) == alone(llama, other, 35)
    assert tokens_of(tickets[2]) == alone(llama, long, 35)
    assert tokens_of(tickets[0])[:36] == alone(llama, long, 36)
    require_untainted(llama, cache, [final(tickets[0], long), long, other])


@pytest.mark.parametrize("kind", ["llama", "jamba"])
def test_a_prompt_longer_than_the_context_is_answered_without_its_oldest_messages(kind: str) -> None:
    loaded = load(kind)
    cache = new_cache(loaded, verify=1.0)
    prompt, marks = conversation(30)
    with new_generator(loaded, cache, context=CONTEXT) as generator:
        ticket = submit(generator, prompt, marks, 10)
        drain(generator)
    completion = done(ticket)
    assert (completion.prompt_tokens, completion.shifted_tokens, completion.done_reason) == (len(prompt), 0, "length")
    # 343 tokens and 10 more are 225 too many; 8 quarters of the context are 256, and the next message ends at 260.
    assert completion.omitted_tokens == 260
    assert completion.tokens == alone(loaded, without(prompt, len(SYSTEM), 260), 10)
    require_untainted(loaded, cache, [prompt, final(ticket, prompt)])


def test_a_conversation_of_three_contexts_goes_on_turn_by_turn_and_resumes_what_the_last_turn_left(llama):
    cache = new_cache(llama, verify=1.0)
    history, ends = list(SYSTEM), [len(SYSTEM)]
    shifted = omitted = resumed = 0
    with new_generator(llama, cache, context=CONTEXT) as generator:
        for turn in range(18):
            history += np.random.default_rng(turn).integers(20, 200, 10).tolist()
            ends.append(len(history))
            ticket = submit(generator, [*history, *OPENING], ends, 9)
            drain(generator)
            completion = done(ticket)
            assert (completion.done_reason, len(completion.tokens), completion.note) == ("length", 9, None)
            if turn:
                assert completion.cached_tokens >= len(SYSTEM)
                resumed += completion.cached_tokens > len(SYSTEM)
            shifted += completion.shifted_tokens > 0
            omitted += completion.omitted_tokens > 0
            history += [*OPENING, *completion.tokens]
            ends.append(len(history))
    assert len(history) > 3 * CONTEXT
    assert omitted >= 10
    # The place of the cut moves once in a quarter of the context; in between, turns find what the last one stored.
    assert resumed >= 10
    require_untainted(llama, cache, [history, [*SYSTEM, 30]])


def test_a_shift_that_fails_ends_its_own_reply_alone(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Removal, *arguments: Any) -> None:
        raise OSError("no rotation")

    monkeypatch.setattr(Removal, "run", failing)
    prompt, marks = conversation(5)
    with new_generator(llama, new_cache(llama), context=CONTEXT) as generator:
        tickets = [submit(generator, prompt, marks, 80), submit(generator, prompt[:60], (40, 50), 60)]
        drain(generator)
    failed = done(tickets[0])
    assert (failed.done_reason, type(failed.error)) == ("error", OSError)
    assert failed.tokens == alone(llama, prompt, CONTEXT - len(prompt) + 1)
    assert tokens_of(tickets[1]) == alone(llama, prompt[:60], 60)


def test_a_reply_that_is_sent_back_to_make_room_for_a_shift_goes_on_later(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt waits to share with the first one, so the last request that came is not the last one in."""
    run, calls = Removal.run, list[Any]()

    def refusing_once(self: Removal, model: Any) -> None:
        calls.append(self.row)
        if len(calls) == 1:
            raise RequestTooLargeError(2, 1)
        run(self, model)

    monkeypatch.setattr(Removal, "run", refusing_once)
    prompt, marks = conversation(7)
    longer = np.concatenate([prompt[: -len(OPENING)], np.arange(30, 40), OPENING])
    other, other_marks = conversation(2, seed=1)
    other[0] = 7
    with new_generator(llama, new_cache(llama), context=CONTEXT) as generator:
        first = submit(generator, prompt, marks, 6)
        shifted = submit(generator, longer, (*marks, len(longer) - len(OPENING)), 70)
        sent_back = submit(generator, other, other_marks, 75)
        drain(generator)
    assert len(calls) >= 2
    assert [done(each).done_reason for each in (first, shifted, sent_back)] == ["length"] * 3
    assert done(shifted).shifted_tokens > 0
    assert sent_back.in_reply > 0
    assert done(sent_back).tokens[: CONTEXT - len(other)] == alone(llama, other, CONTEXT - len(other))


def test_where_nothing_can_be_shifted_the_reply_ends_and_says_why() -> None:
    loaded = load("mamba2")
    cache = new_cache(loaded, verify=1.0)
    prompt, marks = conversation(5)
    with new_generator(loaded, cache, context=CONTEXT) as generator:
        tickets = [submit(generator, prompt, marks, 80), submit(generator, prompt[::-1].copy(), (), 20)]
        pieces = drain(generator)
    completion = done(tickets[0])
    assert (completion.done_reason, completion.shifted_tokens, completion.error) == ("length", 0, None)
    assert completion.note is not None
    assert "context of 128 tokens is full" in completion.note
    assert "cannot be shifted" in completion.note
    # Every cell was used, and the last token, which is in none, was handed out too.
    assert completion.tokens == alone(loaded, prompt, CONTEXT - len(prompt) + 1)
    assert [piece.token for piece in pieces[tickets[0]] if piece.token is not None] == list(completion.tokens)
    assert tokens_of(tickets[1]) == alone(loaded, prompt[::-1], 20)
    require_untainted(loaded, cache, [final(tickets[0], prompt)])


def test_the_reply_itself_is_never_cut(llama: LoadedModel) -> None:
    prompt, marks = conversation(5)
    with new_generator(llama, new_cache(llama), context=CONTEXT) as generator:
        ticket = submit(generator, prompt, marks, 500)
        drain(generator)
    completion = done(ticket)
    assert completion.done_reason == "length"
    assert completion.note is not None
    assert "them is not enough" in completion.note
    assert len(completion.tokens) == CONTEXT - len(SYSTEM) - len(OPENING) + 1
    assert completion.shifted_tokens == len(prompt) - len(SYSTEM) - len(OPENING)


WINDOW = ContextWindow(100)
# A system prompt of 20 tokens, then messages that end at these offsets, the last of them the question.
CHAT = WINDOW.over(126, (20, 40, 62, 90, 120))


def test_nothing_goes_while_all_fits():
    assert CHAT.excess(length=60, room=40) == 0
    assert CHAT.excess(length=80, room=20) == 0


@pytest.mark.parametrize(
    ("window", "length", "room", "gone"),
    [
        # 27 too many; a quarter is 25, so 50 go: the second message ends 42 behind the system prompt, the third 70.
        (CHAT, 126, 1, 70),
        # 10 too many: the first message would do, a quarter takes the second one too.
        (CHAT, 109, 1, 42),
        # Of 120 tokens 20 are too many, and the message of 10 is not enough: from the question go 25 in all.
        (WINDOW.over(126, (20, 30, 120)), 119, 1, 25),
        # What the message of 10 frees is enough, though it is no quarter.
        (WINDOW.over(126, (20, 30, 120)), 100, 10, 10),
        # Without marks the oldest tokens go, but the very first stay.
        (WINDOW.over(120, ()), 120, 1, 25),
        # No system prompt: the first mark is where the first message ends, and that one may go.
        (WINDOW.over(120, (30, 60, 114), head=0), 120, 1, 30),
    ],
)
def test_whole_messages_go_the_oldest_first_until_a_quarter_is_free_and_the_question_last(window, length, room, gone):
    assert window.excess(length, room) == gone
    assert WINDOW.over(120, ()).head == SINK_TOKENS


def test_a_second_cut_leaves_out_what_the_first_one_took():
    window = WINDOW.over(400, ())
    assert window.excess(length=100, room=1) == 25
    assert window.excess(length=100, room=1, dropped=25) == 25


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ContextError, match=r"126 tokens and 1 more .* 100: the first 110 and the last 6 must stay"):
        WINDOW.over(126, (110, 120)).excess(length=126, room=1)


@st.composite
def prompts(draw):
    keep = draw(st.integers(0, 30))
    lengths = draw(st.lists(st.integers(1, 60), max_size=8))
    opening = draw(st.integers(0, 5))
    ends, at = [], keep
    for length in lengths:
        at += length
        ends.append(at)
    return max(1, at + opening), ends, keep


@given(
    prompt=prompts(),
    reply=st.integers(0, 80),
    room=st.integers(0, 40),
    tokens=st.integers(2, 150),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_a_cut_makes_the_room_and_leaves_beginning_opening_and_reply(prompt, reply, room, tokens, share):
    window = ContextWindow(tokens, share).over(*prompt)
    length = window.length + reply
    try:
        gone = window.excess(length, room)
    except ContextError:
        opening = max(1, min(OPENING_TOKENS, window.length - window.ends[-1]) if window.ends else 1)
        assert window.head + opening + reply + room > tokens
        return
    assert gone >= 0
    assert length - gone + room <= tokens
    assert gone == 0 or window.head + gone <= window.limit < window.length
    # Going on from there is going on from the same place: what is gone is not asked for again.
    assert window.excess(length - gone, room, dropped=gone) == 0
    whole = {end - window.head for end in window.ends[:-1]}
    if gone and max(whole, default=0) >= length + room - tokens:
        assert gone in whole
