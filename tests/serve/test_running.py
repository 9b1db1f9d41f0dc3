"""The generation thread answers every request, each as if it were alone, and outlives what goes wrong with one."""

from __future__ import annotations

import json
import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from radixcache.speculate.pace import DraftPace
from runner.engine.token import Token
from runner.models.load import LoadedModel, load_model
from runner.models.tiny import CONTEXT_LENGTH
from runner.serve import served_model
from runner.serve.request import ModelNames, PrefillProgress, RequestRecord
from runner.serve.scheduler import Scheduler
from tests import inside
from tests.serve.jobs import LONG, MESSAGES, PROMPTS, Waiting, alone, application, local_client, noting, running
from tests.verify.faults import wrong_span


def rendered(loaded: LoadedModel, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    tokens: list[int] = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more)
    return tokens


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_eight_at_once_say_what_mlx_lm_says_to_each_alone(kind: str) -> None:
    loaded = load_model(f"tiny:{kind}")
    with running(model=f"tiny:{kind}") as thread:
        first = Waiting(thread, prompt=PROMPTS[0])
        assert (first.tokens, first.text) == alone(loaded, PROMPTS[0])
        asked = [Waiting(thread, prompt=prompt) for prompt in PROMPTS]
        for waiting, prompt in zip(asked, PROMPTS, strict=True):
            assert (waiting.tokens, waiting.text) == alone(loaded, prompt)
        assert (thread.waiting, thread.running) == (0, 0)


def test_answers_come_in_order_and_the_last_one_ends(tiny: LoadedModel) -> None:
    records: list[RequestRecord] = []
    with running(records) as thread:
        waiting = Waiting(thread, messages=MESSAGES, max_tokens=3)
        record = waiting.record
    kinds = [type(answer) for answer in waiting.answers]
    assert waiting.answers[0].reader
    assert kinds == sorted(kinds, key=[PrefillProgress, Token, RequestRecord].index)
    assert kinds.count(Token) == 3
    assert records == [record]
    length = len(rendered(tiny, MESSAGES))
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (length, 3, 0)
    assert (record.outcome, len(record.gaps_ms)) == ("length", 2)
    assert record.queue_ms is not None
    assert record.ttft_ms is not None
    assert 0 <= record.queue_ms <= record.ttft_ms
    done = [answer.done_tokens for answer in waiting.answers if isinstance(answer, PrefillProgress)]
    assert done == sorted(done)
    assert done[-1] == length


def test_log_probabilities_are_those_of_the_tokens_and_of_the_likeliest(tiny: LoadedModel, shared: Scheduler) -> None:
    expected = list(generate_step(mx.array(tiny.tokenizer.encode(LONG)), tiny.model, max_tokens=4))
    steps = Waiting(shared, prompt=LONG, max_tokens=4, top_logprobs=3).sampled
    for step, (token, logprobs) in zip(steps, expected, strict=True):
        assert step.id == token
        assert step.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
        assert [top.id for top in step.top_tokens] == mx.argsort(-logprobs)[:3].tolist()
        assert step.top_tokens[0].logprob == pytest.approx(step.logprob, abs=1e-4)
        for each in (step, *step.top_tokens):
            assert each.data.decode("utf-8", "replace") == tiny.tokenizer.decode([each.id])


def test_log_probabilities_name_the_sampled_token_where_another_one_is_likelier(either: Scheduler) -> None:
    steps = Waiting(either, prompt=LONG, temperature=1.0, seed=4, logprobs=True, top_logprobs=20).sampled
    assert any(step.id != step.top_tokens[0].id for step in steps)
    for step in steps:
        logprobs = [top.logprob for top in step.top_tokens]
        assert len(logprobs) == 20
        assert logprobs == sorted(logprobs, reverse=True)
        own = [top for top in step.top_tokens if top.id == step.id]
        assert step.logprob <= logprobs[0]
        assert not own or own[0] == (step.id, step.data, pytest.approx(step.logprob, abs=1e-4))


