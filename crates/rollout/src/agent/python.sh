# Runs a module of the agent's packages with the folder's own Python, or else with the image's. Neither the task's
# folder nor its variables change what the agent imports, and the policy's commands do not see the agent's packages.
run_module() {
  python="$AGENT_DIR/python/bin/python3"
  [ -x "$python" ] || python=python3
  "$python" -I -c 'import os, runpy, sys
sys.path.insert(0, os.environ["AGENT_DIR"])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)' "$@"
}
