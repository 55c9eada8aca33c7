//! Configuration files and assignments, merged: later layers win, tables merge, lists replace.

use crate::renames::Renames;
use crate::shape::{Reader, also_set};
use orchestrate_types::{ConfigProblem, Found, NOT_SHOWN};
use schemars::JsonSchema;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::ops::Range;
use toml::de::DeTable;
use toml::{Table, Value};

/// Where each value was written.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    places: BTreeMap<String, String>,
    renamed: Vec<String>,
}

impl Origins {
    /// What was read although it is written with an old name, in the order of the layers.
    pub fn renamed(&self) -> &[String] {
        &self.renamed
    }

    /// Where the value of `key` was written, e.g. `run.toml:12:1` or `--set run.steps=3`; `None`
    /// for a default.
    pub fn of(&self, key: &str) -> Option<&str> {
        let list = key.split('[').next().unwrap_or(key);
        let element = key.rfind(']').and_then(|end| key.get(..=end)).unwrap_or(key);
        let known = [key, element, list].into_iter().find_map(|key| self.places.get(key));
        known.map(String::as_str)
    }

    /// Forgets where `key`, and what is in it, was written: its value is not in force.
    pub fn forget(&mut self, key: &str) {
        self.places.retain(|path, _| !is_within(path, key));
    }

    /// Adds to each problem the place where its value was written, if that is known.
    pub fn locate(&self, problems: &mut [ConfigProblem]) {
        for problem in problems {
            let absent = problem.found == Found::Missing && !problem.key.contains('[');
            if problem.origin.is_none() && !absent {
                let origin = self.of(&problem.key).map(str::to_owned);
                // An assignment would show the value again.
                let is_secret = problem.found == Found::Value(NOT_SHOWN.to_owned());
                let shown = |origin: String| match origin.split_once('=') {
                    Some((key, _)) if is_secret && key.starts_with("--set ") => key.to_owned(),
                    Some(_) | None => origin,
                };
                problem.origin = origin.map(shown);
            }
        }
    }
}

/// All origins are equal: settings compare by their values, not by where these were written.
impl PartialEq for Origins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// The layers of a configuration. Problems are collected, so that all files are read.
#[derive(Debug)]
pub struct Layers {
    schema: Json,
    merged: Table,
    origins: Origins,
    problems: Vec<ConfigProblem>,
    alternatives: &'static [&'static [&'static str]],
    renames: Renames,
    /// Those of them that the newest layer has.
    newest: Vec<&'static str>,
    secrets: &'static [&'static str],
}

/// Syntax errors of one layer that are reported; more follow from the first ones.
const SYNTAX_ERRORS: usize = 20;
/// Characters of a line that are quoted.
const EXCERPT: usize = 160;

impl Layers {
    /// A configuration of type `T` without any layer yet.
    pub fn of<T: JsonSchema>() -> Self {
        Self {
            schema: schemars::schema_for!(T).to_value(),
            merged: Table::new(),
            origins: Origins::default(),
            problems: Vec::new(),
            alternatives: &[],
            renames: Renames::default(),
            newest: Vec::new(),
            secrets: &[],
        }
    }

    /// Names groups of keys, e.g. `engine.url` and `engine.urls`, of which a configuration has one: a layer that sets
    /// one replaces the others of earlier layers.
    #[must_use]
    pub fn with_alternatives(self, alternatives: &'static [&'static [&'static str]]) -> Self {
        Self { alternatives, ..self }
    }

    /// Names keys, e.g. `agent.env`, whose values may be secrets: no message and no origin has them.
    #[must_use]
    pub fn with_secrets(self, secrets: &'static [&'static str]) -> Self {
        Self { secrets, ..self }
    }

    /// Reads old names, too.
    #[must_use]
    pub fn with_renames(self, renames: Renames) -> Self {
        Self { renames, ..self }
    }

    /// Adds a file, which is called `name` in messages.
    pub fn add_file(&mut self, name: &str, text: &str) {
        self.newest.clear();
        let starts = line_starts(text);
        let place = |span: Range<usize>| {
            let (line, column) = position(text, &starts, span.start);
            format!("{name}:{line}:{column}")
        };
        self.add(text, &place);
    }

    /// Records that the file called `name` cannot be read.
    pub fn add_unreadable(&mut self, name: &str, error: &std::io::Error) {
        self.problems.push(ConfigProblem {
            key: String::new(),
            found: Found::Unreadable(String::new()),
            remedy: format!("cannot be read: {error}"),
            origin: Some(name.to_owned()),
        });
    }

