//! Passwords in URLs: found where a URL is given, and hidden where a text is shown.

use std::borrow::Cow;
use std::ops::Range;

/// What a user name with a password becomes.
const HIDDEN: &str = "(not shown)";

/// Whether `url` contains a user name or a password, e.g. `http://user:password@host`. The user name of
/// an `ssh` URL is none of them: it is the login.
pub fn has_credentials(url: &str) -> bool {
    credentials(url).is_some()
}

/// `text` with the user name and the password of every URL hidden: `http://(not shown)@host`.
pub fn without_credentials(text: &str) -> Cow<'_, str> {
    let mut shown = Cow::Borrowed(text);
    let mut from = 0;
    while let Some(found) = shown.get(from..).and_then(credentials) {
        let (start, end) = (from + found.start, from + found.end);
        shown.to_mut().replace_range(start..end, HIDDEN);
        from = start + HIDDEN.len();
    }
    shown
}

/// Where the first user name and password of a URL are.
fn credentials(text: &str) -> Option<Range<usize>> {
    text.match_indices("://").find_map(|(at, separator)| {
        let start = at + separator.len();
        let rest = text.get(start..)?;
        let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>' | ',');
        let url = rest.split(ends).next()?;
        let host = url.find(['/', '?', '#']).unwrap_or(url.len());
        let login = url.rfind('@')?;
        let before = url.get(..login)?;
        // A password may contain a slash, although it should not; a path may contain an `@`.
        let is_password = before.contains(':');
        let is_login = login < host && !text.get(..at)?.ends_with("ssh");
        (before != HIDDEN && (is_password || is_login)).then_some(start..start + login)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_urls_are_hidden_and_the_rest_stays() {
        for (text, shown) in [
            ("http://u:p@h:1/x", "http://(not shown)@h:1/x"),
            (
                "see https://token@h, or tcp://u:p@h.",
                "see https://(not shown)@h, or tcp://(not shown)@h.",
            ),
            ("ssh://u:p@h", "ssh://(not shown)@h"),
            ("\"http://u:a/b@c@h\"", "\"http://(not shown)@h\""),
        ] {
            assert_eq!(without_credentials(text), shown);
            assert!(has_credentials(text) && !shown.contains("u:p"));
        }
        for text in
            ["ssh://user@host:22/s", "http://h:1/x", "hf://datasets/a/b@rev", "a@b", "://", ""]
        {
            assert_eq!(without_credentials(text), text);
            assert!(!has_credentials(text), "{text}");
        }
    }
}
