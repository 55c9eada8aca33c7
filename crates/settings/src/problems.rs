//! Problems of one section, collected while it is checked.

use crate::SectionKeys;
use orchestrate_types::{ConfigProblem, Found};
use std::fmt::Display;

/// Characters of a value that nothing reads, which may be a whole prompt, in a message.
const SHOWN_CHARS: usize = 80;

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

    /// Refuses those of `keys` that `section` sets although nothing reads them, for the reason `why`. A value
    /// that is the default is accepted: the plan of a run has every key written out.
    pub fn refuse_unread<S: SectionKeys>(&mut self, section: &S, keys: &[&str], why: &str) {
        let written = json(section);
        for key in keys.iter().filter(|key| section.given().contains(key)) {
            let mut without = section.clone();
            without.clear(key);
            let defaults = json(&S::from_values(&without.fill()));
            let default = defaults.get(key).filter(|value| !value.is_null());
            let Some(value) = written.get(key).filter(|value| Some(*value) != default) else {
                continue;
            };
            if self.has(key) {
                continue;
            }
            let or_default = match default {
                Some(default) => format!(", or set its default, {}", in_full(default)),
                None => String::new(),
            };
            let mut problem = ConfigProblem::new(
                format!("{}.{key}", self.section),
                "",
                format!("{why}; remove it{or_default}"),
            );
            problem.found = Found::Unread(shown(value));
            self.found.push(problem);
        }
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

fn json<S: SectionKeys>(section: &S) -> serde_json::Value {
    // Cannot fail: text, numbers, lists and tables with names only.
    serde_json::to_value(section).unwrap_or_default()
}

/// A default, which is never a secret, as it may be written.
fn in_full(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Array(list) => {
            format!("[{}]", list.iter().map(in_full).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Lists and tables, e.g. an environment with keys of other programs, without what is in them.
fn shown(value: &serde_json::Value) -> String {
    let text = match value {
        serde_json::Value::String(text) => format!("{text:?}"),
        serde_json::Value::Array(list) if !list.is_empty() => "[…]".to_owned(),
        serde_json::Value::Object(table) if !table.is_empty() => "{…}".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings;

    settings! {
        /// A kettle.
        [kettle] KettleSection -> KettleSettings, check: check_kettle;

        /// Whether the kettle whistles.
        whistles: bool = true;
        /// Cups to boil at once.
        cups: u32 = 2;
        /// Volume of the whistle.
        volume: u32 = cups * 10 => "10 for each cup";
        /// Melody of the whistle.
        melody: Option<String> = None => "one note";
        /// Who listens.
        listeners: Vec<String> = Vec::new();
        /// Lowest and highest tone.
        tones: (f64, f64) = (0.5, 2.0);
    }

    fn check_kettle(written: &KettleSection, settings: &KettleSettings, problems: &mut Problems) {
        if !settings.whistles {
            let why = "only applies with kettle.whistles = true";
            problems.refuse_unread(written, &["volume", "melody", "listeners", "tones"], why);
        }
    }

    #[test]
    fn keys_that_nothing_reads_are_refused_by_name_unless_they_have_their_default() {
        let section = KettleSection {
            whistles: Some(false),
            cups: Some(3),
            volume: Some(20),
            melody: Some("la ".repeat(100)),
            listeners: Some(vec!["token=abc".to_owned()]),
            tones: Some((1.0, 3.0)),
        };
        let texts = |section: &KettleSection| -> Vec<String> {
            section.check().unwrap_err().iter().map(ToString::to_string).collect()
        };
        let start = "la ".repeat(26);
        assert_eq!(
            texts(&section),
            [
                "kettle.volume = 20: only applies with kettle.whistles = true; remove it, or set its \
                 default, 30"
                    .to_owned(),
                format!(
                    "kettle.melody = \"{start}l…: only applies with kettle.whistles = true; remove it"
                ),
                "kettle.listeners = […]: only applies with kettle.whistles = true; remove it, or set its \
                 default, []"
                    .to_owned(),
                "kettle.tones = […]: only applies with kettle.whistles = true; remove it, or set its \
                 default, [0.5, 2.0]"
                    .to_owned(),
            ]
        );
        // The default follows from the other keys, and a plan has it written out.
        let default = KettleSection {
            volume: Some(30),
            melody: None,
            listeners: None,
            tones: None,
            ..section.clone()
        };
        let settings = default.check().unwrap();
        assert_eq!(KettleSection::from_values(&settings).check(), Ok(settings));
        KettleSection { whistles: None, ..section }.check().unwrap();
    }
}
