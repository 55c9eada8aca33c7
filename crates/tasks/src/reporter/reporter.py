"""Runs hidden tests in a child process and reports their results, framed by a nonce.

Started by the grader as `python -I -S -B reporter.py` in the folder of the repository. This process
imports nothing of the repository. It reads the nonce and the plan, hides its memory, and starts the
tests in a session of their own without capabilities. What the tests print is passed on as plain
text and never read. Results arrive as messages over a pipe from the plug-in in `child.py`, which
asks this process after the body of every test whether to go on. For a few tests, chosen at random,
the answer is to fail: a copy of the process then has to report that failure. Tested code that turns
failures into passes cannot tell these tests from the others. For a few more, a copy runs the body
again with other expected values, which must fail: code that reads what a test expects, or that
returns something equal to everything, passes there too.
"""

import errno
import os
import select
import sys
import time

NONCE = "ORCHESTRATE_NONCE"
PREFIX = "orchestrate-report"
# Exit status if the tests could not be started; the tested code has no influence on it.
NOT_STARTED = 97
CANARIES = 4
MESSAGE_BYTES = 1 << 20
RESULT_BYTES = 8 << 20
# Time for copies of the process to report after the tests have ended.
GRACE_S = 10.0
SCRUBBED = ("PYTHON", "LD_", "PYTEST_", "COVERAGE_", "COV_", "ORCHESTRATE_")


def libc(name, *args):
    """Calls a C function without the ctypes package, which starts slowly."""
    import _ctypes

    return _ctypes.call_cdeclfunction(_ctypes.dlsym(_ctypes.dlopen(None, 0), name), args)


def hide():
    """Denies other processes access to this one's memory, environment and files in /proc."""
    libc("prctl", 4, 0, 0, 0, 0)
    if libc("prctl", 3, 0, 0, 0, 0) != 0:
        raise OSError("the process cannot be hidden")
    # Processes whose parents ended become children of this one, so that it can wait for them.
    libc("prctl", 36, 1, 0, 0, 0)


def give_up_capabilities():
    """Even as root the child may then not look into a process that hides, and never regains it."""
    libc("prctl", 38, 1, 0, 0, 0)
    libc("capset", (0x20080522).to_bytes(4, sys.byteorder) + bytes(4), bytes(24))


class Tampered(Exception):
    """The tested code sent something that only the plug-in may send."""


