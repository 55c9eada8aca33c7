//! Which images the hosts of some settings have, to estimate what a run still has to pull.

use super::name::ImageName;
use crate::config::SandboxSettings;
use crate::daemon::Daemon;
use crate::error::SandboxError;
use bollard::query_parameters::ListImagesOptions;
use std::collections::{HashMap, HashSet};

/// The requested images that one host has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagesOnHost {
    /// Name of the host.
    pub host: String,
    /// Names of the images, as they were requested.
    pub present: HashSet<String>,
    /// Their total size in bytes. Shared layers count for each image.
    pub bytes: u64,
}

/// Checks which of `images` each Docker host of `config` has, without pulling any.
///
/// The result has one entry per host; an error if the host did not answer.
pub async fn images_on_hosts(
    config: &SandboxSettings,
    images: &[String],
) -> Vec<Result<ImagesOnHost, SandboxError>> {
    let hosts = config.docker_hosts();
    let inventories = hosts.iter().map(async |host| {
        let daemon = Daemon::connect(host, config.call_timeout.0).await?;
        let listed = daemon.call(daemon.docker.list_images(None::<ListImagesOptions>)).await;
        let listed = listed.map_err(|error| error.at(host.title(), "list images"))?;
        let sizes = listed.iter().flat_map(|image| {
            let names = image.repo_tags.iter().chain(&image.repo_digests);
            let bytes = u64::try_from(image.size).unwrap_or(0);
            names.map(move |name| (normalized(name), bytes))
        });
        let sizes: HashMap<String, u64> = sizes.collect();
        let mut inventory =
            ImagesOnHost { host: host.title().to_owned(), present: HashSet::new(), bytes: 0 };
        for image in images {
            if let Some(bytes) = sizes.get(&normalized(image)) {
                inventory.bytes += bytes;
                inventory.present.insert(image.clone());
            }
        }
        Ok(inventory)
    });
    futures::future::join_all(inventories).await
}

/// One spelling for all equivalent names of an image.
fn normalized(name: &str) -> String {
    ImageName::parse(name).to_string()
}

#[cfg(test)]
mod tests {
    use super::normalized;

    #[test]
    fn equivalent_names_are_normalized_to_one_spelling() {
        assert_eq!(normalized("debian"), normalized("docker.io/library/debian:latest"));
        assert_eq!(normalized("a/b:1"), normalized("docker.io/a/b:1"));
        assert_ne!(normalized("a/b:1"), normalized("quay.io/a/b:1"));
        assert_ne!(normalized("a/b:1"), normalized("a/b"));
    }
}
