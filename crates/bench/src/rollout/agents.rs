//! Agents with their own loops, on a thread pinned to the engines' processors: they stream chat
//! completions, and send their whole history with every request.

use super::observers::Observer;
use super::processors::keep_thread_to;
use anyhow::{Context, bail, ensure};
use orchestrate_synthetic::AgentJob;
use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Maximum number of agents that wait to begin.
const WAITING: usize = 1024;

/// The thread on which all agents run.
#[derive(Debug)]
pub(super) struct Agents {
    pub(super) jobs: mpsc::Sender<AgentJob>,
    thread: Observer<anyhow::Result<()>>,
}

impl Agents {
    pub(super) fn begin(processors: Vec<usize>, output: &'static str) -> anyhow::Result<Self> {
        let (jobs, mut waiting) = mpsc::channel::<AgentJob>(WAITING);
        let thread = Observer::begin(
            move || keep_thread_to(&processors),
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build()?;
                runtime.block_on(async {
                    let mut agents = JoinSet::new();
                    while let Some(AgentJob { prompt, stream, done }) = waiting.recv().await {
                        agents.spawn(async move {
                            let worked = work(&prompt, stream, output).await;
                            // Fails only if the sandbox is gone.
                            let _ = done.send(worked.map_err(|error| format!("{error:#}")));
                        });
                        while agents.try_join_next().is_some() {}
                    }
                });
                Ok(())
            },
        )?;
        Ok(Self { jobs, thread })
    }

    /// Id of the thread.
    pub(super) fn thread(&self) -> Pid {
        self.thread.id()
    }

    /// Joins the thread, if there is one. All agents must have ended.
    pub(super) async fn end(agents: Option<Self>) -> anyhow::Result<()> {
        let Some(Self { jobs, thread }) = agents else { return Ok(()) };
        drop(jobs);
        tokio::task::spawn_blocking(|| thread.end()).await??
    }
}

/// One agent: calls its tool until the model submits.
async fn work(prompt: &str, mut stream: DuplexStream, output: &str) -> anyhow::Result<()> {
    let mut messages = vec![json!({"role": "user", "content": prompt})];
    loop {
        let call = ask(&mut stream, &messages).await?;
        let name = call.pointer("/function/name").and_then(Value::as_str).unwrap_or_default();
        if name == "submit" {
            return Ok(());
        }
        let id = call.get("id").cloned().unwrap_or_default();
        messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
    }
}

/// The tool call of a streamed reply.
async fn ask(stream: &mut DuplexStream, messages: &[Value]) -> anyhow::Result<Value> {
    let body = json!({"model": "policy", "stream": true, "messages": messages}).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut got = Vec::new();
    let end = loop {
        if let Some(end) = memchr::memmem::find(&got, b"\r\n\r\n") {
            break end + 4;
        }
        read(stream, &mut got).await?;
    };
    ensure!(got.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&got));
    got.drain(..end);
    let text = String::from_utf8(chunks(stream, got).await?)?;
    let mut call = Value::Null;
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let Ok(chunk) = serde_json::from_str::<Value>(line) else { continue };
        let Some(delta) = chunk.pointer("/choices/0/delta/tool_calls/0") else { continue };
        if call.is_null() {
            call = delta.clone();
        } else if let (Some(Value::String(all)), Some(more)) = (
            call.pointer_mut("/function/arguments"),
            delta.pointer("/function/arguments").and_then(Value::as_str),
        ) {
            all.push_str(more);
        }
    }
    if call.is_null() {
        bail!("the reply has no tool call: {text}");
    }
    if let Some(call) = call.as_object_mut() {
        call.remove("index");
    }
    Ok(call)
}

/// Reads a chunked body. `got` is the part that has arrived.
async fn chunks(stream: &mut DuplexStream, mut got: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = loop {
            if let Some(line) = memchr::memmem::find(&got, b"\r\n") {
                break line;
            }
            read(stream, &mut got).await?;
        };
        let size = std::str::from_utf8(got.get(..line).unwrap_or_default())?;
        let size = usize::from_str_radix(size, 16).context("invalid size of a chunk")?;
        let (from, to) = (line + 2, line + 2 + size);
        while got.len() < to + 2 {
            read(stream, &mut got).await?;
        }
        body.extend_from_slice(got.get(from..to).unwrap_or_default());
        got.drain(..to + 2);
        if size == 0 {
            return Ok(body);
        }
    }
}

async fn read(stream: &mut DuplexStream, got: &mut Vec<u8>) -> anyhow::Result<()> {
    ensure!(stream.read_buf(got).await? > 0, "the gateway closed the connection");
    Ok(())
}
