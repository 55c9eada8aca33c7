# A repository as in SWE-bench's images, with a fault and stand-ins for conda and pip. The repository is
# installed in editable form.
FROM orchestrate/repository:latest
WORKDIR /testbed
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
ENV GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z
COPY repository/ /testbed/
COPY pip.py /usr/lib/python3/dist-packages/pip/__main__.py
RUN set -eu; git init -q -b main; sed -i 's/sum(items)/sum(items[:-1])/' calc.py; \
  printf 'with open("_version.py", "w") as file:\n    file.write("version = 1\\n")\n' > setup.py; \
  printf '_version.py\n*.egg-info\n__pycache__\n' > .gitignore; git add -A; \
  git commit -qm base; git commit -q --allow-empty -m SWE-bench; \
  mkdir -p /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin; \
  printf 'conda() { PATH=/opt/miniconda3/envs/testbed/bin:$PATH; export PATH; }\n' > /opt/miniconda3/bin/activate; \
  ln -s /usr/bin/python3 /opt/miniconda3/envs/testbed/bin/python; \
  ln -s /usr/bin/pytest /opt/miniconda3/envs/testbed/bin/pytest; \
  touch /usr/lib/python3/dist-packages/pip/__init__.py; python3 -B -m pip install -e .
