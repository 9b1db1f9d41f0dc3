r"""ReplyReader: splits what a model writes into text, reasoning and tool calls, and reads the calls.

Calls in tags are read here, all others with mlx-lm's parser.

In the forms with tags, each argument has its own tags, and only the schema shows whether it is a text or JSON. mlx-lm's
parsers of these forms strip texts and read `yes` as false and `null` as None. They lose a call if an integer argument
is not an integer. Here:

  TC1  A value that a chat template wrote between tags is read as this value, if the schema allows its type. If the
       schema allows texts and other types, a text that looks like a value of another type is read as that value.
  TC2  An argument that is not of an allowed type stays a text, with every character.
  TC3  The text of a call is read completely, with all arguments, or reading fails.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from pydantic_core import from_json

from runner.engine.token import Token
from runner.script.conversation import tool_call
from runner.serve import mlx_lm_border
from runner.serve.schemas import KINDS, ArgumentSchema
from runner.text import cut

logger = logging.getLogger(__name__)

_ARGUMENTS = re.compile(r'(?<="name").*?"(?:arguments|parameters)"\s*:', re.DOTALL)
#: Words of Python, which some templates write in place of JSON.
_WORDS = {"True": True, "False": False, "None": None}
_NOTHING = object()
ANYTHING = ArgumentSchema(frozenset(KINDS.values()))


class _Tags(NamedTuple):
    """Patterns of a call (groups `name`, `body`) and of an argument (group `key`; the last group is the value)."""

    call: re.Pattern[str]
    argument: re.Pattern[str]


def _tags(call: str, argument: str) -> _Tags:
    return _Tags(*(re.compile(rf"\s*{each}", re.DOTALL) for each in (call, argument)))


def _arg_tags(prefix: str) -> _Tags:
    """Tags of GLM and LongCat. Some of their replies have a backslash and an n in place of a line break."""
    key, value = rf"<{prefix}arg_key>(?P<key>.*?)</{prefix}arg_key>", rf"<{prefix}arg_value>(?P<value>.*?)"
    blank = r"(?:\\n|\s)*"
    return _tags(
        rf"(?P<name>[^\s<{{]+){blank}(?P<body>(?:<{prefix}arg_key>.*)?)\Z",
        rf"{key}{blank}{value}</{prefix}arg_value>{blank}(?=<{prefix}arg_key>|\Z)",
    )


_QUOTED = r"""["']?(?P<{}>[^"'<>]+)["']?\s*>"""
#: By the name of mlx-lm's parser. An end tag counts only before the next start tag, or at the end of the text.
_FORMS = {
    "qwen3_coder": _tags(
        r"<function=(?P<name>[^\s<>]+)>?(?P<body>.*?)</function>\s*(?=<function=|\Z)",
        r"<parameter=(?P<key>[^<>\n]+)>?\n?(?P<value>.*?)\n?</parameter>\s*(?=<parameter=|\Z)",
    ),
    "glm47": _arg_tags(""),
    "longcat": _arg_tags("longcat_"),
    "minimax_m2": _tags(
        rf"<invoke name={_QUOTED.format('name')}(?P<body>.*?)</invoke>\s*(?=<invoke|\Z)",
        rf"<parameter name={_QUOTED.format('key')}(?P<value>.*?)</parameter>\s*(?=<parameter|\Z)",
    ),
    "minicpm5": _tags(
        rf"(?:<function\s+name\s*=\s*)?{_QUOTED.format('name')}(?P<body>.*?)(?:</function>\s*)?(?=<function|\Z)",
        rf"<param\s+name\s*=\s*{_QUOTED.format('key')}"
        r"(?:\s*<!\[CDATA\[(?P<data>.*?)\]\]>\s*|(?P<value>.*?))</param>\s*(?=<param|\Z)",
    ),
    "muse_spark": _tags(
        r"""<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)">(?P<body>.*?)</atem:invoke>\s*(?=<atem:invoke|\Z)""",
        r"""<atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</atem:parameter>"""
        r"\s*(?=<atem:parameter|\Z)",
    ),
}
_ALSO_OTHERWISE = ("glm47",)  # if these patterns fail, mlx-lm's parser reads the call


