# A repository as in R2E-Gym's images whose hidden tests are run by pytest.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
RUN set -eu; git init -q -b main; mkdir -p .venv/bin /r2e_tests; \
  printf 'def total(items):\n    return sum(items[:-1])\n' > calc.py; \
  printf 'import sys\n\n\ndef follow(call):\n    sys.settrace(call)\n' > tracer.py; \
  printf '[tool:pytest]\naddopts = -q\n' > setup.cfg; \
  git add -A; git commit -qm old; \
  ln -s /usr/bin/python3 .venv/bin/python; echo '*' > .venv/.gitignore; \
  echo "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests" > run_tests.sh
COPY hidden_tests.py /r2e_tests/test_1.py
