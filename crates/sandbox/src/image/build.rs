//! Builds images from a task's own build context, and reads their run configuration.

use super::event::ImageListener;
use super::name::ImageName;
use super::pull::{self, PullError};
use crate::api::FileEntry;
use crate::config::{PullPolicy, SandboxSettings};
use crate::daemon::{CallError, Daemon};
use crate::error::SandboxError;
use bollard::models::BuildInfo;
use bollard::query_parameters::BuildImageOptionsBuilder;
use bytes::Bytes;
use futures::StreamExt as _;
use orchestrate_types::HumanDuration;
use std::time::Duration;

/// Characters of a build's output that an error includes.
const OUTPUT_CHARS: usize = 1500;
/// The file type bits of a folder.
const FOLDER_MODE: u32 = 0o040_000;

/// Why an image was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The daemon failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A step of the build failed.
    #[error("{host} cannot build {image}: {reason}")]
    Failed {
        /// Name of the Docker host.
        host: String,
        /// Name of the image.
        image: String,
        /// The daemon's message and the last lines of the output.
        reason: String,
    },
    /// The build took too long.
    #[error("building {image} took more than {limit}")]
    TimedOut {
        /// Name of the image.
        image: String,
        /// Its time limit.
        limit: HumanDuration,
    },
    /// The image is missing and cannot be pulled.
    #[error("cannot pull {image}: {reason}")]
    NotPulled {
        /// Name of the image.
        image: String,
        /// Reason given by the daemon or the settings.
        reason: String,
    },
    /// The context cannot be packed.
    #[error("cannot pack the build context of {image}")]
    Context {
        /// Name of the image.
        image: String,
        /// Error of the archive writer.
        source: std::io::Error,
    },
}

/// The configuration that an image gives its containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// Working directory; empty means `/`.
    pub workdir: String,
    /// User; empty means root.
    pub user: String,
    /// Whether it has an entry point.
    pub has_entrypoint: bool,
}

/// Builds and inspects images on all configured Docker hosts.
#[derive(Debug)]
pub struct ImageBuilder {
    daemons: Vec<Daemon>,
    pull: PullPolicy,
}

impl ImageBuilder {
    /// Connects to the hosts.
    ///
    /// # Errors
    /// If a host does not answer.
    pub async fn connect(settings: &SandboxSettings) -> Result<Self, SandboxError> {
        let mut daemons = Vec::new();
        for host in settings.docker_hosts() {
            daemons.push(Daemon::connect(&host, settings.call_timeout.0).await?);
        }
        Ok(Self { daemons, pull: settings.pull })
    }

    /// Builds `image` on every host that does not have it, and returns the number of these hosts.
    /// With `has_network`, the steps of the build may use the host's network.
    ///
    /// # Errors
    /// If a step fails, or the build takes longer than `limit`.
    pub async fn build(
        &self,
        image: &str,
        context: &[FileEntry],
        limit: Duration,
        has_network: bool,
    ) -> Result<usize, BuildError> {
        let mut built = 0;
        for daemon in &self.daemons {
            if daemon.inspect_image(image).await?.is_some() {
                continue;
            }
            let building = build_on(daemon, image, context, has_network);
            let Ok(result) = tokio::time::timeout(limit, Box::pin(building)).await else {
                let limit = HumanDuration(limit);
                return Err(BuildError::TimedOut { image: image.to_owned(), limit });
            };
            result?;
            built += 1;
        }
        Ok(built)
    }

    /// The run configuration of `image`, which is pulled if no host has it.
    ///
    /// # Errors
    /// If it is missing and cannot be pulled.
    pub async fn config(&self, image: &str) -> Result<ImageConfig, BuildError> {
        let not_pulled = |reason: String| BuildError::NotPulled { image: image.to_owned(), reason };
        for daemon in &self.daemons {
            if let Some(found) = daemon.inspect_image(image).await? {
                return Ok(config_of(found));
            }
        }
        let Some(daemon) = self.daemons.first().filter(|_| self.pull == PullPolicy::Missing) else {
            return Err(not_pulled("sandbox.pull = \"never\"".to_owned()));
        };
        let pulled = pull::pull(daemon, &ImageName::parse(image), &ImageListener::default()).await;
        pulled.map_err(|error: PullError| not_pulled(error.to_string()))?;
        let found = daemon.inspect_image(image).await?;
        found.map(config_of).ok_or_else(|| not_pulled("it is missing after the pull".to_owned()))
    }
}

fn config_of(found: bollard::models::ImageInspect) -> ImageConfig {
    let config = found.config.unwrap_or_default();
    ImageConfig {
        workdir: config.working_dir.unwrap_or_default(),
        user: config.user.unwrap_or_default(),
        has_entrypoint: config.entrypoint.is_some_and(|argv| !argv.is_empty()),
    }
}

async fn build_on(
    daemon: &Daemon,
    image: &str,
    context: &[FileEntry],
    has_network: bool,
) -> Result<(), BuildError> {
    let archive = archive(context)
        .map_err(|source| BuildError::Context { image: image.to_owned(), source })?;
    let network = if has_network { "default" } else { "none" };
    let options = BuildImageOptionsBuilder::new()
        .dockerfile("Dockerfile")
        .t(image)
        .rm(true)
        .forcerm(true)
        .networkmode(network)
        .build();
    let body = bollard::body_full(Bytes::from(archive));
    let mut steps = std::pin::pin!(daemon.docker.build_image(options, None, Some(body)));
    let mut output = String::new();
    let failed = |reason: &str, output: &str| {
        let kept = output.char_indices().rev().nth(OUTPUT_CHARS).map_or(0, |(at, _)| at);
        let output = output.get(kept..).unwrap_or_default().trim();
        BuildError::Failed {
            host: daemon.host.clone(),
            image: image.to_owned(),
            reason: format!("{reason}\n{output}"),
        }
    };
    while let Some(step) = steps.next().await {
        match step {
            Ok(BuildInfo { error_detail: Some(error), .. }) => {
                return Err(failed(error.message.as_deref().unwrap_or("failed"), &output));
            }
            Ok(step) => output.push_str(step.stream.as_deref().unwrap_or_default()),
            Err(error) => {
                let error = CallError::from_driver(error, Duration::ZERO);
                return Err(failed(&error.to_string(), &output));
            }
        }
    }
    match daemon.inspect_image(image).await? {
        Some(_) => Ok(()),
        None => Err(failed("the build ended without an image", &output)),
    }
}

/// The context as a reproducible tar archive: the same files give the same bytes.
fn archive(context: &[FileEntry]) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for file in context {
        let mut header = tar::Header::new_gnu();
        header.set_mode(file.mode & 0o7777);
        header.set_mtime(0);
        if file.is_link() {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            let target = String::from_utf8_lossy(&file.content);
            archive.append_link(&mut header, &file.path, target.as_ref())?;
        } else if file.mode & 0o170_000 == FOLDER_MODE {
            header.set_entry_type(tar::EntryType::Directory);
            header.set_size(0);
            archive.append_data(&mut header, format!("{}/", file.path), std::io::empty())?;
        } else {
            header.set_size(file.content.len() as u64);
            archive.append_data(&mut header, &file.path, file.content.as_slice())?;
        }
    }
    archive.into_inner()
}
