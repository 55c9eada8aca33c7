//! The measured work of each case, on real containers.

use super::case::{Case, Limits, Memory};
use anyhow::{Context, ensure};
use futures::future::try_join_all;
use orchestrate_cli::SandboxUnderTest;
use orchestrate_sandbox::{
    Command, DockerProvider, FileEntry, Owner, Purpose, Sandbox, SandboxProvider, SandboxSettings,
    SandboxSpec,
};
use orchestrate_types::{AttemptId, EpisodeId, GroupId, RunId};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Number of sandboxes that run commands concurrently in `commands_parallel`.
const COMMAND_SANDBOXES: u32 = 4;
/// Number of sandboxes opened concurrently in `parallel_start_16`.
const STARTED_AT_ONCE: u32 = 16;
/// Number of rounds of `parallel_start_16`.
const START_ROUNDS: u32 = 2;
/// Maximum time for the removal of a container.
const REMOVAL_TIMEOUT: Duration = Duration::from_mins(2);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The sandboxes under test.
#[derive(Debug)]
pub(super) struct World {
    pub(super) sandbox: SandboxUnderTest,
    pub(super) run: RunId,
}

impl World {
    fn spec(&self, index: u32, reusable: bool) -> SandboxSpec {
        let group = GroupId::Eval { round: 0, index };
        let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
        SandboxSpec {
            image: self.sandbox.image.clone(),
            purpose: Purpose::Agent,
            owner: Owner { run: self.run, epoch: 0, attempt },
            workdir: self.sandbox.workdir.clone(),
            limits: self.sandbox.limits,
            deadline: Duration::from_mins(15),
            reusable,
        }
    }

    /// Connects a provider with room for `room` sandboxes of one purpose: up to an eighth of the
    /// containers is reserved for graders.
    async fn provider(&self, room: u32, reuse: bool) -> anyhow::Result<DockerProvider> {
        let room = usize::try_from(room)? * 8 / 7 + 2;
        let max_containers = self.sandbox.config.max_containers.max(room);
        let config = SandboxSettings { max_containers, reuse, ..self.sandbox.config.clone() };
        Ok(DockerProvider::connect(config).await?)
    }

    async fn open(
        &self,
        provider: &DockerProvider,
        index: u32,
    ) -> anyhow::Result<Box<dyn Sandbox>> {
        Ok(provider.open(&self.spec(index, true)).await?)
    }
}

/// Waits until the provider has removed `removed` containers in total.
async fn wait_until_removed(provider: &DockerProvider, removed: u64) -> anyhow::Result<()> {
    let polling = async {
        while provider.stats().removed < removed {
            sleep(POLL_INTERVAL).await;
        }
    };
    timeout(REMOVAL_TIMEOUT, polling).await.context("a container was not removed within 2 minutes")
}

fn true_command() -> Command {
    let mut command = Command::shell("", Duration::from_secs(20));
    command.argv = vec!["true".to_owned()];
    command
}

async fn run_true(sandbox: &mut Box<dyn Sandbox>) -> anyhow::Result<Duration> {
    let began = Instant::now();
    let result = sandbox.exec(&true_command()).await?;
    let took = began.elapsed();
    ensure!(result.success(), "`true` ended with {:?}", result.exit);
    Ok(took)
}

/// Cases `start`, `start_writable` and `start_floor` in rotation, and `remove`.
pub(super) async fn starts(world: &World, rounds: u32) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(4, false).await?;
    // The first start builds the image that contains the supervisor.
    world.open(&provider, 0).await?.close().await?;
    wait_until_removed(&provider, 1).await?;
    let (mut reusable, mut writable) = (Vec::new(), Vec::new());
    let (mut floor, mut removals) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // The order rotates, because each step affects the next.
        for step in 0..3 {
            let kind = (round + step) % 3;
            if kind == 2 {
                let bare = provider.start_bare(&world.sandbox.image, round).await?;
                floor.push(bare.started_in);
                bare.close().await?;
                continue;
            }
            let spec = world.spec(round, kind == 0);
            let began = Instant::now();
            let sandbox = provider.open(&spec).await?;
            let took = began.elapsed();
            if kind == 0 {
                reusable.push(took);
            } else {
                writable.push(took);
            }
            let removed = provider.stats().removed;
            let began = Instant::now();
            sandbox.close().await?;
            wait_until_removed(&provider, removed + 1).await?;
            removals.push(began.elapsed());
        }
    }
    provider.shutdown().await?;
    let floor = Case::in_turn("start_floor", floor);
    let limits = Limits { by_floor: Some(1.15), ..Limits::default() };
    Ok(vec![
        Case::in_turn("start", reusable).above(&floor).within(limits),
        Case::in_turn("start_writable", writable).above(&floor),
        floor,
        Case::in_turn("remove", removals),
    ])
}

