"""Runs the hidden tests and prints pytest's short test summary.

No code of the tested module runs in this process. A child is forked before any
test is read; it sees no stream, no test and no expected value, and answers each
call with a plain value over a pipe. The tests themselves run here, against
proxies. Start with `python3 -I -S -B`, so that files beside the tested module
cannot stand in for modules of the standard library.
"""

import os
import select
import sys
import time

TESTS = ["test_1.py"]
FOLDER = "r2e_tests"
CALL_S = 3.0
REPLY_BYTES = 1 << 20


def encode(value):
    kind = type(value)
    if value is None:
        return b"n"
    if kind is bool:
        return b"t" if value else b"f"
    if kind is int:
        return b"i" + str(value).encode() + b";"
    if kind is float:
        return b"x" + value.hex().encode() + b";"
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
        return b"s%d;" % len(data) + data
    if kind is list or kind is tuple:
        mark = b"l" if kind is list else b"u"
        return mark + b"%d;" % len(value) + b"".join([encode(v) for v in value])
    if kind is dict:
        pairs = [encode(k) + encode(v) for k, v in value.items()]
        return b"d%d;" % len(pairs) + b"".join(pairs)
    raise TypeError


def decode(data, at=0):
    mark = data[at : at + 1]
    at += 1
    if mark in (b"n", b"t", b"f"):
        return {b"n": None, b"t": True, b"f": False}[mark], at
    end = data.index(b";", at)
    head = data[at:end].decode()
    at = end + 1
    if mark == b"i":
        return int(head), at
    if mark == b"x":
        return float.fromhex(head), at
    size = int(head)
    if mark == b"s":
        return data[at : at + size].decode("utf-8", "surrogatepass"), at + size
    if mark == b"d":
        pairs = {}
        for _ in range(size):
            key, at = decode(data, at)
            pairs[key], at = decode(data, at)
        return pairs, at
    if mark not in (b"l", b"u"):
        raise ValueError("reply")
    items = []
    for _ in range(size):
        item, at = decode(data, at)
        items.append(item)
    return (items if mark == b"l" else tuple(items)), at


def frame(data):
    return len(data).to_bytes(4, "big") + data


def libc(name, *args):
    """Calls a C function without the ctypes package, which starts slowly."""
    try:
        import _ctypes

        _ctypes.call_cdeclfunction(_ctypes.dlsym(_ctypes.dlopen(None, 0), name), args)
    except Exception:
        pass


def hide():
    """Takes this process's memory and streams in /proc from all without capabilities."""
    libc("prctl", 4, 0, 0, 0, 0)


def give_up_capabilities():
    """Even as root the child may then not look into a process that hides."""
    libc("prctl", 38, 1, 0, 0, 0)
    version = 0x20080522
    libc("capset", version.to_bytes(4, sys.byteorder) + bytes(4), bytes(24))


def serve(requests, replies):
    """The child: calls what it is asked to call, for ever."""
    give_up_capabilities()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    source = os.fdopen(requests, "rb")
    while True:
        size = source.read(4)
        if len(size) < 4:
            os._exit(0)
        module, name, args = decode(source.read(int.from_bytes(size, "big")))[0]
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            reply = b"v" + encode(getattr(__import__(module), name)(*args))
        except BaseException:
            reply = b"e"
        os.write(replies, frame(reply))


class Child:
    def __init__(self):
        inner_in, self.requests = os.pipe()
        self.replies, inner_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.requests)
            os.close(self.replies)
            serve(inner_in, inner_out)
        os.close(inner_in)
        os.close(inner_out)
        self.alive = True

    def read(self, size, deadline):
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.replies], [], [], left)[0]:
                raise TimeoutError
            part = os.read(self.replies, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def call(self, module, name, args):
        if not self.alive:
            raise EOFError
        try:
            os.write(self.requests, frame(encode((module, name, args))))
            deadline = time.monotonic() + CALL_S
            size = int.from_bytes(self.read(4, deadline), "big")
            if size > REPLY_BYTES:
                raise ValueError("reply")
            reply = self.read(size, deadline)
        except Exception:
            self.end()
            raise
        if reply[:1] != b"v":
            raise RuntimeError("the call raised")
        return decode(reply, 1)[0]

    def end(self):
        self.alive = False
        try:
            os.kill(self.pid, 9)
        except OSError:
            pass


class Remote:
    def __init__(self, child, module):
        self.__child = child
        self.__module = module

    def __getattr__(self, name):
        return lambda *args: self.__child.call(self.__module, name, args)


def main():
    child = Child()
    hide()
    sources = []
    for name in TESTS:
        path = FOLDER + "/" + name
        with open(path) as file:
            sources.append((path, file.read()))
        try:
            os.unlink(path)
        except OSError:
            pass
    inside = dict(vars(sys.modules["builtins"]))
    inside["__import__"] = lambda name, *rest: Remote(child, name)
    lines = []
    for path, source in sources:
        names = {"__builtins__": inside}
        exec(compile(source, path, "exec"), names)
        for name, test in names.items():
            if not name.startswith("test_"):
                continue
            try:
                test()
                lines.append("PASSED %s::%s" % (path, name))
            except AssertionError:
                lines.append("FAILED %s::%s - AssertionError" % (path, name))
            except Exception as error:
                lines.append("FAILED %s::%s - %s" % (path, name, type(error).__name__))
    child.end()
    bad = len([line for line in lines if line.startswith("FAILED")])
    print("=========================== short test summary info ============================")
    print("\n".join(lines))
    print("%d failed, %d passed" % (bad, len(lines) - bad))
    sys.stdout.flush()
    os._exit(1 if bad else 0)


main()
