//! The harness's table of repositories: how the tests of each version are run and their log is
//! parsed.

use super::SweFamily;
use super::gym;
use super::parsers::LogParser;

/// How the tests of some versions of a repository are run and their log is parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Repository, `owner/name`.
    pub repo: &'static str,
    /// Versions, separated by spaces.
    pub versions: &'static str,
    /// Shell command to which the test files are appended.
    pub test_command: &'static str,
    /// Shell command that installs the repository again before the tests run.
    pub install: &'static str,
    /// Shell commands that run first in the repository, such as setting the locale.
    pub setup: &'static [&'static str],
    /// Parser of the test log.
    pub parser: LogParser,
}

/// The table has no entry for a row, so its tests cannot be run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    /// The repository is unknown.
    #[error(
        "repository `{0}` is not in the tables of SWE-bench and SWE-Gym, and the row has no \
         `eval_script` or `install_config`"
    )]
    Repo(String),
    /// The repository is unknown, and the harness does not read the row's own script.
    #[error(
        "repository `{0}` is not in the table of SWE-bench's harness 4.1.0, which does not read the \
         column `eval_script`"
    )]
    OwnScript(String),
    /// The repository is known, but not this version of it.
    #[error("version `{version}` of `{repo}` is not in the data set's table; known: {known}")]
    Version {
        /// The repository, `owner/name`.
        repo: String,
        /// The version that the row names.
        version: String,
        /// The known versions of the repository, separated by spaces.
        known: String,
    },
}

/// The entry for a version of a repository in the table of a row's data set.
///
/// # Errors
/// If the repository or the version is unknown.
pub(super) fn spec(
    family: SweFamily,
    repo: &str,
    version: &str,
) -> Result<&'static Spec, SpecError> {
    let of_repo = || of(family, repo);
    let found = of_repo().find(|spec| spec.versions.split(' ').any(|known| known == version));
    found.ok_or_else(|| {
        let known: Vec<_> = of_repo().map(|spec| spec.versions).collect();
        if known.is_empty() {
            return SpecError::Repo(repo.to_owned());
        }
        SpecError::Version { repo: repo.into(), version: version.into(), known: known.join(" ") }
    })
}

/// The entries of a repository in SWE-bench's table, or in SWE-Gym's, which ignores case.
fn of(family: SweFamily, repo: &str) -> impl Iterator<Item = &'static Spec> {
    let is_gym = family == SweFamily::SweGym;
    let table = if is_gym { gym::SPECS } else { SPECS };
    table
        .iter()
        .filter(move |spec| spec.repo == repo || is_gym && spec.repo.eq_ignore_ascii_case(repo))
}

/// The log parser of a repository, whatever its version.
pub(super) fn parser(family: SweFamily, repo: &str) -> Option<LogParser> {
    of(family, repo).next().map(|spec| spec.parser)
}

/// Whether a repository is one of those that SWE-Gym adds to SWE-bench's.
pub(super) fn is_of_gym(repo: &str) -> bool {
    gym::SPECS.iter().any(|spec| spec.repo.eq_ignore_ascii_case(repo))
}

const PYTEST: &str = "pytest -rA";
const EDITABLE: &str = "python -m pip install -e .";
const DJANGO: &str = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1";
const DJANGO_LOCALE: &[&str] = &[
    "export LANG=en_US.UTF-8",
    "export LC_ALL=en_US.UTF-8",
    "export PYTHONIOENCODING=utf8",
    "export LANGUAGE=en_US:en",
];

/// An entry that runs `pytest -rA` after an editable install.
const fn plain(repo: &'static str, versions: &'static str, parser: LogParser) -> Spec {
    Spec { repo, versions, test_command: PYTEST, install: EDITABLE, setup: &[], parser }
}

const fn django(versions: &'static str, install: &'static str) -> Spec {
    let (repo, parser) = ("django/django", LogParser::Django);
    Spec { repo, versions, test_command: DJANGO, install, setup: &[], parser }
}

