//! What the set-up of a changed tree may change in the container.
//!
//! The invariant: if no change is refused, the programs, libraries and packages that run after the
//! set-up are those of the image, and no code of the tree is loaded before the tests' reporter is in
//! place.

use camino::Utf8Path;
use orchestrate_sandbox::TreeChanges;
use orchestrate_tasks::Finding;
use orchestrate_tasks::patch::rules::{check_path, is_test_path};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Bits of a mode that hold a file's type, and their value for a regular file.
const TYPE: u32 = 0o17_0000;
const REGULAR: u32 = 0o10_0000;

/// Names of scripts that could stand in for programs of the system.
const PROGRAMS: &[&str] =
    &["activate", "bash", "cat", "conda", "deactivate", "env", "git", "rm", "sh", "mv", "cp"];

/// What an interpreter of the container has installed, as `installed.py` prints it.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Installed {
    /// Folders of installed packages.
    sites: Vec<String>,
    /// Folder of installed scripts.
    scripts: String,
    /// Files by which Python and pytest load code, by path; `None` for one that is not a short text.
    files: BTreeMap<String, Option<String>>,
}

/// What an installation of one project may write.
pub(super) struct InstallationRules<'a> {
    /// The repository's folder, absolute.
    tree: &'a str,
    before: &'a Installed,
    /// Names of the project's distributions, normalized.
    names: BTreeSet<String>,
    /// Modules and packages that the project installs as copies; empty for an editable installation.
    packages: BTreeSet<String>,
    /// Whether a path relative to the tree exists in it before the set-up.
    existed: &'a (dyn Fn(&str) -> bool + Sync),
}

/// What the set-up changed, judged.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct JudgedChanges {
    /// The first path that it may not change, absolute.
    pub(super) refused: Option<String>,
    /// Compiled modules that it wrote. They are removed before anything else runs, so that it does not
    /// matter what they contain.
    pub(super) compiled: Vec<String>,
    /// Lists of entry points that it wrote in the tree.
    pub(super) entry_points: Vec<String>,
}

impl<'a> InstallationRules<'a> {
    /// The rules for the project `repo` (`OWNER/NAME`) in `tree`, which `install`, a shell command,
    /// installs.
    pub(super) fn new(
        tree: &'a str,
        repo: &str,
        install: &str,
        before: &'a Installed,
        existed: &'a (dyn Fn(&str) -> bool + Sync),
    ) -> Self {
        let mut names: BTreeSet<String> =
            [normalized(repo.rsplit('/').next().unwrap_or(repo))].into();
        for (path, text) in &before.files {
            let Some(text) = text else { continue };
            let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
            let is_of_tree = |text: &str| {
                let text = text.trim();
                text == tree || text.strip_prefix(tree).is_some_and(|rest| rest.starts_with('/'))
            };
            if let Some(name) = file.strip_suffix(".egg-link")
                && is_of_tree(text.lines().next().unwrap_or_default())
            {
                names.insert(normalized(name));
            }
            let url = format!("\"file://{tree}\"");
            if file == "direct_url.json" && text.contains(&url) {
                names.insert(distribution(folder));
            }
        }
        let mut rules = Self { tree, before, names, packages: BTreeSet::new(), existed };
        if !install.split_whitespace().any(|word| word == "-e") {
            for (path, text) in &before.files {
                let folder = path.strip_suffix("/top_level.txt");
                if let (Some(folder), Some(text)) = (folder, text)
                    && rules.names.contains(&distribution(folder))
                {
                    rules.packages.extend(text.split_whitespace().map(ToOwned::to_owned));
                }
            }
        }
        rules
    }

    /// Judges what changed, with paths relative to the root.
    pub(super) fn judge(&self, changes: &TreeChanges) -> JudgedChanges {
        let mut judged = JudgedChanges::default();
        let written = changes
            .written
            .iter()
            .map(|file| (&file.path, file.mode & TYPE == REGULAR, Some(file.is_new)));
        for (path, is_regular, is_new) in
            written.chain(changes.removed.iter().map(|path| (path, true, None)))
        {
            let path = format!("/{path}");
            if is_new.is_some() && is_regular && self.is_compiled(&path) {
                judged.compiled.push(path);
                continue;
            }
            let is_list = is_new.is_some() && path.ends_with("/entry_points.txt");
            if is_list && self.in_tree(&path).is_some() {
                judged.entry_points.push(path.clone());
            }
            if judged.refused.is_none() && !self.allows(&path, is_regular, is_new) {
                judged.refused = Some(path);
            }
        }
        judged
    }

