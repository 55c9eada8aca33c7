//! Problems of one section, collected while it is checked.

use orchestrate_types::ConfigProblem;
use std::fmt::Display;

/// Problems found so far in one section. Keys are given relative to the section.
#[derive(Debug)]
pub struct Problems {
    section: String,
    found: Vec<ConfigProblem>,
}

impl Problems {
    /// An empty list of problems with `section`, e.g. `rollout`.
    pub fn new(section: &str) -> Self {
        Self { section: section.to_owned(), found: Vec::new() }
    }

    /// Records that `value` at `key` is refused.
    pub fn refuse(&mut self, key: &str, value: impl Display, remedy: impl Into<String>) {
        self.found.push(ConfigProblem::new(format!("{}.{key}", self.section), value, remedy));
    }

    /// Records that `value` at `key` is refused, unless `holds`.
    pub fn require(
        &mut self,
        holds: bool,
        key: &str,
        value: impl Display,
        remedy: impl Into<String>,
    ) {
        if !holds {
            self.refuse(key, value, remedy);
        }
    }

    /// Records that the required `key` is absent.
    pub fn missing(&mut self, key: &str, remedy: impl Into<String>) {
        self.found.push(ConfigProblem::missing(format!("{}.{key}", self.section), remedy));
    }

    /// Whether a problem with `key` was recorded.
    pub fn has(&self, key: &str) -> bool {
        let full = format!("{}.{key}", self.section);
        self.found.iter().any(|problem| problem.key == full)
    }

    /// Runs `check` with keys relative to `key` of this section, e.g. `hosts[1]`.
    pub fn within(&mut self, key: &str, check: impl FnOnce(&mut Self)) {
        let mut nested = Self::new(&format!("{}.{key}", self.section));
        check(&mut nested);
        self.found.append(&mut nested.found);
    }

    /// Returns `value` if there are no problems.
    ///
    /// # Errors
    /// All problems found.
    pub fn into_result<T>(self, value: T) -> Result<T, Vec<ConfigProblem>> {
        if self.found.is_empty() { Ok(value) } else { Err(self.found) }
    }

    /// All problems found.
    pub fn into_found(self) -> Vec<ConfigProblem> {
        self.found
    }
}
