"""Who reaches which route, and as whom: keys, the admin, the machine itself, names and origins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.testclient import TestClient

from runner.serve.app import guard, make_app
from runner.serve.metrics import Watch
from runner.serve.middleware import REFUSALS_LOGGED, REFUSALS_S, KeyFileError, Keyring, Refusals
from runner.serve.options import ServeOptions
from runner.serve.scheduler import Scheduler

ANN, BOB, ROOT = "key-of-ann", "key-of-bob", "key-of-root"
ADMINS = ["/metrics", "/cache", "/cache/tree"]
OPEN_TO_KEYS = ["/v1/models", "/v1/messages", "/openapi.json"]
Serve = Callable[..., TestClient]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Make a client of a server with such keys; `client` is where it asks from, `over` the address it came in by."""

    def make(*, tenants=False, admin=False, by="none", client="127.0.0.1", over="127.0.0.1", counted=None, **more):
        keys, admin_key = tmp_path / "keys", tmp_path / "admin"
        keys.write_text(f"# two of them\nann {ANN}\n\nbob\t{BOB}\n")
        admin_key.write_text(f"root {ROOT}\n")
        for path in (keys, admin_key):
            path.chmod(0o600)
        options = ServeOptions(
            api_keys=keys if tenants else None, admin_key_file=admin_key if admin else None, namespace_by=by, **more
        )
        app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
        for path in ["/health", "/v1/models", "/v1/messages", *ADMINS]:
            app.add_api_route(path, whoami)
        app.add_api_route("/v1/models", whoami, methods=["POST"], include_in_schema=False)
        app.add_api_route("/v1/broken", broken)
        count = (lambda *seen: counted.append(seen[:2])) if counted is not None else lambda *_: None
        return TestClient(guard(app, options, count), base_url=f"http://{over}:8080", client=(client, 50000))

    return make


async def whoami(request: HttpRequest) -> dict[str, Any]:
    return vars(request.state.tenant)


async def broken() -> None:
    raise RuntimeError("the path of a secret")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"Authorization": ANN}, {"x-api-key": "ann"}])
@pytest.mark.parametrize("path", [*OPEN_TO_KEYS, *ADMINS, "/nowhere"])
def test_with_a_key_file_no_route_answers_without_a_key(serve: Serve, path: str, headers: dict[str, str]) -> None:
    for admin in (False, True):
        answer = serve(tenants=True, admin=admin).get(path, headers=headers)
        assert answer.status_code == 401, (path, admin)
        assert answer.headers.get("www-authenticate", "Bearer") == "Bearer"


def test_no_route_of_the_real_server_is_forgotten(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {ANN}\n")
    options = ServeOptions(api_keys=keys, namespace_by="key")
    watch = Watch()
    app = make_app(options, Scheduler(options, watch.on_record, watch.on_event), watch)
    client = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))
    routes = [(path, method) for path, methods in app.openapi()["paths"].items() for method in methods]
    assert {("/v1/chat/completions", "post"), ("/metrics", "get"), ("/cache", "delete")} <= set(routes)
    for path, method in routes:
        asked = [client.request(method, path, headers=headers).status_code for headers in ({}, bearer(ANN))]
        assert (asked[0] == 401) == (path != "/health"), (path, asked)
        assert (asked[1] == 403) == path.startswith(("/metrics", "/cache")), (path, asked)


@pytest.mark.parametrize(
    ("headers", "name"),
    [(bearer(ANN), "ann"), ({"Authorization": f"bearer {BOB}"}, "bob"), ({"X-API-Key": ANN}, "ann")],
)
def test_a_key_is_taken_from_either_header_and_names_its_holder(serve, headers, name):
    answer = serve(tenants=True).get("/v1/models", headers=headers)
    assert answer.json() == {"name": name, "namespace": "", "is_admin": False}


@pytest.mark.parametrize("path", ADMINS)
@pytest.mark.parametrize("tenants", [False, True])
def test_the_admins_routes_open_to_the_admins_key_alone(serve: Serve, path: str, tenants: bool) -> None:
    client = serve(tenants=tenants, admin=True, client="192.0.2.1", over="192.0.2.2")
    assert client.get(path, headers=bearer(ROOT)).json()["is_admin"]
    assert client.get(path).status_code == 401
    assert client.get(path, headers=bearer(ANN)).status_code == (403 if tenants else 401)


def test_the_page_is_sent_without_a_key_as_an_error_and_nothing_below_it(serve: Serve) -> None:
    client = serve(admin=True)
    page = client.get("/cache")
    assert (page.status_code, page.json()["name"]) == (401, "")
    assert "error" in client.get("/cache/tree").json()
    assert client.post("/cache").json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ADMINS)
