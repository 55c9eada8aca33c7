//! The main loop of process 1: it serves one request after the other, in one thread.
//!
//! A second thread ends the process at its deadline, even while the first is blocked on a write.

use crate::changes::{self, MarkedTree};
use crate::deadline::DeadlineTimer;
use crate::disk::{CHECK_INTERVAL, DiskUse};
use crate::disk_use::{WrittenBytes, changed_since};
use crate::files::{self, WriteError};
use crate::forward::Forwarder;
use crate::job::{Job, StartError, TERM_GRACE, oom_kills};
use crate::options::Options;
use crate::protocol::{
    CHUNK, CommandEnd, CommandReport, ExecRequest, Frame, FrameBuffer, Refusal, Reply, Request,
    TreeEnd, VERSION,
};
use crate::reset::{Baseline, ResetError};
use crate::sys::{Interest, ProcessState};
use crate::system::{self, MarkedSystem};
use crate::{protection, sys, tree};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A host that sends no frame for this long while a command runs is considered gone.
const HOST_SILENCE: Duration = Duration::from_mins(1);
/// The container's root, which is on the host's disk. If it is writable, all other places that
/// commands can write to are on that disk, too.
const ROOT: &std::ffi::CStr = c"/";
/// Some file systems free the space of deleted files only a while after the last process that held them
/// has ended.
const FREEING_TIME: Duration = Duration::from_secs(2);
/// A killed process may take a while to free its memory; one that takes longer than this is stuck.
const KILL_TIMEOUT: Duration = Duration::from_secs(15);

struct Server {
    options: Options,
    input: File,
    output: File,
    children: File,
    frames: FrameBuffer,
    deadline: Arc<DeadlineTimer>,
    last_frame_at: Instant,
    /// `None` if the sandbox is not reusable.
    baseline: Option<Result<Baseline, ResetError>>,
    write_failure: Option<WriteError>,
    /// The tree as it was before the commands whose changes count.
    marked: Option<MarkedTree>,
    /// The whole file system as it was before the commands whose changes matter.
    marked_system: Option<MarkedSystem>,
    /// Properties of this process before the first command.
    own_state: ProcessState,
    /// Whether a command has run since the start or the last reset.
    has_run: bool,
    /// Whether a command changed this process. The change was undone, but the sandbox is not
    /// reused.
    was_changed: bool,
    /// What commands did to this process that cannot be undone.
    damage: Option<String>,
    /// Whether commands can write to the host's disk and it has not been full yet.
    watches_disk: bool,
    started_at: SystemTime,
    written: WrittenBytes,
    /// Bytes of deleted files that the last command's processes held at its end.
    deleted_bytes: u64,
    /// The request for the use of the disk that came while a command was running.
    disk_use_asked: Option<u64>,
}

/// Serves requests until the host closes the stream. Fails if the stream or a system call fails.
pub(crate) fn serve(options: Options) -> io::Result<()> {
    #[expect(clippy::disallowed_methods, reason = "files have times of the wall clock")]
    let started_at = SystemTime::now();
    let written = WrittenBytes::open();
    sys::harden_process()?;
    protection::check()?;
    let children = sys::open_child_signal()?;
    let deadline = DeadlineTimer::start(options.lifetime)?;
    if !options.reusable {
        // With a writable root, the image does not have to contain the folder.
        std::fs::create_dir_all(&options.workdir)?;
    }
    let baseline = options.reusable.then(|| Baseline::take(&options));
    let free = sys::free_space(ROOT)?;
    let mut server = Server {
        // With a read-only root, commands write only to tmpfs mounts, each with its own size limit.
        watches_disk: !options.reusable,
        options,
        input: File::from(io::stdin().as_fd().try_clone_to_owned()?),
        output: File::from(io::stdout().as_fd().try_clone_to_owned()?),
        children,
        frames: FrameBuffer::default(),
        deadline,
        last_frame_at: Instant::now(),
        baseline,
        write_failure: None,
        marked: None,
        marked_system: None,
        own_state: sys::process_state()?,
        has_run: false,
        was_changed: false,
        damage: None,
        started_at,
        written,
        deleted_bytes: 0,
        disk_use_asked: None,
    };
    server.reply(0, &Reply::Hello { version: VERSION, free })?;
    loop {
        while let Some(frame) = server.next_frame()? {
            server.handle(&frame).or_else(|error| server.give_up(frame.id, error))?;
        }
        let own = [server.input.as_fd(), server.children.as_fd()].map(Interest::reading);
        let ready = sys::poll(&own, None)?;
        let is_ready = |index: usize| ready.get(index).is_some_and(|ready| ready.readable);
        if is_ready(1) {
            server.reap_all()?;
        }
        if is_ready(0) && !server.receive()? {
            return Ok(());
        }
    }
}

