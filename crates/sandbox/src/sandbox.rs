//! One open container.

mod changes;

use crate::api::{Command, ExecResult, Exit, FileEntry, Forward, Sandbox, TreeChanges, TreeMark};
use crate::error::{SandboxError, SandboxErrorKind};
use crate::forward::Carrier;
use crate::guard::ContainerGuard;
use crate::link::SupervisorLink;
use crate::loss;
use crate::slots::{IdleSandbox, ReuseKey};
use crate::state::ProviderState;
use orchestrate_supervisor::protocol::{
    CHUNK, CommandEnd, CommandReport, ExecRequest, Refusal, Reply, Request, is_safe_path,
};
use orchestrate_types::{ByteSize, HumanDuration};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};

/// Interval between pings during a command. The supervisor kills a command after a minute
/// without one.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// A reset kills a process tree and removes at most a few thousand files.
const RESET_TIMEOUT: Duration = Duration::from_secs(30);
/// A supervisor gives up a walk over a tree after a minute and a half.
const TREE_TIMEOUT: Duration = Duration::from_mins(3);
/// A supervisor gives up counting files after ten seconds, and kills the command before that.
const DISK_USE_TIMEOUT: Duration = Duration::from_secs(40);
/// Space that one file stands for at least, as file systems have one inode per 16 KiB.
const BYTES_PER_FILE: u64 = 16 << 10;
/// The signal reported for a command that was killed because of its output.
const SIGKILL: i32 = 9;

/// Whether a sandbox can still be used.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// A call is in progress, or its future was dropped and left the stream at an unknown position.
    Busy,
    /// A call failed.
    Lost(String),
}

/// A container with a connection to its supervisor.
#[derive(Debug)]
pub(crate) struct DockerSandbox {
    link: SupervisorLink,
    guard: ContainerGuard,
    provider: Arc<ProviderState>,
    /// `None` if the container serves one attempt only.
    key: Option<ReuseKey>,
    expires_at: Instant,
    /// Whether commands in it can write to the host's disk.
    pub(crate) writes_to_host_disk: bool,
    state: State,
    /// Whether a command was started in it since it was opened.
    has_run: bool,
    /// Whether any call failed. The container is not reused then, whatever its state seems to be.
    is_tainted: bool,
}

impl DockerSandbox {
    pub(crate) fn new(
        link: SupervisorLink,
        guard: ContainerGuard,
        provider: Arc<ProviderState>,
        key: Option<ReuseKey>,
        expires_at: Instant,
    ) -> Self {
        Self {
            link,
            guard,
            provider,
            key,
            expires_at,
            writes_to_host_disk: false,
            state: State::Ready,
            has_run: false,
            is_tainted: false,
        }
    }

    fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.guard.name().to_owned(), kind }
    }

    fn refused(&self, call: &'static str, Refusal(message): Refusal) -> SandboxError {
        self.error(SandboxErrorKind::Refused { call, message })
    }

    /// Marks the start of a call. Fails if an earlier call failed or was dropped.
    fn begin_call(&mut self) -> Result<(), SandboxError> {
        match std::mem::replace(&mut self.state, State::Busy) {
            State::Ready => Ok(()),
            State::Busy => {
                let reason = "an earlier call was dropped before it ended".to_owned();
                Err(self.error(SandboxErrorKind::Protocol(reason)))
            }
            State::Lost(reason) => {
                self.state = State::Lost(reason.clone());
                Err(self.error(SandboxErrorKind::Gone(reason)))
            }
        }
    }

    /// Marks the end of a call. The stream remains usable after a refusal, but not after other
    /// errors.
    fn end_call<T>(&mut self, result: Result<T, SandboxError>) -> Result<T, SandboxError> {
        self.is_tainted |= result.is_err();
        self.state = match &result {
            Ok(_) => State::Ready,
            Err(error) => match &error.kind {
                SandboxErrorKind::Refused { .. }
                | SandboxErrorKind::Failed { .. }
                | SandboxErrorKind::TooLarge { .. } => State::Ready,
                SandboxErrorKind::NoDaemon(_)
                | SandboxErrorKind::ImageMissing(_)
                | SandboxErrorKind::NotPulled { .. }
                | SandboxErrorKind::ImageChanged { .. }
                | SandboxErrorKind::NotRecorded { .. }
                | SandboxErrorKind::TimedOut { .. }
                | SandboxErrorKind::DiskFull(_)
                | SandboxErrorKind::Gone(_)
                | SandboxErrorKind::Damaged { .. }
                | SandboxErrorKind::Protocol(_)
                | SandboxErrorKind::NotClean(_)
                | SandboxErrorKind::SelfTestFailed(_) => State::Lost(error.kind.to_string()),
            },
        };
        result
    }

    /// Performs a call with a deadline.
    async fn call<T>(
        &mut self,
        call: &'static str,
        after: Duration,
        work: impl AsyncFnOnce(&mut Self) -> Result<T, SandboxError>,
    ) -> Result<T, SandboxError> {
        self.begin_call()?;
        let full_count = self.provider.disk.full_count();
        let result = match tokio::time::timeout(after, work(self)).await {
            Ok(result) => result,
            Err(_) => Err(self.error(SandboxErrorKind::TimedOut { call, after })),
        };
        let result = self.reject_if_disk_was_full(full_count, result);
        let result = match result {
            Err(error) => Err(self.blame(error).await),
            Ok(value) => Ok(value),
        };
        self.end_call(result)
    }

    /// Rejects a result if any sandbox on this host reported a full disk since `full_count` was
    /// read: the one that filled the disk is removed at once, perhaps before the others check it
    /// again.
    fn reject_if_disk_was_full<T>(
        &self,
        full_count: u64,
        result: Result<T, SandboxError>,
    ) -> Result<T, SandboxError> {
        match &result {
            Err(SandboxError { kind: SandboxErrorKind::DiskFull(_), .. }) => {
                self.provider.disk.record_full();
            }
            Ok(_) | Err(_)
                if self.writes_to_host_disk && self.provider.disk.full_count() != full_count =>
            {
                let message = "another sandbox on this host reported it during the call".to_owned();
                return Err(self.error(SandboxErrorKind::DiskFull(message)));
            }
            Ok(_) | Err(_) => {}
        }
        result
    }

    /// The same error, or [`SandboxErrorKind::Damaged`] if the container is gone because commands
    /// used up its own memory.
    async fn blame(&mut self, error: SandboxError) -> SandboxError {
        match error.kind {
            SandboxErrorKind::Gone(reason) if self.has_run => {
                let kind = match loss::cause(&self.provider.daemon, self.guard.name()).await {
                    Some(cause) => SandboxErrorKind::Damaged { what: format!("{cause}: {reason}") },
                    None => SandboxErrorKind::Gone(reason),
                };
                SandboxError { kind, ..error }
            }
            SandboxErrorKind::DiskFull(reason) if self.has_run && self.writes_to_host_disk => {
                let kind = match self.excessive_disk_use().await {
                    Some(what) => SandboxErrorKind::Damaged { what: format!("{what}: {reason}") },
                    None => SandboxErrorKind::DiskFull(reason),
                };
                SandboxError { kind, ..error }
            }
            _ => error,
        }
    }

    /// What the commands in this sandbox put on the host's disk, if that is more than they may. Ends
    /// the command that still runs. `None` also if the supervisor does not answer.
    async fn excessive_disk_use(&mut self) -> Option<String> {
        let used = async {
            let id = self.link.send(&Request::DiskUse).await?;
            loop {
                match self.link.receive().await {
                    Ok((from, Reply::DiskUse(used))) if from == id => return Ok(used),
                    // The rest of the call that failed, and the report of the full disk itself.
                    Ok(_) | Err(SandboxError { kind: SandboxErrorKind::DiskFull(_), .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        };
        let used = match tokio::time::timeout(DISK_USE_TIMEOUT, used).await {
            Ok(Ok(used)) => used,
            Ok(Err(error)) => {
                tracing::debug!(%error, "the use of the host's disk is not known");
                return None;
            }
            Err(_) => return None,
        };
        let limit = self.provider.config.disk_limit();
        let is_excessive = used.bytes > limit.0 || used.files > limit.0 / BYTES_PER_FILE;
        is_excessive.then(|| {
            let bytes = ByteSize(used.bytes);
            format!(
                "the Docker host's disk is full, and its commands put {bytes} in {} files there, more \
                 than sandbox.disk = {limit}",
                used.files
            )
        })
    }

    /// Time after which the result of a command is not waited for any longer.
    fn command_limit(&self, command: &Command) -> Duration {
        let HumanDuration(grace) = self.provider.config.command_grace;
        command.timeout.saturating_add(grace)
    }

    async fn run(
        &mut self,
        command: &Command,
        forward: Option<Forward<'_>>,
    ) -> Result<ExecResult, SandboxError> {
        let keep = command.keep_bytes as u64;
        let request = Request::Exec(ExecRequest {
            argv: command.argv.clone(),
            env: command.env.clone(),
            timeout_ms: u64::try_from(command.timeout.as_millis()).unwrap_or(u64::MAX),
            keep,
            max_output: self.provider.config.max_output.0,
            forward_port: forward.as_ref().map_or(0, |forward| forward.port),
        });
        let id = self.link.send(&request).await?;
        self.has_run = true;
        let mut pings = tokio::time::interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut carrier = Carrier::new(forward);
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        loop {
            // Cancel-safe: unread frames and unwritten requests stay in the link, and a missed tick
            // comes again. Not biased, because a flood of frames must not hold up the pings.
            let received = tokio::select! {
                received = self.link.progress() => received?,
                requests = carrier.requests(), if !self.link.is_writing() => {
                    for request in requests {
                        self.link.queue(&request)?;
                    }
                    continue;
                }
                _ = pings.tick() => {
                    self.link.queue(&Request::Ping)?;
                    continue;
                }
            };
            let Some((from, reply)) = received else { continue };
            match reply {
                Reply::Connection { number, event } if from == id => carrier
                    .receive(number, event)
                    .map_err(|problem| self.link.protocol_error(problem))?,
                Reply::Output { tail: part, data } if from == id => {
                    let kept = if part { &mut tail } else { &mut head };
                    kept.extend_from_slice(&data);
                    if kept.len() as u64 > keep.max(CHUNK as u64) {
                        return Err(self.link.protocol_error("more output than requested"));
                    }
                }
                Reply::Done(report) if from == id => return self.result(&report, head, tail),
                Reply::Ack(Err(reason)) if from == id => return Err(self.refused("exec", reason)),
                other => {
                    return Err(self
                        .link
                        .protocol_error(format!("expected a result, got {other:?}")));
                }
            }
        }
    }

    fn result(
        &self,
        report: &CommandReport,
        head: Vec<u8>,
        tail: Vec<u8>,
    ) -> Result<ExecResult, SandboxError> {
        let exit = match report.end {
            CommandEnd::Code(code) => Exit::Code(code),
            CommandEnd::Signal(signal) => Exit::Signal(signal),
            CommandEnd::TimedOut => Exit::TimedOut,
            CommandEnd::NotStarted => Exit::NotStarted,
            CommandEnd::Flooded => Exit::Signal(SIGKILL),
            CommandEnd::Stopped => Exit::Stopped,
            CommandEnd::Abandoned => {
                let reason =
                    "the supervisor received nothing from this program for a minute".to_owned();
                return Err(self.error(SandboxErrorKind::Gone(reason)));
            }
        };
        Ok(ExecResult {
            exit,
            head,
            tail,
            total_bytes: report.total_bytes,
            oom_kills: report.oom_kills,
            elapsed: Duration::from_micros(report.elapsed_us),
        })
    }

    async fn write_all(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        for file in files {
            let mut pieces = file.content.chunks(CHUNK);
            let mut next = Some(pieces.next().unwrap_or_default());
            let mut first = true;
            while let Some(data) = next {
                let (path, data) = (file.path.clone(), data.to_vec());
                self.link.send(&Request::Write { path, mode: file.mode, first, data }).await?;
                first = false;
                next = pieces.next();
            }
        }
        let id = self.link.send(&Request::WriteEnd).await?;
        self.link.acknowledgement(id).await?.map_err(|reason| self.refused("write_files", reason))
    }

    async fn read_all(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        let id = self.link.send(&Request::ReadTree { cap: cap.0 }).await?;
        let files = self.receive_files("read_tree", id, cap).await?;
        if !files.is_sorted_by(|a, b| a.path < b.path) {
            return Err(self.link.protocol_error("the files of a tree are not sorted"));
        }
        Ok(files)
    }

    /// Wipes the sandbox and verifies that nothing of the attempt is left.
    async fn reset(&mut self) -> Result<(), SandboxError> {
        self.begin_call()?;
        let answer = self.link.request("reset", &Request::Reset, RESET_TIMEOUT).await;
        let result = match answer {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Refusal(reason))) => Err(self.error(SandboxErrorKind::NotClean(reason))),
            Err(error) => Err(error),
        };
        self.end_call(result)
    }

    /// Sets the deadline of a pooled container for the attempt that it now serves. This also checks
    /// that its supervisor answers.
    pub(crate) async fn set_deadline(&mut self, deadline: Duration) -> Result<(), SandboxError> {
        let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let limit = self.provider.config.call_timeout.0;
        self.call("deadline", limit, async |this| {
            let id = this.link.send(&Request::Deadline { millis }).await?;
            let answer = this.link.acknowledgement(id).await?;
            answer.map_err(|reason| this.refused("deadline", reason))
        })
        .await
    }
}

#[async_trait::async_trait]
impl Sandbox for DockerSandbox {
    fn name(&self) -> &str {
        self.guard.name()
    }

    async fn exec(&mut self, command: &Command) -> Result<ExecResult, SandboxError> {
        let after = self.command_limit(command);
        self.call("exec", after, async |this| this.run(command, None).await).await
    }

    async fn exec_forwarding(
        &mut self,
        command: &Command,
        forward: Forward<'_>,
    ) -> Result<ExecResult, SandboxError> {
        if forward.port == 0 {
            let refusal = Refusal("the forwarded port must not be 0".to_owned());
            return Err(self.refused("exec", refusal));
        }
        // Connections count in the loopback's statistics, which no reset can clear.
        self.key = None;
        let after = self.command_limit(command);
        self.call("exec", after, async |this| this.run(command, Some(forward)).await).await
    }

    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        // Checked first, because the supervisor writes every piece that it receives.
        if let Some(bad) = files.iter().find(|file| !is_safe_path(&file.path)) {
            let refusal = Refusal(format!("`{}` is not a plain relative path", bad.path));
            return Err(self.refused("write_files", refusal));
        }
        let limit = self.provider.config.call_timeout.0;
        self.call("write_files", limit, async |this| this.write_all(files).await).await
    }

    async fn read_tree(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        let limit = self.provider.config.call_timeout.0;
        self.call("read_tree", limit, async |this| this.read_all(cap).await).await
    }

    async fn mark_tree(&mut self, mark: &TreeMark) -> Result<Vec<FileEntry>, SandboxError> {
        self.call("mark_tree", TREE_TIMEOUT, async |this| this.mark(mark).await).await
    }

    async fn list_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        self.call("list_changes", TREE_TIMEOUT, async |this| this.changes().await).await
    }

    async fn mark_system(&mut self, skip: &[String]) -> Result<(), SandboxError> {
        self.call("mark_system", TREE_TIMEOUT, async |this| this.mark_all(skip).await).await
    }

    async fn list_system_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        let call = "list_system_changes";
        self.call(call, TREE_TIMEOUT, async |this| this.system_changes().await).await
    }

    async fn read_files(
        &mut self,
        paths: &[String],
        cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError> {
        let limit = self.provider.config.call_timeout.0;
        self.call("read_files", limit, async |this| this.read_named(paths, cap).await).await
    }

    async fn set_root(&mut self, path: &str) -> Result<(), SandboxError> {
        let limit = self.provider.config.call_timeout.0;
        let request = Request::Root { path: path.to_owned() };
        self.call("set_root", limit, async |this| {
            let id = this.link.send(&request).await?;
            let answer = this.link.acknowledgement(id).await?;
            answer.map_err(|reason| this.refused("set_root", reason))
        })
        .await
    }

    async fn close(mut self: Box<Self>) -> Result<(), SandboxError> {
        let is_sound = self.state == State::Ready && !self.is_tainted;
        if let Some(key) = self.key.take().filter(|_| is_sound) {
            match self.reset().await {
                Ok(()) => {
                    let Self { link, guard, provider, expires_at, .. } = *self;
                    provider.slots.put(IdleSandbox { key, link, guard, expires_at });
                }
                Err(error) => {
                    self.provider.counters.resets_refused.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%error, "the sandbox is not reused");
                }
            }
        }
        // A sandbox that was not put back is dropped here, which queues its removal.
        Ok(())
    }
}
