//! Image events: progress of pulls, which take minutes and may have to wait for a registry.

use orchestrate_types::ByteSize;
use std::sync::Arc;
use std::time::Duration;

/// A change of an image on a host. Displays as one line of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageEvent {
    /// A pull started.
    PullStarted {
        /// Name of the image at its registry.
        image: String,
        /// Name of the Docker host.
        host: String,
    },
    /// Progress of a pull, from time to time.
    PullProgress {
        /// Name of the image at its registry.
        image: String,
        /// Bytes downloaded so far.
        done: ByteSize,
        /// Bytes of all layers whose download has started.
        total: ByteSize,
    },
    /// A pull failed and will be retried.
    PullRetried {
        /// Name of the image at its registry.
        image: String,
        /// Why it failed.
        reason: String,
        /// Pause before the next try.
        pause: Duration,
    },
    /// A pull succeeded.
    Pulled {
        /// Name of the image at its registry.
        image: String,
        /// Bytes downloaded.
        bytes: ByteSize,
        /// Time since the pull started, pauses included.
        elapsed: Duration,
    },
    /// An image was removed to stay within `sandbox.image_cache`.
    Evicted {
        /// Names of the image.
        image: String,
        /// Size of the image.
        bytes: ByteSize,
    },
}

impl std::fmt::Display for ImageEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PullStarted { image, host } => write!(f, "pulling {image} on {host}"),
            Self::PullProgress { image, done, total } => {
                write!(f, "pulling {image}: {} of {} MiB", done.0 >> 20, total.0 >> 20)
            }
            Self::PullRetried { image, reason, pause } => {
                write!(f, "pulling {image}: retrying in {pause:.0?}: {reason}")
            }
            Self::Pulled { image, bytes, elapsed } => {
                write!(f, "pulled {image}: {} MiB in {elapsed:.0?}", bytes.0 >> 20)
            }
            Self::Evicted { image, bytes } => {
                write!(f, "evicted image {image}: {} MiB (sandbox.image_cache)", bytes.0 >> 20)
            }
        }
    }
}

/// Receives image events. The default writes them to the log.
#[derive(Clone)]
pub struct ImageListener(Arc<dyn Fn(&ImageEvent) + Send + Sync>);

impl ImageListener {
    /// A listener that calls `callback` for every event, from any task.
    pub fn new(callback: impl Fn(&ImageEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }

    pub(super) fn notify(&self, event: &ImageEvent) {
        (self.0)(event);
    }
}

impl Default for ImageListener {
    fn default() -> Self {
        Self::new(|event| tracing::info!(%event, "image"))
    }
}

impl std::fmt::Debug for ImageListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ImageListener")
    }
}
