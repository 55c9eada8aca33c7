//! Synthetic engines, each a separate process.

use super::processors::list;
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_synthetic::{EnginePlan, EngineStats};
use serde::{Deserialize, Serialize};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Time for an engine to start; it loads no weights.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const STATS_TIMEOUT: Duration = Duration::from_secs(30);

/// What an engine process prints once it listens.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Listening {
    pub(crate) address: std::net::SocketAddr,
}

/// The processes; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Engines {
    plan: Utf8PathBuf,
    /// Processors that they are pinned to.
    processors: String,
    processes: Vec<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    address: std::net::SocketAddr,
}

impl Engines {
    /// Starts `count` engines on free ports; the plan is written to `folder`.
    pub(super) async fn start(
        count: usize,
        plan: &EnginePlan,
        processors: &[usize],
        folder: &Utf8Path,
    ) -> anyhow::Result<Self> {
        let file = folder.join("engine.json");
        fs_err::write(&file, serde_json::to_vec(plan)?)?;
        let processes = Vec::with_capacity(count);
        let mut engines = Self { plan: file, processors: list(processors), processes };
        for _ in 0..count {
            let any_port = (std::net::Ipv4Addr::LOCALHOST, 0).into();
            engines.processes.push(start(&engines.plan, &engines.processors, any_port).await?);
        }
        Ok(engines)
    }

    pub(super) fn urls(&self) -> Vec<String> {
        self.processes.iter().map(|process| format!("http://{}", process.address)).collect()
    }

    /// Kills a process with SIGKILL and waits for its end.
    pub(super) async fn kill(&mut self, index: usize) -> anyhow::Result<()> {
        let process = self.processes.get_mut(index).context("no engine with this index")?;
        process.child.kill().await.context("failed to kill an engine process")
    }

    /// Restarts a killed engine at its old address, with an empty cache.
    pub(super) async fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        let process = self.processes.get_mut(index).context("no engine with this index")?;
        *process = start(&self.plan, &self.processors, process.address).await?;
        Ok(())
    }

    /// Combined statistics of all engines that are alive.
    pub(super) async fn stats(&mut self) -> anyhow::Result<EngineStats> {
        // Fails only where a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().no_proxy().timeout(STATS_TIMEOUT).build()?;
        let mut all = EngineStats::default();
        for process in &mut self.processes {
            if process.child.try_wait()?.is_some() {
                continue;
            }
            let url = format!("http://{}/synthetic/stats", process.address);
            let body = http.get(url).send().await?.error_for_status()?.bytes().await?;
            let stats: EngineStats = serde_json::from_slice(&body)?;
            all.answered += stats.answered;
            all.gaps_us.extend(stats.gaps_us);
        }
        Ok(all)
    }
}

async fn start(
    plan: &Utf8Path,
    processors: &str,
    address: std::net::SocketAddr,
) -> anyhow::Result<Process> {
    let program = std::env::current_exe().context("failed to find the path of this program")?;
    // On a single processor, engines get what the coordinator leaves.
    let mut child = Command::new("nice")
        .args(["-n", "10"])
        .arg(program)
        .args(["synthetic-engine", "--plan", plan.as_str(), "--listen", &address.to_string()])
        .args(["--processors", processors])
        // The engine ends when this pipe closes, however this process ends.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("failed to start an engine process")?;
    let stdout = child.stdout.take().context("an engine process has no standard output")?;
    let mut line = String::new();
    let mut stdout = BufReader::new(stdout);
    tokio::time::timeout(START_TIMEOUT, stdout.read_line(&mut line))
        .await
        .context("an engine process did not start in time")??;
    let listening: Listening = serde_json::from_str(&line)
        .with_context(|| format!("unexpected output of an engine process: {line:?}"))?;
    Ok(Process { child, address: listening.address })
}
