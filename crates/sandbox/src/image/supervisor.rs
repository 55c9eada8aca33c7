//! The supervisor's binary, and images that contain it.
//!
//! Docker's archive call cannot write to a read-only root, so reusable containers start from a
//! derived image: the task's image with the supervisor added, built once per image and supervisor.

use super::layer::ImageLayer;
use crate::container::{LABEL_DEADLINE, LABEL_RUN};
use crate::daemon::{CallError, Daemon};
use crate::error::{SandboxError, SandboxErrorKind};
use bollard::models::{ContainerConfig, ContainerCreateBody};
use bollard::query_parameters::{
    CommitContainerOptions, CreateContainerOptions, UploadToContainerOptions,
};
use bytes::Bytes;
use orchestrate_supervisor::INSTALL_PATH;
use orchestrate_types::unix_micros;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// The supervisor's executable, compiled by the build script.
static SUPERVISOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/supervisor"));
/// Identifies the executable in the tags of derived images.
static DIGEST: LazyLock<String> = LazyLock::new(|| {
    let mut digest = blake3::hash(SUPERVISOR).to_hex().to_string();
    digest.truncate(12);
    digest
});
/// Repository of derived images. Their tags start with the [`short_id`] of the original image.
pub(super) const REPOSITORY: &str = "orchestrate/derived";
/// Building an image takes seconds; an older container that was created for it is a leftover.
const BUILD_SECONDS: i64 = 600;

/// The first 12 digits of an image's id, for use in other names.
pub(super) fn short_id(id: &str) -> String {
    id.trim_start_matches("sha256:").chars().take(12).collect()
}

/// A tar archive with the supervisor, to be unpacked at `/`.
pub(crate) fn supervisor_archive(sandbox: &str) -> Result<Bytes, SandboxError> {
    let mut header = tar::Header::new_gnu();
    header.set_size(SUPERVISOR.len() as u64);
    header.set_mode(0o755);
    let mut archive = tar::Builder::new(Vec::new());
    archive
        .append_data(&mut header, INSTALL_PATH.trim_start_matches('/'), SUPERVISOR)
        .and_then(|()| archive.into_inner())
        .map(Bytes::from)
        .map_err(|error| SandboxError {
            sandbox: sandbox.to_owned(),
            kind: SandboxErrorKind::Failed { call: "archive", source: Arc::new(error) },
        })
}

/// Copies the supervisor into a container with a writable root.
pub(crate) async fn install(daemon: &Daemon, name: &str) -> Result<(), SandboxError> {
    let options = UploadToContainerOptions { path: "/".to_owned(), ..Default::default() };
    let body = bollard::body_full(supervisor_archive(name)?);
    let upload = daemon.docker.upload_to_container(name, Some(options), body);
    daemon.call(upload).await.map_err(|error| error.at(name, "archive put"))
}

/// Copies a layer's files into a container.
async fn add_layer(daemon: &Daemon, name: &str, layer: &ImageLayer) -> Result<(), SandboxError> {
    let archive = tokio::fs::read(layer.path()).await.map_err(|error| SandboxError {
        sandbox: name.to_owned(),
        kind: SandboxErrorKind::Failed { call: "agent layer", source: Arc::new(error) },
    })?;
    let options = UploadToContainerOptions { path: "/".to_owned(), ..Default::default() };
    let body = bollard::body_full(Bytes::from(archive));
    let upload = daemon.docker.upload_to_container(name, Some(options), body);
    daemon.call(upload).await.map_err(|error| error.at(name, "archive put"))
}

/// Returns the name of the image with the supervisor, and a layer, added. Builds it if the daemon does
/// not have it.
pub(super) async fn add_to_image(
    daemon: &Daemon,
    image: &str,
    id: &str,
    layer: Option<&ImageLayer>,
) -> Result<String, SandboxError> {
    let layer_tag = layer.map_or_else(String::new, |layer| format!("-{}", layer.digest()));
    let tag = format!("{}-{}{layer_tag}", short_id(id), *DIGEST);
    let reference = format!("{REPOSITORY}:{tag}");
    if daemon.inspect_image(&reference).await?.is_some() {
        return Ok(reference);
    }
    tracing::info!(image, derived = %reference, "adding the supervisor to an image");
    let name = format!("orch-derive-{tag}-{}", std::process::id());
    let failed = |call| move |error: CallError| error.at(image, call);
    // A container of this name is a leftover of a build that failed. If another program builds the
    // same image at this moment, the later one gets the tag, and both images are usable.
    daemon.remove(&name).await.map_err(failed("remove"))?;
    let deadline = unix_micros() / 1_000_000 + BUILD_SECONDS;
    let body = ContainerCreateBody {
        image: Some(id.to_owned()),
        entrypoint: Some(vec![INSTALL_PATH.to_owned()]),
        labels: Some(HashMap::from([
            (LABEL_RUN.to_owned(), "none".to_owned()),
            (LABEL_DEADLINE.to_owned(), deadline.to_string()),
        ])),
        ..ContainerCreateBody::default()
    };
    let options = CreateContainerOptions { name: Some(name.clone()), ..Default::default() };
    let created = daemon.call(daemon.docker.create_container(Some(options), body)).await;
    match created {
        Ok(_) => {}
        Err(CallError::Status(404, _)) => {
            return Err(daemon.error(SandboxErrorKind::ImageMissing(image.to_owned())));
        }
        Err(error) => return Err(error.at(image, "create")),
    }
    let result = async {
        install(daemon, &name).await?;
        if let Some(layer) = layer {
            add_layer(daemon, &name, layer).await?;
        }
        let commit = CommitContainerOptions {
            container: Some(name.clone()),
            repo: Some(REPOSITORY.to_owned()),
            tag: Some(tag.clone()),
            pause: false,
            ..Default::default()
        };
        daemon
            .call(daemon.docker.commit_container(commit, ContainerConfig::default()))
            .await
            .map_err(failed("commit"))
    }
    .await;
    daemon.remove(&name).await.map_err(failed("remove"))?;
    result.map(|_| reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervisor_is_a_static_executable() {
        assert_eq!(SUPERVISOR.get(..4), Some(b"\x7fELF".as_slice()));
        let interpreter = b"/lib64/ld-linux";
        assert!(!SUPERVISOR.windows(interpreter.len()).any(|window| window == interpreter));
        assert_eq!(DIGEST.len(), 12);
    }

    #[test]
    fn archive_contains_one_executable() {
        let bytes = supervisor_archive("x").unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let entries: Vec<_> = archive.entries().unwrap().map(Result::unwrap).collect();
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0].path().unwrap().to_str(), Some("orchestrate-supervisor"));
        assert_eq!(entries[0].header().mode().unwrap(), 0o755);
    }
}
