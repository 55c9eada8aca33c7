//! Which paths of a change may reach the tree that is graded.
//!
//! The invariant: a path that is refused never reaches a strictly graded tree, by any
//! author and in any form of the diff. The rules depend on the path alone, except that a new module
//! may not take the name of one that Python or pytest import.

use crate::finding::Finding;
use camino::Utf8Path;

/// Checks `path` (relative to the tree, `/` between its parts) against the rules of strict grading.
///
/// `existed` says whether a path of the given tree exists before the change; it is asked for the
/// first file or folder of a top-level module, for example `random.py` or `src/attr`.
///
/// # Errors
/// The reason why the path must not reach the graded tree.
pub fn check_path(path: &str, existed: impl Fn(&str) -> bool) -> Result<(), Finding> {
    let refused = environment(path)
        .or_else(|| git_settings(path))
        .or_else(|| runner(path))
        .or_else(|| configuration(path))
        .or_else(|| test(path))
        .or_else(|| shadowed(path, existed));
    refused.map_or(Ok(()), Err)
}

/// Whether [`check_path`] accepts `path`.
pub fn is_gradable_path(path: &str, existed: impl Fn(&str) -> bool) -> bool {
    check_path(path, existed).is_ok()
}

/// Whether `path` can be part of a change at all, whatever grades it: a source file, and not part of
/// an environment, a cache or the metadata of version control.
pub fn is_source_path(path: &str) -> bool {
    environment(path).is_none()
}

/// File names that Python runs by itself when it starts.
const START_UP: &[&str] = &["sitecustomize.py", "usercustomize.py", "pyvenv.cfg"];

/// Folders that Python imports by itself as packages.
const START_UP_FOLDERS: &[&str] = &["sitecustomize", "usercustomize"];

/// Folders that hold installed packages, caches or version-control metadata.
const ENVIRONMENT_FOLDERS: &[&str] = &[
    ".venv",
    ".tox",
    ".nox",
    ".hg",
    ".svn",
    "__pycache__",
    "__pypackages__",
    "site-packages",
    "dist-packages",
];

/// Extensions of files that Python loads without showing their source.
const BINARY_EXTENSIONS: &[&str] = &["pyc", "pyo", "pyd", "so", "dylib", "dll", "pth", "egg"];

fn environment(path: &str) -> Option<Finding> {
    let invalid = path.is_empty()
        || path.starts_with('/')
        || path.chars().any(char::is_control)
        || path.split('/').any(|part| matches!(part, "" | "." | ".."));
    let part = |part: &str| {
        let lower = part.to_ascii_lowercase();
        // On some file systems these all name the folder of git.
        lower == ".git"
            || lower.starts_with("git~")
            || ENVIRONMENT_FOLDERS.contains(&lower.as_str())
            || START_UP_FOLDERS.contains(&lower.as_str())
            || [".egg-info", ".dist-info", ".egg-link"].iter().any(|end| lower.ends_with(end))
    };
    let name = file_name(path).to_ascii_lowercase();
    let is_binary = name.rsplit_once('.').is_some_and(|(_, end)| BINARY_EXTENSIONS.contains(&end))
        || name.contains(".so.");
    let is_refused =
        invalid || is_binary || START_UP.contains(&name.as_str()) || path.split('/').any(part);
    is_refused.then_some(Finding::EnvironmentTouched)
}

/// Files in a tree by which git changes what it reads or writes.
fn git_settings(path: &str) -> Option<Finding> {
    let lower = path.to_ascii_lowercase();
    let is_setting = lower.split('/').any(|part| part.starts_with(".git") && part != ".github");
    is_setting.then_some(Finding::EnvironmentTouched)
}

fn runner(path: &str) -> Option<Finding> {
    is_runner_path(path).then_some(Finding::RunnerTouched)
}

/// Whether a path belongs to the hidden tests or their runner.
pub(super) fn is_runner_path(path: &str) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    matches!(first, "r2e_tests" | "run_tests.sh" | ".grading")
}

/// Files by which pytest, unittest, coverage, tox and setuptools load code or select tests.
const CONFIGURATION: &[&str] = &[
    "setup.cfg",
    "tox.ini",
    "pyproject.toml",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    ".coveragerc",
    "nose2.cfg",
    "unittest.cfg",
    ".noserc",
    "nose.cfg",
    ".testr.conf",
    ".stestr.conf",
    "entry_points.txt",
];

