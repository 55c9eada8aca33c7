"""A minimal agent: Chat Completions, three tools, nothing but Python's standard library."""

import json
import os
import subprocess
import urllib.request

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PARAMETERS = {
    "bash": {"command": TEXT},
    "edit": {"path": TEXT, "old_str": TEXT, "new_str": TEXT, "line": NUMBER, "new": TEXT},
    "submit": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}
    for name, fields in PARAMETERS.items()
]


def bash(command):
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60)
    output = (done.stdout + done.stderr).rstrip() or "(no output)"
    return output if done.returncode == 0 else f"exit {done.returncode}\n{output}"


def edit(path, old_str=None, new_str=None, line=None, new=None):
    text = open(path).read()
    lines = text.split("\n")
    if line is not None:
        lines[line - 1] = new
        text = "\n".join(lines)
    else:
        assert text.count(old_str) == 1, f"old_str occurs {text.count(old_str)} times"
        text = text.replace(old_str, new_str)
    open(path, "w").write(text)
    return "ok"


def main():
    messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    while True:
        body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": TOOLS}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
        request.add_header("content-type", "application/json")
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": "no tool call found: each turn needs one"})
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name == "submit":
                return
            try:
                result = {"bash": bash, "edit": edit}[name](**json.loads(arguments))
            except Exception as error:
                result = f"{name} call is not valid: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result[:10_000]})


main()
