"""Runs the hidden tests of a made task.

Started as a script from this folder, so that nothing of the repository under test is on the path
before pytest is there. For every failure it prints one line of JSON with pytest's whole message,
in front of the summary that decides.
"""

import json
import os
import sys

os.environ["COLUMNS"] = "200"
os.environ.pop("PYTEST_ADDOPTS", None)

import pytest  # noqa: E402


class Failures:
    def __init__(self):
        self.lines = []

    def _keep(self, test, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else report.longreprtext
        self.lines.append({"test": test, "message": message[:4000]})

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._keep(report.nodeid, report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._keep(report.nodeid, report)

    def pytest_sessionfinish(self):
        for line in self.lines:
            print("\norchestrate-failure:", json.dumps(line), flush=True)


def main():
    here = os.getcwd()
    sys.path[:0] = [here] + [path for path in [os.path.join(here, "src")] if os.path.isdir(path)]
    # Before the first module of the repository: the list of what is asked comes from the command.
    return pytest.main(sys.argv[1:], plugins=[Failures()])


if __name__ == "__main__":
    sys.exit(main())
