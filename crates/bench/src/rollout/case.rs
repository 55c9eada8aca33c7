//! One case: its processes and episodes, and the resulting numbers.

use super::agents::{Agents, Reading};
use super::checker::Checker;
use super::engines::Engines;
use super::observed::Observed;
use super::observers::cpu_time;
use super::polls::LongestPoll;
use super::processors::Processors;
use super::stalls::{LateTimers, Stalls};
use super::world::World;
use crate::heap::Counting;
use camino::Utf8Path;
use orchestrate_cli::output;
use orchestrate_engine::{Engine, Fleet, FleetOptions, FleetWorker, SglangClient, SglangOptions};
use orchestrate_rollout::{
    Actor, AgentSection, EpisodeKind, EpisodeRequest, EpisodeRunner, Episodes, GradingRules,
    PrefillLeaders, RowSharing, Sandboxed, Scaffold,
};
use orchestrate_routing::{CacheOptions, MixedRows, PrefixCache, SharingScope};
use orchestrate_sandbox::SandboxLimits;
use orchestrate_synthetic::{AgentJob, Latency, SyntheticSandboxes, grade};
use orchestrate_types::{AttemptId, ByteSize, EpisodeId, GroupId, PolicyVersion, RunId};
use rustix::process::Pid;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Bytes of one token in an episode: id, loss mask, log-probability, policy version.
const TOKEN_BYTES: usize = 4 + 1 + 4 + 8;
/// Policy version of all rows.
const VERSION: PolicyVersion = PolicyVersion(1);
const PATIENCE: Duration = Duration::from_mins(1);

/// What happens to the first worker after half of all turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Lives,
    /// SIGKILL, without a restart.
    Dies,
    /// SIGKILL, and a restart at the same address after this time.
    DiesAndReturns(Duration),
}

/// Definition of a case.
#[derive(Debug, Clone)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) conversations: usize,
    pub(super) group_size: usize,
    pub(super) turns: usize,
    pub(super) workers: usize,
    pub(super) fate: Fate,
    /// If each conversation belongs to an agent with its own loop, which samples through the gateway:
    /// how it reads replies.
    pub(super) agents: Option<Reading>,
    pub(super) latency: Latency,
    /// Time over which the starts of episodes are spread.
    pub(super) ramp: Duration,
    pub(super) limits: Limits,
}

/// Limits of a case. In addition, no case may lose an episode or have a wrong row.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Limits {
    /// Minimum share of the possible prefix-cache hits, over conversations that stayed on their worker.
    pub(super) hit_share: Option<f64>,
    pub(super) cpu_us_per_turn: Option<f64>,
    pub(super) bytes_per_open_episode: Option<f64>,
    pub(super) added_p99_ms: Option<f64>,
    pub(super) loop_held_max_ms: Option<f64>,
}

/// Results of one case.
#[derive(Debug, Serialize)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) conversations: usize,
    pub(super) workers: usize,
    /// Number of answered turns.
    pub(super) turns: usize,
    pub(super) seconds: f64,
    pub(super) turns_per_s: f64,
    /// Processor time of this process per turn of the second half, without threads that only measure.
    pub(super) cpu_us_per_turn: f64,
    /// Number of open conversations when memory was measured.
    pub(super) open_episodes: usize,
    /// Heap growth per open episode, in bytes.
    pub(super) heap_per_open_episode: f64,
    /// The same, without tokens and rows.
    pub(super) bytes_per_open_episode: f64,
    /// Time between a reply and the conversation's next request, as seen by the engine.
    pub(super) added_p50_ms: f64,
    pub(super) added_p99_ms: f64,
    /// Time between a reply's first token at the engine and its first text at the agent; absent without
    /// agents that read streams.
    pub(super) first_text_p50_ms: Option<f64>,
    pub(super) first_text_p99_ms: Option<f64>,
    /// Share of the possible prefix-cache hits, in prompt tokens.
    pub(super) hit_share: f64,
    /// The same, over conversations that stayed on their worker.
    pub(super) hit_share_unmoved: f64,
    pub(super) loop_lag_p99_ms: f64,
    pub(super) loop_lag_max_ms: f64,
    /// The same, without pauses of the machine, where these can be detected.
    pub(super) loop_held_max_ms: f64,
    /// The longest pause of the machine; absent where pauses cannot be detected.
    pub(super) stall_max_ms: Option<f64>,
    /// Processor time of the longest poll of an episode.
    pub(super) longest_poll_ms: f64,
    /// Number of conversations that were moved to another worker.
    pub(super) moved_episodes: usize,
    /// Number of episodes without a reward or without all rows.
    pub(super) lost_episodes: usize,
    pub(super) rows_checked: usize,
    pub(super) wrong_rows: usize,
    /// Number of rows that were shared with another episode and not sent again.
    pub(super) shared_rows: u64,
    pub(super) routing_wire_bytes: u64,
    pub(super) limits: Limits,
    pub(super) ok: bool,
    /// Reason for the first lost episode.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) note: String,
}

