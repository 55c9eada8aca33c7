//! The program starts. (This test also makes every test run build the program, which the
//! end-to-end tests in `tests/` drive.)

use std::process::Command;

#[test]
fn version_is_printed() {
    let output = Command::new(env!("CARGO_BIN_EXE_orchestrate")).arg("--version").output().unwrap();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().trim(),
        concat!("orchestrate ", env!("CARGO_PKG_VERSION"))
    );
}
