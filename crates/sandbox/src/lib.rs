//! Sandboxes: isolated containers in which model-written commands run, never directly on the host.
//!
//! The invariant: a result counts only if the supervisor inside the container reported the end of
//! the command; the end of the stream is never taken for success. Read `api.rs` for the traits,
//! then `provider.rs` for one Docker host and `hosts/mod.rs` for several.
//!
//! ```no_run
//! use orchestrate_sandbox::{
//!     Command, DockerProvider, Owner, Purpose, SandboxSettings, SandboxProvider as _, SandboxSpec,
//! };
//! use orchestrate_types::{ByteSize, RunId};
//! use std::time::Duration;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let config = SandboxSettings::default();
//! let limits = config.limits();
//! let provider = DockerProvider::connect(config).await?;
//! let mut sandbox = provider
//!     .open(&SandboxSpec {
//!         image: "debian:bookworm-slim".to_owned(),
//!         purpose: Purpose::Agent,
//!         owner: Owner { run: RunId::generate(), epoch: 1, attempt: "t000001.00-a01".parse()? },
//!         workdir: "/testbed".to_owned(),
//!         limits,
//!         deadline: Duration::from_secs(300),
//!         reusable: true,
//!     })
//!     .await?;
//!
//! let command = Command::shell("echo hello > greeting.txt; cat *", Duration::from_secs(10));
//! let result = sandbox.exec(&command).await?;
//! assert!(result.success());
//! assert_eq!(result.text(), "hello\n");
//!
//! let files = sandbox.read_tree(ByteSize::mib(1)).await?;
//! assert_eq!(files[0].path, "greeting.txt");
//! assert_eq!(files[0].content, b"hello\n");
//!
//! sandbox.close().await?;
//! provider.shutdown().await?;
//! # Ok(())
//! # }
//! ```

mod api;
mod bare_container;
mod config;
mod container;
mod daemon;
mod disk;
mod doctor;
mod error;
mod forward;
mod guard;
mod host;
mod hosts;
mod image;
mod isolation;
mod link;
mod loss;
mod memory;
mod open;
mod provider;
mod sandbox;
mod self_test;
mod shared_limits;
mod slots;
mod ssh;
mod state;
mod sweep;

pub use api::{
    ChangedFile, Command, ExecResult, Exit, FileEntry, Forward, HostUsage, LINK_MODE, Owner,
    Purpose, QuarantinedContainer, Sandbox, SandboxLimits, SandboxProvider, SandboxSpec,
    SweepReport, TreeChanges, TreeMark,
};
pub use bare_container::BareContainer;
pub use config::{PullPolicy, SandboxSection, SandboxSettings, Seccomp, UserNamespace};
pub use doctor::{DaemonReport, ProbeReport};
pub use error::{Cause, SandboxError, SandboxErrorKind};
pub use host::{DockerHost, DockerHostSection};
pub use hosts::DockerHosts;
pub use image::{
    BuildError, ImageBuilder, ImageConfig, ImageEvent, ImageHooks, ImageIdentity, ImageLayer,
    ImageListener, ImageLock, ImagesOnHost, InMemoryImageLock, PulledImage, images_on_hosts,
};
pub use memory::MemoryUse;
pub use provider::{DockerProvider, ProviderStats};
pub use self_test::{SelfTestResult, run_self_test, self_test_cases};
pub use shared_limits::SharedLimit;
pub use sweep::{ContainerInfo, GcScope};
