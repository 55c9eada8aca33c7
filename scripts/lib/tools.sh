# Sourced by the scripts in the folder above: command-line tools that cargo builds once, into target/tools.

# ensure_tool CRATE VERSION [CARGO ARGUMENTS]: puts CRATE's program first on PATH, building it if needed.
ensure_tool() {
  local crate=$1 version=$2 root
  shift 2
  root=${CARGO_TARGET_DIR:-target}/tools
  mkdir -p "$root"
  root=$(cd "$root" && pwd)
  PATH="$root/bin:$PATH"
  if [ "$("$root/bin/$crate" --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -1)" != "$version" ]; then
    echo "building $crate $version (once, into $root)" >&2
    # In a target folder of its own: flags of this project must not rebuild it. Unoptimised: compiling
    # these programs takes longer than anything they do here.
    CARGO_TARGET_DIR="$root/build" CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off \
      cargo install --quiet --locked --root "$root" \
      --version "$version" "$@" "$crate" >&2
    rm -rf "$root/build"
  fi
}
