"""Middleware: what every HTTP request passes before it reaches its route. Pure ASGI; never imports MLX.

    Frame       removes the prefix of a path (see volatile.py), adds CORS headers, writes errors in the form of the API
                that was called, counts requests and logs refusals
    Access      passes or refuses a request by the keys of a Keyring, and finds its tenant
    BodyLimit   passes a request when its whole body is there, and small enough in bytes and in JSON values

  A1  A request over loopback needs a valid key, or a Host header that names this machine or an allowed host. A web page
      whose name resolves to this machine (DNS rebinding) has neither.
  A2  With a key file, every route but /health needs one of its keys or the admin's key.
  A3  The admin's routes (/metrics, /cache and below) need the admin's key if one is set. If none is set, they answer
      only this machine, and nobody if tenants have namespaces.
  A4  The admin's routes refuse pages of another origin, and have no CORS headers.
  A5  Unless all origins are allowed, a page of another origin can change nothing without a successful preflight.
  A6  Request headers are limited in number and size.

Behind a proxy on this machine, every client looks local: set an admin's key there.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serve.request import CLIENT, ApiError
from runner.serve.service import CLIENT_CLOSED_REQUEST, LARGE_BYTES, READERS, require_few_values, to_json
from runner.serve.volatile import MOVES, PREFIX
from runner.text import cut

logger = logging.getLogger(__name__)

OnHttp: TypeAlias = Callable[[str, int, str, str], None]  # see Watch.on_http

MAX_BODIES = 16  # the most memory for bodies, in bodies of the largest size
MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 100
OPEN, PAGE = "/health", "/cache"
REFUSALS_LOGGED, REFUSALS_S = 20, 10  # the most log lines about refused requests in a period; its seconds
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # headers by which a proxy names its client


class KeyFileError(ValueError):
    """A key file cannot be used; the message is one line and shows no key."""


@dataclass(frozen=True)
class Tenant:
    name: str
    namespace: str = ""
    is_admin: bool = False


ANYONE = Tenant("")


class Keyring:
    """The keys of a server. A line of a file has a name, which logs and metrics may show, and a secret key.

    File `tenants` has the keys for all routes but the admin's; without it these routes are open. File `admin` has one
    key, for all routes. With `is_namespaced`, each tenant has a namespace, and the admin has "". KeyFileError: a file
    cannot be read, a line is not a name and a key, or two lines share a name or a key.
    """

    def __init__(self, tenants: Path | None, admin: Path | None, *, is_namespaced: bool = False) -> None:
        self.needs_key, self.has_admin, self.is_namespaced = tenants is not None, admin is not None, is_namespaced
        self._holders: dict[bytes, Tenant] = {}
        if tenants is not None:
            for where, name, key in _read_key_file(tenants):
                self._add(where, key, Tenant(name, name if is_namespaced else ""))
        if admin is not None:
            lines = _read_key_file(admin)
            if len(lines) != 1:
                raise KeyFileError(f"{admin}: {len(lines)} keys; wanted one, the admin's.")
            where, name, key = lines[0]
            self._add(where, key, Tenant(name, is_admin=True))

    def holder(self, presented: Iterable[str]) -> Tenant | None:
        """The tenant with one of these keys. Takes the same time for all keys of one length."""
        found = None
        for candidate in presented:
            for key, tenant in self._holders.items():
                if hmac.compare_digest(key, candidate.encode()):
                    found = tenant
        return found

    def _add(self, where: str, key: str, tenant: Tenant) -> None:
        if key.encode() in self._holders:
            raise KeyFileError(f"{where}: {tenant.name} has the key of another name. Give each name its own key.")
        if tenant.name in {other.name for other in self._holders.values()}:
            raise KeyFileError(f"{where}: the name {tenant.name} is there twice. Give each key its own name.")
        self._holders[key.encode()] = tenant


def _read_key_file(path: Path) -> list[tuple[str, str, str]]:
    """For each key of a file: its line, its name, the key."""
    try:
        text = path.read_text(encoding="ascii")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
        raise KeyFileError(f"{path} cannot be read: {reason}.") from error
    if mode & stat.S_IROTH:
        logger.warning("%s may be read by every user of this machine; chmod 600 keeps its keys secret.", path)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not line.replace("\t", " ").isprintable():
            raise KeyFileError(f"{path}:{number}: {len(words)} words; wanted a name and a key.")
        found.append((f"{path}:{number}", words[0], words[1]))
    if not found:
        raise KeyFileError(f"{path}: no key; wanted a name and a key in a line.")
    return found


def is_admin_path(path: str) -> bool:
    return path in ("/metrics", PAGE) or path.startswith(f"{PAGE}/")


class Access:
    """Passes allowed requests to `app`, with a Tenant as `request.state.tenant`. ApiError: refused."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring,
        host: str,
        allowed_hosts: Sequence[str] = (),
        allowed_origins: Sequence[str] = ("*",),
    ) -> None:
        self._app, self._keyring, self._host = app, keyring, host
        self._allowed_hosts = [name.lower() for name in allowed_hosts]
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, headers = scope["path"], Headers(scope=scope)
            tenant = self._keyring.holder(_keys(headers))
            scope.setdefault("state", {})["tenant"] = tenant or ANYONE
            # Clients take turns. A client is the name of a key, or an address.
            CLIENT.set(tenant.name if tenant else (scope.get("client") or ("",))[0])
            self._require_known_host(scope, headers, has_key=tenant is not None)
            if "*" not in self._allowed_origins:
                self._require_known_page(scope["method"], headers)
            if is_admin_path(path):
                if "origin" in headers and urlsplit(headers["origin"]).netloc != headers.get("host"):
                    raise ApiError(403, "this route does not answer pages of other web origins.")
                if tenant is None and self._keyring.has_admin and (scope["method"], path) == ("GET", PAGE):
                    # A browser loads the page without a key. The page holds no data and asks for the key.
                    return await self._app(scope, receive, _as_unauthorized(send))
            if tenant is None and self._keyring.needs_key and path != OPEN:
                raise ApiError(401, "no valid key; wanted one in Authorization: Bearer or in x-api-key.")
            if is_admin_path(path):
                self._require_admin(scope, headers, tenant)
        await self._app(scope, receive, send)

    def _require_known_host(self, scope: Scope, headers: Headers, *, has_key: bool) -> None:
        host, server = headers.get("host", ""), scope.get("server")
        if any(character in host for character in "@/\\?#"):
            raise ApiError(400, f"Host is {cut(host)!r}; wanted a name or an address, with or without a port.")
        if has_key or not server or not _is_loopback(server[0]) or self._is_own(host):
            return
        if not any(fnmatchcase(_name(host), allowed) for allowed in self._allowed_hosts):
            wanted = "localhost, 127.0.0.1, [::1], a name of --allowed-hosts, or a valid key"
            raise ApiError(403, f"Host is {cut(host)!r}; over the loopback interface wanted {wanted}.")

    def _require_known_page(self, method: str, headers: Headers) -> None:
        """Refuse what a page of another origin can send without a preflight. JSON bodies need a preflight."""
        origin = headers.get("origin")
        if origin is None or method in ("GET", "HEAD") or urlsplit(origin).netloc == headers.get("host"):
            return
        if origin not in self._allowed_origins:
            raise ApiError(403, f"Origin is {cut(origin)!r}; wanted one of --allowed-origins.")
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and content_type != "application/json":
            raise ApiError(415, "a page of another origin sends Content-Type: application/json.")

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        return name in ("localhost", self._host.lower()) or _is_loopback(name)

    def _require_admin(self, scope: Scope, headers: Headers, tenant: Tenant | None) -> None:
        if self._keyring.has_admin:
            if tenant is None:
                raise ApiError(401, "no valid key; wanted the admin's in Authorization: Bearer or in x-api-key.")
            if not tenant.is_admin:
                raise ApiError(403, "this route is the admin's; wanted the admin's key.")
            return
        if self._keyring.is_namespaced:
            raise ApiError(403, "this route shows every tenant; start the server with --admin-key-file to open it.")
        client = scope.get("client")
        is_forwarded = any(name in headers for name in FORWARDED)
        is_local = client is not None and _is_loopback(client[0]) and self._is_own(headers.get("host", ""))
        if is_forwarded or not is_local:
            raise ApiError(
                403, "this route answers only this machine; start the server with --admin-key-file for others."
            )


