//! Pulling one image: whatever a registry says that time heals is waited for.

use super::name::Name;
use super::news::{ImageNews, Listener};
use crate::daemon::{CallError, Daemon};
use bollard::models::CreateImageInfo;
use bollard::query_parameters::CreateImageOptions;
use futures::StreamExt as _;
use orchestrate_types::ByteSize;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// A registry that limits its rate does so by the hour.
const BUSY_PATIENCE: Duration = Duration::from_mins(30);
/// Tries for what may be an accident of the moment, or a mistake in a name.
const UNCLEAR_TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// A pull that shows no sign of life for so long is begun again.
const STALLED_AFTER: Duration = Duration::from_mins(5);
/// Between two lines about one pull.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What came of a pull that did not work.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PullError {
    /// The registry has no such image.
    Absent,
    /// Anything else, in the words of the daemon.
    Failed(String),
}

/// What a failure means for the next try.
#[derive(Debug, PartialEq, Eq)]
enum Advice {
    /// The registry has no such image, or does not show it to us.
    Absent,
    /// Trying again changes nothing.
    GiveUp,
    /// The registry has too much to do, or to give.
    Busy,
    /// A broken connection, an unknown host, a sick daemon.
    Unclear,
}

/// Registries have no common language for what went wrong; these are words of Docker's about them.
fn advice(message: &str) -> Advice {
    let message = message.to_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if says(&["toomanyrequests", "too many requests", "rate limit", "429"])
        || says(&["unexpected http status: 5", "service unavailable", "bad gateway"])
        || says(&["gateway timeout", "gateway time-out", "internal server error"])
    {
        Advice::Busy
    } else if says(&["manifest unknown", "name unknown", "does not exist", "not found"]) {
        Advice::Absent
    } else if says(&["unauthorized", "denied", "authentication required", "no basic auth"])
        || says(&["no matching manifest", "invalid reference", "no space left"])
    {
        Advice::GiveUp
    } else {
        Advice::Unclear
    }
}

/// Pulls `name`, trying again as long as that makes sense.
pub(super) async fn pull(
    daemon: &Daemon,
    name: &Name,
    listener: &Listener,
) -> Result<(), PullError> {
    let image = name.to_string();
    let began = Instant::now();
    listener.tell(&ImageNews::PullBegun { image: image.clone(), host: daemon.host.clone() });
    let (mut pause, mut unclear) = (FIRST_PAUSE, 0);
    loop {
        let reason = match once(daemon, name, &image, listener).await {
            Ok(bytes) => {
                let took = began.elapsed();
                listener.tell(&ImageNews::Pulled { image, bytes, took });
                return Ok(());
            }
            Err(reason) => reason,
        };
        match advice(&reason) {
            Advice::Absent => return Err(PullError::Absent),
            Advice::Busy if began.elapsed() < BUSY_PATIENCE => {}
            Advice::GiveUp | Advice::Busy => return Err(PullError::Failed(reason)),
            Advice::Unclear => {
                unclear += 1;
                if unclear >= UNCLEAR_TRIES {
                    return Err(PullError::Failed(reason));
                }
            }
        }
        // Many coordinators meet the same registry: they are not to come back as one.
        let wait = pause.mul_f64(rand::random_range(0.5..1.0));
        listener.tell(&ImageNews::PullDelayed { image: image.clone(), reason, pause: wait });
        tokio::time::sleep(wait).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// One try; bytes that were downloaded, or the daemon's words.
async fn once(
    daemon: &Daemon,
    name: &Name,
    image: &str,
    listener: &Listener,
) -> Result<ByteSize, String> {
    let options = CreateImageOptions {
        from_image: Some(name.repository()),
        tag: Some(name.version().to_owned()),
        ..CreateImageOptions::default()
    };
    let mut steps = std::pin::pin!(daemon.docker.create_image(Some(options), None, None));
    let (mut layers, mut told) = (Layers::default(), Instant::now());
    loop {
        match tokio::time::timeout(STALLED_AFTER, steps.next()).await {
            Ok(Some(Ok(step))) => layers.see(step),
            Ok(Some(Err(error))) => {
                return Err(CallError::from_driver(error, STALLED_AFTER).words());
            }
            Ok(None) => return Ok(layers.done().1),
            Err(_) => return Err(format!("no progress for {STALLED_AFTER:?}")),
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            let (done, of) = layers.done();
            listener.tell(&ImageNews::Pulling { image: image.to_owned(), done, of });
        }
    }
}

/// Bytes of each layer: downloaded, and all of them.
#[derive(Debug, Default)]
struct Layers(HashMap<String, (u64, u64)>);

impl Layers {
    fn see(&mut self, step: CreateImageInfo) {
        let (Some(layer), Some(detail)) = (step.id, step.progress_detail) else { return };
        let bytes = |n: Option<i64>| n.and_then(|n| u64::try_from(n).ok());
        // Later, layers are extracted, and counted again.
        if step.status.as_deref() == Some("Downloading")
            && let (Some(done), Some(of)) = (bytes(detail.current), bytes(detail.total))
        {
            self.0.insert(layer, (done, of));
        }
    }

    fn done(&self) -> (ByteSize, ByteSize) {
        let sum = |pick: fn(&(u64, u64)) -> u64| ByteSize(self.0.values().map(pick).sum());
        (sum(|layer| layer.0), sum(|layer| layer.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_registries_are_understood() {
        for (words, means) in [
            ("toomanyrequests: You have reached your pull rate limit", Advice::Busy),
            ("received unexpected HTTP status: 503 Service Unavailable", Advice::Busy),
            ("error parsing HTTP 429 response body: invalid character", Advice::Busy),
            ("manifest for a/b:c not found: manifest unknown: manifest unknown", Advice::Absent),
            (
                "pull access denied for x, repository does not exist or may require 'docker login'",
                Advice::Absent,
            ),
            ("Head \"https://h/v2/\": unauthorized: authentication required", Advice::GiveUp),
            ("no matching manifest for linux/amd64 in the manifest list entries", Advice::GiveUp),
            ("dial tcp: lookup registry-1.docker.io: no such host", Advice::Unclear),
            ("dial tcp 127.0.0.1:1: connect: connection refused", Advice::Unclear),
            ("unexpected EOF", Advice::Unclear),
        ] {
            assert_eq!(advice(words), means, "{words}");
        }
    }

    #[test]
    fn layers_are_counted_while_they_come_down_only() {
        let step = |id: &str, status: &str, current| CreateImageInfo {
            id: Some(id.into()),
            status: Some(status.into()),
            progress_detail: Some(bollard::models::ProgressDetail {
                current: Some(current),
                total: Some(100),
            }),
            ..CreateImageInfo::default()
        };
        let mut layers = Layers::default();
        layers.see(step("a", "Downloading", 10));
        layers.see(step("b", "Downloading", 20));
        layers.see(step("a", "Downloading", 100));
        layers.see(step("a", "Extracting", 5));
        layers.see(CreateImageInfo::default());
        assert_eq!(layers.done(), (ByteSize(120), ByteSize(200)));
    }
}
