"""Start `radixcache serve` and send two turns with OpenAI's API: the second turn reuses the first.

Any client of OpenAI's API works: set OPENAI_BASE_URL to the address of the server plus /v1.
"""

import json
import subprocess
import sys
from urllib.request import Request, urlopen

# A model with random weights, at a free port. In a shell: radixcache serve --model tiny --port 0
COMMAND = [sys.executable, "-m", "radixcache", "serve", "--model", "tiny", "--port", "0", "--log-level", "ERROR"]


def ask(url: str, messages: list[dict[str, str]]) -> None:
    """Send a chat request, append the reply to the messages, and print how much of the prompt was reused."""
    body = json.dumps({"messages": messages, "max_tokens": 12}).encode()
    request = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        answer = json.load(response)
    usage = answer["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{messages[-1]['content']} {cached_tokens} of {usage['prompt_tokens']} prompt tokens were reused.")
    messages.append(answer["choices"][0]["message"])


with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as server:
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]  # serving tiny at http://127.0.0.1:PORT
    try:
        talk = [{"role": "system", "content": "You answer questions about rivers, briefly and politely."}]
        for question in ("Which river runs through Rome?", "And which one runs through Paris?"):
            talk.append({"role": "user", "content": question})
            ask(url, talk)
    finally:
        server.terminate()
