"""A server with two tenants and an admin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.testclient import TestClient

from runner.serve.request import RequestRecord
from runner.serve.scheduler import Scheduler
from tests.serve.jobs import application, local_client

ANN, BOB, ROOT = "key-of-ann", "key-of-bob", "key-of-root"
USER = {"role": "user", "content": "What about quince?"}
#: What differs from one request to the next by itself: of log-probabilities the last bits, beside others' decoding.
OWN = re.compile(
    r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|"(created|completed)(_at)?": ?("[^"]*"|\d+)|"logprob": [-.e\d]+'
    r'|"[a-z_]+(_ms|_second|_duration)": [-.e\d]+|"modified_at": "[^"]*"'
)


class Route(NamedTuple):
    """What ann asks of a route: bodies, in this order, or nothing but the route."""

    method: str
    path: str
    bodies: Sequence[Any] = (None,)


class Server:
    def __init__(self, client: TestClient, running: Scheduler, records: list[RequestRecord]) -> None:
        self.client, self.running, self.records = client, running, records

    def send(self, route: Route, key: str) -> Iterator[tuple[int, dict[str, str], str]]:
        """Statuses, headers and texts of all answers, less what is the request's own."""
        for body in route.bodies:
            path = route.path.replace("{name}", "tiny")
            answer = self.client.request(route.method, path, json=body, headers={"x-api-key": key})
            headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
            yield answer.status_code, headers, OWN.sub("", answer.text)


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Server]:
    (folder / "keys").write_text(f"ann {ANN}\nbob {BOB}\n")
    (folder / "admin").write_text(f"root {ROOT}\n")
    for name in ("keys", "admin"):
        (folder / name).chmod(0o600)
    keys = {"api_keys": folder / "keys", "admin_key_file": folder / "admin", "namespace_by": "key", **options}
    records: list[RequestRecord] = []
    with application(records, **keys) as (app, running), local_client(app) as client:
        yield Server(client, running, records)
