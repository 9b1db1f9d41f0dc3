r"""Tool calls as models write them, read by the schemas of their functions.

    reader_of    reads the reply to a request: text, reasoning and calls
    CallReader   reads the calls: those in tags itself, all others with mlx-lm's parser
    argument_of  the value of an argument that stands between tags

In the forms with tags, each argument stands between tags of its own, and nothing but the schema tells a text from
JSON. mlx-lm's parsers of these forms strip texts, turn `yes` into false and `null` into None, and lose a call whose
integer is none. Here:

  TC1  A value that a chat template wrote between tags is read as this value, if the schema allows its type. Where the
       schema allows texts and other types, a text that reads like such a value is read as the value.
  TC2  What is not of an allowed type keeps its text, character by character.
  TC3  A text is read as a whole: a call is of no argument less than the text has, or it is an error.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from runner.script.conversation import tool_call
from runner.serve import mlx_lm_border
from runner.serve.schemas import KINDS, ArgumentSchema

#: Of Python, which some templates write in place of JSON.
_WORDS = {"True": True, "False": False, "None": None}
_NOTHING = object()
ANYTHING = ArgumentSchema(frozenset(KINDS.values()))


class _Tags(NamedTuple):
    """Patterns of a call, with `name` and `body`, and of an argument, with `key` and, as the last group, the value."""

    call: re.Pattern[str]
    argument: re.Pattern[str]


def _tags(call: str, argument: str) -> _Tags:
    return _Tags(*(re.compile(rf"\s*{each}", re.DOTALL) for each in (call, argument)))


def _arg_tags(prefix: str) -> _Tags:
    """Of GLM and LongCat. Some of their replies have a line break as a backslash and an n."""
    key, value = rf"<{prefix}arg_key>(?P<key>.*?)</{prefix}arg_key>", rf"<{prefix}arg_value>(?P<value>.*?)"
    blank = r"(?:\\n|\s)*"
    return _tags(
        rf"(?P<name>[^\s<{{]+){blank}(?P<body>(?:<{prefix}arg_key>.*)?)\Z",
        rf"{key}{blank}{value}</{prefix}arg_value>{blank}(?=<{prefix}arg_key>|\Z)",
    )


_QUOTED = r"""["']?(?P<{}>[^"'<>]+)["']?\s*>"""
#: By the name of mlx-lm's parser. A tag that ends a value counts only where the next one begins, or the call ends.
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
_ALSO_OTHERWISE = ("glm47",)  # a name and then anything, which mlx-lm's parser reads


def json_calls(text: str, _tools: Any = None) -> list[dict[str, Any]]:
    """Calls as JSON, one behind the other. ValueError: something else is there, too."""
    decoder, calls, text = json.JSONDecoder(), [], text.strip()
    while text:
        call, end = decoder.raw_decode(text)
        calls.append(call)
        text = text[end:].strip()
    return calls


def read_calls(
    parser: Callable[[str, Any], Any] | None, arguments: Mapping[str, Mapping[str, ArgumentSchema]], text: str
) -> list[dict[str, Any]]:
    """The calls in what a model wrote between the marks of a call, in OpenAI's form.

    Any exception: the text cannot be read, as a whole or in part.

    Args:
        parser: mlx-lm's, of the model's form; None: the model has none.
        arguments: of each function.
    """
    return [*map(_in_openai_form, _parsed(parser, arguments, text))]


def _parsed(
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
        # Its parser cuts lists, objects and texts with braces. They are written as Gemma 4 does, with other quotes.
        with suppress(ValueError):
            return _listed(mlx_lm_border.parse_gemma4(text.replace("<escape>", '<|"|>')))
        if not {"{", "["}.isdisjoint(text.partition("{")[2]):
            _refuse("a list or an object cannot be read")
    if parser is None:
        _refuse("this model has no form for calls")
    return _listed(parser(text, None))


def _call(name: str, body: str, tags: _Tags, arguments: Mapping[str, Mapping[str, ArgumentSchema]]) -> dict[str, Any]:
    known = arguments.get(name, {})
    pairs = [(found["key"].strip(), found[found.lastgroup or "value"]) for found in _matches(tags.argument, body)]
    return {"name": name, "arguments": {key: argument_of(value, known.get(key, ANYTHING)) for key, value in pairs}}


def _listed(calls: Any) -> list[dict[str, Any]]:
    return calls if isinstance(calls, list) else [calls]


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Matches that follow one another up to the end. ValueError: something else is there, too."""
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
    # A text is taken for another value only if it is the value's own. Without a type, a number may be that of a house.
    is_open = kinds == ANYTHING.kinds and kind != "null"
    return value if text.strip() == json.dumps(value) and not is_open else text


def _value(text: str) -> Any:
    """The value of a text in JSON or in words of Python; _NOTHING: it has none."""
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
