"""Replaying conversations through every cache gives the same answers, and each cache restores what it promises."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.server import ResponseGenerator

from radixcache import core
from radixcache.speculate.drafting import Drafting
from radixcache.speculate.pace import DraftPace
from runner.engine.generation import generate
from runner.models.load import load_model
from runner.replay import CACHE_NAMES, ReplayOptions, caches
from runner.replay.caches import layers_bytes, open_cache
from runner.replay.replayer import AnswerDifference, Replay
from runner.replay.report import TIE, Report
from runner.script.conversation import Conversation
from runner.script.conversation_reader import builtin_conversations
from runner.script.schedule import schedule
from runner.script.script import Prompt, Script, ScriptError
from tests.replay.conftest import Silence

BUDGET_BYTES = 64 << 20
SYSTEM = "You answer in one word. " * 4


def conversation(name, user, *texts, **more):
    """A conversation whose messages after the system prompt alternate between user and assistant."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return Conversation(name, user, tuple(messages), **more)


CONVERSATIONS = [
    conversation("a", "ann", "Which river runs through Rome?", "Tiber.", "And through Paris?", "Seine.", "And Cairo?"),
    conversation("b", "bob", "Name a noble gas.", "Argon.", "Another one.", "Neon.", "A heavier one, please."),
    # Ann edits her second question.
    conversation("a2", "ann", "Which river runs through Rome?", "Tiber.", "And through Vienna?", asked_messages=3),
]


def options(**more):
    return ReplayOptions(**{"budget_bytes": BUDGET_BYTES, "max_tokens": 4, "step_size": 64, **more})


def run(model, caches, *, conversations=CONVERSATIONS, seed=1, **more):
    """Replay conversations; returns the runs by cache."""
    chosen, loaded = options(**more), load_model(model)
    script = Script(loaded, schedule(conversations, seed=seed), max_tokens=chosen.max_tokens, recorded=chosen.recorded)
    return {each.cache: each for each in Replay(loaded, script, caches, chosen, Silence()).run()}


def opened(cache, kind="llama"):
    loaded = load_model(f"tiny:{kind}")
    return loaded, open_cache(cache, loaded, options())


def prompt_of(tokens, system_end=0):
    array = np.asarray(tokens, np.int32)
    return Prompt(array, (system_end,) if system_end else (), system_end, ends_with_user=True, reply_tokens=4)


def serve(cache, loaded, prompt, max_tokens=4):
    """Answer one prompt; returns (cached tokens, reason, tokens of the reply)."""
    with cache.begin(prompt) as session:
        pieces = list(generate(session, loaded.model, loaded.tokenizer, max_tokens=max_tokens, stop_tokens=()))
        return session.cached_tokens, session.reason, pieces[-1].completion.tokens


def test_the_short_replay_shows_the_limit_of_each_cache():
    more = {"conversations": builtin_conversations("builtin_short.jsonl"), "seed": 0, "max_tokens": 1}
    needed_bytes = max(row.peak_bytes for row in run("tiny", ["radix"], **more)["radix"].rows)
    runs = run("tiny", CACHE_NAMES, budget_bytes=needed_bytes, **more)
    shares = {each.cache: each.cached_share for each in Report([*runs.values()]).summaries}
    assert shares["none"] == 0
    assert 0.2 < shares["single"] < 0.9 * shares["mlx-lm"]
    assert shares["mlx-lm"] < 0.9 * shares["radix"]
    assert {cache: each.evictions > 0 for cache, each in runs.items()} == {
        **{"none": False, "single": False, "radix": False, "mlx-lm": True}
    }


