//! Which parts of a change reach the graded tree.

use crate::tree::TreeChange;
use orchestrate_sandbox::FileEntry;
use orchestrate_tasks::patch::check_link;
use orchestrate_tasks::patch::rules::{check_path, is_test_path};
use orchestrate_tasks::{Finding, Task};
use std::collections::{BTreeMap, BTreeSet};

/// The part of a change that is graded, and what was noticed in the rest.
#[derive(Debug, Default)]
pub(super) struct GradedPart {
    /// Accepted paths.
    pub(super) touched: Vec<String>,
    /// Refused paths.
    pub(super) refused: Vec<String>,
    pub(super) findings: BTreeSet<Finding>,
}

impl GradedPart {
    /// Decides about `path`, which the change deletes or writes, as a link if it has a target.
    pub(super) fn add(
        &mut self,
        path: &str,
        is_deleted: bool,
        target: Option<&[u8]>,
        existed: impl Fn(&str) -> bool,
    ) {
        let checked = match target {
            Some(target) => check_link(path, target, existed),
            None => check_path(path, existed),
        };
        match checked {
            Ok(()) => self.touched.push(path.to_owned()),
            Err(finding) => {
                let finding = match finding {
                    Finding::TestsChanged if is_deleted => Finding::TestsDeleted,
                    finding => finding,
                };
                self.findings.insert(finding);
                self.refused.push(path.to_owned());
            }
        }
    }

    /// Refuses what takes the place of a folder in which a refused deletion leaves a file, and what
    /// is below such a file: neither can be created, and the rest of the change could not be applied.
    fn leave_out_conflicts(&mut self) {
        let refused: BTreeSet<String> = self.refused.iter().cloned().collect();
        let conflicts = |path: &str| {
            let below = format!("{path}/");
            let next = refused.range(below.clone()..).next();
            next.is_some_and(|next| next.starts_with(&below))
                || path
                    .match_indices('/')
                    .any(|(at, _)| path.get(..at).is_some_and(|folder| refused.contains(folder)))
        };
        let (left_out, touched) =
            std::mem::take(&mut self.touched).into_iter().partition(|path| conflicts(path));
        self.touched = touched;
        self.refused.extend::<Vec<String>>(left_out);
    }
}

