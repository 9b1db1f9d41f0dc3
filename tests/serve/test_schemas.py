# ruff: noqa: UP007
# mypy: disable-error-code="valid-type, misc"
"""Schemas as pydantic and zod write them are enforced, or refused by a keyword that no grammar can enforce.

`zod_schemas.jsonl` is what `z.toJSONSchema` of zod 4.6.7 wrote for 300 random models: 75 for each of `io` input and
output, and drafts 2020-12 and 7.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from runner.models.tiny import VOCABULARY_LENGTH, tiny_tokenizer
from runner.serve.grammars import Grammars, Guide
from runner.serve.prompts import RenderedPrompt
from runner.serve.request import ApiError, Constraint, ModelNames, Request

ZOD = Path(__file__).with_name("zod_schemas.jsonl")
TOKENIZER = tiny_tokenizer()
PROMPT = RenderedPrompt([1], (), "normal")
GRAMMARS = Grammars(TOKENIZER, VOCABULARY_LENGTH)


def guide_of(schema: Any) -> Guide:
    messages = [{"role": "user", "content": "?"}]
    return GRAMMARS._guide(Request(ModelNames(), 1, messages=messages, constraint=Constraint(schema)), PROMPT)


def accepts(schema: Any, value: Any) -> bool:
    """Whether a reply may be this value."""
    guide, before = guide_of(schema), None
    for token in [*TOKENIZER.encode(json.dumps(value)), TOKENIZER.eos_token_id]:
        allowed = guide(before)
        if allowed is not None and not allowed[token]:
            return False
        before = token
    return True


WHOLE, TEXT = {"type": "integer"}, {"type": "string"}


def tagged(name: str, values: dict[str, Any], *, is_required: bool = True) -> dict[str, Any]:
    properties = {"kind": values, name: WHOLE}
    return {"type": "object", "properties": properties, "required": ["kind"] * is_required}


DEFS = {"$defs": {"A": tagged("a", {"const": "a"}), "B": tagged("b", {"enum": ["b", "c"]}), "N": TEXT}}
LOOSE = {
    "$defs": {
        name: tagged(name, {"const": name, "default": name}, is_required=False) for name in ("A", "B")
    }
}  # fmt: skip
EITHER = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object", "propertyNames": {}, "additionalProperties": WHOLE}, [{}, {"x": 1}], [{"x": "1"}]),
    ({"type": "object", "propertyNames": TEXT, "additionalProperties": WHOLE}, [{"x": 1}], [{"x": "1"}]),
    ({"type": "object", "propertyNames": {"title": "K", "type": "string"}}, [{"x": 1}], []),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": WHOLE}, [{}, {"y": 1}],
     [{"z": 1}, {"x": "1"}]),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"enum": ["x"]}}, "required": ["x"]},
     [{"x": None}], [{}, {"y": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": WHOLE}, [{"ab": 1}],
     [{"d": 1}, {"a": "1"}]),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    ({"type": "object", "propertyNames": {"format": "date"}}, [{"2026-01-31": 1}], [{"2026-13-01": 1}, {"x": 1}]),
    ({"type": "array", "items": WHOLE, "uniqueItems": False}, [[1, 1]], [["1"]]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False, "unevaluatedProperties": False},
     [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": WHOLE}, [{"b": 1}], [{"b": "1"}]),
    ({"allOf": [{"type": "object", "properties": {"a": {}}, "additionalProperties": False}],
      "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "array", "prefixItems": [WHOLE], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"type": "array", "items": WHOLE, "unevaluatedItems": False}, [[1, 2]], [["1"]]),
    ({**EITHER, **DEFS}, [{"kind": "a", "a": 1}, {"kind": "c"}], [{"kind": "a", "a": "1"}, {"kind": "d"}]),
    ({"anyOf": [EITHER, {"type": "null"}], **DEFS}, [None, {"kind": "b"}], [1]),
    ({"oneOf": [EITHER, {"type": "null"}], **DEFS}, [None, {"kind": "b"}], [1, {"kind": "d"}]),
    ({"oneOf": [*EITHER["oneOf"], {"type": "null"}, WHOLE], **DEFS}, [None, 1, {"kind": "a"}], ["a"]),
    ({"type": "array", "items": EITHER, **DEFS}, [[], [{"kind": "a"}, {"kind": "b"}]], [[{"kind": "e"}]]),
    ({**EITHER, **LOOSE}, [{"kind": "A", "A": 1}, {"kind": "B"}], [{"kind": "C"}, {}]),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 3], [4]),
    ({"oneOf": [{"$ref": "#/$defs/N"}, WHOLE], **DEFS}, ["a", 1], [None]),
    ({"anyOf": [{"required": ["v"]}], **EITHER, **DEFS}, [], [{"kind": "a"}]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": WHOLE}}, [{"b": 1}], [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[json.dumps(each[0])[:80] for each in CASES])
def test_a_keyword_that_can_be_said_otherwise_is_enforced(schema: Any, good: list[Any], bad: list[Any]) -> None:
    for value in (*good, *bad):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert accepts(schema, value) == (value in good), value


REFUSED = [
    ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf: a value may be of several branches"),
    ({"oneOf": [{"required": ["a"], "type": "object"}, {"required": ["b"], "type": "object"}]}, "oneOf: a value may"),
    ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
    ({"type": "object", "propertyNames": False}, "propertyNames"),
    ({"$ref": "#/$defs/A", "unevaluatedProperties": False, **DEFS}, "unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": WHOLE}, "contains"),
    # llguidance ends the process at some two thousand levels.
    ({"$ref": "#/$defs/0", "$defs": {f"{at}": {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}]} for at in range(1500)}},
     "the levels of its schemas and references: 251; at most 250"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_no_grammar_can_enforce_is_refused_and_no_option_is_named(schema: Any, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        guide_of(schema)
    assert "coerce" not in refused.value.message


def keywords(node: Any) -> Iterator[str]:
    for key, each in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield str(key)
        yield from keywords(each)


def require_enforced(schemas: list[Any], most_refused: int, reasons: dict[str, str]) -> None:
    """All but a few are enforced; others are refused for a reason, and have its keyword."""
    refused = []
    for schema in schemas:
        try:
            guide_of(schema)
        except ApiError as error:
            refused.append((schema, error.message))
    for schema, message in refused:
        reason = next((each for each in reasons if each in message), None)
        assert reason is not None, (message, schema)
        assert reasons[reason] in keywords(schema)
    assert len(refused) <= most_refused


def require_valid(schemas: list[Any], seed: int) -> None:
    """Random replies that end are of their schemas."""
    draws, ended = np.random.default_rng(seed), 0
    for schema in schemas:
        guide, tokens = guide_of(schema), list[int]()
        while len(tokens) < 200 and (not tokens or tokens[-1] != TOKENIZER.eos_token_id):
            allowed = guide(tokens[-1] if tokens else None)
            assert allowed is not None
            tokens.append(int(draws.choice(np.flatnonzero(allowed))))
        if tokens[-1] == TOKENIZER.eos_token_id:
            jsonschema.validate(
                json.loads(TOKENIZER.decode(tokens[:-1])), schema, jsonschema.validators.validator_for(schema)
            )
            ended += 1
    assert ended >= len(schemas) / 10


def test_what_zod_writes_is_enforced_unless_branches_overlap_or_there_is_no_value() -> None:
    schemas = [json.loads(line) for line in ZOD.read_text(encoding="utf-8").splitlines()]
    assert len(schemas) == 300
    require_enforced(schemas, 12, {"oneOf: a value may be of several branches": "oneOf", '"not"': "not"})
    marked = [each for each in schemas if {"propertyNames", "oneOf"} & {*keywords(each)}]
    require_valid([each for each in marked if is_enforced(each)], 1)


def is_enforced(schema: Any) -> bool:
    try:
        return bool(guide_of(schema))
    except ApiError:
        return False


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    name: str


class Chain(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: int
    next: Chain | None = None


PET: Any = Annotated[Cat | Dog, Field(discriminator="kind")]
LEAVES: tuple[Any, ...] = (
    str, int, float, bool, None, Any, date, datetime, timedelta, UUID, Decimal, Color, Literal["a", "b c"],
    Literal[1, "x", None], Annotated[str, Field(pattern="^[a-z]{2,4}$")], Annotated[int, Field(gt=0, lt=9)],
    Annotated[float, Field(ge=0, le=1)], Annotated[int, Field(multiple_of=5)], Cat, Dog, Chain, PET, PET | None,
)  # fmt: skip
KEYS: tuple[Any, ...] = (
    str, int, Literal["x", "y"], Color, date, datetime, UUID, Annotated[str, Field(pattern="^[a-z]+$")],
    Annotated[str, Field(min_length=2, max_length=3)],
)  # fmt: skip


def random_type(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(LEAVES)
    one, other = random_type(draw, depth - 1), random_type(draw, depth - 1)
    short = Annotated[list[one], Field(min_length=1, max_length=2)]
    kinds = [
        dict[draw.choice(KEYS), one],
        list[one],
        short,
        tuple[one, other],
        Union[one, None],
        Union[one, other],
        set[str],
    ]
    return draw.choice([random_model(draw, depth), *kinds])


def random_model(draw: random.Random, depth: int) -> Any:
    names = draw.sample(["id", "name", "kind", "tags", "at"], draw.randint(1, 4))
    types = {name: random_type(draw, depth - 1) for name in names}
    fields: dict[str, Any] = {
        name: (Union[each, None], None) if draw.random() < 0.2 else (each, ...) for name, each in types.items()
    }
    extra: Any = draw.choice(["ignore", "forbid", "allow"])
    return create_model("Record", __config__=ConfigDict(extra=extra), **fields)


def test_what_pydantic_writes_is_enforced_unless_items_must_be_unique() -> None:
    schemas = []
    for seed in range(300):
        draw = random.Random(seed)
        mode: Any = draw.choice(["validation", "serialization"])
        schemas.append(TypeAdapter(random_type(draw, 3)).json_schema(mode=mode))
    require_enforced(schemas, 80, {'"uniqueItems"': "uniqueItems"})
    marked = [each for each in schemas if {"propertyNames", "oneOf"} & {*keywords(each)}]
    require_valid([each for each in marked if is_enforced(each)], 2)
