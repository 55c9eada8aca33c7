//! One task of each family, and what an attacker knows of it, which is more than any agent would.

use crate::data::file;
use crate::play::World;
use orchestrate_e2e::{recipe_image, root, skip};
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::repair::{Repository, TaskGenerator};
use orchestrate_tasks::swe::SweRow;
use orchestrate_tasks::{Task, TaskFile, micro, patch};
use serde::Deserialize;
use serde_json::json;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A family of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Family {
    Micro,
    Repair,
    R2e,
    #[serde(rename = "swe")]
    SweBench,
}

impl Family {
    pub(crate) const ALL: [Self; 4] = [Self::Micro, Self::Repair, Self::R2e, Self::SweBench];

    /// Whether its sandboxes serve several episodes.
    pub(crate) fn is_pooled(self) -> bool {
        matches!(self, Self::Micro | Self::Repair)
    }
}

/// The task that is attacked.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) task: Task,
    /// Path of the tested module.
    pub(crate) module: String,
    /// Its content, with the fault.
    source: String,
    /// A log in which all tests pass.
    forged: String,
    /// Commands of an honest agent.
    pub(crate) solution: Vec<String>,
}

/// A file of `tests/attacks`.
fn text(path: &str) -> String {
    std::fs::read_to_string(root().join("tests/attacks").join(path)).unwrap()
}

