# A repository as in SWE-bench's images, with a fault and a stand-in for conda. The repository is on the
# interpreter's path as an editable installation puts it there.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z
COPY repository/ /testbed/
RUN set -eu; git init -q -b main; sed -i 's/sum(items)/sum(items[:-1])/' calc.py; git add -A; \
  git commit -qm base; git commit -q --allow-empty -m SWE-bench; \
  mkdir -p /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin; \
  printf 'conda() { PATH=/opt/miniconda3/envs/testbed/bin:$PATH; export PATH; }\n' > /opt/miniconda3/bin/activate; \
  ln -s /usr/bin/python3 /opt/miniconda3/envs/testbed/bin/python; \
  ln -s /usr/bin/pytest /opt/miniconda3/envs/testbed/bin/pytest; \
  echo /testbed > /usr/local/lib/python3.11/dist-packages/adder.pth
