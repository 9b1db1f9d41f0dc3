"""Nothing of one namespace appears in what another is told: a secret is planted and searched for in every answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from radixcache import CacheBusyError, Event, PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import tiny_tokenizer
from tests import inside

MODEL = SizedModel()
TOKENIZER = tiny_tokenizer()
RULES = "Answer in one short paragraph and in the language of the question; say on which page you found the answer. "
# Characters that occur nowhere else, so that a single one of them gives the secret away, and their numbers likewise.
SECRET = "ÞØ§ÆÞØ§Æ"
LEN_SECRET_PROMPT = 7919


def secret_prompt(seed: int) -> list[int]:
    ids: list[int] = TOKENIZER.encode(f"{RULES}{SECRET * (seed + 1)}{RULES * 3}")
    return (ids * 20)[:LEN_SECRET_PROMPT]


def serve(cache: PrefixCache, prompt: list[int], namespace: str, **more: Any) -> None:
    with cache.begin(prompt, namespace=namespace, reserve=0, **more) as session:
        session.prefill(MODEL)
        session.step(MODEL, prompt[-1:])


def said(value: Any) -> str:
    """All that an answer holds, as text, with token ids decoded beside them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{value} {said(fields)}"
    if isinstance(value, dict):
        return " ".join(f"{said(key)} {said(each)}" for key, each in value.items())
    if isinstance(value, (tuple, list)):
        ids = [each for each in value if isinstance(each, int) and 0 <= each < 256]
        return " ".join([*map(said, value), str(TOKENIZER.decode(ids))])
    return str(value)


def require_secret_free(text: str) -> None:
    # As JSON and HTML write them too.
    letters = [form for letter in SECRET for form in (letter, f"\\u{ord(letter):04x}", f"&#{ord(letter)};")]
    signs = {*letters, "hidden tenant", str(LEN_SECRET_PROMPT), f"{LEN_SECRET_PROMPT:,}"}
    found = [sign for sign in signs if sign in text]
    assert not found, (found, text)


def populated(**options: Any) -> tuple[PrefixCache, list[Event]]:
    """A cache in which another namespace has stored, diverged, been evicted, and varied a span, all with secrets."""
    told: list[Event] = []
    layout = options.pop("layout", None) or SizedLayout(1)
    cache = sized_cache(layout, tokenizer=TOKENIZER, on_event=told.append, **options)
    for seed in range(5):
        serve(cache, secret_prompt(seed), "hidden tenant")
    cache.reclaim(9_000)
    cache.pin(secret_prompt(4)[:100], "hidden tenant")
    return cache, told


def prompts() -> list[list[int]]:
    """Beginnings that the other namespace has too, and others."""
    return [
        TOKENIZER.encode(f"{RULES}Is it open?"),
        TOKENIZER.encode(f"{RULES}Until when?"),
        secret_prompt(0)[: len(TOKENIZER.encode(RULES))] + TOKENIZER.encode("And then?"),
        TOKENIZER.encode(RULES),
    ]


@pytest.mark.parametrize("layout", [SizedLayout(1), SizedLayout(1, 10), SizedLayout(1, 0, [(50, 2)])])
@pytest.mark.parametrize("namespace", ["", "open tenant"])
def test_no_explanation_tells_of_another_namespace(layout: Any, namespace: str) -> None:
    cache, _ = populated(layout=layout, budget_bytes=20_000)
    for prompt in prompts():
        fresh = cache.explain(prompt, namespace)
        assert (fresh.matched_tokens, fresh.resumable_tokens) == (0, 0)
        assert fresh.hints == ()
        require_secret_free(said(fresh))
    for prompt in prompts():
        serve(cache, prompt, namespace)
        require_secret_free(said(cache.explain([*prompt, 5, 6], namespace)))
        require_secret_free(said(cache.explain([*prompt[:-1], 7], namespace)))


def test_the_same_questions_have_the_same_explanations_beside_another_namespace_and_without() -> None:
    beside, _ = populated(budget_bytes=1 << 30)
    alone = sized_cache(SizedLayout(1), tokenizer=TOKENIZER, budget_bytes=1 << 30)
    for prompt in prompts() * 2:
        assert beside.explain(prompt, "open tenant") == alone.explain(prompt, "open tenant")
        serve(beside, prompt, "open tenant")
        serve(alone, prompt, "open tenant")


def test_a_checkpoint_that_another_namespace_lost_on_the_same_tokens_is_not_told_of() -> None:
    cache = sized_cache(SizedLayout(1, 10), budget_bytes=1 << 30, checkpoint_budget_bytes=20)
    prompt = prompts()[0]
    for length in range(40, len(prompt), 10):
        serve(cache, prompt[:length], "hidden tenant", marks=[length - 5])
    serve(cache, prompt, "open tenant")
    cuts = [[*prompt[:length], 7, 8] for length in range(30, len(prompt), 7)]
    hidden, told = (
        {gap.checkpoint for cut in cuts for gap in cache.explain(cut, name).gaps if gap.tick is not None}
        for name in ("hidden tenant", "open tenant")
    )
    own = {len(prompt) - 16}
    assert hidden - own
    assert told <= own


