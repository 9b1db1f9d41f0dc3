"""Schemas: JSON schemas of requests, rewritten for llguidance at a bounded cost. Never imports MLX.

    schema_of, arguments_schema, checked_schema   a schema as JSON, for a grammar
    kinds_of, named_values, resolve              which values a schema allows

llguidance refuses keywords that it lacks. Keywords without effect are removed, and these are replaced if possible:

    propertyNames              by properties if it lists names, by patternProperties if it has a pattern
    unevaluatedProperties      by additionalProperties, if no other schema evaluates properties; also unevaluatedItems
    oneOf                      by anyOf, if no value can match two branches
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import combinations, product
from typing import Any, NamedTuple

from runner.serve.request import ApiError, Constraint

MARGIN = 1e-9  # relative distance to an exclusive bound
MAX_SCHEMA_CHARACTERS, MAX_STRING_CHARACTERS = 100_000, 10_000
MAX_OPTIONAL = 400  # optional properties of an object: each may come next
MAX_MULTIPLE = 10_000  # product of all `multipleOf` of a grammar: the automaton has as many states
MAX_HOPS = 8  # how many references, or choices inside choices, are followed
MAX_LEVELS = 250  # depth of nested schemas and references
MAX_COMPARED = 20_000  # comparisons for one schema, to see whether branches of `oneOf` exclude each other
#: White space between the parts of JSON is limited: a model could write it without end.
JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ",[ \\n]{0,20}"}
#: Formats that are enforced. Other formats are ignored, as JSON Schema allows.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
VALUES = {"const", "enum", "default", "example", "examples"}  # keywords whose values are not schemas
MAPS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}  # of names to schemas
#: Keywords with schemas that may evaluate more properties or items of the same value.
APPLICATORS = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains"}
ANNOTATIONS = {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
#: Patterns of libraries that use look-ahead, which llguidance lacks, and patterns without it for the same texts.
PATTERNS = {
    # email addresses of early versions of zod 4
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    )
}
#: Patterns for names of properties in these formats: llguidance has no formats for names.
NAMES = {
    "date": (
        r"^[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))$"
    ),
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}
NAMES["date-time"] = NAMES["date"][:-1] + r"T([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ$"
KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
#: Names of types that are not in JSON Schema, but in some tools that were written by hand.
ALIASES = {"bool": "boolean", "dict": "object", "float": "number", "int": "integer", "list": "array", "str": "string"}
ANY: Mapping[str, Any] = {}  # a schema that allows any value
SCALARS = frozenset(("boolean", "integer", "number", "null"))


def schema_of(constraint: Constraint) -> str:
    return checked_schema(constraint.schema, constraint.at)


def arguments_schema(function: Mapping[str, Any], index: int) -> str:
    """The schema of a function's arguments; a function without parameters may have no arguments."""
    parameters, at = function.get("parameters") or {"properties": {}, "additionalProperties": False}, schema_at(index)
    if not isinstance(parameters, dict):
        raise ApiError(400, "wanted a JSON schema.", param=at)
    return checked_schema({"type": "object", **parameters}, at)


def schema_at(index: int) -> str:
    return f"tools.{index}.function.parameters"


def checked_schema(schema: Any, at: str) -> str:
    """A schema for llguidance, as JSON. ApiError: the schema exceeds a limit of its cost."""
    length = 0
    for part in json.JSONEncoder().iterencode(schema):  # in parts, to stop when it is too long
        length += len(part)
        require_most(length, MAX_SCHEMA_CHARACTERS, "its length in characters", at)
    require_few_multiples([schema], at)
    _require_short_chains(schema, at)
    found = _Restatement(schema, at).restate(schema)
    return json.dumps({**found, "x-guidance": JSON_STYLE} if isinstance(found, dict) else found)


def require_few_multiples(schemas: Iterable[Any], at: str) -> None:
    product = 1
    for each in {each for schema in schemas for each in _multiples(schema)}:
        require_most(
            product := product * each, MAX_MULTIPLE, "multipleOf", at
        )  # at each step: the product of all may have millions of digits


