"""Small chat templates of each kind that real models have."""

from __future__ import annotations

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Contents joined with +, as SmolLM2 has it: a missing content is an error.
JOINED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The system prompt goes into the first user message; roles must alternate, starting with the user.
MERGED = (
    "{{ '<s>' }}{% set rest = messages %}{% set system = '' %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {% if loop.first %}{{ system }}{% endif %}{{ message['content'] }}"
    " [/INST]{% else %} {{ message['content'] }} </s>{% endif %}{% endfor %}"
)
# The same, but a conversation without a user message is refused.
USER_FIRST = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% if not rest or rest[0]['role'] != 'user' %}{{ raise_exception('a user message must come first') }}{% endif %}"
    + MERGED
)
# Thinking is kept only after the last user message.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'] or '' %}"
    "{% if m['role'] == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ content }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No control tokens at all: every border could be merged over.
PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Contents are trimmed, and the reply's end is written only when something follows.
TRIMMED = (
    "<s>{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] | trim }}"
    "{% if not loop.last %}</s>{% endif %}{% else %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
# The tool list stands in the first user message, and the system prompt alone is fine.
TOOLS_WITH_USER = (
    "{% set ns = namespace(tools=tools) %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'user' and ns.tools %}Tools: {{ ns.tools | tojson }}\n{% set ns.tools = none %}{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tool list stands before the last user message, so it moves on with every turn.
TOOLS_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}<s>{% for m in messages %}"
    "{% if tools and loop.index0 == ns.last %}[TOOLS] {{ tools | tojson }} [/TOOLS]{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
)
# Nothing stands between the messages.
GLUED = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "joined": JOINED,
    "merged": MERGED,
    "user_first": USER_FIRST,
    "thinking": THINKING,
    "plain": PLAIN,
    "trimmed": TRIMMED,
    "tools_with_user": TOOLS_WITH_USER,
    "tools_last": TOOLS_LAST,
    "glued": GLUED,
}

# In the manner of ChatML, Hermes with tools, Qwen3 with thinking, a strict one, and Gemma's.

# Turns of other roles than these three are left out without a word.
ROLES_ONLY = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) or (m.role == 'system' and not loop.first)"
    " %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}{% for call in m.tool_calls %}"
    "\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning stays only behind the last question; a system turn elsewhere is an error; developers are left out.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n"
    "{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
# The system turn first, then question and reply in turn; contents are trimmed.
STRICT = (
    "<s>{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content | trim }}[/SYS]{% endif %}"
    "{% for m in rest %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "<s>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
ROLE_TEMPLATES = {"chatml": ROLES_ONLY, "hermes": HERMES, "qwen3": QWEN3, "strict": STRICT, "gemma": GEMMA}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": {"type": "object"}}}
