//! Containers that nobody owns any more: found by label, removed by rule, never by guess.

use crate::api::{Purpose, SandboxError, SweepReport};
use crate::container::{
    LABEL_ATTEMPT, LABEL_DEADLINE, LABEL_EPOCH, LABEL_PURPOSE, LABEL_RUN, purpose_letter,
};
use crate::daemon::CallError;
use crate::provider::{DockerProvider, Shared};
use bollard::query_parameters::ListContainersOptions;
use futures::StreamExt as _;
use orchestrate_types::{RunId, unix_micros};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Between looks for what appears after its coordinator is gone.
const AGAIN_EVERY: Duration = Duration::from_secs(10);

/// Docker's word for a container that was never started.
const CREATED: &str = "created";

/// What the labels of a container of ours say; `None` where a label is absent or unreadable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerInfo {
    /// Docker's id.
    pub id: String,
    /// Container name; the id where it has none, as after a daemon was killed while removing it.
    pub name: String,
    /// Its run.
    pub run: Option<RunId>,
    /// Its attempt, or `pooled`.
    pub attempt: Option<String>,
    /// The coordinator's epoch.
    pub epoch: Option<i64>,
    /// Agent or grader.
    pub purpose: Option<Purpose>,
    /// Unix seconds after which nobody can need it.
    pub deadline: Option<i64>,
    /// Docker's word for its state, like `running`.
    pub state: String,
}

/// Which containers [`DockerProvider::sweep_all_orphans`] removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcScope {
    /// Those whose deadline has passed, of any run. Safe while other runs are alive.
    Expired,
    /// Those, and all of this run. Only for a run whose coordinator is dead.
    Run(RunId),
}

enum Verdict {
    Remove,
    Keep(&'static str),
}

/// Older coordinators of the same run are gone for good; anything else is not ours to judge.
fn verdict_for_sweep(info: &ContainerInfo, run: RunId, epoch: i64) -> Verdict {
    match (info.run, info.epoch) {
        (Some(owner), _) if owner != run => Verdict::Keep("belongs to another run"),
        (Some(_), Some(theirs)) if theirs < epoch => Verdict::Remove,
        (Some(_), Some(_)) => Verdict::Keep("belongs to this or a later coordinator"),
        (None, _) | (Some(_), None) => Verdict::Keep("its labels cannot be read"),
    }
}

/// What was created and never started has no process that could end by itself.
fn verdict_for_unstarted(info: &ContainerInfo, run: RunId, epoch: i64) -> Verdict {
    if info.state != CREATED {
        return Verdict::Keep("it was started, and ends by itself");
    }
    verdict_for_sweep(info, run, epoch.saturating_add(1))
}

fn verdict_for_gc(info: &ContainerInfo, scope: GcScope, now: i64) -> Verdict {
    let named = match scope {
        GcScope::Expired => false,
        GcScope::Run(run) => info.run == Some(run),
    };
    match info.deadline {
        _ if named => Verdict::Remove,
        Some(deadline) if deadline < now => Verdict::Remove,
        Some(_) => Verdict::Keep("its deadline has not passed"),
        None => Verdict::Keep("its labels cannot be read"),
    }
}

fn read_labels(
    id: String,
    name: String,
    state: String,
    labels: &HashMap<String, String>,
) -> ContainerInfo {
    let get = |key: &str| labels.get(key).map(String::as_str);
    let purpose = match get(LABEL_PURPOSE) {
        Some("agent") => Some(Purpose::Agent),
        Some("grader") => Some(Purpose::Grader),
        Some(_) | None => None,
    };
    ContainerInfo {
        id,
        name,
        run: get(LABEL_RUN).and_then(|text| text.parse().ok()),
        attempt: get(LABEL_ATTEMPT).map(str::to_owned),
        epoch: get(LABEL_EPOCH).and_then(|text| text.parse().ok()),
        purpose,
        deadline: get(LABEL_DEADLINE).and_then(|text| text.parse().ok()),
        state,
    }
}

impl DockerProvider {
    /// All containers with our label on this host, of any run, in order of name. What the daemon
    /// only lists and does not have is left out.
    ///
    /// # Errors
    /// When the daemon does not list them in time.
    pub async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        self.shared.list().await
    }