/// Runs a case.
pub(super) async fn measure(
    kind: &Kind,
    world: &World,
    processors: &Processors,
    folder: &Utf8Path,
) -> anyhow::Result<Case> {
    let plan = world.engine_plan(kind.turns, kind.latency)?;
    let mut engines = Engines::start(kind.workers, &plan, &processors.engines, folder).await?;
    let fleet = Arc::new(fleet(kind, world, &engines.urls()).await?);
    let half = (kind.conversations * kind.turns / 2).max(1);
    let observed = Arc::new(Observed::new(Arc::clone(&fleet), world.page_tokens, half));
    observed.sync_weights(Utf8Path::new("/synthetic"), VERSION).await?;
    let agents = kind.agents.map(|reading| begin_agents(reading, world, processors)).transpose()?;
    let jobs = agents.as_ref().map(|agents| agents.jobs.clone());
    let runner = Arc::new(runner(kind, world, Arc::clone(&observed) as Arc<dyn Engine>, jobs)?);
    let run = RunId::generate();
    let requests: Vec<EpisodeRequest> =
        (0..kind.conversations).map(|index| request(kind, run, index)).collect();

    let late_timers = LateTimers::default();
    let loop_lag = late_timers.watch();
    let longest_poll = Arc::new(LongestPoll::default());
    let (stalls, checker) = (Stalls::watch(&processors.coordinator), checker(world, processors)?);
    if let Err(error) = &stalls {
        output::say(format!("pauses of the machine are not detected: {error:#}"));
    }
    let watches = stalls.iter().flat_map(Stalls::threads).chain([checker.thread()]);
    let watches = watches.chain(agents.as_ref().map(Agents::thread));
    let observers: Vec<Pid> = watches.collect();
    let heap = Counting::begin();
    let begun = Instant::now();
    let mut episodes = JoinSet::new();
    for (index, request) in requests.into_iter().enumerate() {
        let (runner, longest_poll) = (Arc::clone(&runner), Arc::clone(&longest_poll));
        let start = begun + kind.ramp.mul_f64(index as f64 / kind.conversations as f64);
        episodes.spawn(async move {
            tokio::time::sleep_until(start).await;
            longest_poll.watch(runner.run(request, &CancellationToken::new())).await
        });
    }
    let halfway = async {
        observed.half_way().await;
        let (grown, summary) = (heap.grown(), observed.summary());
        // Counting allocations costs time that a run does not spend, so it ends before CPU time is
        // measured.
        drop(heap);
        let before = (cpu_time(&observers), observed.turns());
        apply(kind.fate, &mut engines).await?;
        anyhow::Ok((grown, summary, before))
    };
    let finished = async {
        while let Some(report) = episodes.join_next().await {
            checker.take(report?);
        }
        // Episodes that fail have fewer turns than planned.
        observed.end_first_half();
        anyhow::Ok(())
    };
    let ((grown, halfway, (cpu, turns_before)), ()) = tokio::try_join!(halfway, finished)?;
    let cpu = cpu_time(&observers).saturating_sub(cpu);
    let seconds = begun.elapsed().as_secs_f64();
    let lag = loop_lag.take();
    // Timers must not be recorded after pauses are no longer observed.
    drop(loop_lag);
    let blame = stalls.ok().map(|stalls| stalls.blame(&late_timers));
    let mut stats = engines.stats().await?;
    stats.gaps_us.sort_unstable();
    let checked = tokio::task::spawn_blocking(|| checker.end()).await??;
    drop(runner);
    let first_texts = Agents::end(agents).await?;
    let summary = observed.summary();
    let turns = observed.turns();
    let open = halfway.open_sessions.max(1) as f64;
    let own = halfway.open_tokens * (TOKEN_BYTES + world.shape.row_bytes());
    let case = Case {
        name: kind.name.to_owned(),
        conversations: kind.conversations,
        workers: kind.workers,
        turns,
        seconds,
        turns_per_s: turns as f64 / seconds,
        cpu_us_per_turn: cpu.as_secs_f64() * 1e6 / (turns - turns_before).max(1) as f64,
        open_episodes: halfway.open_sessions,
        heap_per_open_episode: grown as f64 / open,
        bytes_per_open_episode: (grown as f64 - own as f64) / open,
        added_p50_ms: quantile_ms(&stats.gaps_us, 50),
        added_p99_ms: quantile_ms(&stats.gaps_us, 99),
        first_text_p50_ms: (!first_texts.is_empty()).then(|| quantile_ms(&first_texts, 50)),
        first_text_p99_ms: (!first_texts.is_empty()).then(|| quantile_ms(&first_texts, 99)),
        hit_share: summary.all.share(),
        hit_share_unmoved: summary.unmoved.share(),
        loop_lag_p99_ms: lag.p99.as_secs_f64() * 1e3,
        loop_lag_max_ms: lag.max.as_secs_f64() * 1e3,
        loop_held_max_ms: blame.map_or(lag.max, |blame| blame.held_max).as_secs_f64() * 1e3,
        stall_max_ms: blame.map(|blame| blame.stall_max.as_secs_f64() * 1e3),
        longest_poll_ms: longest_poll.milliseconds(),
        moved_episodes: summary.moved_sessions,
        lost_episodes: checked.lost,
        rows_checked: checked.rows,
        wrong_rows: checked.wrong,
        shared_rows: checked.shared_rows,
        routing_wire_bytes: checked.routing_wire_bytes,
        limits: kind.limits,
        ok: false,
        note: checked.note,
    };
    let ok = case.keeps_limits() && checked.episodes == kind.conversations;
    Ok(Case { ok, ..case })
}

