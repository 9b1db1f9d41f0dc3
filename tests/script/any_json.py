"""Any JSON with the keys and words that readers look for, and what becomes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from runner.files import InputError
from runner.script.conversation_formats import FORMS
from runner.script.conversation_reader import read_conversations
from runner.script.schedule import schedule

#: Keys of parts of records; the table of forms has those of records.
INNER_KEYS = """
    message author parts content_type text type tools functions function name arguments tool_calls function_call system
    first_turn replies_recorded chat_template_kwargs left_out actions observations query parent recipient replies
    response choices output metadata source thinking output_config input_schema instructions reasoning
    previous_response_id calls info task task_id uuid parentUuid sessionId timestamp url custom_id is_request
"""
ROWS = [(form.keys, form.role, form.content, form.id, form.user, form.parent, form.callee) for form in FORMS]
KEYS = sorted({key for names in ROWS for key in re.findall(r"\w+", " ".join(names))} | {*INNER_KEYS.split()})
words = st.sampled_from(
    ["", "user", "assistant", "tool", "system", "human", "text", "image", "tool_use", "tool_result", "message", "code"]
)  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.just(1e400) | words | st.just("\ud800")
#: Values of the words that readers look for, in any order and nesting.
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=24,
)


def read_or_refused(text: str) -> None:
    """Check that a file with this text is read, or refused in one line with the file and a line of it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_text(text)
        try:
            conversations = read_conversations(path).conversations
        except InputError as error:
            line = str(error)
            assert "\n" not in line
            # A file without a record has no line to name.
            assert re.match(rf"{re.escape(str(path))}:(\d+: | no conversation found\.| the file is empty)", line), line
        else:
            for request in schedule(conversations):
                talk = request.conversation
                given = [request.messages, talk.tools, dict(talk.arguments), talk.user, talk.source]
                assert json.dumps(given, ensure_ascii=False, allow_nan=False).encode()


def changed(value: Any, data: st.DataObject) -> Any:
    """A value in which one place is another value, or is gone."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not keys or not data.draw(st.integers(0, 4)):
        return data.draw(values)
    key = data.draw(st.sampled_from(keys))
    copy = value.copy()
    if data.draw(st.integers(0, 5)):
        copy[key] = changed(value[key], data)
    else:
        del copy[key]
    return copy
