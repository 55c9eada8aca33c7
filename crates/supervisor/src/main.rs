//! Process 1 of a sandbox; the code is in the library.

fn main() -> std::process::ExitCode {
    orchestrate_supervisor::run(std::env::args().skip(1))
}
