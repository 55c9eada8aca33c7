//! Pulling one image. Temporary failures of the registry are retried.

use super::event::{ImageEvent, ImageListener};
use super::name::ImageName;
use crate::daemon::{CallError, Daemon};
use bollard::models::CreateImageInfo;
use bollard::query_parameters::CreateImageOptions;
use futures::StreamExt as _;
use orchestrate_types::ByteSize;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// How long an overloaded registry is retried: rate limits last for up to an hour.
const BUSY_TIMEOUT: Duration = Duration::from_mins(30);
/// Number of tries after failures that may be temporary or due to a mistake in a name.
const UNCLEAR_TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// A pull without progress for this long is restarted.
const STALLED_AFTER: Duration = Duration::from_mins(5);
/// Interval between progress events of one pull.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
pub(super) enum PullError {
    #[error("the registry does not have `{0}`")]
    NotFound(String),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("no progress for {0:?}")]
    Stalled(Duration),
    #[error(
        "the Docker host has {} MiB free, less than sandbox.min_free_disk = {min_free}; free some \
         space, limit the images that are kept with sandbox.image_cache, or lower the limit",
        free.0 >> 20
    )]
    DiskFull { free: ByteSize, min_free: ByteSize },
}

/// What a failure means for the next try.
#[derive(Debug, PartialEq, Eq)]
enum FailureKind {
    /// The registry does not have the image, or hides it from this client.
    NotFound,
    /// Retrying would fail again.
    Permanent,
    /// The registry is overloaded or limits its rate.
    Busy,
    /// A broken connection, an unknown host, a faulty daemon.
    Unclear,
}

/// Classifies a failure by Docker's message: registries have no common error codes.
fn classify(message: &str) -> FailureKind {
    let message = message.to_lowercase();
    let contains = |phrases: &[&str]| phrases.iter().any(|phrase| message.contains(phrase));
    if contains(&["toomanyrequests", "too many requests", "rate limit", "429"])
        || contains(&["unexpected http status: 5", "service unavailable", "bad gateway"])
        || contains(&["gateway timeout", "gateway time-out", "internal server error"])
    {
        FailureKind::Busy
    } else if contains(&["manifest unknown", "name unknown", "does not exist", "not found"]) {
        FailureKind::NotFound
    } else if contains(&["unauthorized", "denied", "authentication required", "no basic auth"])
        || contains(&["no matching manifest", "invalid reference", "no space left"])
    {
        FailureKind::Permanent
    } else {
        FailureKind::Unclear
    }
}

