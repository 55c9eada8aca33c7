//! Which images this program pulled, when each was last used, and their removal.
//!
//! The daemon keeps the record: a pulled image has one additional tag, the marker, for each name
//! that it was pulled under, and tagging it again records a use. So all programs on one daemon
//! agree, and an image that came from elsewhere is never removed.

use super::name::ImageName;
use super::supervisor;
use crate::daemon::{CallError, Daemon};
use bollard::models::ImageSummary;
use bollard::query_parameters::{
    ListContainersOptions, ListImagesOptions, RemoveImageOptions, TagImageOptions,
};
use orchestrate_types::ByteSize;
use std::collections::HashMap;

/// Repository of the markers.
const MARKER_REPOSITORY: &str = "orchestrate/pulled";
/// Docker lists this in place of a missing name.
const MISSING_NAME: &str = "<none>";

/// An image that this program pulled.
#[derive(Debug, Clone)]
pub(super) struct CachedImage {
    pub(super) id: String,
    /// All its names and digests, except for markers.
    pub(super) names: Vec<String>,
    markers: Vec<String>,
    /// Images that this program built from it.
    derived: Vec<String>,
    pub(super) bytes: ByteSize,
    /// Whether it has a name that this program did not pull it under.
    has_foreign_name: bool,
}

impl CachedImage {
    /// Its tags, or else a digest or the id, for messages.
    pub(super) fn title(&self) -> String {
        let tags: Vec<&str> =
            self.names.iter().filter(|n| !n.contains('@')).map(String::as_str).collect();
        let first = self.names.first().map_or(self.id.as_str(), String::as_str);
        if tags.is_empty() { first.to_owned() } else { tags.join(", ") }
    }
}

fn marker_for(name: &str) -> String {
    let mut digest = blake3::hash(name.as_bytes()).to_hex().to_string();
    digest.truncate(16);
    format!("{MARKER_REPOSITORY}:{digest}")
}

/// Records that this program pulled the image under this name and that it is used now.
pub(super) async fn mark(daemon: &Daemon, id: &str, name: &ImageName) -> Result<(), CallError> {
    let marker = marker_for(&name.to_string());
    let (repo, tag) = marker.split_once(':').unwrap_or((MARKER_REPOSITORY, ""));
    let options = TagImageOptions { repo: Some(repo.to_owned()), tag: Some(tag.to_owned()) };
    daemon.call(daemon.docker.tag_image(id, Some(options))).await
}

/// Whether an image with these tags was marked with [`mark`] under this name.
pub(super) fn is_marked(tags: &[String], name: &ImageName) -> bool {
    tags.contains(&marker_for(&name.to_string()))
}

/// Lists the images that this program pulled, in any process and run.
pub(super) async fn list(daemon: &Daemon) -> Result<Vec<CachedImage>, CallError> {
    let options = ListImagesOptions { digests: true, ..ListImagesOptions::default() };
    let all = daemon.call(daemon.docker.list_images(Some(options))).await?;
    Ok(all.iter().filter_map(|image| as_cached(image, &all)).collect())
}

fn as_cached(image: &ImageSummary, all: &[ImageSummary]) -> Option<CachedImage> {
    let is_marker = |tag: &&String| {
        tag.starts_with(MARKER_REPOSITORY) && tag[MARKER_REPOSITORY.len()..].starts_with(':')
    };
    let markers: Vec<String> = image.repo_tags.iter().filter(is_marker).cloned().collect();
    if markers.is_empty() {
        return None;
    }
    let named = |name: &&String| !name.starts_with(MISSING_NAME) && !is_marker(name);
    let tags: Vec<String> = image.repo_tags.iter().filter(named).cloned().collect();
    let has_foreign_name = tags.iter().any(|tag| !markers.contains(&marker_for(tag)));
    let own = format!("{}:{}-", supervisor::REPOSITORY, supervisor::short_id(&image.id));
    let derived = all.iter().flat_map(|image| &image.repo_tags);
    Some(CachedImage {
        id: image.id.clone(),
        derived: derived.filter(|tag| tag.starts_with(&own)).cloned().collect(),
        names: tags.into_iter().chain(image.repo_digests.iter().filter(named).cloned()).collect(),
        markers,
        bytes: ByteSize(u64::try_from(image.size).unwrap_or(0)),
        has_foreign_name,
    })
}

/// Time of its last use, as the daemon formats it, which sorts by time; empty if unknown.
pub(super) async fn last_used(daemon: &Daemon, id: &str) -> Result<String, CallError> {
    let found = daemon.call(daemon.docker.inspect_image(id)).await?;
    Ok(found.metadata.and_then(|about| about.last_tag_time).unwrap_or_default())
}

/// Why the image must be kept; `None` if nothing uses it.
pub(super) async fn reason_to_keep(
    daemon: &Daemon,
    image: &CachedImage,
) -> Result<Option<&'static str>, CallError> {
    if image.has_foreign_name {
        return Ok(Some("it has another name that this program did not pull"));
    }
    // The list includes containers of images that were built from it.
    let filters = HashMap::from([("ancestor".to_owned(), vec![image.id.clone()])]);
    let options = ListContainersOptions { all: true, filters: Some(filters), ..Default::default() };
    let users = daemon.call(daemon.docker.list_containers(Some(options))).await?;
    Ok((!users.is_empty()).then_some("a container uses it"))
}

/// Removes the image, its names, and the images built from it. Never by force, so that the daemon
/// can still refuse.
pub(super) async fn remove(daemon: &Daemon, image: &CachedImage) -> Result<(), CallError> {
    // Markers last, so that a removal that fails half-way can be continued.
    for name in image.derived.iter().chain(&image.names).chain(&image.markers) {
        let options = RemoveImageOptions { force: false, ..RemoveImageOptions::default() };
        match daemon.call(daemon.docker.remove_image(name, Some(options), None)).await {
            Ok(_) | Err(CallError::Status(404, _)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(id: &str, tags: &[&str]) -> ImageSummary {
        ImageSummary {
            id: id.into(),
            repo_tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
            size: 7,
            ..ImageSummary::default()
        }
    }

    #[test]
    fn only_marked_images_are_cached_and_foreign_names_are_noticed() {
        let marker = marker_for("h:5/a:1");
        let id = "sha256:0123456789abcdef";
        let derived = summary("sha256:2", &["orchestrate/derived:0123456789ab-ffff"]);
        let cached = |tags: &[&str]| {
            let all = [summary(id, tags), derived.clone()];
            as_cached(&all[0], &all)
        };
        assert!(cached(&["h:5/a:1"]).is_none());
        assert!(cached(&["orchestrate/pulled-by-hand:1"]).is_none());
        let image = cached(&["h:5/a:1", &marker]).unwrap();
        assert_eq!(image.names, ["h:5/a:1"]);
        assert_eq!(image.derived, ["orchestrate/derived:0123456789ab-ffff"]);
        assert!(!image.has_foreign_name);
        assert!(cached(&["h:5/a:1", "mine:latest", &marker]).unwrap().has_foreign_name);
    }
}