impl Case {
    fn keeps_limits(&self) -> bool {
        let Limits {
            hit_share,
            cpu_us_per_turn,
            bytes_per_open_episode,
            added_p99_ms,
            loop_held_max_ms,
        } = self.limits;
        let below = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
        self.lost_episodes == 0
            && self.wrong_rows == 0
            && hit_share.is_none_or(|least| self.hit_share_unmoved >= least)
            && below(self.cpu_us_per_turn, cpu_us_per_turn)
            && below(self.bytes_per_open_episode, bytes_per_open_episode)
            && below(self.added_p99_ms, added_p99_ms)
            && below(self.loop_held_max_ms, loop_held_max_ms)
    }
}

async fn fleet(kind: &Kind, world: &World, urls: &[String]) -> anyhow::Result<Fleet> {
    let mut members = Vec::with_capacity(urls.len());
    for url in urls {
        let options = SglangOptions {
            url: url.clone(),
            api_key: None,
            tls: orchestrate_engine::TlsClientPem::default(),
            shape: world.shape.clone(),
            max_in_flight: kind.conversations,
            require_routed_experts: true,
            sync_timeout: PATIENCE,
            served_model: None,
            chat: orchestrate_engine::ChatServerOptions::default(),
        };
        let (client, _) = SglangClient::connect(options, PATIENCE).await?;
        members.push(FleetWorker { name: url.clone(), engine: Arc::new(client), is_up: true });
    }
    let options = FleetOptions {
        max_in_flight: kind.conversations,
        probe_interval: Duration::from_secs(1),
        out_of_service_timeout: PATIENCE,
    };
    Ok(Fleet::start(members, options)?)
}

