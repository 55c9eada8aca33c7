//! One open container.

use crate::api::{Command, ExecResult, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind};
use crate::guard::Guard;
use crate::link::Link;
use crate::provider::Shared;
use crate::slots::{Idle, Key};
use orchestrate_supervisor::protocol::{
    CHUNK, Done, End, ExecRequest, Reply, Request, TreeEnd, is_safe_path,
};
use orchestrate_types::{ByteSize, HumanDuration};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};

/// Signs of life during a command; the supervisor gives up on us after a minute without.
const PING_EVERY: Duration = Duration::from_secs(15);
/// A reset has at most a few thousand files to remove and a process tree to bury.
const RESET_WITHIN: Duration = Duration::from_secs(30);
/// What the kernel sends, and what we report, for a command killed because of its output.
const SIGKILL: i32 = 9;

/// A sandbox can be used while nothing went wrong with it.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// A call is under way, or its future was dropped before its end: the stream may be anywhere.
    Busy,
    /// A call failed.
    Lost(String),
}

/// A container with its supervisor on the line.
#[derive(Debug)]
pub(crate) struct DockerSandbox {
    pub(crate) link: Link,
    pub(crate) guard: Guard,
    pub(crate) shared: Arc<Shared>,
    /// `None` where the container is for one attempt only.
    pub(crate) key: Option<Key>,
    pub(crate) ends: Instant,
    /// Whether what runs in it can write to the host's disk.
    pub(crate) on_disk: bool,
    state: State,
}

impl DockerSandbox {
    pub(crate) fn new(
        link: Link,
        guard: Guard,
        shared: Arc<Shared>,
        key: Option<Key>,
        ends: Instant,
    ) -> Self {
        Self { link, guard, shared, key, ends, on_disk: false, state: State::Ready }
    }

    fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.guard.name().to_owned(), kind }
    }

    fn refused(&self, call: &'static str, message: String) -> SandboxError {
        self.error(SandboxErrorKind::Refused { call, message })
    }

    /// Marks a call as begun. Fails where an earlier one did not end well.
    fn begin(&mut self) -> Result<(), SandboxError> {
        match std::mem::replace(&mut self.state, State::Busy) {
            State::Ready => Ok(()),
            State::Busy => {
                Err(self
                    .error(SandboxErrorKind::Protocol("an earlier call was abandoned".to_owned())))
            }
            State::Lost(reason) => {
                self.state = State::Lost(reason.clone());
                Err(self.error(SandboxErrorKind::Gone(reason)))
            }
        }
    }

    /// Marks its end. A refusal leaves the stream in order; anything else does not.
    fn end<T>(&mut self, result: Result<T, SandboxError>) -> Result<T, SandboxError> {
        self.state = match &result {
            Ok(_) => State::Ready,
            Err(error) => match &error.kind {
                SandboxErrorKind::Refused { .. } | SandboxErrorKind::TooLarge { .. } => {
                    State::Ready
                }
                SandboxErrorKind::NoDaemon(_)
                | SandboxErrorKind::ImageMissing(_)
                | SandboxErrorKind::NotPulled { .. }
                | SandboxErrorKind::ImageChanged { .. }
                | SandboxErrorKind::NotRecorded { .. }
                | SandboxErrorKind::TimedOut { .. }
                | SandboxErrorKind::DiskFull(_)
                | SandboxErrorKind::Gone(_)
                | SandboxErrorKind::Protocol(_)
                | SandboxErrorKind::NotClean(_)
                | SandboxErrorKind::Unfit(_) => State::Lost(error.kind.to_string()),
            },
        };
        result
    }

    async fn within<T>(
        &mut self,
        call: &'static str,
        after: Duration,
        work: impl AsyncFnOnce(&mut Self) -> Result<T, SandboxError>,
    ) -> Result<T, SandboxError> {
        self.begin()?;
        let fills = self.shared.disk.fills();
        let result = match tokio::time::timeout(after, work(self)).await {
            Ok(result) => result,
            Err(_) => Err(self.error(SandboxErrorKind::TimedOut { call, after })),
        };
        let result = self.unless_filled(fills, result);
        self.end(result)
    }

    /// A result counts only where no sandbox on this host met a full disk meanwhile: the one that
    /// filled it is removed at once, perhaps before the next look of the others.
    fn unless_filled<T>(
        &self,
        fills: u64,
        result: Result<T, SandboxError>,
    ) -> Result<T, SandboxError> {
        match &result {
            Err(SandboxError { kind: SandboxErrorKind::DiskFull(_), .. }) => {
                self.shared.disk.note_full();
            }
            Ok(_) | Err(_) if self.on_disk && self.shared.disk.fills() != fills => {
                let words = "another sandbox on it met that while this one worked".to_owned();
                return Err(self.error(SandboxErrorKind::DiskFull(words)));
            }
            Ok(_) | Err(_) => {}
        }
        result
    }

    async fn run(&mut self, command: &Command) -> Result<ExecResult, SandboxError> {
        let keep = command.keep_bytes as u64;
        let request = Request::Exec(ExecRequest {
            argv: command.argv.clone(),
            env: command.env.clone(),
            timeout_ms: u64::try_from(command.timeout.as_millis()).unwrap_or(u64::MAX),
            keep,
            max_output: self.shared.config.max_output.0,
        });
        let id = self.link.send(&request).await?;
        let mut pings = tokio::time::interval_at(Instant::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        loop {
            // Cancel-safe: a frame not yet taken stays in the link, a tick not yet taken comes again.
            let (from, reply) = tokio::select! {
                biased;
                received = self.link.receive() => received?,
                _ = pings.tick() => {
                    self.link.send(&Request::Ping).await?;
                    continue;
                }
            };
            match reply {
                Reply::Output { tail: part, data } if from == id => {
                    let kept = if part { &mut tail } else { &mut head };
                    kept.extend_from_slice(&data);
                    if kept.len() as u64 > keep.max(CHUNK as u64) {
                        return Err(self.link.protocol("more output than was asked for"));
                    }
                }
                Reply::Done(done) if from == id => return self.result(&done, head, tail),
                Reply::Ack(Err(reason)) if from == id => return Err(self.refused("exec", reason)),
                // Later ids are our pings.
                Reply::Ack(Ok(())) if from > id => {}
                other => {
                    return Err(self.link.protocol(format!("expected a result, got {other:?}")));
                }
            }
        }
    }

    fn result(
        &self,
        done: &Done,
        head: Vec<u8>,
        tail: Vec<u8>,
    ) -> Result<ExecResult, SandboxError> {
        let exit = match done.end {
            End::Code(code) => Exit::Code(code),
            End::Signal(signal) => Exit::Signal(signal),
            End::TimedOut => Exit::TimedOut,
            End::NotStarted => Exit::NotStarted,
            End::Flooded => Exit::Signal(SIGKILL),
            End::Abandoned => {
                let reason = "the supervisor did not hear from us for a minute".to_owned();
                return Err(self.error(SandboxErrorKind::Gone(reason)));
            }
        };
        Ok(ExecResult {
            exit,
            head,
            tail,
            total_bytes: done.total_bytes,
            oom_kills: done.oom_kills,
            elapsed: Duration::from_micros(done.elapsed_us),
        })
    }

    async fn write_all(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        // Checked first: once sent, a piece is written.
        if let Some(bad) = files.iter().find(|file| !is_safe_path(&file.path)) {
            let message = format!("`{}` is no plain relative path", bad.path);
            return Err(self.refused("write_files", message));
        }
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
        self.link.acknowledged(id).await?.map_err(|reason| self.refused("write_files", reason))
    }

    async fn read_all(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        let id = self.link.send(&Request::ReadTree { cap: cap.0 }).await?;
        let mut files: Vec<FileEntry> = Vec::new();
        let (mut missing, mut total) = (0_u64, 0_u64);
        loop {
            match self.link.receive().await? {
                (from, Reply::TreeFile { path, mode, size }) if from == id && missing == 0 => {
                    let sorted = files.last().is_none_or(|last| last.path < path);
                    total = total.saturating_add(size).saturating_add(path.len() as u64);
                    if !is_safe_path(&path) || !sorted || total > cap.0 {
                        return Err(self.link.protocol(format!("impossible file `{path}`")));
                    }
                    missing = size;
                    files.push(FileEntry { path, mode, content: Vec::new() });
                }
                (from, Reply::TreeData { data }) if from == id => {
                    let (Some(left), Some(file)) =
                        (missing.checked_sub(data.len() as u64), files.last_mut())
                    else {
                        return Err(self.link.protocol("more content than was announced"));
                    };
                    missing = left;
                    file.content.extend_from_slice(&data);
                }
                (from, Reply::TreeEnd(end)) if from == id => {
                    return match end {
                        TreeEnd::Complete { files: count }
                            if missing == 0 && count == files.len() as u64 =>
                        {
                            Ok(files)
                        }
                        TreeEnd::Complete { .. } => Err(self.link.protocol("a file is missing")),
                        TreeEnd::TooLarge(what) => {
                            Err(self.error(SandboxErrorKind::TooLarge { what, cap }))
                        }
                        TreeEnd::Failed(reason) => Err(self.refused("read_tree", reason)),
                    };
                }
                (_, other) => {
                    return Err(self.link.protocol(format!("expected a tree, got {other:?}")));
                }
            }
        }
    }

    /// Asks for proof that nothing of the attempt is left.
    async fn reset(&mut self) -> Result<(), SandboxError> {
        self.begin()?;
        let answer = self.link.ask("reset", &Request::Reset, RESET_WITHIN).await;
        let proved = match answer {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(self.error(SandboxErrorKind::NotClean(reason))),
            Err(error) => Err(error),
        };
        self.end(proved)
    }

    /// Moves the end of a pooled container near, for the attempt it now serves; also proves that
    /// its supervisor still answers.
    pub(crate) async fn set_deadline(&mut self, deadline: Duration) -> Result<(), SandboxError> {
        let millis = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let within = self.shared.config.call_timeout.0;
        self.within("deadline", within, async |this| {
            let id = this.link.send(&Request::Deadline { millis }).await?;
            let answer = this.link.acknowledged(id).await?;
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
        let HumanDuration(grace) = self.shared.config.command_grace;
        let after = command.timeout.saturating_add(grace);
        self.within("exec", after, async |this| this.run(command).await).await
    }

    async fn write_files(&mut self, files: &[FileEntry]) -> Result<(), SandboxError> {
        let within = self.shared.config.call_timeout.0;
        self.within("write_files", within, async |this| this.write_all(files).await).await
    }

    async fn read_tree(&mut self, cap: ByteSize) -> Result<Vec<FileEntry>, SandboxError> {
        let within = self.shared.config.call_timeout.0;
        self.within("read_tree", within, async |this| this.read_all(cap).await).await
    }

    async fn close(mut self: Box<Self>) -> Result<(), SandboxError> {
        if let Some(key) = self.key.take().filter(|_| self.state == State::Ready) {
            match self.reset().await {
                Ok(()) => {
                    let Self { link, guard, shared, ends, .. } = *self;
                    shared.slots.put(Idle { key, link, guard, ends });
                }
                Err(error) => {
                    self.shared.counters.resets_refused.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%error, "not used again");
                }
            }
        }
        // What was not put back is dropped here, and so removed in the background.
        Ok(())
    }
}
