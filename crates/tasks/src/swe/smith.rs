//! SWE-smith: bugs that were injected into fixed commits of repositories.
//!
//! A row's `patch` is the bug. A task starts from the image's tree with that bug applied, and the
//! agent's copy lacks the test files of `FAIL_TO_PASS`. SWE-smith's own containers fetch a branch
//! with these two commits; applying the patch to the image's tree gives the same tree without a
//! network.

use super::parsers::LogParser;
use super::row::SweRow;
use crate::column::ColumnProblem;
use crate::patch::{self, is_inside};
use std::collections::BTreeSet;

/// Repositories, as `OWNER__NAME.COMMIT`, whose whole test suite runs.
const WHOLE_SUITE: &str = "\
    adrienverge__yamllint.8513d9b9 agronholm__exceptiongroup.0b4f4937 \
    agronholm__typeguard.b6a7e438 aio-libs__async-timeout.d0baa9f1 \
    alanjds__drf-nested-routers.6144169d alecthomas__voluptuous.a7a55f83 \
    amueller__word_cloud.ec24191c andialbrecht__sqlparse.e57923b3 arrow-py__arrow.1d70d009 \
    benoitc__gunicorn.bacbf8aa borntyping__python-colorlog.dfa10f59 bottlepy__bottle.a8dfef30 \
    buriy__python-readability.40256f40 burnash__gspread.a8be3b96 cantools__cantools.0c6a7871 \
    chardet__chardet.9630f238 cknd__stackprinter.219fcc52 cloudpipe__cloudpickle.6220b0ce \
    Cog-Creators__Red-DiscordBot.33e0eac7 cookiecutter__cookiecutter.b4451231 \
    cool-RR__PySnooper.57472b46 datamade__usaddress.a42a8f0c davidhalter__parso.338a5760 \
    dbader__schedule.82a43db1 django-money__django-money.835c1ab8 django__channels.a144b4b8 \
    django__daphne.32ac73e1 encode__starlette.db5063c2 erikrose__parsimonious.0d3f5f93 \
    facebookresearch__fvcore.a491d5b9 facebookresearch__hydra.0f03eb60 \
    facelessuser__soupsieve.a8080d97 gawel__pyquery.811cd048 getnikola__nikola.0f4c230e \
    google__textfsm.c31b6007 graphql-python__graphene.82903263 gruns__furl.da386f68 \
    gruns__icecream.f76fef56 gweis__isodate.17cb25eb hukkin__tomli.443a0c1b \
    Instagram__MonkeyType.70c3acf6 jaraco__inflect.c079a96a jawah__charset_normalizer.1fdd6463 \
    jd__tenacity.0d40e76f john-kurkowski__tldextract.3d1bf184 joke2k__faker.8b401a7d \
    jsvine__pdfplumber.02ff4313 kayak__pypika.1c9646f0 keleshev__schema.24a30457 \
    kennethreitz__records.5941ab27 Knio__dominate.9082227e kurtmckee__feedparser.cad965a3 \
    lepture__mistune.bf54ef67 life4__textdistance.c3aca916 lincolnloop__python-qrcode.456b01d4 \
    luozhouyang__python-string-similarity.115acaac madzak__python-json-logger.5f85723f \
    mahmoud__boltons.3bfcfdd0 mahmoud__glom.fb3c4e76 marshmallow-code__apispec.8b421526 \
    marshmallow-code__marshmallow.9716fc62 marshmallow-code__webargs.dbde72fe \
    martinblech__xmltodict.0952f382 matthewwithanm__python-markdownify.6258f5c3 \
    mewwts__addict.75284f95 Mimino666__langdetect.a1598f1a mozilla__bleach.73871d76 \
    mozillazg__python-pinyin.e42dede5 msiemens__tinydb.10644a0e oauthlib__oauthlib.1fd52536 \
    pallets__click.fde47b4b pallets__flask.bc098406 pallets__jinja.ada0a9a6 \
    pallets__markupsafe.620c06c9 pdfminer__pdfminer.six.1a8bd2f7 pexpect__ptyprocess.1067dbda \
    pndurette__gTTS.dbcda4f3 prettytable__prettytable.ca90b055 pudo__dataset.5c2dc8d3 \
    pwaller__pyfiglet.f8c5f35b pyasn1__pyasn1.0f07d724 pyca__pyopenssl.04766a49 \
    PyCQA__flake8.cf1542ce pydata__patsy.a5d16484 pydicom__pydicom.7d361b3d \
    pygments__pygments.27649ebb pylint-dev__astroid.b114f6b5 pyparsing__pyparsing.533adf47 \
    pytest-dev__iniconfig.16793ead python-hyper__h11.bed0dd4a \
    python-jsonschema__jsonschema.93e0caa5 python-openxml__python-docx.0cf6d71f \
    python-trio__trio.cfbbe2c1 pyupio__safety.7654596b pyutils__line_profiler.a646bf0f \
    r1chardj0n3s__parse.30da9e4f rsalmei__alive-progress.35853799 rubik__radon.54b88e58 \
    rustedpy__result.0b855e1e scanny__python-pptx.278b47b1 seatgeek__thefuzz.8a05a3ee \
    seperman__deepdiff.ed252022 sloria__environs.73c372df spulec__freezegun.5f171db0 \
    stanfordnlp__dspy.651a4c71 stanfordnlp__string2string.c4a72f59 Suor__funcy.207a7810 \
    termcolor__termcolor.3a42086f theskumar__python-dotenv.2b8635b7 tox-dev__pipdeptree.c31b6418 \
    tweepy__tweepy.91a41c6e vi3k6i5__flashtext.b316c7e9 weaveworks__grafanalib.5c3b17ed";

