"""ApiError: what is wrong with a request, before anything of a reply was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ApiError(Exception):
    """Becomes an error body in the form of the API that was asked.

    Args:
        status: HTTP's, 4xx or 5xx.
        message: one line for whoever asked: what was found, what was wanted.
        kind: OpenAI's `type`; by default it follows from the status.
        param: the field that is wrong.
        retry_after_s: becomes the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = retry_after_s

    def in_openai_form(self) -> dict[str, Any]:
        """The body of an error, or the data of a stream's last event, in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def in_anthropic_form(self) -> dict[str, Any]:
        """The same in Anthropic's form, which has types of its own and names the field in the message."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = f"{self.param}: {self.message}" if self.param else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}

    @classmethod
    def of_validation(cls, errors: Sequence[Any]) -> ApiError:
        """The first of pydantic's findings about a request, naming the field."""
        first = errors[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return cls(400, first["msg"].removeprefix("Value error, "), param=field or None)


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