    /// Removes what dead programs left behind, for `orchestrate gc`.
    ///
    /// # Errors
    /// When the daemon does not list containers; a failed removal is told in the report.
    pub async fn sweep_all_orphans(&self, scope: GcScope) -> Result<SweepReport, SandboxError> {
        let now = unix_micros() / 1_000_000;
        self.shared.remove_where(|info| verdict_for_gc(info, scope, now)).await
    }

    /// Removes what a dead coordinator of `run`, or one before it, created and never started. Only
    /// for a coordinator that is dead: a live one is about to start them.
    ///
    /// # Errors
    /// When the daemon does not list containers; a failed removal is told in the report.
    pub async fn sweep_unstarted(
        &self,
        run: RunId,
        epoch: i64,
    ) -> Result<SweepReport, SandboxError> {
        self.shared.remove_where(|info| verdict_for_unstarted(info, run, epoch)).await
    }
}

impl Shared {
    async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        let daemon = &self.daemon;
        let options = ListContainersOptions {
            all: true,
            filters: Some(HashMap::from([("label".to_owned(), vec![LABEL_RUN.to_owned()])])),
            ..Default::default()
        };
        let listed = daemon
            .call(daemon.docker.list_containers(Some(options)))
            .await
            .map_err(|error| error.at(&daemon.host, "list"))?;
        let mut found = Vec::with_capacity(listed.len());
        for container in listed {
            let Some(id) = container.id else { continue };
            let name = container.names.unwrap_or_default().into_iter().next();
            let name = name.map(|name| name.trim_start_matches('/').to_owned());
            let name = match name.filter(|name| !name.is_empty()) {
                Some(name) => name,
                None if self.is_only_listed(&id).await? => continue,
                None => id.clone(),
            };
            let state = container.state.map(|state| state.to_string()).unwrap_or_default();
            found.push(read_labels(id, name, state, &container.labels.unwrap_or_default()));
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Whether the daemon lists a container that it does not have: one that was killed and finds
    /// its containers alive removes them while it still writes them down, and lists what it wrote
    /// last, dead and without a name, until its next start.
    async fn is_only_listed(&self, id: &str) -> Result<bool, SandboxError> {
        let daemon = &self.daemon;
        match daemon.call(daemon.docker.inspect_container(id, None)).await {
            Ok(_) => Ok(false),
            Err(CallError::Status(404, _)) => Ok(true),
            Err(error) => Err(error.at(id, "inspect")),
        }
    }

    pub(crate) async fn sweep_epochs(
        &self,
        run: RunId,
        epoch: i64,
    ) -> Result<SweepReport, SandboxError> {
        self.remove_where(|info| verdict_for_sweep(info, run, epoch)).await
    }

    /// Sweeps again and again: the daemon may still be creating what a coordinator asked for that
    /// was killed since, and tells of it only when it is done.
    pub(crate) async fn keep_sweeping(
        self: Arc<Self>,
        run: RunId,
        epoch: i64,
        stop: CancellationToken,
    ) {
        while stop.run_until_cancelled(tokio::time::sleep(AGAIN_EVERY)).await.is_some() {
            match self.sweep_epochs(run, epoch).await {
                Ok(swept) if swept.removed.is_empty() => {}
                Ok(swept) => tracing::info!(removed = ?swept.removed, "an earlier coordinator's"),
                Err(error) => tracing::warn!(%error, "cannot look for containers left behind"),
            }
        }
    }

    /// Removes what is left of the containers that this provider was asked for, and of earlier
    /// coordinators of the same runs, after their own removals: a daemon that was killed meanwhile
    /// may have forgotten a name and kept the rest. Answers names of those that stay.
    pub(crate) async fn remove_own(&self) -> Result<Vec<String>, SandboxError> {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ours = |(run, epoch): (RunId, i64)| {
            owners.iter().any(|&(owner, last)| run == owner && epoch <= last)
        };
        let mut found = self.list().await?;
        let here: HashSet<&str> = found.iter().map(|info| info.name.as_str()).collect();
        for held in self.remover.quarantined() {
            if !here.contains(held.name.as_str()) {
                self.remover.release(&held.name);
            }
        }
        found.retain(|info| info.run.zip(info.epoch).is_some_and(ours));
        let outcomes = self.remove_all(found).await;
        Ok(outcomes
            .into_iter()
            .filter(|(_, error)| error.is_some())
            .map(|(name, _)| name)
            .collect())
    }

    async fn remove_where(
        &self,
        verdict: impl Fn(&ContainerInfo) -> Verdict,
    ) -> Result<SweepReport, SandboxError> {
        let mut report = SweepReport::default();
        let mut doomed = Vec::new();
        for info in self.list().await? {
            match verdict(&info) {
                Verdict::Remove => doomed.push(info),
                Verdict::Keep(reason) => report.kept.push((info.name, reason.to_owned())),
            }
        }
        for (name, error) in self.remove_all(doomed).await {
            match error {
                None => report.removed.push(name),
                Some(reason) => report.failed.push((name, reason)),
            }
        }
        report.removed.sort();
        Ok(report)
    }

    /// Names, each with the reason where it could not be removed.
    async fn remove_all(&self, doomed: Vec<ContainerInfo>) -> Vec<(String, Option<String>)> {
        let removals = futures::stream::iter(doomed).map(|info| async move {
            let outcome = self.daemon.remove(&info.id).await;
            if outcome.is_ok() {
                self.remover.release(&info.name);
            }
            let reason = outcome.err().map(|e| e.at(&info.name, "remove").kind.to_string());
            (info.name, reason)
        });
        removals.buffer_unordered(self.config.remove_parallelism).collect().await
    }
}

impl std::fmt::Display for ContainerInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let run = self.run.map_or_else(|| "?".to_owned(), |run| run.to_string());
        let purpose = self.purpose.map_or('?', purpose_letter);
        write!(f, "{} run={run} purpose={purpose} state={}", self.name, self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(run: Option<RunId>, epoch: Option<i64>, deadline: Option<i64>) -> ContainerInfo {
        ContainerInfo {
            id: "0".into(),
            name: "x".into(),
            run,
            attempt: None,
            epoch,
            purpose: None,
            deadline,
            state: String::new(),
        }
    }

    #[test]
    fn only_older_epochs_of_the_same_run_are_swept() {
        let (ours, other) = (RunId::generate(), RunId::generate());
        let removed = |run, epoch| {
            matches!(verdict_for_sweep(&info(run, epoch, Some(0)), ours, 5), Verdict::Remove)
        };
        assert!(removed(Some(ours), Some(4)));
        assert!(!removed(Some(ours), Some(5)));
        assert!(!removed(Some(ours), Some(6)));
        assert!(!removed(Some(ours), None));
        assert!(!removed(Some(other), Some(4)));
        assert!(!removed(None, Some(4)));
    }

    #[test]
    fn of_the_dead_only_what_never_started_is_taken() {
        let run = RunId::generate();
        let removed = |epoch, state: &str| {
            let info = ContainerInfo { state: state.into(), ..info(Some(run), Some(epoch), None) };
            matches!(verdict_for_unstarted(&info, run, 5), Verdict::Remove)
        };
        assert!(removed(5, CREATED) && removed(4, CREATED));
        assert!(!removed(6, CREATED), "a later coordinator is about to start it");
        assert!(!removed(5, "running"));
    }

    #[test]
    fn gc_takes_what_expired_and_what_it_was_told() {
        let run = RunId::generate();
        let removed = |info: &ContainerInfo, scope| {
            matches!(verdict_for_gc(info, scope, 100), Verdict::Remove)
        };
        assert!(removed(&info(None, None, Some(99)), GcScope::Expired));
        assert!(!removed(&info(Some(run), None, Some(101)), GcScope::Expired));
        assert!(!removed(&info(Some(run), None, None), GcScope::Expired));
        assert!(removed(&info(Some(run), None, Some(101)), GcScope::Run(run)));
        assert!(!removed(&info(None, None, Some(101)), GcScope::Run(run)));
    }

    #[test]
    fn labels_that_make_no_sense_read_as_absent() {
        let labels = HashMap::from([
            (LABEL_RUN.to_owned(), "none".to_owned()),
            (LABEL_EPOCH.to_owned(), "x".to_owned()),
            (LABEL_PURPOSE.to_owned(), "agent".to_owned()),
        ]);
        let info = read_labels("0".into(), "n".into(), "running".into(), &labels);
        assert_eq!((info.run, info.epoch, info.purpose), (None, None, Some(Purpose::Agent)));
    }
}