    fn is_compiled(&self, path: &str) -> bool {
        has_extension(path, "pyc")
            && (path.contains("/__pycache__/") || self.in_tree(path).is_some())
    }

    /// `path` relative to the tree, if it is in it.
    fn in_tree<'p>(&self, path: &'p str) -> Option<&'p str> {
        path.strip_prefix(self.tree)?.strip_prefix('/')
    }

    /// Whether the set-up may write (`is_new` says whether it is new) or remove (`None`) a file.
    fn allows(&self, path: &str, is_regular: bool, is_new: Option<bool>) -> bool {
        if let Some(path) = self.in_tree(path) {
            return self.allows_in_tree(path);
        }
        if has_extension(path, "pyc") && path.contains("/__pycache__/") {
            return is_new.is_none();
        }
        let below =
            |folder: &str| path.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
        if !is_regular {
            return false;
        }
        if let Some(rest) = self.before.sites.iter().find_map(|site| below(site)) {
            return self.allows_in_site(rest);
        }
        if let Some(name) = below(&self.before.scripts) {
            let is_program = name.contains('/')
                || ["python", "pypy"].iter().any(|start| name.starts_with(start))
                || PROGRAMS.contains(&name);
            return !is_program;
        }
        // Pages of the manual are data that nothing loads.
        let prefix = self.before.scripts.rsplit_once('/').map_or("", |(prefix, _)| prefix);
        below(prefix).is_some_and(|rest| rest.starts_with("share/man/"))
    }

    /// What builds write: anything but settings, tests, start-up hooks and the repository's metadata.
    fn allows_in_tree(&self, path: &str) -> bool {
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        if path == ".git/index" {
            return true;
        }
        let is_git = folders.split('/').any(|part| part == ".git")
            || name.starts_with(".git") && name != ".gitignore";
        let stem = |part: &str| part.split('.').next().unwrap_or(part).to_owned();
        let is_start_up =
            path.split('/').any(|part| matches!(&*stem(part), "sitecustomize" | "usercustomize"));
        if is_git || is_start_up || path.starts_with(".grading") {
            return false;
        }
        if ["build/", "dist/", ".eggs/"].iter().any(|folder| path.starts_with(folder)) {
            return true;
        }
        // A compiled module is found under the same name as one in Python.
        let first = path.split('/').next().unwrap_or(path);
        let shadow = if first == path && path.contains('.') && has_extension(path, "so") {
            format!("{}.py", stem(path))
        } else {
            path.to_owned()
        };
        match check_path(&shadow, self.existed) {
            Ok(()) | Err(Finding::EnvironmentTouched) => {
                !(is_test_path(path) && has_extension(path, "py"))
            }
            Err(Finding::TestsChanged) => !has_extension(path, "py"),
            Err(_) => false,
        }
    }

    /// What an installation of the project writes among the installed packages.
    fn allows_in_site(&self, path: &str) -> bool {
        let first = path.split('/').next().unwrap_or(path);
        if first == path {
            let is_own_link = first
                .strip_suffix(".egg-link")
                .is_some_and(|name| self.names.contains(&normalized(name)));
            let is_own_namespace = first
                .strip_suffix("-nspkg.pth")
                .is_some_and(|name| self.names.contains(&distribution(name)));
            let is_own_hook = first.starts_with("__editable__")
                && (has_extension(first, "pth") || has_extension(first, "py"));
            // Their contents are checked as well.
            if first == "easy-install.pth" || is_own_link || is_own_namespace || is_own_hook {
                return true;
            }
        }
        let ends = [".dist-info", ".egg-info", ".egg"];
        let is_metadata = ends.iter().any(|end| first.ends_with(end));
        if is_metadata && self.names.contains(&distribution(first)) {
            return true;
        }
        let module = first.split('.').next().unwrap_or(first);
        self.packages.contains(module)
    }

    /// Compares what is installed after the set-up: the path of the first file by which code would be
    /// loaded that was not before.
    pub(super) fn new_hook(&self, after: &Installed) -> Option<String> {
        let changed = after
            .files
            .iter()
            .filter(|(path, text)| self.before.files.get(path.as_str()) != Some(*text));
        let allowed = |path: &str, text: &str| {
            let name = path.rsplit('/').next().unwrap_or(path);
            match name {
                "entry_points.txt" => entry_points(text).is_subset(&self.entry_points_before()),
                _ if has_extension(name, "pth") => self.allows_path_file(text),
                _ if name.starts_with("__editable__") => self.allows_finder(text),
                _ => true,
            }
        };
        let refused = |(path, text): &(&String, &Option<String>)| {
            !text.as_ref().is_some_and(|text| allowed(path, text))
        };
        changed.into_iter().find(refused).map(|(path, _)| path.clone())
    }

    fn texts_before(&self, matches: impl Fn(&str) -> bool) -> impl Iterator<Item = &str> {
        let files = self.before.files.iter().filter(move |(path, _)| matches(path));
        files.filter_map(|(_, text)| text.as_deref())
    }

    fn entry_points_before(&self) -> BTreeSet<(String, String)> {
        self.texts_before(|path| path.ends_with("entry_points.txt"))
            .flat_map(entry_points)
            .collect()
    }

    /// Whether each line is one that the image has, a folder of the tree, or setuptools' own import of
    /// the file that maps names to such folders.
    fn allows_path_file(&self, text: &str) -> bool {
        let before: BTreeSet<&str> =
            self.texts_before(|known| has_extension(known, "pth")).flat_map(str::lines).collect();
        let is_folder_name = |part: &str| {
            !part.is_empty()
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
        };
        let is_in_tree = |line: &str| {
            line == self.tree
                || self.in_tree(line).is_some_and(|rest| rest.split('/').all(is_folder_name))
        };
        let is_own_egg = |line: &str| {
            let name = line.rsplit('/').next().unwrap_or(line);
            has_extension(name, "egg")
                && self.names.contains(&distribution(name))
                && (line == format!("./{name}")
                    || self.before.sites.iter().any(|site| line == format!("{site}/{name}")))
        };
        let is_finder = |line: &str| {
            line.strip_prefix("import ").and_then(|rest| rest.split_once("; ")).is_some_and(
                |(module, call)| {
                    module.starts_with("__editable___")
                        && module.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                        && call == format!("{module}.install()")
                },
            )
        };
        text.split(['\n', '\r']).all(|line| {
            line.is_empty()
                || before.contains(line)
                || is_in_tree(line)
                || is_own_egg(line)
                || is_finder(line)
        })
    }

    /// Whether a file that maps names to folders differs from one of the image in its table only.
    fn allows_finder(&self, text: &str) -> bool {
        let is_table = |line: &&str| line.starts_with("MAPPING") || line.starts_with("NAMESPACES");
        let code = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !is_table(line)).map(ToOwned::to_owned).collect()
        };
        let is_known = self
            .texts_before(|path| has_extension(path, "py") && path.contains("/__editable__"))
            .any(|known| code(known) == code(text));
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,'\"{}[]= ".contains(c);
        let is_in_tree = |value: &str| {
            !value.starts_with('/') || value == self.tree || self.in_tree(value).is_some()
        };
        is_known
            && text.lines().filter(is_table).all(|line| {
                let line_is_plain = line.chars().all(plain);
                line_is_plain && line.split(['\'', '"']).all(is_in_tree)
            })
    }
}

/// Whether Python or pip tell the file's kind by this extension, which is case-sensitive.
fn has_extension(path: &str, extension: &str) -> bool {
    Utf8Path::new(path).extension() == Some(extension)
}

/// The project name of a file or folder `NAME-VERSION…`, normalized.
fn distribution(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    let ends = [".dist-info", ".egg-info", ".egg"];
    let name = ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    normalized(name.split('-').next().unwrap_or(name))
}

/// A project's name in the form in which Python compares it.
fn normalized(name: &str) -> String {
    name.to_ascii_lowercase().replace(['-', '.'], "_")
}

/// Entry points, except those of scripts: section and line.
fn entry_points(text: &str) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    let mut section = String::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            line.trim_matches(['[', ']', ' ']).clone_into(&mut section);
        } else if !line.is_empty() && !matches!(&*section, "console_scripts" | "gui_scripts") {
            found.insert((section.clone(), line.to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests;
