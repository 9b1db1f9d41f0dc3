"""Chat templates by where they write the tools, and then the arguments."""

from __future__ import annotations

TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
ARGUMENTS = (
    "{% if date_string is defined %}Today is {{ date_string }}. {% endif %}"
    "{% if enable_thinking is defined %}Think: {{ enable_thinking }}. {% endif %}"
    "{% for each in documents or [] %}<doc>{{ each.text }}</doc>{% endfor %}"
)
SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
TURNS = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% if loop.last %}LAST{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPEN{% endif %}"
)


def template(head: str, *, first: str = "", last: str = "", opening: str = "") -> str:
    turns = TURNS.replace("LAST", last).replace("OPEN", opening)
    turns = turns.replace("\n{% if loop.last %}", "\n" + first + "{% if loop.last %}", 1)
    return "{% set ns = namespace(first=true) %}<|im_start|>system\n" + head + "<|im_end|>\n" + turns


FIRST = "{% if m.role == 'user' and ns.first %}{% set ns.first = false %}" + TOOLS + "{% endif %}"
TEMPLATES = {
    "before the system text, first of all": template(ARGUMENTS + TOOLS + SYSTEM),
    "before the system text, in the opening": template(TOOLS + SYSTEM, opening=ARGUMENTS),
    "inside the system turn, behind the tools": template(SYSTEM + "\n# Tools\n" + TOOLS + ARGUMENTS),
    "in a turn behind the system turn, inside": template(
        SYSTEM + ARGUMENTS + "<|im_end|>\n<|im_start|>system\n" + TOOLS
    ),
    "in the first user turn, behind": template(SYSTEM, first=FIRST, last=ARGUMENTS),
    "in the last turn, before": template(ARGUMENTS + SYSTEM, last=TOOLS),
}