@pytest.mark.parametrize(
    ("kind", "recorded"),
    [
        ("llama", False),
        ("llama_sliding", True),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("llama4", "jamba")),
    ],
)
def test_every_cache_gives_the_answers_of_no_cache(kind, recorded):
    # A chunked cache calls itself trimmable when its front is gone, and mlx-lm believes it: its answers differ there.
    caches = [cache for cache in CACHE_NAMES if (kind, cache) != ("llama4", "mlx-lm")]
    runs = run(f"tiny:{kind}", caches, recorded=recorded)
    expected = [row.output_hash for row in runs["none"].rows]
    assert len(expected) == 7
    for cache in caches:
        assert [row.output_hash for row in runs[cache].rows] == expected, cache
        assert [row.prompt_tokens for row in runs[cache].rows] == [row.prompt_tokens for row in runs["none"].rows]
    for index, row in enumerate(runs["radix"].rows):
        if kind == "llama":  # recurrent layers resume at checkpoints only
            assert row.cached_tokens >= max(runs[cache].rows[index].cached_tokens for cache in caches)
        assert row.cached_tokens == row.matched_tokens or row.reason


def test_with_fewer_bits_at_rest_as_many_tokens_are_cached_in_fewer_bytes():
    loaded, held = load_model("tiny:llama"), {}
    for bits in (None, 8):
        chosen = options(stored_bits=bits)
        script = Script(loaded, schedule(CONVERSATIONS, seed=1), max_tokens=chosen.max_tokens)
        replayed = Replay(loaded, script, ["none", "radix"], chosen, Silence())
        radix = replayed.run()[-1]
        held[bits] = [row.cached_tokens for row in radix.rows], max(row.paged_bytes for row in radix.rows)
        partings = replayed.differences()
        assert {each.cache for each in partings} <= {"radix"}
        assert Report(replayed.result(), partings=partings, stored_bits=bits).differences() == []
    assert held[8][0] == held[None][0]
    assert held[8][1] < 0.6 * held[None][1]


@pytest.mark.parametrize("cache", CACHE_NAMES)
def test_bytes_that_a_cache_claims_are_the_bytes_that_mlx_allocated(cache):
    conversations = [conversation(user, user, "x" * 400, "Yes.", "Why?") for user in ("ann", "bob")]
    rows = run("tiny:llama", [cache], conversations=conversations)[cache].rows
    for row in rows:
        # The allocator reuses buffers that are up to two pages too large.
        assert row.peak_bytes == pytest.approx(row.allocated_bytes, rel=0.02)
    held = rows[-1].live_bytes + rows[-1].paged_bytes
    assert (held > 0) == (cache != "none")


def test_the_observer_hears_of_every_run_and_every_prompt_token():
    loaded = load_model("tiny:llama")
    script = Script(loaded, schedule(CONVERSATIONS, seed=1), max_tokens=4)
    observer = Silence()
    none, caches = Replay(loaded, script, ["none", "single"], options(), observer).run()
    assert observer.runs == [("none", 7), ("single", 7)]
    rounds = [[("none", one.prompt_tokens), ("single", one.prompt_tokens)] for one in none.rows]
    # Who begins rotates.
    assert observer.done == [each for index, pair in enumerate(rounds) for each in (pair, pair[::-1])[index % 2]]
    assert [(cache, done) for cache, done, total in observer.advances if done == total] == observer.done
    assert [row.prompt_tokens for row in caches.rows] == [row.prompt_tokens for row in none.rows]


def test_a_replay_that_is_broken_off_keeps_the_rounds_that_ended():
    class Impatient(Silence):
        def request_done(self, cache, row):
            super().request_done(cache, row)
            if len(self.done) == 5:
                raise KeyboardInterrupt

    loaded = load_model("tiny:llama")
    before = mx.get_active_memory()
    script = Script(loaded, schedule(CONVERSATIONS, seed=1), max_tokens=4)
    broken = Replay(loaded, script, ["none", "radix"], options(keep_view=True), Impatient())
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    none, radix = broken.result()
    assert len(none.rows) == len(radix.rows) == 2
    assert [row.output_hash for row in none.rows] == [row.output_hash for row in radix.rows]
    assert radix.view.nodes[0].text.startswith("<|im_start|>system\nYou answ")
    assert mx.get_active_memory() == before
    assert Replay(loaded, script, ["none"], options(), Silence()).result() == []


