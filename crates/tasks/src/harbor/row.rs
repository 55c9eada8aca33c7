//! A Harbor task as a row: everything needed to run and grade it.

use super::config::FORMATS;
use super::hosts::{NetworkMode, NetworkPolicy};
use super::value::HarborProblem;
use crate::column::ColumnProblem;
use crate::keys;
use crate::task::{Origin, Split, Task};
use crate::text::printable;
use orchestrate_types::{ImageName, RelativePath, TaskId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// Name of the task family.
pub const ENVIRONMENT: &str = "harbor";
/// Path of the test script in the container.
pub const TEST_SCRIPT: &str = "/tests/test.sh";
/// File type bits that mark an empty folder in [`HarborFile::mode`].
pub const FOLDER_MODE: u32 = 0o040_000;
/// Maximum number of characters of a refused path in a message.
const PATH_CHARS: usize = 120;

/// The keys of a row, and of its parts by the key that contains them.
const KEYS: [(&str, &[&str]); 8] = [
    (
        "harbor",
        &[
            "id",
            "name",
            "schema_version",
            "category",
            "image",
            "healthcheck",
            "network",
            "cpus",
            "memory_mb",
            "solution_env",
            "steps",
            "strategy",
        ],
    ),
    ("image", IMAGE_KEYS),
    ("separate", IMAGE_KEYS),
    (
        "steps",
        &[
            "name",
            "instruction",
            "agent_timeout_s",
            "files",
            "healthcheck",
            "tests",
            "solution",
            "verifier",
            "min_reward",
        ],
    ),
    (
        "verifier",
        &["timeout_s", "env", "separate", "has_bundled_tests", "collect", "artifacts", "network"],
    ),
    (
        "healthcheck",
        &["command", "interval_s", "timeout_s", "start_period_s", "start_interval_s", "retries"],
    ),
    ("collect", &["command", "timeout_s"]),
    ("artifacts", &["source", "exclude"]),
];
const IMAGE_KEYS: &[&str] = &["name", "context", "build_timeout_s", "workdir", "uploads", "env"];
/// Names of keys in a `task.toml`, with a row's.
const OTHER_NAMES: [(&str, &str); 3] = [
    ("timeout_sec", "timeout_s"),
    ("agent_timeout_sec", "agent_timeout_s"),
    ("build_timeout_sec", "build_timeout_s"),
];

/// A regular file, symbolic link or empty folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HarborFile {
    /// Path relative to its base folder, separated by `/`.
    pub path: String,
    /// Permission bits, with the type of a symbolic link (`0o120000`) or folder ([`FOLDER_MODE`]).
    pub mode: u32,
    /// Content; for a symbolic link, its target.
    pub content: Vec<u8>,
}

impl HarborFile {
    /// Whether it is an empty folder.
    pub fn is_folder(&self) -> bool {
        self.mode & 0o170_000 == FOLDER_MODE
    }
}

/// Serialised form of a file: UTF-8 text as it is, anything else in base64.
#[derive(Serialize, Deserialize)]
struct WrittenFile {
    path: RelativePath,
    mode: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl Serialize for HarborFile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = RelativePath::new(self.path.as_str()).map_err(serde::ser::Error::custom)?;
        let (text, base64) = match std::str::from_utf8(&self.content) {
            Ok(text) => (Some(text.to_owned()), None),
            Err(_) => (None, Some(base64_simd::STANDARD.encode_to_string(&self.content))),
        };
        WrittenFile { path, mode: self.mode, text, base64 }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for HarborFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let WrittenFile { path, mode, text, base64 } = WrittenFile::deserialize(deserializer)?;
        let content = match (text, base64) {
            (Some(text), None) => text.into_bytes(),
            (None, Some(base64)) => base64_simd::STANDARD
                .decode_to_vec(base64)
                .map_err(|_| serde::de::Error::custom("`base64` is not valid base64"))?,
            _ => return Err(serde::de::Error::custom("expected either `text` or `base64`")),
        };
        Ok(Self { path: String::from(path), mode, content })
    }
}