class Results:
    """What the messages of one test run add up to."""

    def __init__(self, wanted):
        self.wanted = wanted
        self.statuses = {}
        self.bytes = 0
        self.functions = {}
        self.tokens = {}
        self.findings = {}
        self.chosen = {}
        self.canaries = {}
        self.alterable = {}
        self.altered = []
        self.repeated = {}
        self.settled = False
        self.finished = None
        self.test = None
        self.seen = set()
        self.pid = None

    def note(self, finding, why):
        self.findings.setdefault(finding, why)

    def set(self, test, status):
        """The worst status of a test counts, in pytest's order of severity."""
        order = ("PASSED", "ERROR", "FAILED")
        known = self.statuses.get(test)
        if known is None:
            self.bytes += len(test) + 32
            if self.bytes > RESULT_BYTES:
                raise Tampered("too many results")
        if known is None or order.index(status) > order.index(known):
            self.statuses[test] = status

    def handle(self, kind, fields):
        """Takes one message and returns the answer; None if there is none."""
        handler = getattr(self, "on_" + kind, None)
        if handler is None:
            raise Tampered("an unknown message")
        return handler(*fields)

    def on_function(self, path, name, token, required, plain, repeated):
        if self.settled:
            raise Tampered("a test function was registered late")
        self.tokens[token] = (path, name)
        if repeated:
            self.repeated[token] = repeated
        # Ids of tests may be relative to another folder, so only the file's name is compared.
        place = (os.path.basename(path), name)
        entry = self.functions.setdefault(place, [True, set()])
        entry[0] = entry[0] and required == "1"
        entry[1].add(token)
        if plain == "1":
            self.chosen[token] = None

    def on_ready(self, pid):
        if self.settled:
            raise Tampered("the tests began twice")
        self.settled = True
        self.pid = int(pid)
        names = sorted(self.alterable)
        preferred = [token for token in names if self.alterable[token] in self.wanted]
        self.altered = sample(preferred, CANARIES)
        others = [token for token in names if token not in self.altered]
        self.altered += sample(others, CANARIES - len(self.altered))
        plain = sorted(self.chosen)
        preferred = [token for token in plain if self.tokens[token][1] in self.wanted]
        chosen = sample(preferred, CANARIES)
        others = [token for token in plain if token not in chosen]
        self.chosen = dict.fromkeys(chosen + sample(others, CANARIES - len(chosen)))
        return b"c"

    def on_alterable(self, token, name):
        if self.settled:
            raise Tampered("a test function was registered late")
        self.alterable[token] = name

    def on_altered(self, token):
        """Decides whether a copy of the process runs this test with other expected values."""
        if token not in self.alterable:
            raise Tampered("a test that is unknown was to be altered")
        self.seen.add(token)
        if token not in self.altered or token in self.canaries or not self.is_single():
            return b"c"
        self.canaries[token] = [None, None, time.monotonic()]
        return (b"p" if os.urandom(1)[0] & 1 else b"k") + bytes(16)

    def on_start(self, test):
        self.test = test
        self.seen = set()

    def on_done(self, token):
        if token not in self.tokens:
            raise Tampered("a test that is unknown was completed")
        # Both questions are at the end of the body, this one last.
        if self.repeated.get(token, token) not in self.seen | {token}:
            self.note("tampered", "a test was completed before its body had reached its end")
        self.seen.add(token)
        if token in self.chosen and token not in self.canaries and self.is_single():
            secret = os.urandom(8).hex()
            self.canaries[token] = [secret, None, time.monotonic()]
            return (b"p" if os.urandom(1)[0] & 1 else b"k") + secret.encode()
        return b"c"

    def is_single(self):
        """Whether the process has one thread: a copy of it would have no other."""
        try:
            return len(os.listdir("/proc/%d/task" % self.pid)) == 1
        except OSError:
            return False

    def on_moved(self, pid):
        """The tests go on in a copy of the process."""
        self.pid = int(pid)
        return b"c"

    def on_canary(self, token, outcome, message):
        entry = self.canaries.get(token)
        if entry is None or entry[1] is not None:
            raise Tampered("a forced failure was reported that was not asked for")
        if entry[0] is None:
            # Any failure will do: the test ran a second time.
            entry[1] = outcome != "passed"
            if not entry[1]:
                self.note("tampered", "a test passed with other expected values")
            return None
        if outcome == "expected":
            # The test is marked to be expected to fail, so its report says nothing.
            del self.canaries[token]
            return None
        entry[1] = outcome == "failed" and entry[0] in message
        if not entry[1]:
            self.note("tampered", "a test that was made to fail was reported as %s" % outcome)
        return None

    def on_report(self, test, when, outcome, kind):
        if self.test != test:
            self.note("tampered", "%s was reported and had not begun" % test)
        if outcome == "failed":
            self.set(test, "FAILED" if when == "call" else "ERROR")
        elif outcome == "passed" and when == "call" and kind == "plain":
            self.completed(test)
            self.set(test, "PASSED")

    def completed(self, test):
        """Checks that the body of a test which is reported as passed was left at its end."""
        parts = test.split("[")[0].split("::")
        place = (os.path.basename(parts[0]), ".".join(parts[1:]))
        required, tokens = self.functions.get(place, (False, set()))
        if required and not tokens & self.seen:
            self.note("tampered", "%s is reported as passed and did not reach its end" % test)

    def on_collect(self, test):
        self.set(test, "ERROR")

    def on_finding(self, finding, why):
        if finding not in ("tampered", "introspection"):
            raise Tampered("an unknown finding")
        self.note(finding, why)

    def on_finish(self, status):
        self.finished = int(status)
        return b"c"

    def waiting(self):
        return [entry for entry in self.canaries.values() if entry[1] is None]

    def close(self, exit_code):
        """Checks at the end that everything agrees."""
        failures = any(status != "PASSED" for status in self.statuses.values())
        if self.waiting():
            self.note("tampered", "a test that was made to fail was not reported")
        if self.finished is None:
            self.note("exit_status", "the test run did not come to its end")
        elif self.finished != exit_code:
            self.note("exit_status", "ended with %s instead of %s" % (exit_code, self.finished))
        elif exit_code == 0 and failures or exit_code == 1 and not failures:
            self.note("exit_status", "ended with %s, which contradicts the results" % exit_code)
        elif exit_code not in (0, 1):
            self.note("exit_status", "ended with %s" % exit_code)
        if not self.canaries and "PASSED" in self.statuses.values():
            self.note("no_canary", "no test has a form in which it can be made to fail")


def sample(items, count):
    items = list(items)
    chosen = []
    while items and len(chosen) < count:
        chosen.append(items.pop(int.from_bytes(os.urandom(8), "big") % len(items)))
    return chosen


class Pipe:
    """Reads messages: a length of 4 bytes, a cookie, and fields with their lengths."""

    def __init__(self, events, replies, cookie):
        self.events = events
        self.replies = replies
        self.cookie = cookie
        self.data = b""

    def read(self):
        part = os.read(self.events, 1 << 16)
        self.data += part
        return bool(part)

    def messages(self):
        while len(self.data) >= 4:
            size = int.from_bytes(self.data[:4], "big")
            if size > MESSAGE_BYTES:
                raise Tampered("a message that the plug-in did not write")
            if len(self.data) < 4 + size:
                return
            body, self.data = self.data[4 : 4 + size], self.data[4 + size :]
            if body[:16] != self.cookie:
                raise Tampered("a message without the cookie")
            yield fields_of(body[16:])

    def reply(self, answer):
        if answer is not None:
            try:
                os.write(self.replies, answer)
            except OSError:
                pass


