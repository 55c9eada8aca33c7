//! The loop of process 1: one request after the other, in one thread; a second thread does nothing
//! but end the process at its deadline, even while the first is stuck writing to nobody.

use crate::disk::LOOK_EVERY;
use crate::job::{Job, StartError, TERM_GRACE, oom_kills};
use crate::protocol::{CHUNK, Done, End, ExecRequest, Frame, FrameBuffer, Reply, Request, VERSION};
use crate::reset::Baseline;
use crate::{Options, files, say, sys, tree};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// With a command running and no frame from the host for this long, the host is gone.
const HOST_SILENCE: Duration = Duration::from_mins(1);
/// On the host's disk, as is whatever commands can write to where this one can be written.
const ROOT: &std::ffi::CStr = c"/";
/// Dying may take a while with a gigabyte to free; longer than this is a stuck process.
const DEATH_PATIENCE: Duration = Duration::from_secs(15);

struct Server {
    options: Options,
    input: File,
    output: File,
    children: File,
    frames: FrameBuffer,
    alarm: Arc<Alarm>,
    heard: Instant,
    baseline: Option<Result<Baseline, String>>,
    write_failure: Option<String>,
    /// Whether commands can write to the host's disk, and it was not full yet.
    watches_disk: bool,
}

/// Serves until the host closes the stream. Fails when the stream or a system call fails.
pub(crate) fn serve(options: Options) -> io::Result<()> {
    sys::harden()?;
    let children = sys::child_signal()?;
    let alarm = Alarm::start(options.lifetime)?;
    if !options.reusable {
        // Where the root can be written, the image need not have the folder.
        std::fs::create_dir_all(&options.workdir)?;
    }
    let baseline = options.reusable.then(|| Baseline::take(&options));
    let free = sys::free_space(ROOT)?;
    let mut server = Server {
        // A read-only root leaves only folders in memory, each with a size of its own.
        watches_disk: !options.reusable,
        options,
        input: File::from(io::stdin().as_fd().try_clone_to_owned()?),
        output: File::from(io::stdout().as_fd().try_clone_to_owned()?),
        children,
        frames: FrameBuffer::default(),
        alarm,
        heard: Instant::now(),
        baseline,
        write_failure: None,
    };
    server.reply(0, &Reply::Hello { version: VERSION, free })?;
    loop {
        while let Some(frame) = server.next_frame()? {
            server.answer(&frame)?;
        }
        let [input, child] =
            sys::wait([Some(server.input.as_fd()), Some(server.children.as_fd())], None)?;
        if child {
            server.reap_all()?;
        }
        if input && !server.receive()? {
            return Ok(());
        }
    }
}

impl Server {
    fn reply(&mut self, id: u64, reply: &Reply) -> io::Result<()> {
        self.output.write_all(&reply.encode(id).map_err(io::Error::other)?)
    }

    fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        self.frames.next_frame().map_err(io::Error::other)
    }

    /// Reads what came. `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 * 1024];
        let count = self.input.read(&mut buffer)?;
        self.frames.push(buffer.get(..count).unwrap_or_default());
        self.heard = Instant::now();
        Ok(count > 0)
    }

    fn answer(&mut self, frame: &Frame) -> io::Result<()> {
        let request = Request::decode(frame.kind, &frame.payload).map_err(io::Error::other)?;
        match request {
            Request::Exec(exec) => self.exec(frame.id, &exec),
            Request::Ping => self.reply(frame.id, &Reply::Ack(Ok(()))),
            Request::Write { path, mode, first, data } => {
                if self.write_failure.is_none() {
                    let root = Path::new(&self.options.workdir);
                    self.write_failure = files::write(root, &path, mode, first, &data).err();
                }
                self.look_at_disk()
            }
            Request::WriteEnd => {
                let result = self.write_failure.take().map_or(Ok(()), Err);
                self.reply(frame.id, &Reply::Ack(result))
            }
            Request::ReadTree { cap } => {
                let output = &mut self.output;
                tree::send(Path::new(&self.options.workdir), cap, |reply| {
                    output.write_all(&reply.encode(frame.id).map_err(io::Error::other)?)
                })
            }
            Request::Reset => {
                let result = self.reset();
                self.reply(frame.id, &Reply::Ack(result))
            }
            Request::Deadline { millis } => {
                self.alarm.set(Duration::from_millis(millis));
                self.reply(frame.id, &Reply::Ack(Ok(())))
            }
        }
    }

    /// Tells the host, once, that its disk is full: what is under way may fail for that alone.
    fn look_at_disk(&mut self) -> io::Result<()> {
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

    fn reset(&mut self) -> Result<(), String> {
        self.kill_everything(None).map_err(|error| error.to_string())?;
        self.write_failure = None;
        // The deadline was that of the attempt; what remains is the container's own.
        self.alarm.set(Duration::MAX);
        match &self.baseline {
            Some(Ok(baseline)) => baseline.restore(&self.options),
            Some(Err(reason)) => Err(reason.clone()),
            None => Err("this sandbox was not opened for reuse".to_owned()),
        }
    }

    fn exec(&mut self, id: u64, request: &ExecRequest) -> io::Result<()> {
        let oom_before = oom_kills();
        match Job::start(request, &self.options.workdir) {
            Ok(mut job) => {
                self.heard = Instant::now();
                let cause = self.watch(&mut job)?;
                // First, for files that were removed while open make room once their holders are dead.
                self.look_at_disk()?;
                self.kill_everything(Some(&mut job))?;
                while job.read_some()? {}
                let elapsed = job.started.elapsed();
                self.send_output(id, false, &job.kept.head)?;
                self.send_output(id, true, job.kept.tail())?;
                let done = Done {
                    end: cause.unwrap_or_else(|| end_of(&job)),
                    total_bytes: job.kept.total,
                    oom_kills: oom_kills().saturating_sub(oom_before),
                    elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
                };
                self.reply(id, &Reply::Done(done))
            }
            Err(StartError::Command(reason)) => {
                self.send_output(id, false, reason.as_bytes())?;
                let end = End::NotStarted;
                let total_bytes = reason.len() as u64;
                self.reply(id, &Reply::Done(Done { end, total_bytes, oom_kills: 0, elapsed_us: 0 }))
            }
            Err(StartError::System(error)) => {
                self.reply(id, &Reply::Ack(Err(format!("cannot start a process: {error}"))))
            }
        }
    }

    /// Waits for the command's end, reading its output. Returns our reason to end it, if we did.
    fn watch(&mut self, job: &mut Job) -> io::Result<Option<End>> {
        let mut killing_at = None;
        loop {
            let now = Instant::now();
            self.look_at_disk()?;
            if job.flooded(now) {
                return Ok(Some(End::Flooded));
            }
            if now >= self.heard + HOST_SILENCE {
                return Ok(Some(End::Abandoned));
            }
            match killing_at {
                None if job.timed_out(now) => {
                    sys::signal_group(job.pid, sys::SIGTERM);
                    killing_at = Some(now + TERM_GRACE);
                }
                Some(at) if now >= at => return Ok(Some(End::TimedOut)),
                None | Some(_) => {}
            }
            let mut until = killing_at.unwrap_or(job.next_check()).min(self.heard + HOST_SILENCE);
            if self.watches_disk {
                until = until.min(now + LOOK_EVERY);
            }
            let fds = [Some(self.input.as_fd()), Some(self.children.as_fd()), job.output()];
            let [input, child, output] =
                sys::wait(fds, Some(until.saturating_duration_since(now)))?;
            if output {
                job.read_some()?;
            }
            if child {
                self.reap_into(Some(job))?;
                if job.status.is_some() {
                    return Ok(killing_at.map(|_| End::TimedOut));
                }
            }
            if input {
                if !self.receive()? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.answer_while_busy()?;
            }
        }
    }

    /// Only signs of life are welcome while a command runs.
    fn answer_while_busy(&mut self) -> io::Result<()> {
        while let Some(frame) = self.next_frame()? {
            match Request::decode(frame.kind, &frame.payload).map_err(io::Error::other)? {
                Request::Ping => self.reply(frame.id, &Reply::Ack(Ok(())))?,
                Request::Exec(_)
                | Request::Write { .. }
                | Request::WriteEnd
                | Request::ReadTree { .. }
                | Request::Reset
                | Request::Deadline { .. } => {
                    let busy = Reply::Ack(Err("a command is running".to_owned()));
                    self.reply(frame.id, &busy)?;
                }
            }
        }
        Ok(())
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
        // Any length of read empties the whole signal; several deaths may share one.
        let mut info = [0; 128];
        while matches!(self.children.read(&mut info), Ok(count) if count > 0) {}
        while let Some((pid, status)) = sys::reap()? {
            if let Some(job) = job.as_deref_mut().filter(|job| job.pid == pid) {
                job.status = Some(status);
            }
        }
        Ok(())
    }

    /// Kills until nobody is left. The output is read meanwhile, for nothing else empties it.
    fn kill_everything(&mut self, mut job: Option<&mut Job>) -> io::Result<()> {
        let give_up = Instant::now() + DEATH_PATIENCE;
        while sys::kill_all()? {
            self.reap_into(job.as_deref_mut())?;
            if Instant::now() >= give_up {
                return Err(io::Error::other("a process does not die"));
            }
            let fds = [Some(self.children.as_fd()), job.as_deref().and_then(Job::output)];
            let [_, output] = sys::wait(fds, Some(Duration::from_millis(10)))?;
            if let (true, Some(job)) = (output, job.as_deref_mut()) {
                job.read_some()?;
            }
        }
        self.reap_into(job)
    }
}

fn end_of(job: &Job) -> End {
    use std::os::unix::process::ExitStatusExt as _;
    let status = job.status;
    match (status.and_then(|s| s.code()), status.and_then(|s| s.signal())) {
        (Some(code), _) => End::Code(code),
        (None, Some(signal)) => End::Signal(signal),
        // Only a child that was never reaped has neither, and all of them were.
        (None, None) => End::Signal(sys::SIGKILL),
    }
}

/// Ends the process at a deadline that can be moved, but never past the lifetime.
struct Alarm {
    ends: Mutex<Instant>,
    changed: Condvar,
    last: Instant,
}

impl Alarm {
    fn start(lifetime: Duration) -> io::Result<Arc<Self>> {
        let last = Instant::now()
            .checked_add(lifetime)
            .ok_or_else(|| io::Error::other("the lifetime is too long"))?;
        let alarm = Arc::new(Self { ends: Mutex::new(last), changed: Condvar::new(), last });
        let waiting = Arc::clone(&alarm);
        std::thread::Builder::new().stack_size(64 * 1024).spawn(move || waiting.wait())?;
        Ok(alarm)
    }

    fn set(&self, from_now: Duration) {
        let ends = Instant::now().checked_add(from_now).map_or(self.last, |at| at.min(self.last));
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = ends;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(left) = ends.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
        {
            ends = match self.changed.wait_timeout(ends, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        say("the deadline passed");
        end_now();
    }
}

#[expect(
    clippy::exit,
    reason = "the deadline ends process 1, and the container with it, from a second thread"
)]
fn end_now() -> ! {
    std::process::exit(3)
}
