"""Prints 1 if the last summary of a test log has exactly the expected results, else 0."""

import json
import re
import sys


def results(log):
    blocks = re.sub("\x1b\\[[0-9;]*m", "", log).replace("\r", "").split("short test summary info")
    if len(blocks) < 2:
        return None
    found = {}
    for line in blocks[-1].split("\n"):
        for word in ("PASSED", "FAILED", "ERROR"):
            if word in line:
                key = ".".join(line.strip().split("::")[1:]).split(" - ")[0]
                found[key] = word
                break
    return found


with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
    found = results(log.read())
with open(sys.argv[2], encoding="utf-8") as file:
    expected = {key.split(" - ")[0]: status for key, status in json.load(file).items()}
print(1 if found == expected else 0)