/// Repositories of which only the files with a row's tests run.
const TEST_FILES: &str = "\
    scrapy__scrapy.35212ec5 sqlfluff__sqlfluff.50a1c4b6 tobymao__sqlglot.036601ba \
    sunpy__sunpy.f8edfd5c sympy__sympy.2ab64612 getmoto__moto.694ce1f4 \
    Project-MONAI__MONAI.a09c1f08 iterative__dvc.1d6ea681 dask__dask.5f61e423 \
    modin-project__modin.8c7799fd conan-io__conan.86f29e13 pandas-dev__pandas.95280573";

/// Activates the environment in which the tests of most repositories run.
pub(super) const ACTIVATE: &str = "source /opt/miniconda3/bin/activate; conda activate testbed; ";
const PYTEST: &str = "pytest --disable-warnings --color=no --tb=no --verbose";

/// How the tests of a repository run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Profile {
    /// Command in the environment of [`ACTIVATE`], or a whole one.
    command: &'static str,
    activates: bool,
    /// Whether the test files of the row's tests are appended to the command.
    names_files: bool,
    /// Parser of the test log.
    pub(super) parser: LogParser,
    tests_are: TestNames,
}

/// How the file of a test is found from its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TestNames {
    /// `FILE::TEST`.
    Files,
    /// `TEST (MODULE.CLASS)`.
    Modules,
    /// All tests are in this file.
    In(&'static str),
}

/// The profile of `repo`, `swesmith/OWNER__NAME.COMMIT`.
pub(super) fn profile(repo: &str) -> Option<Profile> {
    let plain = Profile {
        command: PYTEST,
        activates: true,
        names_files: false,
        parser: LogParser::PytestVerbose,
        tests_are: TestNames::Files,
    };
    let name = repo.strip_prefix("swesmith/")?;
    let is_in = |list: &str| list.split(' ').any(|known| known == name);
    Some(match name {
        "HIPS__autograd.ac044f0d" => Profile { parser: LogParser::PytestWorkers, ..plain },
        "paramiko__paramiko.23f92003" => Profile {
            command: "pytest -rA --color=no --disable-warnings",
            parser: LogParser::PytestStatus,
            ..plain
        },
        "pydantic__pydantic.acb0f10f" => Profile {
            command: "/root/.local/bin/uv run pytest --disable-warnings --color=no --tb=no --verbose",
            activates: false,
            ..plain
        },
        "tkrajina__gpxpy.09fc46b3" => Profile {
            command: "pytest test.py --verbose --color=no --tb=no --disable-warnings",
            ..plain
        },
        "tornadoweb__tornado.d5ac65c1" => Profile {
            command: "python -m tornado.test --verbose",
            parser: LogParser::Tornado,
            tests_are: TestNames::Modules,
            ..plain
        },
        "un33k__python-slugify.872b3750" => Profile {
            command: "python test.py --verbose",
            parser: LogParser::Unittest,
            tests_are: TestNames::In("test.py"),
            ..plain
        },
        _ if is_in(TEST_FILES) => Profile { names_files: true, ..plain },
        _ if is_in(WHOLE_SUITE) => plain,
        _ => return None,
    })
}

