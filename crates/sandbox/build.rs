//! Compiles the supervisor (crates/supervisor) to a static binary in `OUT_DIR`, for
//! `include_bytes!`. It runs in any image, even one without a C library.
//!
//! This calls rustc directly: the supervisor has no dependencies, and a nested cargo would wait for
//! the lock that the outer one holds.

use std::path::{Path, PathBuf};
use std::process::Command;

type Failure = Box<dyn std::error::Error>;

fn variable(name: &str) -> Result<String, Failure> {
    println!("cargo:rerun-if-env-changed={name}");
    std::env::var(name).map_err(|e| format!("{name}: {e}").into())
}

fn compile(args: &[&str], source: &Path, output: &Path, supervisor: &Path) -> Result<(), Failure> {
    let mut rustc = Command::new(variable("RUSTC")?);
    // Independent of the path of the checkout, because a digest of the binary is part of image
    // names.
    rustc
        .arg(format!("--remap-path-prefix={}=supervisor", supervisor.display()))
        .args(["--edition=2024", "--target", &variable("TARGET")?])
        .args(["-Ctarget-feature=+crt-static", "-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols"])
        .args(args)
        .arg(source)
        .arg("-o")
        .arg(output);
    if let Ok(linker) = variable("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    let status = rustc.status()?;
    if status.success() { Ok(()) } else { Err(format!("{rustc:?} failed: {status}").into()) }
}

fn main() -> Result<(), Failure> {
    let supervisor = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("../supervisor");
    println!("cargo:rerun-if-changed={}", supervisor.join("src").display());
    println!("cargo:rerun-if-changed=build.rs");
    if variable("CARGO_CFG_TARGET_OS")? != "linux" {
        return Err(
            "the target must be Linux: sandboxes are Linux containers, and their supervisor \
                    is built for the same target"
                .into(),
        );
    }
    let out = PathBuf::from(variable("OUT_DIR")?);
    let library = out.join("liborchestrate_supervisor.rlib");
    let name = "--crate-name=orchestrate_supervisor";
    compile(&["--crate-type=rlib", name], &supervisor.join("src/lib.rs"), &library, &supervisor)?;
    let external = format!("--extern=orchestrate_supervisor={}", library.display());
    let args = ["--crate-type=bin", "--crate-name=supervisor", "-Clto=fat", &external];
    compile(&args, &supervisor.join("src/main.rs"), &out.join("supervisor"), &supervisor)
}