def test_single_continues_its_own_conversation_and_keeps_only_the_common_prefix_of_another():
    loaded, cache = opened("single")
    first = list(range(20, 120))
    assert serve(cache, loaded, prompt_of(first))[0] == 0
    # The last of 4 reply tokens is predicted but not evaluated: 100 prompt tokens and 3 of the reply are held.
    assert serve(cache, loaded, prompt_of([*first, 7, 7]))[0] == 100
    assert serve(cache, loaded, prompt_of([*first[:40], 9, 9, 9]))[0] == 40
    assert serve(cache, loaded, prompt_of([*first[:40], 9, 9, 9]))[0] == 42
    # A run that fails leaves caches that nobody knows.
    with pytest.raises(KeyboardInterrupt), cache.begin(prompt_of(first)):
        raise KeyboardInterrupt
    assert cache.live_bytes == 0
    assert serve(cache, loaded, prompt_of(first))[0] == 0


@pytest.mark.parametrize("kind", ["mamba2", "llama_sliding"])
def test_single_frees_what_it_cannot_trim_and_says_so(kind):
    loaded, cache = opened("single", kind)
    first = list(range(20, 120))
    *_, reply = serve(cache, loaded, prompt_of(first))
    # Going on with the very tokens it holds needs no trimming.
    longer = [*first, *reply[:3], 7, 7]
    cached_tokens, reason, _ = serve(cache, loaded, prompt_of(longer))
    assert (cached_tokens, reason) == (103, None)
    cached_tokens, reason, _ = serve(cache, loaded, prompt_of([*first[:40], 9]))
    assert (cached_tokens, reason) == (0, "a layer cannot be trimmed back to the common prefix")


def test_a_window_that_has_not_wrapped_is_trimmed():
    loaded, cache = opened("single", "llama_sliding")
    serve(cache, loaded, prompt_of([20, 21, 22, 23, 24]), max_tokens=2)
    assert serve(cache, loaded, prompt_of([20, 21, 22, 9]), max_tokens=2)[0] == 3


def test_mlx_lm_stores_the_system_prompt_the_user_turn_and_the_reply_of_a_model_that_cannot_trim():
    loaded, cache = opened("mlx-lm", "mamba2")
    system = list(range(20, 60))
    *_, reply = serve(cache, loaded, prompt_of([*system, 1, 2, 3], system_end=40))
    counts = {kind: stats["n_sequences"] for kind, stats in cache._stored.stats_by_type().items()}
    assert counts == {"system": 1, "user": 1, "assistant": 1}
    # Another user resumes at the system prompt, a repetition at the user turn, the next turn after the reply.
    assert serve(cache, loaded, prompt_of([*system, 9, 9, 9], system_end=40))[0] == 40
    assert serve(cache, loaded, prompt_of([*system, 1, 2, 3], system_end=40))[0] == 42
    assert serve(cache, loaded, prompt_of([*system, 1, 2, 3, *reply[:3], 8, 8], system_end=40))[0] == 46


