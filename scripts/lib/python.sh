# Sourced by the scripts next to it: Python environments below target/.

# Sets `python_bin` to a Python of at least 3.11 that can create virtual environments. If there is no
# such Python, installs Debian's.
ensure_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" /usr/bin/python3; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      python_bin="$candidate"
      return 0
    fi
  done
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: no Python 3.11 or later with the modules venv and ensurepip found" >&2
    echo "hint: install it (Debian: python3-venv), or set PYTHON to an interpreter" >&2
    return 1
  fi
  echo "installing python3-venv" >&2
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >&2 \
    || return 1
  python_bin=/usr/bin/python3
  if ! "$python_bin" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python_bin is older than Python 3.11" >&2
    return 1
  fi
}

# Creates the virtual environment target/NAME from lock files, or reuses it if it was made from the
# same ones: ensure_venv NAME LOCK… Sets `venv` to its path.
ensure_venv() {
  local name="$1" target stamp wanted lock
  shift
  target="${CARGO_TARGET_DIR:-target}"
  mkdir -p "$target"
  venv="$(cd "$target" && pwd)/$name"
  ensure_python || return 1
  stamp="$venv/.made-from"
  wanted="$("$python_bin" -c 'import sys; print(sys.version)'; sha256sum "$@")"
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  echo "installing Python packages into $venv" >&2
  rm -rf "$venv"
  "$python_bin" -m venv "$venv" || return 1
  for lock in "$@"; do
    # The locks list every package, so pip need not look for dependencies: those of PyTorch include
    # the CUDA packages.
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes \
      --requirement "$lock" || return 1
  done
  printf '%s\n' "$wanted" >"$stamp"
}
