//! Agents with their own loops, on a thread pinned to the engines' processors: they read chat
//! completions, mostly as streams, and send their whole history with every request.

use super::observers::Observer;
use super::processors::keep_thread_to;
use anyhow::{Context, bail, ensure};
use orchestrate_synthetic::AgentJob;
use orchestrate_types::unix_micros;
use rustix::process::Pid;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Maximum number of agents that wait to begin.
const WAITING: usize = 1024;

/// How agents read replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// As one document.
    Whole,
    /// As a stream.
    Stream,
}

/// The thread on which all agents run.
#[derive(Debug)]
pub(super) struct Agents {
    pub(super) jobs: mpsc::Sender<AgentJob>,
    thread: Observer<anyhow::Result<()>>,
    /// Times between an engine's first token and its text at an agent, in microseconds.
    first_texts: Arc<Mutex<Vec<u32>>>,
}

impl Agents {
    pub(super) fn begin(
        processors: Vec<usize>,
        output: &'static str,
        reading: Reading,
    ) -> anyhow::Result<Self> {
        let (jobs, mut waiting) = mpsc::channel::<AgentJob>(WAITING);
        let first_texts = Arc::<Mutex<Vec<u32>>>::default();
        let times = Arc::clone(&first_texts);
        let thread = Observer::begin(
            move || keep_thread_to(&processors),
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build()?;
                runtime.block_on(async {
                    let mut agents = JoinSet::new();
                    while let Some(AgentJob { prompt, stream, done }) = waiting.recv().await {
                        let connection = Connection { stream, got: Vec::new() };
                        let agent = Agent { connection, reading, times: Arc::clone(&times) };
                        agents.spawn(async move {
                            let worked = agent.work(&prompt, output).await;
                            // Fails only if the sandbox is gone.
                            let _ = done.send(worked.map_err(|error| format!("{error:#}")));
                        });
                        while agents.try_join_next().is_some() {}
                    }
                });
                Ok(())
            },
        )?;
        Ok(Self { jobs, thread, first_texts })
    }

    /// Id of the thread.
    pub(super) fn thread(&self) -> Pid {
        self.thread.id()
    }

    /// Joins the thread, if there is one, and returns the times until the first text, sorted. All agents
    /// must have ended.
    pub(super) async fn end(agents: Option<Self>) -> anyhow::Result<Vec<u32>> {
        let Some(Self { jobs, thread, first_texts }) = agents else { return Ok(Vec::new()) };
        drop(jobs);
        tokio::task::spawn_blocking(|| thread.end()).await???;
        let mut times = std::mem::take(&mut *lock(&first_texts));
        times.sort_unstable();
        Ok(times)
    }
}

fn lock(times: &Mutex<Vec<u32>>) -> MutexGuard<'_, Vec<u32>> {
    times.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One agent: calls its tool until the model submits.
struct Agent {
    connection: Connection,
    reading: Reading,
    times: Arc<Mutex<Vec<u32>>>,
}

impl Agent {
    async fn work(mut self, prompt: &str, output: &str) -> anyhow::Result<()> {
        let mut messages = vec![json!({"role": "user", "content": prompt})];
        loop {
            let (content, call) = self.ask(&messages).await?;
            let name = call.pointer("/function/name").and_then(Value::as_str).unwrap_or_default();
            if name == "submit" {
                return Ok(());
            }
            let id = call.get("id").cloned().unwrap_or_default();
            messages.push(json!({"role": "assistant", "content": content, "tool_calls": [call]}));
            messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
        }
    }

