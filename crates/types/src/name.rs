//! Names and paths that come from files other people wrote: task rows and predictions.
//!
//! The invariant: a value of these types is safe to join to a path and to send to a Docker daemon,
//! whatever the file contained. Each type is checked where the file is read, so
//! that no later code has to.

mod image;

use crate::PolicyVersion;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::{Borrow, Cow};
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

/// Maximum length of an id or of a model's name, in bytes. A file system allows 255 for a name, and
/// reports add a suffix.
const NAME_BYTES: usize = 200;
/// Maximum lengths of a path and of one of its parts, in bytes (those of Linux).
const PATH_BYTES: usize = 4095;
const PART_BYTES: usize = 255;
/// Number of characters of a refused text that a message repeats.
const SHOWN_CHARS: usize = 60;

/// A text from a file that is not valid as what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{shown}` is not a valid {kind}: {reason}")]
pub struct NameError {
    kind: &'static str,
    /// The start of the text, with everything but printable characters escaped.
    shown: String,
    reason: Cow<'static, str>,
}

impl NameError {
    fn new(kind: &'static str, text: &str, reason: impl Into<Cow<'static, str>>) -> Self {
        let shown = text.chars().take(SHOWN_CHARS).flat_map(char::escape_debug);
        let mut shown: String = shown.collect();
        if text.chars().nth(SHOWN_CHARS).is_some() {
            shown.push('…');
        }
        Self { kind, shown, reason: reason.into() }
    }
}

/// Declares a text that is checked when it is made.
macro_rules! checked_text {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $check:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// Checks `text`.
            ///
            /// # Errors
            #[doc = concat!("If it is not a valid ", $kind, ".")]
            pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
                let text = text.into();
                match $check(&text) {
                    Ok(()) => Ok(Self(text)),
                    Err(reason) => Err(NameError::new($kind, &text, reason)),
                }
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }

        impl PartialEq<String> for $name {
            fn eq(&self, other: &String) -> bool {
                self.0 == *other
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                Self::new(String::deserialize(from)?).map_err(serde::de::Error::custom)
            }
        }
    };
}

checked_text! {
    /// Id of a task, e.g. `django__django-11099` or `aiohttp__006fbe03`. It is one part of a path:
    /// 1 to 200 ASCII letters, digits and `_ - . + @ : = ,`, that neither starts with `.` or `-` nor
    /// contains `..`.
    TaskId, "task id", check_id
}

checked_text! {
    /// Name of a grading run, below which its logs are kept. The rules are those of [`TaskId`].
    GradingRun, "name of a grading run", check_id
}

checked_text! {
    /// Name of a model, e.g. `org/model@3`: 1 to 200 bytes without control or invisible characters.
    /// It may contain `/`, because hubs and folders do; [`ModelName::file_name`] is its form in a
    /// path.
    ModelName, "model name", check_model
}

checked_text! {
    /// Name of a container image by the grammar of image references:
    /// `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`, at most 512 bytes.
    ImageName, "image name", image::check
}

checked_text! {
    /// Path of a file inside a tree: relative, its parts separated by `/`, none of them empty, `.` or
    /// `..`, without control characters, at most 4,095 bytes and 255 per part.
    RelativePath, "path inside the repository", check_path
}

impl TaskId {
    /// An id made of `text` for a generated task: what an id cannot contain becomes `_`.
    #[must_use]
    pub fn made_of(text: &str) -> Self {
        Self(as_id(text))
    }
}

impl GradingRun {
    /// A name made of `text`, as [`TaskId::made_of`].
    #[must_use]
    pub fn made_of(text: &str) -> Self {
        Self(as_id(text))
    }
}

impl ModelName {
    /// The name as a file or folder, different for different names: `/` becomes `__`, as SWE-bench's
    /// harness does. In names where that would be ambiguous, an underscore next to `/` or to another
    /// underscore becomes `%5F`, and every `%` becomes `%25`.
    pub fn file_name(&self) -> String {
        model_file_name(&self.0)
    }

    /// A name made of `text`, which is that of a setting or of a folder of the user's own: what a name
    /// cannot contain becomes `_`.
    #[must_use]
    pub fn made_of(text: &str) -> Self {
        Self::new(text).unwrap_or_else(|_| Self(as_id(text)))
    }

