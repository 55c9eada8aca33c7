"""An agent on the tool runner of Anthropic's SDK: Messages, streamed."""

import os
import subprocess

from anthropic import Anthropic, beta_tool


@beta_tool
def bash(command: str) -> str:
    """Runs a shell command in the task's folder.

    Args:
        command: The command.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    return f"{done.stdout}{done.stderr}exit {done.returncode}"[:10_000]


runner = Anthropic().beta.messages.tool_runner(
    model=os.environ["MODEL"],
    max_tokens=8192,
    tools=[bash],
    messages=[{"role": "user", "content": os.environ["TASK_PROMPT"]}],
    stream=True,
)
for stream in runner:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    print()
