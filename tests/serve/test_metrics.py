"""What the server tells of itself: metrics by Prometheus' conventions, a line of the log, the last requests."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixcache import PrefixCache
from radixcache.stores.block_store import StoreStats
from radixcache.tree.history import Event, EventKind
from runner.serve.metrics import LISTED_REFUSALS, LISTED_REQUESTS, Watch, in_a_line
from runner.serve.request import ModelNames
from runner.text import LONGEST_TEXT
from tests.serve.watched import Watched, explained, record

STORE = "radixcache_store_"


def samples(watch: Watch) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(watch.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(watch: Watch, name: str, **labels: str) -> float:
    return samples(watch)[f"radixcache_serve_{name}", tuple(sorted(labels.items()))]


def test_the_fork_on_arrival_is_told_wherever_tokens_behind_it_were_evaluated() -> None:
    found = explained((3, 9, "diverged"))
    for cached_tokens in (3, 6, 9):
        about = record(explanation=found, prompt_tokens=10, cached_tokens=cached_tokens)
        is_told = "diverged" in about.short_tokens
        assert is_told == (cached_tokens < 9)
        assert about.fork_words == ("diverged at 3 of 10" if is_told else "")


def test_counters_end_in_total_and_nothing_else_does() -> None:
    watch = Watch()
    watch.on_record(record())
    watch.on_http("/metrics", 200, "", "/metrics")
    for family in text_string_to_metric_families(watch.exposition().decode()):
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples), family
        assert family.documentation.endswith(".")


def test_every_prompt_token_is_cached_or_short_for_one_reason() -> None:
    watch = Watch()
    watch.on_record(record())
    watch.on_record(record(prompt_tokens=50, cached_tokens=49, explanation=explained((49, 50, "last_token"))))
    # Others brought more of it while it waited, or took some away.
    watch.on_record(record(prompt_tokens=100, cached_tokens=80))
    watch.on_record(record(prompt_tokens=100, cached_tokens=45, reason=None))
    short = {dict(labels)["reason"]: n for (name, labels), n in samples(watch).items() if "shortfall" in name}
    assert short == {"no_checkpoint": 20, "diverged": 80, "last_token": 1, "evicted": 15}
    assert value(watch, "prompt_tokens_total") == value(watch, "cached_tokens_total") + sum(short.values()) == 350
    assert value(watch, "generated_tokens_total") == 12
    assert value(watch, "replies_total", outcome="stop") == 4


def test_histograms_are_in_seconds_and_leave_out_what_never_was() -> None:
    watch = Watch()
    watch.on_record(record())
    watch.on_record(record(queue_ms=None, ttft_ms=None, gaps_ms=(), done_reason="cancelled"))
    assert value(watch, "time_to_first_token_seconds_sum") == pytest.approx(0.04)
    assert value(watch, "inter_token_seconds_sum") == pytest.approx(0.05)
    assert value(watch, "inter_token_seconds_bucket", le="0.02") == 1
    counts = [value(watch, f"{name}_seconds_count") for name in ("queue", "time_to_first_token", "inter_token")]
    assert counts == [1, 1, 2]


def test_evictions_are_counted_by_what_they_were_for() -> None:
    watch = Watch()

    def evicted(**detail: Any) -> None:
        watch.on_event(Event(EventKind.EVICTED, 1, "", 0, 8, 64, detail))

    evicted(state="tokens", was_wrong=False)
    evicted(state="checkpoint")
    evicted(state="tokens", was_wrong=True)
    with watch.evicting("reclaim"):
        evicted(state="tokens", was_wrong=False)
        evicted(state="tokens", was_wrong=True)
    evicted(state="tokens", was_wrong=False)
    watch.on_event(Event(EventKind.STORED, 1, "", 0, 8, 64, {"state": "tokens"}))
    found = {tuple(dict(labels).values()): n for (name, labels), n in samples(watch).items() if "evictions" in name}
    pressure = {("pressure", "tokens"): 2, ("pressure", "checkpoint"): 1}
    assert found == {**pressure, ("mismatch", "tokens"): 2, ("reclaim", "tokens"): 1}


def test_queues_and_caches_are_read_when_they_are_asked_for(llama: Any) -> None:
    watch = Watch()
    watched = Watched()
    watch.attach(watched)
    assert value(watch, "waiting_requests") == value(watch, "running_requests") == 0
    watched.add(ModelNames("small", None, None), llama)
    other = watched.add(ModelNames("small", "adapter", None), llama)
    watched.waiting, watched.running = 3, 2
    with other.begin([1, 2, 3, 4]) as session:
        session.prefill(llama)
    assert value(watch, "waiting_requests") == 3
    assert value(watch, "running_requests") == 2
    found = samples(watch)
    for adapter, cache in (("", watched.held[0][1]), ("adapter", other)):
        labels = (("adapter", adapter), ("draft", ""), ("model", "small"))
        assert found["radixcache_requests_total", labels] == cache.stats.requests
        assert found["radixcache_live_bytes", labels] == cache.stats.live_bytes
        assert found["radixcache_budget_bytes", labels] == cache.stats.budget_bytes
        assert found["radixcache_verify_mismatches_total", labels] == 0


def test_all_that_stores_count_is_shown_once_for_all_models_by_the_store(llama: Any) -> None:
    watch, watched = Watch(), Watched()
    watch.attach(watched)
    for model in ("small", "large"):
        watched.add(ModelNames(model, None, None), llama)
    assert not any(name.startswith(STORE) and "model" not in dict(labels) for name, labels in samples(watch))
    numbers = {each.name: n for n, each in enumerate(fields(StoreStats), 1) if each.type in ("int", "float")}
    disk: dict[str, Any] = {**numbers, "stopped": "No space left", "dropped": {"the queue is full": 3}}
    twice = {name: 2 * n for name, n in numbers.items()}
    redis: dict[str, Any] = {**twice, "stopped": "", "failed_calls": {"refused": 4}}
    watched.stores = {"disk": StoreStats(**disk), "redis": StoreStats(**redis)}
    found: dict[str, dict[str, float]] = {"disk": {}, "redis": {}}
    for (name, labels), n in samples(watch).items():
        if name.startswith(STORE) and "tier" in dict(labels):
            why = [word for label, word in labels if label != "tier"]
            found[dict(labels)["tier"]][" ".join([name.removeprefix(STORE).removesuffix("_total"), *why])] = n
    assert found["disk"] == {**numbers, "stopped": 1, "dropped the queue is full": 3}
    assert found["redis"] == {**twice, "stopped": 0, "failed_calls refused": 4}


def test_the_end_of_a_request_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "runner.serve.metrics"):
        Watch().on_record(record(namespace="ann"))
    (line,) = caplog.messages
    assert line == (
        "3f9a1c2e of ann on 'small': 100 prompt tokens, 60 cached (not: 10 no_checkpoint, 30 diverged), diverged at "
        "70 of 100, 3 generated, "
        "stop; queued 1.0 ms; TTFT 40.0 ms; 40.0 tokens/s"
    )


def test_what_a_client_sends_cannot_break_or_fill_the_line() -> None:
    names = ModelNames("a\nb\x1b[31m" + "x" * 100_000)
    line = in_a_line(record(names=names, note="\n\x1b[31m" + "y" * 100_000, queue_ms=None, ttft_ms=None, gaps_ms=()))
    assert line.isprintable()
    assert len(line) < 3 * LONGEST_TEXT


def test_the_last_requests_are_kept_with_the_time_and_the_bytes_at_their_end(llama: Any) -> None:
    now_s = iter(range(1000))
    watch, watched = Watch(clock=lambda: float(next(now_s))), Watched()
    watch.attach(watched)
    cache: PrefixCache = watched.add(ModelNames("small", None, None), llama)
    with cache.begin([1, 2, 3, 4]) as session:
        session.prefill(llama)
    for number in range(LISTED_REQUESTS + 5):
        watch.on_record(record(prompt_tokens=number + 100))
    seen = watch.last_requests()
    assert [(time_s, each.prompt_tokens - 100) for time_s, each in seen] == [
        (number, number) for number in range(LISTED_REQUESTS + 4, 4, -1)
    ]
    stats = cache.stats
    held = (stats.live_bytes, stats.paged_bytes, stats.budget_bytes)
    assert watch.points()[-1][:-1] == (LISTED_REQUESTS + 4, LISTED_REQUESTS + 104, 60, *held)


def test_the_time_saved_is_that_of_the_tokens_that_were_not_prefilled() -> None:
    watch = Watch()
    for evaluated_tokens, cached_tokens in ((500, 0), (1000, 0), (100, 900), (50, 2000)):
        asked = record(
            prompt_tokens=evaluated_tokens + cached_tokens,
            cached_tokens=cached_tokens,
            queue_ms=5.0,
            ttft_ms=5.0 + 30.0 + 2.0 * evaluated_tokens,  # 30 ms for each request, 2 ms for each token
        )
        watch.on_record(asked)
    assert [each.saved_s for _, each in reversed(watch.last_requests())] == pytest.approx([0, 0, 1.8, 4.0])
    # Another model has a speed of its own, which one request does not tell.
    other = record(names=ModelNames("large", None, None), prompt_tokens=1000, cached_tokens=900)
    watch.on_record(other)
    assert other.saved_s == 0


def test_the_last_refused_requests_are_kept_with_their_reasons() -> None:
    watch = Watch(clock=lambda: 7.0)
    watch.on_http("/v1/models", 200, "", "/v1/models")
    for number in range(LISTED_REFUSALS + 1):
        watch.on_http("other", 404, f"reason {number}", "/v2/messages")
    assert watch.refusals()[0] == (7.0, "/v2/messages", 404, f"reason {LISTED_REFUSALS}")
    assert len(watch.refusals()) == LISTED_REFUSALS
