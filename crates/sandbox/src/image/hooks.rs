//! What a run adds to a provider: its image lock, a listener for image events, and its agent's files.

use super::event::ImageListener;
use super::layer::ImageLayer;
use super::lock::ImageLock;
use std::sync::Arc;

/// A run's image lock, image listener and agent layer.
#[derive(Debug, Clone, Default)]
pub struct ImageHooks {
    /// Where the images of the run are recorded; `None` keeps them in memory only.
    pub lock: Option<Arc<dyn ImageLock>>,
    /// Receives the progress of pulls.
    pub listener: ImageListener,
    /// Files that the sandboxes of agents have in addition to their image; graders never have them.
    pub agent_layer: Option<ImageLayer>,
}