fn runner(
    kind: &Kind,
    world: &World,
    engine: Arc<dyn Engine>,
    agents: Option<mpsc::Sender<AgentJob>>,
) -> anyhow::Result<EpisodeRunner> {
    let (scaffold, actor) = if kind.agents.is_some() {
        let agent = AgentSection { command: Some("work".to_owned()), ..AgentSection::default() };
        let agent = agent.check().map_err(|problems| anyhow::anyhow!("{problems:?}"))?;
        (Scaffold::Command, Actor::Program(Arc::new(agent)))
    } else {
        (Scaffold::Tools, Actor::Scaffold(Arc::default()))
    };
    let cache = PrefixCache::open(CacheOptions { bytes: ByteSize::mib(512).0, spill: None })?;
    Ok(EpisodeRunner {
        engine,
        chat: Arc::clone(&world.chat),
        settings: Arc::new(World::rollout_plan(kind.turns, scaffold)?),
        rows: RowSharing {
            cache: Some(Arc::new(cache)),
            scope: SharingScope::Worker,
            mixed: MixedRows::Mask,
        },
        prefill_leaders: PrefillLeaders::default(),
        kind: EpisodeKind::Sandboxed(Sandboxed {
            actor,
            provider: Arc::new(SyntheticSandboxes { output: world.observation.to_owned(), agents }),
            limits: SandboxLimits {
                memory: ByteSize::mib(1),
                cpu_millis: 1,
                pids: 1,
                tmpfs: ByteSize::mib(1),
            },
            rules: GradingRules::new(grade),
            logs: None,
        }),
    })
}

fn request(kind: &Kind, run: RunId, index: usize) -> EpisodeRequest {
    let (group, member) = (index / kind.group_size, index % kind.group_size);
    let group_id = GroupId::Train { seq: u32::try_from(group).unwrap_or(u32::MAX) };
    let member = u16::try_from(member).unwrap_or(u16::MAX);
    EpisodeRequest {
        run,
        epoch: 1,
        attempt: AttemptId { episode: EpisodeId { group: group_id, member }, attempt: 1 },
        task: World::task(group),
        policy_version: VERSION,
        seed: index as u64,
        temperature: 1.0,
        want_routing: true,
    }
}

async fn apply(fate: Fate, engines: &mut Engines) -> anyhow::Result<()> {
    match fate {
        Fate::Lives => Ok(()),
        Fate::Dies => engines.kill(0).await,
        Fate::DiesAndReturns(pause) => {
            engines.kill(0).await?;
            tokio::time::sleep(pause).await;
            engines.restart(0).await
        }
    }
}

fn begin_agents(
    reading: Reading,
    world: &World,
    processors: &Processors,
) -> anyhow::Result<Agents> {
    Agents::begin(processors.engines.clone(), world.observation.trim_end(), reading)
}

fn checker(world: &World, processors: &Processors) -> anyhow::Result<Checker> {
    Checker::begin(world.shape.clone(), VERSION, processors.engines.clone())
}

/// A percentile of sorted values, by the nearest-rank method.
fn quantile_ms(sorted_us: &[u32], percent: usize) -> f64 {
    let last = sorted_us.len().saturating_sub(1);
    let index = (sorted_us.len() * percent).div_ceil(100).saturating_sub(1).min(last);
    sorted_us.get(index).map_or(f64::NAN, |us| f64::from(*us) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_the_nearest_rank() {
        let values: Vec<u32> = (1..=200).map(|ms| ms * 1000).collect();
        let found = [50, 99, 100].map(|percent| quantile_ms(&values, percent).to_string());
        assert_eq!(found, ["100", "198", "200"]);
        assert!(quantile_ms(&[], 50).is_nan());
    }
}