/// A container image, and how it is built or pulled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HarborImage {
    /// Name of the image; for a built image, its tag is derived from the build context.
    pub name: String,
    /// Build context with its `Dockerfile`; `None` if the image is pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<Vec<HarborFile>>,
    /// Time limit of the build, in seconds.
    pub build_timeout_s: f64,
    /// Working directory of commands; `None` if the task names none, until [`Self::complete`] is
    /// called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Files to write into the working directory: `environment/` of a task with a prebuilt image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uploads: Vec<HarborFile>,
    /// Variables of every command.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// The run configuration of an image, as the Docker daemon reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageFacts {
    /// Working directory; empty means `/`.
    pub workdir: String,
    /// User; empty means root.
    pub user: String,
    /// Whether it has an entry point.
    pub has_entrypoint: bool,
}

impl HarborImage {
    /// Fills in the values that the task takes from its image.
    ///
    /// # Errors
    /// [`HarborProblem::Unsupported`] if the image relies on another user, an entry point or a
    /// working directory that sandboxes do not have.
    pub fn complete(&mut self, facts: &ImageFacts) -> Result<(), HarborProblem> {
        if facts.has_entrypoint {
            let reason = "an image with an ENTRYPOINT, which may start services";
            return Err(HarborProblem::unsupported(reason));
        }
        if !matches!(facts.user.as_str(), "" | "root" | "0" | "0:0" | "root:root") {
            let reason = format!("an image whose USER is `{}`", facts.user);
            return Err(HarborProblem::unsupported(reason));
        }
        let workdir = self.workdir.get_or_insert_with(|| facts.workdir.clone());
        check_workdir(workdir)
    }
}

/// Top-level folders that cannot contain the working directory.
const RESERVED: &[&str] = &["tmp", "dev", "proc", "sys"];

fn check_workdir(workdir: &str) -> Result<(), HarborProblem> {
    let path = workdir.strip_prefix('/').unwrap_or_default();
    let first = path.split('/').next().unwrap_or_default();
    if RelativePath::new(path).is_ok() && !RESERVED.contains(&first) && !path.contains([':', ',']) {
        return Ok(());
    }
    let shown = if workdir.is_empty() { "/" } else { workdir };
    Err(HarborProblem::unsupported(format!(
        "the working directory `{shown}`; set WORKDIR in the Dockerfile or environment.workdir to a \
         folder outside /tmp, /dev, /proc and /sys"
    )))
}

/// A command that must succeed before the agent starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Healthcheck {
    /// Shell command.
    pub command: String,
    /// Pause between tries, in seconds.
    pub interval_s: f64,
    /// Time limit of one try, in seconds.
    pub timeout_s: f64,
    /// Start period in which failures do not count, in seconds.
    pub start_period_s: f64,
    /// Pause between tries in the start period, in seconds.
    pub start_interval_s: f64,
    /// Number of consecutive failures after which the attempt is broken.
    pub retries: u32,
}

/// A command that runs in the agent's container after the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CollectHook {
    /// Shell command.
    pub command: String,
    /// Time limit, in seconds.
    pub timeout_s: f64,
}

/// A file or folder that a separate verifier receives from the agent's container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Path in both containers.
    pub source: String,
    /// Name patterns of files that are left out of a folder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
}

/// How the reward of a task with several steps is computed from those of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardStrategy {
    /// The mean over the steps that were graded.
    Mean,
    /// The reward of the last step that was run.
    Final,
}

/// How one step is graded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HarborVerifier {
    /// Time limit of the tests, in seconds.
    pub timeout_s: f64,
    /// Variables of the tests.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Image of the tests' own container; `None` if they run in the agent's container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separate: Option<HarborImage>,
    /// Whether the image of a separate container already has the tests.
    #[serde(default)]
    pub has_bundled_tests: bool,
    /// Commands that run in the agent's container before artifacts are read from it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collect: Vec<CollectHook>,
    /// Files and folders that a separate container receives.
    pub artifacts: Vec<Artifact>,
    /// Network access that the tests request. Recorded only.
    #[serde(default)]
    pub network: NetworkPolicy,
}

