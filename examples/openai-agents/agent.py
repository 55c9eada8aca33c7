"""An agent on the OpenAI Agents SDK: `agent.py chat` uses Chat Completions, `agent.py responses` Responses."""

import asyncio
import os
import subprocess
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def bash(command: str) -> str:
    """Runs a shell command in the task's folder."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    return f"{done.stdout}{done.stderr}exit {done.returncode}"[:10_000]


async def main(dialect: str) -> None:
    set_tracing_disabled(True)
    model = MODELS[dialect](model=os.environ["MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(name="agent", instructions="Solve the task with the tool `bash`.", tools=[bash], model=model)
    result = Runner.run_streamed(agent, os.environ["TASK_PROMPT"], max_turns=100)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main(sys.argv[1]))
