"""Rules: a grammar of llguidance for tool calls, in the form that a model's template has. Never imports MLX.

    call_rules    rules of calls; CALL_FORMS has the forms

In some forms, the arguments of a call are one JSON object. In the others, each argument has its own marks. Between them
a text is written without quotes, any other value as JSON. reply_reader.py reads these forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import llguidance

from runner.serve.request import ApiError, Request
from runner.serve.schemas import (
    MAX_HOPS,
    SCALARS,
    arguments_schema,
    checked_schema,
    kinds_of,
    require_few_multiples,
    require_most,
    resolve,
    schema_at,
)

Text: TypeAlias = str | tuple[str, ...]  # one text, or all texts that match each of these terms
MAX_TOOLS_CHARACTERS = 1_000_000  # of the rules of all tools that may be called
#: Keywords for all arguments of a call together; a form that writes them one by one cannot enforce these.
OF_OBJECTS = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "minProperties",
    "maxProperties", "propertyNames",
)  # fmt: skip


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls, in Lark, so that mlx-lm's parser reads them.

    In the terms, NAME is a function's name, QUOTED this name as a JSON string, KEY an argument's name, ARGUMENTS all
    arguments, JSON_CALL a call as JSON, NL an optional line break.

    Attributes:
        call: the terms of one call.
        open, close: terms before an argument's value, and the text after it; empty: all arguments are one JSON object.
        begin, between, end: terms before all calls, between two calls, and after all.
        comma: terms between two arguments.
        quote: the quotation mark before and after a text.
        has_texts: an argument that may be a text is written as a plain text; False: texts are JSON, too.
        values: how other arguments are written: as JSON, as JSON without lists and objects, or as Gemma 4 does.
        marks: strings that no text may contain, besides `close` and the end of a call.
        names, keys: patterns of the names of functions and of arguments that the parser can read.
        bare: terms for a call of a function without required arguments; empty: as `call`.
    """

    call: str
    open: str = ""
    close: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    comma: str = ""
    quote: str = ""
    has_texts: bool = True
    values: Literal["json", "flat", "gemma4"] = "json"
    marks: tuple[str, ...] = ()
    names: str = r"[\w.-]+"
    keys: str = r"[\w.-]+"
    bare: str = ""


