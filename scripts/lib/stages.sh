# Sourced by the scripts in the folder above: how long each stage took, printed at the end together with the
# ten slowest tests. The report never changes a script's result.
#
# ORCHESTRATE_TIMES is a folder that scripts that call each other share, and that two runs in one checkout do not:
# `stages`, with a line for each, and JUnit reports of tests.

# stage NAME COMMAND...: runs a stage, and notes its time.
stage() {
  local name=$1
  shift
  printf '\n== %s\n' "$name" >&2
  _stage_name=$name _stage_began=$SECONDS
  "$@"
  _end_stage
}

_end_stage() {
  [ -n "${_stage_name:-}" ] || return 0
  if [ -n "${ORCHESTRATE_TIMES:-}" ]; then
    printf '%s\t%s\n' "$((SECONDS - _stage_began))" "$_stage_name${1:-}" >>"$ORCHESTRATE_TIMES/stages" || true
  fi
  _stage_name=""
}

# Starts the record of stages, unless a calling script has one.
begin_stages() {
  _stages_began=$SECONDS
  _stages_owned=""
  if [ -z "${ORCHESTRATE_TIMES:-}" ]; then
    ORCHESTRATE_TIMES=$(mktemp -d) || ORCHESTRATE_TIMES=""
    export ORCHESTRATE_TIMES
    _stages_owned=yes
  fi
}

# end_stages CODE: notes the stage that was running as failed if CODE is not 0, and prints the report if this
# script began it.
end_stages() {
  local code=$1
  if [ "$code" -ne 0 ]; then _end_stage " (failed)"; fi
  [ -n "$_stages_owned" ] && [ -n "${ORCHESTRATE_TIMES:-}" ] || return 0
  {
    printf '\n== times by stage\n'
    awk -F '\t' '{ printf "%3d min %02d s  %s\n", $1 / 60, $1 % 60, $2 }' "$ORCHESTRATE_TIMES/stages"
    awk -v t="$((SECONDS - _stages_began))" 'BEGIN { printf "%3d min %02d s  in all\n", t / 60, t % 60 }'
    "${python_bin:-python3}" "$(dirname "${BASH_SOURCE[0]}")/slowest.py" "$ORCHESTRATE_TIMES"/*.xml
    rm -rf "$ORCHESTRATE_TIMES"
  } >&2 || true
  unset ORCHESTRATE_TIMES
}
