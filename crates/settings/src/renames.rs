//! Names of older configurations that are still read.

/// Keys and choices that had another name before. What is written with an old name counts as written with the
/// new one, and a notice names both.
#[derive(Debug, Clone, Copy, Default)]
pub struct Renames {
    /// The old key and the new one, which is in the same section.
    pub keys: &'static [(&'static str, &'static str)],
    /// A key, an old choice of its value, and the new one.
    pub choices: &'static [(&'static str, &'static str, &'static str)],
}

impl Renames {
    /// The new name of the key `path`, without its section; `None` if it is not an old one.
    pub(crate) fn key(self, path: &str) -> Option<&'static str> {
        self.full_key(path)?.rsplit('.').next()
    }

    /// The new name of the key `path`, with its section; `None` if it is not an old one.
    pub(crate) fn full_key(self, path: &str) -> Option<&'static str> {
        let (_, new) = self.keys.iter().find(|(old, _)| *old == path)?;
        Some(new)
    }

    /// The new name of a choice of the key `path`; `None` if it is not an old one.
    pub(crate) fn choice(self, path: &str, value: &str) -> Option<&'static str> {
        let mut choices = self.choices.iter();
        let (.., new) = choices.find(|(key, old, _)| *key == path && *old == value)?;
        Some(new)
    }
}