#: By the name of mlx-lm's parser. Source: mlx_lm.tool_parsers 0.32.2.
CALL_FORMS = {
    "json_tools": CallForm('"<tool_call>" NL JSON_CALL NL "</tool_call>"', between="NL", names=".+"),
    "mistral": CallForm("JSON_CALL", begin='"[TOOL_CALLS]" " "? "["', between='", "', end='"]"', names=".+"),
    "mistral with [ARGS]": CallForm('"[TOOL_CALLS]" NAME "[ARGS]" ARGUMENTS'),
    "kimi_k2": CallForm(
        '"<|tool_call_begin|>" "functions." NAME ":" /[0-9]{1,3}/ "<|tool_call_argument_begin|>" ARGUMENTS '
        '"<|tool_call_end|>"',
        begin='"<|tool_calls_section_begin|>"',
        end='"<|tool_calls_section_end|>"',
    ),
    "qwen3_coder": CallForm(
        r'"<tool_call>\n<function=" NAME ">\n" ARGUMENTS "</function>\n</tool_call>"',
        r'"<parameter=" KEY ">\n"',
        "\n</parameter>\n",
        between="NL",
        marks=("</parameter>",),
    ),
    "glm47": CallForm(
        '"<tool_call>" NAME NL ARGUMENTS NL "</tool_call>"',
        '"<arg_key>" KEY "</arg_key>" NL "<arg_value>"',
        "</arg_value>",
        between="NL",
        comma="NL",
    ),
    "longcat": CallForm(
        '"<longcat_tool_call>" NAME NL ARGUMENTS NL "</longcat_tool_call>"',
        '"<longcat_arg_key>" KEY "</longcat_arg_key>" NL "<longcat_arg_value>"',
        "</longcat_arg_value>",
        between="NL",
        comma="NL",
        bare='"<longcat_tool_call>" JSON_CALL "</longcat_tool_call>"',
    ),
    "minimax_m2": CallForm(
        r'"<invoke name=\"" NAME "\">\n" ARGUMENTS "</invoke>\n"',
        r'"<parameter name=\"" KEY "\">"',
        "</parameter>\n",
        begin=r'"<minimax:tool_call>\n"',
        end='"</minimax:tool_call>"',
        marks=("</parameter>", "</invoke>"),
    ),
    "minicpm5": CallForm(
        r'"<function name=\"" NAME "\">" ARGUMENTS "</function>"',
        r'"<param name=\"" KEY "\">"',
        "</param>",
        between="NL",
        marks=("<![CDATA[",),
    ),
    "pythonic": CallForm(
        'NAME "(" ARGUMENTS ")"',
        'KEY "="',
        begin='"<|tool_call_start|>" "["',
        between='", "',
        end='"]" "<|tool_call_end|>"',
        comma='", "',
        has_texts=False,
        names=r"[\w.]+",
        keys=r"\w+",
    ),
    "function_gemma": CallForm(
        '"<start_function_call>" "call:" NAME "{" ARGUMENTS "}" "<end_function_call>"',
        'KEY ":"',
        comma='","',
        quote="<escape>",
        values="flat",
        marks=("}",),
        names=r"\w+",
        keys=r"\w+",
    ),
    "gemma4": CallForm(
        '"<|tool_call>" "call:" NAME "{" ARGUMENTS "}" "<tool_call|>"',
        'KEY ":"',
        comma='","',
        quote='<|"|>',
        values="gemma4",
        names=r"[\w-]+",
        keys=r"\w+",
    ),
}
#: For models without a form for calls: the reply has only calls, one in each line.
PLAIN = CallForm("JSON_CALL", between='"\\n"', names=".+")
JSON_CALL = r'"{\"name\": " QUOTED ", \"arguments\": " ARGUMENTS "}"'
#: For each type, patterns of texts that are read as a value of this type if a schema allows it.
_READ_AS = {
    "null": r"\s*null\s*", "boolean": r"\s*(true|false)\s*", "array": r"\s*\[(?s:.*)", "object": r"\s*\{(?s:.*)",
    "integer": r"\s*-?[0-9]+\s*", "number": r"\s*-?[0-9][0-9.eE+-]*\s*",
}  # fmt: skip
_TERM = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|\S+')
_MARK = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")  # text that may be one special token


