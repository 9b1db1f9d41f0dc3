"""Random walks over combinations: every row of logits that a session or a group gives is that of a cold run.

Texts begin like the first one and part from it before, at and behind the end of a window. All that is evaluated is a
beginning of a text, except for rejected drafts. So one cold run of each text gives all logits that are wanted: a pass
of mlx-lm without any cache of ours. `pair_table` makes walks in which any two values of `OPTIONS` meet.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import count
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from numpy.typing import NDArray

from radixcache import CacheBusyError, DiskStore, Group, Ledger, PrefixCache, Row, Session, SnapshotError
from radixcache.errors import ShiftError
from radixcache.layers.trials import GRID_STEPS, PICKED_TOLERANCE, STORED_TOLERANCES, TOLERANCES, has_experts
from runner.models.tiny import TINY_KINDS, VOCABULARY_LENGTH
from runner.models.tiny import WINDOW_LENGTH as W
from tests import inside
from tests.groups.cold import shared_model
from tests.memory import active_bytes, held_bytes
from tests.prompts import tokens
from tests.restarts import reading as reading
from tests.walks.pairs import Value, all_pairs, pair_table

T = TypeVar("T")

#: Kinds by the state of their layers. "quantized" has `kv_bits`.
KINDS = {
    "sliding": ["gpt_oss", "gemma4_text", "gemma3_text", "llama_sliding", "step3p5", "ministral3", "gemma3n", "llama4"],
    "full": ["llama", "gpt_bigcode", "qwen3", "deepseek_v3", "deepseek_v32"],
    "hybrid": ["qwen3_next", "falcon_h1", "jamba", "kimi_linear", "lfm2", "nemotron_h", "plamo2"],
    "recurrent": ["mamba2", "mamba", "rwkv7"],
    "mixed": ["recurrent_gemma", "baichuan_m1", "longcat_flash_ngram", "deepseek_v41"],
    "quantized": ["llama"],
}
ALONE = ("llama4", "deepseek_v41")  # groups refuse them
ONE_THREAD = "gemma3n"  # each pass replaces weights by arrays of its thread's stream, evaluated or not
NOT_ROUNDED = "deepseek_v32"  # rounding changes which keys are picked: docs/stored-bits.md
KV_BITS = 8
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layers": tuple(KINDS),
    "rows": (True, False),
    "budget": ("none", "tiny", "tighter"),
    "stored_bits": (None, 8, 4),
    "live_slots": (1, 2, 3),
    "store": (None, "close", "eviction"),
    "step_size": (2048, 5, 16),
    "policy": ("lru", "benefit"),
    "verify": (0.0, 1.0),
    "exact": (False, True),
    "checkpoint_interval": (2048, 13),
    "marks": (False, True),
    "namespaces": (("",), ("", "tenant")),
    "threads": (False, True),
    "pins": (False, True),
}
#: Groups are neither exact nor quantized. Rounding changes bits, and needs keys and values that are not rounded yet.
MISFITS = [
    *((("rows", True), each) for each in (("exact", True), ("layers", "quantized"))),
    *((("stored_bits", bits), ("exact", True)) for bits in (8, 4)),
    *((("stored_bits", bits), ("layers", layers)) for bits in (8, 4) for layers in ("recurrent", "quantized")),
]
#: The least and the largest budget, in parts of what a conversation of 60 tokens takes.
BUDGETS = {"none": (1e6, 1e6), "tiny": (1.0, 3.0), "tighter": (0.0, 1.0)}

TEXT_LENGTH = 100
BRANCHES = (0, 5, W - 1, W + 1, 2 * W - 2, 41, 64)  # where texts part from the first one
LENGTHS = (1, 2, 3, 7, W - 1, W, W + 1, W + 2, 24, 2 * W - 1, 2 * W, 2 * W + 1, 40, 3 * W, 3 * W + 1, 70)

TEXT, NUMBER, FLAG = st.integers(0, len(BRANCHES)), st.integers(0, 7), st.booleans()
LENGTH, DRAFTED = st.sampled_from(LENGTHS), st.sampled_from([0, 1, 2, 3, 6])
MOSTLY, RARELY = st.sampled_from([True, True, True, False]), st.sampled_from([False, False, False, True])
#: Tokens that the budget has room for during a call; None: the budget is that of the walk.
ROOM = st.sampled_from([None, None, 0, 1, 4, 16])
#: Which rows; mostly all of them.
MASK = st.sampled_from([31, 31, 31, 1, 2, 3, 5, 6, 30])


def fits(one: Value, other: Value) -> bool:
    """Whether two option values may be given together."""
    return (one, other) not in MISFITS and (other, one) not in MISFITS


TABLE = pair_table(OPTIONS, fits)


def wrong(token: int) -> int:
    return (token + 1) % VOCABULARY_LENGTH


@cache
def texts() -> list[list[int]]:
    first = tokens(1, TEXT_LENGTH)
    return [first, *([*first[:at], wrong(first[at]), *tokens(2 + at, TEXT_LENGTH - at - 1)] for at in BRANCHES)]


@cache
def cold(kind: str, text: int, kv_bits: int | None) -> NDArray[np.float32]:
    """Logits (T, V) of a text, in one pass over caches of mlx-lm's own."""
    model = shared_model(kind)
    plain = make_prompt_cache(model)
    caches = plain if kv_bits is None else [QuantizedKVCache(group_size=64, bits=kv_bits) for _ in plain]
    return np.array(model(mx.array(texts()[text])[None], cache=caches)[0].astype(mx.float32))


