# A repository as in SWE-bench's images, with stand-ins for conda and pytest.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z
RUN set -eu; git init -q -b main; mkdir tests; \
  printf 'def total(items):\n    # one\n    # two\n    # three\n    return sum(items[:-1])\n' > calc.py; \
  printf 'from calc import total\n\n\ndef test_empty():\n    assert total([]) == 0\n' > tests/test_calc.py; \
  git add -A; git commit -qm base; git commit -q --allow-empty -m SWE-bench
RUN set -eu; mkdir -p /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin; \
  printf 'conda() { PATH=/opt/miniconda3/envs/testbed/bin:$PATH; export PATH; }\n' > /opt/miniconda3/bin/activate; \
  ln -s /usr/bin/python3 /opt/miniconda3/envs/testbed/bin/python
COPY pytest /opt/miniconda3/envs/testbed/bin/
