# Sourced by the scripts in the folder above, after python.sh: the programs that read a run's sinks in tests.

# Makes a Python with tensorboard, pandas and pyarrow, and unpacks Debian's Prometheus where apt-get exists and
# no Prometheus is installed. Nothing is installed on the system. Exports ORCHESTRATE_SINKS_PYTHON and
# ORCHESTRATE_PROMETHEUS, the folder of prometheus and promtool. What cannot be had stays unset: the tests that
# need it are skipped, and counted.
ensure_sinks_tools() {
  local folder
  if ensure_venv sinks-python scripts/lib/sinks.lock; then
    export ORCHESTRATE_SINKS_PYTHON="$venv/bin/python"
  fi
  if [ -n "${ORCHESTRATE_PROMETHEUS:-}" ] || command -v promtool >/dev/null; then return 0; fi
  mkdir -p "${CARGO_TARGET_DIR:-target}/prometheus"
  folder="$(cd "${CARGO_TARGET_DIR:-target}/prometheus" && pwd)"
  if [ ! -x "$folder/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 0
    echo "unpacking Prometheus into $folder" >&2
    (
      cd "$folder"
      rm -f prometheus_*.deb
      apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }
      dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
    ) >&2 || return 0
  fi
  export ORCHESTRATE_PROMETHEUS="$folder/usr/bin"
}