class ReplyReader:
    """Reads one reply, as mlx_lm.server does. Holds no array.

    mlx-lm's TextStateMachine strips control sequences, and gives each piece of text a state. The rest
    follows APIHandler.handle_completion of mlx_lm.server 0.32.2: text is held back while a tool call is written; the
    call is complete when the state is normal again, or at the end. A call that cannot be read is text, with its marks.
    With `drops_breaks`, line breaks between the reasoning and the text are left out. `before_call` chooses the white
    space before a call; white space after a call is left out. See template_breaks.py.

    Args:
        parser: mlx-lm's parser of the calls; None: the model has no form for calls.
        arguments: for each function, the schemas of its arguments.
    """

    def __init__(
        self,
        machine: Any,
        initial_state: str,
        parser: Callable[[str, Any], Any] | None,
        arguments: Mapping[str, Mapping[str, ArgumentSchema]],
        *,
        call_marks: tuple[str, str] = ("", ""),
        has_one_call: bool = False,
        drops_breaks: bool = False,
        before_call: Callable[..., str] | None = None,
    ) -> None:
        self._machine, self._parser, self._arguments, self._call_marks = machine, parser, arguments, call_marks
        self._left_calls = 1 if has_one_call else None  # None: any number
        self._drops_breaks, self._is_behind_reasoning = drops_breaks, False
        self._before_call, self._has_text, self._is_behind_call = before_call, False, False
        self._white = self._left_out = ""  # white space that is held back; that was left out before the last call
        self._state = machine.make_state(initial_state)
        self._current = initial_state
        self._is_over, self._is_cut = False, True
        self._text = self._reasoning = self._tool_text = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, token: Token) -> Token:
        """The token with the text, reasoning and calls that it adds; without them while a tool call is written."""
        self._is_over, self._is_cut = token.finish_reason is not None, token.finish_reason != "stop"
        # As in mlx_lm.server, a character that is unfinished at a stop token is dropped.
        is_ended = token.finish_reason == "stop" and token.stop_word is None
        self._read(token.text.rstrip("\ufffd") if is_ended else token.text)
        if self._is_over:
            self._flush()
        return token._replace(text="") if self._current == "tool" else self._take(token)

    def finish(self) -> Token:
        """Return text that was held back, and a tool call that was not closed, with its arguments so far."""
        if not self._is_over:  # cancelled
            self._flush()
        if self._current == "tool" and self._tool_text:
            self._end_call("")
        return self._take(Token(""))

    def _read(self, text: str) -> None:
        self._state, segments = self._machine.split(self._state, text)
        for current, part in segments:
            self._collect(current, part)

    def _flush(self) -> None:
        self._state, held_back, current = self._machine.flush(self._state)
        self._collect(current, held_back)
        if not self._is_behind_call:
            self._text += self._white
        self._white = ""

    def _collect(self, current: str, text: str) -> None:
        if current == "reasoning":
            self._reasoning += text
            self._is_behind_reasoning = self._drops_breaks
        elif current == "tool":
            if self._current != "tool":
                self._begin_call()
            self._tool_text += text
        elif current == "normal":
            if self._current == "tool":
                self._end_call(self._call_marks[1])
            if self._is_behind_reasoning:
                text = text.lstrip("\n")
                self._is_behind_reasoning = not text
            self._add_text(text)
        self._current = current

    def _add_text(self, text: str) -> None:
        """Add to the text, but hold back white space at the end: a call may follow."""
        text = self._white + text
        kept = text if self._before_call is None else text.rstrip(" \t\r\n")
        self._text, self._white = self._text + kept, text[len(kept) :]
        if kept:
            self._has_text, self._is_behind_call = True, False

    def _begin_call(self) -> None:
        """Add the white space before a call that the template does not write itself."""
        white, self._white = self._white, ""
        if self._before_call is not None:
            given = "" if self._is_behind_call else self._before_call(white, has_text=self._has_text)
            self._text, self._left_out = self._text + given, white.removeprefix(given)

    def _take(self, token: Token) -> Token:
        calls = tuple(self._calls[: self._left_calls])
        if self._left_calls is not None:
            self._left_calls -= len(calls)
        token = token._replace(text=self._text, reasoning=self._reasoning, tool_calls=calls)
        self._text = self._reasoning = ""
        self._calls = []
        return token

    def _end_call(self, end: str) -> None:
        """Read the call that ends here. `end` is its closing mark, or empty."""
        text, self._tool_text = self._tool_text, ""
        try:
            self._calls += [*map(_in_openai_form, _parse(self._parser, self._arguments, text))]
            self._is_behind_call = True
        except Exception as error:  # Parsers may raise anything at what a model writes.
            is_cut = self._is_cut and not end
            if is_cut and (call := cut_call(text)):
                self._calls.append(call)
                return
            self._add_text(self._left_out + self._call_marks[0] + text + end)
            if not is_cut:
                why = cut(f"{type(error).__name__}: {error}")
                logger.warning("a tool call cannot be read, and is text of the reply: %s", why)


