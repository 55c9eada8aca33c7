//! What a run adds to a provider: its image lock, and a listener for image events.

use super::event::ImageListener;
use super::lock::ImageLock;
use std::sync::Arc;

/// A run's image lock and image listener.
#[derive(Debug, Clone, Default)]
pub struct ImageHooks {
    /// Where the images of the run are recorded; `None` keeps them in memory only.
    pub lock: Option<Arc<dyn ImageLock>>,
    /// Receives the progress of pulls.
    pub listener: ImageListener,
}