@cache
def conversation_bytes(kind: str) -> int:
    """What a conversation of 60 tokens takes. The model has its constants and its ways from here on."""
    model, prompt = shared_model(kind), texts()[0][:60]
    if kind not in ALONE:
        inside.try_ways(model)
    with PrefixCache(model) as opened, opened.begin(prompt, reserve=0) as session:
        session.prefill(model)
        mx.eval(session.step(model, prompt[-1:]))
        return held_bytes(opened.stats)


def one(values: Iterable[T], number: int) -> T:
    return [*values][number % len([*values])]


def some(values: Sequence[T], mask: int) -> list[T]:
    """Some of the values, one at least if there are any."""
    return [value for at, value in enumerate(values) if mask >> at & 1] or [*values[:1]]


#: By name: how often an action is drawn, when it is possible, and its arguments.
ACTIONS: dict[str, tuple[int, Callable[[Any], object], st.SearchStrategy[dict[str, Any]]]] = {}


def action(weight: int, when: Callable[[Any], object] = lambda _: True, **arguments: Any) -> Any:
    """A rule with a weight. Of rules, Hypothesis leaves out many in each walk, and with them most combinations."""

    def add(call: Callable[..., None]) -> Callable[..., None]:
        ACTIONS[call.__name__] = weight, when, st.fixed_dictionaries(arguments)
        return call

    return add


def has_sessions(walk: Combinations) -> bool:
    return bool(walk.sessions)


def has_rows(walk: Combinations) -> bool:
    return bool(walk.rows())