def _multiples(node: Any) -> Iterator[int]:
    """Each `multipleOf` as a whole number: its digits without the decimal point."""
    for key, each in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "multipleOf" and isinstance(each, int | float) and each > 0:
            digits, exponent = Decimal(str(each)).normalize().as_tuple()[1:]
            yield int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        else:
            yield from _multiples(each)


def _require_short_chains(root: Any, at: str) -> None:
    """Bound the depth of schemas, references included: llguidance recurses for each level."""
    levels: dict[int, int] = {}  # below each node, by its id; 0 while they are counted

    def measure(node: Any, depth: int) -> int:
        require_most(depth, MAX_LEVELS, "the levels of its schemas and references", at)
        if id(node) in levels:
            require_most(depth + levels[id(node)], MAX_LEVELS, "the levels of its schemas and references", at)
            return levels[id(node)]
        levels[id(node)] = most = 0
        for each in _schemas_in(node, root):
            most = max(most, 1 + measure(each, depth + 1))
        levels[id(node)] = most
        return most

    measure(root, 0)


def _schemas_in(node: Any, root: Any) -> list[dict[str, Any]]:
    """The schemas inside a schema, and the schema that it refers to."""
    found: list[Any] = []
    for key, each in node.items() if isinstance(node, dict) else ():
        if key == "$ref":
            found.append(resolve(node, root, 1))
        elif key not in VALUES:
            found += each if isinstance(each, list) else each.values() if _is_map(key, each) else [each]
    return [each for each in found if isinstance(each, dict)]


def _is_map(key: str, value: Any) -> bool:
    return key in MAPS and isinstance(value, dict)


