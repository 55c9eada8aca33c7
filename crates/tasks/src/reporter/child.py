# Runs pytest, and reports every result over a pipe. Started by reporter.py with the numbers of three
# descriptors (answers, messages, and a file that describes the run) and pytest's arguments.
# Everything that is needed later is bound here, before code of the repository runs.


def _begin():
    import _functools
    import _signal
    import _thread
    import ast
    import builtins
    import gc
    import json
    import opcode
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

    def raw_fork():
        """A fork without the handlers that tested code may have registered. There is one thread."""
        try:
            import _ctypes

            address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "fork")
            call_function = _ctypes.call_function
            return lambda: call_function(address, ())
        except (ImportError, AttributeError, OSError):
            return posix.fork

    write, read, fork, leave = posix.write, posix.read, raw_fork(), posix._exit
    waitpid, process_id = posix.waitpid, posix.getpid
    realpath, get_frame, get_trace = os.path.realpath, sys._getframe, sys.gettrace
    get_profile, AssertionFailure = sys.getprofile, AssertionError
    alter, copy_of = _alteration(ast, posix.urandom)
    lock = _thread.allocate_lock()
    state = {"canary": None, "parent_of": None, "pending": [], "sent": set(), "ready": False}
    state["gate"] = None
    first_trace, first_profile = get_trace(), get_profile()

    # What must not be looked into.
    private = set()

    def hide(function):
        """A callable without attributes that lead to `function` and to what it holds."""
        wrapper = _functools._lru_cache_wrapper(function, 0, False, None)
        private.add(id(wrapper))
        return wrapper

    every_signal = frozenset(range(1, 65)) - {9, 19, 32, 33}
    block, set_mask, sigmask = _signal.SIG_BLOCK, _signal.SIG_SETMASK, _signal.pthread_sigmask

    def guard(function):
        """The same as `hide`, and no handler of a signal or of the collector runs in between: it would
        be given the frames of this file. The outer function has no variables to find."""

        def guarded(*args, run=hide(function), sigmask=sigmask, gc=(gc.isenabled, gc.disable, gc.enable)):
            was_enabled = gc[0]()
            gc[1]()
            mask = sigmask(block, every_signal)
            try:
                return run(*args)
            finally:
                sigmask(set_mask, mask)
                if was_enabled:
                    gc[2]()

        return hide(guarded)

    @hide
    def take(size):
        data = b""
        while len(data) < size:
            part = read(replies, size - len(data))
            if not part:
                leave(96)
            data += part
        return data

    cookie = take(16)

    @hide
    def send(fields):
        data = cookie
        for field in fields:
            field = field.encode("utf-8", "backslashreplace")
            data += b"%d:" % len(field) + field
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[write(events, data) :]

    @hide
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

    @hide
    def ask(*fields):
        """Sends a message and waits for the answer."""
        if state["canary"] is not None:
            return b"c"
        tell(*fields)
        answer = take(1)
        return answer + take(16) if answer in (b"k", b"p") else answer

    @hide
    def note(finding, why):
        # The first reason is enough.
        if finding not in state["sent"]:
            state["sent"].add(finding)
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

    @hide
    def check():
        for space, name, value, code, defaults in watched:
            if space.get(name, absent) is not value:
                note("tampered", "%s was replaced" % name)
            elif code is not None:
                if value.__code__ is not code or value.__defaults__ is not defaults:
                    note("tampered", "the code of %s was replaced" % name)
        if get_trace() is not first_trace or get_profile() is not first_profile:
            note("introspection", "a trace function is set")

    # Code of each test by its tokens, and where the code loads them.
    homes = {}
    load, has_words = opcode.opmap["LOAD_CONST"], sys.version_info >= (3, 6)

    def find_homes(code):
        for number, const in enumerate(code.co_consts):
            if type(const) is type(code):
                find_homes(const)
            elif type(const) is str and const in tokens:
                raw = code.co_code
                places = range(0, len(raw), 2) if has_words else ()
                at = [i for i in places if raw[i] == load and raw[i + 1] == number & 0xFF]
                homes[const] = (code, frozenset(at))

    def is_home(frame, token):
        """Whether `frame` calls where its test does it: right after it has loaded the token."""
        code, places = homes.get(token, (None, ()))
        if frame.f_code is not code and frame.f_code != code:
            return False
        return not has_words or any(frame.f_lasti - back in places for back in (2, 4, 6, 8))

    @guard
    def done(token):
        """Called where a test has reached its end. Returns what the test then raises."""
        check()
        if not is_home(get_frame(2), token):
            note("tampered", "the end of a test was reported from elsewhere")
        state["checked"] = True
        answer = ask("done", token)
        if answer[:1] not in (b"k", b"p"):
            return ()
        parent_fails = answer[:1] == b"p"
        copy = fork()
        if (copy != 0) == parent_fails:
            state["parent_of"] = copy if parent_fails else None
            state["canary"] = (token, answer[1:].decode())
            return (AssertionFailure("made to fail: " + answer[1:].decode()),)
        if parent_fails:
            ask("moved", str(process_id()))
        return ()

    @guard
    def altered(token):
        """Whether this copy of the process runs the test with other expected values."""
        if not is_home(get_frame(2), token):
            note("tampered", "a test was repeated from elsewhere")
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

    @hide
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

    @hide
    def is_touched(name, cache={}):
        known = cache.get(name)
        if known is None:
            known = cache[name] = realpath(name) in touched
        return known

    @hide
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
        elif event == "gc.get_referents" and any(id(value) in private for value in args[0]):
            note("tampered", "the tested code looks into the reporter")
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

    @hide
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

    @hide
    def probe(value, plain_types=plain_types, is_library=is_library, strangers=strangers, note=note):
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
        """The test raises by itself, so that no traceback leads to the reporter."""
        node = ast.parse("for x in f(%r):\n    raise x" % token).body[0]
        node.iter.func.id = marks
        node.target.id = node.body[0].exc.id = "@failure"
        for part in ast.walk(node):
            ast.copy_location(part, like)
        return node

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
            tokens.add(token)
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
            tokens.add(token)
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

    tokens = set()
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
            find_homes(code)
            return os.stat(str(fn)), code

        def asserts(tree, source, path, config):
            rewriting.rewrite_asserts(tree, source, path, config)

        compile_tests(config, asserts)
        rewriting._rewrite_test = hide(rewritten)
        watch(vars(rewriting), "_rewrite_test", rewriting._rewrite_test)
        # A copy that pytest wrote earlier would be used instead, and this one must not stay.
        rewriting._read_pyc = lambda *args, **kwargs: None
        rewriting._write_pyc = lambda *args, **kwargs: True
        for name, function in ((marks, done), (probes, probe), (others, altered)):
            vars(builtins)[name] = function
            watch(vars(builtins), name, vars(builtins)[name])
        for name in spec["builtins"]:
            watch(vars(builtins), name, vars(builtins)[name])
        for name, module in sorted(sys.modules.items()):
            if name in spec["watched"]:
                watch_module(module)
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(audit)
        # No list of all objects contains those that exist now.
        if hasattr(gc, "freeze"):
            gc.freeze()
        state["ready"] = True
        ask("ready", str(process_id()))

    import pytest

    name = "plugin_" + posix.urandom(4).hex()

    def load_conftests(early_config):
        sys.path[:0] = state.pop("path")
        sys.modules.pop(name, None)
        install(early_config)

    def start(test):
        if state["canary"] is not None:
            end_canary("lost", "")
        tell("start", test)

    def report(test, when, outcome, kind, message):
        if state["canary"] is not None:
            end_canary("expected" if kind == "expected" else outcome, message[-2000:])
        if when == "call" and not state.pop("checked", False):
            check()
        if when == "call" or outcome != "passed":
            tell("report", test, when, outcome, "plain" if kind == "plain" else "other")

    def collected(test):
        tell("collect", test)

    def finish(status):
        if state["canary"] is not None:
            end_canary("lost", "")
        check()
        ask("finish", status)

    def is_canary():
        return state["canary"] is not None

    calls = [hide(load_conftests)] + [guard(f) for f in (start, report, collected, finish, is_canary)]
    plugin = types.ModuleType(name, "PYTEST_DONT_REWRITE")
    vars(plugin).update(_hooks(pytest, *calls))
    sys.modules[name] = plugin
    state["path"] = [here] if spec["script"] is None else []
    arguments = ["-p", name] + arguments
    if spec["script"] is None:
        sys.argv = [os.path.join(os.path.dirname(pytest.__file__), "__main__.py")] + arguments
        return pytest, None
    sys.argv = [spec["script"]] + arguments
    return pytest, spec["script"]