/// A tree that cannot be read after a command has run was damaged by commands.
fn blame(reply: Reply, has_run: bool) -> Reply {
    match reply {
        Reply::TreeEnd(TreeEnd::Failed(reason)) if has_run => Reply::Damaged(reason),
        other => other,
    }
}

impl Server {
    /// Tells the host why this process ends, if commands can have caused it, and returns the error.
    /// If the stream is at fault instead, the host does not receive that.
    fn give_up(&mut self, id: u64, error: io::Error) -> io::Result<()> {
        if self.has_run && error.kind() != io::ErrorKind::UnexpectedEof {
            self.reply(id, &Reply::Damaged(format!("process 1 ends: {error}")))?;
        }
        Err(error)
    }

    fn reply(&mut self, id: u64, reply: &Reply) -> io::Result<()> {
        self.output.write_all(&reply.encode(id).map_err(io::Error::other)?)
    }

    fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        self.frames.next_frame().map_err(io::Error::other)
    }

    /// Reads available input. `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 * 1024];
        let count = self.input.read(&mut buffer)?;
        self.frames.push(buffer.get(..count).unwrap_or_default());
        self.last_frame_at = Instant::now();
        Ok(count > 0)
    }

    fn handle(&mut self, frame: &Frame) -> io::Result<()> {
        let request = Request::decode(frame.kind, &frame.payload).map_err(io::Error::other)?;
        // A piece of a file has no reply of its own, and a reset reports its own refusal.
        let is_answered = !matches!(
            request,
            Request::Write { .. }
                | Request::Reset
                | Request::Bytes { .. }
                | Request::CloseConnection { .. }
                | Request::Stop
        );
        if let Some(what) = self.damage.clone().filter(|_| is_answered) {
            return self.reply(frame.id, &Reply::Damaged(what));
        }
        match request {
            Request::Exec(exec) => self.exec(frame.id, &exec),
            Request::Ping => self.reply(frame.id, &Reply::Ack(Ok(()))),
            // The host did not know yet that the command had ended.
            Request::Bytes { .. } | Request::CloseConnection { .. } | Request::Stop => Ok(()),
            Request::Write { path, mode, first, data } => {
                if self.write_failure.is_none() {
                    let root = Path::new(&self.options.workdir);
                    self.write_failure = files::write(root, &path, mode, first, &data).err();
                }
                self.check_disk()
            }
            Request::WriteEnd => {
                let result = self.write_failure.take().map_or(Ok(()), |e| Err(Refusal::new(e)));
                self.reply(frame.id, &Reply::Ack(result))
            }
            Request::ReadTree { cap } => {
                let (output, has_run) = (&mut self.output, self.has_run);
                tree::send(Path::new(&self.options.workdir), cap, |reply| {
                    let reply = blame(reply, has_run);
                    output.write_all(&reply.encode(frame.id).map_err(io::Error::other)?)
                })
            }
            Request::MarkTree { skip, send, cap } => self.mark_tree(frame.id, &skip, &send, cap),
            Request::ListChanges => self.list_changes(frame.id),
            Request::MarkSystem { skip } => self.mark_system(frame.id, &skip),
            Request::ListSystem => self.list_system(frame.id),
            Request::ReadFiles { paths, cap } => {
                let (output, has_run) = (&mut self.output, self.has_run);
                changes::send_files(Path::new(&self.options.workdir), &paths, cap, |reply| {
                    let reply = blame(reply, has_run);
                    output.write_all(&reply.encode(frame.id).map_err(io::Error::other)?)
                })
            }
            Request::DiskUse => self.send_disk_use(frame.id),
            Request::Reset => {
                let result = self.reset();
                self.reply(frame.id, &Reply::Ack(result))
            }
            Request::Deadline { millis } => {
                self.deadline.set(Duration::from_millis(millis));
                self.reply(frame.id, &Reply::Ack(Ok(())))
            }
        }
    }

    /// Reports a full disk to the host, once: from then on, commands may fail for that reason
    /// alone.
    fn check_disk(&mut self) -> io::Result<()> {
        if !self.watches_disk {
            return Ok(());
        }
        let free = sys::free_space(ROOT)?;
        if !free.is_exhausted() {
            return Ok(());
        }
        self.watches_disk = false;
        self.reply(0, &Reply::DiskFull(free))
    }

    fn send_disk_use(&mut self, id: u64) -> io::Result<()> {
        let mut used = if self.options.reusable {
            DiskUse::default()
        } else {
            changed_since(Path::new("/"), self.started_at)
        };
        used.bytes = used.bytes.saturating_add(self.deleted_bytes);
        self.reply(id, &Reply::DiskUse(used))
    }

    /// Kills the command and everything else, and finds out how much space its deleted files took: at
    /// most what became free meanwhile, because others may free space too, and at most what was written
    /// here.
    fn end_command(&mut self, job: &mut Job) -> io::Result<()> {
        if self.options.reusable {
            return self.kill_everything(Some(job));
        }
        let before = sys::free_space(ROOT)?.bytes;
        self.kill_everything(Some(job))?;
        let written = self.written.total();
        let wait_until = Instant::now() + FREEING_TIME;
        loop {
            let freed = sys::free_space(ROOT)?.bytes.saturating_sub(before);
            self.deleted_bytes = freed.min(written);
            let is_needed = self.disk_use_asked.is_some() && freed < written;
            if !is_needed || Instant::now() >= wait_until {
                return Ok(());
            }
            sys::poll(&[], Some(CHECK_INTERVAL))?;
        }
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        self.kill_everything(None).map_err(Refusal::new)?;
        self.write_failure = None;
        self.marked = None;
        self.marked_system = None;
        // The deadline belonged to the attempt; now only the container's lifetime remains.
        self.deadline.set(Duration::MAX);
        if let Some(damage) = &self.damage {
            return Err(Refusal::new(damage));
        }
        if self.was_changed {
            return Err(Refusal::new("a command changed process 1"));
        }
        match &self.baseline {
            Some(Ok(baseline)) => baseline.restore(&self.options).map_err(Refusal::new)?,
            Some(Err(error)) => return Err(Refusal::new(error)),
            None => return Err(Refusal::new("this sandbox was not opened for reuse")),
        }
        self.has_run = false;
        Ok(())
    }

    /// Undoes what the last command, which is dead, did to this process.
    fn restore_own_state(&mut self) {
        match self.own_state.restore() {
            Ok(changed) => self.was_changed |= changed,
            Err(error) => self.damage = Some(error.to_string()),
        }
    }

    fn mark_tree(&mut self, id: u64, skip: &[String], send: &str, cap: u64) -> io::Result<()> {
        let root = Path::new(&self.options.workdir);
        let tree = match changes::mark(root, skip) {
            Ok(tree) => tree,
            Err(end) => return self.reply(id, &Reply::TreeEnd(end)),
        };
        let output = &mut self.output;
        tree.send_named(root, send, cap, |reply| {
            output.write_all(&reply.encode(id).map_err(io::Error::other)?)
        })?;
        self.marked = Some(tree);
        Ok(())
    }

    fn list_changes(&mut self, id: u64) -> io::Result<()> {
        let Some(tree) = &self.marked else {
            let end = TreeEnd::Failed("the tree was not marked".to_owned());
            return self.reply(id, &Reply::TreeEnd(end));
        };
        let (output, has_run) = (&mut self.output, self.has_run);
        tree.send_changes(Path::new(&self.options.workdir), |reply| {
            let reply = blame(reply, has_run);
            output.write_all(&reply.encode(id).map_err(io::Error::other)?)
        })
    }

    fn mark_system(&mut self, id: u64, skip: &[String]) -> io::Result<()> {
        let end = match system::mark(Path::new("/"), skip) {
            Ok(marked) => {
                self.marked_system = Some(marked);
                TreeEnd::Complete { files: 0 }
            }
            Err(end) => end,
        };
        self.reply(id, &Reply::TreeEnd(end))
    }

    fn list_system(&mut self, id: u64) -> io::Result<()> {
        let Some(marked) = self.marked_system.take() else {
            let end = TreeEnd::Failed("the file system was not marked".to_owned());
            return self.reply(id, &Reply::TreeEnd(end));
        };
        let (output, has_run) = (&mut self.output, self.has_run);
        marked.send_changes(Path::new("/"), |reply| {
            let reply = blame(reply, has_run);
            output.write_all(&reply.encode(id).map_err(io::Error::other)?)
        })
    }

    fn exec(&mut self, id: u64, request: &ExecRequest) -> io::Result<()> {
        let oom_before = oom_kills();
        let mut forwarder = None;
        if request.forward_port != 0 {
            match Forwarder::bind(request.forward_port) {
                Ok(bound) => forwarder = Some(bound),
                Err(error) => {
                    let port = request.forward_port;
                    let reason = format!("cannot listen on port {port} of the loopback: {error}");
                    return self.reply(id, &Reply::Ack(Err(Refusal(reason))));
                }
            }
        }
        match Job::start(request, &self.options.workdir) {
            Ok(mut job) => {
                self.has_run = true;
                self.last_frame_at = Instant::now();
                let cause = self.watch(id, &mut job, forwarder.as_mut())?;
                // Before the kill, because deleted files free their space once their holders are
                // dead.
                self.check_disk()?;
                self.end_command(&mut job)?;
                drop(forwarder);
                self.restore_own_state();
                while job.read_available()? {}
                let elapsed = job.started.elapsed();
                self.send_output(id, false, &job.kept.head)?;
                self.send_output(id, true, job.kept.tail())?;
                let report = CommandReport {
                    end: cause.unwrap_or_else(|| exit_of(&job)),
                    total_bytes: job.kept.total,
                    oom_kills: oom_kills().saturating_sub(oom_before),
                    elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
                };
                self.reply(id, &Reply::Done(report))?;
                match self.disk_use_asked.take() {
                    Some(asked) => self.send_disk_use(asked),
                    None => Ok(()),
                }
            }
            Err(StartError::Command(reason)) => {
                self.send_output(id, false, reason.as_bytes())?;
                let report = CommandReport {
                    end: CommandEnd::NotStarted,
                    total_bytes: reason.len() as u64,
                    oom_kills: 0,
                    elapsed_us: 0,
                };
                self.reply(id, &Reply::Done(report))
            }
            Err(StartError::System(error)) => {
                let reason = format!("cannot start a process: {error}");
                let reply = if self.has_run {
                    Reply::Damaged(reason)
                } else {
                    Reply::Ack(Err(Refusal(reason)))
                };
                self.reply(id, &reply)
            }
        }
    }

    /// Reads the command's output and carries its connections until the command ends (`None`) or must be
    /// killed (the reason).
    fn watch(
        &mut self,
        id: u64,
        job: &mut Job,
        mut forwarder: Option<&mut Forwarder>,
    ) -> io::Result<Option<CommandEnd>> {
        let mut killing_at = None;
        loop {
            let now = Instant::now();
            self.check_disk()?;
            if job.exceeded_output(now) {
                return Ok(Some(CommandEnd::Flooded));
            }
            if self.disk_use_asked.is_some() || now >= self.last_frame_at + HOST_SILENCE {
                return Ok(Some(CommandEnd::Abandoned));
            }
            match killing_at {
                None if job.timed_out(now) => {
                    sys::signal_group(job.pid, sys::SIGTERM);
                    killing_at = Some(now + TERM_GRACE);
                }
                Some(at) if now >= at => return Ok(Some(CommandEnd::TimedOut)),
                None | Some(_) => {}
            }
            let mut until =
                killing_at.unwrap_or(job.next_check()).min(self.last_frame_at + HOST_SILENCE);
            if self.watches_disk {
                until = until.min(now + CHECK_INTERVAL);
            }
            // The output is last of these three, because it may have ended.
            let own = [Some(self.input.as_fd()), Some(self.children.as_fd()), job.output()];
            let mut interests: Vec<Interest<'_>> =
                own.into_iter().flatten().map(Interest::reading).collect();
            let own = interests.len();
            interests.extend(forwarder.iter().flat_map(|forwarder| forwarder.interests()));
            let ready = sys::poll(&interests, Some(until.saturating_duration_since(now)))?;
            let (own, forwarded) = ready.split_at(own.min(ready.len()));
            let is_ready = |index: usize| own.get(index).is_some_and(|ready| ready.readable);
            if is_ready(2) {
                job.read_available()?;
            }
            if let Some(forwarder) = forwarder.as_deref_mut() {
                forwarder.serve(forwarded, |reply| self.reply(id, &reply))?;
            }
            if is_ready(1) {
                self.reap_into(Some(job))?;
                if job.status.is_some() {
                    return Ok(killing_at.map(|_| CommandEnd::TimedOut));
                }
            }
            if is_ready(0) {
                if !self.receive()? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if self.handle_while_busy(id, forwarder.as_deref_mut())? {
                    return Ok(Some(CommandEnd::Stopped));
                }
            }
        }
    }

    /// While a command runs, only pings and what concerns the command are accepted. `true` if it is to
    /// be stopped.
    fn handle_while_busy(
        &mut self,
        id: u64,
        mut forwarder: Option<&mut Forwarder>,
    ) -> io::Result<bool> {
        while let Some(frame) = self.next_frame()? {
            match Request::decode(frame.kind, &frame.payload).map_err(io::Error::other)? {
                Request::Ping => self.reply(frame.id, &Reply::Ack(Ok(())))?,
                Request::Bytes { connection, data } => {
                    if let Some(forwarder) = forwarder.as_deref_mut() {
                        forwarder.write(connection, &data, |reply| self.reply(id, &reply))?;
                    }
                }
                Request::CloseConnection { connection } => {
                    if let Some(forwarder) = forwarder.as_deref_mut() {
                        forwarder.close(connection);
                    }
                }
                Request::Stop => return Ok(true),
                Request::DiskUse => self.disk_use_asked = Some(frame.id),
                Request::Exec(_)
                | Request::Write { .. }
                | Request::WriteEnd
                | Request::ReadTree { .. }
                | Request::MarkTree { .. }
                | Request::ListChanges
                | Request::MarkSystem { .. }
                | Request::ListSystem
                | Request::ReadFiles { .. }
                | Request::Reset
                | Request::Deadline { .. } => {
                    let busy = Reply::Ack(Err(Refusal::new("a command is running")));
                    self.reply(frame.id, &busy)?;
                }
            }
        }
        Ok(false)
    }

    fn send_output(&mut self, id: u64, tail: bool, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(CHUNK) {
            self.reply(id, &Reply::Output { tail, data: piece.to_vec() })?;
        }
        Ok(())
    }

    fn reap_all(&mut self) -> io::Result<()> {
        self.reap_into(None)
    }

    fn reap_into(&mut self, mut job: Option<&mut Job>) -> io::Result<()> {
        // One signal may stand for several ended children, so reading it only resets the
        // descriptor.
        let mut info = [0; 128];
        while matches!(self.children.read(&mut info), Ok(count) if count > 0) {}
        while let Some((pid, status)) = sys::reap()? {
            if let Some(job) = job.as_deref_mut().filter(|job| job.pid == pid) {
                job.status = Some(status);
            }
        }
        Ok(())
    }

    /// Kills all other processes until none is alive. Meanwhile reads the command's output, so that
    /// its writers do not block.
    fn kill_everything(&mut self, mut job: Option<&mut Job>) -> io::Result<()> {
        let give_up_at = Instant::now() + KILL_TIMEOUT;
        while sys::kill_all()? {
            self.reap_into(job.as_deref_mut())?;
            if Instant::now() >= give_up_at {
                return Err(io::Error::other("a killed process does not end"));
            }
            let fds = [Some(self.children.as_fd()), job.as_deref().and_then(Job::output)];
            let interests: Vec<Interest<'_>> =
                fds.into_iter().flatten().map(Interest::reading).collect();
            let ready = sys::poll(&interests, Some(Duration::from_millis(10)))?;
            let has_output = ready.get(1).is_some_and(|ready| ready.readable);
            if let (true, Some(job)) = (has_output, job.as_deref_mut()) {
                job.read_available()?;
            }
        }
        self.reap_into(job)
    }
}

fn exit_of(job: &Job) -> CommandEnd {
    use std::os::unix::process::ExitStatusExt as _;
    let status = job.status;
    match (status.and_then(|s| s.code()), status.and_then(|s| s.signal())) {
        (Some(code), _) => CommandEnd::Code(code),
        (None, Some(signal)) => CommandEnd::Signal(signal),
        // Only a child that was not reaped has neither, and every child is reaped before this.
        (None, None) => CommandEnd::Signal(sys::SIGKILL),
    }
}
