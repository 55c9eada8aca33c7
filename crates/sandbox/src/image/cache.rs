//! Which images we pulled, when each was last used, and removing them.
//!
//! The daemon keeps the record: an image that we pulled has one more tag for each name that it was
//! pulled under, and the time of its last use is the time at which it was last tagged. So all
//! programs on one daemon agree, and an image that somebody else brought is never taken for ours.

use super::name::Name;
use super::supervisor;
use crate::daemon::{CallError, Daemon};
use bollard::models::ImageSummary;
use bollard::query_parameters::{
    ListContainersOptions, ListImagesOptions, RemoveImageOptions, TagImageOptions,
};
use orchestrate_types::ByteSize;
use std::collections::HashMap;

/// Where our marks are.
const MARKS: &str = "orchestrate/pulled";
/// Docker's list has this in place of a name that is absent.
const NAMELESS: &str = "<none>";

/// An image that we pulled.
#[derive(Debug, Clone)]
pub(super) struct Pulled {
    pub(super) id: String,
    /// All names and digests that it has, without marks.
    pub(super) names: Vec<String>,
    marks: Vec<String>,
    /// Images of ours that were made of it.
    derived: Vec<String>,
    pub(super) bytes: ByteSize,
    /// Whether somebody gave it one more name.
    named_by_others: bool,
}

impl Pulled {
    /// Its names, for people.
    pub(super) fn title(&self) -> String {
        let tags: Vec<&str> =
            self.names.iter().filter(|n| !n.contains('@')).map(String::as_str).collect();
        let first = self.names.first().map_or(self.id.as_str(), String::as_str);
        if tags.is_empty() { first.to_owned() } else { tags.join(", ") }
    }
}

fn mark_of(name: &str) -> String {
    let mut mark = blake3::hash(name.as_bytes()).to_hex().to_string();
    mark.truncate(16);
    format!("{MARKS}:{mark}")
}

/// Says that an image is ours by this name, and in use now.
pub(super) async fn mark(daemon: &Daemon, id: &str, name: &Name) -> Result<(), CallError> {
    let mark = mark_of(&name.to_string());
    let (repo, tag) = mark.split_once(':').unwrap_or((MARKS, ""));
    let options = TagImageOptions { repo: Some(repo.to_owned()), tag: Some(tag.to_owned()) };
    daemon.call(daemon.docker.tag_image(id, Some(options))).await
}

/// Whether [`mark`] was called for this name and image.
pub(super) fn is_marked(tags: &[String], name: &Name) -> bool {
    tags.contains(&mark_of(&name.to_string()))
}

/// All images that we pulled, of whatever program.
pub(super) async fn pulled(daemon: &Daemon) -> Result<Vec<Pulled>, CallError> {
    let options = ListImagesOptions { digests: true, ..ListImagesOptions::default() };
    let all = daemon.call(daemon.docker.list_images(Some(options))).await?;
    Ok(all.iter().filter_map(|image| as_pulled(image, &all)).collect())
}

fn as_pulled(image: &ImageSummary, all: &[ImageSummary]) -> Option<Pulled> {
    let is_mark = |tag: &&String| tag.starts_with(MARKS) && tag[MARKS.len()..].starts_with(':');
    let marks: Vec<String> = image.repo_tags.iter().filter(is_mark).cloned().collect();
    if marks.is_empty() {
        return None;
    }
    let named = |name: &&String| !name.starts_with(NAMELESS) && !is_mark(name);
    let tags: Vec<String> = image.repo_tags.iter().filter(named).cloned().collect();
    let named_by_others = tags.iter().any(|tag| !marks.contains(&mark_of(tag)));
    let own = format!("{}:{}-", supervisor::REPOSITORY, supervisor::short(&image.id));
    let derived = all.iter().flat_map(|image| &image.repo_tags);
    Some(Pulled {
        id: image.id.clone(),
        derived: derived.filter(|tag| tag.starts_with(&own)).cloned().collect(),
        names: tags.into_iter().chain(image.repo_digests.iter().filter(named).cloned()).collect(),
        marks,
        bytes: ByteSize(u64::try_from(image.size).unwrap_or(0)),
        named_by_others,
    })
}

/// When it was last used, in the daemon's form, which sorts as time does; empty where the daemon
/// does not say.
pub(super) async fn last_used(daemon: &Daemon, id: &str) -> Result<String, CallError> {
    let found = daemon.call(daemon.docker.inspect_image(id)).await?;
    Ok(found.metadata.and_then(|about| about.last_tag_time).unwrap_or_default())
}

/// Why it cannot be removed now; `None`: nobody needs it.
pub(super) async fn needed(
    daemon: &Daemon,
    image: &Pulled,
) -> Result<Option<&'static str>, CallError> {
    if image.named_by_others {
        return Ok(Some("somebody gave it another name"));
    }
    // Containers of images that were made of it are listed, too.
    let filters = HashMap::from([("ancestor".to_owned(), vec![image.id.clone()])]);
    let options = ListContainersOptions { all: true, filters: Some(filters), ..Default::default() };
    let users = daemon.call(daemon.docker.list_containers(Some(options))).await?;
    Ok((!users.is_empty()).then_some("a container uses it"))
}

/// Removes it, its names, and what we made of it. Never by force: the daemon has the last word.
pub(super) async fn remove(daemon: &Daemon, image: &Pulled) -> Result<(), CallError> {
    // The marks go last: what fails half-way is still known to be ours.
    for name in image.derived.iter().chain(&image.names).chain(&image.marks) {
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
    fn only_marked_images_are_ours_and_others_names_are_seen() {
        let mark = mark_of("h:5/a:1");
        let id = "sha256:0123456789abcdef";
        let derived = summary("sha256:2", &["orchestrate/derived:0123456789ab-ffff"]);
        let look = |tags: &[&str]| {
            let all = [summary(id, tags), derived.clone()];
            as_pulled(&all[0], &all)
        };
        assert!(look(&["h:5/a:1"]).is_none());
        assert!(look(&["orchestrate/pulled-by-hand:1"]).is_none());
        let ours = look(&["h:5/a:1", &mark]).unwrap();
        assert_eq!(ours.names, ["h:5/a:1"]);
        assert_eq!(ours.derived, ["orchestrate/derived:0123456789ab-ffff"]);
        assert!(!ours.named_by_others);
        assert!(look(&["h:5/a:1", "mine:latest", &mark]).unwrap().named_by_others);
    }
}
