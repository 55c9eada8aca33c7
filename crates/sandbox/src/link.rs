//! The stream to one supervisor. When it ends, the sandbox is lost.

use crate::daemon::Daemon;
use crate::error::{SandboxError, SandboxErrorKind};
use bollard::container::LogOutput;
use bollard::errors::Error as DriverError;
use bollard::query_parameters::AttachContainerOptions;
use futures::{Stream, StreamExt as _};
use orchestrate_supervisor::FreeSpace;
use orchestrate_supervisor::protocol::{FrameBuffer, Refusal, Reply, Request, VERSION};
use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

/// Bytes of the supervisor's stderr that are kept for error messages.
const STDERR_BYTES: usize = 4096;

/// Both directions of a container's attached stream.
pub(crate) struct SupervisorLink {
    name: String,
    output: Pin<Box<dyn Stream<Item = Result<LogOutput, DriverError>> + Send>>,
    input: Pin<Box<dyn AsyncWrite + Send>>,
    frames: FrameBuffer,
    stderr: Vec<u8>,
    last_id: u64,
    /// Encoded requests that are not written yet, and how much of them is.
    unwritten: Vec<u8>,
    written: usize,
    /// Ids of pings that were not answered yet.
    pings: BTreeSet<u64>,
}

impl std::fmt::Debug for SupervisorLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SupervisorLink").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SupervisorLink {
    /// Attaches to a container that was created and not yet started.
    pub(crate) async fn attach(daemon: &Daemon, name: &str) -> Result<Self, SandboxError> {
        let options = AttachContainerOptions {
            stream: true,
            stdin: true,
            stdout: true,
            stderr: true,
            logs: false,
            detach_keys: None,
        };
        let attached = daemon
            .call(daemon.docker.attach_container(name, Some(options)))
            .await
            .map_err(|error| error.at(name, "attach"))?;
        Ok(Self {
            name: name.to_owned(),
            output: attached.output,
            input: attached.input,
            frames: FrameBuffer::default(),
            stderr: Vec::new(),
            last_id: 0,
            unwritten: Vec::new(),
            written: 0,
            pings: BTreeSet::new(),
        })
    }

    fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.name.clone(), kind }
    }

    /// An error because of something that the supervisor sent.
    pub(crate) fn protocol_error(&self, problem: impl std::fmt::Display) -> SandboxError {
        self.error(SandboxErrorKind::Protocol(problem.to_string()))
    }

    /// An error because the stream ended, with what the supervisor wrote to stderr.
    fn gone_error(&self, reason: &str) -> SandboxError {
        let stderr = String::from_utf8_lossy(&self.stderr);
        let text = if stderr.trim().is_empty() {
            reason.to_owned()
        } else {
            format!("{reason} ({})", stderr.trim())
        };
        self.error(SandboxErrorKind::Gone(text))
    }

    /// Waits for the supervisor's first frame and returns the free space of the host's disk.
    pub(crate) async fn wait_for_hello(&mut self) -> Result<FreeSpace, SandboxError> {
        match self.receive().await? {
            (0, Reply::Hello { version: VERSION, free }) => Ok(free),
            (_, other) => {
                Err(self.protocol_error(format!("expected hello version {VERSION}, got {other:?}")))
            }
        }
    }

    /// Sends a request and returns the id of its replies.
    pub(crate) async fn send(&mut self, request: &Request) -> Result<u64, SandboxError> {
        let id = self.queue(request)?;
        let written = write(&mut self.input, &mut self.unwritten, &mut self.written);
        written.await.map_err(|error| self.gone_error(&format!("the stream broke: {error}")))?;
        Ok(id)
    }

    /// Queues a request and returns the id of its replies. [`SupervisorLink::progress`] writes it.
    pub(crate) fn queue(&mut self, request: &Request) -> Result<u64, SandboxError> {
        self.last_id += 1;
        let id = self.last_id;
        let frame = request.encode(id).map_err(|error| {
            self.error(SandboxErrorKind::Failed { call: "send", source: Arc::new(error) })
        })?;
        self.unwritten.extend_from_slice(&frame);
        if *request == Request::Ping {
            self.pings.insert(id);
        }
        Ok(id)
    }

    /// Whether queued requests are not written yet.
    pub(crate) fn is_writing(&self) -> bool {
        !self.unwritten.is_empty()
    }

    /// Receives the next frame. Cancel-safe: a frame is returned whole or stays in the buffer.
    pub(crate) async fn receive(&mut self) -> Result<(u64, Reply), SandboxError> {
        loop {
            if let Some(received) = self.progress().await? {
                return Ok(received);
            }
        }
    }

    /// Receives the next frame or writes what is queued, whichever is complete first; `None` if all
    /// was written. Both go on at once, because the supervisor reads nothing while it waits for its
    /// own frames to be received. Cancel-safe.
    ///
    /// A full disk on the host and damage by commands are errors at any time, because nothing that
    /// the container sends after that can be trusted.
    pub(crate) async fn progress(&mut self) -> Result<Option<(u64, Reply)>, SandboxError> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|e| self.protocol_error(e))? {
                let reply = Reply::decode(frame.kind, &frame.payload)
                    .map_err(|e| self.protocol_error(e))?;
                if let Reply::DiskFull(free) = reply {
                    let message = format!("{free}, so no result of this sandbox counts");
                    return Err(self.error(SandboxErrorKind::DiskFull(message)));
                }
                if let Reply::Damaged(what) = reply {
                    return Err(self.error(SandboxErrorKind::Damaged { what }));
                }
                // The answer to a ping may come after the end of the call during which it was sent.
                if reply == Reply::Ack(Ok(())) && self.pings.remove(&frame.id) {
                    continue;
                }
                return Ok(Some((frame.id, reply)));
            }
            let is_writing = self.is_writing();
            let received = tokio::select! {
                received = self.output.next() => received,
                written = write(&mut self.input, &mut self.unwritten, &mut self.written),
                    if is_writing =>
                {
                    let broke = |error| self.gone_error(&format!("the stream broke: {error}"));
                    return written.map(|()| None).map_err(broke);
                }
            };
            match received {
                Some(Ok(LogOutput::StdOut { message })) => self.frames.push(&message),
                Some(Ok(LogOutput::StdErr { message })) => {
                    let room = STDERR_BYTES.saturating_sub(self.stderr.len()).min(message.len());
                    self.stderr.extend(message.iter().take(room));
                }
                Some(Ok(LogOutput::StdIn { .. } | LogOutput::Console { .. })) => {
                    return Err(self.gone_error("the stream was cut inside a frame"));
                }
                Some(Err(error)) => {
                    return Err(self.gone_error(&format!("the stream broke: {error}")));
                }
                None => return Err(self.gone_error("the stream ended")),
            }
        }
    }

    /// Waits for the acknowledgement of a request.
    pub(crate) async fn acknowledgement(
        &mut self,
        id: u64,
    ) -> Result<Result<(), Refusal>, SandboxError> {
        match self.receive().await? {
            (got, Reply::Ack(answer)) if got == id => Ok(answer),
            (got, other) => Err(self.protocol_error(format!(
                "expected an acknowledgement of {id}, got {got}: {other:?}"
            ))),
        }
    }

    /// Sends a request and waits for its acknowledgement, at most `limit`.
    pub(crate) async fn request(
        &mut self,
        call: &'static str,
        request: &Request,
        limit: Duration,
    ) -> Result<Result<(), Refusal>, SandboxError> {
        let answer = async {
            let id = self.send(request).await?;
            self.acknowledgement(id).await
        };
        match tokio::time::timeout(limit, answer).await {
            Ok(result) => result,
            Err(_) => Err(self.error(SandboxErrorKind::TimedOut { call, after: limit })),
        }
    }
}

