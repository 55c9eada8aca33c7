//! Symbolic links in a change.
//!
//! The invariant: a link that reaches a graded tree points to another path of that tree, and gives no
//! file a name under which the test runner or Python would load it by themselves.

use super::parse::header_path;
use super::rules::{ROOTS, check_path, is_runner_path, is_source_path};
use crate::finding::Finding;
use std::collections::BTreeMap;

/// The path in the tree that the link `path` points to.
///
/// # Errors
/// [`Finding::LinkOutside`] if the target is absolute or outside of the tree, or not a path, and
/// [`Finding::EnvironmentTouched`] if it cannot be part of a change itself.
pub fn link_target(path: &str, target: &[u8]) -> Result<String, Finding> {
    let target = std::str::from_utf8(target).map_err(|_| Finding::LinkOutside)?;
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    if target.is_empty() || target.starts_with('/') {
        return Err(Finding::LinkOutside);
    }
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop().ok_or(Finding::LinkOutside)?;
            }
            part => parts.push(part),
        }
    }
    if parts.is_empty() {
        // Programs that follow links would walk a tree that contains itself without end.
        return Err(Finding::LinkOutside);
    }
    let resolved = parts.join("/");
    if is_source_path(&resolved) { Ok(resolved) } else { Err(Finding::EnvironmentTouched) }
}

/// Checks a link against the rules of strict grading, as [`check_path`] does for a file. A link may
/// stand for a folder, so its name must be allowed for one, and it may not be a folder from which
/// Python imports.
///
/// # Errors
/// The reason why the link must not reach the graded tree.
pub fn check_link(
    path: &str,
    target: &[u8],
    existed: impl Fn(&str) -> bool,
) -> Result<(), Finding> {
    let resolved = link_target(path, target)?;
    check_path(path, &existed)?;
    check_path(&format!("{path}/module.py"), &existed)?;
    if ROOTS.iter().any(|root| root.trim_end_matches('/') == path) {
        return Err(Finding::ShadowsModule);
    }
    if is_runner_path(&resolved) { Err(Finding::RunnerTouched) } else { Ok(()) }
}

/// The links that a diff in git's format creates, with their targets; `None` if a path cannot be
/// read. A target that cannot be read is empty, which no rule accepts.
pub fn created_links(patch: &str) -> Option<BTreeMap<String, String>> {
    let mut links = BTreeMap::new();
    let mut header = None;
    let mut lines = patch.lines();
    while let Some(line) = lines.next() {
        if let Some(names) = line.strip_prefix("diff --git ") {
            header = Some(names);
        } else if line.starts_with("new file mode 12") {
            let path = header.and_then(header_path)?;
            links.insert(path, target(lines.clone()).unwrap_or_default().to_owned());
        }
    }
    Some(links)
}

/// The only line that a diff adds to a new link.
fn target<'a>(lines: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut lines = lines.skip_while(|line| line.starts_with("index "));
    let head = [lines.next()?, lines.next()?, lines.next()?];
    let is_new = head[0] == "--- /dev/null" && head[1].starts_with("+++ ");
    let added = lines.next()?.strip_prefix('+')?;
    let is_whole = head[2] == "@@ -0,0 +1 @@" && lines.next()?.starts_with("\\ ");
    (is_new && is_whole).then_some(added)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_paths_of_the_tree() {
        for (path, target, resolved) in [
            ("link", "calc.py", "calc.py"),
            ("pkg/link", "../calc.py", "calc.py"),
            ("pkg/deep/link", "..//./other/x", "pkg/other/x"),
            ("link", "a/../b", "b"),
        ] {
            assert_eq!(link_target(path, target.as_bytes()).as_deref(), Ok(resolved));
        }
        for (path, target) in [
            ("link", &b"/etc/passwd"[..]),
            ("link", b"/testbed/calc.py"),
            ("link", b"../x"),
            ("pkg/link", b"../../testbed/x"),
            ("link", b"a/../../b"),
            ("link", b"."),
            ("pkg/link", b".."),
            ("link", b""),
            ("link", b"caf\xe9"),
        ] {
            assert_eq!(link_target(path, target), Err(Finding::LinkOutside), "{path}: {target:?}");
        }
        for target in [".git/config", ".venv/lib", "a\nb", "x.pth"] {
            let refused = link_target("link", target.as_bytes());
            assert_eq!(refused, Err(Finding::EnvironmentTouched), "{target:?}");
        }
    }

    #[test]
    fn links_are_refused_where_a_file_or_a_folder_would_be() {
        let check = |path: &str, target: &str| {
            check_link(path, target.as_bytes(), |existing| existing == "attr")
        };
        for (path, target) in [("calc.py", "impl.py"), ("pkg/new", "../docs"), ("attr", "attrs")] {
            assert_eq!(check(path, target), Ok(()), "{path}");
        }
        for (path, target, finding) in [
            ("random.py", "pkg/own.py", Finding::ShadowsModule),
            // A package of this name, although no file has it.
            ("random", "pkg", Finding::ShadowsModule),
            ("src/unittest", "../pkg", Finding::ShadowsModule),
            ("src", "pkg", Finding::ShadowsModule),
            ("lib", "pkg", Finding::ShadowsModule),
            ("conftest.py", "pkg/own.py", Finding::ConftestTouched),
            ("pkg/conftest", "own", Finding::ConftestTouched),
            ("pkg/tests", "own", Finding::TestsChanged),
            ("setup.cfg", "own.cfg", Finding::ConfigTouched),
            ("sitecustomize", "pkg", Finding::EnvironmentTouched),
            ("pkg/x.py", "../r2e_tests/test_1.py", Finding::RunnerTouched),
            ("pkg/x.py", "../../x.py", Finding::LinkOutside),
        ] {
            assert_eq!(check(path, target), Err(finding), "{path} -> {target}");
        }
    }

    #[test]
    fn created_links_are_found_in_a_diff() {
        let patch = "diff --git a/x b/x\ndeleted file mode 100644\n--- a/x\n+++ /dev/null\n\
            @@ -1 +0,0 @@\n-new file mode 120000\ndiff --git a/x b/x\nnew file mode 120000\n\
            index 0000000..1234567\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a b/c\n\
            \\ No newline at end of file\ndiff --git a/y b/y\nnew file mode 120000\n\
            GIT binary patch\nliteral 0\nHcmV?d00001\n\n";
        let links = created_links(patch).unwrap();
        let expected = [("x", "a b/c"), ("y", "")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(links, BTreeMap::from(expected));
        assert_eq!(created_links("diff --git x y\nnew file mode 120000\n"), None);
    }
}
