//! The program `orchestrate`; see the library of this package.

#[cfg(feature = "jemalloc")]
mod heap;

use std::process::ExitCode;

fn main() -> ExitCode {
    orchestrate_cli::main()
}
