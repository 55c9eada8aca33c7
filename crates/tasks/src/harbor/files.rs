//! Reads the files of an untrusted task folder, and nothing outside it.

use super::row::{FOLDER_MODE, HarborFile};
use super::value::HarborProblem;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err as fs;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::os::unix::fs::PermissionsExt as _;

/// Maximum total size of one task's files, in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum number of files of one task.
const MAX_FILES: usize = 20_000;
/// Maximum depth of folders. Also stops cycles of links.
const MAX_DEPTH: usize = 64;
/// Name of the files that list ignored inputs.
const IGNORE_FILE: &str = ".harborignore";

/// Rules of one ignore file, with the length of its folder's path.
type FolderRules = (usize, Gitignore);

/// Reads files of one task folder, within limits that hold for all of them together.
#[derive(Debug)]
pub(super) struct TaskFolder {
    root: Utf8PathBuf,
    bytes: u64,
    files: usize,
}

impl TaskFolder {
    pub(super) fn open(path: &Utf8Path) -> Result<Self, HarborProblem> {
        let root = path.canonicalize_utf8().map_err(|e| unreadable(path, &e))?;
        Ok(Self { root, bytes: 0, files: 0 })
    }

    pub(super) fn root(&self) -> &Utf8Path {
        &self.root
    }

    pub(super) fn path(&self, relative: &str) -> Utf8PathBuf {
        self.root.join(relative)
    }

    /// A text file inside the folder.
    pub(super) fn text(&mut self, relative: &str) -> Result<Option<String>, HarborProblem> {
        let path = self.path(relative);
        if !path.exists() {
            return Ok(None);
        }
        self.check_inside(&path)?;
        let content = self.content(&path)?;
        String::from_utf8(content)
            .map(Some)
            .map_err(|_| HarborProblem::invalid(format!("{relative} is not UTF-8")))
    }

    /// All files below `relative`, sorted by path; empty if there is no such folder. With `filter`,
    /// files that its ignore files name are left out, and so are the ignore files.
    pub(super) fn tree(
        &mut self,
        relative: &str,
        filter: bool,
    ) -> Result<Vec<HarborFile>, HarborProblem> {
        let folder = self.path(relative);
        let mut found = Vec::new();
        if folder.is_dir() {
            self.check_inside(&folder)?;
            let mut rules = filter.then(Vec::new);
            self.visit(&folder, "", &mut rules, &mut found, MAX_DEPTH)?;
        }
        Ok(found)
    }

    /// Reads the folder with the path `prefix`. Without `rules`, nothing is left out.
    fn visit(
        &mut self,
        folder: &Utf8Path,
        prefix: &str,
        rules: &mut Option<Vec<FolderRules>>,
        found: &mut Vec<HarborFile>,
        depth: usize,
    ) -> Result<(), HarborProblem> {
        if depth == 0 {
            return Err(HarborProblem::invalid(format!(
                "{folder} is nested too deeply, or part of a cycle of links"
            )));
        }
        let outer = rules.as_ref().map_or(0, Vec::len);
        if let Some(rules) = rules
            && folder.join(IGNORE_FILE).exists()
        {
            let text = self.text_at(&folder.join(IGNORE_FILE))?;
            rules.push((prefix.len(), parse(&text)));
        }
        let mut entries: Vec<_> = folder
            .read_dir_utf8()
            .and_then(Iterator::collect::<Result<_, _>>)
            .map_err(|error| unreadable(folder, &error))?;
        entries.sort_by(|a, b| a.file_name().cmp(b.file_name()));
        let is_empty = entries.is_empty();
        for entry in entries {
            let name = entry.file_name();
            let path = if prefix.is_empty() { name.into() } else { format!("{prefix}/{name}") };
            let full = entry.path();
            let is_dir = full.is_dir();
            if rules
                .as_ref()
                .is_some_and(|rules| name == IGNORE_FILE || is_ignored(rules, &path, is_dir))
            {
                continue;
            }
            self.check_inside(full)?;
            let metadata = fs::symlink_metadata(full).map_err(|e| unreadable(full, &e))?;
            if metadata.is_symlink() {
                let target = full.read_link_utf8().map_err(|e| unreadable(full, &e))?;
                if is_dir {
                    let real = folder.canonicalize_utf8().map_err(|e| unreadable(folder, &e))?;
                    let mut above = real.ancestors().map(Utf8Path::to_owned).collect();
                    self.follow(full, &mut above, &mut 0)?;
                }
                self.count(full, target.as_str().len() as u64)?;
                let content = target.into_string().into_bytes();
                found.push(HarborFile { path, mode: 0o120_777, content });
            } else if is_dir {
                self.visit(full, &path, rules, found, depth - 1)?;
            } else if metadata.is_file() {
                let content = self.content(full)?;
                let mode = metadata.permissions().mode() & 0o777;
                found.push(HarborFile { path, mode, content });
            } else {
                return Err(HarborProblem::invalid(format!("{full} is not a regular file")));
            }
        }
        if is_empty && !prefix.is_empty() {
            let mode = FOLDER_MODE | 0o755;
            found.push(HarborFile { path: prefix.to_owned(), mode, content: Vec::new() });
        }
        if let Some(rules) = rules {
            rules.truncate(outer);
        }
        Ok(())
    }