@pytest.mark.parametrize(
    ("client", "over", "headers", "status"),
    [
        ("127.0.0.1", "127.0.0.1", {}, 200),
        ("::1", "[::1]", {}, 200),
        ("::ffff:127.0.0.1", "127.0.0.1", {}, 200),
        ("192.0.2.1", "192.0.2.2", {}, 403),
        ("127.0.0.1", "192.0.2.2", {}, 403),
        ("127.0.0.1", "127.0.0.1", {"X-Forwarded-For": "192.0.2.1"}, 403),
        ("127.0.0.1", "127.0.0.1", {"Forwarded": "for=192.0.2.1"}, 403),
    ],
)
def test_without_an_admins_key_its_routes_answer_the_machine_itself(serve, path, client, over, headers, status):
    assert serve(client=client, over=over).get(path, headers=headers).status_code == status


@pytest.mark.parametrize("path", [*OPEN_TO_KEYS, *ADMINS, "/health"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example", "[", "192.0.2.2"])
def test_over_loopback_a_request_names_this_machine(serve: Serve, path: str, host: str) -> None:
    answer = serve(tenants=True).get(path, headers={"Host": host, **bearer("wrong")})
    assert (answer.status_code, answer.json().get("error") is not None) == (403, True)
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["host.docker.internal:8080", "my-mac.local", "a1b2.tunnel.example"])
def test_who_shows_a_valid_key_may_use_any_name_but_not_the_admins_routes_by_it(serve: Serve, host: str) -> None:
    client = serve(tenants=True, admin=True)
    assert client.get("/v1/models", headers={"Host": host, **bearer(ANN)}).json()["name"] == "ann"
    assert client.get("/metrics", headers={"Host": host, **bearer(ROOT)}).json()["is_admin"]
    assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    assert serve(tenants=True).get("/metrics", headers={"Host": host, **bearer(ANN)}).status_code == 403


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (("host.docker.internal",), "host.docker.internal:8080", 200),
        (("host.docker.internal",), "HOST.docker.internal", 200),
        (("other", "*.local"), "my-mac.local:1", 200),
        (("*",), "anything.example", 200),
        (("*.local",), "evil.example", 403),
        (("local",), "my-mac.local", 403),
        ((), "host.docker.internal:8080", 403),
    ],
)
def test_allowed_hosts_may_be_named_over_loopback_and_the_admins_routes_stay_shut(serve, allowed, host, status):
    client = serve(allowed_hosts=allowed)
    assert client.get("/v1/models", headers={"Host": host}).status_code == status
    assert client.get("/cache/tree", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["evil@localhost", "localhost/path", "localhost?x", "a\\@127.0.0.1:8080"])
@pytest.mark.parametrize("over", ["127.0.0.1", "192.0.2.2"])
def test_a_host_that_is_more_than_a_name_is_refused_for_everybody(serve: Serve, host: str, over: str) -> None:
    answer = serve(tenants=True, over=over).get("/v1/models", headers={"Host": host, **bearer(ANN)})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "text/plain"}, 200),
        ({"Origin": "http://127.0.0.1:8080", "Content-Type": "text/plain"}, 200),
        ({"Origin": "http://a.example", "Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Origin": "http://a.example", "Content-Type": "text/plain"}, 415),
        ({"Origin": "http://a.example"}, 415),
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 403),
        ({"Origin": "null", "Content-Type": "text/plain"}, 403),
    ],
)
@pytest.mark.parametrize("tenants", [False, True])
def test_a_foreign_page_posts_nothing_unless_its_origin_is_allowed_and_was_asked_for(serve, headers, status, tenants):
    client = serve(tenants=tenants, allowed_origins=("http://a.example",))
    headers = {**headers, **bearer(ANN)}
    assert client.post("/v1/models", headers=headers, content=b"{}").status_code == status
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert serve(tenants=tenants).post("/v1/models", headers=headers, content=b"{}").status_code == 200