class Combinations(RuleBasedStateMachine):
    """A cache with sessions, at most one group, and a store perhaps; all by the options of one walk."""

    kind: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    @initialize(share=st.integers(0, 16), segment_bytes=st.sampled_from([0, None, 1 << 30]))
    def make(self, share: int, segment_bytes: int | None) -> None:
        options, self.model, self.segment_bytes = self.options, shared_model(self.kind), segment_bytes
        self.kv_bits = KV_BITS if options["layers"] == "quantized" else None
        for text in range(len(texts())):
            cold(self.kind, text, self.kv_bits)
        bits, (least, most) = options["stored_bits"], BUDGETS[options["budget"]]
        self.budget_bytes = max(1, int((least + (most - least) * share / 16) * conversation_bytes(self.kind)))
        self.tolerance = TOLERANCES[mx.float32] + STORED_TOLERANCES.get(bits or 0, 0.0)
        self.tolerance += PICKED_TOLERANCE if bits and has_experts(self.model) else 0.0
        self.tolerance += GRID_STEPS * 2 / (2**KV_BITS - 1) if self.kv_bits else 0.0
        #: The open sessions, and whether each runs in the other thread.
        self.sessions: dict[Session, bool] = {}
        self.group: Group | None = None
        self.text: dict[Session | Row, int] = {}
        self.closing = ExitStack()
        self.folder = self.closing.enter_context(tempfile.TemporaryDirectory())
        self.thread = self.closing.enter_context(ThreadPoolExecutor(1))
        self.other_bytes = active_bytes()
        self.open()

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        possible = [name for name, (weight, when, _) in ACTIONS.items() if when(self) for _ in range(weight)]
        name = data.draw(st.sampled_from(possible), "action")
        getattr(self, name)(**data.draw(ACTIONS[name][2], name))

    def open(self) -> None:
        options, self.pins, self.store = self.options, list[tuple[list[int], str]](), None
        if write_on := options["store"]:
            self.store = DiskStore(self.folder, budget_bytes=1 << 30, write_on=write_on, min_free_bytes=0)
        names = ("stored_bits", "live_slots", "step_size", "policy", "verify", "exact", "checkpoint_interval")
        more = {name: options[name] for name in names} | {"kv_bits": self.kv_bits, "store": self.store}
        self.ledger = Ledger(self.budget_bytes)
        self.cache = PrefixCache(self.model, budget_bytes=self.ledger, **more)

    def prompt(self, text: int, length: int, number: int) -> dict[str, Any]:
        """A prompt, with arguments that begin() and admit() take."""
        marks = [min(length, LENGTHS[number])] if self.options["marks"] else []
        return {"tokens": texts()[text][:length], "namespace": one(self.options["namespaces"], number), "marks": marks}

    def following(self, each: Session | Row, number: int) -> list[int]:
        """The text of a session or row; behind its prompt it may go over to another one with the same beginning."""
        known, same = each.known_tokens, texts()[self.text[each]]
        self.text[each] = one([at for at, text in enumerate(texts()) if text[:known] == same[:known]], number)
        return texts()[self.text[each]]

    def agree(self, logits: mx.array, text: int, start: int) -> None:
        """Logits (T, V) of the tokens of a text from `start` on are those of the cold run."""
        found = np.array(logits.astype(mx.float32))
        wanted = cold(self.kind, text, self.kv_bits)[start : start + len(found)]
        errors = np.abs(found - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)
        assert (errors < self.tolerance).all(), (self.kind, start, errors.tolist())

    @contextmanager
    def pressed(self, room: int | None) -> Iterator[None]:
        """The budget has room for so many tokens beyond what is held; None: for as many as the walk's options say."""
        if room is not None and self.options["budget"] != "none":
            few_bytes = room * conversation_bytes(self.kind) // 60
            self.ledger.budget_bytes = min(held_bytes(self.cache.stats) + few_bytes, self.budget_bytes)
        yield
        self.ledger.budget_bytes = self.budget_bytes

    def run(self, session: Session, call: Callable[[], object]) -> None:
        """Call something in the session's thread."""
        if self.sessions[session]:
            self.thread.submit(call).result()
        else:
            call()

    # Sessions

    @action(2, text=TEXT, length=LENGTH, number=NUMBER, is_foreign=FLAG, prefills=MOSTLY, reserve=FLAG, room=ROOM)
    def begin(
        self, text: int, length: int, number: int, is_foreign: bool, prefills: bool, reserve: bool, room: int | None
    ) -> None:
        begin = partial(self.cache.begin, **self.prompt(text, length, number), reserve=256 * reserve)
        is_foreign = is_foreign and self.options["threads"] and self.kind != ONE_THREAD
        try:
            with self.pressed(room):
                session = self.thread.submit(begin).result() if is_foreign else begin()
        except CacheBusyError:
            assert len(self.sessions) == self.options["live_slots"]
            return
        self.sessions[session], self.text[session] = is_foreign, text
        if prefills:
            self.run(session, partial(session.prefill, self.model))

    @action(1, has_sessions, number=NUMBER, step_size=st.sampled_from([None, 3, W + 1]))
    def prefill(self, number: int, step_size: int | None) -> None:
        session = one(self.sessions, number)
        self.run(session, partial(session.prefill, self.model, None if self.options["exact"] else step_size))

    @action(
        3, has_sessions, number=NUMBER, total=st.sampled_from([1, 1, 2, 3, W - 1, W + 1]), drafted=DRAFTED, bad=DRAFTED
    )
    def step(self, number: int, total: int, drafted: int, bad: int) -> None:
        """A step; the last tokens may be drafts, of which the last ones are wrong and taken back."""
        session = one(self.sessions, number)
        text, start = self.following(session, number), session.position
        drafted = drafted if start >= len(session.prompt) - 1 else 0
        fed = text[start : start + (1 + drafted if drafted else total)]
        bad = max(0, min(drafted, bad, len(fed) - 1))

        def step() -> None:
            right = fed[: len(fed) - bad]
            given = [*right, *map(wrong, fed[len(right) :])]
            logits = session.step(self.model, given, drafted=len(fed) - 1 if drafted else 0)
            self.agree(logits[0, : len(right)], self.text[session], start)
            if drafted and right[1:]:
                session.extend(right[1:])
            if bad:
                session.rewind(session.known_tokens)

        if fed:
            self.run(session, step)

    @action(2, has_sessions, number=NUMBER, back=st.integers(0, 60), is_least=RARELY, room=ROOM)
    def rewind(self, number: int, back: int, is_least: bool, room: int | None) -> None:
        session = one(self.sessions, number)
        before, offset = session.position, max(0, session.position - back)

        def rewind() -> None:
            try:
                reached = session.rewind(offset, least=offset if is_least else 0)
                assert session.position == reached <= offset
            except SnapshotError:
                assert is_least
                assert session.position == before

        with self.pressed(room):
            self.run(session, rewind)

    @action(1, has_sessions, number=NUMBER, is_left=RARELY)
    def end(self, number: int, is_left: bool) -> None:
        """Close a session, or let it go."""
        session = one(self.sessions, number)
        if not is_left:
            self.run(session, session.close)
        del self.sessions[session], self.text[session]

    # Groups

    def rows(self) -> list[Row]:
        return [] if self.group is None else self.group.rows

    @action(
        2,
        lambda walk: walk.options["rows"] and walk.kind not in ALONE,
        prompts=st.lists(st.tuples(TEXT, LENGTH), min_size=1, max_size=3),
        number=NUMBER,
        prefills=MOSTLY,
    )
    def admit(self, prompts: list[tuple[int, int]], number: int, prefills: bool) -> None:
        if self.group is None:
            self.group = self.cache.begin_many(capacity=1000, segment_bytes=self.segment_bytes)
        for text, length in prompts[: 5 - len(self.group.rows)]:
            self.text[self.group.admit(**self.prompt(text, length, number))] = text
        if prefills:
            self.prefill_many(mask=31, chunk=None, leaves_last=False)

    @action(1, has_rows, mask=MASK, chunk=st.sampled_from([None, 1, 5, W, W + 1]), leaves_last=FLAG)
    def prefill_many(self, mask: int, chunk: int | None, leaves_last: bool) -> None:
        assert self.group is not None
        rows = some([row for row in self.rows() if row.prompt_left], mask)
        for row, logits in self.group.prefill_many(self.model, rows, chunk, leaves_last=leaves_last) if rows else ():
            self.agree(logits[0], self.text[row], len(row.prompt) - 1)

    @action(4, has_rows, mask=MASK, number=NUMBER, steps=st.integers(1, 3))
    def step_rows(self, mask: int, number: int, steps: int) -> None:
        assert self.group is not None
        for _ in range(steps):
            rows = [row for row in some(self.rows(), mask) if row.known_tokens < TEXT_LENGTH]
            starts = [row.position if row.prompt_left else row.known_tokens for row in rows]
            fed = [self.following(row, number)[start] for row, start in zip(rows, starts, strict=True)]
            for at, logits in enumerate(self.group.step(self.model, rows, fed) if rows else ()):
                self.agree(logits, self.text[rows[at]], starts[at])

    @action(4, has_rows, mask=MASK, number=NUMBER, drafted=st.lists(DRAFTED, min_size=5, max_size=5))
    def check_drafts(self, mask: int, number: int, drafted: list[int]) -> None:
        """Rows keep by force as many drafted tokens as are right."""
        ready = [row for row in self.rows() if row.position and not row.prompt_left and row.known_tokens < TEXT_LENGTH]
        rows, given, counts, found = some(ready, mask), list[list[int]](), list[int](), list[mx.array]()
        starts = [row.known_tokens for row in rows]
        for at, row in enumerate(rows):
            fed = self.following(row, number)[starts[at] :][: 1 + drafted[at]]
            counts.append(max(1, len(fed) - (number + at) % 5))
            given.append([*fed[: counts[at]], *map(wrong, fed[counts[at] :])])
        if rows and self.group is not None:
            self.group.check_drafts(self.model, rows, given, lambda logits: [found.append(logits), counts][1])
        for at, row in enumerate(rows):
            self.agree(found[0][at, : counts[at]], self.text[row], starts[at])

    @action(2, has_rows, number=NUMBER, back=st.integers(0, 20))
    def rewind_row(self, number: int, back: int) -> None:
        """Take the last tokens out of a row, or close the row."""
        row = one(self.rows(), number)
        if not back:
            row.close()
            del self.text[row]
        elif row.position == row.known_tokens and self.group is not None:  # else the tokens behind would move up
            with suppress(ShiftError):
                self.group.remove(self.model, row, max(0, row.position - back), row.position)

    @action(1, lambda walk: walk.group, is_left=RARELY)
    def end_group(self, is_left: bool) -> None:
        """Close a group, or let it go."""
        self.text = {each: self.text[each] for each in self.sessions}
        group, self.group = self.group, None
        if group is not None and not is_left:
            group.close()

    # The cache

    @action(1, text=TEXT, length=LENGTH, number=NUMBER)
    def fetch_and_insert(self, text: int, length: int, number: int) -> None:
        prompt, namespace = texts()[text][:length], one(self.options["namespaces"], number)
        caches, rest = self.cache.fetch(prompt, namespace)
        self.agree(self.model(mx.array(rest)[None], cache=caches)[0], text, length - len(rest))
        if not self.options["exact"]:
            self.cache.insert(prompt, caches, namespace)

    @action(1, lambda walk: walk.options["pins"], text=TEXT, length=LENGTH, number=NUMBER)
    def pin(self, text: int, length: int, number: int) -> None:
        prompt, namespace = texts()[text][:length], one(self.options["namespaces"], number)
        if number > 4 and self.pins:
            self.cache.unpin(*self.pins.pop())
        with suppress(ValueError, CacheBusyError):  # not stored whole, or no room beside other pins
            if number > 2:
                self.cache.warm(self.model, prompt, namespace)
            self.cache.pin(prompt, namespace)
            self.pins.append((prompt, namespace))

    @action(1, number=NUMBER)
    def forget(self, number: int) -> None:
        if number:
            self.cache.reclaim(number * self.budget_bytes // 8)
        else:
            self.cache.clear()
            self.pins.clear()

    @action(1, lambda walk: walk.options["store"])
    def restart(self) -> None:
        self.close()
        self.open()

    def close(self) -> None:
        """Close sessions, group, cache and store. What MLX has allocated is what the cache has booked."""
        while self.sessions:
            self.end(0, False)
        self.end_group(False)
        self.cache.check()
        self.cache.flush()
        held = held_bytes(self.cache.stats)
        assert held <= self.ledger.budget_bytes
        assert abs(active_bytes() - self.other_bytes - held) <= 0.01 * held + 4096, held
        self.cache.close()
        if self.store is not None:
            self.store.close()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.mismatches == ()
            if self.group is not None:
                self.group.check()

    def teardown(self) -> None:
        with getattr(self, "closing", ExitStack()):
            if hasattr(self, "cache"):
                if sys.exception() is None:
                    self.close()
                else:  # a step failed, or Hypothesis ends the walk early; the next walk finds no state of this one
                    with suppress(Exception):
                        self.cache.close()
                    if self.store is not None:
                        self.store.close()


def test_any_two_option_values_that_fit_meet_in_a_walk() -> None:
    met = [{(left, right) for left in row.items() for right in row.items()} for row in TABLE]
    assert all(any(pair in each for each in met) for pair in all_pairs(OPTIONS, fits))
    assert all(fits(*pair) for each in met for pair in each)
    assert {kind for kinds in KINDS.values() for kind in kinds} == {*TINY_KINDS}


def walks() -> list[Any]:
    """Each third row of the table with one kind, in turn; in the slow suite each row with each kind."""
    turns, found = {layers: count() for layers in KINDS}, []
    for number, row in enumerate(TABLE):
        kinds = [kind for kind in KINDS[row["layers"]] if kind != NOT_ROUNDED or row["stored_bits"] is None]
        if number % 3 == 0:
            found.append(pytest.param(row, kinds[next(turns[row["layers"]]) % len(kinds)], 3, id=f"{number}"))
        found += [pytest.param(row, kind, 6, id=f"{number}-{kind}", marks=pytest.mark.slow) for kind in kinds]
    return found


@pytest.mark.usefixtures("exact_allocations")
@pytest.mark.parametrize(("options", "kind", "examples"), walks())
def test_whatever_is_combined_answers_as_a_cold_run_does(options: dict[str, Any], kind: str, examples: int) -> None:
    class Walk(Combinations):
        pass

    Walk.kind, Walk.options = kind, options
    run_state_machine_as_test(Walk, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
