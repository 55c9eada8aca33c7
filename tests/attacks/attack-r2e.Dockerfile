# A repository as in R2E-Gym's images, with a fault, a virtual environment, and the hidden tests and
# their runner in the container.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV PATH=/testbed/.venv/bin:/usr/local/bin:/usr/bin:/bin
COPY repository/ /testbed/
COPY hidden/test_1.py /r2e_tests/test_1.py
RUN set -eu; git init -q -b main; sed -i 's/sum(items)/sum(items[:-1])/' calc.py; git add -A; \
  git commit -qm old; python3 -m venv --system-site-packages --without-pip .venv; \
  echo '*' > .venv/.gitignore; \
  echo '.venv/bin/python -W ignore -m pytest -rA r2e_tests' > run_tests.sh
