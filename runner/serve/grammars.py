"""Grammars: structured output. They say which tokens may come next, so that a reply satisfies its Constraint.

    Grammars    for one loaded model: makes the Guide of each reply, on its own threads; keeps compiled grammars
    Guide       reads the reply token by token, and says which tokens may be next

llguidance compiles the rules of rules.py and makes the masks. A Guide is in one phase at a time:

    thinking    anything but the end of the reply, up to the mark that ends the reasoning
    grammar     JSON of the schema, or calls of functions with arguments of their schemas
    free        anything; also after the start of an optional tool call
    over        only the end of the reply

  GR1  A reply that ends by itself satisfies its constraint. A reply that max_tokens cuts off may not.
  GR2  The cost of a schema is bounded: compilation by its length and llguidance's limits, a mask by these limits.
  GR3  If a reply exceeds a limit, only this reply ends. Its matcher shares a lexer with copies in other replies, which
       then fails for all. So each of these replies makes its own new matcher, and later requests get a new one.

Any thread may use Grammars; one thread uses a Guide. Never imports MLX.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from runner.serve.prompts import RenderedPrompt
from runner.serve.request import ApiError, Constraint, Request
from runner.serve.rules import call_rules, functions_of
from runner.serve.schemas import arguments_schema, schema_at, schema_of

MAX_COMPILED = 32
LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 10_000, "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000, "verbose_errors": False,
}  # fmt: skip
TAIL = 64  # the last bytes, and the last tokens, of a reply in which marks are searched

Phase: TypeAlias = Literal["thinking", "grammar", "free", "over"]
Words: TypeAlias = NDArray[np.uint32]  # a mask: one bit for each token


@dataclass(frozen=True)
class Marks:
    """What a model writes around reasoning and tool calls, in tokens or bytes; empty where it has none."""

    tokenizer: llguidance.LLTokenizer
    ends: tuple[int, ...]
    think_start: tuple[int, ...]
    think_end: bytes
    call_start: tuple[int, ...]
    call_start_text: bytes
    call_end: bytes

    @classmethod
    def of(cls, tokenizer: Any, vocabulary_length: int) -> Marks:
        ends = sorted(tokenizer.eos_token_ids)
        length = max(vocabulary_length, len(tokenizer))
        try:
            own = llguidance.hf.from_tokenizer(tokenizer._tokenizer, n_vocab=length, eos_token=ends)
        except ValueError as error:
            raise ApiError(400, f"structured output needs a fast tokenizer: {error}") from error
        return cls(
            own,
            tuple(ends),
            tuple(tokenizer.think_start_tokens or ()),
            (tokenizer.think_end or "").encode(),
            tuple(tokenizer.tool_call_start_tokens or ()),
            (tokenizer.tool_call_start or "").encode(),
            (tokenizer.tool_call_end or "").encode(),
        )

    @property
    def word_count(self) -> int:
        return -(-self.tokenizer.vocab_size // 32)

    def words(self, allowed: Sequence[int] | None = None) -> Words:
        """A mask of these tokens; default: of all."""
        words = np.full(self.word_count, 0 if allowed is not None else 0xFFFFFFFF, np.uint32)
        for token in allowed or ():
            words[token // 32] |= np.uint32(1 << token % 32)
        return words


class Grammar(NamedTuple):
    """A matcher that has consumed nothing, and `renew`, which makes a matcher that shares no lexer with others."""

    matcher: llguidance.LLMatcher
    renew: Callable[[], llguidance.LLMatcher]


class Guide:
    """Gives the mask for each token of a reply, when called with the token before it.

    `whole` is the grammar of the whole reply, `calls` the grammar of optional calls in it; None: anything is allowed.
    """

    def __init__(
        self,
        marks: Marks,
        constraint: Constraint,
        whole: Grammar | None,
        calls: Grammar | None = None,
        *,
        is_thinking: bool,
        may_think: bool,
    ) -> None:
        self._marks, self._constraint, self._calls, self._grammar = marks, constraint, calls, whole
        self._matcher = None if whole is None else whole.matcher
        self._consumed: list[int] = []  # the tokens that the matcher has consumed
        self._phase: Phase = "free" if whole is None else "thinking" if is_thinking else "grammar"
        #: Marks that may come in place of the grammar, with the phase after them; by their first tokens.
        self._openers: dict[int, tuple[tuple[int, ...], Phase]] = {}
        if marks.think_start and may_think:
            self._openers[marks.think_start[0]] = marks.think_start, "thinking"
        if marks.call_start and constraint.has_tools and constraint.calls == "auto":
            self._openers[marks.call_start[0]] = marks.call_start, "free"
        self._forced: list[int] = []
        self._has_call = self._is_in_call = False
        self._recent: list[int] = []
        self._tail = b""

    def __call__(self, token: int | None) -> NDArray[np.bool_] | None:
        """A mask (V,) of the tokens that may follow `token` (None: the start); None: all may. ApiError: none may."""
        if token is not None:
            self._read(token)
        words = self._allowed()
        return None if words is None else np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)

    def _read(self, token: int) -> None:
        marks = self._marks
        self._recent = [*self._recent, token][-TAIL:]
        self._tail = (self._tail + marks.tokenizer.decode_bytes([token]))[-TAIL:]
        if token in marks.ends:
            self._phase, self._forced, self._matcher, self._calls = "free", [], None, None
        elif self._forced:
            self._forced.pop(0)
        elif self._phase == "thinking":
            _, mark, rest = self._tail.partition(marks.think_end)
            if mark:
                self._phase = "grammar"
                self._openers = {first: each for first, each in self._openers.items() if each[1] != "thinking"}
                self._consume(marks.tokenizer.tokenize_bytes(rest.lstrip()))
        elif self._phase == "grammar":
            if token in self._openers:
                (_, *self._forced), self._phase = self._openers[token]
            else:
                self._openers.clear()
                self._consume([token])
        if self._calls is not None:
            self._follow_calls(self._calls)
        if self._phase == "free" and self._constraint.is_single:
            self._has_call = self._has_call or marks.call_start_text in self._tail
            if self._has_call and marks.call_end and marks.call_end in self._tail:
                self._phase = "over"

    def _follow_calls(self, calls: Grammar) -> None:
        """Begin the grammar of calls at the opening mark of a call, and end it after the closing mark."""
        marks = self._marks
        if self._phase == "free" and marks.call_start_text in self._tail:
            self._tail = self._tail.partition(marks.call_start_text)[2]
            self._phase, self._is_in_call, self._consumed = "grammar", True, []
            self._grammar, self._matcher = calls, calls.matcher.deep_copy()
            self._openers.clear()
            self._consume([*marks.call_start, *marks.tokenizer.tokenize_bytes(self._tail)])
        if self._is_in_call and marks.call_end and marks.call_end in self._tail:
            self._phase, self._tail, self._is_in_call = "over" if self._constraint.is_single else "free", b"", False

    def _consume(self, tokens: Sequence[int]) -> None:
        if self._matcher is not None and tokens:
            self._consumed += tokens
            if not self._matcher.consume_tokens([*tokens]):
                self._begin_anew()

    def _mask(self) -> Words:
        """A mask of the tokens that the grammar allows. ApiError: computing it exceeds a limit."""
        for is_last in (False, True):
            assert self._matcher is not None
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._marks.word_count]
            if not self._matcher.is_error():
                return words
            self._refuse() if is_last else self._begin_anew()
        raise AssertionError("the loop returns or raises")

    def _begin_anew(self) -> None:
        assert self._grammar is not None
        self._matcher = self._grammar.renew()
        if self._consumed and not self._matcher.consume_tokens(self._consumed):
            self._refuse()

    def _refuse(self) -> NoReturn:
        error = self._matcher.get_error() if self._matcher else ""
        raise ApiError(400, f"the reply cannot continue in its format: {error}", param=self._constraint.at)

    def _allowed(self) -> Words | None:
        """A mask of the tokens that may come next; None: all may."""
        marks, start = self._marks, self._marks.call_start
        if self._forced:
            return marks.words([self._forced[0]])
        if self._phase == "over":
            return marks.words(marks.ends)
        if self._phase == "grammar":
            words = self._mask()
            return words | marks.words([*self._openers]) if self._openers else words
        refused: list[int] = []
        # If a mark has several tokens, only its last token is refused.
        is_at_call = bool(start) and self._recent[len(self._recent) - len(start) + 1 :] == [*start[:-1]]
        if self._phase == "thinking":
            refused = [*marks.ends, *(start[-1:] if is_at_call else ())]
        elif is_at_call and (self._constraint.calls == "none" or (self._has_call and not marks.call_end)):
            refused = [start[-1]]
        return ~marks.words(refused) if refused else None


#: For errors of llguidance that do not name the keyword: how they begin, and what to put before them.
UNNAMED = {"regex": "pattern: ", "Resource": "$ref: ", "Pointer": "$ref: "}
#: Errors that name an option of llguidance, and what to say in place of them.
REWORDED = {
    "coerce_one_of": "oneOf: a value may be of several branches; name the values of a property in each, or use anyOf"
}


class RefusedGrammar(NamedTuple):
    """Why a grammar cannot be enforced, and the field that it comes from."""

    why: str
    at: str


class Grammars:
    """Compiles grammars for one model. It also keeps refused grammars, as finding their error takes as long."""

    def __init__(self, tokenizer: Any, vocabulary_length: int) -> None:
        self._tokenizer, self._vocabulary_length = tokenizer, vocabulary_length
        self._marks: Marks | None = None
        self._compiled: OrderedDict[tuple[str, str], llguidance.LLMatcher | RefusedGrammar] = OrderedDict()
        self._lock = Lock()  # guards the two above
        self._threads = ThreadPoolExecutor(2, "grammar")

    def guide(self, request: Request, prompt: RenderedPrompt) -> Future[Guide]:
        """Make the Guide of a request with a constraint. ApiError: its constraint cannot be enforced."""
        return self._threads.submit(self._guide, request, prompt)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _guide(self, request: Request, prompt: RenderedPrompt) -> Guide:
        constraint, tokenizer = request.constraint, self._tokenizer
        assert constraint is not None
        with self._lock:
            self._marks = marks = self._marks or Marks.of(tokenizer, self._vocabulary_length)
        is_required = constraint.calls == "required"
        is_limited = constraint.calls == "auto" and constraint.functions is not None and tokenizer.has_tool_calling
        has_grammar = is_required or is_limited or constraint.schema is not None
        if has_grammar and (tokenizer.response_transitions or tokenizer.structural_markers):
            raise ApiError(400, "this model's replies have a format of their own, so no other can be enforced.")
        calls = text = None
        if is_required or is_limited:
            calls = self._grammar(call_rules(request, tokenizer, marks.tokenizer), marks, request, is_call=True)
        if constraint.schema is not None and not is_required:
            text = self._grammar(f"start: %json {schema_of(constraint)}\n", marks, request)
        is_thinking = prompt.initial_state == "reasoning"
        may_think = not is_thinking and not _has_thought(prompt.tokens, tokenizer)
        may_think &= not request.has_plain_calls(tokenizer)  # marks of reasoning could be text in a call
        whole, within = (calls, None) if is_required else (text, calls)
        return Guide(marks, constraint, whole, within, is_thinking=is_thinking, may_think=may_think)

    def _grammar(self, rules: str, marks: Marks, request: Request, *, is_call: bool = False) -> Grammar:
        assert request.constraint is not None
        grammar = "%llguidance {}\n" + rules
        key = request.constraint.at, grammar
        with self._lock:
            found = self._compiled.get(key)
        # A reply that went beyond a limit has broken the lexer.
        if found is None or (isinstance(found, llguidance.LLMatcher) and error_of(found)):
            found = new_matcher(grammar, marks)
            if error := error_of(found):
                found = _refused(error, request, marks, is_call=is_call)
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if isinstance(found, RefusedGrammar):
                raise ApiError(400, f"this schema cannot be enforced: {found.why}", param=found.at)
            return Grammar(found.deep_copy(), lambda: new_matcher(grammar, marks))


def new_matcher(grammar: str, marks: Marks) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(marks.tokenizer, grammar, log_level=0, limits=limits())


def error_of(matcher: llguidance.LLMatcher) -> str:
    """Why a new matcher cannot be used; empty: it can."""
    if error := matcher.get_error():
        return error
    first = matcher.deep_copy()
    first.compute_bitmask()
    error = first.get_error()
    return "no reply satisfies it" if "NoExtension" in error else error


def _has_thought(tokens: list[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with closed reasoning. Templates write it empty to switch reasoning off."""
    if not tokenizer.has_thinking:
        return True
    start, end = tokenizer.rfind_think_start(tokens), tokenizer.rfind_think_end(tokens)
    return bool(start < end and not tokenizer.decode(tokens[end + len(tokenizer.think_end_tokens) :]).strip())


def _refused(error: str, request: Request, marks: Marks, *, is_call: bool) -> RefusedGrammar:
    """Why a grammar is refused, with the field that it comes from."""
    constraint = request.constraint
    assert constraint is not None
    at = constraint.at
    if is_call:
        at = "tool_choice"
        for index, function in functions_of(request):
            schema = llguidance.LLMatcher.grammar_from_json_schema(arguments_schema(function, index))
            if found := llguidance.LLMatcher.validate_grammar(schema, marks.tokenizer, limits=limits()):
                error, at = found, schema_at(index)
                break
    # llguidance's error has the grammar after the reason.
    why = " ".join(error.split()).rpartition("failed to compile JSON schema: ")[2].partition(" 1 | %llguidance")[0]
    keyword = next((name for start, name in UNNAMED.items() if why.startswith(start)), "")
    return RefusedGrammar(next((words for option, words in REWORDED.items() if option in why), keyword + why), at)


def limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(**LIMITS)
