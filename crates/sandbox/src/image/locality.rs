//! Whether an image is on a host: what several hosts are chosen by.

use super::name::Name;
use super::{Images, inspect};

impl Images {
    /// Whether the image is there or on its way, as far as is known without asking.
    pub(crate) fn is_here(&self, image: &str) -> bool {
        if self.upcoming.borrow().iter().any(|name| name == image) {
            return true;
        }
        let entry = self.entry(&Name::parse(image));
        let seen = entry.seen.try_lock().is_ok_and(|seen| *seen == Some(true));
        // Who holds the lock brings it.
        seen || entry.state.try_lock().map_or(true, |state| state.resolved.is_some())
    }

    /// Asks the daemon once whether it has the image; [`Images::is_here`] then knows.
    pub(crate) async fn look(&self, image: &str) {
        let entry = self.entry(&Name::parse(image));
        let mut seen = entry.seen.lock().await;
        if seen.is_none() {
            match inspect(&self.daemon, image).await {
                Ok(found) => *seen = Some(found.is_some()),
                Err(error) => tracing::debug!(%error, "cannot look for an image"),
            }
        }
    }
}
