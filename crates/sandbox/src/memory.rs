//! Memory used by open sandboxes: in their control groups, and by Docker's shim process for each.

use crate::container::LABEL_RUN;
use crate::error::SandboxError;
use crate::provider::DockerProvider;
use bollard::query_parameters::{ListContainersOptions, StatsOptions};
use futures::{StreamExt as _, TryStreamExt as _};
use orchestrate_types::{ByteSize, RunId};
use std::collections::HashMap;

/// How many containers are queried at once.
const PARALLEL_QUERIES: usize = 16;

/// Memory of all running containers of a run together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct MemoryUse {
    /// Number of running containers.
    pub containers: usize,
    /// Bytes charged to their control groups: processes, tmpfs and page cache.
    pub charged: ByteSize,
    /// Proportional set size of Docker's shim processes; `None` if the processes of the daemon's
    /// machine are not visible from here.
    pub shims: Option<ByteSize>,
}

impl DockerProvider {
    /// Measures the memory of a run's containers, through the daemon, and of their shims, if the
    /// daemon runs on this machine.
    ///
    /// # Errors
    /// Any error of the daemon.
    pub async fn memory(&self, run: RunId) -> Result<MemoryUse, SandboxError> {
        let daemon = &self.state.daemon;
        let options = ListContainersOptions {
            filters: Some(HashMap::from([(
                "label".to_owned(),
                vec![format!("{LABEL_RUN}={run}")],
            )])),
            ..Default::default()
        };
        let listed = daemon
            .call(daemon.docker.list_containers(Some(options)))
            .await
            .map_err(|error| error.at(&daemon.host, "list"))?;
        let ids: Vec<String> = listed.into_iter().filter_map(|container| container.id).collect();
        // The daemon takes about a second per container.
        let charged: u64 = futures::stream::iter(&ids)
            .map(|id| self.charged(id))
            .buffer_unordered(PARALLEL_QUERIES)
            .try_fold(0_u64, async |sum, bytes| Ok(sum.saturating_add(bytes)))
            .await?;
        let shims = if daemon.is_local() { shims(&ids).map(ByteSize) } else { None };
        Ok(MemoryUse { containers: ids.len(), charged: ByteSize(charged), shims })
    }

    /// Memory charged to one container's control groups, in bytes.
    async fn charged(&self, id: &str) -> Result<u64, SandboxError> {
        let daemon = &self.state.daemon;
        let options = StatsOptions { stream: false, one_shot: true };
        let mut stats = daemon.docker.stats(id, Some(options));
        let found = daemon.call(stats.try_next()).await.map_err(|e| e.at(id, "stats"))?;
        let usage = found.and_then(|found| found.memory_stats).and_then(|memory| memory.usage);
        Ok(usage.unwrap_or(0))
    }
}

/// Proportional set size of the shim processes of the containers, in bytes. `None` if one of them
/// was not found, because the sum would be too small.
fn shims(ids: &[String]) -> Option<u64> {
    let (mut found, mut total) = (0, 0_u64);
    for entry in std::fs::read_dir("/proc").ok()? {
        let path = entry.ok()?.path();
        let Ok(line) = std::fs::read(path.join("cmdline")) else { continue };
        let arguments: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let is_shim = arguments.first().is_some_and(|program| program.ends_with(b"shim-runc-v2"));
        if is_shim && ids.iter().any(|id| arguments.contains(&id.as_bytes())) {
            let rollup = std::fs::read_to_string(path.join("smaps_rollup")).ok()?;
            let kibibytes = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
            total += kibibytes.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? << 10;
            found += 1;
        }
    }
    (found == ids.len()).then_some(total)
}