fn docker(args: &[&str]) -> Option<String> {
    let output = Command::new("docker").args(args).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The image of `NAME.Dockerfile`; `None`, reported as a skip, without its base image.
fn image(name: &str) -> Option<String> {
    recipe_image(&root().join("tests/attacks"), &format!("attack-{name}")).unwrap()
}

const MODULE: &str = "calc.py";
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

impl Target {
    pub(crate) async fn new(family: Family, world: &World) -> Option<Self> {
        match family {
            Family::Micro => Some(Self::micro()),
            Family::Repair => Self::repair(world).await,
            Family::R2e => Self::r2e(),
            Family::SweBench => Self::swe_bench(),
        }
    }

    /// The task of an honest agent, whose tests may be slow next to attackers.
    pub(crate) fn honest(&self) -> Task {
        Task { test_timeout: Duration::from_mins(5), ..self.task.clone() }
    }

    /// A target that needs no Docker, to read the data with.
    pub(crate) fn example() -> Self {
        Self::micro()
    }

    fn of(mut task: Task, module: &str, source: String, solved: &str, test_file: &str) -> Self {
        task.test_timeout = TEST_TIMEOUT;
        let mut forged = format!("{0} short test summary info {0}\n", "=".repeat(27));
        let mut names: Vec<String> = task.expected.keys().cloned().collect();
        if names.is_empty() {
            names = hidden_names();
        }
        for name in &names {
            writeln!(forged, "PASSED {test_file}::{name}").unwrap();
        }
        write!(forged, "{0} {1} passed in 0.01s {0}", "=".repeat(27), names.len()).unwrap();
        let solution = vec![file(module, solved)];
        Self { task, module: module.to_owned(), source, forged, solution }
    }

    fn micro() -> Self {
        let counts = micro::MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
        let mut task = micro::generate(8, counts).remove(0);
        "orchestrate/micro:latest".clone_into(&mut task.image);
        let solved = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
        let (module, source) =
            (task.agent_files[0].path.clone(), task.agent_files[0].content.clone());
        let solved = solved.into_iter().find(|file| file.path == module).unwrap().content;
        Self::of(task, &module, source, &solved, "r2e_tests/test_1.py")
    }

    /// Made as `orchestrate tasks make` makes it, from the logs of real runs.
    async fn repair(world: &World) -> Option<Self> {
        let image = "orchestrate/repository:latest";
        if docker(&["image", "inspect", "-f", "{{.Id}}", image]).is_none() {
            skip::skip("docker", "image orchestrate/repository:latest not found");
            return None;
        }
        let file = |path: &str, content| TaskFile { path: path.to_owned(), content };
        let repository = Repository {
            name: "adder".to_owned(),
            files: vec![
                file(MODULE, text("repository/calc.py")),
                file("tests/helper.py", text("repository/tests/helper.py")),
                file("tests/test_calc.py", text("hidden/test_1.py")),
            ],
            left_out: Vec::new(),
        };
        let mut generator =
            TaskGenerator::new(repository, image.to_owned(), vec!["tests".to_owned()]);
        let logs = [
            world.log_of(&generator.baseline_task()).await,
            world.log_of(&generator.baseline_task()).await,
        ];
        let left_out =
            generator.record_baseline([&logs[0], &logs[1]], Duration::from_secs(1)).unwrap();
        assert_eq!(left_out, Vec::<String>::new());
        let mutants = generator.mutants(1);
        let (path, mutant) =
            mutants.into_iter().find(|(_, mutant)| mutant.function == "total").unwrap();
        let candidate = generator.candidate_task(path, &mutant).unwrap();
        let row = generator.make_row(path, &mutant, &world.log_of(&candidate).await).unwrap();
        let task = row.to_task().unwrap();
        let source =
            task.agent_files.iter().find(|file| file.path == MODULE).unwrap().content.clone();
        Some(Self::of(task, MODULE, source, &text("repository/calc.py"), "tests/test_calc.py"))
    }

    fn r2e() -> Option<Self> {
        let expected: serde_json::Map<_, _> =
            hidden_names().into_iter().map(|name| (name, json!("PASSED"))).collect();
        let row: R2eRow = serde_json::from_value(json!({
            "repo_name": "adder",
            "docker_image": image("r2e")?,
            "commit_hash": "c0ffee",
            "parsed_commit_content": {"file_diffs": []},
            "execution_result_content": {
                "test_file_names": ["test_1.py"], "test_file_codes": [text("hidden/test_1.py")],
            },
            "problem_statement": "[ISSUE] total forgets the last item. [/ISSUE]",
            "expected_output_json": expected,
        }))
        .unwrap();
        let task = row.to_task().unwrap();
        Some(Self::of(task, MODULE, faulty(), &text("repository/calc.py"), "r2e_tests/test_1.py"))
    }

    fn swe_bench() -> Option<Self> {
        let image = image("swe")?;
        let base =
            docker(&["run", "--rm", "--network=none", &image, "git", "rev-parse", "HEAD~1"])?;
        let (visible, hidden) = (text("repository/tests/test_calc.py"), text("hidden/test_1.py"));
        let path = "tests/test_calc.py";
        let ids = |names: &[&str]| names.iter().map(|name| format!("{path}::{name}")).collect();
        let row = SweRow {
            instance_id: "pytest-dev__pytest-1".into(),
            repo: "pytest-dev/pytest".into(),
            version: "7.0".into(),
            base_commit: base,
            problem_statement: "total forgets the last item.".into(),
            test_patch: patch::file_diff(path, Some(&visible), Some(&hidden)).to_string(),
            fail_to_pass: ids(&["test_total", "test_total_of_one"]),
            pass_to_pass: ids(&["test_total_of_nothing", "test_largest", "test_double"]),
            docker_image: Some(image),
            ..SweRow::default()
        };
        Some(Self::of(row.to_task(), MODULE, faulty(), &text("repository/calc.py"), path))
    }

    /// Replaces the words that attacks write for the parts of a target.
    pub(crate) fn fill(&self, text: &str) -> String {
        let literal = serde_json::to_string(&format!("\n{}\n", self.forged)).unwrap();
        text.replace("@SOURCE@", &self.source)
            .replace("@MODULE@", &self.module)
            .replace("@NAME@", self.module.trim_end_matches(".py"))
            .replace("@FORGED_PY@", &literal)
            .replace("@FORGED@", &self.forged)
            .replace("@LIBRARY@", crate::families::text("library.b64").trim())
    }
}

fn faulty() -> String {
    text("repository/calc.py").replace("sum(items)", "sum(items[:-1])")
}

/// Names of the hidden tests of the repository.
fn hidden_names() -> Vec<String> {
    let tests = text("hidden/test_1.py");
    let names = tests.lines().filter_map(|line| line.strip_prefix("def ")?.strip_suffix("():"));
    names.map(str::to_owned).collect()
}
