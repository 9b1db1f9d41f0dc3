"""The application: the routes of four APIs and of the cache (admin.py), and around them middleware.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from radixcache import __version__
from runner.serve.admin import cache_routes
from runner.serve.anthropic import anthropic_routes
from runner.serve.metrics import Watch
from runner.serve.middleware import Access, BodyLimit, Frame, Keyring, OnHttp, error_response
from runner.serve.ollama import ollama_routes
from runner.serve.openai import openai_routes
from runner.serve.options import ServeOptions
from runner.serve.request import ApiError
from runner.serve.responses import ResponseMemory, responses_routes
from runner.serve.service import ReplyBackend, Service

if TYPE_CHECKING:
    from runner.serve.scheduler import Scheduler


def make_app(options: ServeOptions, scheduler: Scheduler, watch: Watch) -> FastAPI:
    """Return the application. `scheduler` need not have started. KeyFileError: a file of keys cannot be used."""
    memory = ResponseMemory()
    cache = cache_routes(scheduler, watch, options, memory)
    return assemble_app(options, scheduler, cache, watch.on_http, memory)


def assemble_app(
    options: ServeOptions, backend: ReplyBackend, cache: APIRouter, count: OnHttp, memory: ResponseMemory
) -> FastAPI:
    """Return the application around any backend. `count` hears of each HTTP request, as Watch.on_http."""
    content: dict[str, Any] = {"content": {"application/json": {}}}
    wrong = {"description": "What is wrong with the request, in the form of the API that was asked.", **content}
    gone = {"description": "The server is stopping, or has failed.", **content}
    hidden: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="radixcache", version=__version__, responses={"4XX": wrong, 503: gone}, **hidden)
    service = Service(backend, timeout_s=options.request_timeout_s)
    app.include_router(openai_routes(service, options))
    app.include_router(responses_routes(service, options, memory))
    app.include_router(anthropic_routes(service, options))
    app.include_router(ollama_routes(service, options))
    app.include_router(cache)
    return guard(app, options, count)


def guard(app: FastAPI, options: ServeOptions, count: OnHttp) -> FastAPI:
    keyring = Keyring(options.api_keys, options.admin_key_file, is_namespaced=options.namespace_by == "key")
    # The last one is outermost.
    app.add_middleware(BodyLimit, max_mib=options.max_body_mib)
    known = {"allowed_hosts": options.allowed_hosts, "allowed_origins": options.allowed_origins}
    app.add_middleware(Access, keyring=keyring, host=options.host, **known)
    app.add_middleware(Frame, allowed_origins=options.allowed_origins, count=count)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    return app


def _refuse_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    message, headers = f"{error.detail}: {request.method} {request.url.path}", dict(error.headers or {})
    operations = request.app.openapi()["paths"].get(getattr(request.scope.get("route"), "path_format", ""), {})
    if error.status_code == 405 and operations:
        headers["Allow"] = ", ".join(map(str.upper, operations))  # of all routes of the path, not of the first one
    for api in ("/v1/", "/api/"):
        if error.status_code == 404 and request.url.path.startswith(api):  # such as embeddings
            paths = sorted(path for path in request.app.openapi()["paths"] if path.startswith(api))
            message += f". This server has {', '.join(paths)}"
    return error_response(request.scope, ApiError(error.status_code, message), headers)


def _refuse_body(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    return error_response(request.scope, ApiError.of_validation(error.errors()))