/// One instruction with its tests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HarborStep {
    /// Name; empty in a task without `[[steps]]`.
    #[serde(default)]
    pub name: String,
    /// The agent's instruction.
    pub instruction: String,
    /// Time limit of the agent, in seconds; `None` means the run's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_timeout_s: Option<f64>,
    /// Files that are written into the working directory before the step; a `setup.sh` among them
    /// is run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<HarborFile>,
    /// Checked before the agent starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<Healthcheck>,
    /// Files in `/tests`. Never in the container while the agent works.
    pub tests: Vec<HarborFile>,
    /// Files for `/solution`; empty without a solution. Used only when the task is checked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub solution: Vec<HarborFile>,
    /// How the step is graded.
    pub verifier: HarborVerifier,
    /// Minimum of each named reward for continuing with the next step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub min_reward: BTreeMap<String, f64>,
}

/// A Harbor task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HarborRow {
    /// The task's id, derived from its name.
    pub id: String,
    /// Its name in Harbor.
    pub name: String,
    /// Format of its `task.toml`.
    pub schema_version: String,
    /// Category in its metadata; may be empty.
    #[serde(default)]
    pub category: String,
    /// The agent's container.
    pub image: HarborImage,
    /// Checked before the agent starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<Healthcheck>,
    /// Network access that the task requests while the agent works. Recorded only.
    #[serde(default)]
    pub network: NetworkPolicy,
    /// Number of CPUs that the task requests. Recorded only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Memory that the task requests, in MiB. Recorded only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<i64>,
    /// Environment variables of the solution.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub solution_env: BTreeMap<String, String>,
    /// The steps; at least one.
    pub steps: Vec<HarborStep>,
    /// How the steps' rewards are combined; `None` in a task without `[[steps]]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RewardStrategy>,
}

impl HarborRow {
    /// The image of the agent, and those of separate verifiers.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut HarborImage> {
        let separate = self.steps.iter_mut().filter_map(|step| step.verifier.separate.as_mut());
        std::iter::once(&mut self.image).chain(separate)
    }

    /// The image of the agent, and those of separate verifiers.
    pub fn images(&self) -> impl Iterator<Item = &HarborImage> {
        let separate = self.steps.iter().filter_map(|step| step.verifier.separate.as_ref());
        std::iter::once(&self.image).chain(separate)
    }

    /// Whether any part of the task requests network access, which its containers do not get.
    pub fn wants_network(&self) -> bool {
        let of_tests = self.steps.iter().map(|step| &step.verifier.network);
        of_tests.chain([&self.network]).any(|network| network.mode != NetworkMode::NoNetwork)
    }

    /// Whether the task has several steps, which agents of a run do not support.
    pub fn has_steps(&self) -> bool {
        self.steps.len() > 1
    }

    /// Fails for a key of the row or of one of its parts that looks like one that is read.
    ///
    /// # Errors
    /// The reason, with the key that was probably meant.
    pub(crate) fn check_keys(row: &Value) -> Result<(), String> {
        check_part("harbor", row)
    }

    /// Converts the row to a task.
    ///
    /// # Errors
    /// If a name, a path or a time is invalid, or the row is incomplete.
    pub fn to_task(&self) -> Result<Task, ColumnProblem> {
        let id = TaskId::new(self.id.as_str()).map_err(|e| ColumnProblem::new("harbor.id", e))?;
        if !FORMATS.contains(&self.schema_version.as_str()) {
            let version = printable(&self.schema_version, PATH_CHARS);
            let reason = format!("`{version}` is not one of {}", FORMATS.join(", "));
            return Err(ColumnProblem::new("harbor.schema_version", reason));
        }
        crate::column::name("harbor.category", &self.category)?;
        let step =
            self.steps.first().ok_or_else(|| ColumnProblem::new("harbor.steps", "it is empty"))?;
        for image in self.images() {
            ImageName::new(image.name.as_str())
                .map_err(|error| ColumnProblem::new("harbor.image", error))?;
            let workdir = image.workdir.as_deref().unwrap_or_default();
            check_workdir(workdir).map_err(|e| ColumnProblem::new("harbor.workdir", e))?;
        }
        for step in &self.steps {
            self.check_step(step)?;
        }
        let timeout = self.steps.iter().map(|step| step.verifier.timeout_s).fold(0.0, f64::max);
        Ok(Task {
            id,
            environment: ENVIRONMENT.to_owned(),
            family: if self.category.is_empty() { "harbor".into() } else { self.category.clone() },
            split: Split::Train,
            problem_statement: step.instruction.clone(),
            image: self.image.name.clone(),
            workdir: self.image.workdir.clone().unwrap_or_default(),
            agent_files: Vec::new(),
            hidden_files: Vec::new(),
            test_command: TEST_SCRIPT.to_owned(),
            test_timeout: seconds(timeout),
            expected: BTreeMap::new(),
            gold_patch: String::new(),
            origin: Origin::Harbor(Box::new(self.clone())),
        })
    }

    fn check_step(&self, step: &HarborStep) -> Result<(), ColumnProblem> {
        crate::column::text("harbor.instruction", &step.instruction)?;
        if step.instruction.trim().is_empty() {
            return Err(ColumnProblem::new("harbor.instruction", "it is empty"));
        }
        let has_script = step.tests.iter().any(|file| file.path == "test.sh");
        if !has_script && !step.verifier.has_bundled_tests {
            return Err(ColumnProblem::new("harbor.tests", "they have no test.sh"));
        }
        check_min_reward(&step.min_reward)
            .map_err(|what| ColumnProblem::new("harbor.min_reward", format!("it {what}")))?;
        let separate = step.verifier.separate.iter().flat_map(|image| &image.uploads);
        let lists = [&step.files, &step.tests, &step.solution, &self.image.uploads];
        for file in lists.into_iter().flatten().chain(separate) {
            let is_link = file.mode & 0o170_000 == 0o120_000;
            if !is_link && !file.is_folder() && file.mode & !0o777 != 0 {
                let path = printable(&file.path, PATH_CHARS);
                return Err(ColumnProblem::new("harbor.files", format!("the mode of `{path}`")));
            }
        }
        let times = [Some(step.verifier.timeout_s), step.agent_timeout_s];
        if times.into_iter().flatten().any(|time| !(time > 0.0 && time <= 86_400.0)) {
            let reason = "it must be more than 0 seconds, and at most a day";
            return Err(ColumnProblem::new("harbor.timeout_s", reason));
        }
        for artifact in &step.verifier.artifacts {
            let path = artifact.source.trim_matches('/');
            if RelativePath::new(path).is_err() {
                return Err(ColumnProblem::new("harbor.artifacts", "it is not a plain path"));
            }
        }
        Ok(())
    }
}

