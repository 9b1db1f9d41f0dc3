"""Requests made from the server's own OpenAPI document, right and wrong ones, to a real server."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from runner.serve.request import DEFAULT
from tests.serve.serving import serving

MAX_TOKENS = 2


@pytest.mark.slow
def test_every_route_answers_what_it_documents_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = ("--max-tokens", MAX_TOKENS, "--prompt-cache-bytes", 8 << 20, "--max-body-mib", 1)
    with serving(*options, model="tiny") as served:
        document = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        asked = [require_documented(operation.ok()) for operation in document.get_all_operations()]
        assert len(asked) > 15
        assert served.process.poll() is None
        assert "Traceback" not in served.log


def require_documented(operation: Any) -> None:
    @settings(
        max_examples=10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        if isinstance(case.body, dict):
            tokens = {name: case.body.get(name) for name in ("max_tokens", "max_completion_tokens")}
            case.body |= {name: min(count, MAX_TOKENS) for name, count in tokens.items() if isinstance(count, int)}
            if isinstance(case.body.get("model"), str):  # any other name is none of a model's
                case.body["model"] = DEFAULT
        case.validate_response(case.call(), checks=[not_a_server_error, status_code_conformance])

    holds()
