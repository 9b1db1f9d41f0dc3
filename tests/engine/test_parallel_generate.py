"""Many replies at once are those of one at a time, whoever joins, leaves, is cancelled or fails meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import RequestTooLargeError
from runner.engine.generation import Generation
from runner.engine.generator import ParallelGenerator
from runner.models.load import LoadedModel
from tests import inside
from tests.engine.generators import (
    BAD_TOKEN,
    CAPACITY,
    MAX_TOKENS,
    PROMPTS,
    STEP_SIZE,
    SYSTEM,
    alone,
    done,
    drain,
    embedding,
    free_cache,
    load,
    misled,
    new_cache,
    new_generator,
    require_alone,
    require_right_tree,
    scripted,
    serve,
    spoilt,
    submit,
    tokens_of,
)
from tests.groups.rows import Watched
from tests.memory import held_bytes
from tests.sessions.faults import Fuse, fused, refused_product, spoiling

# Full attention, sliding windows in all or in some layers, recurrent state beside attention.
FEW_KINDS = ("llama", "llama_sliding", "jamba")


@pytest.fixture(params=FEW_KINDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(request.param)


@pytest.fixture
def llama() -> LoadedModel:
    return load("llama")


def test_the_last_token_of_a_long_prompt_goes_through_a_step_with_others_and_the_first_comes_in_that_round(llama):
    model = Watched(llama.model)
    passes = model.shapes
    with ParallelGenerator(new_cache(llama), model, llama.tokenizer, capacity=CAPACITY, step_size=128) as generator:
        talking = submit(generator, PROMPTS[0], 40)
        while talking.completion is None and len(generator.round()) == 0:
            pass
        long = np.random.default_rng(7).integers(16, 250, 100)
        joining = [submit(generator, prompt, 3, marks=()) for prompt in (long, long)]
        passes.clear()
        handed = [[ticket for ticket, _ in generator.round()] for _ in range(5)]
    assert passes[0] == (1, 99)
    assert passes[1] == (2, 1)
    assert handed[0] == [talking, joining[0]]
    # The other has found all but its last token, and needs no pass of its own at all.
    assert passes[2:4] == [(3, 1), (3, 1)]
    assert {tokens for _, tokens in passes[1:]} == {1}
    # A round without a chunk, from which on tokens are read while the next ones are computed.
    assert handed[1:3] == [[joining[1]], [talking, joining[0]]]
    assert tokens_of(joining[0]) == tokens_of(joining[1])


def test_the_next_step_is_dispatched_before_a_token_is_handed_out_and_none_after_the_last(llama: LoadedModel) -> None:
    asked = [0, 0]

    def counting(row: int, tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
        says = scripted(tokens)

        def sampler(logprobs: mx.array) -> mx.array:
            asked[row] += 1
            return says(logprobs)

        return sampler

    with new_generator(llama, new_cache(llama)) as generator:
        tickets = [
            submit(generator, PROMPTS[0], 4, sampler=counting(0, [40, 41, 42, 43])),
            submit(generator, PROMPTS[3], 6, sampler=counting(1, [50, 51, 52, 53, 54, 55])),
        ]
        seen = [(ticket.number, piece.token, asked[ticket.number]) for ticket, piece in generator]
    # The first one comes of a chunk, and waits for no step; where a chunk may come next tokens are read at once.
    assert [each[1:] for each in seen if each[0] == 0] == [(40, 1), (41, 2), (42, 3), (43, 4)]
    assert [each[1:] for each in seen if each[0] == 1] == [(50, 1), (51, 2), (52, 4), (53, 5), (54, 6), (55, 6)]
    assert [tokens_of(ticket) for ticket in tickets] == [(40, 41, 42, 43), (50, 51, 52, 53, 54, 55)]


def test_each_row_has_its_own_sampler_stop_tokens_and_text(llama: LoadedModel) -> None:
    stop = next(iter(llama.tokenizer.eos_token_ids))
    texts = ["é und ü", "日本語", "a🙂b"]
    spelled = [llama.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with new_generator(llama, new_cache(llama)) as generator:
        tickets = [
            submit(generator, prompt, 60, sampler=scripted([*tokens, stop, stop]), stop_tokens=None)
            for prompt, tokens in zip(PROMPTS, spelled, strict=False)
        ]
        greedy = submit(generator, PROMPTS[4])
        own_stop = submit(generator, PROMPTS[3], stop_tokens=[alone(llama, PROMPTS[3])[2]])
        pieces = drain(generator)
    for ticket, text, tokens in zip(tickets, texts, spelled, strict=True):
        said = [piece.text for piece in pieces[ticket]]
        assert "".join(said) == text
        assert all(text.startswith("".join(said[:count])) for count in range(len(said)))
        assert (done(ticket).done_reason, done(ticket).tokens) == ("stop", (*tokens, stop))
    require_alone(llama, [greedy], [PROMPTS[4]])
    assert done(own_stop).done_reason == "stop"
    assert tokens_of(own_stop) == alone(llama, PROMPTS[3])[: len(tokens_of(own_stop))]


def test_requests_may_be_handed_in_by_other_threads_while_others_run(llama: LoadedModel) -> None:
    found: list[Generation] = []
    with new_generator(llama, new_cache(llama)) as generator:
        assert not generator.wait(timeout_s=0)

        def client() -> None:
            for prompt in PROMPTS:
                found.append(submit(generator, prompt))

        clients = [threading.Thread(target=client) for _ in range(3)]
        for each in clients:
            each.start()
        while any(each.is_alive() for each in clients) or generator.wait(timeout_s=0):
            drain(generator)
        for each in clients:
            each.join()
        drain(generator)
    assert sorted(ticket.number for ticket in found) == list(range(15))
    by_length = {len(prompt): prompt for prompt in PROMPTS}
    require_alone(llama, found, [by_length[ticket.facts.prompt_tokens] for ticket in found])


def test_what_is_cancelled_before_it_ran_evaluates_nothing(llama: LoadedModel) -> None:
    with new_generator(llama, new_cache(llama), max_rows=1) as generator:
        tickets = [submit(generator, prompt) for prompt in PROMPTS[:2]]
        tickets[1].cancel()
        pieces = drain(generator)
        require_alone(llama, tickets[:1], PROMPTS[:1])
    assert done(tickets[1]).done_reason == "cancelled"
    assert [(piece.text, piece.token) for piece in pieces[tickets[1]]] == [("", None)]


@pytest.mark.parametrize("kind", ["llama", "llama_sliding"])
def test_who_asks_the_same_at_the_same_time_waits_and_evaluates_one_token(kind: str) -> None:
    loaded = load(kind)
    with new_generator(loaded, new_cache(loaded)) as generator:
        tickets = [submit(generator, PROMPTS[2]) for _ in range(3)]
        other = submit(generator, PROMPTS[0][::-1].copy(), marks=())
        drain(generator)
    require_alone(loaded, [*tickets, other], [*[PROMPTS[2]] * 3, PROMPTS[0][::-1]])
    cached = [done(ticket).cached_tokens for ticket in tickets]
    assert cached == [0, len(PROMPTS[2]) - 1, len(PROMPTS[2]) - 1]


def test_who_waits_to_share_comes_in_as_soon_as_what_is_shared_is_there(llama: LoadedModel) -> None:
    order: list[tuple[str, int]] = []
    long = np.concatenate([SYSTEM, np.random.default_rng(6).integers(20, 200, 300)])
    with new_generator(llama, new_cache(llama)) as generator:
        submit(generator, long, 2, on_progress=lambda done, total: order.append(("long", done)))
        (short,) = serve(generator, [PROMPTS[0]], 2, on_progress=lambda done, total: order.append(("short", done)))
    assert done(short).cached_tokens == len(SYSTEM)
    assert order[:4] == [("long", 0), ("long", 32), ("long", 64), ("short", 40)]


@pytest.mark.parametrize(("common", "marks", "shared"), [(100, (), 96), (100, (98,), 98), (20, (10,), 10), (20, (), 0)])
def test_recurrent_rows_wait_for_a_chunk_end_or_checkpoint_that_they_can_share(common, marks, shared):
    loaded, order = load("jamba"), list[tuple[int, int]]()
    with new_generator(loaded, new_cache(loaded)) as generator:
        for row, prompt in enumerate((np.arange(30, 230), np.append(np.arange(30, 30 + common), 9))):
            submit(generator, prompt, 1, marks=marks, on_progress=lambda at, total, row=row: order.append((row, at)))
        drain(generator)
    chunks = range(0, shared + STEP_SIZE, STEP_SIZE)
    assert order[: len(chunks) + 1] == [*((0, at) for at in chunks), (1, shared)]


@pytest.mark.parametrize(("capacity", "pieces", "entry"), [(CAPACITY, 0, (1, False)), (200, 1, (6, True))])
def test_what_is_quarantined_is_neither_waited_for_nor_counted_as_shared(llama, capacity, pieces, entry):
    """Where there is room, the second comes in at once, else in one go when the first has ended."""
    cache, tickets, chunks, entries = new_cache(llama), list[Generation](), list[int](), list[tuple[int, bool]]()

    def ask_again(count: int) -> None:
        if count == pieces:
            inside.quarantine(cache, PROMPTS[2], 0)
            tickets.append(submit(generator, PROMPTS[2], on_progress=enter))

    def enter(at: int, total: int) -> None:
        entries.append((len(chunks), first.completion is not None))

    with new_generator(llama, cache, capacity=capacity) as generator:
        first = submit(generator, PROMPTS[2], 20, on_progress=lambda at, total: chunks.append(at))
        drain(generator, ask_again)
        require_alone(llama, [first, *tickets], [PROMPTS[2]] * 2)
    assert (entries[0], len(entries), done(tickets[0]).cached_tokens) == (entry, 6, 0)


def test_nobody_waits_for_a_prompt_that_was_cancelled(llama: LoadedModel) -> None:
    with new_generator(llama, new_cache(llama)) as generator:
        first = submit(generator, PROMPTS[2], on_progress=lambda done, total: first.cancel() if done else None)
        (second,) = serve(generator, [PROMPTS[2]])
    assert done(first).done_reason == "cancelled"
    require_alone(llama, [second], [PROMPTS[2]])
    assert done(second).cached_tokens == STEP_SIZE


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        pytest.param(lambda: 1 / 0, ZeroDivisionError, id="raises"),
        pytest.param(lambda: mx.array([1.5]), TypeError, id="a float"),
        pytest.param(lambda: None, TypeError, id="nothing"),
        pytest.param(lambda: mx.array([100_000]), ValueError, id="far outside"),
        pytest.param(lambda: np.array([-3]), ValueError, id="below 0"),
        pytest.param(None, OSError, id="its progress callback raises"),
    ],
)
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_sampler_or_callback_that_goes_wrong_ends_its_own_reply_alone(llama, is_alone, spoil, error):
    cache, calls = new_cache(llama), 0

    def sampler(logprobs: mx.array) -> Any:
        nonlocal calls
        calls += 1
        return spoil() if spoil and calls > 2 else mx.argmax(logprobs, axis=-1)

    def progress(at: int, total: int) -> None:
        if spoil is None and at > 60:
            raise OSError("gone")

    with new_generator(llama, cache, is_alone=is_alone) as generator:
        tickets = [submit(generator, PROMPTS[0]), submit(generator, PROMPTS[1], sampler=sampler, on_progress=progress)]
        tickets.append(submit(generator, PROMPTS[2]))
        drain(generator)
        require_alone(llama, [tickets[0], tickets[2]], [PROMPTS[0], PROMPTS[2]])
    failed = done(tickets[1])
    assert (failed.done_reason, type(failed.error)) == ("error", error)
    assert failed.tokens == alone(llama, PROMPTS[1])[: 2 if spoil else 0]
    require_right_tree(llama, cache, PROMPTS[:3])


def test_a_detokenizer_that_raises_ends_its_own_reply_alone(llama, monkeypatch):
    kind, made = type(llama.tokenizer), list[Any]()
    make = kind.detokenizer.fget

    def detokenizer(tokenizer: Any) -> Any:
        made.append(make(tokenizer))
        if len(made) == 2:
            made[1].add_token = Mock(side_effect=[None, None, KeyError("no such token")])
            made[1].finalize = Mock(side_effect=KeyError("nothing to end"))
        return made[-1]

    monkeypatch.setattr(kind, "detokenizer", property(detokenizer))
    with new_generator(llama, new_cache(llama)) as generator:
        tickets = serve(generator, PROMPTS[:3])
        require_alone(llama, [tickets[0], tickets[2]], [PROMPTS[0], PROMPTS[2]])
    assert (done(tickets[1]).done_reason, type(done(tickets[1]).error)) == ("error", KeyError)


def test_an_evaluation_that_fails_costs_those_who_run_and_nobody_else(loaded: LoadedModel) -> None:
    cache = new_cache(loaded)
    with new_generator(loaded, cache, max_rows=2) as generator:
        inside.try_ways(loaded.model)
        with fused(loaded.model, Fuse(12, spoiling(refused_product))):
            tickets = serve(generator, PROMPTS)
        reasons = [done(ticket).done_reason for ticket in tickets]
        assert len(reasons) == len(PROMPTS)
        assert 1 <= reasons.count("error") <= 2
        for ticket, prompt in zip(tickets, PROMPTS, strict=True):
            assert tokens_of(ticket) == alone(loaded, prompt)[: len(tokens_of(ticket))]
            if done(ticket).done_reason == "error":
                assert isinstance(done(ticket).error, Exception)
            else:
                assert len(tokens_of(ticket)) == MAX_TOKENS
        generator.group.check()
    require_right_tree(loaded, cache, PROMPTS[:3])


@pytest.mark.parametrize("at", [1, 2, 3])
def test_all_that_end_with_a_failed_evaluation_are_told_what_failed(llama: LoadedModel, at: int) -> None:
    """A chunk of prefill fails, or the step behind it, while a reply is under way."""
    with new_generator(llama, new_cache(llama)) as generator:
        talking = submit(generator, PROMPTS[0], 20)
        while talking.completion is None and len(talking.said) < 5:
            generator.round()
        coming = submit(generator, np.random.default_rng(3).integers(20, 200, 90), marks=())
        with fused(llama.model, Fuse(at, spoiling(refused_product))):
            drain(generator)
        assert tokens_of(talking) == alone(llama, PROMPTS[0], 20)[: len(tokens_of(talking))]
        assert "Currently only supports float32" in str(done(talking).error)
        assert "Currently only supports float32" in str(done(coming).error)


@pytest.fixture
def poisoned(loaded: LoadedModel) -> Iterable[LoadedModel]:
    with embedding(loaded.model, spoilt):
        yield loaded


def test_a_prompt_that_the_model_refuses_ends_alone_and_those_it_was_prefilled_with_go_on(loaded: LoadedModel) -> None:
    def refuse(ids: mx.array, found: mx.array) -> mx.array:
        shapes.append(ids.shape)
        if BAD_TOKEN in np.array(ids):
            raise ValueError("refused")
        return found

    shapes: list[tuple[int, ...]] = []
    prompts = [prompt[-30:].copy() for prompt in PROMPTS[1:]]
    prompts[1][20] = BAD_TOKEN
    cache = new_cache(loaded)
    with new_generator(loaded, cache, step_size=200) as generator, embedding(loaded.model, refuse):
        inside.try_ways(loaded.model)
        shapes.clear()
        tickets = serve(generator, prompts, marks=())
    assert any(rows > 1 and count > 1 for rows, count in shapes)
    assert str(done(tickets.pop(1)).error) == "refused"
    prompts.pop(1)
    require_alone(loaded, tickets, prompts)
    require_right_tree(loaded, cache, prompts)


def test_a_prompt_whose_state_is_not_a_number_takes_nobody_along(poisoned: LoadedModel) -> None:
    cache = new_cache(poisoned)
    bad = PROMPTS[2].copy()
    bad[50] = BAD_TOKEN
    with new_generator(poisoned, cache) as generator:
        tickets = serve(generator, (PROMPTS[0], bad, PROMPTS[1], PROMPTS[3]))
        require_alone(poisoned, [tickets[0], *tickets[2:]], [PROMPTS[0], PROMPTS[1], PROMPTS[3]])
        (later,) = serve(generator, [PROMPTS[4]])
        require_alone(poisoned, [later], [PROMPTS[4]])
    failed = done(tickets[1])
    assert isinstance(failed.error, FloatingPointError)
    with cache.begin(bad) as session:
        assert session.cached_tokens <= 50
    require_right_tree(poisoned, cache, PROMPTS[:3])


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_reply_that_stops_being_numbers_takes_nobody_along(poisoned: LoadedModel, is_alone: bool) -> None:
    cache = new_cache(poisoned)
    said = [30 + count for count in range(6)]
    with new_generator(poisoned, cache, is_alone=is_alone) as generator:
        tickets = [submit(generator, prompt) for prompt in PROMPTS[:2]]
        bad = submit(generator, PROMPTS[3], sampler=scripted([*said, *[BAD_TOKEN] * 20]))
        tickets.append(submit(generator, PROMPTS[2]))
        pieces = drain(generator)
        require_alone(poisoned, tickets, PROMPTS[:3])
    assert isinstance(done(bad).error, FloatingPointError)
    assert tokens_of(bad) == (*said, BAD_TOKEN)
    for ticket in [*tickets, bad]:
        assert [piece.token for piece in pieces[ticket] if piece.token is not None] == list(tokens_of(ticket))
    require_right_tree(poisoned, cache, PROMPTS[:3])


def test_going_back_to_waiting_happens_and_resumes_where_the_reply_stood(llama: LoadedModel) -> None:
    cache = new_cache(llama)
    progress: list[int] = []
    with new_generator(llama, cache, capacity=160) as generator:
        first = submit(generator, PROMPTS[0], 60, reserve=1)
        second = submit(
            generator, PROMPTS[3], 60, reserve=1, on_progress=lambda done, total: progress.append((done, total))
        )
        drain(generator)
        require_alone(llama, [first, second], [PROMPTS[0], PROMPTS[3]])
    starts = [(done, total) for done, total in progress if total > len(PROMPTS[3])]
    # It was admitted again, once, with what it had said as part of its prompt, and restored but for the last token.
    assert len({total for _, total in starts}) == 1
    assert starts[0][0] == starts[0][1] - 1


def test_a_prompt_that_no_memory_is_enough_for_does_not_hold_up_those_behind_it(llama: LoadedModel) -> None:
    cache = new_cache(llama, max_request_bytes=900_000)
    with new_generator(llama, cache, capacity=2000) as generator:
        (drain_one,) = serve(generator, [PROMPTS[0]], 2)
        first = submit(generator, PROMPTS[1], 12)
        never = submit(generator, np.random.default_rng(7).integers(20, 200, 500))
        behind = submit(generator, PROMPTS[2], 3)
        ended = [ticket for ticket, piece in generator if piece.completion is not None]
    assert done(drain_one).done_reason == "length"
    assert ended == [never, behind, first]
    assert isinstance(done(never).error, RequestTooLargeError)
    assert str(done(never).error).startswith(
        "the request needs 1536000 bytes while it runs; max_request_bytes is 900000"
    )


@pytest.mark.parametrize("budget_bytes", [1, 600_000])
def test_requests_that_are_larger_than_the_budget_are_served(llama: LoadedModel, budget_bytes: int) -> None:
    cache = new_cache(llama, budget_bytes=budget_bytes)
    with new_generator(llama, cache) as generator:
        require_alone(llama, serve(generator, PROMPTS, reserve=1), PROMPTS)
    assert held_bytes(cache.stats) <= budget_bytes
    require_right_tree(llama, cache, PROMPTS)


def test_of_replies_that_outgrow_the_budget_together_the_first_goes_on(llama: LoadedModel) -> None:
    prompts = [PROMPTS[0] + seed for seed in range(5)]
    budget_bytes, most_over = 900_000, 0
    cache = new_cache(llama, budget_bytes=budget_bytes)
    with new_generator(llama, cache) as generator:

        def look(_: int) -> None:
            nonlocal most_over
            most_over = max(most_over, cache.stats.over_budget_bytes)

        submit(generator, PROMPTS[3], 2)
        drain(generator)
        tickets = [submit(generator, prompt, 80, reserve=1) for prompt in prompts]
        drain(generator, look)
    require_alone(llama, tickets, prompts)
    assert 0 < most_over < budget_bytes, most_over


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_mixture_of_joining_cancelling_drafts_and_short_room_leaves_every_reply_as_it_is(data: Any) -> None:
    loaded = load(data.draw(st.sampled_from((*FEW_KINDS, "qwen3_next"))))
    cache = free_cache(loaded)
    more = {
        "capacity": data.draw(st.sampled_from([180, 260, 1024])),
        "context": data.draw(st.sampled_from([None, None, 150])),
        "max_rows": data.draw(st.integers(1, 5)),
        "step_size": data.draw(st.sampled_from([16, 32, 512])),
        "speculate": data.draw(st.sampled_from([None, "tree", "prompt"])),
    }
    reserve = data.draw(st.sampled_from([None, 1, 4]))
    join = st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 20), st.integers(0, 9))
    joins = data.draw(st.lists(join, max_size=8))
    cancels = dict(data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=4)))
    tickets: list[tuple[Generation, Any]] = []
    with new_generator(loaded, cache, **more) as generator:

        def happen(count: int) -> None:
            for at, prompt, length, seed in joins:
                if at == count:
                    its = misled(alone(loaded, PROMPTS[prompt], 20), seed) if seed % 3 else None
                    ticket = submit(generator, PROMPTS[prompt], length, reserve=reserve, prediction=its)
                    tickets.append((ticket, PROMPTS[prompt]))
            if count in cancels and cancels[count] < len(tickets):
                tickets[cancels[count]][0].cancel()

        drain(generator, happen)
    finals = PROMPTS[:3]
    for ticket, prompt in tickets:
        completion = done(ticket)
        assert completion.done_reason in ("length", "cancelled"), completion
        gone = completion.omitted_tokens + completion.shifted_tokens
        if not gone:
            assert completion.tokens == alone(loaded, prompt, 20)[: len(completion.tokens)]
        finals.append([*np.delete(prompt, slice(len(SYSTEM), len(SYSTEM) + gone)), *completion.tokens])
    require_right_tree(loaded, cache, finals)
