"""A Python environment whose policy runs commands in a sandbox, and its reward."""

import orchestrate


def act(episode: orchestrate.Episode, call: orchestrate.ToolCall) -> str:
    """Performs a call in the sandbox, and returns the observation for the policy."""
    try:
        arguments = call.arguments
    except orchestrate.MalformedCall as error:
        return f"{call.name} call is not valid: {error}"
    if call.name == "bash":
        done = episode.run(str(arguments.get("command")), timeout=10)
        text = (done.stdout + done.stderr).rstrip()[:1000] or "ok"
        return text if done.exit_code == 0 else f"exit {done.exit_code}\n{text}"
    try:
        path = str(arguments["path"])
        lines = episode.sandbox.read_file(path).decode().splitlines()
        lines[range(1, len(lines) + 1).index(arguments["line"])] = str(arguments["new"])
    except (orchestrate.AgentFailure, KeyError, ValueError) as error:
        return f"{call.name} call is not valid: {error}"
    episode.sandbox.write_files({path: "\n".join(lines) + "\n"})
    return "ok"


@orchestrate.environment(timeout=120, image="orchestrate/micro", read_only=True)
def repair(episode: orchestrate.Episode) -> bytes:
    """Lets the policy run commands and edit lines until it submits. Returns its module."""
    episode.sandbox.write_files(episode.task.row["files"])
    messages = [{"role": "user", "content": episode.task.prompt}]
    while True:
        reply = episode.chat(messages)
        messages.append(reply.message)
        if not reply.tool_calls:
            messages.append({"role": "user", "content": "no tool call found: each turn needs one"})
        for call in reply.tool_calls:
            if call.name == "submit":
                return episode.sandbox.read_file(episode.task.row["path"])
            text = act(episode, call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


@repair.reward(timeout=60)
def hidden_tests(episode: orchestrate.Episode, module: bytes) -> float:
    """Calls the module in a new sandbox. The expected values stay outside of it."""
    path, tests = episode.task.row["path"], episode.task.row["tests"]
    script = f"from {path.removesuffix('.py')} import *\nfor call in {list(tests)}:\n"
    script += "    print(repr(eval(call)))\n"
    episode.sandbox.write_files({path: module, "tests.py": script})
    done = episode.run(["python3", "tests.py"], timeout=10)
    return float(done.stdout.splitlines() == list(tests.values()))


if __name__ == "__main__":
    repair.main()