fn configuration(path: &str) -> Option<Finding> {
    match file_name(path) {
        "conftest.py" => Some(Finding::ConftestTouched),
        // A package replaces the module.
        _ if path.split('/').any(|part| part == "conftest") => Some(Finding::ConftestTouched),
        name if CONFIGURATION.contains(&name) => Some(Finding::ConfigTouched),
        _ => None,
    }
}

/// Whether a path belongs to the tests, by the rule that keeps tests out of gold patches.
pub fn is_test_path(path: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    let is_folder = |part: &str| matches!(part, "tests" | "Tests" | "test" | "Test");
    folders.split('/').any(is_folder)
        || is_folder(name)
        || name.starts_with("test_") && is_python(name)
        || name.ends_with("_test.py")
}

fn test(path: &str) -> Option<Finding> {
    is_test_path(path).then_some(Finding::TestsChanged)
}

/// Folders that may be on Python's search path, so that a module in them has no package.
pub(super) const ROOTS: &[&str] = &["src/", "lib/", "python/"];

fn shadowed(path: &str, existed: impl Fn(&str) -> bool) -> Option<Finding> {
    let root = ROOTS.iter().find(|root| path.starts_with(**root)).copied().unwrap_or_default();
    // `src` itself may be a package.
    [root, ""].iter().find_map(|root| {
        let first = path.strip_prefix(root)?.split('/').next()?;
        let module = first.strip_suffix(".py").unwrap_or(first);
        let imported = STANDARD.contains(&module) || TEST_TOOLS.contains(&module);
        let loads = first != module || is_python(path);
        (imported && loads && !existed(&format!("{root}{first}"))).then_some(Finding::ShadowsModule)
    })
}

