"""A server of the Model Context Protocol on stdin and stdout, with one tool: `look` returns the text of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LOOK = {
    "name": "look",
    "description": "Returns the text of a file.",
    "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "annotations": {"readOnlyHint": True},
}


def result_of(message: dict[str, Any]) -> dict[str, Any]:
    asked = message.get("params") or {}
    if message["method"] == "initialize":
        about = {"serverInfo": {"name": "files", "version": "1"}, "capabilities": {"tools": {}}}
        return {"protocolVersion": asked["protocolVersion"], **about}
    if message["method"] == "tools/list":
        return {"tools": [LOOK]}
    if message["method"] == "tools/call":
        return {"content": [{"type": "text", "text": Path(asked["arguments"]["path"]).read_text(encoding="utf-8")}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result_of(message)}), flush=True)
