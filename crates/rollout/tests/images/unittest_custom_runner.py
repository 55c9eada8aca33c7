import os
import sys

sys.path.insert(0, os.getcwd())
results = {}
try:
    from calc import total
    from tests.helper import near
    results["test_total"] = near(total([1, 2, 3]), 6)
except Exception as error:
    print(error)
    results["test_total"] = False
read = lambda name: open(name, "rb").read() if os.path.lexists(name) else None
link = lambda name: os.readlink(name) if os.path.islink(name) else None
if os.environ.get("LANG") or "needed here" not in open("tests/helper.py").read():
    results["test_environment"] = False
if os.path.exists("want_bytes"):
    results["test_bytes"] = (
        read("windows.txt") == b"a\r\nB\r\n"
        and read("latin.txt") == b"th\xe9\n"
        and read("blob") is None
        and read("kept.log") == b"2\n"
        and not os.path.lexists("gone.txt")
        and os.access("calc.py", os.X_OK)
        and link("link") == "calc.py"
        and link("alias.py") is None
        and read("alias.py") == b"NAME = 2\n"
        and link("plain.py") == "alias.py"
        and link("moved.py") == "plain.py"
        and not os.path.lexists("dropped")
        and link("kept.txt") is None
        and read("kept.txt") == b"x\n"
        and not os.path.lexists("outside")
        and __import__("cafe").NAME == "th\xe9"
        and __import__("moved").NAME == 2
    )
print("=== short test summary info ===")
for name, passed in results.items():
    print("PASSED" if passed else "FAILED", "r2e_tests/test_1.py::" + name)
