"""Fields of bodies: their types and ranges, for the routes of every API. Never imports MLX.

Ranges exclude what would make logits infinite, fail while a token is sampled, or cost memory or time without bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runner.serve.request import ApiError

MAX_MESSAGES = 10_000  # templates take time for each

Count = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=10_000)]
StopWord = Annotated[str, Field(min_length=1, max_length=1000)]


class Checked(BaseModel):
    """A body or a part of one. Values are not converted between types, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> Self:
        """Check all fields. ApiError: one is missing or wrong."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ApiError.of_validation(error.errors()) from error


def body_schema(kind: type[BaseModel], path: str) -> dict[str, Any]:
    """The OpenAPI entry of the body at `path`, for a route that reads its body itself."""
    at = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = kind.model_json_schema(ref_template=at + "/$defs/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