fn check_part(part: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Array(list) => list.iter().try_for_each(|entry| check_part(part, entry)),
        Value::Object(fields) => {
            let Some((_, known)) = KEYS.iter().find(|(name, _)| *name == part) else {
                return Ok(());
            };
            let others = OTHER_NAMES.into_iter().filter(|(_, name)| known.contains(name));
            keys::check(fields, known, &others.collect::<Vec<_>>())
                .map_err(|reason| format!("column `harbor`: `{part}` {reason}"))?;
            fields
                .iter()
                .filter(|(key, _)| known.contains(&key.as_str()))
                .try_for_each(|(key, value)| check_part(key, value))
        }
        _ => Ok(()),
    }
}

/// Checks what the rewards of a step must reach: finite numbers, and at most 1 for the one that counts.
///
/// # Errors
/// What is wrong.
pub(super) fn check_min_reward(least: &BTreeMap<String, f64>) -> Result<(), &'static str> {
    if least.values().any(|least| !least.is_finite()) {
        return Err("must be finite");
    }
    match least.get("reward") {
        Some(least) if *least > 1.0 => Err("is above 1, which no reward reaches"),
        Some(_) | None => Ok(()),
    }
}

/// A line of a task file that contains a Harbor task, in the column `harbor`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HarborLine {
    /// The task.
    pub harbor: HarborRow,
}

