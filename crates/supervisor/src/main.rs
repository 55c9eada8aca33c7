//! Process 1 of a sandbox. All it does is in the library.

fn main() -> std::process::ExitCode {
    orchestrate_supervisor::run(std::env::args().skip(1))
}