def json_calls(text: str, _tools: Any = None) -> list[dict[str, Any]]:
    """Read calls in JSON, one after the other. ValueError: there is other text, too."""
    decoder, calls, text = json.JSONDecoder(), [], text.strip()
    while text:
        call, end = decoder.raw_decode(text)
        calls.append(call)
        text = text[end:].strip()
    return calls


def _parse(
    parser: Callable[[str, Any], Any] | None, arguments: Mapping[str, Mapping[str, ArgumentSchema]], text: str
) -> list[dict[str, Any]]:
    form = parser.__module__.rpartition(".")[2] if parser else ""
    if (tags := _FORMS.get(form)) is not None:
        if text.lstrip()[:1] == "{":  # now and then these models write calls as JSON
            return json_calls(text)
        with suppress(*[ValueError] * (form in _ALSO_OTHERWISE)):
            found = _matches(tags.call, text)
            calls = [_call(each["name"].strip(), each["body"], tags, arguments) for each in found]
            return calls or _refuse("there is no call")
    if form == "function_gemma":
        # mlx-lm's parser cuts lists, objects and texts at braces. The form is that of Gemma 4, with other quotes.
        with suppress(ValueError):
            return _as_list(mlx_lm_border.parse_gemma4(text.replace("<escape>", '<|"|>')))
        if not {"{", "["}.isdisjoint(text.partition("{")[2]):
            _refuse("a list or an object cannot be read")
    if parser is None:
        _refuse("this model has no form for calls")
    return _as_list(parser(text, None))


def _call(name: str, body: str, tags: _Tags, arguments: Mapping[str, Mapping[str, ArgumentSchema]]) -> dict[str, Any]:
    known = arguments.get(name, {})
    pairs = [(found["key"].strip(), found[found.lastgroup or "value"]) for found in _matches(tags.argument, body)]
    return {"name": name, "arguments": {key: argument_of(value, known.get(key, ANYTHING)) for key, value in pairs}}


def _as_list(calls: Any) -> list[dict[str, Any]]:
    return calls if isinstance(calls, list) else [calls]


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches without a gap, up to the end of the text. ValueError: there is other text, too."""
    at = 0
    while (found := pattern.match(text, at)) is not None:
        yield found
        at = found.end()
    if text[at:].strip():
        raise ValueError(f"{text[at:].strip()[:40]!r} is no part of a call")


def _in_openai_form(call: Any) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return tool_call(str(call.get("id") or uuid.uuid4()), str(call["name"]), arguments)


def argument_of(text: str, schema: ArgumentSchema) -> Any:
    """The value of an argument by its schema."""
    kinds = schema.kinds
    if kinds == {"string"} or text in schema.texts:
        return text
    value = _value(text)
    kind = KINDS.get(type(value), "")
    if kind == "number" and "number" not in kinds and value.is_integer():
        kind, value = "integer", int(value)
    fits = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
    if not fits or "string" not in kinds or kind in ("array", "object"):
        return value if fits else text
    # A text is read as a value only if it is exactly the JSON of the value. If the schema has no type, only null is.
    is_open = kinds == ANYTHING.kinds and kind != "null"
    return value if text.strip() == json.dumps(value) and not is_open else text


def _value(text: str) -> Any:
    """The value of a text in JSON or Python; _NOTHING: the text is no value."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    bare = text.strip()
    if bare in _WORDS:
        return _WORDS[bare]
    if bare[:1] in ("[", "{"):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = ast.literal_eval(bare)
            json.dumps(found, allow_nan=False)
            return found
    return _NOTHING


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(number: str) -> float:
    value = float(number)
    return value if abs(value) != float("inf") else _refuse(number)


def cut_call(text: str) -> dict[str, Any] | None:
    """The call that a cut JSON tool call begins, with the arguments so far; None: the text has another form."""
    with suppress(ValueError):
        found, call = _ARGUMENTS.search(text), from_json(text.strip(), allow_partial="trailing-strings")
        if found and isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = text[found.end() :].strip()
            with suppress(ValueError):  # the arguments are whole, and the rest of the call is cut off
                arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
            return tool_call(str(uuid.uuid4()), call["name"], arguments)
    return None


def read_arguments(text: str) -> tuple[dict[str, Any], bool]:
    """The arguments of a call as an object, and whether they are complete; if they were cut off, those so far.

    A model may write NaN, which JSON lacks, or a value that is not an object.
    """
    is_whole = True
    try:
        found = json.loads(text, parse_constant=str)
    except ValueError:
        is_whole, found = False, from_json(text or "{}", allow_partial="trailing-strings")
    return found if isinstance(found, dict) else {"arguments": found}, is_whole