class _CallRules:
    """Makes the rules of calls in one form."""

    def __init__(self, form: CallForm, tokenizer: Any, own: llguidance.LLTokenizer) -> None:
        self._form, self._tokenizer, self._own = form, tokenizer, own
        self._end: str = tokenizer.tool_call_end or ""
        self.rules: list[str] = []
        self._characters = 0  # of all rules
        self._at = ""
        # For the current function:
        self._met: dict[str, str] = {}  # rules of referenced schemas, which may refer to themselves
        self._kinds: dict[int, frozenset[str]] = {}
        self._allowed: dict[int, tuple[Text, ...]] = {}

    def call(self, function: dict[str, Any], index: int) -> str:
        """Add rules for calls of a function; return the name of the last. ApiError: the form cannot write the calls."""
        name, self._at = function["name"], schema_at(index)
        whole, form = arguments_schema(function, index), self._form
        if not re.fullmatch(form.names, name, re.DOTALL):
            self._refuse(f"the name {name!r}")
        parameters = json.loads(whole)
        self._met, self._kinds, self._allowed = {}, {}, {}
        is_bare = bool(form.bare) and not parameters.get("required")
        if is_bare or not form.open:
            arguments = f"%json {whole}"
        elif keyword := next((each for each in OF_OBJECTS if each in parameters), ""):
            self._refuse(keyword)
        else:
            arguments = self._members(parameters, parameters)
        words = {"NAME": self._literal(name), "QUOTED": self._literal(json.dumps(name))}
        return self._rule(self.terms(form.bare if is_bare else form.call, ARGUMENTS=self._rule(arguments), **words))

    def terms(self, terms: str, **words: str) -> str:
        """The terms of a form, with `words` replaced by their values, and special tokens by their ids."""
        words = {"NL": '"\\n"?', **words}
        parts = _TERM.findall(terms.replace("JSON_CALL", JSON_CALL))
        return " ".join(self._literal(json.loads(part)) if part[0] == '"' else words.get(part, part) for part in parts)

    def _rule(self, body: str) -> str:
        self._characters += len(body)
        require_most(self._characters, MAX_TOOLS_CHARACTERS, "the length of all schemas in characters", "tools")
        self.rules.append(f"rule_{len(self.rules)}: {body}")
        return f"rule_{len(self.rules) - 1}"

    def _refuse(self, what: str) -> NoReturn:
        message = f"a call cannot be required: {what} cannot be enforced in this model's format for calls."
        raise ApiError(400, message, param=self._at)

    def _literal(self, text: str) -> str:
        return " ".join(self._literals(text))

    def _literals(self, text: str) -> list[str]:
        """The terms of a text: the ids of special tokens, and the texts between them in quotes."""
        terms, plain = [], ""
        for piece in _MARK.split(text):
            ids = self._tokenizer.encode(piece, add_special_tokens=False) if _MARK.fullmatch(piece) else []
            if len(ids) == 1 and self._own.is_special_token(ids[0]):
                terms += [json.dumps(plain, ensure_ascii=False)] * bool(plain) + [f"<[{ids[0]}]>"]
                plain = ""
            else:
                plain += piece
        return terms + [json.dumps(plain, ensure_ascii=False)] * bool(plain)

    def _members(self, node: Mapping[str, Any], root: Any) -> str:
        """The rule of a function's arguments, or of an object's properties, in their order."""
        properties, required = dict(node.get("properties") or {}), node.get("required") or ()
        written = []
        for key, schema in {**properties, **{key: True for key in required if key not in properties}}.items():
            value = self._value(schema, root) if re.fullmatch(self._form.keys, key) else ""
            if value:
                written.append((self.terms(self._form.open, KEY=self._literal(key)) + f" {value}", key in required))
            elif key in required:
                self._refuse(f"the argument {key!r}")
        comma = self.terms(self._form.comma)
        first = rest = '""'  # rules of the members that follow: if no member is before them, if one is
        for term, is_required in reversed(written):
            first, rest = (
                self._rule(f"{before} {term} {rest}" + ("" if is_required else f" | {others}"))
                for before, others in (("", first), (comma, rest))
            )
        return first

    def _value(self, schema: Any, root: Any) -> str:
        """The rule of a value and the `close` after it; empty: the form cannot write such a value."""
        if not isinstance(schema, dict) or "$ref" not in schema:
            return self._alternatives(schema, root)
        met = str(schema["$ref"])
        if met not in self._met:
            at, self._met[met] = len(self.rules), self._rule("")
            body = self._alternatives(schema, root)
            self.rules[at] += body or '""'
            self._met[met] = self._met[met] if body else ""
        return self._met[met]

    def _alternatives(self, schema: Any, root: Any) -> str:
        form, kinds = self._form, kinds_of(schema, root, self._kinds)
        if form.has_texts and "string" in kinds:
            found = [*self._texts(schema, root, kinds)]
            if "null" in kinds:
                found.append(self._literal("null" + form.close))
        elif form.values == "json" or kinds <= SCALARS:
            found = [f"{self._json(schema, root)} {self._literal(form.close)}"]
        else:
            found = [*self._nested(resolve(schema, root), root, kinds)] if form.values == "gemma4" else []
        return self._rule(" | ".join(found)) if found else ""

    def _json(self, schema: Any, root: Any) -> str:
        named = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self._rule(f"%json {checked_schema({**schema, **named} if isinstance(schema, dict) else {}, self._at)}")

    def _texts(self, schema: Any, root: Any, kinds: frozenset[str]) -> Iterator[str]:
        """Terms of the texts that a schema allows, each with the `close` after it."""
        form = self._form
        after = form.quote + form.close
        for text in texts_of(schema, root, self._allowed):
            if isinstance(text, str):
                yield self._literal(form.quote + text + after)
                continue
            marks = "|".join(
                re.escape(each).replace("/", r"\/") for each in (after.strip(), self._end, *form.marks) if each
            )
            parts = ["/(?s:.*)/", f"~/(?s:.*)({marks})(?s:.*)/", *text]
            if not form.quote:
                parts += [f"~/{pattern}/" for kind, pattern in _READ_AS.items() if kind in kinds]
            closing = self._literals(after)
            is_special = closing[0].startswith("<[")
            name = f"TEXT_{len(self.rules)}"
            # A terminal matches as much as it can, so it must include the mark that ends the text.
            self.rules.append(f"{name}: ({' & '.join(parts)})" + ("" if is_special else f" {closing[0]}"))
            yield " ".join([self._literal(form.quote), name, *closing[0 if is_special else 1 :]])

    def _nested(self, node: Mapping[str, Any], root: Any, kinds: frozenset[str]) -> Iterator[str]:
        """Terms of lists and objects as Gemma 4 writes them: keys without quotes, texts as in `_texts`."""
        if branches := [each for name in ("anyOf", "oneOf", "allOf") for each in node.get(name) or ()]:
            if "allOf" not in node or len(branches) == 1:
                yield from filter(None, (self._value(each, root) for each in branches))
        elif "enum" not in node and "const" not in node:
            if "object" in kinds:
                yield f'"{{" {self._members(node, root)} "}}"'
            if "array" in kinds and (item := self._value(node.get("items", True), root)):
                least, most = node.get("minItems", 0), node.get("maxItems")
                more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else max(0, most - 1)}}}'
                items = '""' if most == 0 else f"{item} {more}"
                yield f'"[" {items} "]"' if least else f'"[" ({items})? "]"'
            if scalars := sorted(kinds & SCALARS):
                yield self._json({**node, "type": scalars}, root)


