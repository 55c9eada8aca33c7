//! The Python package `trainer/` passes its own tests on the golden files that Rust wrote.

use std::process::Command;

#[test]
fn the_python_reader_agrees_on_the_golden_batches() {
    let usable = Command::new("python3")
        .args(["-c", "import numpy, pytest, sys; sys.exit(sys.version_info < (3, 10))"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !usable {
        let why = "no python3 of version 3.10 or later with numpy and pytest";
        orchestrate_e2e::skip::skip("python", why);
        return;
    }
    let output = Command::new("python3")
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../trainer"))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}