class _Restatement:
    """Restates one schema, at a bounded cost."""

    def __init__(self, root: Any, at: str) -> None:
        self._root, self._at = root, at
        self._left = MAX_COMPARED
        self._kinds: dict[int, frozenset[str]] = {}  # by the id of a node, like the next
        self._values: dict[int, frozenset[str] | None] = {}

    def restate(self, node: Any) -> Any:
        """A node with keywords that llguidance has. ApiError: the node exceeds a limit of its cost."""
        if isinstance(node, list):
            return [*map(self.restate, node)]
        if not isinstance(node, dict):
            return node
        if node.get("not") in ({}, True) and node is not self._root:
            return False
        optional = len(_object(node, "properties")) - len(_list(node, "required"))
        require_most(optional, MAX_OPTIONAL, "properties, the number of optional ones", self._at)
        for key in ("const", "enum"):
            longest = max(map(len, _texts(node.get(key))), default=0)
            require_most(longest, MAX_STRING_CHARACTERS, f"{key}, in characters", self._at)
        checked: dict[str, Any] = {}
        for key, each in self._with_known_keywords(_with_inclusive_bounds(node)).items():
            if _is_map(key, each):
                checked[key] = {name: self.restate(one) for name, one in each.items()}
            elif key == "pattern" and isinstance(each, str):
                checked[key] = PATTERNS.get(each, each)
            elif key != "x-guidance" and (key != "format" or each in FORMATS):
                checked[key] = each if key in VALUES else self.restate(each)
        return checked

    def _with_known_keywords(self, node: dict[str, Any]) -> dict[str, Any]:
        """The node without keywords that have no effect. Some keywords that llguidance lacks are replaced."""
        changed = {**node}
        if changed.get("uniqueItems") is False:
            del changed["uniqueItems"]
        for key, name in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in node and (node[key] in (True, {}) or self._evaluates_all(node, name)):
                del changed[key]
            elif key in node and APPLICATORS.isdisjoint(node):
                changed[name] = changed.pop(key)
        if "propertyNames" in node:
            changed = self._with_names(changed)
        if branches := self._parted(node):
            choices = [{"anyOf": each} for each in (branches, changed.pop("anyOf", None)) if each is not None]
            del changed["oneOf"]
            changed |= choices[0] if len(choices) == 1 else {"allOf": [*_list(changed, "allOf"), *choices]}
        return changed

    def _evaluates_all(self, node: Any, keyword: str, hops: int = 0) -> bool:
        """Whether a schema evaluates all properties or items: it, or a schema of its `allOf`, has the keyword."""
        node = resolve(node, self._root)
        self._left -= 1
        if keyword in node or hops == MAX_HOPS or self._left < 0:
            return keyword in node
        return any(self._evaluates_all(each, keyword, hops + 1) for each in _list(node, "allOf"))

    def _with_names(self, node: dict[str, Any]) -> dict[str, Any]:
        """The node with other keywords in place of `propertyNames`; unchanged if no keywords mean the same."""
        given, value = node["propertyNames"], node.get("additionalProperties", True)
        names = {key: each for key, each in resolve(given, self._root).items() if key not in ANNOTATIONS}
        if given is False or "string" not in kinds_of(given, self._root, self._kinds):
            return node
        rest = {key: each for key, each in node.items() if key != "propertyNames"}
        closed = {**rest, "additionalProperties": False}
        if names.keys() <= {"type"}:
            return rest
        if names.keys() <= {"type", "enum", "const"} and "patternProperties" not in node:
            allowed = (each for each in named_values(given, self._root) if isinstance(each, str))
            return {**closed, "properties": {name: _object(node, "properties").get(name, value) for name in allowed}}
        pattern = names.get("pattern") or NAMES.get(str(names.get("format")))
        if pattern is None and names.keys() <= {"type", "minLength", "maxLength"}:
            pattern = f"^(?s:.{{{names.pop('minLength', 0)},{names.pop('maxLength', '')}}})$"
        is_said = isinstance(pattern, str) and names.keys() <= {"type", "format", "pattern"}
        if not is_said or not {"properties", "patternProperties"}.isdisjoint(node):
            return node
        return {**closed, "patternProperties": {pattern: value}}

    def _parted(self, node: Mapping[str, Any]) -> list[Any]:
        """The branches of `oneOf`, if no value can match two; else none. Some branches get a required property.

        Branches may differ only in an optional property. A value without it may match all, so it becomes required.
        """
        branches = _list(node, "oneOf")
        required: list[set[str]] = [set() for _ in branches]
        for (left, one), (right, other) in combinations(zip(branches, required, strict=True), 2):
            for pair in product(self._leaves(left), self._leaves(right)):
                if (key := self._difference(*pair)) is None:
                    return []
                for each in (one, other) if key else ():
                    each.add(key)
        pairs = zip(branches, required, strict=True)
        return [{"allOf": [each, {"required": sorted(keys)}]} if keys else each for each, keys in pairs]

    def _leaves(self, branch: Any, hops: int = 0) -> Iterator[Mapping[str, Any]]:
        """The branches of a choice, and those of choices inside them. Keywords beside a choice are ignored."""
        node = resolve(branch, self._root)
        inner = _list(node, "anyOf") or _list(node, "oneOf")
        self._left -= 1
        if not inner or hops == MAX_HOPS or self._left < 0:
            yield node
        for each in inner if hops < MAX_HOPS and self._left >= 0 else ():
            yield from self._leaves(each, hops + 1)

    def _difference(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
        """A property that two schemas define with different values. With it, a value matches at most one of them.

        "": no value matches both, with or without it. None: a value may match both, or `MAX_COMPARED` is reached.
        """
        first, second = (_object(each, "properties") for each in (left, right))
        self._left -= 1 + len(first)
        if self._left < 0:
            return None
        kinds = [kinds_of(each, self._root, self._kinds) for each in (left, right)]
        wider = [each | {"integer"} if "number" in each else each for each in kinds]
        if wider[0].isdisjoint(wider[1]) or self._differ(left, right):
            return ""
        if not kinds[0] == kinds[1] == {"object"}:
            return None
        key = next((key for key in first if key in second and self._differ(first[key], second[key])), None)
        needed = [*_list(left, "required"), *_list(right, "required")]
        is_forbidden = _forbids(left, _list(right, "required")) or _forbids(right, _list(left, "required"))
        return "" if is_forbidden or key in needed else key

    def _differ(self, left: Any, right: Any) -> bool:
        """Whether both schemas list all of their values, and have no value in common."""
        first, second = (all_values(each, self._root, self._values) for each in (left, right))
        return first is not None and second is not None and first.isdisjoint(second)


def _object(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []


def _forbids(node: Mapping[str, Any], names: Iterable[Any]) -> bool:
    """Whether a schema forbids one of these properties."""
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    return is_closed and any(name not in _object(node, "properties") for name in names)


def _with_inclusive_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Replace exclusive bounds by bounds just inside them: llguidance allows some numbers that equal the bound."""
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


def require_most(found: float, most: int, of: str, at: str) -> None:
    if found > most:
        raise ApiError(400, f"this schema cannot be enforced: {of}: {found}; at most {most} is enforced.", param=at)


def resolve(schema: Any, root: Any, hops: int = MAX_HOPS) -> Mapping[str, Any]:
    """The schema in `root` that a schema refers to, or the schema itself; empty: it allows any value."""
    for _ in range(hops):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        path, schema = schema["$ref"].removeprefix("#").split("/")[1:], root
        for name in path:
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else ANY


def kinds_of(schema: Any, root: Any, known: dict[int, frozenset[str]] | None = None, hops: int = 0) -> frozenset[str]:
    """The types of JSON that a schema may allow. `known`: results for nodes of `root`, by their ids."""
    known = {} if known is None else known
    node, found = resolve(schema, root), frozenset(KINDS.values())
    if (result := known.get(id(node), found if hops == MAX_HOPS else None)) is not None:
        return result
    known[id(node)] = found  # if the schema refers to itself, that reference allows all types
    if "const" in node or isinstance(node.get("enum"), list):
        found = frozenset(KINDS[type(value)] for value in ([node["const"]] if "const" in node else node["enum"]))
    for name in ("anyOf", "oneOf"):
        if branches := _list(node, name):
            found &= frozenset().union(*(kinds_of(each, root, known, hops + 1) for each in branches))
    for each in _list(node, "allOf"):
        found &= kinds_of(each, root, known, hops + 1)
    declared = node.get("type")
    if isinstance(declared, str | list):
        types = [each for each in ([declared] if isinstance(declared, str) else declared) if isinstance(each, str)]
        found &= {ALIASES.get(each.lower(), each.lower()) for each in types}
    known[id(node)] = found
    return found


def all_values(schema: Any, root: Any, known: dict[int, frozenset[str] | None], hops: int = 0) -> frozenset[str] | None:
    """All values of a schema that lists them, as JSON; None: it may allow others. `known` as in `kinds_of`."""
    node = resolve(schema, root)
    if id(node) not in known and hops < MAX_HOPS:
        known[id(node)] = None
        named = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(named, list):
            known[id(node)] = frozenset(json.dumps(each, sort_keys=True) for each in named)
        elif branches := _list(node, "anyOf") or _list(node, "oneOf"):
            inner = [all_values(each, root, known, hops + 1) for each in branches]
            known[id(node)] = frozenset().union(*filter(None, inner)) if None not in inner else None
    return known.get(id(node))


def named_values(schema: Any, root: Any, seen: set[int] | None = None, hops: int = 0) -> Iterator[Any]:
    """The values that a schema lists; it may allow others."""
    node, seen = resolve(schema, root), set() if seen is None else seen
    if id(node) in seen or hops == MAX_HOPS:
        return
    seen.add(id(node))
    yield from [node["const"]] if "const" in node else _list(node, "enum")
    for each in (*_list(node, "anyOf"), *_list(node, "oneOf"), *_list(node, "allOf")):
        yield from named_values(each, root, seen, hops + 1)


class ArgumentSchema(NamedTuple):
    """What a ReplyReader must know of an argument: the types that it may have, and the texts that its schema lists."""

    kinds: frozenset[str]
    texts: frozenset[str] = frozenset()


def argument_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, ArgumentSchema]]:
    """The schemas of arguments, by the name of the function, then of the argument."""
    found: dict[str, dict[str, ArgumentSchema]] = {}
    for function in (tool["function"] for tool in tools):
        root = function.get("parameters")
        properties = _object(root, "properties") if isinstance(root, dict) else {}
        kinds: dict[int, frozenset[str]] = {}
        found[function["name"]] = {
            key: ArgumentSchema(
                kinds_of(schema, root, kinds),
                frozenset(each for each in named_values(schema, root) if isinstance(each, str)),
            )
            for key, schema in properties.items()
        }
    return found
