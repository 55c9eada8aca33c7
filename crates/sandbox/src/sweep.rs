//! Leftover containers: found by label, and removed only if a rule says that their owner is gone.

use crate::api::{Purpose, SweepReport};
use crate::container::{
    LABEL_ATTEMPT, LABEL_DEADLINE, LABEL_EPOCH, LABEL_PURPOSE, LABEL_RUN, purpose_letter,
};
use crate::daemon::CallError;
use crate::error::SandboxError;
use crate::provider::DockerProvider;
use crate::state::ProviderState;
use bollard::query_parameters::ListContainersOptions;
use futures::StreamExt as _;
use orchestrate_types::{RunId, unix_micros};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between sweeps for containers that appear after their coordinator is gone.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// State that Docker reports for a container that was never started.
const CREATED: &str = "created";

/// A container of this program, as its labels describe it. A missing or invalid label is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerInfo {
    /// Docker's id of the container.
    pub id: String,
    /// Container name, or its id if it has no name, as after the daemon was killed while removing
    /// it.
    pub name: String,
    /// Id of the run that it belongs to.
    pub run: Option<RunId>,
    /// Id of the attempt that it belongs to, or `pooled` if it serves several.
    pub attempt: Option<String>,
    /// Epoch of the coordinator that created it.
    pub epoch: Option<i64>,
    /// Whether it is for the agent or the grader.
    pub purpose: Option<Purpose>,
    /// Unix time in seconds after which it cannot be in use any more.
    pub deadline: Option<i64>,
    /// State that Docker reports, e.g. `running`.
    pub state: String,
}

/// Which containers [`DockerProvider::sweep_all_orphans`] removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcScope {
    /// Containers of any run whose deadline has passed. Safe while other runs are active.
    Expired,
    /// The expired ones, and all containers of this run. Only for a run whose coordinator is dead.
    Run(RunId),
}

enum Verdict {
    Remove,
    Keep(&'static str),
}

/// Removes containers that older coordinators of the same run left. All others may still be in use.
fn verdict_for_sweep(info: &ContainerInfo, run: RunId, epoch: i64) -> Verdict {
    match (info.run, info.epoch) {
        (Some(owner), _) if owner != run => Verdict::Keep("belongs to another run"),
        (Some(_), Some(theirs)) if theirs < epoch => Verdict::Remove,
        (Some(_), Some(_)) => Verdict::Keep("belongs to this coordinator or a later one"),
        (None, _) | (Some(_), None) => Verdict::Keep("its labels are missing or invalid"),
    }
}

/// Removes containers that were created but never started: they have no process that would end by
/// itself.
fn verdict_for_unstarted(info: &ContainerInfo, run: RunId, epoch: i64) -> Verdict {
    if info.state != CREATED {
        return Verdict::Keep("it was started and ends by itself");
    }
    verdict_for_sweep(info, run, epoch.saturating_add(1))
}

fn verdict_for_gc(info: &ContainerInfo, scope: GcScope, now: i64) -> Verdict {
    let in_scope = match scope {
        GcScope::Expired => false,
        GcScope::Run(run) => info.run == Some(run),
    };
    match info.deadline {
        _ if in_scope => Verdict::Remove,
        Some(deadline) if deadline < now => Verdict::Remove,
        Some(_) => Verdict::Keep("its deadline has not passed"),
        None => Verdict::Keep("its labels are missing or invalid"),
    }
}

fn read_labels(
    id: String,
    name: String,
    state: String,
    labels: &HashMap<String, String>,
) -> ContainerInfo {
    // A label that cannot be read is shown as absent, and such a container is kept with that as the reason:
    // whose it is cannot be known.
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
    /// Lists the containers of this program on the host, of any run, sorted by name. Containers
    /// that the daemon lists but no longer has are left out.
    ///
    /// # Errors
    /// Any error of the daemon.
    pub async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        self.state.list().await
    }

    /// Removes leftover containers, for `orchestrate gc`.
    ///
    /// # Errors
    /// Any error of the daemon when it lists containers. Failed removals are part of the report.
    pub async fn sweep_all_orphans(&self, scope: GcScope) -> Result<SweepReport, SandboxError> {
        let now = unix_micros() / 1_000_000;
        self.state.remove_where(|info| verdict_for_gc(info, scope, now)).await
    }