    /// Checks a link to a folder: it may neither form a cycle nor lead out of the task folder.
    fn follow(
        &self,
        folder: &Utf8Path,
        above: &mut Vec<Utf8PathBuf>,
        count: &mut usize,
    ) -> Result<(), HarborProblem> {
        self.check_inside(folder)?;
        let real = folder.canonicalize_utf8().map_err(|e| unreadable(folder, &e))?;
        *count += 1;
        if above.contains(&real) || *count > MAX_FILES {
            return Err(HarborProblem::invalid(format!("{folder} is part of a cycle of links")));
        }
        above.push(real);
        for entry in folder.read_dir_utf8().map_err(|e| unreadable(folder, &e))? {
            let entry = entry.map_err(|error| unreadable(folder, &error))?;
            self.check_inside(entry.path())?;
            if entry.path().is_dir() {
                self.follow(entry.path(), above, count)?;
            }
        }
        above.pop();
        Ok(())
    }

    fn text_at(&mut self, path: &Utf8Path) -> Result<String, HarborProblem> {
        self.check_inside(path)?;
        Ok(String::from_utf8_lossy(&self.content(path)?).into_owned())
    }

    fn content(&mut self, path: &Utf8Path) -> Result<Vec<u8>, HarborProblem> {
        let size = fs::metadata(path).map_err(|e| unreadable(path, &e))?.len();
        self.count(path, size)?;
        fs::read(path).map_err(|error| unreadable(path, &error))
    }

    fn count(&mut self, path: &Utf8Path, bytes: u64) -> Result<(), HarborProblem> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.files += 1;
        if self.bytes > MAX_BYTES || self.files > MAX_FILES {
            return Err(HarborProblem::unsupported(format!(
                "more than {} MiB or {MAX_FILES} files in a task folder, reached at {path}",
                MAX_BYTES >> 20
            )));
        }
        Ok(())
    }

    /// Links may not lead out of the task folder.
    pub(super) fn check_inside(&self, path: &Utf8Path) -> Result<(), HarborProblem> {
        let is_inside = match path.canonicalize_utf8() {
            Ok(real) => real.starts_with(&self.root),
            // A dangling link is kept as it is.
            Err(_) => path.read_link_utf8().is_ok_and(|target| {
                !target.is_absolute() && target.components().all(|part| part.as_str() != "..")
            }),
        };
        if is_inside {
            return Ok(());
        }
        Err(HarborProblem::invalid(format!("{path} leads out of the task folder")))
    }
}

fn unreadable(path: &Utf8Path, error: &std::io::Error) -> HarborProblem {
    HarborProblem::invalid(format!("cannot read {path}: {error}"))
}

fn parse(text: &str) -> Gitignore {
    let mut builder = GitignoreBuilder::new("");
    for line in text.lines() {
        // Invalid patterns have no effect.
        let _ = builder.add_line(None, line);
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

/// Whether the innermost matching rule ignores the entry.
fn is_ignored(rules: &[FolderRules], path: &str, is_dir: bool) -> bool {
    let mut ignored = false;
    for (length, rule) in rules {
        let inner = path.get(*length..).unwrap_or(path).trim_start_matches('/');
        match rule.matched(inner, is_dir) {
            Match::None => {}
            Match::Ignore(_) => ignored = true,
            Match::Whitelist(_) => ignored = false,
        }
    }
    ignored
}
