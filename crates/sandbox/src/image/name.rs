//! Image names: how the daemon spells them, and where they are pulled from.

/// The registry of names without a registry.
const DEFAULT_REGISTRY: &str = "docker.io";
/// That registry's folder for images with a single-component name.
const OFFICIAL: &str = "library/";

/// A parsed name: `[registry/]repository[:tag][@digest]`. Equivalent spellings are equal, and
/// display as the daemon displays them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageName {
    registry: Option<String>,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl ImageName {
    /// Parses a name as Docker does: the part before the first `/` is a registry if it could be a
    /// host.
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

    /// The name of the same image at a mirror, if the name has no registry. As in Docker's own
    /// registry, official images are under `library/`.
    pub(super) fn at_mirror(&self, mirror: Option<&str>) -> Self {
        match (mirror, &self.registry) {
            (Some(mirror), None) => {
                let folder = if self.repository.contains('/') { "" } else { OFFICIAL };
                let repository = format!("{folder}{}", self.repository);
                Self { registry: Some(mirror.to_owned()), repository, ..self.clone() }
            }
            (Some(_) | None, _) => self.clone(),
        }
    }

    /// The name of exactly this manifest, independently of the tag.
    pub(super) fn with_digest(&self, digest: &str) -> Self {
        Self { tag: None, digest: Some(digest.to_owned()), ..self.clone() }
    }

    /// Registry and repository, without tag and digest.
    pub(super) fn repository(&self) -> String {
        match &self.registry {
            Some(registry) => format!("{registry}/{}", self.repository),
            None => self.repository.clone(),
        }
    }

    /// Digest or tag; `latest` for a name without either.
    pub(super) fn version(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }

    /// The tag, by default `latest`; `None` for a name with a digest.
    pub(super) fn tag(&self) -> Option<&str> {
        self.digest.is_none().then(|| self.version())
    }
}

impl std::fmt::Display for ImageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let separator = if self.digest.is_some() { '@' } else { ':' };
        write!(f, "{}{separator}{}", self.repository(), self.version())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_as_docker_does() {
        let whole = |text| ImageName::parse(text).to_string();
        assert_eq!(whole("python"), "python:latest");
        assert_eq!(whole("a/b:1"), "a/b:1");
        assert_eq!(whole("host:5000/a/b"), "host:5000/a/b:latest");
        assert_eq!(whole("localhost/a:x"), "localhost/a:x");
        assert_eq!(whole("a/b:1@sha256:00"), "a/b@sha256:00");
        assert_eq!(whole("docker.io/library/python:3"), "python:3");
        assert_eq!(ImageName::parse("host:5000/a").repository(), "host:5000/a");
        assert_eq!(ImageName::parse("a@sha256:00").tag(), None);
    }

    #[test]
    fn mirror_applies_to_names_without_a_registry_only() {
        let mirrored = |text: &str| ImageName::parse(text).at_mirror(Some("m:5000")).to_string();
        assert_eq!(mirrored("python:3"), "m:5000/library/python:3");
        assert_eq!(mirrored("a/b"), "m:5000/a/b:latest");
        assert_eq!(mirrored("docker.io/a/b"), "m:5000/a/b:latest");
        assert_eq!(mirrored("ghcr.io/a/b:1"), "ghcr.io/a/b:1");
        assert_eq!(mirrored("a/b@sha256:00"), "m:5000/a/b@sha256:00");
        assert_eq!(ImageName::parse("a/b").at_mirror(None).to_string(), "a/b:latest");
    }

    #[test]
    fn digest_replaces_the_tag() {
        assert_eq!(
            ImageName::parse("h:1/a:2").with_digest("sha256:00").to_string(),
            "h:1/a@sha256:00"
        );
    }
}