impl Profile {
    /// The files of these tests, sorted.
    fn files<'a>(&self, tests: &'a [String]) -> BTreeSet<std::borrow::Cow<'a, str>> {
        let file = |test: &'a String| match self.tests_are {
            TestNames::Files => Some(test.split("::").next().unwrap_or(test).into()),
            TestNames::In(file) => Some(file.into()),
            TestNames::Modules => {
                let (_, class) = test.split_once(" (")?;
                let (module, _) = class.rsplit_once(')')?.0.rsplit_once('.').unwrap_or_default();
                Some(format!("{}.py", module.replace('.', "/")).into())
            }
        };
        tests.iter().filter_map(file).collect()
    }
}

impl SweRow {
    /// The container image of a row of SWE-smith, which the harness derives from the repository.
    pub(super) fn smith_image(&self) -> String {
        let name = self.repo.strip_prefix("swesmith/").unwrap_or(&self.repo);
        format!("swebench/swesmith.x86_64.{}", name.replace("__", "_1776_")).to_lowercase()
    }

    /// Whether `name` is SWE-smith's own name for the image, with or without the organisation under
    /// which it was published at some time. Its harness derives the image from the repository, too.
    pub(super) fn is_smith_name(&self, name: &str) -> bool {
        let plain = |name: &str| name.to_lowercase().replace("_1776_", "__");
        let (organisation, name) = name.rsplit_once('/').unwrap_or(("", name));
        let name = name.strip_suffix(":latest").unwrap_or(name);
        let own = self.smith_image();
        let own = own.rsplit('/').next().unwrap_or_default();
        ["", "swebench", "jyangballin"].contains(&organisation) && plain(name) == plain(own)
    }

