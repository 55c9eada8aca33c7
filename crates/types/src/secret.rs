//! Passwords and tokens in URLs: found where a URL is given, and hidden where a text is shown.

use std::borrow::Cow;

/// What a secret becomes.
pub const NOT_SHOWN: &str = "(not shown)";

/// Whether `url` contains a user name or a password, e.g. `http://user:password@host`. The user name of
/// an `ssh` URL is none of them: it is the login.
pub fn has_credentials(url: &str) -> bool {
    addresses(url).any(|(at, after)| login(url, at, after).is_some())
}

/// `text` with the user name, the password and the query of every URL hidden, as in
/// `http://(not shown)@host/path?(not shown)`: some servers expect a key in the query.
pub fn without_credentials(text: &str) -> Cow<'_, str> {
    let (mut shown, mut copied) = (String::new(), 0);
    for (at, after) in addresses(text) {
        if at < copied {
            // In a query that is hidden.
            continue;
        }
        let start = text.len() - after.len();
        let login = login(text, at, after).unwrap_or(0);
        if login > 0 {
            shown.push_str(text.get(copied..start).unwrap_or_default());
            shown.push_str(NOT_SHOWN);
            copied = start + login;
        }
        let rest = after.get(login..).unwrap_or_default();
        let rest = rest.split(ends_url).next().unwrap_or_default();
        let Some((before, query)) = rest.split_once('?') else { continue };
        let query_at = start + login + before.len() + 1;
        let is_hidden = text.get(query_at..).is_some_and(|query| query.starts_with(NOT_SHOWN));
        if !query.is_empty() && !is_hidden {
            shown.push_str(text.get(copied..query_at).unwrap_or_default());
            shown.push_str(NOT_SHOWN);
            copied = query_at + query.len();
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    shown.push_str(text.get(copied..).unwrap_or_default());
    Cow::Owned(shown)
}

/// Where the scheme of each URL ends, and what follows its `://`.
fn addresses(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let separators = text.match_indices("://");
    separators.filter_map(|(at, separator)| Some((at, text.get(at + separator.len()..)?)))
}

/// Whether a URL in a text ends before `c`.
fn ends_url(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>')
}

/// Length of the user name and the password at the start of `after`, which follows a scheme that ends at `at`.
fn login(text: &str, at: usize, after: &str) -> Option<usize> {
    let url = after.split(|c| ends_url(c) || c == ',').next()?;
    let host = url.find(['/', '?', '#']).unwrap_or(url.len());
    let login = url.rfind('@')?;
    // A password may contain a slash, although it should not; a path may contain an `@`.
    let is_password = url.get(..login)?.contains(':');
    let is_login = login < host && !text.get(..at)?.ends_with("ssh");
    (is_password || is_login).then_some(login)
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
            ("http://u:p@h/x?k=u:p", "http://(not shown)@h/x?(not shown)"),
            ("http://u:p?u:p@h/x?k", "http://(not shown)@h/x?(not shown)"),
        ] {
            assert_eq!(without_credentials(text), shown);
            assert_eq!(without_credentials(shown), shown);
            assert!(has_credentials(text) && !shown.contains("u:p"));
        }
        for (text, shown) in [
            ("at http://h/x?k=1,2&l (down)", "at http://h/x?(not shown) (down)"),
            (
                "[\"http://h?a=b\", \"http://i?c://d\"]",
                "[\"http://h?(not shown)\", \"http://i?(not shown)\"]",
            ),
        ] {
            assert_eq!(without_credentials(text), shown);
            assert_eq!(without_credentials(shown), shown);
            assert!(!has_credentials(text));
        }
        for text in [
            "ssh://user@host:22/s",
            "http://h:1/x",
            "is it http://h? yes",
            "hf://datasets/a/b@rev",
            "a@b",
            "://",
            "",
        ] {
            assert_eq!(without_credentials(text), text);
            assert!(!has_credentials(text), "{text}");
        }
    }
}