    /// The text and the tool call of a reply.
    async fn ask(&mut self, messages: &[Value]) -> anyhow::Result<(String, Value)> {
        let stream = self.reading == Reading::Stream;
        let body = json!({"model": "policy", "stream": stream, "messages": messages}).to_string();
        self.connection.send(&body).await?;
        let (mut content, mut call) = (String::new(), Value::Null);
        if !stream {
            let body = self.connection.whole().await?;
            let reply: Value = serde_json::from_slice(&body)?;
            let message = reply.pointer("/choices/0/message");
            let message = message.with_context(|| format!("the reply has no message: {reply}"))?;
            let text = message.get("content").and_then(Value::as_str).unwrap_or_default();
            let call = message.pointer("/tool_calls/0");
            let call = call.with_context(|| format!("the reply has no tool call: {reply}"))?;
            return Ok((text.to_owned(), call.clone()));
        }
        let mut unread = Vec::new();
        while let Some(chunk) = self.connection.chunk().await? {
            unread.extend(chunk);
            while let Some(end) = memchr::memchr(b'\n', &unread) {
                let line: Vec<u8> = unread.drain(..=end).collect();
                let Some(data) = line.strip_prefix(b"data: ") else { continue };
                let Ok(event) = serde_json::from_slice::<Value>(data) else { continue };
                let delta = event.pointer("/choices/0/delta");
                let text = delta.and_then(|delta| delta.get("content")).and_then(Value::as_str);
                let text = text.unwrap_or_default();
                if content.is_empty() && !text.is_empty() {
                    self.note_first_text(text);
                }
                content.push_str(text);
                if let Some(delta) = delta.and_then(|delta| delta.pointer("/tool_calls/0")) {
                    extend(&mut call, delta);
                }
            }
        }
        if call.is_null() {
            bail!("the reply has no tool call: {content}");
        }
        if let Some(call) = call.as_object_mut() {
            call.remove("index");
        }
        Ok((content, call))
    }

    /// The text begins with digits of the time at which the engine began it.
    fn note_first_text(&self, text: &str) {
        if let Ok(begun) = text.parse::<i64>() {
            let late = unix_micros().saturating_sub(begun);
            lock(&self.times).push(u32::try_from(late.max(0)).unwrap_or(u32::MAX));
        }
    }
}

/// Adds a part of a tool call.
fn extend(call: &mut Value, delta: &Value) {
    if call.is_null() {
        *call = delta.clone();
    } else if let (Some(Value::String(all)), Some(more)) = (
        call.pointer_mut("/function/arguments"),
        delta.pointer("/function/arguments").and_then(Value::as_str),
    ) {
        all.push_str(more);
    }
}

/// An HTTP connection, kept alive.
struct Connection {
    stream: DuplexStream,
    /// Bytes that have arrived and were not used yet.
    got: Vec<u8>,
}

impl Connection {
    /// Sends a request and reads the head of its reply.
    async fn send(&mut self, body: &str) -> anyhow::Result<()> {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        self.stream.write_all(head.as_bytes()).await?;
        self.stream.write_all(body.as_bytes()).await?;
        let end = loop {
            if let Some(end) = memchr::memmem::find(&self.got, b"\r\n\r\n") {
                break end + 4;
            }
            self.read().await?;
        };
        ensure!(self.got.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&self.got));
        self.got.drain(..end);
        Ok(())
    }

    /// The next chunk of a chunked body; `None` after the last.
    async fn chunk(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let line = loop {
            if let Some(line) = memchr::memmem::find(&self.got, b"\r\n") {
                break line;
            }
            self.read().await?;
        };
        let size = std::str::from_utf8(self.got.get(..line).unwrap_or_default())?;
        let size = usize::from_str_radix(size, 16).context("invalid size of a chunk")?;
        let (from, to) = (line + 2, line + 2 + size);
        while self.got.len() < to + 2 {
            self.read().await?;
        }
        let chunk = self.got.get(from..to).unwrap_or_default().to_vec();
        self.got.drain(..to + 2);
        Ok((size > 0).then_some(chunk))
    }

    /// All chunks of a body.
    async fn whole(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            body.extend(chunk);
        }
        Ok(body)
    }

    async fn read(&mut self) -> anyhow::Result<()> {
        ensure!(
            self.stream.read_buf(&mut self.got).await? > 0,
            "the gateway closed the connection"
        );
        Ok(())
    }
}
