//! The stream to one supervisor. When it ends the sandbox is lost, whatever was said before.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::daemon::Daemon;
use bollard::container::LogOutput;
use bollard::errors::Error as DriverError;
use bollard::query_parameters::AttachContainerOptions;
use futures::{Stream, StreamExt as _};
use orchestrate_supervisor::Free;
use orchestrate_supervisor::protocol::{FrameBuffer, Reply, Request, VERSION};
use std::pin::Pin;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

/// Of the supervisor's own complaints, this much is kept for the error message.
const STDERR_KEEP: usize = 4096;

/// Both directions of a container's attached stream.
pub(crate) struct Link {
    name: String,
    output: Pin<Box<dyn Stream<Item = Result<LogOutput, DriverError>> + Send>>,
    input: Pin<Box<dyn AsyncWrite + Send>>,
    frames: FrameBuffer,
    stderr: Vec<u8>,
    last_id: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Link {
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
        })
    }

    fn error(&self, kind: SandboxErrorKind) -> SandboxError {
        SandboxError { sandbox: self.name.clone(), kind }
    }

    /// An error about what the supervisor said.
    pub(crate) fn protocol(&self, what: impl std::fmt::Display) -> SandboxError {
        self.error(SandboxErrorKind::Protocol(what.to_string()))
    }

    fn gone(&self, how: &str) -> SandboxError {
        let said = String::from_utf8_lossy(&self.stderr);
        let text = if said.trim().is_empty() {
            how.to_owned()
        } else {
            format!("{how} ({})", said.trim())
        };
        self.error(SandboxErrorKind::Gone(text))
    }

    /// Waits for the supervisor's first frame, which says what is left of the host's disk.
    pub(crate) async fn hello(&mut self) -> Result<Free, SandboxError> {
        match self.receive().await? {
            (0, Reply::Hello { version: VERSION, free }) => Ok(free),
            (_, other) => Err(self.protocol(format!("expected a greeting, got {other:?}"))),
        }
    }

    /// Sends a request and returns the id under which the answers come.
    pub(crate) async fn send(&mut self, request: &Request) -> Result<u64, SandboxError> {
        self.last_id += 1;
        self.send_more(self.last_id, request).await?;
        Ok(self.last_id)
    }

    /// Sends another part under an id that was given out.
    pub(crate) async fn send_more(
        &mut self,
        id: u64,
        request: &Request,
    ) -> Result<(), SandboxError> {
        let frame = request.encode(id).map_err(|error| {
            self.error(SandboxErrorKind::Refused { call: "send", message: error.to_string() })
        })?;
        let written = async {
            self.input.write_all(&frame).await?;
            self.input.flush().await
        };
        written.await.map_err(|error| self.gone(&format!("the stream broke: {error}")))
    }

    /// The next frame. Cancel-safe: a frame is taken whole or stays. That the host's disk is full is
    /// an error wherever it comes: what the container answers after that is worth nothing.
    pub(crate) async fn receive(&mut self) -> Result<(u64, Reply), SandboxError> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|e| self.protocol(e))? {
                let reply =
                    Reply::decode(frame.kind, &frame.payload).map_err(|e| self.protocol(e))?;
                if let Reply::DiskFull(free) = reply {
                    let words = format!("{free}, so no result of this sandbox counts");
                    return Err(self.error(SandboxErrorKind::DiskFull(words)));
                }
                return Ok((frame.id, reply));
            }
            match self.output.next().await {
                Some(Ok(LogOutput::StdOut { message })) => self.frames.push(&message),
                Some(Ok(LogOutput::StdErr { message })) => {
                    let room = STDERR_KEEP.saturating_sub(self.stderr.len()).min(message.len());
                    self.stderr.extend(message.iter().take(room));
                }
                Some(Ok(LogOutput::StdIn { .. } | LogOutput::Console { .. })) => {
                    return Err(self.gone("the stream was cut inside a frame"));
                }
                Some(Err(error)) => return Err(self.gone(&format!("the stream broke: {error}"))),
                None => return Err(self.gone("the stream ended")),
            }
        }
    }

    /// Waits for the plain answer to a request: done, or refused with the reason.
    pub(crate) async fn acknowledged(
        &mut self,
        id: u64,
    ) -> Result<Result<(), String>, SandboxError> {
        match self.receive().await? {
            (got, Reply::Ack(answer)) if got == id => Ok(answer),
            (got, other) => {
                Err(self.protocol(format!("expected an answer to {id}, got {got}: {other:?}")))
            }
        }
    }

    /// A request with a plain answer, within a time.
    pub(crate) async fn ask(
        &mut self,
        call: &'static str,
        request: &Request,
        within: Duration,
    ) -> Result<Result<(), String>, SandboxError> {
        let asked = async {
            let id = self.send(request).await?;
            self.acknowledged(id).await
        };
        match tokio::time::timeout(within, asked).await {
            Ok(result) => result,
            Err(_) => Err(self.error(SandboxErrorKind::TimedOut { call, after: within })),
        }
    }
}