/// Pulls an image, retrying temporary failures.
#[tracing::instrument(name = "pull_image", skip_all, fields(image = %name, host = daemon.host))]
pub(super) async fn pull(
    daemon: &Daemon,
    name: &ImageName,
    listener: &ImageListener,
) -> Result<(), PullError> {
    let image = name.to_string();
    let start = Instant::now();
    listener.notify(&ImageEvent::PullStarted { image: image.clone(), host: daemon.host.clone() });
    let (mut pause, mut unclear) = (FIRST_PAUSE, 0);
    loop {
        let error = match try_pull(daemon, name, &image, listener).await {
            Ok(bytes) => {
                let elapsed = start.elapsed();
                listener.notify(&ImageEvent::Pulled { image, bytes, elapsed });
                return Ok(());
            }
            Err(error) => error,
        };
        let reason = error.to_string();
        match classify(&reason) {
            FailureKind::NotFound => return Err(PullError::NotFound(image)),
            FailureKind::Busy if start.elapsed() < BUSY_TIMEOUT => {}
            FailureKind::Permanent | FailureKind::Busy => return Err(error),
            FailureKind::Unclear => {
                unclear += 1;
                if unclear >= UNCLEAR_TRIES {
                    return Err(error);
                }
            }
        }
        // Randomized, so that coordinators that share a registry do not retry at the same time.
        let wait = pause.mul_f64(rand::random_range(0.5..1.0));
        listener.notify(&ImageEvent::PullRetried { image: image.clone(), reason, pause: wait });
        tokio::time::sleep(wait).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Pulls an image once. Returns the bytes that were downloaded.
async fn try_pull(
    daemon: &Daemon,
    name: &ImageName,
    image: &str,
    listener: &ImageListener,
) -> Result<ByteSize, PullError> {
    let options = CreateImageOptions {
        from_image: Some(name.repository()),
        tag: Some(name.version().to_owned()),
        ..CreateImageOptions::default()
    };
    let mut steps = std::pin::pin!(daemon.docker.create_image(Some(options), None, None));
    let (mut layers, mut reported_at) = (LayerProgress::default(), Instant::now());
    loop {
        match tokio::time::timeout(STALLED_AFTER, steps.next()).await {
            Ok(Some(Ok(step))) => layers.update(step),
            Ok(Some(Err(error))) => {
                return Err(CallError::from_driver(error, STALLED_AFTER).into());
            }
            Ok(None) => return Ok(layers.sum().1),
            Err(_) => return Err(PullError::Stalled(STALLED_AFTER)),
        }
        if reported_at.elapsed() >= PROGRESS_INTERVAL {
            reported_at = Instant::now();
            let (done, total) = layers.sum();
            let image = image.to_owned();
            listener.notify(&ImageEvent::PullProgress { image, done, total });
        }
    }
}

/// Bytes of each layer, by its id: downloaded, and in total.
#[derive(Debug, Default)]
struct LayerProgress(HashMap<String, (u64, u64)>);

impl LayerProgress {
    fn update(&mut self, step: CreateImageInfo) {
        let (Some(layer), Some(detail)) = (step.id, step.progress_detail) else { return };
        let bytes = |n: Option<i64>| n.and_then(|n| u64::try_from(n).ok());
        // Extraction reports progress of its own, which is not counted.
        if step.status.as_deref() == Some("Downloading")
            && let (Some(done), Some(total)) = (bytes(detail.current), bytes(detail.total))
        {
            self.0.insert(layer, (done, total));
        }
    }

    /// Bytes of all layers: downloaded, and in total.
    fn sum(&self) -> (ByteSize, ByteSize) {
        let sum = |pick: fn(&(u64, u64)) -> u64| ByteSize(self.0.values().map(pick).sum());
        (sum(|layer| layer.0), sum(|layer| layer.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_messages_are_classified() {
        for (message, expected) in [
            ("toomanyrequests: You have reached your pull rate limit", FailureKind::Busy),
            ("received unexpected HTTP status: 503 Service Unavailable", FailureKind::Busy),
            ("error parsing HTTP 429 response body: invalid character", FailureKind::Busy),
            (
                "manifest for a/b:c not found: manifest unknown: manifest unknown",
                FailureKind::NotFound,
            ),
            (
                "pull access denied for x, repository does not exist or may require 'docker login'",
                FailureKind::NotFound,
            ),
            (
                "Head \"https://h/v2/\": unauthorized: authentication required",
                FailureKind::Permanent,
            ),
            (
                "no matching manifest for linux/amd64 in the manifest list entries",
                FailureKind::Permanent,
            ),
            ("dial tcp: lookup registry-1.docker.io: no such host", FailureKind::Unclear),
            ("dial tcp 127.0.0.1:1: connect: connection refused", FailureKind::Unclear),
            ("unexpected EOF", FailureKind::Unclear),
        ] {
            assert_eq!(classify(message), expected, "{message}");
        }
    }

    #[test]
    fn progress_counts_downloads_but_not_extraction() {
        let step = |id: &str, status: &str, current| CreateImageInfo {
            id: Some(id.into()),
            status: Some(status.into()),
            progress_detail: Some(bollard::models::ProgressDetail {
                current: Some(current),
                total: Some(100),
            }),
            ..CreateImageInfo::default()
        };
        let mut layers = LayerProgress::default();
        layers.update(step("a", "Downloading", 10));
        layers.update(step("b", "Downloading", 20));
        layers.update(step("a", "Downloading", 100));
        layers.update(step("a", "Extracting", 5));
        layers.update(CreateImageInfo::default());
        assert_eq!(layers.sum(), (ByteSize(120), ByteSize(200)));
    }
}