    /// Removes containers that the coordinator of `run` with this epoch, or an earlier one, created
    /// and never started. The coordinator must be dead: a live one is about to start them.
    ///
    /// # Errors
    /// Any error of the daemon when it lists containers. Failed removals are part of the report.
    pub async fn sweep_unstarted(
        &self,
        run: RunId,
        epoch: i64,
    ) -> Result<SweepReport, SandboxError> {
        self.state.remove_where(|info| verdict_for_unstarted(info, run, epoch)).await
    }
}

impl ProviderState {
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
                None if self.is_stale_record(&id).await? => continue,
                None => id.clone(),
            };
            let state = container.state.map(|state| state.to_string()).unwrap_or_default();
            found.push(read_labels(id, name, state, &container.labels.unwrap_or_default()));
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Whether the daemon lists a container that it does not have. A daemon that was killed and
    /// finds its containers alive removes them while it still records them. Until its next start it
    /// lists the last record: a dead container without a name.
    async fn is_stale_record(&self, id: &str) -> Result<bool, SandboxError> {
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

    /// Sweeps periodically: the daemon may still be creating a container for a coordinator that was
    /// killed, and lists it only once it exists.
    pub(crate) async fn keep_sweeping(
        self: Arc<Self>,
        run: RunId,
        epoch: i64,
        stop: CancellationToken,
    ) {
        while stop.run_until_cancelled(tokio::time::sleep(SWEEP_INTERVAL)).await.is_some() {
            match self.sweep_epochs(run, epoch).await {
                Ok(swept) if swept.removed.is_empty() => {}
                Ok(swept) => {
                    tracing::info!(removed = ?swept.removed, "removed leftover containers");
                }
                Err(error) => tracing::warn!(%error, "cannot list leftover containers"),
            }
        }
    }

    /// Removes what is left of the containers of this provider, and of earlier coordinators of the
    /// same runs. Called after the regular removals, because a daemon that was killed in between
    /// may have lost a name and kept the container. Returns the names of those that could not be
    /// removed.
    pub(crate) async fn remove_own(&self) -> Result<Vec<String>, SandboxError> {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ours = |(run, epoch): (RunId, i64)| {
            owners.iter().any(|&(owner, last)| run == owner && epoch <= last)
        };
        let mut found = self.list().await?;
        let existing: HashSet<&str> = found.iter().map(|info| info.name.as_str()).collect();
        for container in self.remover.quarantined() {
            if !existing.contains(container.name.as_str()) {
                self.remover.release(&container.name);
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
        let mut to_remove = Vec::new();
        for info in self.list().await? {
            match verdict(&info) {
                Verdict::Remove => to_remove.push(info),
                Verdict::Keep(reason) => report.kept.push((info.name, reason.to_owned())),
            }
        }
        for (name, error) in self.remove_all(to_remove).await {
            match error {
                None => report.removed.push(name),
                Some(reason) => report.failed.push((name, reason)),
            }
        }
        report.removed.sort();
        Ok(report)
    }

    /// Removes containers. Returns their names, each with the reason if it could not be removed.
    async fn remove_all(&self, containers: Vec<ContainerInfo>) -> Vec<(String, Option<String>)> {
        let removals = futures::stream::iter(containers).map(|info| async move {
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
    fn sweep_removes_older_epochs_of_the_same_run_only() {
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
    fn sweep_unstarted_keeps_started_containers_and_later_coordinators() {
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
    fn gc_removes_expired_containers_and_the_given_run() {
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
    fn invalid_labels_read_as_missing() {
        let labels = HashMap::from([
            (LABEL_RUN.to_owned(), "none".to_owned()),
            (LABEL_EPOCH.to_owned(), "x".to_owned()),
            (LABEL_PURPOSE.to_owned(), "agent".to_owned()),
        ]);
        let info = read_labels("0".into(), "n".into(), "running".into(), &labels);
        assert_eq!((info.run, info.epoch, info.purpose), (None, None, Some(Purpose::Agent)));
    }
}
