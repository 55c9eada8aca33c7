//! Which images the hosts of some settings have already: what a run would still have to pull.

use super::name::Name;
use crate::api::SandboxError;
use crate::config::SandboxSettings;
use crate::daemon::Daemon;
use bollard::query_parameters::ListImagesOptions;
use std::collections::{HashMap, HashSet};

/// Of the images that were asked about, those that one host has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagesOnHost {
    /// What the host is called.
    pub host: String,
    /// Their names, as they were given.
    pub present: HashSet<String>,
    /// Their sizes in bytes, together; layers that several share count for each.
    pub bytes: u64,
}

/// Looks on every Docker host of `config` which of `images` it has; an error for one that does not
/// say. Nothing is pulled.
pub async fn images_on_hosts(
    config: &SandboxSettings,
    images: &[String],
) -> Vec<Result<ImagesOnHost, SandboxError>> {
    let hosts = config.docker_hosts();
    let looks = hosts.iter().map(async |host| {
        let daemon = Daemon::connect(host, config.call_timeout.0).await?;
        let listed = daemon.call(daemon.docker.list_images(None::<ListImagesOptions>)).await;
        let listed = listed.map_err(|error| error.at(host.title(), "list images"))?;
        let sizes = listed.iter().flat_map(|image| {
            let names = image.repo_tags.iter().chain(&image.repo_digests);
            let bytes = u64::try_from(image.size).unwrap_or(0);
            names.map(move |name| (spelt(name), bytes))
        });
        let sizes: HashMap<String, u64> = sizes.collect();
        let mut found =
            ImagesOnHost { host: host.title().to_owned(), present: HashSet::new(), bytes: 0 };
        for image in images {
            if let Some(bytes) = sizes.get(&spelt(image)) {
                found.bytes += bytes;
                found.present.insert(image.clone());
            }
        }
        Ok(found)
    });
    futures::future::join_all(looks).await
}

/// One spelling for all names of an image.
fn spelt(name: &str) -> String {
    Name::parse(name).to_string()
}

#[cfg(test)]
mod tests {
    use super::spelt;

    #[test]
    fn spellings_of_one_image_are_one() {
        assert_eq!(spelt("debian"), spelt("docker.io/library/debian:latest"));
        assert_eq!(spelt("a/b:1"), spelt("docker.io/a/b:1"));
        assert_ne!(spelt("a/b:1"), spelt("quay.io/a/b:1"));
        assert_ne!(spelt("a/b:1"), spelt("a/b"));
    }
}