/// Converts a time limit in seconds, clamped to one second to one day.
pub fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(1.0, 86_400.0)).unwrap_or(Duration::from_mins(10))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A row with every key.
    fn row() -> Value {
        let file = json!({"path": "test.sh", "mode": 0o755, "text": "exit 0"});
        let network = json!({"mode": "no-network"});
        let check = json!({"command": "true", "interval_s": 1.0, "timeout_s": 1.0,
            "start_period_s": 0.0, "start_interval_s": 1.0, "retries": 1});
        let image = json!({"name": "a/b:1", "context": [file], "build_timeout_s": 60.0,
            "workdir": "/app", "uploads": [file], "env": {"A": "b"}});
        json!({
            "id": "a", "name": "o/a", "schema_version": "1.4", "category": "c", "image": image,
            "healthcheck": check, "network": network, "cpus": 1.0, "memory_mb": 64,
            "solution_env": {"A": "b"}, "strategy": "mean",
            "steps": [{
                "name": "one", "instruction": "Do it.", "agent_timeout_s": 60.0, "files": [file],
                "healthcheck": check, "tests": [file], "solution": [file],
                "min_reward": {"reward": 0.5},
                "verifier": {
                    "timeout_s": 60.0, "env": {"A": "b"}, "separate": image,
                    "has_bundled_tests": false, "network": network,
                    "collect": [{"command": "true", "timeout_s": 1.0}],
                    "artifacts": [{"source": "/a", "exclude": ["x"]}],
                },
            }],
        })
    }

    fn problem(row: &Value) -> Option<String> {
        let parsed = || serde_json::from_value::<HarborRow>(row.clone()).unwrap().to_task();
        HarborRow::check_keys(row).err().or_else(|| parsed().err().map(|e| e.to_string()))
    }

    #[test]
    fn every_key_is_listed() {
        let row = row();
        assert_eq!(problem(&row), None);
        let parsed: HarborRow = serde_json::from_value(row).unwrap();
        let written = serde_json::to_value(&parsed).unwrap();
        let step = &written["steps"][0];
        let parts = [
            ("harbor", &written),
            ("image", &written["image"]),
            ("separate", &step["verifier"]["separate"]),
            ("steps", step),
            ("verifier", &step["verifier"]),
            ("healthcheck", &step["healthcheck"]),
            ("collect", &step["verifier"]["collect"][0]),
            ("artifacts", &step["verifier"]["artifacts"][0]),
        ];
        assert_eq!(parts.map(|(part, _)| part), KEYS.map(|(part, _)| part));
        for ((part, written), (_, known)) in parts.into_iter().zip(KEYS) {
            let mut written: Vec<&str> =
                written.as_object().unwrap().keys().map(String::as_str).collect();
            let mut known = known.to_vec();
            written.sort_unstable();
            known.sort_unstable();
            assert_eq!(written, known, "{part}");
        }
    }

    #[test]
    fn a_row_is_refused_as_a_folder_would_be() {
        for (place, key, value, reason) in [
            (
                "",
                "schema_version",
                json!("9.9"),
                "`harbor.schema_version`: `9.9` is not one of 1.0",
            ),
            ("", "health_check", json!({}), "`harbor` has the key `health_check`"),
            ("/image", "work_dir", json!("/x"), "`image` has the key `work_dir`"),
            ("/steps/0", "agent_timeout_sec", json!(9), "did you mean `agent_timeout_s`?"),
            ("/steps/0", "min_rewards", json!({}), "did you mean `min_reward`?"),
            ("/steps/0", "tests", json!([]), "`harbor.tests`: they have no test.sh"),
            (
                "/steps/0",
                "min_reward",
                json!({"reward": 1.5}),
                "`harbor.min_reward`: it is above 1",
            ),
            ("/steps/0/verifier", "time_out_s", json!(1), "`verifier` has the key `time_out_s`"),
        ] {
            let mut row = row();
            let name: String = key.chars().filter(|c| *c != '_').collect();
            let fields = row.pointer_mut(place).unwrap().as_object_mut().unwrap();
            // The right key is absent, as when it is misspelt.
            fields.retain(|other, _| {
                let other: String = other.chars().filter(|c| *c != '_').collect();
                !name.starts_with(&other)
            });
            fields.insert(key.to_owned(), value);
            let problem = problem(&row).unwrap();
            assert!(problem.contains(reason), "{key}: {problem}");
        }
    }

    #[test]
    fn tests_in_the_image_of_the_verifier_need_no_files() {
        let mut row = row();
        row["steps"][0]["tests"] = json!([]);
        row["steps"][0]["verifier"]["has_bundled_tests"] = json!(true);
        assert_eq!(problem(&row), None);
    }
}
