# Runs pytest, and reports every result over a pipe. Started by reporter.py with the numbers of three
# descriptors (answers, messages, and a file that describes the run) and pytest's arguments.
# Everything that is needed later is bound here, before code of the repository runs.


def _begin():
    import _thread
    import ast
    import builtins
    import json
    import os
    import posix
    import sys
    import types

    replies, events = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(int(sys.argv[3]), encoding="utf-8") as file:
        spec = json.load(file)
    arguments = sys.argv[4:]
    for number in (replies, events):
        os.set_inheritable(number, False)
    here = os.getcwd()
    # The folder of the repository is not searched before pytest is there.
    sys.path[:] = [p for p in sys.path if p not in ("", here) or p == here and p != sys.path[0]]

    write, read, fork, leave = posix.write, posix.read, posix.fork, posix._exit
    waitpid, process_id = posix.waitpid, posix.getpid
    realpath, get_frame, get_trace = os.path.realpath, sys._getframe, sys.gettrace
    get_profile, AssertionFailure = sys.getprofile, AssertionError
    lock = _thread.allocate_lock()
    state = {"canary": None, "parent_of": None, "pending": [], "sent": set(), "ready": False}
    state["gate"] = None
    first_trace, first_profile = get_trace(), get_profile()

    def take(size):
        data = b""
        while len(data) < size:
            part = read(replies, size - len(data))
            if not part:
                leave(96)
            data += part
        return data

    cookie = take(16)

    def send(fields):
        data = cookie
        for field in fields:
            field = field.encode("utf-8", "backslashreplace")
            data += b"%d:" % len(field) + field
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[write(events, data) :]

    def tell(*fields):
        """Sends a message. A copy of the process sends nothing."""
        if state["canary"] is not None:
            return
        lock.acquire()
        try:
            pending, state["pending"] = state["pending"], []
            for finding in pending:
                send(("finding",) + finding)
            send(fields)
        finally:
            lock.release()

    def ask(*fields):
        """Sends a message and waits for the answer."""
        if state["canary"] is not None:
            return b"c"
        tell(*fields)
        answer = take(1)
        return answer + take(16) if answer in (b"k", b"p") else answer

    def note(finding, why):
        if (finding, why) not in state["sent"] and len(state["sent"]) < 100:
            state["sent"].add((finding, why))
            state["pending"].append((finding, why))

    # What pytest and unittest consist of, compared after every test.
    watched = []

    def watch(space, name, value):
        code = getattr(value, "__code__", None)
        defaults = getattr(value, "__defaults__", None)
        watched.append((space, name, value, code, defaults))

    def watch_module(module):
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, type):
                watch(vars(module), name, value)
                for attribute, function in list(vars(value).items()):
                    if attribute not in ("__dict__", "__weakref__", "__doc__", "_abc_impl"):
                        kinds = (types.FunctionType, property, staticmethod, classmethod)
                        if isinstance(function, kinds):
                            watch(vars(value), attribute, function)
            elif isinstance(value, types.FunctionType):
                watch(vars(module), name, value)

    absent = object()

    def check():
        for space, name, value, code, defaults in watched:
            if space.get(name, absent) is not value:
                note("tampered", "%s was replaced" % name)
            elif code is not None:
                if value.__code__ is not code or value.__defaults__ is not defaults:
                    note("tampered", "the code of %s was replaced" % name)
        if get_trace() is not first_trace or get_profile() is not first_profile:
            note("introspection", "a trace function is set")

    def done(token):
        """Called where a test has reached its end."""
        check()
        state["checked"] = True
        answer = ask("done", token)
        if answer[:1] not in (b"k", b"p"):
            return
        parent_fails = answer[:1] == b"p"
        copy = fork()
        if (copy != 0) == parent_fails:
            state["parent_of"] = copy if parent_fails else None
            state["canary"] = (token, answer[1:].decode())
            raise AssertionFailure("made to fail: " + answer[1:].decode())
        if parent_fails:
            ask("moved", str(process_id()))

    def altered(token):
        """Whether this copy of the process runs the test with other expected values."""
        answer = ask("altered", token)
        if answer[:1] not in (b"k", b"p"):
            return False
        parent_runs = answer[:1] == b"p"
        watched_end, gate = posix.pipe()
        copy = fork()
        if (copy != 0) == parent_runs:
            posix.close(watched_end)
            state["gate"] = gate
            state["parent_of"] = copy if parent_runs else None
            state["canary"] = (token, "")
            return True
        posix.close(gate)
        # Only one of the two uses what tests share.
        read(watched_end, 1)
        posix.close(watched_end)
        if parent_runs:
            ask("moved", str(process_id()))
        return False

    def end_canary(outcome, message):
        """Reports the forced failure and ends this copy of the process."""
        token, _ = state["canary"]
        send(("canary", token, outcome, message[:2000]))
        if state["gate"] is not None:
            write(state["gate"], b"x")
        status = 0
        if state["parent_of"] is not None:
            _, status = waitpid(state["parent_of"], 0)
            status = status >> 8 if status & 0x7F == 0 else 128 + (status & 0x7F)
        leave(status)

    touched = frozenset(realpath(os.path.join(here, path)) for path in spec["touched"])
    tracing = frozenset(realpath(os.path.join(here, path)) for path in spec["tracing"])
    hidden = tuple(realpath(os.path.join(here, path)) for path in spec["hidden"])
    trace_events = ("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback")
    inspecting = (
        "sys._getframe",
        "sys._current_frames",
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
        "os.kill",
        "os.killpg",
        "os.exec",
        "sys.addaudithook",
    )

    def is_touched(name, cache={}):
        known = cache.get(name)
        if known is None:
            known = cache[name] = realpath(name) in touched
        return known

    def caller(every):
        """A file of the change in the stack (`every`) or at its top."""
        frame = get_frame(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if is_touched(name):
                return realpath(name)
            frame = frame.f_back if every else None
        return None

    busy = [False]

    def audit(event, args):
        if busy[0]:
            return
        if event == "open":
            path = args[0]
            if type(path) is not str:
                return
            is_hidden = realpath(path).startswith(hidden) if "test" in path else False
            if not is_hidden and not path.startswith("/proc"):
                return
            busy[0] = True
            try:
                if caller(False):
                    kind = "tampered" if is_hidden else "introspection"
                    note(kind, "the tested code opens %s" % ("a test" if is_hidden else "/proc"))
            finally:
                busy[0] = False
        elif event in trace_events or event in inspecting or event.startswith("ctypes."):
            busy[0] = True
            try:
                found = caller(event in trace_events)
                if found and event in trace_events and found not in tracing:
                    note("tampered", "the tested code calls " + event)
                elif found:
                    note("introspection", "the tested code calls " + event)
            finally:
                busy[0] = False

    plain_types = frozenset((int, float, str, bytes, bool, list, tuple, dict, set, type(None)))

    class Stranger(object):
        """Equal to nothing."""

    libraries = ("%ssite-packages%s" % (os.sep, os.sep), "%sdist-packages%s" % (os.sep, os.sep))
    standard = realpath(os.path.dirname(os.__file__)) + os.sep

    def is_library(name, cache={}):
        known = cache.get(name)
        if known is None:
            path = realpath(name)
            installed = path.startswith(standard) or any(part in path for part in libraries)
            known = cache[name] = installed and path not in touched
        return known

    def strangers():
        """Values that differ from each other and from one call to the next, the likely kinds first."""
        number = int.from_bytes(posix.urandom(2), "big")
        word = posix.urandom(3).hex()
        return (number, number + 1, -number - 1, word, word + "x", [number], (word,), Stranger())

    def probe(value):
        """Returns `value`, after a check that it is not equal to everything, or to what comes first."""
        kind = type(value)
        if kind in plain_types:
            return value
        for base in kind.__mro__:
            method = base.__dict__.get("__eq__")
            if method is not None:
                code = getattr(method, "__code__", None)
                if code is not None and not is_library(code.co_filename):
                    equal = 0
                    for stranger in strangers():
                        try:
                            equal += method(value, stranger) is True
                        except Exception:
                            pass
                    if equal > 1:
                        note("tampered", "a value is equal to everything")
                break
        return value

    marks = "@done_" + posix.urandom(4).hex()
    probes = "@probe_" + posix.urandom(4).hex()
    others = "@other_" + posix.urandom(4).hex()
    harmless = ("mark", "patch", "skip", "skipIf", "skipUnless", "given", "settings", "example")

    def call(name, argument, like):
        node = ast.parse("f(x)").body[0]
        node.value.func.id = name
        node.value.args = [argument]
        for part in ast.walk(node):
            ast.copy_location(part, like)
        return node

    class Probes(ast.NodeTransformer):
        """Wraps what tests compare."""

        def visit_Compare(self, node):
            self.generic_visit(node)
            if all(isinstance(op, (ast.Eq, ast.NotEq, ast.In)) for op in node.ops):
                node.left = call(probes, node.left, node).value
                node.comparators = [call(probes, c, node).value for c in node.comparators]
            return node

        def visit_Call(self, node):
            self.generic_visit(node)
            name = getattr(node.func, "attr", "")
            if name.startswith(("assert", "fail")):
                plain = [a for a in node.args if not isinstance(a, ast.Starred)]
                node.args = [call(probes, a, node).value if a in plain else a for a in node.args]
            return node

    class Ends(ast.NodeTransformer):
        """Marks every place where a function is left without an exception."""

        def __init__(self, token):
            self.token = token

        def visit_FunctionDef(self, node):
            return node

        visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = visit_FunctionDef

        def visit_Return(self, node):
            keep = ast.copy_location(ast.parse("x = None").body[0], node)
            keep.targets[0].id = "@returned"
            if node.value is not None:
                keep.value = node.value
            give = ast.copy_location(ast.parse("x").body[0].value, node)
            give.id = "@returned"
            node.value = give
            return [keep, mark(self.token, node), node]

    def mark(token, like):
        text = ast.copy_location(ast.parse(repr(token)).body[0].value, like)
        return call(marks, text, like)

    def own_yield(function):
        stack = list(function.body)
        while stack:
            node = stack.pop()
            if isinstance(node, (ast.Yield, ast.YieldFrom)):
                return True
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                stack.extend(ast.iter_child_nodes(node))
        return False

    def decorator(node):
        while isinstance(node, (ast.Call, ast.Attribute)):
            node = node.func if isinstance(node, ast.Call) else node
            if isinstance(node, ast.Attribute):
                if node.attr in harmless:
                    return node.attr
                node = node.value
        return getattr(node, "id", "")

    class Other(ast.NodeTransformer):
        """Replaces expected values by values that no honest result equals."""

        def __init__(self):
            self.count = 0

        def visit_Constant(self, node):
            # Old versions have a class for each kind of literal.
            value = getattr(node, "value", getattr(node, "n", getattr(node, "s", None)))
            kind = type(value)
            if kind in (int, float):
                if value - value != 0:  # An infinity has no other value near it.
                    return node
                value = value * 3 + 1000003
            elif kind in (str, bytes):
                value = value + (u"\u2420other" if kind is str else b"\x00other")
            else:
                return node
            self.count += 1
            return ast.copy_location(ast.Constant(value=value), node)

        visit_Num = visit_Str = visit_Bytes = visit_Constant

        def generic_visit(self, node):
            # Only literals: what is computed may not change with its parts.
            literals = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
            return super().generic_visit(node) if isinstance(node, literals) else node

    def alter(statement):
        """A copy of an assertion that expects something else; None if it has no such form."""
        copied = copy_of(statement)
        if isinstance(copied, ast.Assert) and isinstance(copied.test, ast.Compare):
            test = copied.test
            if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
                return None
            other = Other()
            if not isinstance(test.left, ast.Constant):
                test.comparators = [other.visit(test.comparators[0])]
            else:
                test.left = other.visit(test.left)
            return copied if other.count else None
        if isinstance(copied, ast.Expr) and isinstance(copied.value, ast.Call):
            name = getattr(copied.value.func, "attr", "")
            if name in ("assertEqual", "assertEquals") and len(copied.value.args) >= 2:
                other = Other()
                at = 0 if isinstance(copied.value.args[0], ast.Constant) else 1
                copied.value.args[at] = other.visit(copied.value.args[at])
                return copied if other.count else None
        return None

    def copy_of(node):
        if not isinstance(node, ast.AST):
            return [copy_of(item) for item in node] if isinstance(node, list) else node
        new = type(node)(**{name: copy_of(value) for name, value in ast.iter_fields(node)})
        for name in node._attributes:
            if hasattr(node, name):
                setattr(new, name, getattr(node, name))
        return new

    def add_altered(node, prefix, has_cleanup):
        """Appends to tests a second body with other expected values, for copies of the process."""
        for function in node.body:
            if isinstance(function, ast.ClassDef):
                add_altered(function, prefix + function.name + ".", cleans_up(function))
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test"):
                continue
            names = [decorator(item) for item in function.decorator_list]
            if has_cleanup or own_yield(function) or not all(name == "mark" for name in names):
                continue
            changed = [alter(statement) for statement in function.body]
            scopes = (ast.Return, ast.Global, ast.Nonlocal)
            if not any(changed) or any(isinstance(part, scopes) for part in ast.walk(function)):
                continue
            changed = [new or copy_of(old) for new, old in zip(changed, function.body)]
            token = posix.urandom(8).hex()
            text = ast.copy_location(ast.parse(repr(token)).body[0].value, function)
            condition = call(others, text, function).value
            second = ast.If(test=condition, body=changed, orelse=[])
            function.body.append(ast.copy_location(second, function))
            function.altered_token = token
            tell("alterable", token, prefix + function.name)

    def cleans_up(node):
        """Whether code of the class, or of an unknown base, runs after the body of a test."""
        names = [decorator(base) for base in node.bases]
        known = all(isinstance(b, ast.Name) and b.id in ("object", "TestCase")
                    or isinstance(b, ast.Attribute) and decorator(b) == "unittest"
                    for b in node.bases)
        if not known or node.keywords or node.decorator_list:
            return True
        words = ("tearDown", "addCleanup", "doCleanups", "run", "enterContext", "subTest")
        found = (getattr(p, "name", getattr(p, "attr", "")) for p in ast.walk(node))
        return bool(names) and any(word in words for word in found)

    def instrument(path, node, prefix, has_cleanup):
        for function in node.body:
            if isinstance(function, ast.ClassDef):
                instrument(path, function, prefix + function.name + ".", cleans_up(function))
            is_async = isinstance(function, ast.AsyncFunctionDef)
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if not function.name.startswith("test") or own_yield(function):
                continue
            token = posix.urandom(8).hex()
            names = [decorator(item) for item in function.decorator_list]
            required = all(name in harmless for name in names)
            plain = not names or all(name == "mark" for name in names)
            plain = plain and not is_async and not has_cleanup
            last = function.body[-1]
            for at, statement in enumerate(function.body):
                function.body[at] = Ends(token).visit(statement)
            flat = []
            for statement in function.body:
                flat.extend(statement if isinstance(statement, list) else [statement])
            function.body = flat + [mark(token, last)]
            required, plain = "01"[required], "01"[plain]
            repeated = getattr(function, "altered_token", "")
            tell("function", path, prefix + function.name, token, required, plain, repeated)

    compiled = {}
    own_source = (
        b"__file__",
        b"inspect",
        b"getsource",
        b"linecache",
        b"doctest",
        b"traceback",
        b"exc_info",
        b"currentframe",
        b"_getframe",
    )

    def is_collected(name, config):
        """Whether pytest loads such a file by our compiled form only."""
        if list(config.getini("python_files")) != ["test_*.py", "*_test.py"]:
            return False
        return name.startswith("test_") or name.endswith("_test.py")

    def compile_tests(config, rewrite):
        """Compiles the hidden tests before any code of the repository runs."""
        files = []
        for path in spec["hidden"]:
            if os.path.isdir(path):
                for folder, folders, names in os.walk(path, followlinks=False):
                    files.extend(os.path.join(folder, name) for name in sorted(names))
            else:
                files.append(path)
        for path in files:
            name = os.path.basename(path)
            is_test = name.startswith("test") or name.endswith("test.py") or "/test" in path
            if not name.endswith(".py") or name == "conftest.py" or not is_test:
                continue
            try:
                with open(path, "rb") as file:
                    source = file.read()
                tree = ast.parse(source, filename=os.path.join(here, path))
                add_altered(tree, "", False)
                ast.fix_missing_locations(tree)
                rewrite(tree, source, path, config)
                instrument(os.path.normpath(path), tree, "", False)
                tree = Probes().visit(tree)
                for node in ast.walk(tree):
                    # pytest's own imports have no end, and would be given that of the module.
                    if hasattr(node, "lineno") and getattr(node, "end_lineno", None) is None:
                        node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
                ast.fix_missing_locations(tree)
                compiled[realpath(path)] = tree
                if is_collected(name, config) and not any(word in source for word in own_source):
                    # Nothing of the repository needs to read what its tests expect.
                    with open(path, "wb"):
                        pass
            except (SyntaxError, ValueError, OSError, RecursionError):
                continue

    def install(config):
        import _pytest.assertion.rewrite as rewriting

        original = rewriting._rewrite_test

        def rewritten(fn, config):
            tree = compiled.get(realpath(str(fn)))
            if tree is None:
                return original(fn, config)
            code = compile(tree, str(fn), "exec", dont_inherit=True)
            return os.stat(str(fn)), code

        def asserts(tree, source, path, config):
            rewriting.rewrite_asserts(tree, source, path, config)

        compile_tests(config, asserts)
        rewriting._rewrite_test = rewritten
        # A copy that pytest wrote earlier would be used instead, and this one must not stay.
        rewriting._read_pyc = lambda *args, **kwargs: None
        rewriting._write_pyc = lambda *args, **kwargs: True
        vars(builtins)[marks] = done
        vars(builtins)[probes] = probe
        vars(builtins)[others] = altered
        watch(vars(builtins), marks, done)
        watch(vars(builtins), others, altered)
        watch(vars(builtins), probes, probe)
        for name in spec["builtins"]:
            watch(vars(builtins), name, vars(builtins)[name])
        for name, module in sorted(sys.modules.items()):
            if name in spec["watched"]:
                watch_module(module)
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(audit)
        state["ready"] = True
        ask("ready", str(process_id()))

    import pytest

    class Plugin(object):
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config):
            sys.path[:0] = state.pop("path")
            install(early_config)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logstart(self, nodeid):
            if state["canary"] is not None:
                end_canary("lost", "")
            tell("start", nodeid)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            if state["canary"] is not None:
                expected = hasattr(report, "wasxfail") and report.outcome == "skipped"
                outcome = "expected" if expected else str(report.outcome)
                end_canary(outcome, str(report.longrepr)[-2000:])
            if report.when == "call" and not state.pop("checked", False):
                check()
            is_plain = type(report).__name__ == "TestReport" and not hasattr(report, "wasxfail")
            kind = "plain" if is_plain else "other"
            if report.when != "call" and report.outcome == "passed":
                return
            tell("report", str(report.nodeid), str(report.when), str(report.outcome), kind)

        def pytest_collectreport(self, report):
            if report.failed:
                tell("collect", str(report.nodeid))

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, exitstatus):
            if state["canary"] is not None:
                end_canary("lost", "")
            check()
            ask("finish", str(int(exitstatus)))

    plugin = types.ModuleType("orchestrate_reporter", "PYTEST_DONT_REWRITE")
    instance = Plugin()
    for name in [name for name in dir(Plugin) if name.startswith("pytest_")]:
        setattr(plugin, name, getattr(instance, name))
    sys.modules["orchestrate_reporter"] = plugin
    state["path"] = [here] if spec["script"] is None else []
    arguments = ["-p", "orchestrate_reporter"] + arguments
    if spec["script"] is None:
        sys.argv = [os.path.join(os.path.dirname(pytest.__file__), "__main__.py")] + arguments
        return pytest, None
    sys.argv = [spec["script"]] + arguments
    return pytest, spec["script"]


def _run(started):
    import sys

    pytest, script = started
    main = sys.modules["__main__"]
    for name in ("_begin", "_run"):
        vars(main).pop(name, None)
    if script is None:
        sys.exit(pytest.main())
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    sys.path.insert(0, script.rsplit("/", 1)[0] if "/" in script else ".")
    vars(main)["__file__"] = script
    exec(code, vars(main))


_run(_begin())
