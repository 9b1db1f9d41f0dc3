"""Structured output: which tokens a reply may have next, so that it becomes what a request's Constraint says.

    Grammars    of one loaded model: makes the Guide of a reply, on threads of its own; keeps compiled grammars
    Guide       reads the reply token by token, and says which tokens may be next

llguidance compiles JSON schemas and makes the masks. A Guide is in one phase at a time:

    thinking    anything but the end of the reply, up to the mark that ends the reasoning
    grammar     JSON of the schema, or calls of functions with arguments of their schemas
    free        anything; behind the beginning of a tool call that may be and need not
    over        the end of the reply alone

  GR1  A reply that ends by itself is what its constraint says. A reply that max_tokens cuts off need not be.
  GR2  What a schema costs is bounded: compilation by the schema's size and llguidance's limits, a mask by the limits.
  GR3  A reply that goes beyond a limit ends alone. Copies of a matcher share a lexer, which then fails for all of them:
       each reply goes on with a matcher of its own, and later requests get a new one.

Any thread may use Grammars; one thread uses a Guide. Never imports MLX.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from threading import Lock
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from runner.serve.prompts import RenderedPrompt
from runner.serve.request import ApiError, Constraint, Request

MAX_COMPILED = 32
MARGIN = 1e-9  # of a number to an exclusive bound
MAX_SCHEMA_CHARACTERS, MAX_STRING_CHARACTERS = 100_000, 10_000
MAX_TOOLS_CHARACTERS = 1_000_000  # of the schemas of all tools that may be called
MAX_OPTIONAL = 400  # properties of an object that may be missing: each may be the next one
MAX_MULTIPLE = 10_000  # product of all `multipleOf` of a grammar: the automaton has as many states
LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 10_000, "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000, "verbose_errors": False,
}  # fmt: skip
#: White space between the parts of JSON is bounded: a model may write it without end.
JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ",[ \\n]{0,20}"}
#: Formats that are enforced. JSON Schema lets all others say nothing about a value.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
VALUES = {"const", "enum", "default", "example", "examples"}  # keywords whose values are no schemas
MAPS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}  # of names to schemas
#: A call as JSON, as a term of a rule.
JSON_CALL = r'"{\"name\": " NAME ", \"arguments\": " ARGUMENTS "}"'
TAIL = 64  # bytes and tokens of a reply in which marks are found

Phase: TypeAlias = Literal["thinking", "grammar", "free", "over"]
Words: TypeAlias = NDArray[np.uint32]  # a bit for each token


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


class Guide:
    """Called once for each token of a reply, with the token before."""

    def __init__(
        self,
        marks: Marks,
        constraint: Constraint,
        matcher: llguidance.LLMatcher | None,
        *,
        is_thinking: bool,
        may_think: bool,
        renew: Callable[[], llguidance.LLMatcher | None] = lambda: None,
    ) -> None:
        """`renew` makes a matcher that shares nothing; None: there is none."""
        self._marks, self._constraint, self._matcher, self._renew = marks, constraint, matcher, renew
        self._consumed: list[int] = []  # by the matcher
        self._phase: Phase = "free" if matcher is None else "thinking" if is_thinking else "grammar"
        #: What may stand in place of the grammar, by its first token.
        self._openers: dict[int, tuple[tuple[int, ...], Phase]] = {}
        if marks.think_start and may_think:
            self._openers[marks.think_start[0]] = marks.think_start, "thinking"
        if marks.call_start and constraint.has_tools and constraint.calls == "auto":
            self._openers[marks.call_start[0]] = marks.call_start, "free"
        self._forced: list[int] = []
        self._has_call = False
        self._recent: list[int] = []
        self._tail = b""

    def __call__(self, token: int | None) -> NDArray[np.bool_] | None:
        """The tokens (V,) that may come behind `token`, None at the beginning; None: all may. ApiError: none may."""
        if token is not None:
            self._read(token)
        words = self._allowed()
        return None if words is None else np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)

    def _read(self, token: int) -> None:
        marks = self._marks
        self._recent = [*self._recent, token][-TAIL:]
        self._tail = (self._tail + marks.tokenizer.decode_bytes([token]))[-TAIL:]
        if token in marks.ends:
            self._phase, self._forced, self._matcher = "free", [], None
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
        if self._phase == "free" and self._constraint.is_single:
            self._has_call = self._has_call or marks.call_start_text in self._tail
            if self._has_call and marks.call_end and marks.call_end in self._tail:
                self._phase = "over"

    def _consume(self, tokens: Sequence[int]) -> None:
        if self._matcher is not None and tokens:
            self._consumed += tokens
            if not self._matcher.consume_tokens([*tokens]):
                self._begin_anew()

    def _mask(self) -> Words:
        """The tokens that the grammar allows. ApiError: it cannot be made within the limits."""
        for is_last in (False, True):
            assert self._matcher is not None
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._marks.word_count]
            if not self._matcher.is_error():
                return words
            self._refuse() if is_last else self._begin_anew()
        raise AssertionError("the loop returns or raises")

    def _begin_anew(self) -> None:
        self._matcher = self._renew() or self._matcher
        if self._consumed and self._matcher is not None and not self._matcher.consume_tokens(self._consumed):
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
        # A mark of several tokens is refused at its last one.
        is_at_call = bool(start) and self._recent[len(self._recent) - len(start) + 1 :] == [*start[:-1]]
        if self._phase == "thinking":
            refused = [*marks.ends, *(start[-1:] if is_at_call else ())]
        elif is_at_call and (self._constraint.calls == "none" or (self._has_call and not marks.call_end)):
            refused = [start[-1]]
        return ~marks.words(refused) if refused else None


class RefusedGrammar(NamedTuple):
    """Why a grammar cannot be enforced, and the field that it comes from."""

    why: str
    at: str


class Grammars:
    """Compiles grammars for one model. Refused grammars are remembered like others: to refuse one takes as long."""

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
        matcher, grammar = None, ""
        if constraint.calls == "required" or constraint.schema is not None:
            if tokenizer.response_transitions or tokenizer.structural_markers:
                raise ApiError(400, "this model's replies have a form of their own, so no other form can be enforced.")
            is_call = constraint.calls == "required"
            rules = call_rules(request, tokenizer, marks) if is_call else f"start: %json {schema_of(constraint)}\n"
            grammar = "%llguidance {}\n" + rules
            matcher = self._matcher(grammar, marks, request)
        is_thinking = prompt.initial_state == "reasoning"
        may_think = not is_thinking and not _is_thought(prompt.tokens, tokenizer)
        return Guide(
            marks,
            constraint,
            matcher,
            is_thinking=is_thinking,
            may_think=may_think,
            renew=lambda: new_matcher(grammar, marks),
        )

    def _matcher(self, grammar: str, marks: Marks, request: Request) -> llguidance.LLMatcher:
        assert request.constraint is not None
        key = request.constraint.at, grammar
        with self._lock:
            found = self._compiled.get(key)
        # A reply that went beyond a limit has broken the lexer.
        if found is None or (isinstance(found, llguidance.LLMatcher) and error_of(found)):
            found = new_matcher(grammar, marks)
            if error := error_of(found):
                found = _refused(error, request, marks)
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if isinstance(found, RefusedGrammar):
                raise ApiError(400, f"this schema cannot be enforced: {found.why}", param=found.at)
            return found.deep_copy()


def new_matcher(grammar: str, marks: Marks) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(marks.tokenizer, grammar, log_level=0, limits=limits())


def error_of(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher that has consumed nothing is of no use; empty: it can be used."""
    if error := matcher.get_error():
        return error
    first = matcher.deep_copy()
    first.compute_bitmask()
    error = first.get_error()
    return "no reply satisfies it" if "NoExtension" in error else error


