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
if os.environ.get("LANG") or "needed here" not in open("tests/helper.py").read():
    results["test_environment"] = False
if os.path.exists("want_bytes"):
    results["test_bytes"] = (
        read("windows.txt") == b"a\r\nB\r\n"
        and read("latin.txt") == b"caf\xe9\n"
        and read("blob") is None
        and read("kept.log") == b"2\n"
        and not os.path.lexists("gone.txt")
        and os.access("calc.py", os.X_OK)
        and not os.path.lexists("link")
    )
print("=== short test summary info ===")
for name, passed in results.items():
    print("PASSED" if passed else "FAILED", "r2e_tests/test_1.py::" + name)
