"""The dispatcher: what it is told, what it is sent, what it decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.routing import (
    HALF_LIFE_S,
    ROUTERS,
    UNEVEN,
    Ask,
    Choice,
    Coefficients,
    Directory,
    Dispatcher,
    RoutingRates,
    View,
    chain_digests,
    make_router,
    root_digest,
    weighed_s,
)

#: A token takes a second to prefill, and nothing to decode.
PLAIN = Coefficients(prefill_s=1.0, decode_s=0.0, output_tokens=1.0)
REPLICAS = ("a", "b", "c")
ROOT = root_digest("model")
TOKENS = st.lists(st.integers(0, 3), max_size=24)


def dispatcher(name: str = "prefix", **more: int) -> Dispatcher:
    return Dispatcher(make_router(name), REPLICAS, rates=RoutingRates(PLAIN), block_tokens=10, **more)


def sent(to: Dispatcher, request: int, ask: Ask, now_s: float) -> Choice:
    choice = to.choose(ask, now_s)
    to.send(request, choice, now_s)
    return choice


def test_a_second_request_with_the_same_prefix_goes_where_the_first_one_went() -> None:
    tested = dispatcher()
    first = sent(tested, 1, Ask([1, 2, 3], 35), 0.0)
    tested.end(1, 35.0)
    second = sent(tested, 2, Ask([1, 2, 3, 4], 45), 36.0)
    assert (second.replica, second.matched_tokens, second.work_s) == (first.replica, 30, 15.0)


def test_a_full_directory_forgets_the_end_of_a_prefix_first() -> None:
    directory = Directory(max_digests=2)
    directory.add("a", [1, 2, 3])
    assert directory.matched_blocks("a", [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("a", "b", "goes_to"),
    [
        # A prefix is left once waiting for it takes three times its prefill.
        (View("a", 29.0, 30, 50.0), View("b", 0.0, 20, 50.0), "a"),
        (View("a", 31.0, 30, 50.0), View("b", 0.0, 20, 50.0), "b"),
        # A replica that had more work than others is left only where work waits.
        (View("a", 1.0, 40, 190.0), View("b", 0.0, 20, 100.0), "b"),
        (View("a", 1.0, 40, 110.0), View("b", 0.0, 20, 100.0), "a"),
        (View("a", 0.0, 40, 900.0), View("b", 0.0, 20, 100.0), "a"),
        # A prefix that nobody has goes to the replica with the least recent work.
        (View("a", 0.0, 0, 3.0), View("b", 0.0, 0, 2.0), "b"),
    ],
)
def test_the_prefix_router_weighs_waiting_prefill_and_recent_work(a: View, b: View, goes_to: str) -> None:
    assert make_router("prefix")(Ask([1, 2, 3, 4], 40), (a, b), PLAIN).replica == goes_to


def test_work_counts_for_less_as_time_goes_by_and_for_what_it_turned_out_to_be() -> None:
    tested = dispatcher()
    tested.send(1, tested.choose(Ask([], 10), 0.0, ["a"]), 0.0)
    tested.send(2, tested.choose(Ask([], 10), 0.0, ["b"]), 0.0)
    tested.end(1, 10.0)
    tested.end(2, 10.0, work_s=30.0)
    recent_s = {view.replica: view.recent_s for view in tested.views(Ask([], 1), 10.0 + HALF_LIFE_S)}
    assert recent_s == pytest.approx({"a": 5.0, "b": 15.0, "c": 0.0}, rel=2e-3)


def test_a_replica_that_joins_is_taken_to_have_had_as_much_work_as_the_others() -> None:
    tested = dispatcher()
    for request, replica in enumerate(REPLICAS):
        tested.send(request, tested.choose(Ask([], 10 + 10 * request), 0.0, [replica]), 0.0)
    tested.join("d")
    recent_s = {view.replica: view.recent_s for view in tested.views(Ask([], 1), 0.0)}
    assert recent_s == {"a": 10.0, "b": 20.0, "c": 30.0, "d": 20.0}


def test_a_stale_digest_costs_a_miss_until_it_is_told_as_removed() -> None:
    tested = dispatcher()
    tested.tell("b", added=[1, 2, 3])
    assert tested.choose(Ask([1, 2, 3], 30), 0.0).matched_tokens == 30
    tested.tell("b", removed=[2])
    assert tested.choose(Ask([1, 2, 3], 30), 0.0)[:3:2] == ("b", 10)


def test_a_forgotten_replica_is_not_chosen_and_comes_back_empty() -> None:
    tested = dispatcher()
    tested.tell("c", added=[1])
    assert sent(tested, 1, Ask([1], 10), 0.0).replica == "c"
    tested.forget("c")
    assert tested.replicas == ["a", "b"]
    tested.end(1, 1.0)  # its request ends with an error, later
    tested.join("c")
    (view,) = tested.views(Ask([1], 10), 2.0, ["c"])
    assert view[:3] == ("c", 0.0, 0)


def test_what_the_first_open_request_has_had_by_now_is_not_waited_for() -> None:
    tested = dispatcher()
    tested.send(1, tested.choose(Ask([], 10), 0.0, ["a"]), 0.0)
    tested.send(2, tested.choose(Ask([], 10), 4.0, ["a"]), 4.0)
    waiting_s = [tested.views(Ask([], 1), now_s, ["a"])[0].waiting_s for now_s in (4.0, 7.0, 10.0, 99.0)]
    assert waiting_s == [16.0, 13.0, 10.0, 10.0]
    tested.end(1, 99.0)
    assert tested.views(Ask([], 1), 100.0, ["a"])[0].waiting_s == 9.0


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_among_those_that_can_take_it(name: str) -> None:
    tested = dispatcher(name)
    chosen = {tested.choose(Ask([index], 10), 0.0, ["b", "new"]).replica for index in range(50)}
    assert chosen <= {"b", "new"}
    with pytest.raises(ValueError, match="no replica to choose"):
        tested.choose(Ask([], 1), 0.0, [])


@pytest.mark.parametrize("name", ROUTERS)
def test_requests_without_anything_in_common_come_to_all_replicas(name: str) -> None:
    tested, again = dispatcher(name), dispatcher(name)
    went, went_again = (
        [sent(each, index, Ask([index], 10), 100.0 * index).replica for index in range(60)] for each in (tested, again)
    )
    assert set(went) == set(REPLICAS)
    assert went == went_again


def test_hash_moves_only_requests_of_a_forgotten_replica_and_keeps_a_session_together() -> None:
    tested = dispatcher("hash")
    assert len({tested.choose(Ask([index], 10, "ann"), 0.0).replica for index in range(20)}) == 1
    before = [tested.choose(Ask([index], 10), 0.0).replica for index in range(60)]
    tested.forget("b")
    after = [tested.choose(Ask([index], 10), 0.0).replica for index in range(60)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "b")


def test_an_unknown_router_and_a_block_of_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match=r"router 'best' is not known\. Known: random, round-robin, hash, prefix"):
        make_router("best")
    with pytest.raises(ValueError, match="block_tokens is 0; wanted at least 1"):
        chain_digests(np.arange(4), ROOT, 0)


def test_rates_forget_what_was_measured_long_ago() -> None:
    rates = RoutingRates()
    rates.prefilled(1_000, 1.0)
    assert rates.now.prefill_s == 1e-3
    for _ in range(400):
        rates.prefilled(1_000, 4.0)
        rates.decoded(10, 0.5)
    assert rates.now.prefill_s == pytest.approx(4e-3, rel=1e-3)
    assert rates.now[1:] == pytest.approx((0.05, 10.0))
    assert rates.now.work_s(100) == pytest.approx(0.4 + 0.5, rel=1e-3)


@settings(max_examples=40)
@given(TOKENS, TOKENS)
def test_digests_are_equal_exactly_as_far_as_whole_blocks_are(left: list[int], right: list[int]) -> None:
    ours, theirs = (chain_digests(np.array(tokens, np.int64), ROOT, 4) for tokens in (left, right))
    assert [len(ours), len(theirs)] == [len(left) // 4, len(right) // 4]
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (one == other) == (left[:end] == right[:end])


@settings(max_examples=25)
@given(TOKENS, st.integers(0, 6))
def test_a_chain_goes_on_from_any_border(tokens: list[int], border: int) -> None:
    whole = np.array(tokens, np.int64)
    first = chain_digests(whole[: 4 * border], ROOT, 4)
    rest = chain_digests(whole[4 * border :], first[-1] if first else ROOT, 4)
    assert first + rest == chain_digests(whole, ROOT, 4)


@pytest.mark.parametrize(
    "other",
    [root_digest("another"), root_digest("model", "ann"), root_digest("model", "", b"secret")],
    ids=["model", "namespace", "secret"],
)
def test_models_namespaces_and_secrets_share_no_digest(other: int) -> None:
    tokens = np.zeros(2_560, np.int64)
    assert not set(chain_digests(tokens, ROOT)) & set(chain_digests(tokens, other))


def test_a_digest_has_64_bits_and_stays_what_it_is() -> None:
    assert all(0 <= digest < 1 << 64 for digest in chain_digests(np.arange(10_000), ROOT))
    for dtype in (np.int32, np.int64):
        assert chain_digests(np.arange(512, dtype=dtype), ROOT) == [107264700168270322, 12236871523018486876]


class Walk(RuleBasedStateMachine):
    """Random prompts of a small tree through a dispatcher, beside plain sets of what each replica was said to have."""

    def __init__(self) -> None:
        super().__init__()
        self.tested = dispatcher(max_digests=12)
        self.plain: dict[str, set[int]] = {replica: set() for replica in REPLICAS}
        self.open: list[int] = []
        self.now_s = 0.0
        self.requests = 0

    @rule(path=st.lists(st.integers(1, 2), max_size=5), rest=st.integers(1, 9), after_s=st.floats(0, 50))
    def ask(self, path: list[int], rest: int, after_s: float) -> None:
        self.now_s += after_s
        digests = [int("".join(map(str, path[: end + 1]))) for end in range(len(path))]
        ask = Ask(digests, 10 * len(digests) + rest)
        views = self.tested.views(ask, self.now_s)
        choice = self.tested.choose(ask, self.now_s)
        even_s = UNEVEN * sum(view.recent_s for view in views) / 3
        weighed = {view.replica: weighed_s(ask, view, PLAIN, even_s) for view in views}
        assert weighed[choice.replica] == min(weighed.values())
        for view in views:
            matched = view.matched_tokens // 10
            assert set(digests[:matched]) <= self.plain[view.replica]
        self.tested.send(self.requests, choice, self.now_s)
        self.plain[choice.replica] |= set(digests)
        self.open.append(self.requests)
        self.requests += 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.tested.end(self.open.pop(which % len(self.open)), self.now_s)

    @rule(replica=st.sampled_from(REPLICAS), removed=st.sets(st.sampled_from([1, 2, 11, 12, 121, 212])))
    def tell(self, replica: str, removed: set[int]) -> None:
        self.tested.tell(replica, removed=removed)
        self.plain[replica] -= removed

    @rule(replica=st.sampled_from(REPLICAS))
    def die(self, replica: str) -> None:
        self.tested.forget(replica)
        self.tested.join(replica)
        self.plain[replica].clear()

    @invariant()
    def holds(self) -> None:
        self.tested.check()
        for view in self.tested.views(Ask([], 1), self.now_s):
            assert view.waiting_s >= 0.0
            assert self.tested.directory.count(view.replica) <= 12
        if not self.open:
            assert all(view.waiting_s == 0.0 for view in self.tested.views(Ask([], 1), self.now_s))


Walk.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestWalk = Walk.TestCase