/// Cases `command` and `exec_floor`, interleaved.
pub(super) async fn commands(world: &World, count: u32) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(2, true).await?;
    let mut sandbox = world.open(&provider, 0).await?;
    let bare = provider.start_bare(&world.sandbox.image, 0).await?;
    run_true(&mut sandbox).await?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for number in 0..count {
        ours.push(run_true(&mut sandbox).await?);
        if number % 10 == 0 {
            floor.push(bare.exec_true().await?);
        }
    }
    bare.close().await?;
    sandbox.close().await?;
    provider.shutdown().await?;
    let floor = Case::in_turn("exec_floor", floor);
    let limits = Limits { p50_ms: Some(5.0), p99_ms: Some(20.0), ..Limits::default() };
    Ok(vec![Case::in_turn("command", ours).above(&floor).within(limits), floor])
}

/// Case `commands_parallel`.
pub(super) async fn commands_parallel(world: &World, count: u32) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(COMMAND_SANDBOXES, true).await?;
    let opening = (0..COMMAND_SANDBOXES).map(|index| world.open(&provider, index));
    let sandboxes = try_join_all(opening).await?;
    let began = Instant::now();
    let working = sandboxes.into_iter().map(async |mut sandbox| {
        let mut samples = Vec::new();
        for _ in 0..count.div_ceil(COMMAND_SANDBOXES) {
            samples.push(run_true(&mut sandbox).await?);
        }
        anyhow::Ok((sandbox, samples))
    });
    let done = try_join_all(working).await?;
    let wall = began.elapsed();
    let mut samples = Vec::new();
    for (sandbox, own) in done {
        samples.extend(own);
        sandbox.close().await?;
    }
    provider.shutdown().await?;
    let limits = Limits { per_s: Some(200.0), ..Limits::default() };
    Ok(vec![Case::new("commands_parallel", samples, wall).within(limits)])
}

/// Case `parallel_start_16`.
pub(super) async fn parallel_start(world: &World) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(STARTED_AT_ONCE, false).await?;
    world.open(&provider, 0).await?.close().await?;
    wait_until_removed(&provider, 1).await?;
    let (mut samples, mut wall) = (Vec::new(), Duration::ZERO);
    for _ in 0..START_ROUNDS {
        let began = Instant::now();
        let opening = (0..STARTED_AT_ONCE).map(async |index| {
            let sandbox = world.open(&provider, index).await?;
            anyhow::Ok((sandbox, began.elapsed()))
        });
        let opened = try_join_all(opening).await?;
        wall += began.elapsed();
        let removed = provider.stats().removed + u64::from(STARTED_AT_ONCE);
        for (sandbox, took) in opened {
            samples.push(took);
            sandbox.close().await?;
        }
        wait_until_removed(&provider, removed).await?;
    }
    provider.shutdown().await?;
    Ok(vec![Case::new("parallel_start_16", samples, wall)])
}

/// Case `reuse`: the time between the end of one attempt's work and the start of the next one's.
pub(super) async fn reuse(world: &World, rounds: u32) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(1, true).await?;
    let mut sandbox = world.open(&provider, 0).await?;
    let dirt = ["a.py", "deep/er/b.py", "deep/c.py"].map(|path| FileEntry {
        path: path.to_owned(),
        mode: 0o644,
        content: vec![b'x'; 4096],
    });
    let leave = Command::shell("sleep 1000 & touch /tmp/x /dev/shm/y", Duration::from_secs(20));
    let mut samples = Vec::new();
    for index in 0..rounds {
        sandbox.write_files(&dirt).await?;
        ensure!(
            sandbox.exec(&leave).await?.success(),
            "failed to leave files and processes in the sandbox"
        );
        let began = Instant::now();
        sandbox.close().await?;
        sandbox = world.open(&provider, index).await?;
        samples.push(began.elapsed());
    }
    sandbox.close().await?;
    let stats = provider.stats();
    provider.shutdown().await?;
    ensure!(stats.started == 1, "a sandbox could not be reset: {stats:?}");
    Ok(vec![Case::in_turn("reuse", samples)])
}

/// Case `held_N`: `count` sandboxes are open at the same time, and each runs a command.
pub(super) async fn held(world: &World, count: u32) -> anyhow::Result<Vec<Case>> {
    let provider = world.provider(count, true).await?;
    let before = resident()?;
    let opening = (0..count).map(|index| world.open(&provider, index));
    let mut sandboxes = try_join_all(opening).await?;
    let mut samples = Vec::new();
    for sandbox in &mut sandboxes {
        samples.push(run_true(sandbox).await?);
    }
    let own = resident()?.saturating_sub(before);
    let used = provider.memory(world.run).await?;
    for sandbox in sandboxes {
        sandbox.close().await?;
    }
    provider.shutdown().await?;
    let each = |bytes: u64| bytes / u64::from(count.max(1));
    let shims = used.shims.map(|shims| shims.0);
    let memory = Memory {
        total: each(used.charged.0 + shims.unwrap_or(0) + own),
        charged: each(used.charged.0),
        shim: shims.map(each),
        own: each(own),
    };
    ensure!(
        used.containers == usize::try_from(count)?,
        "found {} containers, expected {count}",
        used.containers
    );
    Ok(vec![Case { memory: Some(memory), ..Case::in_turn(format!("held_{count}"), samples) }])
}

/// Resident memory of this process, in bytes.
fn resident() -> anyhow::Result<u64> {
    let status = fs_err::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("/proc/self/status has no VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? << 10)
}
