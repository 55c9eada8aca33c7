"""Samples once through the generate client of `renderers`, with a renderer that returns fixed values."""

import asyncio
import base64
import json
import sys

from openai import AsyncOpenAI
from renderers.client import OverlongPromptError, generate


class Parsed:
    content = "text"
    reasoning_content = None
    tool_calls = ()
    reasoning_complete = None


class Renderer:
    def get_stop_token_ids(self):
        return [9]

    def parse_response(self, token_ids, **_):
        return Parsed()


async def main(url):
    client = AsyncOpenAI(base_url=url, api_key="any")

    async def ask(prompt):
        return await generate(
            client=client, renderer=Renderer(), messages=[], model="policy", prompt_ids=prompt
        )

    reply = await ask([5, 6, 7])
    routed = reply["routed_experts"]
    data = base64.b64decode(bytes(routed["data"]))
    rows, layers, top_k = routed["shape"]
    size = layers * top_k
    assert len(data) == rows * size and routed["start"] == 0 and routed["dtype"] == "uint8"
    try:
        await ask([1] * 5000)
        too_long = False
    except OverlongPromptError:
        too_long = True
    seen = {name: reply[name] for name in ("completion_ids", "completion_logprobs", "finish_reason")}
    seen["rows"] = [list(data[row * size : (row + 1) * size]) for row in range(rows)]
    print(json.dumps(seen | {"too_long": too_long}))


asyncio.run(main(sys.argv[1]))