@pytest.mark.parametrize(
    ("texts", "system"), [(("Hello?",), SYSTEM), (("Hello?", "Yes.", "Who is there?"), SYSTEM), (("",), None)]
)
def test_mlx_lm_stores_where_its_own_server_cuts_the_prompt(texts, system):
    loaded = load_model("tiny:mamba2")
    messages = conversation("a", "ann", *texts).messages[0 if system else 1 :]
    script = Script(loaded, schedule([Conversation("a", "ann", messages)], max_requests=1), max_tokens=4)
    server = object.__new__(ResponseGenerator)
    server.model_provider = SimpleNamespace(processor=None, cli_args=SimpleNamespace(chat_template_args={}))
    asked = script[0].prompt
    count = len(messages) if len(texts) == 1 else len(messages) - 2
    asked_messages = [dict(message) for message in messages[:count]]
    request = SimpleNamespace(request_type="chat", messages=asked_messages, tools=None, role_mapping=None)
    arguments = SimpleNamespace(chat_template_kwargs=None)
    tokens, segments, kinds, *_ = server._tokenize(loaded.tokenizer, request, arguments)
    assert tokens == asked.tokens.tolist()
    ends = np.cumsum([len(segment) for segment in segments]).tolist()
    # Its generator keeps the last token of the last segment for the first step.
    ends[-1] -= 1
    cache = open_cache("mlx-lm", loaded, options())
    assert list(cache.segments(asked)) == list(zip(ends, kinds, strict=True))


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_mlx_lm_evaluates_the_last_token_of_a_prompt_that_is_stored_whole(kind):
    loaded, cache = opened("mlx-lm", kind)
    prompt = list(range(20, 60))
    *_, reply = serve(cache, loaded, prompt_of(prompt))
    # What trims has one entry per conversation.
    assert len(cache._stored) == (1 if kind == "llama" else 2)
    cached_tokens, _, again = serve(cache, loaded, prompt_of([*prompt, *reply[:3]]))
    # What trims goes back by one; what does not goes back to the entry before.
    assert cached_tokens == (42 if kind == "llama" else 39)
    assert again[0] == reply[3]


def test_mlx_lm_stays_within_the_budget_with_the_live_cache_and_counts_what_that_costs():
    loaded, cache = opened("mlx-lm")
    serve(cache, loaded, prompt_of(range(20, 120)))
    one_bytes = cache.paged_bytes
    cache._budget_bytes = int(2.5 * one_bytes)
    for start in range(4):
        serve(cache, loaded, prompt_of([start, *range(21, 120)]))
        assert cache.paged_bytes <= 2.5 * one_bytes
    assert (len(cache._stored), cache.evictions) == (2, 3)
    cache._budget_bytes = int(1.5 * one_bytes)
    # The hit's copy and the entries that it came from do not fit together.
    with cache.begin(prompt_of([3, *range(21, 120), 5])) as session:
        assert session.cached_tokens == 100
        assert layers_bytes(session.caches) == cache.live_bytes
        # What is stored holds no spare capacity.
        assert {caches.stored_copy(cache).keys.shape[2] for cache in session.caches} == {100}
        assert (cache.paged_bytes, cache.evictions) == (0, 5)


def test_a_recorded_reply_is_part_of_what_the_next_turn_resumes():
    conversations = [conversation("a", "ann", "Which river runs through Rome?", "Tiber, of course.", "And Paris?")]
    generated = run("tiny:llama", ["single"], conversations=conversations)["single"].rows
    recorded = run("tiny:llama", ["single"], conversations=conversations, recorded=True)["single"].rows
    assert [row.output_tokens for row in recorded] == [1, 1]
    reply_tokens = len("Tiber, of course.")
    assert recorded[1].cached_tokens >= recorded[0].prompt_tokens + reply_tokens
    assert generated[1].cached_tokens < generated[0].prompt_tokens + reply_tokens


def test_replies_that_were_never_recorded_are_generated_once_and_the_same_for_every_cache():
    messages = tuple({"role": "user", "content": text} for text in ("Name a colour.", "Another.", "And another."))
    conversations = [Conversation("q", "ann", messages, replies_recorded=False)]
    loaded = load_model("tiny:llama")
    script = Script(loaded, schedule(conversations), max_tokens=4)
    runs = Replay(loaded, script, ["single", "none"], options(), Silence()).run()
    assert [row.prompt_tokens for row in runs[0].rows] == [row.prompt_tokens for row in runs[1].rows]
    assert [row.output_hash for row in runs[0].rows] == [row.output_hash for row in runs[1].rows]
    text = loaded.tokenizer.decode(script[1].prompt.tokens.tolist())
    assert text.index("Name a colour.") < text.index("assistant") < text.index("Another.")
    with pytest.raises(ScriptError, match="earlier replies were not recorded"):
        Script(loaded, schedule(conversations), max_tokens=4, recorded=True)


