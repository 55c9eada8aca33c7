//! What a person should hear of images: pulls take minutes, and registries make one wait.

use orchestrate_types::ByteSize;
use std::sync::Arc;
use std::time::Duration;

/// Something that happened to an image. As text it is one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageNews {
    /// It is being pulled.
    PullBegun {
        /// Its name at its registry.
        image: String,
        /// The Docker host.
        host: String,
    },
    /// So much of what is known of it by now is here.
    Pulling {
        /// Its name at its registry.
        image: String,
        /// Bytes that are here.
        done: ByteSize,
        /// Bytes of all layers that were begun.
        of: ByteSize,
    },
    /// The pull did not work, and is tried again.
    PullDelayed {
        /// Its name at its registry.
        image: String,
        /// The daemon's words.
        reason: String,
        /// Until the next try.
        pause: Duration,
    },
    /// It is here.
    Pulled {
        /// Its name at its registry.
        image: String,
        /// Bytes that came over the network.
        bytes: ByteSize,
        /// How long it took, pauses included.
        took: Duration,
    },
    /// It was removed, to keep within `sandbox.image_cache`.
    Removed {
        /// Its names.
        image: String,
        /// Its size.
        bytes: ByteSize,
    },
}

impl std::fmt::Display for ImageNews {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PullBegun { image, host } => write!(f, "pulling {image} to {host}"),
            Self::Pulling { image, done, of } => {
                write!(f, "pulling {image}: {} of {} MiB", done.0 >> 20, of.0 >> 20)
            }
            Self::PullDelayed { image, reason, pause } => {
                write!(f, "pulling {image}: trying again in {pause:.0?}: {reason}")
            }
            Self::Pulled { image, bytes, took } => {
                write!(f, "pulled {image}: {} MiB in {took:.0?}", bytes.0 >> 20)
            }
            Self::Removed { image, bytes } => {
                write!(f, "removed image {image}: {} MiB (sandbox.image_cache)", bytes.0 >> 20)
            }
        }
    }
}

/// Who hears of it.
#[derive(Clone)]
pub struct Listener(Arc<dyn Fn(&ImageNews) + Send + Sync>);

impl Listener {
    /// Calls `hear` for everything that happens, from any task.
    pub fn new(hear: impl Fn(&ImageNews) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hear))
    }

    pub(super) fn tell(&self, news: &ImageNews) {
        (self.0)(news);
    }
}

impl Default for Listener {
    /// Writes it to the log.
    fn default() -> Self {
        Self::new(|news| tracing::info!(%news, "image"))
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}
