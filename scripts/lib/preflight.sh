# Sourced by the scripts in the folder above, after build.sh, docker.sh and python.sh: finds out in the first
# minute what a gate or a test suite would lack later, and removes what killed ones left.

_lacks() {
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  return 1
}

# _check_space FOLDER GIB WHAT: fails if the file system of a folder has too little free space.
_check_space() {
  local folder=$1 needed=$2 free
  folder=$(realpath -m "$folder")
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  free=$(df --output=avail -B1G "$folder" | tail -n 1 | tr -d ' ')
  [ "$free" -ge "$needed" ] && return 0
  _lacks "$3 needs $needed GiB of disk, and $folder has $free GiB free" \
    "free some space there, or name another folder: CARGO_TARGET_DIR for the build, TMPDIR for temporary files"
}

# Fails if disk or memory are too small. A build folder that is already there needs less.
_check_disk_and_memory() {
  local target=${CARGO_TARGET_DIR:-target} build=15 available result=0
  if [ -d "$target/debug/deps" ]; then build=5; fi
  _check_space "$target" "$build" "the build folder" || result=1
  _check_space "${TMPDIR:-/tmp}" 3 "the folder of temporary files" || result=1
  if [ -z "${DOCKER_HOST:-}" ]; then _check_space /var/lib/docker 3 "Docker's folder" || result=1; fi
  available=$(awk '/^(MemAvailable|SwapFree):/ { sum += $2 } END { print int(sum / 1048576) }' /proc/meminfo)
  if [ "$available" -lt 4 ]; then
    _lacks "building and testing need 4 GiB of memory, and $available GiB are available" \
      "end other programs, or add swap space" || result=1
  fi
  return "$result"
}

# Fails if dependencies must be downloaded and no registry of crates answers.
_check_crates() {
  local log host
  host=$(rustc -vV | sed -n 's/^host: //p')
  if cargo metadata --locked --offline --filter-platform "$host" --format-version 1 >/dev/null 2>&1; then
    return 0
  fi
  echo "downloading crates" >&2
  log=$(mktemp)
  if CARGO_NET_RETRY=3 CARGO_HTTP_TIMEOUT=60 cargo fetch --quiet --locked --target "$host" 2>"$log"; then
    rm -f "$log"
    return 0
  fi
  tail -n 8 "$log" >&2
  rm -f "$log"
  _lacks "the crates in Cargo.lock cannot be downloaded" \
    "check the network and the proxy settings, or name a mirror under [source] in ~/.cargo/config.toml"
}

# Fails if Python packages must be downloaded, ORCHESTRATE_REQUIRE lists their tests, and no index answers.
_check_python_index() {
  local target=${CARGO_TARGET_DIR:-target} index
  case ",${ORCHESTRATE_REQUIRE:-}," in *,python,* | *,sinks,*) ;; *) return 0 ;; esac
  [ -e "$target/python-cpu/.made-from" ] && [ -e "$target/sinks-python/.made-from" ] && return 0
  index=$("$python_bin" -m pip config get global.index-url 2>/dev/null) || index=""
  index=${PIP_INDEX_URL:-${index:-https://pypi.org/simple}}
  # Without a password: one that refuses access has answered.
  index=$(printf '%s' "$index" | sed 's#//[^/@]*@#//#')
  "$python_bin" - "${index%/}/pip/" <<'PYTHON' && return 0
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=60)
except urllib.error.HTTPError:
    pass
except OSError as error:
    sys.exit(f"{error}")
PYTHON
  _lacks "the Python package index $index does not answer" \
    "check the network and the proxy settings, or name another index in PIP_INDEX_URL"
}

# Fails if something is missing that no script installs. Starts Docker if no daemon answers. `python_bin` is a Python,
# or empty: then nothing is removed.
preflight() {
  local result=0
  _check_disk_and_memory || result=1
  ensure_docker || result=1
  if [ -n "$python_bin" ]; then "$python_bin" "$ORCHESTRATE_ROOT/scripts/lib/machine.py" sweep >&2 || true; fi
  _check_crates || result=1
  _check_python_index || result=1
  return "$result"
}
