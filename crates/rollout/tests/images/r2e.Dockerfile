# A repository as in R2E-Gym's images: checked out before the fix, which is in its history; with
# uncommitted changes; with tests and their runner in the container.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV PATH=/testbed/.venv/bin:/usr/local/bin:/usr/bin:/bin
RUN set -eu; git init -q -b main; mkdir -p tests .venv/bin; \
  printf 'def total(items):\n    return sum(items[:-1])\n' > calc.py; \
  printf 'def near(a, b):\n    return a == b\n' > tests/helper.py; \
  printf 'a\r\nb\r\n' > windows.txt; printf 'caf\351\n' > latin.txt; echo x > gone.txt; \
  printf '# -*- coding: latin-1 -*-\nNAME = "caf\351"\n' > cafe.py; ln -s calc.py alias.py; \
  ln -s calc.py moved.py; ln -s windows.txt dropped; echo 'NAME = 1' > plain.py; echo x > kept.txt; \
  printf '*.txt text=auto\n' > .gitattributes; printf '*.log\nkept.log\n' > .gitignore; \
  echo 1 > kept.log; git add -A; git add -f kept.log; git commit -qm old; \
  printf 'def total(items):\n    return sum(items)\n' > calc.py; git commit -qam 'the fix'; \
  git checkout -q HEAD~1; echo '# needed here' >> tests/helper.py; echo built > untracked.cfg; \
  ln -s /usr/bin/python3 .venv/bin/python; echo '*' > .venv/.gitignore
RUN set -eu; mkdir /r2e_tests; \
  printf '.venv/bin/python -W ignore r2e_tests/unittest_custom_runner.py\n' > run_tests.sh; \
  printf 'tests = ["the image has its own"]\n' > /r2e_tests/test_1.py
COPY unittest_custom_runner.py /r2e_tests/