def _keys(headers: Headers) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    # At most two, since each is compared with every key of the server.
    return [*given, headers.get("x-api-key", "")]


def _name(host: str) -> str:
    """The name or address in a Host header, in lower case; "": there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _as_unauthorized(send: Send) -> Send:
    async def sent(message: Message) -> None:
        await send({**message, "status": 401} if message["type"] == "http.response.start" else message)

    return sent


class BodyLimit:
    """Passes a request to `app` when its body is complete, if the client is still there. ApiError: too many bytes.

    A route calls `request.state.hold` to count stored bytes that the request continues, as if they were in the body.
    """

    def __init__(self, app: ASGIApp, *, max_mib: float) -> None:
        self._app, self._max_mib = app, max_mib
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._require_room(int(Headers(scope=scope).get("content-length", 0)))
        body, sent_bytes, is_more = bytearray(), 0, True

        def hold(more_bytes: int) -> None:
            nonlocal sent_bytes
            sent_bytes += more_bytes
            self._held_bytes += more_bytes
            self._require_room(sent_bytes)

        try:
            while is_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                part = message.get("body", b"")
                body += part
                hold(len(part))
                is_more = message.get("more_body", False)
            raw = bytes(body)
            body.clear()
            if len(raw) > LARGE_BYTES:
                await asyncio.wrap_future(READERS.submit(CLIENT.get(), require_few_values, raw))
            else:
                require_few_values(raw)
            whole: list[Message] = [{"type": "http.request", "body": raw}]
            del raw

            async def receive_whole() -> Message:
                return whole.pop() if whole else await receive()

            scope.setdefault("state", {})["hold"] = hold
            await self._app(scope, receive_whole, send)
        finally:
            self._held_bytes -= sent_bytes

    def _require_room(self, body_bytes: int) -> None:
        max_bytes = self._max_mib * (1 << 20)
        if self._held_bytes > MAX_BODIES * max_bytes:
            raise ApiError(
                429, "the server is reading too many bytes of other requests; try again later.", retry_after_s=5
            )
        if body_bytes > max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_mib:g} MiB, the limit of this server.")


def _without_prefix(scope: Scope) -> Scope:
    """Remove the prefix of `radixcache launch` from the path of an API: see volatile.py."""
    path = scope["path"].removeprefix(PREFIX)
    if path == scope["path"] or not path.startswith(("/v1/", "/api/")):
        return scope
    MOVES.set(True)
    return {**scope, "path": path, "raw_path": (scope.get("raw_path") or b"").removeprefix(PREFIX.encode())}


class Frame:
    """Adds CORS headers, answers with an error if `app` raises, and calls `count` (Watch.on_http) for each request."""

    def __init__(self, app: ASGIApp, *, allowed_origins: Sequence[str], count: OnHttp) -> None:
        self._app, self._allowed_origins, self._count = app, allowed_origins, count
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope = _without_prefix(scope)
        headers, status, is_whole = Headers(scope=scope), None, False
        cors = [] if is_admin_path(scope["path"]) else self._cors(headers.get("origin"))

        async def received() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole |= not message.get("more_body", False)
            return message

        async def framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *cors]}
            await send(message)

        try:
            _require_small_head(scope)
            if cors and scope["method"] == "OPTIONS":
                # A browser's preflight has no key.
                await Response(status_code=204)(scope, receive, framed)
            else:
                await self._app(scope, received, framed)
        except Exception as error:
            if status is not None:
                raise
            # Closing with unread data would reset the connection before the client has read the error.
            is_last = headers.get("connection", "").lower() == "close" or scope["http_version"] == "1.0"
            while is_last and not is_whole:
                await received()
            if not isinstance(error, ApiError):
                logger.error("a request failed", exc_info=error)
                error = ApiError(500, "the server failed at this request; its log says where.")
            await error_response(scope, error)(scope, receive, framed)
        finally:
            if reason := scope.get("state", {}).get("refused", ""):
                self._refusals.log(scope, status or CLIENT_CLOSED_REQUEST, reason)
            route = getattr(scope.get("route"), "path", "")
            shown = route or cut(scope["path"])  # a client must not choose the label of a metric
            self._count(route or "other", status or CLIENT_CLOSED_REQUEST, reason, shown)

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        headers = {"Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": "*, Authorization"}
        if "*" in self._allowed_origins:
            headers["Access-Control-Allow-Origin"] = "*"
        elif origin is not None and origin in self._allowed_origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def _require_small_head(scope: Scope) -> None:
    """ApiError: too many or too large headers. h11 limits only heads that come in several pieces."""
    headers = scope["headers"]
    head_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    head_bytes += sum(len(name) + len(value) + 4 for name, value in headers)
    if len(headers) > MAX_HEADERS or head_bytes > MAX_HEAD_BYTES:
        found, wanted = f"{len(headers)} headers and {head_bytes:,} bytes", f"{MAX_HEADERS} and {MAX_HEAD_BYTES:,}"
        raise ApiError(431, f"the head of the request has {found}; wanted at most {wanted}.")


class Refusals:
    """Logs a line for each refused request, up to a rate. The next line counts the requests that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since_s, self._lines = clock, clock(), 0

    def log(self, scope: Scope, status: int, reason: str) -> None:
        if self._clock() - self._since_s >= REFUSALS_S:
            if self._lines > REFUSALS_LOGGED:
                logger.warning("%d more requests were refused", self._lines - REFUSALS_LOGGED)
            self._since_s, self._lines = self._clock(), 0
        self._lines += 1
        if self._lines <= REFUSALS_LOGGED:
            tenant, client = scope["state"].get("tenant") or ANYONE, scope.get("client")
            who = tenant.name or (client[0] if client else "a client")
            route = f"{scope['method']} {cut(scope['path'])}"
            logger.warning("refused %s of %s: %d, %s", route, who, status, cut(reason))


#: For routes without a field `messages`: the field that they have in its place.
CONVERSATIONS = {"/responses": "input", "/completions": "prompt"}


def error_response(scope: Scope, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Write an error in the form of the API whose route was called."""
    route = scope["path"].removeprefix("/v1")
    error.rename("messages", CONVERSATIONS.get(route, "messages"))
    scope.setdefault("state", {})["refused"] = error.full_message()  # for the log, see Frame
    is_anthropic, is_ollama = (scope["path"].startswith(each) for each in ("/v1/messages", "/api/"))
    form = error.in_anthropic_form if is_anthropic else error.in_ollama_form if is_ollama else error.in_openai_form
    response = to_json(form(), error.status)
    response.headers.update(headers or {})
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
