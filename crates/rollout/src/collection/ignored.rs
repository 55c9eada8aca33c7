//! Which files git ignores, by the ignore files that the repository had before the agent.

use super::{EXCLUDE_FILE, IGNORE_FILE};
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use orchestrate_sandbox::FileEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The ignore rules of one repository.
#[derive(Debug, Clone)]
pub(super) struct IgnoreRules {
    /// By folder, with paths relative to it; the tree's own folder is empty.
    folders: Arc<BTreeMap<String, Gitignore>>,
    /// The repository's own list, which every ignore file overrides.
    exclude: Arc<Gitignore>,
    /// Files in the index, which are never ignored.
    tracked: Arc<BTreeSet<String>>,
}

impl IgnoreRules {
    /// The rules in `files`, which are ignore files and the repository's own list. Invalid lines have
    /// no effect, as in git.
    pub(super) fn new(files: Vec<FileEntry>, tracked: BTreeSet<String>) -> Self {
        let mut folders = BTreeMap::new();
        let mut exclude = Gitignore::empty();
        for file in files {
            let rules = parse(&String::from_utf8_lossy(&file.content));
            if file.path == EXCLUDE_FILE {
                exclude = rules;
            } else if let Some(folder) = file.path.strip_suffix(IGNORE_FILE) {
                folders.insert(folder.trim_end_matches('/').to_owned(), rules);
            }
        }
        Self { folders: Arc::new(folders), exclude: Arc::new(exclude), tracked: Arc::new(tracked) }
    }

    /// Whether git leaves the file out when it adds everything. What is in an ignored folder is
    /// ignored, too.
    pub(super) fn ignores(&self, path: &str) -> bool {
        if self.tracked.contains(path) {
            return false;
        }
        let folders = path.match_indices('/').filter_map(|(at, _)| path.get(..at));
        folders.map(|folder| (folder, true)).chain([(path, false)]).any(|(entry, is_folder)| {
            match self.decide(entry, is_folder) {
                Match::Ignore(()) => true,
                Match::Whitelist(()) | Match::None => false,
            }
        })
    }

    /// The decision of the nearest ignore file that has one.
    fn decide(&self, entry: &str, is_folder: bool) -> Match<()> {
        let mut parent = entry.rsplit_once('/').map_or("", |(parent, _)| parent);
        loop {
            if let Some(rules) = self.folders.get(parent) {
                let inside = entry.strip_prefix(parent).unwrap_or(entry).trim_start_matches('/');
                let found = rules.matched(inside, is_folder).map(|_| ());
                if !found.is_none() {
                    return found;
                }
            }
            if parent.is_empty() {
                return self.exclude.matched(entry, is_folder).map(|_| ());
            }
            parent = parent.rsplit_once('/').map_or("", |(above, _)| above);
        }
    }
}

fn parse(text: &str) -> Gitignore {
    let mut rules = GitignoreBuilder::new("");
    for line in text.lines() {
        if let Err(error) = rules.add_line(None, line) {
            tracing::debug!(%error, line, "invalid line of an ignore file");
        }
    }
    rules.build().unwrap_or_else(|error| {
        tracing::warn!(%error, "an ignore file has no effect");
        Gitignore::empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn file(path: &str, content: &str) -> FileEntry {
        FileEntry { path: path.to_owned(), mode: 0o644, content: content.into() }
    }

    #[test]
    fn files_are_ignored_as_by_git() {
        let files = [
            file(".gitignore", "*.log\n!keep.log\nbuild/\n/top\nsub/*.tmp\n**/deep/*.x\n\\#odd\n"),
            file("sub/.gitignore", "!a.log\nlocal\n"),
            file("build/.gitignore", "!*\n"),
            file(".git/info/exclude", "*.bak\nkeep.log\n"),
        ];
        let rules = IgnoreRules::new(files.to_vec(), BTreeSet::from(["t.log".to_owned()]));
        let paths = [
            "a.py",
            "a.log",
            "keep.log",
            "x/keep.log",
            "build/a",
            "x/build/a",
            "top",
            "x/top",
            "sub/a.tmp",
            "x/sub/a.tmp",
            "q/deep/a.x",
            "#odd",
            "sub/a.log",
            "sub/x/a.log",
            "sub/local",
            "local",
            "a.bak",
            "x/build",
        ];
        let folder = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let mut git = Command::new("git");
            git.current_dir(folder.path()).args(arguments);
            git.env("GIT_CONFIG_GLOBAL", "/dev/null").output()
        };
        if git(&["init", "-q"]).is_err() {
            return;
        }
        for file in files.iter().chain(&paths.map(|path| file(path, "x"))) {
            let place = folder.path().join(&file.path);
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            // `x/build` is a folder already.
            if !place.is_dir() {
                std::fs::write(place, &file.content).unwrap();
            }
        }
        for path in paths.into_iter().filter(|path| *path != "x/build") {
            let by_git = git(&["check-ignore", "-q", path]).unwrap().status.success();
            assert_eq!(rules.ignores(path), by_git, "{path}");
        }
        assert!(!rules.ignores("t.log"));
    }
}
