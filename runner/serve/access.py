"""Access: which requests reach a route, and as whom. Pure ASGI; never imports MLX.

  A1  A connection over loopback names this machine in its Host header: a web page whose name was made to point here
      (DNS rebinding) cannot.
  A2  With a file of keys, every route but /health needs one of them or the admin's.
  A3  The admin's routes (/metrics, /cache and below) need the admin's key where there is one. Where there is none they
      answer this machine alone, and nobody where every tenant has a namespace.
  A4  The admin's routes answer no page of another origin, and have no CORS headers (runner.serve.frame).

A proxy on this machine makes everybody look local. One that says so in a header is told apart; an admin's key is what
makes it safe.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.serve.errors import ApiError
from runner.serve.keys import Keyring, Tenant

OPEN, PAGE = "/health", "/cache"
ANYONE = Tenant("")
#: With these a proxy says for whom it asks.
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def is_admins(path: str) -> bool:
    """Whether a path is for the admin."""
    return path in ("/metrics", PAGE) or path.startswith(f"{PAGE}/")


class Access:
    """Lets requests through to `app` with `request.state.tenant`, a Tenant; raises ApiError for the others.

    Args:
        host: what the server was asked to listen at, which requests may name too.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring, host: str) -> None:
        self._app, self._keyring, self._host = app, keyring, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, headers = scope["path"], Headers(scope=scope)
            self._require_own_name(scope, headers)
            tenant = self._keyring.holder(_keys(headers))
            scope.setdefault("state", {})["tenant"] = tenant or ANYONE
            if is_admins(path):
                self._require_own_origin(headers)
                if tenant is None and self._keyring.has_admin and (scope["method"], path) == ("GET", PAGE):
                    # A browser sends no key with the page itself. It holds nothing, and asks for the key.
                    return await self._app(scope, receive, _as_unauthorized(send))
            if tenant is None and self._keyring.needs_key and path != OPEN:
                raise ApiError(401, "no valid key; wanted one in Authorization: Bearer or in x-api-key.")
            if is_admins(path):
                self._require_admin(scope, headers, tenant)
        await self._app(scope, receive, send)

    def _require_own_name(self, scope: Scope, headers: Headers) -> None:
        server = scope.get("server")
        if server and _is_loopback(server[0]) and not self._is_own(headers.get("host", "")):
            wanted = "localhost, 127.0.0.1 or [::1]"
            raise ApiError(403, f"Host is {headers.get('host', '')!r}; over the loopback interface wanted {wanted}.")

    def _is_own(self, host: str) -> bool:
        name = _split_name(host)
        return name in ("localhost", self._host.lower()) or _is_loopback(name)

    def _require_own_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise ApiError(403, "this route answers no page of another origin.")

    def _require_admin(self, scope: Scope, headers: Headers, tenant: Tenant | None) -> None:
        if self._keyring.has_admin:
            if tenant is None:
                raise ApiError(401, "no valid key; wanted the admin's in Authorization: Bearer or in x-api-key.")
            if not tenant.is_admin:
                raise ApiError(403, "this route is the admin's; wanted the admin's key.")
            return
        if self._keyring.is_namespaced:
            raise ApiError(403, "this route shows every tenant's; start the server with --admin-key-file to open it.")
        client = scope.get("client")
        is_forwarded = any(name in headers for name in FORWARDED)
        is_local = client is not None and _is_loopback(client[0]) and self._is_own(headers.get("host", ""))
        if is_forwarded or not is_local:
            raise ApiError(403, "this route answers its own machine; start the server with --admin-key-file for more.")


def _keys(headers: Headers) -> list[str]:
    """The keys a request brings."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    # One of each: a head has room for thousands, and each is compared with every key there is.
    return [*given, headers.get("x-api-key", "")]


def _split_name(host: str) -> str:
    """The name or address in a Host header, less its port; empty where there is none."""
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