def test_the_system_prompt_is_found_if_the_record_asks_for_the_opening_of_a_reply():
    loaded, plain = load_model("tiny:llama"), conversation("a", "ann", "Hello?")
    asking = replace(plain, arguments={"add_generation_prompt": True})
    found, expected = (Script(loaded, schedule([each]), max_tokens=4)[0].prompt for each in (asking, plain))
    assert found.system_end == expected.system_end > 0
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_a_prompt_that_leaves_no_room_for_its_reply_is_refused():
    loaded, requests = load_model("tiny:llama"), schedule([conversation("a", "bob", "hello")])
    room_tokens = loaded.context_length - len(Script(loaded, requests, max_tokens=1)[0].prompt.tokens)
    assert len(Script(loaded, requests, max_tokens=room_tokens)) == 1
    with pytest.raises(ScriptError, match="for the reply do not fit the model's context"):
        Script(loaded, requests, max_tokens=room_tokens + 1)


def test_a_text_too_long_whatever_its_tokens_are_is_not_tokenized_first(monkeypatch):
    loaded = load_model("tiny:llama")
    longest = max(map(len, loaded.tokenizer.get_vocab()))
    over = conversation("long", "bob", "x" * (longest * (loaded.context_length + 1)))
    monkeypatch.setattr("runner.script.script.render_chat", lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(ScriptError, match=r"are at least 32,7\d\d tokens; the context of the model has 32,768"):
        Script(loaded, schedule([over]), max_tokens=4)


def test_an_exact_replay_resumes_on_the_grid_alone_and_says_so():
    caches = ["none", "radix"]
    free, exact = (run("tiny:llama", caches, step_size=32, exact=wanted) for wanted in (False, True))
    rows = exact["radix"].rows
    assert {row.cached_tokens % 32 for row in rows} == {0}
    assert 0 < sum(row.cached_tokens for row in rows) < sum(row.cached_tokens for row in free["radix"].rows)
    assert "off_grid" in {row.reason for row in rows}
    assert "off_grid" not in {row.reason for row in free["radix"].rows}
    assert [row.output_hash for row in rows] == [row.output_hash for row in exact["none"].rows]


# Several users at a time

# Replies that are not recorded: what a user asks next follows on what was generated.
UNRECORDED = [
    Conversation(
        name, name, tuple({"role": "user", "content": text} for text in ("Go on.", "Why?")), replies_recorded=False
    )
    for name in ("ann", "bob", "eve")
]


def together(kind, users, *caches, conversations=CONVERSATIONS, observer=None, max_tokens=4):
    """A finished replay; no reply may differ by more than rounding from the one without a cache."""
    loaded = load_model(f"tiny:{kind}")
    script = Script(loaded, schedule(conversations, seed=1), max_tokens=max_tokens)
    chosen = options(max_tokens=max_tokens)
    replayed = Replay(loaded, script, caches or ["radix"], chosen, observer or Silence(), users)
    replayed.run()
    assert not [each for each in replayed.differences() if each.gap >= TIE]
    return replayed


@pytest.fixture(scope="module")
def two_users():
    """A finished replay of two users at a time, by both caches, and who watched it."""
    observer = Silence()
    return together("llama", 2, "radix", "mlx-lm", observer=observer), observer


def test_several_users_are_given_the_replies_of_one_at_a_time_from_the_same_prompts(two_users):
    ours, theirs = two_users[0].result()
    expected = two_users[0].alone()[0]
    for name in ("user", "conversation_id", "turn", "prompt_tokens", "output_hash", "output_tokens", "done_reason"):
        wanted = [getattr(row, name) for row in expected.rows]
        assert [getattr(row, name) for row in ours.rows] == [getattr(row, name) for row in theirs.rows] == wanted, name
    cached = [sum(row.cached_tokens for row in run.rows) for run in (ours, theirs, expected)]
    # Ann and Bob share a system prompt, and each has the turns before.
    assert 0 < cached[1] <= cached[0]
    assert cached[0] >= 0.5 * cached[2]


@pytest.mark.slow
@pytest.mark.parametrize(("users", "kind"), [(1, "gemma3_text"), (3, "jamba")])
def test_rows_of_any_layers_give_the_replies_of_one_at_a_time(kind, users):
    replayed = together(kind, users, "radix", *(["mlx-lm"] if kind == "gemma3_text" else []))
    (found, *_), (expected, _) = replayed.result(), replayed.alone()
    assert [row.output_hash for row in found.rows] == [row.output_hash for row in expected.rows]
    assert found.users_at_a_time == min(users, 2)  # Ann and Bob


def test_the_observer_hears_of_every_request_and_peaks_are_within_bounds(two_users):
    replayed, observer = two_users
    found = replayed.result()[0]
    assert observer.runs == [("radix together", 7), ("mlx-lm together", 7), ("radix", 7), ("none", 7)]
    assert sorted(tokens for cache, tokens in observer.done if cache == "radix together") == sorted(
        row.prompt_tokens for row in found.rows
    )
    assert 0 < found.peak_tokens <= replayed._together[0].capacity
    assert all(0 < row.peak_bytes <= BUDGET_BYTES for row in found.rows)
    assert all(row.ttft_ms > row.waited_ms >= 0 for row in found.rows)
    assert found.wall_s * 1e3 >= max(row.ttft_ms for row in found.rows)


def test_an_answer_that_parts_is_said_by_how_near_the_two_tokens_were(two_users, monkeypatch):
    replayed, _ = two_users
    runs = replayed.result()
    replies = next(run.replies for run in replayed._together if run.server.name == "radix")
    first, second, third, *rest = replies[3]
    monkeypatch.setitem(replies, 3, [first, second, third + 1, *rest])
    (found,) = replayed.differences()
    assert (found.cache, found.index) == ("radix", 3)
    assert found.gap > TIE
    partings = [found, AnswerDifference("radix", 4, TIE / 2)]
    report = Report(runs, is_parallel=True, alone=replayed.alone(), partings=partings)
    assert [(cache, index) for cache, index, _ in report.differences()] == [("radix", 3)]
    assert "two tokens had equal logits: 1. Answers that differ from those without a cache: 1." in report.sentence()


def test_generated_replies_are_in_the_next_prompts_and_fit_whatever_they_are():
    # Random weights generate halves of characters, each of which comes back as the three bytes of a replacement.
    replayed = together("llama", 10**9, conversations=UNRECORDED, max_tokens=12)
    (found,), (expected, _) = replayed.result(), replayed.alone()
    assert (len(found.rows), found.users_at_a_time) == (6, 3)
    assert [row.output_hash for row in found.rows] == [row.output_hash for row in expected.rows]
    assert [row.prompt_tokens for row in found.rows] == [row.prompt_tokens for row in expected.rows]
    for first, second in pairwise(found.rows):
        if second.turn == 1 and first.user == second.user:
            assert second.prompt_tokens > first.prompt_tokens + 24
    capacity = replayed._together[0].capacity
    assert capacity % 3 == 0
    assert capacity >= 3 * max(row.prompt_tokens + 12 for row in found.rows)


def test_drafted_replies_are_those_without_drafts(monkeypatch):
    monkeypatch.setattr(core, "DraftPace", partial(DraftPace, lambda rows, width: 1 + width / 100))
    drafted = []
    advance = Drafting.advance
    monkeypatch.setattr(Drafting, "advance", lambda *of, **more: drafted.append(advance(*of, **more)))
    plain = run("tiny:llama", ["radix"], max_tokens=40)["radix"]
    assert not drafted
    for speculate in ("tree", "prompt"):
        found = run("tiny:llama", ["radix"], max_tokens=40, speculate=speculate)["radix"]
        assert [row.output_hash for row in found.rows] == [row.output_hash for row in plain.rows]
        assert len(drafted) < 40 * len(found.rows)
        drafted.clear()
