//! Sandboxes: where model-written commands run. Never a bare host process.
//!
//! The invariant: a result counts only when the supervisor inside the container reported the
//! command's end; an end of stream is never taken for success. Read `api.rs` for the seam, then
//! `provider.rs` for one Docker host, and `hosts/mod.rs` for several of them.

mod api;
mod battery;
mod config;
mod container;
mod daemon;
mod disk;
mod doctor;
mod floor;
mod guard;
mod host;
mod hosts;
mod image;
mod isolation;
mod link;
mod memory;
mod provider;
mod sandbox;
mod slots;
mod ssh;
mod sweep;

pub use api::{
    Command, ExecResult, Exit, FileEntry, HostUse, Limits, Owner, Purpose, Sandbox, SandboxError,
    SandboxErrorKind, SandboxProvider, SandboxSpec, SweepReport,
};
pub use battery::{BatteryResult, battery_cases, run_battery};
pub use config::{PullPolicy, SandboxSection, SandboxSettings, Seccomp};
pub use doctor::{DaemonReport, ProbeReport};
pub use floor::BareContainer;
pub use guard::Quarantined;
pub use host::{DockerHost, DockerHostSection};
pub use hosts::DockerHosts;
pub use image::{
    ImageBook, ImageIdentity, ImageNews, ImagesOnHost, Listener, PulledImage, images_on_hosts,
};
pub use isolation::UserNamespace;
pub use memory::MemoryUse;
pub use provider::{DockerProvider, ProviderStats, Surroundings};
pub use sweep::{ContainerInfo, GcScope};
