//! The supervisor's binary, and images that carry it.
//!
//! Docker's archive call cannot write to a read-only root, so reusable containers start from an
//! image of ours: the task's image with the supervisor added, made once per image and supervisor.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::container::{LABEL_DEADLINE, LABEL_RUN};
use crate::daemon::{CallError, Daemon};
use crate::image::{inspect, missing};
use bollard::models::{ContainerConfig, ContainerCreateBody};
use bollard::query_parameters::{
    CommitContainerOptions, CreateContainerOptions, UploadToContainerOptions,
};
use bytes::Bytes;
use orchestrate_supervisor::INSTALL_PATH;
use orchestrate_types::unix_micros;
use std::collections::HashMap;
use std::sync::LazyLock;

static SUPERVISOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/supervisor"));
static DIGEST: LazyLock<String> = LazyLock::new(|| {
    let mut digest = blake3::hash(SUPERVISOR).to_hex().to_string();
    digest.truncate(12);
    digest
});
/// Where images of ours are: their tags begin with the [`short`] id of what they were made of.
pub(super) const REPOSITORY: &str = "orchestrate/derived";
/// Making an image takes seconds; a container for it that is older was left behind.
const DERIVE_SECONDS: i64 = 600;

/// As much of an image's id as names of other things carry.
pub(super) fn short(id: &str) -> String {
    id.trim_start_matches("sha256:").chars().take(12).collect()
}

/// An archive with the supervisor, to be unpacked at `/`.
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
            kind: SandboxErrorKind::Refused { call: "archive", message: error.to_string() },
        })
}

/// Puts the supervisor into a container whose root can be written.
pub(crate) async fn install(daemon: &Daemon, name: &str) -> Result<(), SandboxError> {
    let options = UploadToContainerOptions { path: "/".to_owned(), ..Default::default() };
    let body = bollard::body_full(supervisor_archive(name)?);
    let upload = daemon.docker.upload_to_container(name, Some(options), body);
    daemon.call(upload).await.map_err(|error| error.at(name, "archive put"))
}

/// The image with the supervisor in it; made where the daemon does not have it yet.
pub(super) async fn derive(daemon: &Daemon, image: &str, id: &str) -> Result<String, SandboxError> {
    let tag = format!("{}-{}", short(id), *DIGEST);
    let reference = format!("{REPOSITORY}:{tag}");
    if inspect(daemon, &reference).await?.is_some() {
        return Ok(reference);
    }
    tracing::info!(image, derived = %reference, "adding the supervisor to an image");
    let name = format!("orch-derive-{tag}-{}", std::process::id());
    let failed = |call| move |error: CallError| error.at(image, call);
    // A container of this name is the remainder of an attempt that failed. Should another program
    // make the same image now, the later one gets the tag, and both images are good.
    daemon.remove(&name).await.map_err(failed("remove"))?;
    let deadline = unix_micros() / 1_000_000 + DERIVE_SECONDS;
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
        Err(CallError::Status(404, _)) => return Err(missing(daemon, image)),
        Err(error) => return Err(error.at(image, "create")),
    }
    let result = async {
        install(daemon, &name).await?;
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
    fn the_supervisor_is_a_static_program() {
        assert_eq!(SUPERVISOR.get(..4), Some(b"\x7fELF".as_slice()));
        let interpreter = b"/lib64/ld-linux";
        assert!(!SUPERVISOR.windows(interpreter.len()).any(|window| window == interpreter));
        assert_eq!(DIGEST.len(), 12);
    }

    #[test]
    fn the_archive_holds_one_executable() {
        let bytes = supervisor_archive("x").unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let entries: Vec<_> = archive.entries().unwrap().map(Result::unwrap).collect();
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0].path().unwrap().to_str(), Some("orchestrate-supervisor"));
        assert_eq!(entries[0].header().mode().unwrap(), 0o755);
    }
}
