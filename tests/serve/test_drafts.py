"""Drafts through the server: the same replies, the figures of usage, metrics and page, and a wall between tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixcache.speculate.pace import DraftPace
from runner.models.tiny import tiny_tokenizer
from runner.serve.metrics import in_a_line
from runner.serve.options import ServeOptions, require_compatible
from runner.serve.request import RequestRecord
from tests.serve.jobs import application, local_client
from tests.serve.tenants import ANN, BOB, ROOT, USER, serving

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["name", "tags"],
}

#: Makes free replies text that is made of the same tokens when it is sent back.
LETTERS = {str(token): 60 for token in tiny_tokenizer().encode("abcdefghij ")}


@pytest.fixture(autouse=True)
def free_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes are taken to last equally long, so that all that may be right is checked."""
    monkeypatch.setattr(DraftPace, "seconds", lambda self, tokens_in_pass, rows=1: 1.0)


def ask(client: Any, key: str = "", **more: Any) -> dict[str, Any]:
    body = {"max_tokens": 24, "messages": [USER], **more}
    answer = client.post(CHAT, json=body, headers={"x-api-key": key} if key else {})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def drafted(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"].get("completion_tokens_details", {})
    return found.get("accepted_prediction_tokens", 0), found.get("rejected_prediction_tokens", 0)


def test_what_one_tenant_said_is_proposed_to_that_tenant_alone(tmp_path: Path) -> None:
    with serving(tmp_path, speculate="tree") as server:
        answers = [ask(server.client, key) for key in (ANN, ANN, BOB, BOB)]
        tree = ["tree" in record.drafted for record in server.records]
        assert tree == [False, True, False, True]
        assert len({answer["choices"][0]["message"].get("content") for answer in answers}) == 1
        assert drafted(answers[1])[0] > 0
        metrics = server.client.get("/metrics", headers={"x-api-key": ROOT}).text
        counts = {line.split(" ")[0]: float(line.split(" ")[1]) for line in metrics.splitlines() if line[:1] != "#"}
        for what, of in (("proposed_tokens", "proposed"), ("accepted_tokens", "accepted"), ("draft_passes", "passes")):
            wanted = sum(getattr(record.drafted["tree"], of) for record in server.records if "tree" in record.drafted)
            assert counts[f'radixcache_serve_{what}_total{{source="tree"}}'] == wanted > 0
        rows = server.client.get("/cache/state", headers={"x-api-key": ROOT}).json()["requests"]
        assert [row["accepted_tokens"] for row in rows] == [each.accepted_tokens for each in reversed(server.records)]
        assert f"({server.records[1].accepted_tokens} of " in in_a_line(server.records[1])


@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}])
def test_a_prediction_changes_no_reply_and_its_share_is_in_the_usage(more: dict[str, Any]) -> None:
    """Greedy and with a seed, free and as a schema wants it; as a text or in parts, right, in part right and wrong."""
    with application(speculate="none") as (app, _), local_client(app) as client:
        for sampling in ({}, {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.3, "logit_bias": LETTERS}):
            plain = ask(client, **more, **sampling)
            assert "completion_tokens_details" not in plain["usage"]
            text = plain["choices"][0]["message"]["content"]
            content: Any
            for content, is_right in (
                (text, True),
                ([{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}], True),
                (f"{text[:6]}#{text[7:]}", False),
                ("something else", False),
                ("", False),
            ):
                found = ask(client, **more, **sampling, prediction={"type": "content", "content": content})
                assert found["choices"][0]["message"]["content"] == text
                assert not is_right or drafted(found)[0] > 0
                assert len(found["usage"]["completion_tokens_details"]) == 2
                assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_a_prediction_of_another_form_is_refused_by_name() -> None:
    with application() as (app, _), local_client(app) as client:
        for prediction, where in (
            ("text", "prediction"),
            ({"type": "file", "content": "x"}, "prediction.type"),
            ({"type": "content", "content": None}, "prediction.content"),
        ):
            answer = client.post(CHAT, json={"messages": [USER], "prediction": prediction})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == where


@pytest.mark.parametrize("options", [{"kv_bits": 8}, {"verify": 1.0}])
def test_requests_that_run_alone_and_those_that_are_verified_are_drafted_too(options: dict[str, Any]) -> None:
    records: list[RequestRecord] = []
    with application(records, speculate="tree", **options) as (app, _), local_client(app) as client:
        first, second = ask(client), ask(client)
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert drafted(second)[0] > 0
    assert records[1].drafted["tree"].accepted == drafted(second)[0]


def test_an_exact_server_drafts_nothing_and_refuses_predictions_by_name() -> None:
    with pytest.raises(ValueError, match="--speculate tree does not work with --exact"):
        require_compatible(ServeOptions(exact=True, speculate="tree"))
    with application(exact=True, draft_model="tiny:llama") as (app, _), local_client(app) as client:
        assert drafted(ask(client, max_tokens=40)) == (0, 0)
        assert drafted(ask(client, prediction={"type": "content", "content": ""})) == (0, 0)
        body = {"messages": [USER], "prediction": {"type": "content", "content": "as before"}}
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prediction"
    assert "no prediction can be used here: checked tokens round differently" in answer.text
