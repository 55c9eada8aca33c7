# Sourced by the scripts in the parent folder: installs what a build needs beyond the Rust toolchain.

# Installs a C compiler and the C library's headers where there are none.
ensure_build_tools() {
  if ! command -v cargo >/dev/null; then
    echo "error: cargo is not on PATH" >&2
    echo "hint: install Rust from https://rustup.rs, then run this again" >&2
    return 1
  fi
  if command -v cc >/dev/null && [ -e /usr/include/stdio.h ]; then
    return 0
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: no C compiler (cc) found" >&2
    echo "hint: install your system's C compiler and C library headers (Debian: build-essential)" >&2
    return 1
  fi
  echo "installing build-essential (C compiler for bundled SQLite, zstd and TLS)" >&2
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq build-essential >&2
}
