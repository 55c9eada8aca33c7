//! Images: found or pulled, identified once per run, given a supervisor if needed, and evicted when
//! they were pulled by this program and are no longer used.
//!
//! The invariant: containers start from an image id, never from a name, and the id of a name is the
//! one in the run's [`ImageLock`]. So a tag that moves changes nothing during a run.
//!
//! | File | Contents |
//! |---|---|
//! | `images.rs` | the images of one daemon: prepare, check, pull ahead, evict |
//! | `lock.rs` | which image each name stands for in a run |
//! | `name.rs` | image names and mirrors |
//! | `pull.rs` | pulling one image, with retries |
//! | `cache.rs` | which images this program pulled, and when they were last used |
//! | `supervisor.rs` | adding the supervisor to containers and images |
//! | `layer.rs` | a folder of this machine as a part of agents' images |
//! | `presence.rs` | whether a host has an image, for choosing among hosts |
//! | `inventory.rs` | which images the hosts of some settings have |
//! | `event.rs` | progress of pulls, for people |
//! | `hooks.rs` | what a run adds: the lock, the listener, the layer of its agent |

mod build;
mod cache;
mod event;
mod hooks;
mod images;
mod inventory;
mod layer;
mod lock;
mod name;
mod presence;
mod pull;
mod supervisor;

pub use build::{BuildError, ImageBuilder, ImageConfig};
pub use event::{ImageEvent, ImageListener};
pub use hooks::ImageHooks;
pub use images::PulledImage;
pub(crate) use images::{Additions, Images};
pub use inventory::{ImagesOnHost, images_on_hosts};
pub use layer::ImageLayer;
pub use lock::{ImageIdentity, ImageLock, InMemoryImageLock};
pub(crate) use supervisor::install as install_supervisor;
