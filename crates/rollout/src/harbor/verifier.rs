//! Runs the tests of a step and reads the reward that they write.

use super::artifacts::{self, Collected};
use super::container::{HELPER_TIMEOUT, Prepared, entries, shell, write};
use crate::grading::{GradeError, GradedChange};
use crate::sandboxes::{close, refused};
use orchestrate_sandbox::{
    Command, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::harbor::{
    HarborImage, HarborRow, HarborStep, REWARD_FILES, RewardProblem, TEST_SCRIPT, VERIFIER_FOLDER,
    reward, rewards, seconds,
};
use orchestrate_tasks::{Finding, TestStatus, Verdict};
use orchestrate_types::{Attribution, ByteSize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes of a test log that are kept at its start; the same number is kept at its end.
const LOG_BYTES: usize = 4 << 20;
/// Maximum size of a reward file.
const MAX_REWARD: ByteSize = ByteSize::mib(1);

/// Empties the verifier's folder, and removes `/tests` if `$0` is `all`. Exits with 0 on success.
const CLEAR: &str = "rm -rf /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier \
     && { [ \"$0\" != all ] || rm -rf /tests; }";

/// Why a step has no rewards.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum NoReward {
    /// Its tests did not run.
    #[error("{0}")]
    NotRun(String),
    /// Its tests ran out of time, after this number of seconds.
    #[error("the tests ran for more than {0} seconds")]
    TimedOut(f64),
    /// Its tests left no usable reward.
    #[error(transparent)]
    Unusable(#[from] RewardProblem),
}

impl NoReward {
    /// Who caused it. If the task's environment did, nothing is known about the agent's work.
    ///
    /// No agent makes the task's own tests write a number out of range that could not make them write
    /// any other. In a container that the agent never used, it cannot keep them from writing one
    /// either. In its own container it can, and it can make tests run for ever anywhere: that is its
    /// result, because another attempt would reward it.
    pub(crate) fn attribution(&self, is_separate: bool) -> Attribution {
        match self {
            Self::Unusable(RewardProblem::OutOfRange(_)) => Attribution::Environment,
            Self::Unusable(
                RewardProblem::Missing
                | RewardProblem::Empty(_)
                | RewardProblem::Link(_)
                | RewardProblem::Special(_)
                | RewardProblem::Invalid(_)
                | RewardProblem::Repeated(_)
                | RewardProblem::Ambiguous,
            ) => {
                if is_separate {
                    Attribution::Environment
                } else {
                    Attribution::Policy
                }
            }
            Self::NotRun(_) | Self::TimedOut(_) => Attribution::Policy,
        }
    }
}

/// A step whose tests ran.
#[derive(Debug, Clone)]
pub(crate) struct GradedStep {
    /// The rewards by name, or why there are none.
    pub(crate) rewards: Result<BTreeMap<String, f64>, NoReward>,
    /// Whether the tests ran in a container that the agent never used.
    pub(crate) is_separate: bool,
    /// Output of the tests.
    pub(crate) log: Vec<u8>,
    /// Duration of the tests.
    pub(crate) elapsed: Duration,
}

impl GradedStep {
    /// A step without tests, because of `problem`.
    pub(super) fn failed(problem: String) -> Self {
        let rewards = Err(NoReward::NotRun(problem));
        Self { rewards, is_separate: false, log: Vec::new(), elapsed: Duration::ZERO }
    }

    /// The reward of an episode with this step alone.
    fn reward(&self) -> Result<f64, NoReward> {
        Ok(reward(self.rewards.as_ref().map_err(Clone::clone)?)?)
    }

    /// The result of an episode with this step alone. Where the agent may be the reason that there is
    /// no reward, its reward is 0.
    ///
    /// # Errors
    /// [`GradeError::NoReward`] if the environment is the reason.
    pub(crate) fn graded(self) -> Result<GradedChange, GradeError> {
        let scalar = self.reward();
        if let Err(problem) = &scalar
            && problem.attribution(self.is_separate) != Attribution::Policy
        {
            return Err(GradeError::NoReward(problem.to_string()));
        }
        let rewards = self.rewards.unwrap_or_default();
        Ok(GradedChange {
            verdict: verdict_of(&rewards, &scalar, self.is_separate),
            patch: String::new(),
            log: self.log,
            apply_log: String::new(),
            eval_script: None,
            problem: scalar.err().map(|problem| problem.to_string()),
            test_time: self.elapsed,
        })
    }
}

/// The verdict for these rewards. Each named reward is one test status: passed if it is at least 1.
fn verdict_of(
    rewards: &BTreeMap<String, f64>,
    scalar: &Result<f64, NoReward>,
    is_separate: bool,
) -> Verdict {
    let statuses: BTreeMap<String, TestStatus> = rewards
        .iter()
        .map(|(name, reward)| {
            let status = if *reward >= 1.0 { TestStatus::Passed } else { TestStatus::Failed };
            (name.clone(), status)
        })
        .collect();
    let differing = if let Err(problem) = scalar {
        vec![problem.to_string()]
    } else {
        let failed = statuses.iter().filter(|(_, status)| **status != TestStatus::Passed);
        failed.map(|(name, _)| name.clone()).collect()
    };
    let reward = scalar.as_ref().copied().unwrap_or(0.0);
    let verdict = Verdict {
        reward,
        official_reward: reward,
        statuses,
        differing,
        report: None,
        suspicious: Vec::new(),
    };
    // In the agent's container, the agent may have replaced the programs that the tests use.
    let unprotected = (!is_separate).then_some(Finding::Unprotected);
    verdict
        .with_findings(unprotected.into_iter().chain(scalar.is_err().then_some(Finding::NoReward)))
}

/// Grades a step in the agent's container. Every process of the agent is dead by then, but changes
/// that it made to the container's programs remain.
pub(crate) async fn grade_in_agents(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    step: &HarborStep,
    prepared: Prepared,
) -> Result<GradedStep, SandboxError> {
    let with_tests = !prepared.has_tests || row.has_steps();
    clear(sandbox, row, with_tests).await?;
    sandbox.set_root("/").await?;
    upload_tests(sandbox, step).await?;
    let mut graded = run_tests(sandbox, row, &row.image, step).await?;
    graded.is_separate = false;
    Ok(graded)
}

/// Takes the artifacts from the agent's container, and grades the step in a fresh one that has
/// `spec`'s limits and owner. With `stays`, the agent's container is kept for the next step.
pub(crate) async fn grade_separately(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    agents: &mut Option<Box<dyn Sandbox>>,
    row: &HarborRow,
    step: &HarborStep,
    stays: bool,
) -> Result<GradedStep, SandboxError> {
    let Some(image) = &step.verifier.separate else {
        return Ok(GradedStep::failed("the step has no verifier of its own".to_owned()));
    };
    let mut collected = Vec::new();
    if let Some(sandbox) = agents.as_deref_mut() {
        collected = artifacts::collect(sandbox, row, step).await?;
    }
    if !stays && let Some(sandbox) = agents.take() {
        close(sandbox).await;
    }
    let spec = SandboxSpec {
        image: image.name.clone(),
        workdir: image.workdir.clone().unwrap_or_default(),
        ..spec.clone()
    };
    let mut sandbox = provider.open(&spec).await?;
    let graded = grade_alone(sandbox.as_mut(), row, image, step, &collected).await;
    close(sandbox).await;
    graded
}

async fn grade_alone(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    image: &HarborImage,
    step: &HarborStep,
    collected: &[Collected],
) -> Result<GradedStep, SandboxError> {
    write(sandbox, &image.uploads).await?;
    clear(sandbox, row, false).await?;
    sandbox.set_root("/").await?;
    for artifact in collected {
        if artifact.is_folder {
            let mut empty =
                shell(row, "mkdir -p \"$0\" && find \"$0\" -mindepth 1 -delete", HELPER_TIMEOUT);
            empty.argv.push(artifact.source.clone());
            let emptied = sandbox.exec(&empty).await?;
            if !emptied.success() {
                return Err(refused(sandbox, "artifacts", emptied.text()));
            }
        }
        sandbox.write_files(&artifact.files).await?;
    }
    if !step.verifier.has_bundled_tests {
        upload_tests(sandbox, step).await?;
    }
    let mut graded = run_tests(sandbox, row, image, step).await?;
    graded.is_separate = true;
    Ok(graded)
}

/// Removes what earlier commands left where the tests write. A program of the container removes it,
/// so the result is checked through the supervisor.
async fn clear(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    with_tests: bool,
) -> Result<(), SandboxError> {
    let mut command = shell(row, CLEAR, HELPER_TIMEOUT);
    command.argv.push(if with_tests { "all" } else { "logs" }.to_owned());
    let cleared = sandbox.exec(&command).await?;
    sandbox.set_root("/").await?;
    let left = reward_files(sandbox).await?;
    if cleared.success() && left.is_empty() {
        return Ok(());
    }
    let what = format!("{VERIFIER_FOLDER} and /tests cannot be cleared: {}", cleared.text().trim());
    Err(SandboxError {
        sandbox: sandbox.name().to_owned(),
        kind: SandboxErrorKind::Damaged { what },
    })
}

async fn upload_tests(sandbox: &mut dyn Sandbox, step: &HarborStep) -> Result<(), SandboxError> {
    let mut files: Vec<FileEntry> = entries(&step.tests, "tests/").collect();
    for script in files.iter_mut().filter(|file| file.path == "tests/test.sh") {
        script.mode |= 0o111;
    }
    if files.is_empty() { Ok(()) } else { sandbox.write_files(&files).await }
}

/// Runs the tests. The root of files must be `/`.
async fn run_tests(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    image: &HarborImage,
    step: &HarborStep,
) -> Result<GradedStep, SandboxError> {
    let verifier = &step.verifier;
    let mut command = shell(row, &format!("({TEST_SCRIPT}) 2>&1"), seconds(verifier.timeout_s));
    let variables = image.env.iter().chain(&verifier.env);
    command.env = variables.map(|(name, value)| (name.clone(), value.clone())).collect();
    let command = Command { keep_bytes: LOG_BYTES, ..command };
    let result = sandbox.exec(&command).await?;
    let rewards = if result.exit == Exit::TimedOut {
        Err(NoReward::TimedOut(verifier.timeout_s))
    } else {
        read_rewards(sandbox).await?.map_err(NoReward::from)
    };
    let log = result.text().into_bytes();
    Ok(GradedStep { rewards, is_separate: false, log, elapsed: result.elapsed })
}

async fn reward_files(sandbox: &mut dyn Sandbox) -> Result<Vec<FileEntry>, SandboxError> {
    let folder = VERIFIER_FOLDER.trim_start_matches('/');
    let paths = REWARD_FILES.map(|name| format!("{folder}/{name}"));
    sandbox.read_files(&paths, MAX_REWARD).await
}

async fn read_rewards(
    sandbox: &mut dyn Sandbox,
) -> Result<Result<BTreeMap<String, f64>, RewardProblem>, SandboxError> {
    Ok(rewards_of(&reward_files(sandbox).await?))
}

/// The rewards in these files. Whatever has the name of a file decides, as the file would: the rewards
/// of the other file may be those of another run of the tests.
fn rewards_of(files: &[FileEntry]) -> Result<BTreeMap<String, f64>, RewardProblem> {
    let content = |name: &'static str| match files.iter().find(|file| file.path.ends_with(name)) {
        None => Ok(None),
        Some(file) if file.is_link() => Err(RewardProblem::Link(name)),
        Some(file) if file.is_special() => Err(RewardProblem::Special(name)),
        Some(file) => Ok(Some(file.content.as_slice())),
    };
    let [json, text] = REWARD_FILES;
    match content(json)? {
        Some(json) => rewards(Some(json), None),
        None => rewards(None, content(text)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_sandbox::LINK_MODE;

    fn step(rewards: Result<&[(&str, f64)], NoReward>, is_separate: bool) -> GradedStep {
        let rewards = rewards.map(|rewards| {
            rewards.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        });
        GradedStep { rewards, is_separate, log: b"log".to_vec(), elapsed: Duration::from_secs(1) }
    }

    #[test]
    fn a_missing_reward_is_the_agents_result_only_where_the_agent_could_cause_it() {
        let timed_out = NoReward::TimedOut(5.0);
        let not_run = NoReward::NotRun("setup.sh failed".to_owned());
        let (policy, environment) = (Attribution::Policy, Attribution::Environment);
        for (problem, shared, separate) in [
            (RewardProblem::OutOfRange(37.0).into(), environment, environment),
            (RewardProblem::Missing.into(), policy, environment),
            (RewardProblem::Empty("reward.txt").into(), policy, environment),
            (RewardProblem::Link("reward.json").into(), policy, environment),
            (RewardProblem::Special("reward.json").into(), policy, environment),
            (RewardProblem::Invalid("reward.txt").into(), policy, environment),
            (RewardProblem::Repeated("the key \"a\"".to_owned()).into(), policy, environment),
            (RewardProblem::Ambiguous.into(), policy, environment),
            (timed_out, policy, policy),
            (not_run, policy, policy),
        ] {
            for (is_separate, expected) in [(false, shared), (true, separate)] {
                assert_eq!(NoReward::attribution(&problem, is_separate), expected, "{problem}");
                let broken = expected != policy;
                match step(Err(NoReward::clone(&problem)), is_separate).graded() {
                    Err(GradeError::NoReward(reason)) => {
                        assert!(broken, "{problem}");
                        assert_eq!(reason, problem.to_string());
                    }
                    Ok(graded) => {
                        assert!(!broken, "{problem}");
                        assert!(graded.verdict.reward.abs() < f64::EPSILON);
                        assert_eq!(graded.verdict.differing, [problem.to_string()]);
                        assert!(graded.verdict.suspicious.contains(&Finding::NoReward));
                        assert_eq!(graded.problem, Some(problem.to_string()));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_regular_file_is_named_and_the_other_file_does_not_count() {
        let file = |path: &str, mode: u32, content: &str| FileEntry {
            path: format!("logs/verifier/{path}"),
            mode,
            content: content.into(),
        };
        let text = || file("reward.txt", 0o644, "1");
        let json = || file("reward.json", 0o644, "{\"reward\": 0.5}");
        let reward = |number: f64| Ok(BTreeMap::from([("reward".to_owned(), number)]));
        let [folder, fifo, socket] = [0o040_755, 0o010_644, 0o140_755];
        let special = |name| Err(RewardProblem::Special(name));
        for (files, expected) in [
            (vec![json(), text()], reward(0.5)),
            (vec![text()], reward(1.0)),
            (vec![], Err(RewardProblem::Missing)),
            (vec![file("reward.json", folder, ""), text()], special("reward.json")),
            (vec![file("reward.json", fifo, ""), text()], special("reward.json")),
            (vec![file("reward.json", socket, "")], special("reward.json")),
            (
                vec![file("reward.json", LINK_MODE, "x"), text()],
                Err(RewardProblem::Link("reward.json")),
            ),
            (vec![file("reward.txt", folder, "")], special("reward.txt")),
            (vec![file("reward.txt", fifo, "")], special("reward.txt")),
            (vec![file("reward.txt", LINK_MODE, "x")], Err(RewardProblem::Link("reward.txt"))),
            (vec![json(), file("reward.txt", folder, "")], reward(0.5)),
        ] {
            assert_eq!(rewards_of(&files), expected, "{files:?}");
        }
    }

    #[test]
    fn several_rewards_without_a_name_that_counts_are_no_reward() {
        let several = [("a", 1.0), ("b", 40.0)];
        let graded = step(Ok(&several), false).graded().unwrap();
        assert!(graded.verdict.reward.abs() < f64::EPSILON);
        assert!(graded.problem.unwrap().contains("none is named `reward`"));
        assert!(step(Ok(&several), true).graded().is_err());
        let graded = step(Ok(&[("a", 0.0), ("reward", 0.5)]), true).graded().unwrap();
        assert!((graded.verdict.reward - 0.5).abs() < f64::EPSILON && graded.problem.is_none());
        assert_eq!(graded.verdict.suspicious, []);
    }
}