    /// The name of this model's weights of one version, `MODEL@VERSION`.
    #[must_use]
    pub fn at_version(&self, version: PolicyVersion) -> Self {
        Self(format!("{}@{version}", self.0))
    }

    /// The name that SWE-bench's harness gives a prediction without one.
    #[must_use]
    pub fn none() -> Self {
        Self("None".to_owned())
    }
}

/// See [`ModelName::file_name`]. A pair of underscores stands for `/`, because every other underscore
/// is single, and so the name can be told from its file name.
fn model_file_name(name: &str) -> String {
    let mut file_name = String::with_capacity(name.len());
    let (mut previous, mut rest) = (None, name.chars().peekable());
    while let Some(c) = rest.next() {
        let is_separator = |c: Option<char>| matches!(c, Some('/' | '_'));
        match c {
            '/' => file_name.push_str("__"),
            '_' if is_separator(previous) || is_separator(rest.peek().copied()) => {
                file_name.push_str("%5F");
            }
            '%' => file_name.push_str("%25"),
            c => file_name.push(c),
        }
        previous = Some(c);
    }
    file_name
}

/// An id made of any text.
fn as_id(text: &str) -> String {
    let mut id: String = text.chars().map(|c| if is_id_char(c) { c } else { '_' }).collect();
    while id.contains("..") {
        id = id.replace("..", "._");
    }
    if id.is_empty() || id.starts_with(['.', '-']) {
        id.insert(0, '_');
    }
    // All characters are ASCII by now.
    id.truncate(NAME_BYTES);
    id
}

fn is_id_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '@' | ':' | '=' | ',')
}

fn check_length(text: &str, limit: usize) -> Result<(), String> {
    match text.len() {
        0 => Err("it is empty".to_owned()),
        bytes if bytes > limit => Err(format!("it has {bytes} bytes, more than {limit}")),
        _ => Ok(()),
    }
}

fn check_id(text: &str) -> Result<(), String> {
    check_length(text, NAME_BYTES)?;
    if let Some(c) = text.chars().find(|&c| !is_id_char(c)) {
        return Err(format!("it contains {c:?}"));
    }
    if text.starts_with(['.', '-']) {
        return Err("it starts with a dot or a dash".to_owned());
    }
    if text.contains("..") { Err("it contains \"..\"".to_owned()) } else { Ok(()) }
}

fn check_model(text: &str) -> Result<(), String> {
    // Its form in a path may be longer than the name.
    check_length(&model_file_name(text), NAME_BYTES)?;
    if let Some(c) = text.chars().find(|&c| is_unprintable(c)) {
        return Err(format!("it contains {c:?}"));
    }
    if text.trim().is_empty() {
        return Err("it is blank".to_owned());
    }
    if text.starts_with(['.', '-']) {
        return Err("it starts with a dot or a dash".to_owned());
    }
    if text.split('/').any(|part| part == "..") {
        return Err("it contains \"..\"".to_owned());
    }
    Ok(())
}