def _is_thought(tokens: list[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with reasoning that is over, empty as a rule: the template has switched it off."""
    if not tokenizer.has_thinking:
        return True
    start, end = tokenizer.rfind_think_start(tokens), tokenizer.rfind_think_end(tokens)
    return bool(start < end and not tokenizer.decode(tokens[end + len(tokenizer.think_end_tokens) :]).strip())


def _refused(error: str, request: Request, marks: Marks) -> RefusedGrammar:
    """Why a grammar is refused, with the field that it comes from."""
    constraint = request.constraint
    assert constraint is not None
    at = constraint.at
    if constraint.calls == "required":
        at = "tool_choice"
        for index, function in _functions(request):
            schema = llguidance.LLMatcher.grammar_from_json_schema(arguments_schema(function, index))
            if found := llguidance.LLMatcher.validate_grammar(schema, marks.tokenizer, limits=limits()):
                error, at = found, _at(index)
                break
    return RefusedGrammar(" ".join(error.split()), at)


def limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(**LIMITS)


# Schemas


def schema_of(constraint: Constraint) -> str:
    return checked_schema(constraint.schema, constraint.at)


def arguments_schema(function: Mapping[str, Any], index: int) -> str:
    """The schema of a function's arguments, of which a function without parameters has none."""
    parameters = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return checked_schema({"type": "object", **parameters} if isinstance(parameters, dict) else parameters, _at(index))


def _at(index: int) -> str:
    return f"tools.{index}.function.parameters"


def checked_schema(schema: Any, at: str) -> str:
    """JSON of a schema for llguidance. ApiError: it may cost more than a schema should."""
    length = 0
    for part in json.JSONEncoder().iterencode(schema):  # no longer than it takes to see that it is too long
        length += len(part)
        _require(length, MAX_SCHEMA_CHARACTERS, "its length in characters", at)
    _require_few_multiples([schema], at)
    found = _checked(schema, at)
    return json.dumps({**found, "x-guidance": JSON_STYLE} if isinstance(found, dict) else found)


def _require_few_multiples(schemas: Iterable[Any], at: str) -> None:
    _require(math.prod({each for schema in schemas for each in _multiples(schema)}), MAX_MULTIPLE, "multipleOf", at)


def _multiples(node: Any) -> Iterator[int]:
    """The digits of each `multipleOf` as a whole number."""
    for key, each in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "multipleOf" and isinstance(each, int | float) and each > 0:
            digits, exponent = Decimal(str(each)).normalize().as_tuple()[1:]
            yield int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        else:
            yield from _multiples(each)


def _checked(node: Any, at: str) -> Any:
    if isinstance(node, list):
        return [_checked(each, at) for each in node]
    if not isinstance(node, dict):
        return node
    properties, required = node.get("properties"), node.get("required")
    if isinstance(properties, dict):
        optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        _require(optional, MAX_OPTIONAL, "properties, the number of optional ones", at)
    for key in ("const", "enum"):
        _require(max(map(len, _texts(node.get(key))), default=0), MAX_STRING_CHARACTERS, f"{key}, in characters", at)
    node = _with_inclusive_bounds(node)
    checked = {}
    for key, each in node.items():
        if key in MAPS and isinstance(each, dict):
            checked[key] = {name: _checked(one, at) for name, one in each.items()}
        elif key != "x-guidance" and (key != "format" or each in FORMATS):
            checked[key] = each if key in VALUES else _checked(each, at)
    return checked


def _with_inclusive_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """The node with bounds just inside of exclusive ones, to which llguidance lets some numbers be equal."""
    changed = {**node}
    for key, name, sign, choose in (("exclusiveMinimum", "minimum", 1, max), ("exclusiveMaximum", "maximum", -1, min)):
        bound, other = node.get(key), node.get(name)
        if node.get("type") != "integer" and isinstance(bound, int | float) and not isinstance(bound, bool):
            inside = changed.pop(key) + sign * MARGIN * max(1, abs(bound))
            changed[name] = choose(inside, other) if isinstance(other, int | float) else inside
    return changed


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(each)


def _require(found: float, most: int, of: str, at: str) -> None:
    if found > most:
        raise ApiError(400, f"this schema cannot be enforced: {of}: {found}; at most {most} is enforced.", param=at)


# Tool calls


def _functions(request: Request) -> Iterator[tuple[int, dict[str, Any]]]:
    """The functions that may be called, by their index in the request's tools."""
    assert request.constraint is not None
    names = request.constraint.functions
    for index, tool in enumerate(request.tools or ()):
        if names is None or tool["function"]["name"] in names:
            yield index, tool["function"]


def call_rules(request: Request, tokenizer: Any, marks: Marks) -> str:
    """Rules of calls in the form that the model's template has. ApiError: that form cannot be enforced."""

    def mark(text: str) -> str:
        """A mark as a term: a special token by its id, other marks by their text."""
        ids = tokenizer.encode(text, add_special_tokens=False)
        is_special = len(ids) == 1 and marks.tokenizer.is_special_token(ids[0])
        return f"<[{ids[0]}]>" if is_special else json.dumps(text)

    form = getattr(tokenizer.tool_parser, "__module__", "none").rpartition(".")[2]
    begin, between, end = "", "", ""
    if form == "json_tools":
        start, stop = mark(tokenizer.tool_call_start), mark(tokenizer.tool_call_end)
        call, between = f'{start} "\\n"? {JSON_CALL} "\\n"? {stop}', '"\\n"?'
    elif form == "mistral" and "[ARGS]" in tokenizer.get_vocab():
        call = f"{mark('[TOOL_CALLS]')} NAME {mark('[ARGS]')} ARGUMENTS"
    elif form == "mistral":
        begin, call, between, end = f'{mark("[TOOL_CALLS]")} " "? "["', JSON_CALL, '", "', '"]"'
    elif form == "kimi_k2":
        start, inner, stop = (f"<|tool_call_{each}|>" for each in ("begin", "argument_begin", "end"))
        begin, end = mark(tokenizer.tool_call_start), mark(tokenizer.tool_call_end)
        call = f'{mark(start)} "functions." NAME ":" /[0-9]{{1,3}}/ {mark(inner)} ARGUMENTS {mark(stop)}'
    else:
        message = f"calls cannot be forced: the form in which this model writes them ({form}) cannot be enforced."
        raise ApiError(400, message, param="tool_choice")
    rules, length = [], 0
    _require_few_multiples((function.get("parameters") for _, function in _functions(request)), "tools")
    for index, function in _functions(request):
        name = json.dumps(json.dumps(function["name"]) if JSON_CALL in call else function["name"], ensure_ascii=False)
        rules.append(f"call_{index}: {call.replace('NAME', name).replace('ARGUMENTS', f'arguments_{index}')}")
        rules.append(f"arguments_{index}: %json {arguments_schema(function, index)}")
        length += len(rules[-1])
        _require(length, MAX_TOOLS_CHARACTERS, "the length of all schemas in characters", "tools")
    calls = " | ".join(f"call_{index}" for index, _ in _functions(request))
    assert request.constraint is not None
    more = "" if request.constraint.is_single else f"({between} any)*"
    return "\n".join([f"start: {begin} any {more} {end}", f"any: {calls}", *rules, ""])
