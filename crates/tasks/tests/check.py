"""Reads tasks as JSON lines and prints one line for each difference from what the task claims."""

import json
import sys


def load(source):
    names = {}
    exec(compile(source, "module", "exec"), names)
    return names


def results(names, tests):
    def fake(name, *rest):
        return type("Module", (), {k: staticmethod(v) for k, v in names.items() if callable(v)})

    inside = dict(vars(sys.modules["builtins"]), __import__=fake)
    scope = {"__builtins__": inside}
    exec(compile(tests, "tests", "exec"), scope)
    found = {}
    for name, test in scope.items():
        if name.startswith("test_"):
            try:
                test()
                found[name] = "PASSED"
            except Exception:
                found[name] = "FAILED"
    return found


def visible(names, cases):
    lines = []
    for _, name, args, want in cases:
        got = repr(names[name](*args))
        if got != repr(want):
            lines.append(f"FAILED {name}: got {got}, expected {want!r}")
    return "\n".join(["exit 1"] + lines) if lines else "ok"


def check(task):
    old, new = load(task["old"]), load(task["new"])
    issue = task["issue"]
    call = issue.split(" ")[0]
    sentence = issue[issue.index(call + "(") :]
    call, rest = sentence.split(" gives ")
    got, want = rest[:-1].split(", expected ")
    if repr(eval(call, old)) != got:
        yield "gives " + repr(eval(call, old))
    if repr(eval(call, new)) != want:
        yield "expected " + repr(eval(call, new))
    if results(new, task["tests"]) != task["expected"]:
        yield "gold fails"
    if results(old, task["tests"]) != task["noop"]:
        yield "no-op differs from the recorded log"
    if set(results(old, task["tests"]).values()) == {"PASSED"}:
        yield "no-op passes"
    cases = load(task["examples"])["CASES"]
    if visible(new, cases) != "ok":
        yield "visible tests fail on gold"
    lines = task["old"].split("\n")
    for turn in task["turns"]:
        action = turn["action"]
        if action["name"] == "edit":
            lines[action["arguments"]["line"] - 1] = action["arguments"]["new"]
        elif action["name"] == "bash" and action["arguments"]["command"].endswith("run.py"):
            if visible(load("\n".join(lines)), cases) != turn["observation"]:
                yield "expert sees " + turn["observation"]
    if "\n".join(lines) != task["new"]:
        yield "the expert does not end at gold"


for line in sys.stdin:
    task = json.loads(line)
    for problem in check(task):
        print(task["id"], task["issue"], "::", problem)
