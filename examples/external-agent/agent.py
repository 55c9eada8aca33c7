"""An external agent: it shows the policy a module with one wrong line, and asks for an edit.

The module is compared, never executed, so that it needs no sandbox.
"""

import json

import orchestrate


def repair(episode: orchestrate.Episode) -> float:
    """Runs one episode, and returns its reward: 1 if the policy's edit repairs the module."""
    lines, fixed = (episode.task.row[name].splitlines() for name in ("module", "fixed"))
    # The agent reads the module itself, and tells the policy as if it had asked for that.
    read = {"name": "bash", "arguments": json.dumps({"command": "cat -n module.py"})}
    listing = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
    calls = [{"id": "read", "type": "function", "function": read}]
    messages = [
        {"role": "user", "content": episode.task.prompt},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "read", "content": listing},
    ]
    for call in episode.chat(messages).tool_calls:
        match call.name, call.arguments:
            case "edit", {"line": int(line), "new": str(new)} if 0 < line <= len(lines):
                lines[line - 1] = new
    return float(lines == fixed)


if __name__ == "__main__":
    orchestrate.main(repair)