/// Writes and clears `bytes`, of which `written` are written already. Cancel-safe: what was written
/// is counted before the next wait.
async fn write(
    input: &mut Pin<Box<dyn AsyncWrite + Send>>,
    bytes: &mut Vec<u8>,
    written: &mut usize,
) -> std::io::Result<()> {
    while let Some(rest) = bytes.get(*written..).filter(|rest| !rest.is_empty()) {
        match input.write(rest).await? {
            0 => return Err(std::io::ErrorKind::WriteZero.into()),
            count => *written += count,
        }
    }
    input.flush().await?;
    bytes.clear();
    *written = 0;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[tokio::test]
    async fn an_answer_to_a_ping_that_comes_during_the_next_call_is_not_that_calls_answer() {
        let answers = [1, 2, 3, 9].map(|id| Reply::Ack(Ok(())).encode(id).unwrap());
        let message = |frame: Vec<u8>| Ok(LogOutput::StdOut { message: Bytes::from(frame) });
        let mut link = SupervisorLink {
            name: "s".to_owned(),
            output: Box::pin(futures::stream::iter(answers.map(message))),
            input: Box::pin(tokio::io::sink()),
            frames: FrameBuffer::default(),
            stderr: Vec::new(),
            last_id: 0,
            unwritten: Vec::new(),
            written: 0,
            pings: BTreeSet::new(),
        };
        link.queue(&Request::Ping).unwrap();
        let reset = link.send(&Request::Reset).await.unwrap();
        assert_eq!(link.acknowledgement(reset).await.unwrap(), Ok(()));
        // An acknowledgement that no ping asked for is still an error.
        let reset = link.send(&Request::Reset).await.unwrap();
        assert_eq!(link.acknowledgement(reset).await.unwrap(), Ok(()));
        let error = link.acknowledgement(reset + 1).await.unwrap_err();
        assert!(matches!(error.kind, SandboxErrorKind::Protocol(_)), "{error}");
    }
}
