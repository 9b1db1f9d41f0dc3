"""What mlx_lm.server's own handler writes about a reply of given tokens: the oracle for bodies in OpenAI's form."""

from __future__ import annotations

import io
import json
from argparse import Namespace

from mlx_lm.server import APIHandler, GenerationContext, Response

from runner.serve.options import ServeOptions


def stock_answer(path, body, steps, *, machine, initial_state="normal", tool_parser=None, prompt_tokens, cached_tokens):
    """The status and body of the answer to POST `path`, of a server with the options' defaults."""
    options = {**vars(ServeOptions()), "max_tokens": 512}
    context = GenerationContext(
        has_tool_calling=True, has_thinking=True, tool_parser=tool_parser, text_sm=machine, initial_state=initial_state,
        prompt=[0] * prompt_tokens, prompt_cache_count=cached_tokens,
    )  # fmt: skip
    responses = [
        Response(each.text, each.id, each.logprob, each.finish_reason, tuple(top._asdict() for top in each.top_tokens))
        for each in steps
    ]
    raw = json.dumps(body).encode()
    handler = _Handler()
    handler.path, handler.headers, handler.rfile = path, {"Content-Length": len(raw)}, io.BytesIO(raw)
    handler.response_generator = Namespace(
        cli_args=Namespace(**options), generate=lambda *_, **__: (context, iter(responses))
    )
    handler.do_POST()
    return handler.status, handler.wfile.getvalue().decode()


class _Handler(APIHandler):
    def __init__(self) -> None:
        self.created, self.system_fingerprint, self.wfile, self.status = 0, "", io.BytesIO(), 0

    def send_response(self, status: int, message: str | None = None) -> None:
        self.status = status

    def send_header(self, *_: object) -> None: ...

    def end_headers(self) -> None: ...
