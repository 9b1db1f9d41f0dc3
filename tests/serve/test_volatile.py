"""Volatile parts of system prompts stay in place unless the address, the option or the body asks for moving them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from runner.serve.app import guard
from runner.serve.metrics import in_a_line
from runner.serve.options import ServeOptions
from runner.serve.request import RequestRecord
from tests.serve.jobs import application, local_client
from tests.serve.scripted import ScriptedRuns, said
from tests.serve.scripted_app import BODIES, CHAT, USER, scripted_app
from tests.serve.talking_model import write_talking_model


@pytest.mark.parametrize("path", BODIES)
def test_an_address_of_launch_has_volatile_parts_moved_and_any_other_has_not(path: str) -> None:
    system = "Be brief.\nCurrent date: 2026-11-25\nCurrent working directory: /home/ann"
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "system", "content": system}, USER]}
    body |= {"/v1/responses": {"instructions": system, "input": "?"}}.get(path, {})
    runs = ScriptedRuns(said("x", finish="stop"))
    options = ServeOptions()
    with TestClient(guard(scripted_app(runs, options), options, lambda *_: None), "http://127.0.0.1:8080") as client:
        for prefix in ("", "/move-volatile", ""):
            assert client.post(prefix + path, json=body).status_code == 200
        assert client.get("/move-volatile/metrics").status_code == 404, "the admin's routes have no other names"
    assert [len(opened.request.messages) for opened in runs.opened] == [2, 3, 2]


def test_while_it_is_off_the_log_and_the_page_say_what_moving_would_save(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 300, "parameters": {}}}]
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% if loop.first and tools %}{{ tools | tojson }}\n{% endif %}{% endfor %}"
    )
    folder = write_talking_model(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    records: list[RequestRecord] = []
    with application(records, model=str(folder)) as (app, _), local_client(app) as client:
        for name in ("ann", "bob"):
            system = f"Be brief.\nCurrent date: 2026-11-25\nCurrent working directory: /home/{name}\nBe kind."
            messages = [{"role": "system", "content": system}, USER]
            answer = client.post(CHAT, json={"messages": messages, "tools": tools, "max_tokens": 2})
            assert answer.status_code == 200
        last = records[-1]
        assert last.naming is not None
        last.naming.result()
        assert last.movable_tokens > 300
        found = client.get(f"/cache/requests/{last.id}").json()
    assert f"With --move-volatile, {last.movable_tokens:,} tokens more would be reused." in found["fork"]["hint"]
    assert f"({last.movable_tokens:,} more with --move-volatile)" in in_a_line(last)