def texts_of(schema: Any, root: Any, known: dict[int, tuple[Text, ...]], hops: int = 0) -> tuple[Text, ...]:
    """The texts that a schema allows, each once. `known` as in `kinds_of`."""
    node, found = resolve(schema, root), dict[Text, None]()
    if (result := known.get(id(node))) is not None or hops > MAX_HOPS:
        return result or ()
    known[id(node)] = ()  # if the schema refers to itself, that reference adds no texts
    branches = [each for name in ("anyOf", "oneOf", "allOf") for each in node.get(name) or ()]
    if "const" in node or "enum" in node:
        found.update((each, None) for each in (node.get("enum") or [node.get("const")]) if isinstance(each, str))
    elif branches:
        for each in branches if "allOf" not in node or len(branches) == 1 else ():
            found.update(dict.fromkeys(texts_of(each, root, known, hops + 1)))
    elif "string" in kinds_of(node, root):
        parts = []
        if "minLength" in node or "maxLength" in node:
            parts.append(f"/(?s:.{{{node.get('minLength', 0)},{node.get('maxLength', '')}}})/")
        if isinstance(pattern := node.get("pattern"), str):
            has_end = pattern.endswith("$") and not pattern.endswith(r"\$")
            before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if has_end else "(?s:.*)"
            inner = pattern.removeprefix("^")[: -1 if has_end else None]
            parts.append(f"/{llguidance.regex_to_lark(f'{before}({inner}){after}')}/")
        found[tuple(parts)] = None
    known[id(node)] = tuple(found)
    return known[id(node)]


def functions_of(request: Request) -> Iterator[tuple[int, dict[str, Any]]]:
    """The functions that may be called, each with its index in the request's tools."""
    assert request.constraint is not None
    functions = request.constraint.functions
    names = None if functions is None else frozenset(functions)
    for index, tool in enumerate(request.tools or ()):
        if names is None or tool["function"]["name"] in names:
            yield index, tool["function"]


def call_rules(request: Request, tokenizer: Any, own: llguidance.LLTokenizer) -> str:
    """The grammar of a reply with calls, in the form of the model's template. ApiError: it cannot be enforced."""
    parser = getattr(tokenizer.tool_parser, "__module__", "none").rpartition(".")[2]
    name = "mistral with [ARGS]" if parser == "mistral" and "[ARGS]" in tokenizer.get_vocab() else parser
    is_plain = request.has_plain_calls(tokenizer)
    if name not in CALL_FORMS and not is_plain:
        message = f"a call cannot be required: this model's format for calls ({parser}) cannot be enforced."
        raise ApiError(400, message, param="tool_choice")
    form = PLAIN if is_plain else CALL_FORMS[name]
    require_few_multiples((function.get("parameters") for _, function in functions_of(request)), "tools")
    rules = _CallRules(form, tokenizer, own)
    calls = " | ".join(rules.call(function, index) for index, function in functions_of(request))
    begin, between, end = map(rules.terms, (form.begin, form.between, form.end))
    assert request.constraint is not None
    more = "" if request.constraint.is_single else f"({between} any)*"
    return "\n".join([f"start: {begin} any {more} {end}", f"any: {calls}", *rules.rules, ""])