    /// Test files of `FAIL_TO_PASS`, which the agent does not get, and those of all tests, which
    /// are restored before the tests run. Empty for other families than SWE-smith.
    pub fn smith_test_files(&self) -> (Vec<String>, Vec<String>) {
        let Some(profile) = profile(&self.repo) else { return Default::default() };
        let owned = |files: BTreeSet<std::borrow::Cow<'_, str>>| -> Vec<String> {
            files.into_iter().map(std::borrow::Cow::into_owned).collect()
        };
        let hidden = profile.files(&self.fail_to_pass);
        let all = hidden.union(&profile.files(&self.pass_to_pass)).cloned().collect();
        (owned(hidden), owned(all))
    }

    /// The shell command that runs the tests of a row of SWE-smith; `None` for other rows.
    pub(super) fn smith_test_command(&self) -> Option<String> {
        let profile = profile(&self.repo)?;
        let mut command = if profile.activates { ACTIVATE.to_owned() } else { String::new() };
        command.push_str(profile.command);
        if profile.names_files {
            for tests in [&self.fail_to_pass, &self.pass_to_pass] {
                for file in profile.files(tests) {
                    command.push(' ');
                    command.push_str(&file);
                }
            }
        }
        Some(command)
    }

    /// The reason why a row of SWE-smith cannot be a task.
    pub(super) fn smith_problem(&self) -> Option<ColumnProblem> {
        if profile(&self.repo).is_none() {
            let reason = format!(
                "`{}` is not a Python repository of SWE-smith with a known profile",
                self.repo
            );
            return Some(ColumnProblem::new("repo", reason));
        }
        let name = self.repo.strip_prefix("swesmith/").unwrap_or_default();
        if self.instance_id.rsplit_once('.').is_none_or(|(of, _)| of != name) {
            let reason = format!("it does not start with the repository, `{name}.`");
            return Some(ColumnProblem::new("instance_id", reason));
        }
        let bug = match patch::parse(&self.patch).and_then(|bug| {
            patch::reversed(&self.patch)?;
            Ok(bug)
        }) {
            Ok(bug) if bug.is_empty() => {
                return Some(ColumnProblem::new("patch", "it has no bug to inject"));
            }
            Ok(bug) => bug,
            Err(error) => return Some(ColumnProblem::new("patch", error)),
        };
        let (_, files) = self.smith_test_files();
        let is_plain = |c: char| c.is_alphanumeric() || "_-./+@=,".contains(c);
        for file in &files {
            if !is_inside(file) || file.starts_with('-') || !file.chars().all(is_plain) {
                let reason = format!("`{file}` is not the path of a test file");
                return Some(ColumnProblem::new("FAIL_TO_PASS", reason));
            }
        }
        // Restoring the test files before the tests run would restore the bug.
        let is_restored = |path: &Option<String>| {
            path.as_ref().is_some_and(|path| files.binary_search(path).is_ok())
        };
        let changed = bug.iter().find(|file| is_restored(&file.old) || is_restored(&file.new))?;
        let reason =
            format!("the bug is in `{}`, a test file, so no change undoes it", changed.path());
        Some(ColumnProblem::new("patch", reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(repo: &str, failing: &[&str], passing: &[&str]) -> SweRow {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        SweRow {
            instance_id: format!("{}.func_pm__x", repo.trim_start_matches("swesmith/")),
            repo: repo.to_owned(),
            patch: "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n".to_owned(),
            fail_to_pass: names(failing),
            pass_to_pass: names(passing),
            ..SweRow::default()
        }
    }

    #[test]
    fn every_repository_occurs_once() {
        let all: Vec<&str> = [WHOLE_SUITE, TEST_FILES].iter().flat_map(|l| l.split(' ')).collect();
        let distinct: BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!((all.len(), distinct.len()), (125, 125));
        assert!(all.iter().all(|name| profile(&format!("swesmith/{name}")).is_some()));
    }

    #[test]
    fn commands_and_files_are_those_of_the_profiles() {
        let failing = ["tests/b.py::t", "tests/a.py::C::t[x]"];
        let passing = ["tests/a.py::t"];
        let funcy = row("swesmith/Suor__funcy.207a7810", &failing, &passing);
        assert_eq!(
            funcy.smith_test_command().unwrap(),
            "source /opt/miniconda3/bin/activate; conda activate testbed; \
             pytest --disable-warnings --color=no --tb=no --verbose"
        );
        let dvc = row("swesmith/iterative__dvc.1d6ea681", &failing, &passing);
        let command = dvc.smith_test_command().unwrap();
        assert!(command.ends_with("--verbose tests/a.py tests/b.py tests/a.py"), "{command}");
        let (hidden, all) = funcy.smith_test_files();
        assert_eq!((hidden, all.len()), (vec!["tests/a.py".into(), "tests/b.py".into()], 2));
        assert_eq!(funcy.smith_image(), "swebench/swesmith.x86_64.suor_1776_funcy.207a7810");
        let tornado = "swesmith/tornadoweb__tornado.d5ac65c1";
        let tornado = row(tornado, &["test_x (tornado.test.web_test.AppTest)"], &["plain"]);
        assert_eq!(tornado.smith_test_files().1, ["tornado/test/web_test.py"]);
        assert_eq!(tornado.smith_problem(), None);
    }

    #[test]
    fn rows_that_cannot_be_run_or_solved_are_refused() {
        let good = row("swesmith/Suor__funcy.207a7810", &["tests/b.py::t"], &[]);
        assert_eq!(good.smith_problem(), None);
        let problem = |change: &dyn Fn(&mut SweRow)| {
            let mut bad = good.clone();
            change(&mut bad);
            bad.smith_problem().unwrap().to_string()
        };
        let unknown = problem(&|row| row.repo = "swesmith/gin-gonic__gin.3c12d2a8".into());
        assert!(unknown.contains("column `repo`"), "{unknown}");
        let other = problem(&|row| row.instance_id = "other.func".into());
        assert!(other.contains("column `instance_id`"), "{other}");
        let none = problem(&|row| row.patch = String::new());
        assert!(none.contains("no bug"), "{none}");
        let test = problem(&|row| row.fail_to_pass = vec!["a.py::a.f".into()]);
        assert!(test.contains("no change undoes it"), "{test}");
        for name in ["../x.py::t", "$(touch x).py::t", "/etc/x.py::t", "-c.py::t", "a b.py::t"] {
            let path = problem(&|row| row.pass_to_pass = vec![name.into()]);
            assert!(path.contains("not the path of a test file"), "{path}");
        }
    }
}