def fields_of(data):
    fields = []
    while data:
        size, colon, data = data.partition(b":")
        if not colon or not size.isdigit() or int(size) > len(data):
            raise Tampered("a message of unknown form")
        fields.append(data[: int(size)].decode("utf-8", "replace"))
        data = data[int(size) :]
    if not fields:
        raise Tampered("an empty message")
    return fields


def open_spec(folder, spec):
    """A file without a name that contains `spec`, which may be too long for an argument."""
    path = os.path.join(folder, "spec.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(spec)
    opened = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return opened


def start(plan, child_source, spec):
    """Starts the tests and returns the child's id, the pipe of messages and that of its output."""
    output, output_in = os.pipe()
    events, events_in = os.pipe()
    replies_out, replies = os.pipe()
    cookie = os.urandom(16)
    os.write(replies, cookie)
    removed = SCRUBBED + tuple(plan["unset"])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
    environ.update(plan["env"])
    # Far from the numbers that programs expect to be free.
    ends = (replies_out, events_in, spec)
    numbers = sample(range(90, 250), 3)
    arguments = [str(number) for number in numbers] + plan["arguments"]
    argv = plan["wrapper"] + [plan["python"]] + plan["flags"] + ["-c", child_source] + arguments
    path = which(argv[0], environ)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            give_up_capabilities()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(output_in, 1)
            os.dup2(output_in, 2)
            for end, number in zip(ends, numbers):
                os.dup2(end, number)
            for number in range(3, 1024):
                if number not in numbers:
                    close(number)
            os.execve(path, argv, environ)
        finally:
            os._exit(NOT_STARTED)
    for end in (output_in, events_in, replies_out, spec):
        os.close(end)
    return pid, Pipe(events, replies, cookie), output


def close(number):
    try:
        os.close(number)
    except OSError:
        pass


def which(program, environ):
    if "/" in program:
        return program
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK):
            return path
    return program


def pass_on(output):
    """Passes on some output of the tests; False at its end."""
    part = os.read(output, 1 << 16)
    view = memoryview(part)
    while view:
        view = view[os.write(1, view) :]
    return bool(part)


def ended(pid):
    """The exit status of the child, if it ended; other processes are collected on the way."""
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except OSError:
            return None
        if found == 0:
            return None
        if found == pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


def follow(results, pid, pipe, output):
    """Follows the child to its end. Returns its exit status."""
    streams = {output, pipe.events}
    status, deadline = None, None
    while True:
        ready = select.select(list(streams), [], [], 0.05)[0]
        if output in ready and not pass_on(output):
            streams.discard(output)
        if pipe.events in ready:
            if not pipe.read():
                streams.discard(pipe.events)
            for fields in pipe.messages():
                pipe.reply(dispatch(results, fields))
        if status is None:
            status = ended(pid)
            deadline = time.monotonic() + GRACE_S
        if status is not None:
            is_over = time.monotonic() > deadline
            if is_over or not ready and not results.waiting():
                return status


def dispatch(results, fields):
    try:
        return results.handle(fields[0], fields[1:])
    except (TypeError, ValueError):
        raise Tampered("a message of unknown form")


def kill_all():
    """Ends every process of the container except the first one and this one."""
    try:
        os.kill(-1, 9)
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise


def remove(folder):
    for name in ("reporter.py", "plan.json", "child.py"):
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


def prepare():
    import json

    # This program ends with the death of every process but the first one's, so it runs in sandboxes only.
    with open("/proc/1/comm", encoding="utf-8") as file:
        if not file.read().startswith("orchestrate-sup"):
            raise RuntimeError("process 1 is not a sandbox's supervisor")
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    nonce = os.environ.pop(NONCE)
    hide()
    with open(os.path.join(folder, "plan.json"), encoding="utf-8") as file:
        plan = json.load(file)
    with open(os.path.join(folder, "child.py"), encoding="utf-8") as file:
        child_source = file.read()
    spec = open_spec(folder, json.dumps(plan["spec"]))
    remove(folder)
    return json, nonce, plan, child_source, spec


def main():
    try:
        json, nonce, plan, child_source, spec = prepare()
        pid, pipe, output = start(plan, child_source, spec)
    except Exception as error:
        os.write(2, ("the tests cannot be started: %r\n" % error).encode())
        os._exit(NOT_STARTED)
    results = Results(set(plan["wanted"]))
    exit_code = None
    try:
        exit_code = follow(results, pid, pipe, output)
    except Tampered as error:
        results.note("tampered", str(error))
    kill_all()
    while exit_code is not None and pass_on(output):
        pass
    results.close(exit_code)
    report = {
        "results": list(results.statuses.items()),
        "findings": results.findings,
        "canaries": len(results.canaries),
        "exit": exit_code,
    }
    text = "\n%s %s %s\n" % (PREFIX, nonce, json.dumps(report))
    view = memoryview(text.encode())
    while view:
        view = view[os.write(1, view) :]
    os._exit(0)


main()