    /// Adds an assignment like `rollout.group_size=8`, as a layer of its own. A value that is not TOML counts as text.
    pub fn add_assignment(&mut self, assignment: &str) {
        self.newest.clear();
        self.assign(assignment);
    }

    /// Adds assignments that were made together, as one layer.
    pub fn add_assignments(&mut self, assignments: &[String]) {
        self.newest.clear();
        let keys: Vec<&str> = assignments.iter().map(|assignment| key_of(assignment)).collect();
        for (assignment, key) in assignments.iter().zip(&keys) {
            match self.renames.full_key(key).filter(|new| keys.contains(new)) {
                Some(new) => self.problems.push(ConfigProblem {
                    origin: Some(format!("--set {key}")),
                    ..ConfigProblem::unknown(*key, also_set(new))
                }),
                None => self.assign(assignment),
            }
        }
    }

    fn assign(&mut self, assignment: &str) {
        let key = key_of(assignment);
        let hides = |secret: &&str| is_within(key, secret) || is_within(secret, key);
        let place = if self.secrets.iter().any(hides) {
            format!("--set {key}={NOT_SHOWN}")
        } else {
            format!("--set {assignment}")
        };
        let known = self.problems.len();
        match assignment_as_toml(assignment) {
            Some(text) => self.add(&text, &|_| place.clone()),
            None => self.problems.push(ConfigProblem {
                key: assignment.to_owned(),
                found: Found::Unreadable(String::new()),
                remedy: "must be KEY=VALUE, like rollout.group_size=8".to_owned(),
                origin: Some(place),
            }),
        }
        // The key that is meant may be one of a secret.
        let added = self.problems.iter_mut().skip(known);
        for problem in added.filter(|problem| problem.found == Found::UnknownKey) {
            problem.origin = Some(format!("--set {key}"));
        }
    }

    fn add(&mut self, text: &str, place: &dyn Fn(Range<usize>) -> String) {
        let (table, errors) = DeTable::parse_recoverable(text);
        let starts: Vec<usize> =
            errors.iter().map(|error| error.span().unwrap_or(0..0).start).collect();
        // The parser substitutes a value for text that it cannot read, so nothing is known about
        // that key.
        let unreadable = |entry: Range<usize>| {
            let rest = text.get(entry.end..).unwrap_or_default();
            let end = entry.end + rest.find('\n').unwrap_or(rest.len());
            starts.iter().any(|start| (entry.start..=end).contains(start))
        };
        let secrets = self.secrets;
        let mut reader = Reader {
            schema: &self.schema,
            renames: self.renames,
            place,
            unreadable: &unreadable,
            is_secret: &|path| secrets.iter().any(|secret| is_within(path, secret)),
            problems: Vec::new(),
            origins: Vec::new(),
            notices: Vec::new(),
        };
        let fitting = reader.table(table.get_ref());
        let mut problems = reader.problems;
        reader.notices.sort();
        for (_, key, notice) in reader.notices {
            // The present name may be in an earlier layer: the reader of both takes them for two settings.
            let before = self.origins.places.get(&key);
            let replaced = before.map(|place| format!(", and replaces the value of {place}"));
            self.origins.renamed.push(notice + &replaced.unwrap_or_default());
        }
        let line_starts = line_starts(text);
        let unreported = errors.len().saturating_sub(SYNTAX_ERRORS);
        for error in errors.into_iter().take(SYNTAX_ERRORS) {
            let span = error.span().unwrap_or(0..0);
            let problem = ConfigProblem {
                key: String::new(),
                found: Found::Unreadable(if self.may_be_secret(text, span.start) {
                    String::new()
                } else {
                    excerpt(text, &line_starts, &span)
                }),
                remedy: format!("not valid TOML: {}", error.message()),
                origin: Some(place(span.clone())),
            };
            problems.push((span.start, problem));
        }
        problems.sort_by_key(|(start, _)| *start);
        if unreported > 0 {
            let problem = ConfigProblem {
                key: String::new(),
                found: Found::Unreadable(String::new()),
                remedy: format!("not valid TOML: {unreported} more errors; is this a TOML file?"),
                origin: Some(place(0..0)),
            };
            problems.push((text.len(), problem));
        }
        self.problems.extend(problems.into_iter().map(|(_, problem)| problem));
        let origins = reader.origins;
        for group in self.alternatives {
            let set: Vec<&'static str> =
                group.iter().copied().filter(|key| is_set(&fitting, key)).collect();
            if set.is_empty() {
                continue;
            }
            self.newest.extend(set);
            for key in group.iter().filter(|key| !self.newest.contains(key)).collect::<Vec<_>>() {
                self.remove(key);
            }
        }
        for (path, place) in origins {
            let inside = format!("{path}[");
            self.origins.places.retain(|known, _| !known.starts_with(&inside));
            self.origins.places.insert(path, place);
        }
        merge(&mut self.merged, fitting);
    }

