# A repository as in SWE-smith's images: one commit without a fault, its tests, and a stand-in for conda.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z
RUN set -eu; git init -q -b main; mkdir tests; \
  printf 'def total(items):\n    return sum(items)\n\n\ndef largest(items):\n    return max(items)\n' > calc.py; \
  printf 'from calc import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\ndef test_empty():\n    assert total([]) == 0\n' > tests/test_calc.py; \
  printf 'from calc import largest\n\n\ndef test_largest():\n    assert largest([1, 3, 2]) == 3\n\n\ndef test_known_failure():\n    assert largest([1]) == 2\n' > tests/test_largest.py; \
  printf '[tool:pytest]\npythonpath = .\n' > setup.cfg; \
  git add -A; git commit -qm 'Initial commit'
RUN set -eu; mkdir -p /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin; \
  printf 'conda() { PATH=/opt/miniconda3/envs/testbed/bin:$PATH; export PATH; }\n' > /opt/miniconda3/bin/activate; \
  ln -s /usr/bin/python3 /opt/miniconda3/envs/testbed/bin/python; \
  printf '#!/bin/sh\nexec python -m pytest "$@"\n' > /opt/miniconda3/envs/testbed/bin/pytest; \
  chmod +x /opt/miniconda3/envs/testbed/bin/pytest
