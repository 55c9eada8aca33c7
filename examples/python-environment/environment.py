"""A Python environment: repair one line of a module. The module is compared, never executed."""

import orchestrate


def act(call: orchestrate.ToolCall, lines: list[str], fixed: list[str]) -> str:
    """Performs a call on the module's lines, and returns the observation for the policy."""
    try:
        arguments = call.arguments
    except orchestrate.MalformedCall as error:
        return f"{call.name} call is not valid: {error}"
    match call.name, arguments:
        case "bash", {"command": str(command)} if command.startswith("cat"):
            return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
        case "bash", _:
            return "ok" if lines == fixed else "exit 1\nFAILED"
        case "edit", {"line": int(line), "new": str(new)} if 0 < line <= len(lines):
            lines[line - 1] = new
            return "ok"
    return f"{call.name} call is not valid"


@orchestrate.environment(timeout=60)
def repair(episode: orchestrate.Episode) -> tuple[float, dict[str, float]]:
    """Lets the policy read, edit and check a module until it submits."""
    lines, fixed = (episode.task.row[name].splitlines() for name in ("module", "fixed"))
    messages = [{"role": "user", "content": episode.task.prompt}]
    while True:
        reply = episode.chat(messages)
        messages.append(reply.message)
        if not reply.tool_calls:
            messages.append({"role": "user", "content": "no tool call found: each turn needs one"})
        for call in reply.tool_calls:
            if call.name == "submit":
                return float(lines == fixed), {"messages": len(messages)}
            text = act(call, lines, fixed)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


if __name__ == "__main__":
    repair.main()
