# Sourced by the scripts in the folder above: checks that cannot run here, counted like the tests' skips
# (tests/src/skip.rs).

# skip CHECK NEED WHY: reports that a check cannot run, and appends it to the file in ORCHESTRATE_SKIPS.
# Fails if ORCHESTRATE_REQUIRE lists the need.
skip() {
  case ",${ORCHESTRATE_REQUIRE:-}," in
    *",$2,"*)
      echo "error: $1 needs $2, which ORCHESTRATE_REQUIRE lists: $3" >&2
      return 1
      ;;
  esac
  echo "skipped: $1: needs $2 ($3)" >&2
  if [ -n "${ORCHESTRATE_SKIPS:-}" ]; then echo "$1: needs $2 ($3)" >>"$ORCHESTRATE_SKIPS"; fi
}
