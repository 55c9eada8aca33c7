//! Names of images: where one is pulled from, and what it is called by the daemon.

/// The registry of names that name none.
const DEFAULT_REGISTRY: &str = "docker.io";
/// Where that registry keeps images that are named by one word.
const OFFICIAL: &str = "library/";

/// A name taken apart: `[registry/]repository[:tag][@digest]`. Two spellings of one name are equal,
/// and print as the daemon prints them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    registry: Option<String>,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl Name {
    /// Takes a name apart as Docker does: what stands before the first `/` is a registry where it
    /// could be a host.
    pub(super) fn parse(text: &str) -> Self {
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.to_owned())),
            None => (text, None),
        };
        let is_host = |part: &str| part.contains(['.', ':']) || part == "localhost";
        let (registry, rest) = match rest.split_once('/') {
            Some((first, rest)) if is_host(first) => (Some(first.to_owned()), rest),
            Some(_) | None => (None, rest),
        };
        let registry = registry.filter(|registry| registry != DEFAULT_REGISTRY);
        let rest = match &registry {
            Some(_) => rest,
            None => rest.strip_prefix(OFFICIAL).unwrap_or(rest),
        };
        let (repository, tag) = match rest.rsplit_once(':') {
            Some((repository, tag)) => (repository, Some(tag.to_owned())),
            None => (rest, None),
        };
        Self { registry, repository: repository.to_owned(), tag, digest }
    }

    /// The same image behind a mirror; a name with a registry of its own has none. The mirror sees
    /// what Docker's own registry would: official images lie under `library/`.
    pub(super) fn behind(&self, mirror: Option<&str>) -> Self {
        match (mirror, &self.registry) {
            (Some(mirror), None) => {
                let folder = if self.repository.contains('/') { "" } else { OFFICIAL };
                let repository = format!("{folder}{}", self.repository);
                Self { registry: Some(mirror.to_owned()), repository, ..self.clone() }
            }
            (Some(_) | None, _) => self.clone(),
        }
    }

    /// Exactly this manifest, whatever the tag means now.
    pub(super) fn at(&self, digest: &str) -> Self {
        Self { tag: None, digest: Some(digest.to_owned()), ..self.clone() }
    }

    /// Registry and repository, as in `docker pull`'s first part.
    pub(super) fn repository(&self) -> String {
        match &self.registry {
            Some(registry) => format!("{registry}/{}", self.repository),
            None => self.repository.clone(),
        }
    }

    /// Tag or digest: the second part. A name without both means `latest`.
    pub(super) fn version(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }

    /// The tag that the daemon is to know the image by; `None` for a name by digest.
    pub(super) fn tag(&self) -> Option<&str> {
        self.digest.is_none().then(|| self.version())
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mark = if self.digest.is_some() { '@' } else { ':' };
        write!(f, "{}{mark}{}", self.repository(), self.version())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_as_docker_does() {
        let whole = |text| Name::parse(text).to_string();
        assert_eq!(whole("python"), "python:latest");
        assert_eq!(whole("a/b:1"), "a/b:1");
        assert_eq!(whole("host:5000/a/b"), "host:5000/a/b:latest");
        assert_eq!(whole("localhost/a:x"), "localhost/a:x");
        assert_eq!(whole("a/b:1@sha256:00"), "a/b@sha256:00");
        assert_eq!(whole("docker.io/library/python:3"), "python:3");
        assert_eq!(Name::parse("host:5000/a").repository(), "host:5000/a");
        assert_eq!(Name::parse("a@sha256:00").tag(), None);
    }

    #[test]
    fn a_mirror_stands_before_names_without_a_registry_only() {
        let behind = |text: &str| Name::parse(text).behind(Some("m:5000")).to_string();
        assert_eq!(behind("python:3"), "m:5000/library/python:3");
        assert_eq!(behind("a/b"), "m:5000/a/b:latest");
        assert_eq!(behind("docker.io/a/b"), "m:5000/a/b:latest");
        assert_eq!(behind("ghcr.io/a/b:1"), "ghcr.io/a/b:1");
        assert_eq!(behind("a/b@sha256:00"), "m:5000/a/b@sha256:00");
        assert_eq!(Name::parse("a/b").behind(None).to_string(), "a/b:latest");
    }

    #[test]
    fn a_digest_takes_the_place_of_a_tag() {
        assert_eq!(Name::parse("h:1/a:2").at("sha256:00").to_string(), "h:1/a@sha256:00");
    }
}
