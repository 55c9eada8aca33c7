//! Whether a host has an image, for choosing among several hosts.

use super::images::Images;
use super::name::ImageName;

impl Images {
    /// Whether the host has the image or is about to pull it, as far as is known without a query.
    pub(crate) fn is_present_or_coming(&self, image: &str) -> bool {
        if self.is_upcoming(image) {
            return true;
        }
        let entry = self.entry(&ImageName::parse(image));
        let was_found = entry.found.try_lock().is_ok_and(|found| *found == Some(true));
        // While the lock is held, the image is being pulled.
        was_found || entry.state.try_lock().map_or(true, |state| state.resolved.is_some())
    }

    /// Asks the daemon once whether it has the image, for [`Images::is_present_or_coming`].
    pub(crate) async fn check_presence(&self, image: &str) {
        let entry = self.entry(&ImageName::parse(image));
        let mut found = entry.found.lock().await;
        if found.is_none() {
            match self.daemon.inspect_image(image).await {
                Ok(inspected) => *found = Some(inspected.is_some()),
                Err(error) => tracing::debug!(%error, "cannot check whether an image is present"),
            }
        }
    }
}
