"""ApiError: what is wrong with a request, before anything of a reply was sent."""

from __future__ import annotations


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


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