/// Whether Python can import the file. Extensions are case-sensitive.
fn is_python(path: &str) -> bool {
    Utf8Path::new(path).extension() == Some("py")
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Modules that test runners import.
const TEST_TOOLS: &[&str] = &[
    "pytest",
    "_pytest",
    "py",
    "pluggy",
    "iniconfig",
    "packaging",
    "exceptiongroup",
    "tomli",
    "attr",
    "attrs",
    "more_itertools",
    "colorama",
    "pygments",
    "setuptools",
    "pip",
    "wheel",
    "build",
    "pkg_resources",
    "importlib_metadata",
    "typing_extensions",
    "zipp",
    "hypothesis",
    "mock",
    "nose",
    "coverage",
    "pytest_asyncio",
    "pytest_cov",
    "pytest_mock",
    "pytest_timeout",
    "xdist",
    "execnet",
    "_distutils_hack",
];

/// Modules of Python's standard library.
#[rustfmt::skip]
const STANDARD: &[&str] = &[
    "abc", "aifc", "argparse", "array", "ast", "asynchat", "asyncio", "asyncore", "atexit",
    "audioop", "base64", "bdb", "binascii", "binhex", "bisect", "builtins", "bz2", "cProfile",
    "calendar", "cgi", "cgitb", "chunk", "cmath", "cmd", "code", "codecs", "codeop", "collections",
    "colorsys", "compileall", "concurrent", "configparser", "contextlib", "contextvars", "copy",
    "copyreg", "crypt", "csv", "ctypes", "curses", "dataclasses", "datetime", "dbm", "decimal",
    "difflib", "dis", "distutils", "doctest", "dummy_threading", "email", "encodings", "ensurepip",
    "enum", "errno", "faulthandler", "fcntl", "filecmp", "fileinput", "fnmatch", "formatter",
    "fractions", "ftplib", "functools", "gc", "genericpath", "getopt", "getpass", "gettext", "glob",
    "graphlib", "grp", "gzip", "hashlib", "heapq", "hmac", "html", "http", "imaplib", "imghdr",
    "imp", "importlib", "inspect", "io", "ipaddress", "itertools", "json", "keyword", "linecache",
    "locale", "logging", "lzma", "macpath", "mailbox", "mailcap", "marshal", "math", "mimetypes",
    "mmap", "modulefinder", "msilib", "msvcrt", "multiprocessing", "netrc", "nis", "nntplib", "nt",
    "ntpath", "nturl2path", "numbers", "opcode", "operator", "optparse", "os", "ossaudiodev",
    "parser", "pathlib", "pdb", "pickle", "pickletools", "pipes", "pkgutil", "platform", "plistlib",
    "poplib", "posix", "posixpath", "pprint", "profile", "pstats", "pty", "pwd", "py_compile",
    "pyclbr", "pydoc", "pydoc_data", "pyexpat", "queue", "quopri", "random", "re", "readline",
    "reprlib", "resource", "rlcompleter", "runpy", "sched", "secrets", "select", "selectors",
    "shelve", "shlex", "shutil", "signal", "site", "smtpd", "smtplib", "sndhdr", "socket",
    "socketserver", "spwd", "sqlite3", "sre_compile", "sre_constants", "sre_parse", "ssl", "stat",
    "statistics", "string", "stringprep", "struct", "subprocess", "sunau", "symbol", "symtable",
    "sys", "sysconfig", "syslog", "tabnanny", "tarfile", "telnetlib", "tempfile", "termios",
    "textwrap", "threading", "time", "timeit", "tkinter", "token", "tokenize", "tomllib", "trace",
    "traceback", "tracemalloc", "tty", "types", "typing", "unicodedata", "unittest", "urllib", "uu",
    "uuid", "venv", "warnings", "wave", "weakref", "webbrowser", "winreg", "winsound", "wsgiref",
    "xdrlib", "xml", "xmlrpc", "zipapp", "zipfile", "zipimport", "zlib", "zoneinfo",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str) -> Result<(), Finding> {
        check_path(path, |existing| existing == "attr")
    }

    #[test]
    fn sources_data_and_documentation_are_gradable() {
        for path in [
            "calc.py",
            "pkg/random.py",
            "src/pkg/core.py",
            "pkg/testing/util.py",
            "pkg/contest.py",
            "docs/index.rst",
            "setup.py",
            ".github/workflows/x.yml",
            "attr/_new.py",
            "types.txt",
            "logging/README",
            "name with space.py",
        ] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
    }

    #[test]
    fn everything_that_tests_or_python_load_by_themselves_is_refused() {
        for (finding, paths) in [
            (
                Finding::EnvironmentTouched,
                &[
                    ".git/config",
                    "sub/.git",
                    ".GIT/x",
                    ".gitattributes",
                    "pkg/.gitmodules",
                    ".venv/lib/evil.pth",
                    "evil.pth",
                    "pkg/__pycache__/core.cpython-311.pyc",
                    "pkg/core.pyc",
                    "pkg/_fast.cpython-311-x86_64-linux-gnu.so",
                    "lib.so.1",
                    "x.egg-info/entry_points.txt",
                    "sitecustomize.py",
                    "src/usercustomize.py",
                    "../out.py",
                    "/abs.py",
                    "a//b",
                    "a\nb.py",
                    "",
                ][..],
            ),
            (Finding::RunnerTouched, &["r2e_tests/test_1.py", "r2e_tests", "run_tests.sh"]),
            (
                Finding::ConftestTouched,
                &["conftest.py", "tests/conftest.py", "conftest/__init__.py"],
            ),
            (
                Finding::ConfigTouched,
                &["setup.cfg", "tox.ini", "sub/pytest.ini", "pyproject.toml", ".coveragerc"],
            ),
            (Finding::TestsChanged, &["tests/helper.py", "pkg/test_a.py", "a_test.py", "tests"]),
            (
                Finding::ShadowsModule,
                &[
                    "random.py",
                    "pytest.py",
                    "_pytest/reports.py",
                    "src/unittest.py",
                    "json/__init__.py",
                ],
            ),
        ] {
            for path in paths {
                assert_eq!(check(path), Err(finding), "{path:?}");
                assert!(!is_gradable_path(path, |_| false));
            }
        }
    }

    #[test]
    fn the_rule_for_every_change_allows_tests_and_settings() {
        for path in [
            "tests/test_a.py",
            "setup.cfg",
            "conftest.py",
            "random.py",
            "src/git.py",
            "docs/site/x.md",
            ".gitignore",
            "venv/a.py",
            "a b.py",
        ] {
            assert!(is_source_path(path), "{path}");
        }
        for path in [
            ".git/config",
            "sub/.GIT/hooks/x",
            ".venv/lib/x.py",
            "x.pyc",
            "evil.pth",
            "x/__pycache__/y.py",
            "lib/site-packages/x.py",
            "sitecustomize.py",
            "usercustomize/__init__.py",
            "env/pyvenv.cfg",
            "fast.cpython-311.so",
            "lib.so.1",
            "a\nb.py",
            "a\u{1b}[2J.py",
        ] {
            assert!(!is_source_path(path), "{path}");
        }
    }
}
