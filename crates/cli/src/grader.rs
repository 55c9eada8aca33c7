//! Grades patches in sandboxes, outside of a run.

use crate::config::Settings;
use crate::wiring;
use orchestrate_rollout::{
    GradeError, GradedChange, GradingRules, HarborActor, check_harbor, grade_patch,
};
use orchestrate_sandbox::{
    DockerHosts, ImageHooks, ImageIdentity, ImageLock, InMemoryImageLock, Owner, Purpose,
    SandboxError, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::harbor::seconds;
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{AttemptId, EpisodeId, GroupId, Retry, RunId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Number of sandboxes tried for one patch.
const TRIES: u32 = 2;
/// Time that a sandbox may live beyond the timeout of its tests.
const SLACK: Duration = Duration::from_mins(5);

/// Time limit, in seconds, of a solution whose task has none.
const SOLUTION_S: f64 = 3600.0;

/// Grades patches, each in a new sandbox.
#[derive(Debug)]
pub(crate) struct Grader<'a> {
    settings: &'a Settings,
    provider: DockerHosts,
    images: Arc<InMemoryImageLock>,
    rules: GradingRules,
    run: RunId,
    count: AtomicU32,
}

impl<'a> Grader<'a> {
    /// Connects to Docker.
    pub(crate) async fn connect(
        settings: &'a Settings,
        rules: GradingRules,
    ) -> anyhow::Result<Self> {
        let images = Arc::<InMemoryImageLock>::default();
        let lock: Arc<dyn ImageLock> = Arc::<InMemoryImageLock>::clone(&images);
        let hooks = ImageHooks { lock: Some(lock), ..ImageHooks::default() };
        let provider = DockerHosts::connect(&settings.sandbox, hooks).await?;
        let (run, count) = (RunId::generate(), AtomicU32::new(0));
        Ok(Self { settings, provider, images, rules, run, count })
    }

    /// Number of patches that may be graded concurrently.
    pub(crate) fn width(&self) -> usize {
        self.settings.sandbox.capacity()
    }

    /// Grades `patch`, and tries another sandbox if the first one fails.
    pub(crate) async fn grade(&self, task: &Task, patch: &str) -> Result<GradedChange, GradeError> {
        self.repeated(task, async |spec| {
            grade_patch(&self.provider, spec, task, patch, self.rules).await
        })
        .await
    }

    /// Runs `actor` in a Harbor task and grades the result; tries another sandbox if the first one
    /// fails.
    pub(crate) async fn check_harbor(
        &self,
        task: &Task,
        actor: HarborActor,
    ) -> Result<GradedChange, GradeError> {
        self.repeated(task, async |spec| check_harbor(&self.provider, spec, task, actor).await)
            .await
    }

    async fn repeated(
        &self,
        task: &Task,
        grade: impl AsyncFn(&SandboxSpec) -> Result<GradedChange, GradeError>,
    ) -> Result<GradedChange, GradeError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let spec = self.spec(task);
            match grade(&spec).await {
                Err(GradeError::Sandbox(error)) if tries < TRIES => match error.retry() {
                    Retry::Never => return Err(error.into()),
                    Retry::Now => {}
                    Retry::After(time) => tokio::time::sleep(time).await,
                },
                result => return result,
            }
        }
    }

    /// The image that sandboxes of the task were opened with; `None` if there was none.
    pub(crate) async fn image(&self, task: &Task) -> Result<Option<ImageIdentity>, SandboxError> {
        self.images.recorded(&task.image).await
    }

    /// Fails if the name of the task's image stands for another image than `recorded`. An image that
    /// no host has is not pulled for this.
    pub(crate) async fn check_image(
        &self,
        task: &Task,
        recorded: ImageIdentity,
    ) -> Result<(), SandboxError> {
        self.provider.check_images(&[(task.image.clone(), recorded)]).await
    }

    /// Removes all remaining sandboxes.
    pub(crate) async fn shutdown(self) -> anyhow::Result<()> {
        Ok(self.provider.shutdown().await?)
    }

    fn spec(&self, task: &Task) -> SandboxSpec {
        let index = self.count.fetch_add(1, Ordering::Relaxed);
        let episode = EpisodeId { group: GroupId::Eval { round: 0, index }, member: 0 };
        SandboxSpec {
            image: task.image.clone(),
            purpose: Purpose::Grader,
            owner: Owner { run: self.run, epoch: 0, attempt: AttemptId { episode, attempt: 1 } },
            workdir: task.workdir.clone(),
            limits: wiring::limits(self.settings),
            deadline: task.test_timeout.saturating_add(SLACK).saturating_add(solution_time(task)),
            reusable: task.brings_all_files(),
        }
    }
}

/// Time for the solutions of a Harbor task, which run in its sandbox before the tests.
fn solution_time(task: &Task) -> Duration {
    let Origin::Harbor(row) = &task.origin else { return Duration::ZERO };
    let times = row.steps.iter().map(|step| {
        seconds(step.agent_timeout_s.unwrap_or(SOLUTION_S)) + seconds(step.verifier.timeout_s)
    });
    times.sum()
}
