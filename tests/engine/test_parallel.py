"""What a ParallelGenerator is handed is looked at at once, and what it keeps of a request is right at every turn."""

import numpy as np
import pytest

from radixcache import PrefixCache, UnsupportedCacheError
from runner.engine.generator import ParallelGenerator
from runner.models.load import load_model
from tests.engine.compiled import Uncompiled, is_compiling

PROMPT = np.arange(30, 130)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def new_generator(loaded, model=None, **more):
    cache = PrefixCache(loaded.model, budget_bytes=64 << 20)
    options = {"capacity": 512, "step_size": 32, **more}
    return ParallelGenerator(cache, model or loaded.model, loaded.tokenizer, **options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"capacity": 0}, "capacity is 0; wanted a whole number of"),
        ({"max_rows": 0}, "max_rows is 0; wanted a whole number of"),
        ({"step_size": 1.5}, "step_size is 1.5; wanted a whole number of"),
        ({"context": "x"}, "context is 'x'; wanted a whole number of tokens"),
        ({"context": 1}, "a context of 1 tokens; wanted at least 2"),
        ({"context": 513}, "a context of 513 tokens does not fit a capacity of 512"),
        ({"context": 100, "free_share": 0}, "free_share is 0; wanted more than 0"),
        ({"context": 100, "free_share": float("nan")}, "free_share is nan; wanted more than 0 and at most 1"),
        ({"priority": "high"}, "priority is 'high'"),
    ],
)
def test_a_generator_that_makes_no_sense_is_refused(tiny, options, found):
    with pytest.raises(ValueError, match=found):
        new_generator(tiny, **options)


def test_a_model_whose_layers_cannot_be_shared_is_refused_by_name():
    with pytest.raises(UnsupportedCacheError, match="ChunkedKVCache"):
        new_generator(load_model("tiny:llama4"))


@pytest.mark.parametrize(
    ("tokens", "more", "found"),
    [
        ([], {}, "tokens is empty"),
        ("text", {}, "tokens is a str"),
        ([1, 2, 300], {}, r"tokens\[2\] is 300; wanted a token id in \[0, 256\)"),
        (PROMPT, {"max_tokens": 0}, "max_tokens is 0; wanted a whole number of"),
        (PROMPT, {"marks": (101,)}, "mark 101 is outside the prompt of 100 tokens"),
        (PROMPT, {"keys": [1, 2]}, "keys has 2 entries; wanted 100"),
        (PROMPT, {"keep": 101}, "keep is 101 tokens; wanted 0 to 100"),
        (PROMPT, {"keep": -1}, "keep is -1 tokens; wanted 0 to 100"),
        (PROMPT, {"sampler": 3}, "sampler is a int; wanted a function"),
        (PROMPT, {"reserve": 0}, "reserve is 0; wanted a whole number of"),
        (PROMPT, {"max_tokens": 414}, "take 513 of a capacity of 512"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_nothing_else_is(tiny, tokens, more, found):
    with new_generator(tiny) as generator:
        with pytest.raises(ValueError, match=found):
            generator.submit(tokens, **{"max_tokens": 4, **more})
        assert list(generator) == []
        ticket = generator.submit(PROMPT, max_tokens=413, stop_tokens=range(256))
        assert ticket.number == 0
        assert [piece.completion.done_reason for _, piece in generator] == ["stop"]


def test_tickets_are_numbered_in_order_and_say_how_they_ended(tiny):
    with new_generator(tiny) as generator:
        tickets = [generator.submit(PROMPT[: 10 + count], max_tokens=2, stop_tokens=()) for count in range(3)]
        assert [ticket.number for ticket in tickets] == [0, 1, 2]
        assert repr(tickets[2]) == "<Generation 2 waiting or running: prompt of 12 tokens>"
        list(generator)
        assert repr(tickets[2]) == "<Generation 2 length: prompt of 12 tokens>"
        assert tickets[2].facts.matched_tokens == 11
        assert (tickets[0].facts.matched_tokens, tickets[0].facts.reason) == (0, None)


def test_closing_twice_is_fine_and_ends_an_iteration(tiny):
    generator = new_generator(tiny)
    ticket = generator.submit(PROMPT, max_tokens=50, stop_tokens=())
    for count, _ in enumerate(generator):
        if count == 3:
            generator.close()
    generator.close()
    assert ticket.completion.done_reason == "cancelled"
    assert len(ticket.completion.tokens) == 4
    assert generator.group.is_closed
    with pytest.raises(ValueError, match="closed"):
        generator.submit(PROMPT, max_tokens=1)


def test_compiled_mode_is_off_while_a_model_that_wants_it_so_runs_and_on_between_iterations(tiny):
    model = Uncompiled(tiny.model)
    with new_generator(tiny, model) as generator:
        generator.submit(PROMPT, max_tokens=9, stop_tokens=())
        assert is_compiling()
        for _ in generator:
            assert not is_compiling()
            break
        assert is_compiling()
        list(generator)
    assert set(model.compiled_calls) == {False}
    assert is_compiling()