    /// Whether the text at `at`, which is not TOML, may belong to a secret: its key is named in the same section,
    /// on that line or before. Where the value of the key ends is not known there.
    fn may_be_secret(&self, text: &str, at: usize) -> bool {
        let rest = text.get(at..).unwrap_or_default();
        let end = at + rest.find('\n').unwrap_or(rest.len());
        let before = text.get(..end).unwrap_or_default();
        let section =
            before.rfind("\n[").map_or(before, |start| before.get(start..).unwrap_or_default());
        let mut names = self.secrets.iter().filter_map(|key| key.rsplit('.').next());
        names.any(|name| section.contains(name))
    }

    fn remove(&mut self, key: &str) {
        let table = key
            .split_once('.')
            .and_then(|(section, key)| Some((self.merged.get_mut(section)?.as_table_mut()?, key)));
        if let Some((table, name)) = table {
            table.remove(name);
        }
        self.origins.forget(key);
    }

    /// The merged values that fit the schema, where they were written, and all problems.
    pub fn finish(self) -> (Table, Origins, Vec<ConfigProblem>) {
        (self.merged, self.origins, self.problems)
    }
}

/// The key of an assignment.
fn key_of(assignment: &str) -> &str {
    assignment.split_once('=').map_or(assignment, |(key, _)| key).trim()
}

