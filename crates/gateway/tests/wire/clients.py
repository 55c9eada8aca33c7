"""The vendors' own clients against a gateway: `clients.py SCENARIO BASE_URL`.

Each scenario gives the model a tool that adds, runs it when the model calls it, and prints one JSON
document about what it saw. The scripted model thinks, calls `add` with 2 and 3, and then writes
"The sum is 5.".
"""

import asyncio
import json
import sys

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_client(url, **options):
    import openai

    return openai.OpenAI(base_url=url + "/v1", api_key="key", **options)


def anthropic_client(url, **options):
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="key", **options)


def chat(url, stream):
    client = openai_client(url)
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    seen = []
    while True:
        fields = {"model": "policy", "messages": messages, "tools": tools, "logprobs": True, "top_logprobs": 2}
        if stream:
            with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
                kinds = {event.type for event in events}
                completion = events.get_final_completion()
            seen.append(sorted(kinds))
        else:
            completion = client.chat.completions.create(**fields)
        choice = completion.choices[0]
        message = choice.message
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
        assert choice.logprobs.content[0].top_logprobs[0].token == choice.logprobs.content[0].token
        if not message.tool_calls:
            return {"text": message.content, "finish": choice.finish_reason, "events": seen}
        assert choice.finish_reason == "tool_calls"
        call = message.tool_calls[0]
        again = {"role": "assistant", "content": message.content, "tool_calls": [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": call.function.arguments}}]}
        again["reasoning_content"] = message.model_extra["reasoning_content"]
        result = sum(json.loads(call.function.arguments).values())
        messages += [again, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]


def responses(url, stream):
    client = openai_client(url)
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    history = [{"role": "user", "content": "What is 2 + 3?"}]
    seen = []
    while True:
        fields = {"model": "policy", "input": history, "tools": tools, "store": False,
                  "include": ["reasoning.encrypted_content"]}
        if stream:
            with client.responses.stream(**fields) as events:
                kinds = [event.type for event in events]
                response = events.get_final_response()
            seen.append(kinds)
        else:
            response = client.responses.create(**fields)
        assert response.status == "completed" and response.usage.total_tokens > 0
        history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return {"text": response.output_text, "events": seen}
        for call in calls:
            result = sum(json.loads(call.arguments).values())
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})


def messages(url, stream):
    client = anthropic_client(url)
    tools = [{"name": "add", "input_schema": SCHEMA}]
    history = [{"role": "user", "content": "What is 2 + 3?"}]
    counted = client.messages.count_tokens(model="policy", messages=history).input_tokens
    seen = []
    while True:
        fields = {"model": "policy", "max_tokens": 2000, "messages": history, "tools": tools,
                  "thinking": {"type": "enabled", "budget_tokens": 1024}}
        if stream:
            with client.messages.stream(**fields) as events:
                kinds = [event.type for event in events]
                message = events.get_final_message()
            seen.append(kinds)
        else:
            message = client.messages.create(**fields)
        assert message.usage.output_tokens > 0
        history.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
        for block in history[-1]["content"]:
            block.pop("parsed_output", None)
        if message.stop_reason != "tool_use":
            return {"text": message.content[-1].text, "finish": message.stop_reason, "counted": counted, "events": seen}
        history.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
            for block in message.content if block.type == "tool_use"]})


def tool_runner(url, stream):
    from anthropic import beta_tool

    @beta_tool
    def add(a: int, b: int) -> str:
        """Adds two integers."""
        return str(a + b)

    runner = anthropic_client(url).beta.messages.tool_runner(
        model="policy", max_tokens=2000, tools=[add], stream=stream,
        messages=[{"role": "user", "content": "What is 2 + 3?"}])
    if stream:
        for events in runner:
            message = events.get_final_message()
    else:
        message = runner.until_done()
    return {"text": message.content[-1].text, "finish": message.stop_reason}


def agents(url, stream, model_class):
    import agents as sdk
    import openai

    sdk.set_tracing_disabled(True)

    @sdk.function_tool
    def add(a: int, b: int) -> int:
        """Adds two integers."""
        return a + b

    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="key")
    model = getattr(sdk, model_class)(model="policy", openai_client=client)
    agent = sdk.Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])

    async def run():
        if stream:
            result = sdk.Runner.run_streamed(agent, "What is 2 + 3?")
            async for _ in result.stream_events():
                pass
        else:
            result = await sdk.Runner.run(agent, "What is 2 + 3?")
        return {"text": result.final_output, "items": [item.type for item in result.new_items]}

    return asyncio.run(run())


def failures(url, vendor):
    """What a failing request raises, and in a stream."""
    import httpx  # noqa: F401  (part of both clients)

    ask = [{"role": "user", "content": "hi"}]
    if vendor == "anthropic":
        client = anthropic_client(url, max_retries=1)
        call = lambda: client.messages.create(model="policy", max_tokens=9, messages=ask)
        stream = lambda: list(client.messages.create(model="policy", max_tokens=9, messages=ask, stream=True))
    elif vendor == "chat":
        client = openai_client(url, max_retries=1)
        call = lambda: client.chat.completions.create(model="policy", messages=ask)
        stream = lambda: list(client.chat.completions.create(model="policy", messages=ask, stream=True))
    else:
        client = openai_client(url, max_retries=1)
        call = lambda: client.responses.create(model="policy", input=ask)
        stream = lambda: [event.type for event in client.responses.create(model="policy", input=ask, stream=True)]
    outcome = {}
    for name, attempt in (("call", call), ("stream", stream)):
        try:
            outcome[name] = str(attempt())
        except Exception as error:
            outcome[name] = f"{type(error).__name__}: {error} {getattr(error, 'code', None)}"
    return outcome


def image(url):
    """A content that the model cannot read."""
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    blocks = [{"type": "image", "source": source}]
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    outcome = []
    for attempt in (
        lambda: anthropic_client(url).messages.create(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": blocks}]),
        lambda: openai_client(url).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": parts}]),
    ):
        try:
            outcome.append(str(attempt()))
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")
    return {"errors": outcome, "models": [model.id for model in openai_client(url).models.list()],
            "anthropic_models": [model.id for model in anthropic_client(url).models.list()]}


SCENARIOS = {
    "chat": lambda url: chat(url, False),
    "chat-stream": lambda url: chat(url, True),
    "responses": lambda url: responses(url, False),
    "responses-stream": lambda url: responses(url, True),
    "messages": lambda url: messages(url, False),
    "messages-stream": lambda url: messages(url, True),
    "tool-runner": lambda url: tool_runner(url, False),
    "tool-runner-stream": lambda url: tool_runner(url, True),
    "agents-responses": lambda url: agents(url, False, "OpenAIResponsesModel"),
    "agents-responses-stream": lambda url: agents(url, True, "OpenAIResponsesModel"),
    "agents-chat": lambda url: agents(url, False, "OpenAIChatCompletionsModel"),
    "agents-chat-stream": lambda url: agents(url, True, "OpenAIChatCompletionsModel"),
    "fail-anthropic": lambda url: failures(url, "anthropic"),
    "fail-chat": lambda url: failures(url, "chat"),
    "fail-responses": lambda url: failures(url, "responses"),
    "image": image,
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](sys.argv[2])))