@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_a_seed_and_penalties_give_what_they_give_in_mlx_lm(tiny: LoadedModel, options: dict[str, Any]) -> None:
    mx.random.seed(3)
    expected = alone(
        tiny,
        LONG,
        sampler=make_sampler(0.8, top_p=0.9),
        logits_processors=make_logits_processors({5: 2.0}, repetition_penalty=1.3),
    )
    with running(**options) as thread:
        for _ in range(2):  # the second time from the cache
            found = Waiting(
                thread, prompt=LONG, seed=3, temperature=0.8, top_p=0.9, logit_bias={5: 2.0}, repetition_penalty=1.3
            )
            beside = Waiting(thread, prompt=PROMPTS[1], temperature=1.0)
            assert (found.tokens, found.text) == expected
            beside.end()


def test_a_stop_word_ends_the_reply_and_is_named(tiny: LoadedModel, either: Scheduler) -> None:
    said = ((prompt, alone(tiny, prompt)[0]) for prompt in PROMPTS)
    words = ((prompt, tokens, tiny.tokenizer.decode(tokens[5:7])) for prompt, tokens in said if len(tokens) == 12)
    prompt, tokens, word = next(each for each in words if each[2].isascii())
    waiting = Waiting(either, prompt=prompt, stop_words=["never said", word])
    assert waiting.record.outcome == "stop"
    assert waiting.tokens == tokens[: len(waiting.tokens)]
    assert waiting.tokens[-2:] == tokens[5:7]
    assert [step.finish_reason for step in waiting.sampled] == [*[None] * (len(waiting.tokens) - 1), "stop"]
    assert [step.stop_word for step in waiting.sampled][-1] == word


def test_the_bits_of_stored_state_are_those_of_the_option() -> None:
    with running(stored_bits=8) as thread:
        Waiting(thread, prompt=LONG).end()
        assert Waiting(thread, prompt=LONG).record.cached_tokens == len(LONG) - 1
        cache = thread.call(lambda models: models.loaded(ModelNames()).cache).result()
        assert inside.layout(cache).stored_bits == 8


@pytest.mark.parametrize("draft", ["llama", "qwen3", "mamba2"])
def test_with_a_draft_model_several_requests_run_together(
    tiny: LoadedModel, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPace, "seconds", lambda self, tokens_in_pass, rows=1: 1.0)
    with running(draft_model=f"tiny:{draft}", num_draft_tokens=2) as thread:
        asked = [Waiting(thread, prompt=prompt, max_tokens=12 + 4 * index) for index, prompt in enumerate(PROMPTS[:4])]
        none = Waiting(thread, prompt=PROMPTS[4], num_draft_tokens=0)
        is_parallel = thread.call(lambda models: models.loaded(ModelNames())._is_parallel).result()
        for index, waiting in enumerate(asked):
            assert waiting.tokens == alone(tiny, PROMPTS[index], 12 + 4 * index)[0]
            assert waiting.record.drafted["draft"].proposed > 0
        assert none.tokens == alone(tiny, PROMPTS[4])[0]
        assert none.record.drafted == {}
    assert is_parallel
    assert draft != "llama" or asked[0].record.rejected_tokens == 0  # a twin


@pytest.mark.parametrize("options", [{}, {"context": 2000}])
def test_requests_that_are_drawn_for_verification_run_beside_others(options: dict[str, Any]) -> None:
    ended: list[str] = []
    with running(verify=1.0, **options) as thread:
        held = threading.Event()
        thread.call(lambda _: held.wait())
        asked = [
            Waiting(thread, max_tokens=count, logit_bias={1: -1e4}, on_answer=noting(ended, name))
            for name, count in (("long", 30), ("short", 1))
        ]
        held.set()
        assert [len(waiting.tokens) for waiting in asked] == [30, 1]
        stats = thread.call(lambda models: models.loaded(ModelNames()).cache.stats).result()
    assert ended == ["short", "long"]
    assert (stats.verified_requests, stats.verify_skipped, stats.verify_mismatches) == (2, 0, 0)


def test_who_must_run_alone_waits_for_those_that_run_and_those_behind_wait_for_it() -> None:
    ended: list[str] = []
    with running() as thread:
        held = threading.Event()
        thread.call(lambda _: held.wait())
        asked = [
            Waiting(thread, prompt="abc", max_tokens=count, logit_bias={1: -1e4}, on_answer=noting(ended, name), **more)
            for name, count, more in (
                ("before", 30, {}),
                ("alone", 20, {"echo": True, "logprobs": True}),
                ("behind", 1, {}),
            )
        ]
        held.set()
        assert [len(waiting.tokens) for waiting in asked] == [30, 20, 1]
    assert ended == ["before", "alone", "behind"]


