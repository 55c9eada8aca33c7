//! The grammar of image names.

/// Maximum length of an image name, in bytes: a name of 255, a tag of 128, and a digest.
const IMAGE_BYTES: usize = 512;

/// The grammar of <https://github.com/distribution/reference>.
pub(super) fn check(text: &str) -> Result<(), String> {
    super::check_length(text, IMAGE_BYTES)?;
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    if digest.is_some_and(|digest| !is_digest(digest)) {
        return Err("after `@` it must have a digest like sha256:<hexadecimal digits>".to_owned());
    }
    // A colon before the last slash belongs to the port of the registry.
    let tag_at = rest.rfind(':').filter(|at| !rest.get(*at..).is_some_and(|t| t.contains('/')));
    let (name, tag) = match tag_at.and_then(|at| rest.split_at_checked(at)) {
        Some((name, tag)) => (name, tag.strip_prefix(':')),
        None => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err("its tag must have 1 to 128 letters, digits and `_ - .`".to_owned());
    }
    let mut parts: Vec<&str> = name.split('/').collect();
    let is_host = |part: &str| part.contains(['.', ':']) || part == "localhost";
    if let [host, _, ..] = parts.as_slice()
        && is_host(host)
    {
        if !is_registry(host) {
            return Err("its registry must be HOST or HOST:PORT".to_owned());
        }
        parts.remove(0);
    }
    if parts.iter().all(|part| is_image_part(part)) {
        return Ok(());
    }
    Err("its name must have lower-case letters and digits, separated by single `.`, `_` or `-`"
        .to_owned())
}

fn is_digest(text: &str) -> bool {
    text.split_once(':').is_some_and(|(algorithm, hex)| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '.' | '_' | '-');
        algorithm.starts_with(|c: char| c.is_ascii_alphabetic())
            && algorithm.chars().all(is_word)
            && hex.len() >= 32
            && hex.chars().all(|c| c.is_ascii_hexdigit())
    })
}

fn is_tag(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (1..=128).contains(&text.len())
        && text.starts_with(is_word)
        && text.chars().all(|c| is_word(c) || matches!(c, '.' | '-'))
}

fn is_registry(text: &str) -> bool {
    let (host, port) = text.split_once(':').unwrap_or((text, "443"));
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    host.split('.').all(is_label) && port.parse::<u16>().is_ok()
}

/// Whether `part` is words of lower-case letters and digits, with `.`, `_`, `__` or dashes between
/// two of them.
fn is_image_part(part: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let separators = part.split(is_word).filter(|between| !between.is_empty());
    let is_separator =
        |text: &str| matches!(text, "." | "_" | "__") || text.chars().all(|c| c == '-');
    part.starts_with(is_word) && part.ends_with(is_word) && separators.into_iter().all(is_separator)
}