fn check_path(text: &str) -> Result<(), String> {
    check_length(text, PATH_BYTES)?;
    if let Some(c) = text.chars().find(|c| c.is_control()) {
        return Err(format!("it contains {c:?}"));
    }
    for part in text.split('/') {
        match part {
            "" => return Err("it is absolute or has an empty part".to_owned()),
            "." | ".." => return Err(format!("it contains the part \"{part}\"")),
            part if part.len() > PART_BYTES => {
                return Err(format!("a part has {} bytes, more than {PART_BYTES}", part.len()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a character is invisible or changes how the text around it is shown: a control character,
/// a line or paragraph separator, one that changes the direction of text, or one without width.
/// Shown text has these escaped, and names do not contain them.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{115f}' | '\u{1160}'
                | '\u{17b4}' | '\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_public_data_sets_are_valid() {
        for id in [
            "django__django-12345",
            "aiohttp__006fbe03fede4eaa1eeba7b8393cbf4d63cb44b6",
            "micro__000123",
            "python-slugify__0123abcd",
            "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
            "scikit-learn__scikit-learn-10297",
        ] {
            assert_eq!(TaskId::new(id).unwrap().as_str(), id);
            assert_eq!(TaskId::made_of(id), id);
        }
    }

    #[test]
    fn ids_that_leave_their_folder_or_hide_something_are_refused() {
        let long = "a".repeat(201);
        for id in [
            "",
            ".",
            "..",
            "../x",
            "/etc/x",
            "a/b",
            "a\\b",
            ".hidden",
            "-rf",
            "a..b",
            "a b",
            "a\nb",
            "a\0b",
            "a\u{1b}[2J",
            "a\u{202e}b",
            "a\u{200b}b",
            "é",
            &long,
        ] {
            let error = TaskId::new(id).unwrap_err().to_string();
            assert!(error.contains("is not a valid task id"), "{error}");
            assert!(error.len() < 400 && !error.contains(is_unprintable), "{error:?}");
            let made = TaskId::made_of(id);
            assert_eq!(TaskId::new(made.as_str()), Ok(made), "{id:?}");
        }
    }

    #[test]
    fn model_names_have_a_safe_form_in_a_path() {
        for (name, file) in [
            ("org/model@3", "org__model@3"),
            ("/models/Qwen", "__models__Qwen"),
            ("GPT 4 (May)", "GPT 4 (May)"),
            ("a/...", "a__..."),
            ("a_b", "a_b"),
            ("a__b", "a%5F%5Fb"),
            ("a_/b", "a%5F__b"),
            ("a/_b", "a__%5Fb"),
            ("a%5Fb", "a%255Fb"),
        ] {
            assert_eq!(ModelName::new(name).unwrap().file_name(), file);
        }
        let long = "/".repeat(101);
        for name in
            ["", " ", ".", "..", "../x", "a/../b", "-x", "a\nb", "a\u{7}", "a\u{200d}", &long]
        {
            assert!(ModelName::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn different_model_names_have_different_file_names() {
        let mut names = vec![String::new()];
        for length in 0..6 {
            let longer = names.iter().filter(|name| name.len() == length);
            let add =
                |name: &String| ["a", "_", "/", "%", "5F"].map(|next| format!("{name}{next}"));
            names.extend(longer.flat_map(add).collect::<Vec<_>>());
        }
        let names: std::collections::BTreeSet<String> = names.into_iter().collect();
        let files: std::collections::BTreeSet<String> =
            names.iter().map(|name| model_file_name(name)).collect();
        assert_eq!(files.len(), names.len());
    }

    #[test]
    fn image_names_follow_the_grammar_of_references() {
        for image in [
            "i",
            "ubuntu:24.04",
            "orchestrate/micro:latest",
            "namanjain12/aiohttp_final:006fbe03fede4eaa1eeba7b8393cbf4d63cb44b6",
            "swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
            "ghcr.io:443/Org/x".to_lowercase().as_str(),
            "localhost:5000/a__b/c--d:T-1.x",
            &format!("a@sha256:{}", "0a".repeat(32)),
            &format!("sha256:{}", "0a".repeat(32)),
            &format!("r.example/a:1@sha256:{}", "0a".repeat(32)),
        ] {
            assert_eq!(ImageName::new(image).unwrap().as_str(), image);
        }
        let (long, digest) = ("a".repeat(513), format!("a@sha256:{}", "0g".repeat(32)));
        for image in [
            "",
            "A",
            "a b",
            "a:",
            ":x",
            "a:-x",
            "a//b",
            "/a",
            "a/",
            "../x",
            "a/../b",
            "a__",
            "a___b",
            "a..b",
            "a?x=1",
            "a#b",
            "a%2e",
            "http://a/b",
            "a@",
            "a@sha256:00",
            "x.y:99999/a",
            "a\n",
            "é",
            &digest,
            &long,
        ] {
            assert!(ImageName::new(image).is_err(), "{image:?}");
        }
    }

    #[test]
    fn paths_stay_inside_their_tree() {
        for path in ["a", ".gitignore", "a/b.py", "a b/é", "..a", "-x"] {
            assert_eq!(RelativePath::new(path).unwrap().as_str(), path);
        }
        let (long, part) = ("a/".repeat(2100) + "a", "a".repeat(256));
        for path in ["", "/a", "a//b", "a/", ".", "..", "../a", "a/../b", "a/.", "a\0b", "a\nb"] {
            assert!(RelativePath::new(path).is_err(), "{path:?}");
        }
        assert!(RelativePath::new(long).is_err() && RelativePath::new(part).is_err());
    }
}