/// The change of a task's own files that strict grading accepts, and what was noticed.
pub(super) fn strict_change(task: &Task, change: &TreeChange) -> (TreeChange, GradedPart) {
    let mut part = GradedPart::default();
    let existed = |path: &str| {
        task.agent_files.iter().any(|file| {
            file.path
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    for file in &change.written {
        part.add(&file.path, false, file.is_link().then_some(file.content.as_slice()), existed);
    }
    for path in &change.removed {
        part.add(path, true, None, existed);
    }
    let accepted: BTreeSet<&String> = part.touched.iter().collect();
    let written: Vec<FileEntry> =
        change.written.iter().filter(|file| accepted.contains(&file.path)).cloned().collect();
    let removed: Vec<String> =
        change.removed.iter().filter(|path| accepted.contains(path)).cloned().collect();
    let TreeChange { patch, findings, .. } = change;
    let change = TreeChange { written, removed, patch: patch.clone(), findings: findings.clone() };
    (change, part)
}

/// What a patch touches, as git reads it in the tree that it is applied to.
#[derive(Debug, Default)]
pub(super) struct PatchListing {
    /// Files and folders at the places from which Python imports.
    entries: BTreeSet<String>,
    /// Text of the image's `run_tests.sh`; empty if it has none.
    pub(super) runner: String,
    /// Each changed path, with the path that it had before a renaming.
    paths: Vec<(String, String)>,
    deleted: BTreeSet<String>,
    /// Files that set trace functions before the change.
    pub(super) tracing: Vec<String>,
}

impl PatchListing {
    /// Reads the output of `list_patch.sh`; `None` if it is incomplete.
    pub(super) fn read(output: &str) -> Option<Self> {
        let mut listing = Self::default();
        let mut renamed = Vec::new();
        let mut is_complete = false;
        for section in output.split('\u{1}').skip(1) {
            let (name, text) = section.split_once('\n')?;
            let lines = || text.lines().map(ToOwned::to_owned);
            match name {
                "entries" => listing.entries = lines().collect(),
                "runner" => text.clone_into(&mut listing.runner),
                "new" => listing.paths = numstat(text).map(|p| (p.clone(), p)).collect(),
                // Git lists a reversed patch from its end.
                "old" => {
                    renamed = numstat(text).collect();
                    renamed.reverse();
                }
                "deleted" => {
                    let path = |line: &str| {
                        Some(line.trim().split_once("mode ")?.1.split_once(' ')?.1.to_owned())
                    };
                    listing.deleted = text.lines().filter_map(path).collect();
                }
                "tracing" => listing.tracing = lines().collect(),
                "end" => is_complete = true,
                _ => return None,
            }
        }
        if renamed.len() != listing.paths.len() {
            return None;
        }
        for ((_, old), path) in listing.paths.iter_mut().zip(renamed) {
            *old = path;
        }
        is_complete.then_some(listing)
    }

    /// Whether a file or folder is at one of the places from which Python imports.
    pub(super) fn existed(&self, path: &str) -> bool {
        self.entries.contains(path)
    }

    /// The part of the patch that strict grading accepts. `links` are those that it creates, with
    /// their targets.
    pub(super) fn strict_part(&self, links: &BTreeMap<String, String>) -> GradedPart {
        let mut part = GradedPart::default();
        let existed = |path: &str| self.existed(path);
        for (path, old) in &self.paths {
            let is_deleted = self.deleted.contains(path);
            if old != path && check_path(old, existed).is_err() {
                part.refused.push(path.clone());
                let finding =
                    if is_test_path(old) { Finding::TestsDeleted } else { Finding::ConfigTouched };
                part.findings.insert(finding);
            } else {
                part.add(path, is_deleted, links.get(path).map(String::as_bytes), existed);
            }
        }
        part.leave_out_conflicts();
        part
    }
}

/// Paths in the output of `git apply --numstat -z`.
fn numstat(text: &str) -> impl Iterator<Item = String> {
    text.split('\0').filter_map(|entry| Some(entry.splitn(3, '\t').nth(2)?.to_owned()))
}

/// An option of `git apply` that leaves out exactly `path`.
pub(super) fn exclude_option(path: &str) -> String {
    let mut option = "--exclude=".to_owned();
    for c in path.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            option.push('\\');
        }
        option.push(c);
    }
    option
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_testkit::toy_task;

    fn file(path: &str) -> FileEntry {
        FileEntry { path: path.to_owned(), mode: 0o644, content: b"agent".to_vec() }
    }

    #[test]
    fn only_gradable_files_of_a_change_are_kept_and_the_rest_is_named() {
        let mut task = toy_task();
        task.agent_files.push(orchestrate_tasks::TaskFile {
            path: "attr/core.py".to_owned(),
            content: String::new(),
        });
        let written = ["total.py", "conftest.py", "attr/new.py", "random.py", "evil.pth"];
        let change = TreeChange {
            written: written.map(file).to_vec(),
            removed: ["README", "tests/test_a.py", "setup.cfg"].map(ToOwned::to_owned).to_vec(),
            ..TreeChange::default()
        };
        let (kept, part) = strict_change(&task, &change);
        let paths: Vec<&str> = kept.written.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["total.py", "attr/new.py"]);
        assert_eq!(kept.removed, ["README"]);
        let findings: Vec<Finding> = part.findings.into_iter().collect();
        let expected = [
            Finding::ConftestTouched,
            Finding::TestsDeleted,
            Finding::ConfigTouched,
            Finding::ShadowsModule,
            Finding::EnvironmentTouched,
        ];
        assert_eq!(findings, expected);
    }

    #[test]
    fn what_would_be_created_over_or_below_a_kept_file_is_left_out() {
        let mut part = GradedPart::default();
        for (path, is_deleted) in [
            ("pkg", false),
            ("pkg/core.py", true),
            ("pkg/tests/test_a.py", true),
            ("setup.cfg", true),
            ("setup.cfg/x.py", false),
            ("setup", false),
        ] {
            part.add(path, is_deleted, None, |_| true);
        }
        part.leave_out_conflicts();
        assert_eq!(part.touched, ["pkg/core.py", "setup"]);
        let refused = ["pkg/tests/test_a.py", "setup.cfg", "pkg", "setup.cfg/x.py"];
        assert_eq!(part.refused, refused);
    }

    #[test]
    fn the_listing_of_a_patch_names_renamed_and_deleted_files() {
        let new = ["1\t1\tcalc.py", "-\t-\tdata [x].bin", "0\t0\tnew.py", "0\t3\ttests/test_b.py"];
        let old = [new[3], "0\t0\ttests/test_a.py", new[1], new[0]];
        let output = format!(
            "\u{1}entries\ncalc.py\nattr\n\u{1}runner\npython -m pytest\n\u{1}new\n{}\u{0}\u{1}old\n\
             {}\u{0}\u{1}deleted\n delete mode 100644 tests/test_b.py\n\u{1}tracing\ncalc.py\n\u{1}end\n",
            new.join("\u{0}"),
            old.join("\u{0}"),
        );
        let listing = PatchListing::read(&output).unwrap();
        assert_eq!(listing.runner, "python -m pytest\n");
        assert_eq!(listing.tracing, ["calc.py"]);
        let links = BTreeMap::from([("calc.py".to_owned(), "impl.py".to_owned())]);
        let part = listing.strict_part(&links);
        assert_eq!(part.touched, ["calc.py", "data [x].bin"]);
        assert_eq!(part.refused, ["new.py", "tests/test_b.py"]);
        assert_eq!(part.findings.into_iter().collect::<Vec<_>>(), [Finding::TestsDeleted]);
        let links = BTreeMap::from([("calc.py".to_owned(), "/etc/passwd".to_owned())]);
        let part = listing.strict_part(&links);
        assert_eq!(part.refused, ["calc.py", "new.py", "tests/test_b.py"]);
        assert!(part.findings.contains(&Finding::LinkOutside));
        assert!(PatchListing::read("\u{1}entries\n").is_none());
        assert_eq!(exclude_option("data [x].bin"), "--exclude=data \\[x\\].bin");
    }
}
