//! A Harbor task as a row: everything needed to run and grade it.

use super::hosts::{NetworkMode, NetworkPolicy};
use super::value::HarborProblem;
use crate::column::ColumnProblem;
use crate::task::{Origin, Split, Task};
use crate::text::printable;
use orchestrate_types::{ImageName, RelativePath, TaskId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
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

    /// Converts the row to a task.
    ///
    /// # Errors
    /// If a name, a path or a time is invalid, or the row is incomplete.
    pub fn to_task(&self) -> Result<Task, ColumnProblem> {
        let id = TaskId::new(self.id.as_str()).map_err(|e| ColumnProblem::new("harbor.id", e))?;
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
