"""The application: the routes of every API, and what is around them.

Frame       CORS, errors, a count          runner.serve.middleware
Access      names, keys, the admin         runner.serve.middleware
BodyLimit   whole and small bodies         runner.serve.middleware
routes      OpenAI's, Anthropic's, the cache's
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from radixcache import __version__
from runner.serve.admin import cache_routes
from runner.serve.anthropic import anthropic_routes
from runner.serve.metrics import Watch
from runner.serve.middleware import Access, BodyLimit, Frame, Keyring, error_response
from runner.serve.openai import openai_routes
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError, Request
from runner.serve.service import Runs, Service

if TYPE_CHECKING:
    from runner.serve.scheduler import Running


def make_app(options: ServeOptions, running: Running, watch: Watch) -> FastAPI:
    """Return the application. `running` need not have started.

    Raises:
        KeyFileError: a file of keys cannot be used.
    """
    return assembled(options, running, running.count_tokens, cache_routes(running, watch, options), watch.http)


def assembled(
    options: ServeOptions,
    runs: Runs,
    tokens_of: Callable[[Request], Coroutine[Any, Any, int]],
    cache: APIRouter,
    count: Callable[[str, int], None],
) -> FastAPI:
    """Return the application around whoever answers.

    Args:
        tokens_of: how many tokens the prompt of a request has; may raise ApiError.
        cache: the routes of the cache.
        count: Frame's.

    Raises:
        KeyFileError: a file of keys cannot be used.
    """
    app = FastAPI(
        title="radixcache",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            "4XX": {"description": "What is wrong with the request, in the form of the API that was asked."},
            503: {"description": "The server is stopping, or has failed."},
        },
    )
    service = Service(runs, timeout_s=options.request_timeout_s)
    app.include_router(openai_routes(service, options))
    app.include_router(anthropic_routes(service, options, tokens_of))
    app.include_router(cache)
    return guard(app, options, count)


def guard(app: FastAPI, options: ServeOptions, count: Callable[[str, int], None]) -> FastAPI:
    """Put around an application's routes what they rely on; returns it. `count` is Frame's."""
    keyring = Keyring(options.api_keys, options.admin_key_file, is_namespaced=options.namespace_by == "key")
    # What is added last is outermost.
    app.add_middleware(BodyLimit, max_mib=options.max_body_mib)
    app.add_middleware(Access, keyring=keyring, host=options.host)
    app.add_middleware(Frame, allowed_origins=options.allowed_origins, count=count)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _refused(request: HttpRequest, error: Exception) -> Response:
    """What the framework refuses: no such route, or not with this method."""
    assert isinstance(error, HTTPException), error
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(request.scope, ApiError(error.status_code, message), error.headers)


def _invalid(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    return error_response(request.scope, ApiError.of_validation(error.errors()))
