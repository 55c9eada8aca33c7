# Sourced by the scripts in the folder above: how long each stage took, printed at the end together with the
# ten slowest tests. The report never changes a script's result.

# stage NAME COMMAND...: runs a stage, and notes its time in the file in ORCHESTRATE_STAGES, which scripts that
# call each other share.
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
  printf '%s\t%s\n' "$((SECONDS - _stage_began))" "$_stage_name${1:-}" >>"${ORCHESTRATE_STAGES:-/dev/null}" || true
  _stage_name=""
}

# Starts the record of stages, unless a calling script has one.
begin_stages() {
  _stages_began=$SECONDS
  _stages_owned=""
  if [ -z "${ORCHESTRATE_STAGES:-}" ]; then
    ORCHESTRATE_STAGES=$(mktemp) || ORCHESTRATE_STAGES=/dev/null
    export ORCHESTRATE_STAGES
    _stages_owned=yes
  fi
}

# end_stages CODE JUNIT…: notes the stage that was running as failed if CODE is not 0, and prints the report if
# this script began it. The files with test times need not exist.
end_stages() {
  local code=$1
  shift
  if [ "$code" -ne 0 ]; then _end_stage " (failed)"; fi
  [ -n "$_stages_owned" ] || return 0
  {
    printf '\n== times by stage\n'
    awk -F '\t' '{ printf "%3d min %02d s  %s\n", $1 / 60, $1 % 60, $2 }' "$ORCHESTRATE_STAGES"
    awk -v t="$((SECONDS - _stages_began))" 'BEGIN { printf "%3d min %02d s  in all\n", t / 60, t % 60 }'
    "${python_bin:-python3}" "$(dirname "${BASH_SOURCE[0]}")/slowest.py" "$@"
    rm -f "$ORCHESTRATE_STAGES"
  } >&2 || true
  unset ORCHESTRATE_STAGES
}
