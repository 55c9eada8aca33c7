//! Waiting while a command runs, and killing what it leaves.

use super::Server;
use crate::disk::CHECK_INTERVAL;
use crate::forward::Forwarder;
use crate::job::{Job, TERM_GRACE};
use crate::protocol::{AgentEvent, CommandEnd, Refusal, Reply, Request};
use crate::sys::{self, Ready, Watched};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

/// A host that sends no frame for this long while a command runs is considered gone.
const HOST_SILENCE: Duration = Duration::from_mins(1);
/// A killed process may take a while to free its memory; one that takes longer than this is stuck.
const KILL_TIMEOUT: Duration = Duration::from_secs(15);

/// Takes an event of a connection to the host.
fn send(stream: &mut File, id: u64, number: u64, event: AgentEvent) -> io::Result<()> {
    let frame = Reply::Connection { number, event }.encode(id).map_err(io::Error::other)?;
    stream.write_all(&frame)
}

impl Server {
    /// Reads the command's output until the command ends (`None`) or must be killed (the reason).
    pub(super) fn watch(
        &mut self,
        id: u64,
        job: &mut Job,
        forwarder: &mut Forwarder,
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
            until = forwarder.next_check(now).map_or(until, |at| until.min(at));
            let timeout = until.saturating_duration_since(now);
            let (own, ready) = self.wait(job, forwarder, now, timeout)?;
            let [input, child, output] = own;
            if output {
                job.read_available()?;
            }
            let stream = &mut self.output;
            forwarder.advance(&ready, Instant::now(), &mut |number, event| {
                send(stream, id, number, event)
            })?;
            if child {
                self.reap_into(Some(job))?;
                if job.status.is_some() {
                    return Ok(killing_at.map(|_| CommandEnd::TimedOut));
                }
            }
            if input {
                if !self.receive()? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                if self.handle_while_busy(id, forwarder)? {
                    return Ok(Some(CommandEnd::Stopped));
                }
            }
        }
    }

    /// Waits for input, an ended child or output, and for what the forwarder waits for.
    fn wait(
        &self,
        job: &Job,
        forwarder: &Forwarder,
        now: Instant,
        timeout: Duration,
    ) -> io::Result<([bool; 3], Vec<Ready>)> {
        let readable = |fd| Watched { fd, read: true, write: false };
        // Once the output has ended, the input stands in its place, so that positions are fixed.
        let output = job.output();
        let own = [self.input.as_fd(), self.children.as_fd(), output.unwrap_or(self.input.as_fd())];
        let watched: Vec<_> = own.into_iter().map(readable).chain(forwarder.watched(now)).collect();
        let mut ready = sys::wait(&watched, Some(timeout))?;
        let forwarded = ready.split_off(own.len().min(ready.len()));
        let mut own = ready.into_iter().map(|ready| ready.read);
        let mut next = || own.next().unwrap_or_default();
        Ok(([next(), next(), next() && output.is_some()], forwarded))
    }

    /// Handles requests while a command runs. `true` if the host asks to stop it.
    fn handle_while_busy(&mut self, id: u64, forwarder: &mut Forwarder) -> io::Result<bool> {
        while let Some(frame) = self.next_frame()? {
            match Request::decode(frame.kind, &frame.payload).map_err(io::Error::other)? {
                Request::Ping => self.reply(frame.id, &Reply::Ack(Ok(())))?,
                Request::Connection { number, event } => {
                    let stream = &mut self.output;
                    forwarder.handle(number, event, Instant::now(), &mut |number, event| {
                        send(stream, id, number, event)
                    })?;
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
                | Request::Deadline { .. }
                | Request::Root { .. } => {
                    let busy = Reply::Ack(Err(Refusal::new("a command is running")));
                    self.reply(frame.id, &busy)?;
                }
            }
        }
        Ok(false)
    }

    pub(super) fn reap_all(&mut self) -> io::Result<()> {
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
    pub(super) fn kill_everything(&mut self, mut job: Option<&mut Job>) -> io::Result<()> {
        let give_up_at = Instant::now() + KILL_TIMEOUT;
        while sys::kill_all()? {
            self.reap_into(job.as_deref_mut())?;
            if Instant::now() >= give_up_at {
                return Err(io::Error::other("a killed process does not end"));
            }
            let fds = [Some(self.children.as_fd()), job.as_deref().and_then(Job::output)];
            let [_, output] = sys::poll_readable(fds, Some(Duration::from_millis(10)))?;
            if let (true, Some(job)) = (output, job.as_deref_mut()) {
                job.read_available()?;
            }
        }
        self.reap_into(job)
    }
}