def test_the_events_of_one_namespace_tell_nothing_of_another() -> None:
    cache, told = populated(budget_bytes=20_000)
    for prompt in prompts():
        serve(cache, prompt, "open tenant")
    theirs = [event for event in told if event.namespace == "open tenant"]
    assert theirs
    for event in theirs:
        require_secret_free(f"{event} {said(dict(event.detail))}")
    # An event belongs to exactly one namespace, and what is evicted for somebody's sake is told to its owner.
    assert {event.namespace for event in told} == {"hidden tenant", "open tenant"}


def test_no_error_tells_of_another_namespace() -> None:
    cache, _ = populated(budget_bytes=1 << 30)
    with cache.begin(secret_prompt(0), namespace="hidden tenant", kind=SECRET):
        with pytest.raises(CacheBusyError) as busy:
            cache.begin(prompts()[0], namespace="open tenant")
        require_secret_free(f"{busy.value} {busy.value.args}")
    with pytest.raises(ValueError, match="stored") as pinned:
        cache.pin(secret_prompt(0), "open tenant")
    assert "only 0 of" in str(pinned.value)


def test_stats_are_numbers_of_the_whole_cache_and_name_no_namespace() -> None:
    cache, _ = populated(budget_bytes=20_000)
    stats = dataclasses.asdict(cache.stats)
    text = [value for value in stats.values() if isinstance(value, str)]
    assert text == ["given"]
    assert all(isinstance(key, str) and isinstance(value, int) for key, value in stats["short_reasons"].items())


def test_the_dump_shows_a_namespace_below_its_own_name_only() -> None:
    cache, _ = populated(budget_bytes=1 << 30)
    serve(cache, prompts()[0], "open tenant")
    parts = cache.dump(TOKENIZER).split("namespace ")
    (theirs,) = [part for part in parts if part.startswith("'open tenant'")]
    require_secret_free(theirs)
    assert any(SECRET[0] in part for part in parts)
    alone = cache.dump(TOKENIZER, "open tenant")
    assert alone.partition("namespace ")[2] == theirs.rstrip("\n")
    require_secret_free(alone)
    keys = np.asarray(prompts()[0], np.int64)
    assert inside.stored_tokens(cache, keys, "open tenant") == len(keys)


def test_no_view_name_or_figure_of_one_namespace_tells_of_another() -> None:
    cache, _ = populated(budget_bytes=1 << 30)
    cache.pin(secret_prompt(4)[:200], "hidden tenant", name=SECRET)
    for prompt in prompts():
        serve(cache, prompt, "open tenant")
    cache.pin(prompts()[0], "open tenant", name="rules")
    for format_name in ("text", "svg", "html", "json"):
        shown = cache.render(format_name, namespace="open tenant", tokenizer=TOKENIZER)
        assert "rules" in shown or format_name == "svg"
        require_secret_free(shown)
        assert "hidden tenant" in cache.render(format_name, tokenizer=TOKENIZER)
    require_secret_free(said(cache.names("open tenant")))
    figures = cache.snapshot_stats("open tenant")
    require_secret_free(f"{figures.exposition()} {said(figures.as_dict())}")


@pytest.mark.parametrize("namespace", [5, b"mine", pytest.param("lone \ud800", id="surrogate")])
def test_what_is_no_namespace_is_refused_by_every_call_and_changes_nothing(namespace: Any) -> None:
    cache = sized_cache(SizedLayout(1), budget_bytes=200)
    for seed in range(3):
        serve(cache, secret_prompt(seed)[:90], "mine")
    before = (cache.stats, cache.dump())
    calls: list[Any] = [
        lambda: cache.begin([1, 2], namespace=namespace),
        lambda: cache.begin_many([], capacity=8, namespace=namespace),
        lambda: cache.fetch([1, 2], namespace),
        lambda: cache.insert([1, 2], [], namespace),
        lambda: cache.explain([1, 2], namespace),
        lambda: cache.pin([1, 2], namespace),
        lambda: cache.unpin([1, 2], namespace),
        lambda: cache.unpin(namespace=namespace, name="a"),
        lambda: cache.warm(MODEL, [1, 2], namespace),
        lambda: cache.names(namespace),
        lambda: cache.clear_quarantine(namespace),
        lambda: cache.snapshot_stats(namespace),
        lambda: cache.dump(namespace=namespace),
        lambda: cache.render(namespace=namespace),
        lambda: cache.view(namespace=namespace),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^namespace is .*; wanted"):
            call()
    assert (cache.stats, cache.dump()) == before
    cache.check()


def test_one_namespace_has_names_and_not_all_of_them() -> None:
    cache = sized_cache(SizedLayout(1), budget_bytes=200)
    with pytest.raises(ValueError, match="namespace is a NoneType; wanted a str"):
        cache.names(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("exact", "no"), ("exact", 1), ("exact", None), ("merges", 0)])
def test_what_is_neither_on_nor_off_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}; wanted True or False"):
        sized_cache(SizedLayout(1), budget_bytes=200, **{option: value})
