# Thin names for the project's commands; logic lives in scripts/.

# List the recipes.
default:
    @just --list

# Format, lints, language and every test without Docker.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings
    ./scripts/lint-language
    cargo nextest run --workspace --locked -E 'not (test(/(^|::)docker_/) or binary(/^docker_/))'

# Rewrite generated files (schema, pages of settings, metrics, commands and fields, Python tables) and recorded texts.
regenerate:
    ORCHESTRATE_REGENERATE=1 INSTA_UPDATE=always cargo nextest run --locked -p orchestrate-cli -p orchestrate-gateway -p orchestrate-metrics -p orchestrate-handoff

# Format the Rust code.
fmt:
    cargo fmt --all

# Every Rust test, Docker and documentation examples included.
test *args:
    ./scripts/test {{args}}

# Licences, sources, banned and vulnerable crates, and the code that runs at build time.
deny:
    ./scripts/deny

# Format, lints, types and tests of the Python package.
python *args:
    ./scripts/test-python {{args}}

# The documentation site, in target/book.
docs:
    ./scripts/docs

# What continuous integration runs.
ci:
    ./.ci/run

# The long counts: fuzzing, kills, trainer kills.
nightly:
    ./scripts/nightly

# A release archive, wheel and image in target/dist.
release:
    ./scripts/release