@pytest.mark.parametrize("more", [{f"x-{number}": "" for number in range(101)}, {"x-long": "x" * (64 << 10)}])
def test_the_head_of_a_request_is_bounded_in_number_and_size(serve: Serve, more: dict[str, str]) -> None:
    assert serve().get("/v1/models", headers=more).status_code == 431


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"])
def test_this_machine_has_several_names_its_page_may_send_and_over_another_interface_any_name_is_taken(serve, host):
    assert serve().get("/cache/tree", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200
    assert serve(over="192.0.2.2").get("/v1/models", headers={"Host": "llm.example"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8081", "http://localhost:8080"])
@pytest.mark.parametrize("admin", [False, True])
def test_the_admins_routes_answer_no_other_page(serve: Serve, origin: str, admin: bool) -> None:
    client = serve(admin=admin)
    for path in ADMINS:
        answer = client.get(path, headers={"Origin": origin, **bearer(ROOT)})
        asked = client.options(path, headers={"Origin": origin, "Access-Control-Request-Method": "GET"})
        assert answer.status_code == 403
        assert not [name for reply in (answer, asked) for name in reply.headers if name.startswith("access-control")]
        assert asked.status_code >= 400


@pytest.mark.parametrize(
    ("allowed", "origin", "sent"),
    [
        (("*",), "http://a.example", "*"),
        (("*",), None, "*"),
        (("http://a.example", "http://b.example"), "http://b.example", "http://b.example"),
        (("http://a.example",), "http://b.example", None),
        (("http://a.example",), None, None),
    ],
)
def test_pages_of_allowed_origins_may_read_replies_and_errors(serve, allowed, origin, sent):
    client = serve(tenants=True, allowed_origins=allowed)
    headers = {"Origin": origin} if origin else {}
    replies = [client.get("/v1/models", headers={**headers, **key}) for key in ({}, bearer(ANN))]
    asked = client.options("/v1/models", headers=headers)
    assert [reply.status_code for reply in (*replies, asked)] == [401, 200, 204]
    for reply in (*replies, asked):
        assert reply.headers.get("access-control-allow-origin") == sent
        assert reply.headers["access-control-allow-methods"] == "*"
        assert reply.headers["access-control-allow-headers"] == "*, Authorization"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("DELETE", "/v1/models", 405), ("GET", "/v1/broken", 500), ("GET", "/docs", 404)],
)
def test_errors_are_in_openais_form(serve: Serve, method: str, path: str, status: int) -> None:
    answer = serve().request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in answer.text
    assert (status == 405) == ("allow" in answer.headers)


def test_every_request_is_counted_under_its_route(serve: Serve) -> None:
    counted: list[tuple[str, int]] = []
    client = serve(tenants=True, counted=counted)
    for path, headers in (("/v1/models", bearer(ANN)), ("/v1/models", {}), ("/v1/broken", bearer(ANN)), ("/x", {})):
        client.get(path, headers=headers)
    client.get("/nowhere", headers=bearer(ANN))
    assert counted == [("/v1/models", 200), ("other", 401), ("/v1/broken", 500), ("other", 401), ("other", 404)]


def test_a_route_that_is_not_here_says_which_are(serve: Serve) -> None:
    answer = serve().post("/v1/embeddings", json={})
    message = "Not Found: POST /v1/embeddings. This server has /v1/broken, /v1/messages, /v1/models"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)


def test_every_refused_request_has_a_line_that_says_whose_it_was_and_why(serve: Serve, caplog) -> None:
    client = serve(tenants=True)
    client.get("/v1/models", headers=bearer(ANN))
    client.get("/v1/models")
    client.delete("/v1/models", headers=bearer(ANN))
    assert [record.getMessage() for record in caplog.records if record.name.endswith("middleware")] == [
        "refused GET /v1/models of 127.0.0.1: 401, no valid key; wanted one in Authorization: Bearer or in x-api-key.",
        "refused DELETE /v1/models of ann: 405, Method Not Allowed: DELETE /v1/models",
    ]


def test_lines_about_refused_requests_are_bounded_in_rate(caplog) -> None:
    now_s = 0.0
    refusals = Refusals(lambda: now_s)
    scope = {"method": "GET", "path": "/a\nb", "client": ("10.0.0.1", 1), "state": {}}
    for _ in range(REFUSALS_LOGGED + 7):
        refusals.log(scope, 404, "x" * 500)
    assert len(caplog.records) == REFUSALS_LOGGED
    assert caplog.records[0].getMessage().startswith(r"refused GET /a\nb of 10.0.0.1: 404, xxx")
    assert len(caplog.records[0].getMessage()) < 300
    now_s = REFUSALS_S
    refusals.log(scope, 404, "x")
    assert caplog.records[-2].getMessage() == "7 more requests were refused"
    assert len(caplog.records) == REFUSALS_LOGGED + 2


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["ann"], "keys:1: 1 words; wanted a name and a key."),
        (["# ann", "", "ann a b"], "keys:3: 3 words"),
        (["ann k1", "bob k2", "ann k3"], "keys:3: the name ann"),
        (["ann k1", "bob k1"], "keys:2: bob has the key of another"),
        (["ann k\x07"], "keys:1"),
        (["ann clé"], "it is not plain ASCII"),
        (["# nobody"], "no key"),
    ],
)
def test_a_bad_key_file_is_refused_with_its_line_and_no_key(tmp_path: Path, lines: Sequence[str], found: str) -> None:
    path = tmp_path / "keys"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(KeyFileError, match="No such file"):
        Keyring(tmp_path / "none", None)
    with pytest.raises(KeyFileError) as refused:
        Keyring(path, None)
    assert found in str(refused.value)
    assert not {"k1", "k2", "k3"} & set(str(refused.value).split())


@pytest.mark.parametrize(("mode", "warns"), [(0o644, True), (0o640, False)])
def test_a_key_file_that_everybody_may_read_is_warned_of(tmp_path, caplog, mode, warns):
    path = tmp_path / "keys"
    path.write_text("ann k1\n")
    path.chmod(mode)
    Keyring(path, None)
    assert ("chmod 600" in caplog.text) == warns


def test_the_admin_has_one_key_which_is_no_tenants(tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("ann k1\n")
    wrong = {"root k1\n": "the key of another", "ann k2\n": "there twice", "a k2\nb k3\n": "2 keys; wanted one"}
    for text, found in wrong.items():
        admin.write_text(text)
        with pytest.raises(KeyFileError, match=found):
            Keyring(keys, admin)