def test_a_reply_that_runs_alone_ends_with_the_models_context_also_where_others_would_be_shifted() -> None:
    with running(context=64) as thread:
        asked = Waiting(thread, prompt=[70] * 40, echo=True, logprobs=True, max_tokens=1 << 20)
        asked.until(Token)
        asked.opened.cancel()
        asked.end()
    assert asked.opened.options["max_tokens"] == CONTEXT_LENGTH - 40


def ended(thread: Scheduler, **asked: Any) -> Waiting:
    waiting = Waiting(thread, **asked)
    waiting.end()
    return waiting


def test_a_request_that_resumes_on_wrong_state_is_served_cold_and_the_log_says_so(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with application(verify=1.0) as (_, thread):
        ended(thread, prompt=LONG)
        thread.call(lambda models: wrong_span(0)(models.loaded(ModelNames()).cache)).result()
        with pytest.warns(RuntimeWarning, match="differs from a cold prefill"):
            waiting = ended(thread, prompt=LONG)
        assert waiting.tokens == alone(tiny, LONG)[0]
        assert waiting.record.cached_tokens == 0
        stats = thread.call(lambda models: models.loaded(ModelNames()).cache.stats).result()
    assert (stats.verify_mismatches, stats.quarantined) == (1, 1)
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("verify: ")]
    assert "from token 20 on" in line
    assert line.endswith("; quarantined from token 20 on")


def test_choices_of_one_prompt_cost_one_prefill_and_a_prompt_may_be_token_ids() -> None:
    with application() as (app, _), local_client(app) as client:
        body = {"prompt": LONG, "max_tokens": 3, "temperature": 1, "seed": 5, "echo": True}
        answer = client.post("/v1/completions", json={**body, "n": 8}).json()
        evaluated = client.get("/metrics").text
        ids = load_model("tiny").tokenizer.encode(LONG)
        same = client.post("/v1/completions", json={**body, "prompt": ids}).json()
        single = client.post("/v1/completions", json={**body, "seed": 6}).json()
        wrong = client.post("/v1/completions", json={"prompt": [256]})
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(text.startswith(LONG) and len(text) > len(LONG) for text in texts)
    assert len(set(texts)) > 4
    assert texts[:2] == [same["choices"][0]["text"], single["choices"][0]["text"]]
    assert answer["usage"]["prompt_tokens"] == len(LONG)
    assert answer["usage"]["completion_tokens"] == 24
    counts = dict(line.rsplit(" ", 1) for line in evaluated.splitlines() if not line.startswith("#"))
    prompts, cached = (float(counts[f"radixcache_serve_{name}_tokens_total"]) for name in ("prompt", "cached"))
    assert prompts == 8 * len(LONG)
    assert prompts - cached <= len(LONG) + 8 * 2
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "MAX_SCORES", 16 * 256)  # several chunks
    monkeypatch.setattr(served_model, "MAX_SCORED_TOKENS", 60)
    text = "All work and no play makes a dull boy."
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True}
    with application() as (app, _), local_client(app) as client:
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        again = client.post("/v1/completions", json=body).json()["choices"][0]
        stream = client.post("/v1/completions", json={**body, "stream": True}).text
        refused = client.post("/v1/completions", json={**body, "prompt": text * 2})
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    streamed = [each["choices"][0]["logprobs"] for each in chunks if "logprobs" in each["choices"][0]]
    found = choice["logprobs"]
    loaded = load_model("tiny:llama")
    tokens = loaded.tokenizer.encode(text)
    logits = loaded.model(mx.array(tokens)[None])[0, :-1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    wanted = [logprobs[at, token].item() for at, token in enumerate(tokens[1:])]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1 : len(tokens)] == pytest.approx(wanted, abs=1e-3)
    assert [max(each.values()) for each in found["top_logprobs"][1 : len(tokens)]] == pytest.approx(
        logprobs.max(axis=-1).tolist(), abs=1e-3
    )
    assert (len(found["tokens"]), "".join(found["tokens"])) == (len(tokens) + 2, choice["text"])
    assert found["text_offset"] == [*range(len(tokens) + 2)]
    assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(found["token_logprobs"][1:], abs=1e-3)
    assert {name: [value for each in streamed for value in each[name]] for name in found} == again["logprobs"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