/// The table of version 4.1.0 of the harness: the twelve repositories of SWE-bench's test split,
/// then those of its development split.
pub const SPECS: &[Spec] = &[
    Spec {
        install: "python -m pip install -e .[test] --verbose",
        ..plain("astropy/astropy", "3.0 3.1 3.2 4.1 4.2 4.3 5.0 5.1 5.2 v5.3", LogParser::PytestV2)
    },
    Spec {
        test_command: "pytest -rA -vv -o console_output_style=classic --tb=no",
        install: "python -m pip install -e .[test] --verbose",
        ..plain("astropy/astropy", "0.1 0.2 0.3 0.4 1.1 1.2 1.3", LogParser::PytestV2)
    },
    Spec {
        setup: DJANGO_LOCALE,
        ..django("1.7 1.8 1.10 1.11 2.0 2.1 2.2", "python setup.py install")
    },
    Spec {
        test_command: "./tests/runtests.py --verbosity 2",
        setup: DJANGO_LOCALE,
        ..django("1.9", "python setup.py install")
    },
    django("1.4 1.5 1.6", "python setup.py install"),
    Spec {
        setup: &[
            "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen",
            "export LANG=en_US.UTF-8",
            "export LANGUAGE=en_US:en",
            "export LC_ALL=en_US.UTF-8",
        ],
        ..django("3.0 3.1 3.2", EDITABLE)
    },
    django("4.0 4.1 4.2 5.0 5.1 5.2", EDITABLE),
    plain("matplotlib/matplotlib", "3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7", LogParser::Matplotlib),
    Spec {
        install: "python -m pip install --no-build-isolation -e \".[dev]\"",
        ..plain("matplotlib/matplotlib", "3.8 3.9", LogParser::Matplotlib)
    },
    Spec {
        install: "python setup.py build; python setup.py install",
        ..plain(
            "matplotlib/matplotlib",
            "1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1 2.2",
            LogParser::Matplotlib,
        )
    },
    Spec {
        test_command: "pytest --no-header -rA",
        ..plain("mwaskom/seaborn", "0.11", LogParser::Seaborn)
    },
    Spec {
        test_command: "pytest --no-header -rA",
        install: "python -m pip install -e .[dev]",
        ..plain("mwaskom/seaborn", "0.12 0.13 0.14", LogParser::Seaborn)
    },
    plain("pallets/flask", "2.0 2.1 2.2 2.3 3.0 3.1", LogParser::Pytest),
    Spec {
        install: "python -m pip install .",
        ..plain(
            "psf/requests",
            "0.7 0.8 0.9 0.11 0.13 0.14 1.1 1.2 2.0 2.2 2.3 2.4 2.5 2.7 2.8 2.9 2.10 2.11 2.12 \
             2.17 2.18 2.19 2.22 2.25 2.26 2.27 2.31 3.0",
            LogParser::PytestOptions,
        )
    },
    plain(
        "pydata/xarray",
        "0.12 0.18 0.19 0.20 2022.03 2022.06 2022.09 2023.07 2024.05",
        LogParser::Pytest,
    ),
    plain(
        "pylint-dev/pylint",
        "2.8 2.9 2.10 2.11 2.13 2.14 2.15 2.16 2.17 3.0 3.1 3.2 3.3 4.0",
        LogParser::PytestOptions,
    ),
    plain(
        "pytest-dev/pytest",
        "4.4 4.5 4.6 5.0 5.1 5.2 5.3 5.4 6.0 6.2 6.3 7.0 7.1 7.2 7.4 8.0 8.1 8.2 8.3 8.4",
        LogParser::Pytest,
    ),
    Spec {
        install: "python -m pip install -v --no-use-pep517 --no-build-isolation -e .",
        ..plain("scikit-learn/scikit-learn", "0.20 0.21 0.22 1.3 1.4 1.5 1.6", LogParser::PytestV2)
    },
    Spec {
        test_command: "tox --current-env -epy39 -v --",
        install: "python -m pip install -e .[test]",
        ..plain(
            "sphinx-doc/sphinx",
            "1.5 1.6 1.7 1.8 2.0 2.1 2.2 2.3 2.4 3.0 3.1 3.2 3.3 3.4 3.5 4.0 4.1 4.2 4.3 4.4 4.5 \
             5.0 5.1 5.2 5.3 6.0 6.2 7.0 7.1 7.2 7.3 7.4 8.0 8.1",
            LogParser::PytestV2,
        )
    },
    Spec {
        test_command: "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C \
                       --verbose",
        ..plain(
            "sympy/sympy",
            "0.7 1.0 1.1 1.2 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 1.12 1.13 1.14",
            LogParser::Sympy,
        )
    },
    Spec {
        install: "python -m pip install -e '.[dev]'",
        ..plain(
            "marshmallow-code/marshmallow",
            "2.18 2.19 2.20 3.0 3.1 3.2 3.4 3.8 3.9 3.10 3.11 3.12 3.13 3.15 3.16 3.19",
            LogParser::Pytest,
        )
    },
    Spec {
        install: "python -m pip install -e .[all]",
        ..plain("pvlib/pvlib-python", "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9", LogParser::Pytest)
    },
    plain(
        "pydicom/pydicom",
        "1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2 2.3 2.4 3.0",
        LogParser::PytestOptions,
    ),
    plain(
        "pylint-dev/astroid",
        "2.5 2.6 2.7 2.8 2.9 2.10 2.12 2.13 2.14 2.15 2.16 3.0",
        LogParser::Pytest,
    ),
    plain(
        "pyvista/pyvista",
        "0.20 0.21 0.22 0.23 0.24 0.25 0.26 0.27 0.28 0.29 0.30 0.31 0.32 0.33 0.34 0.35 0.36 \
         0.37 0.38 0.39 0.40 0.41 0.42 0.43",
        LogParser::Pytest,
    ),
    plain(
        "sqlfluff/sqlfluff",
        "0.4 0.5 0.6 0.8 0.9 0.10 0.11 0.12 0.13 1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2",
        LogParser::Pytest,
    ),
];
