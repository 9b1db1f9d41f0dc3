"""Sessions of the Python clients. Run by the Python of their own environment, so this file imports nothing else here.

    python client_sessions.py CLIENT URL     three questions, each answered with a tool call and then with text

Prints a line with the text of each reply. Ends with an error where a client does, or where the tool was not called.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL = "gpt-4o"
SYSTEM = "You are a careful assistant who looks a town up before saying anything about it. " * 4
TOWNS = ("Rome", "Oslo", "Lima")
QUESTIONS = [f'How is the weather there? <<weather {{"town": "{town}"}}>>' for town in TOWNS]
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FUNCTION = {"name": "weather", "description": "The weather of a town.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}

called: list[str] = []


def weather(town: str) -> str:
    """The weather of a town."""
    called.append(town)
    return f"It rains in [[{town}]]."


def openai_chat(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="dummy")
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(2):
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(message.content)


def openai_responses(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="dummy")
    tool = {"type": "function", "strict": False, **FUNCTION}
    previous, items = None, []
    for question in QUESTIONS:
        items = [{"role": "user", "content": question}]
        for _ in range(2):
            about = {"model": MODEL, "instructions": SYSTEM, "tools": [tool], "previous_response_id": previous}
            with client.responses.stream(input=items, **about) as stream:
                response = stream.get_final_response()
            previous = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            results = [(call.call_id, weather(**json.loads(call.arguments))) for call in calls]
            items = [{"type": "function_call_output", "call_id": id, "output": result} for id, result in results]
        print(response.output_text)


def anthropic(url: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="dummy")
    tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(2):
            about = {"model": "claude-sonnet-5", "max_tokens": 200, "system": system, "tools": [tool]}
            with client.messages.stream(messages=messages, **about) as stream:
                message = stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "user", "content": results}] if results else []
        print(message.content[0].text)


def openai_agents(url: str, is_chat: bool = False) -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="dummy")
    kind: Any = OpenAIChatCompletionsModel if is_chat else OpenAIResponsesModel
    agent = Agent(
        name="a", instructions=SYSTEM, tools=[function_tool(weather)], model=kind(model=MODEL, openai_client=client)
    )
    items: list[Any] = []
    for question in QUESTIONS:
        result = Runner.run_sync(agent, [*items, {"role": "user", "content": question}])
        items = result.to_input_list()
        print(result.final_output)


def openai_agents_chat(url: str) -> None:
    openai_agents(url, is_chat=True)


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="dummy"))
    agent = Agent(model, system_prompt=SYSTEM, tools=[weather])
    history: list[Any] = []
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        history = result.all_messages()
        print(result.output)


def langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="dummy").bind_tools([weather])
    messages: list[Any] = [SystemMessage(SYSTEM)]
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        for _ in range(2):
            message = model.invoke(messages)
            messages.append(message)
            messages += [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        print(message.content)


def litellm(url: str) -> None:
    from litellm import completion

    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    about = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "dummy", "tools": [TOOL]}
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(2):
            message = completion(messages=messages, **about).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(message.content)


def ollama(url: str) -> None:
    from ollama import Client

    client = Client(host=url)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(2):
            message = client.chat(model=MODEL, messages=messages, tools=[weather]).message
            messages.append(message)
            for call in message.tool_calls or ():
                result = weather(**call.function.arguments)
                messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
        print(message.content)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    assert called == list(TOWNS), called
