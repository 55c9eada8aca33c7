//! Committed files that are generated from the declarations of the settings are current.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::path::Path;
use std::process::Command;

fn is_current(command: &[&str], file: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(env!("CARGO_BIN_EXE_orchestrate")).args(command).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = root.join(file);
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &output.stdout).unwrap();
    }
    assert!(
        std::fs::read(&path).unwrap_or_default() == output.stdout,
        "{file} is out of date: run ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-cli \
         generated"
    );
}

#[test]
fn generated_schema_is_current() {
    is_current(&["config", "schema"], "configs/schema.json");
}

#[test]
fn generated_settings_page_is_current() {
    is_current(&["config", "docs"], "docs/src/settings.md");
}
