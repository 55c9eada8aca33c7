//! The program `orchestrate`; see the library of this package.

mod heap;

use std::process::ExitCode;

fn main() -> ExitCode {
    orchestrate_cli::main()
}