def _hooks(pytest, load_conftests, start, report, collected, finish, is_canary):
    """Functions that pytest calls. They hold nothing but what they pass plain text to, so that code of
    an object that is given to them finds nothing in their frames."""

    def text(value):
        return "".join((str(value),))

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(early_config):
        load_conftests(early_config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(nodeid):
        start(text(nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(report):
        is_expected = hasattr(report, "wasxfail")
        kind = "other" if is_expected or type(report).__name__ != "TestReport" else "plain"
        outcome = text(report.outcome)
        if is_expected and outcome == "skipped":
            kind = "expected"
        message = text(report.longrepr) if is_canary() else ""
        passed_on(text(report.nodeid), text(report.when), outcome, kind, message)

    def pytest_collectreport(report):
        if report.failed:
            collected(text(report.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(exitstatus):
        finish(text(int(exitstatus)))

    passed_on = report
    return {k: v for k, v in locals().items() if k.startswith("pytest_")}


def _run(started):
    import sys

    pytest, script = started
    main = sys.modules["__main__"]
    for name in ("_alteration", "_begin", "_hooks", "_run"):
        vars(main).pop(name, None)
    if script is None:
        sys.exit(pytest.main())
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    sys.path.insert(0, script.rsplit("/", 1)[0] if "/" in script else ".")
    vars(main)["__file__"] = script
    exec(code, vars(main))


_run(_begin())