/// Whether `path` is `key` or inside of it, e.g. `a.b[1].c` of `a.b`.
fn is_within(path: &str, key: &str) -> bool {
    path.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

fn is_set(table: &Table, key: &str) -> bool {
    key.split_once('.').is_some_and(|(section, key)| {
        table.get(section).is_some_and(|section| section.get(key).is_some())
    })
}

/// Whether `text` has the form of an assignment, `KEY=VALUE`.
pub fn is_assignment(text: &str) -> bool {
    assignment_as_toml(text).is_some()
}

/// Rewrites `a.b=c` as a line of TOML; `None` if it is not a valid assignment.
fn assignment_as_toml(assignment: &str) -> Option<String> {
    let (key, value) = assignment.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if key.split('.').any(str::is_empty) || !key.chars().all(valid) {
        return None;
    }
    let literal = format!("{key} = {value}");
    // A line feed in the value may start a second assignment.
    let assigns_once = |table: Table| {
        let mut inner = Value::Table(table);
        key.split('.').all(|part| {
            let Value::Table(mut table) = std::mem::replace(&mut inner, Value::Boolean(true))
            else {
                return false;
            };
            inner = table.remove(part).unwrap_or(Value::Boolean(true));
            table.is_empty()
        })
    };
    if toml::from_str::<Table>(&literal).is_ok_and(assigns_once) {
        return Some(literal);
    }
    Some(format!("{key} = {}", Value::String(value.to_owned())))
}

fn merge(into: &mut Table, from: Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

/// Offsets in bytes at which the lines of `text` start.
fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

/// Line and column of the byte at offset `at`, both from 1; the column counts characters.
fn position(text: &str, starts: &[usize], at: usize) -> (usize, usize) {
    let line = starts.partition_point(|start| *start <= at).max(1);
    let start = starts.get(line - 1).copied().unwrap_or(0);
    (line, text.get(start..at).unwrap_or_default().chars().count() + 1)
}

/// The part of a span's line around its start, with a marker below it.
fn excerpt(text: &str, starts: &[usize], span: &Range<usize>) -> String {
    let (line, column) = position(text, starts, span.start);
    let start = starts.get(line - 1).copied().unwrap_or(0);
    let content = text.get(start..).and_then(|rest| rest.lines().next()).unwrap_or_default();
    let skipped = (column - 1).saturating_sub(EXCERPT / 2);
    let shown: String = content.chars().skip(skipped).take(EXCERPT).collect();
    let left = shown.chars().count().saturating_sub(column - 1 - skipped);
    let length = span.len().min(left).max(1);
    let (gutter, indent) = (format!("{line:>5} | "), " ".repeat(column - 1 - skipped));
    format!("{gutter}{shown}\n{} | {indent}{}", " ".repeat(5), "^".repeat(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{at_least, settings};
    use orchestrate_types::{ByteSize, HumanDuration};

    settings! {
        /// A thing of which there are several.
        #[derive(Eq)]
        [first.parts] pub(crate) PartSection -> PartSettings;

        /// Its name.
        name: String = String::new();
        /// How many.
        count: u32 = 1, at_least(1);
    }

    settings! {
        /// The first section.
        [first] pub(crate) FirstSection -> FirstSettings;

        /// A number.
        number: u32 = 1, at_least(1);
        /// Some text.
        text: Option<String> = None;
        /// A list.
        list: Vec<u32> = Vec::new();
        /// A pair.
        pair: (f64, f64) = (1.0, 2.0);
        /// A time.
        time: HumanDuration = HumanDuration::secs(1);
        /// A size.
        size: ByteSize = ByteSize(1);
        /// Things.
        parts: Vec<PartSettings> = Vec::new();
    }

    #[derive(Debug, Default, serde::Deserialize, schemars::JsonSchema)]
    #[serde(default)]
    struct Whole {
        first: FirstSection,
        second: PartSection,
    }

    fn read(files: &[(&str, &str)], sets: &[&str]) -> (Whole, Origins, Vec<String>) {
        let mut layers = Layers::of::<Whole>();
        for (name, text) in files {
            layers.add_file(name, text);
        }
        for set in sets {
            layers.add_assignment(set);
        }
        let (table, origins, problems) = layers.finish();
        let problems = problems.iter().map(ToString::to_string).collect();
        (table.try_into().unwrap(), origins, problems)
    }

    #[test]
    fn later_layers_win_tables_merge_and_lists_replace() {
        let files = [
            ("a.toml", "[first]\nnumber = 1\nlist = [1, 2]\n"),
            ("b.toml", "[first]\nlist = [3]\ntext = \"from b\"\n"),
        ];
        let (whole, origins, problems) = read(&files, &["first.number=2", "first.time=90"]);
        assert_eq!(problems, [] as [&str; 0]);
        let first = whole.first;
        assert_eq!((first.number, first.list), (Some(2), Some(vec![3])));
        assert_eq!(first.text.as_deref(), Some("from b"));
        assert_eq!(first.time, Some(HumanDuration::secs(90)));
        assert_eq!(origins.of("first.number"), Some("--set first.number=2"));
        assert_eq!(origins.of("first.list"), Some("b.toml:2:1"));
        assert_eq!(origins.of("first.size"), None);
    }

    #[derive(Debug, Default, serde::Deserialize, schemars::JsonSchema)]
    #[serde(default)]
    struct Drawn {
        shape: ShapeSection,
    }

    #[derive(
        Debug,
        Clone,
        Copy,
        PartialEq,
        Eq,
        serde::Serialize,
        serde::Deserialize,
        schemars::JsonSchema,
    )]
    #[serde(rename_all = "kebab-case")]
    pub(crate) enum Kind {
        Round,
        Square,
    }

    crate::setting_types!(Kind);

    settings! {
        /// A section whose names have changed.
        [shape] pub(crate) ShapeSection -> ShapeSettings;

        /// What it looks like.
        kind: Kind = Kind::Square;
        /// Its edge.
        edge: u32 = 1, at_least(1);
    }

    const RENAMES: Renames = Renames {
        keys: &[("shape.side", "shape.edge")],
        choices: &[("shape.kind", "circle", "round")],
    };

    fn drawn(text: &str, sets: &[String]) -> (ShapeSection, Origins, Vec<String>, Vec<String>) {
        let mut layers = Layers::of::<Drawn>().with_renames(RENAMES);
        layers.add_file("a.toml", text);
        layers.add_assignments(sets);
        let (table, origins, problems) = layers.finish();
        let notices = origins.renamed().to_vec();
        let problems = problems.iter().map(ToString::to_string).collect();
        (table.try_into::<Drawn>().unwrap().shape, origins, notices, problems)
    }

    #[test]
    fn old_names_are_read_as_the_new_ones_with_a_notice() {
        let (shape, origins, notices, problems) =
            drawn("[shape]\nside = 3\nkind = \"circle\"\n", &[]);
        assert_eq!(problems, [] as [&str; 0]);
        assert_eq!((shape.edge, shape.kind), (Some(3), Some(Kind::Round)));
        assert_eq!(origins.of("shape.edge"), Some("a.toml:2:1"));
        let expected = [
            "a.toml:2:1: `shape.side` is called `shape.edge` now",
            "a.toml:3:8: the choice \"circle\" of `shape.kind` is called \"round\" now",
        ];
        assert_eq!(notices, expected);
        // In either layer, and in any order.
        let (shape, _, notices, problems) =
            drawn("[shape]\nedge = 3\n", &["shape.side=4".to_owned()]);
        assert_eq!((shape.edge, problems.len()), (Some(4), 0));
        let replaced = "--set shape.side=4: `shape.side` is called `shape.edge` now, and replaces the value \
                        of a.toml:2:1";
        assert_eq!(notices, [replaced]);
        let (shape, _, notices, _) = drawn("[shape]\nside = 3\n", &["shape.edge=4".to_owned()]);
        assert_eq!((shape.edge, notices.len()), (Some(4), 1));
    }

    #[test]
    fn an_old_and_a_new_name_in_one_file_are_refused() {
        let (shape, .., notices, problems) = drawn("[shape]\nside = 3\nedge = 4\n", &[]);
        assert_eq!((shape.edge, notices.len()), (Some(4), 0));
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("old name of `shape.edge`"), "{problems:?}");
        // So they are in assignments, which are one layer.
        for sets in [["shape.side=3", "shape.edge=4"], ["shape.edge=4", " shape.side = 3"]] {
            let (shape, .., notices, problems) = drawn("", &sets.map(str::to_owned));
            assert_eq!((shape.edge, notices.len()), (Some(4), 0));
            let expected = "--set shape.side: unknown key shape.side; it is the old name of `shape.edge`, \
                            which is set, too";
            assert_eq!(problems, [expected]);
        }
    }

    #[test]
    fn assignments_without_quotes_are_text() {
        let (whole, _, problems) = read(&[], &["first.text=two words"]);
        assert_eq!(problems, [] as [&str; 0]);
        assert_eq!(whole.first.text.as_deref(), Some("two words"));
        for bad in ["no equals", "=1", "a b=1"] {
            let (_, _, problems) = read(&[], &[bad]);
            let expected = format!("--set {bad}: must be KEY=VALUE, like rollout.group_size=8");
            assert_eq!(problems, [expected]);
        }
    }

    #[test]
    fn an_assignment_assigns_one_key() {
        let (whole, _, problems) = read(&[], &["first.text=a\nfirst.number=3"]);
        assert_eq!(problems, [] as [&str; 0]);
        assert_eq!(whole.first.text.as_deref(), Some("a\nfirst.number=3"));
        for wrong in [".first.number=3", "first..number=3", "first.=3", "=3"] {
            let (_, _, problems) = read(&[], &[wrong]);
            assert_eq!(problems.len(), 1, "{wrong}: {problems:?}");
            assert!(problems[0].contains("must be KEY=VALUE"), "{problems:?}");
        }
    }

    #[test]
    fn files_full_of_errors_have_short_reports() {
        let keys = |n: usize| (0..n).map(|i| format!("key{i} = 1\n")).collect::<Vec<_>>().concat();
        let (_, _, problems) = read(&[("a.toml", &format!("[first]\n{}", keys(2000)))], &[]);
        assert_eq!(problems.len(), 2000);
        let (_, _, problems) = read(&[("line.toml", &"= \u{0} ".repeat(50_000))], &[]);
        assert!(problems.iter().all(|problem| problem.len() < 1000), "{problems:?}");
        let (_, _, problems) = read(&[("lines.toml", &"a = =\n".repeat(5000))], &[]);
        assert_eq!(problems.len(), SYNTAX_ERRORS + 1);
        assert!(problems.iter().all(|problem| problem.len() < 1000), "{problems:?}");
        assert!(problems.last().is_some_and(|last| last.contains("more errors")), "{problems:?}");
    }

    #[test]
    fn durations_out_of_range_are_problems_with_a_place() {
        let file = [("a.toml", "[first]\ntime = 1e20\nnumber = 0\n")];
        let (_, _, problems) = read(&file, &[]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("a.toml:2:8: first.time"), "{problems:?}");
    }

    #[test]
    fn every_problem_of_every_file_is_reported_with_its_place() {
        let files = [
            ("a.toml", "[first]\nnumbr = 1\ntext = 3\nnumber = \"many\"\ntime = \"soon\"\n"),
            ("b.toml", "[first]\nsize = \"4 elephants\"\nlist = 3\npair = [1.0]\nnumber =\n"),
            ("c.toml", "[frist]\n[second]\nnumber = 3\n[[first.parts]]\ncuont = 3\ncount = 1.5\n"),
        ];
        let (_, _, problems) = read(&files, &["first.number=-1", "first.nothing=1"]);
        assert_eq!(
            problems,
            [
                "a.toml:2:1: unknown key first.numbr; did you mean `number`?",
                "a.toml:3:8: first.text = 3: must be text in quotes",
                "a.toml:4:10: first.number = \"many\": must be a whole number",
                "a.toml:5:8: first.time = \"soon\": must be a duration like \"90s\", \"1h30m\" or \
                 \"250ms\", or a number of seconds",
                "b.toml:2:8: first.size = \"4 elephants\": must be a size like \"4 GiB\", \
                 \"512MiB\" or \"4GB\", or a number of bytes",
                "b.toml:3:8: first.list = 3: must be a list in square brackets",
                "b.toml:4:8: first.pair = [1.0]: must be two numbers, like [0.9, 0.999]",
                "b.toml:5:9: not valid TOML: string values must be quoted, expected literal \
                 string\n    5 | number =\n      |         ^",
                "c.toml:1:2: unknown key frist; did you mean `first`?",
                "c.toml:3:1: unknown key second.number; it belongs to [first]",
                "c.toml:5:1: unknown key first.parts[0].cuont; did you mean `count`?",
                "c.toml:6:9: first.parts[0].count = 1.5: must be a whole number",
                "--set first.number=-1: must be at least 1",
                "--set first.nothing: unknown key first.nothing",
            ]
        );
    }

    #[test]
    fn a_secret_that_is_refused_is_not_shown() {
        let mut problems = vec![ConfigProblem::new("a.token_env", NOT_SHOWN, "must be a name")];
        let set = ("a.token_env".to_owned(), "--set a.token_env=s=cret".to_owned());
        Origins { places: [set].into(), renamed: Vec::new() }.locate(&mut problems);
        let expected = "--set a.token_env: a.token_env = (not shown): must be a name";
        assert_eq!(problems[0].to_string(), expected);
    }

    #[test]
    fn a_secret_in_a_file_that_cannot_be_read_is_not_quoted() {
        let text = |file: &str| {
            let mut layers = Layers::of::<Whole>().with_secrets(&["first.text"]);
            layers.add_file("a.toml", file);
            layers.finish().2.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        for file in [
            "[first]\ntext = \"canary\n",
            "[first]\ntext = canary\n",
            "[first]\nlist = [\"a\"]\ntext = [\n  \"A\",\n  B=canary,\n]\n",
            "first = { text = canary }\n",
        ] {
            let shown = text(file);
            assert!(shown.contains("not valid TOML") && !shown.contains("canary"), "{shown}");
        }
        let shown = text("[first]\ntext = \"a\"\n[second]\ncount = shown\n");
        assert!(shown.contains("count = shown"), "{shown}");
    }

    #[test]
    fn nothing_is_said_about_keys_that_cannot_be_read() {
        let (whole, _, problems) =
            read(&[("a.toml", "[first]\nnumber = = 3\ntext = \"x\"\n")], &[]);
        assert!(problems.iter().all(|problem| problem.contains("not valid TOML")), "{problems:?}");
        assert_eq!((whole.first.number, whole.first.text.as_deref()), (None, Some("x")));
    }

    #[test]
    fn problems_inside_of_lists_are_located() {
        let file = [("a.toml", "[[first.parts]]\ncount = 0\n\n[[first.parts]]\n")];
        let (whole, origins, problems) = read(&file, &[]);
        assert_eq!(problems, [] as [&str; 0]);
        let mut problems = whole.first.check().unwrap_err();
        origins.locate(&mut problems);
        let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["a.toml:2:1: first.parts[0].count = 0: must be at least 1"]);
    }
}
