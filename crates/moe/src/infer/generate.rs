//! `/generate`: submits the sequences of a body to the engine thread and returns one reply or a
//! stream.

use super::body::{Checked, GenerateBody, Prompt};
use super::engine::{Engine, ErrorReply, parse};
use super::reply::{self, Context};
use super::request::{Command, Finished, Job, Progress, Refusal};
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// Time after which a health probe reports the engine as unavailable.
const PROBE_DEADLINE: Duration = Duration::from_secs(20);

/// A submitted sequence. Dropping it before its answer arrives aborts the sequence.
struct PendingSequence {
    engine: Arc<Engine>,
    context: Context,
    answer: oneshot::Receiver<Result<Finished, Refusal>>,
    progress: Option<mpsc::Receiver<Progress>>,
    /// Counts the tokens of the prompt as held.
    _room: Option<OwnedSemaphorePermit>,
}

impl Drop for PendingSequence {
    fn drop(&mut self) {
        self.engine.live().remove(&self.context.rid);
        // The engine notices the closed channel at its next step; the command wakes it if it is
        // idle. A full command queue means that it is not idle.
        self.answer.close();
        self.engine.commands.try_send(Command::Sweep).ok();
    }
}

impl PendingSequence {
    async fn wait(&mut self) -> Result<Finished, ErrorReply> {
        match (&mut self.answer).await {
            Ok(Ok(finished)) => Ok(finished),
            Ok(Err(Refusal::QueueFull)) => Err(ErrorReply::QueueFull),
            Err(_) => Err(ErrorReply::Stopped),
        }
    }

    fn render(&self, finished: &Finished) -> Result<String, ErrorReply> {
        reply::finished(&self.context, finished, self.engine.tokenizer.as_deref())
            .map_err(|e| ErrorReply::Internal(e.to_string()))
    }
}

/// Handler of `/generate`.
pub(crate) async fn generate(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let received = reply::now_seconds();
    let parsed = match parse::<GenerateBody>(&body) {
        Ok(parsed) => parsed,
        Err(error) => return error.into_response(),
    };
    drop(body);
    let stream = parsed.stream;
    let new_id = || {
        let number = engine.rids.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{number:016x}", received.to_bits())
    };
    let checked = parsed.check(engine.bounds(), new_id).map_err(ErrorReply::Invalid);
    let submitted = match checked {
        Ok(checked) => submit(&engine, checked, received).await,
        Err(error) => Err(error),
    };
    match submitted {
        Err(error) if stream => streamed_error(&error),
        Err(error) => error.into_response(),
        Ok((mut sequences, _)) if stream => match sequences.pop() {
            Some(sequence) => streamed(sequence),
            None => ErrorReply::Internal("no sequence".into()).into_response(),
        },
        Ok((sequences, array)) => match join_replies(sequences, array).await {
            Ok(text) => json_text(text),
            Err(error) => error.into_response(),
        },
    }
}

/// Reserves room for the prompts of a request, so that waiting requests hold a bounded number of
/// tokens.
fn reserve(engine: &Arc<Engine>, checked: &Checked) -> Result<OwnedSemaphorePermit, ErrorReply> {
    let tokens: usize = checked.prompts.iter().map(|prompt| prompt.input_ids.len()).sum();
    let tokens = u32::try_from(tokens).map_err(|_| ErrorReply::QueueFull)?;
    Arc::clone(&engine.token_room).try_acquire_many_owned(tokens).map_err(|_| ErrorReply::QueueFull)
}

async fn submit(
    engine: &Arc<Engine>,
    checked: Checked,
    received: f64,
) -> Result<(Vec<PendingSequence>, bool), ErrorReply> {
    let started = Instant::now();
    let mut room = reserve(engine, &checked)?;
    let mut sequences = Vec::with_capacity(checked.prompts.len());
    for Prompt { rid, input_ids, sampling, show } in checked.prompts {
        if !engine.live().insert(rid.clone()) {
            let message = format!("Duplicate request ID detected: {rid}");
            return Err(ErrorReply::Invalid(message.into()));
        }
        let (reply, answer) = oneshot::channel();
        let (sender, progress) = if checked.stream {
            let (sender, progress) = mpsc::channel(sampling.max_new_tokens.max(1));
            (Some(sender), Some(progress))
        } else {
            (None, None)
        };
        // -1 and the length of the prompt both mean output tokens only.
        let start = checked.logprob_start.and_then(|s| usize::try_from(s).ok());
        let logprob_start = start.filter(|&s| s < input_ids.len());
        sequences.push(PendingSequence {
            engine: Arc::clone(engine),
            context: Context {
                rid: rid.clone(),
                prompt: input_ids.clone(),
                show,
                received,
                logprob_start: logprob_start.unwrap_or(0),
            },
            answer,
            progress,
            _room: room.split(input_ids.len()),
        });
        let job = Job {
            rid,
            input_ids,
            sampling,
            logprob_start,
            routed_start: checked.routed_start,
            namespace: checked.namespace.clone(),
            priority: checked.priority,
            progress: sender,
            reply,
            received: started,
        };
        let command = Command::Generate(Box::new(job));
        engine.commands.send(command).await.map_err(|_| ErrorReply::Stopped)?;
    }
    Ok((sequences, checked.array))
}

/// Waits for all sequences and joins their replies.
async fn join_replies(sequences: Vec<PendingSequence>, array: bool) -> Result<String, ErrorReply> {
    let mut texts = Vec::with_capacity(sequences.len());
    for mut sequence in sequences {
        let finished = sequence.wait().await?;
        texts.push(sequence.render(&finished)?);
    }
    Ok(if array { format!("[{}]", texts.join(",")) } else { texts.concat() })
}

fn json_text(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

fn event_stream(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}

fn event(data: &str) -> Bytes {
    format!("data: {data}\n\n").into()
}

/// Errors of a streamed request are sent as events, after HTTP 200.
fn error_event(error: &ErrorReply) -> Bytes {
    let code = error.status();
    let data = serde_json::json!({
        "error": {
            "message": error.message(),
            "type": if code.is_client_error() { "invalid_request_error" } else { "server_error" },
            "code": code.as_u16(),
            "retryable": code == StatusCode::SERVICE_UNAVAILABLE,
        }
    });
    event(&data.to_string())
}

fn streamed_error(error: &ErrorReply) -> Response {
    let mut body = error_event(error).to_vec();
    body.extend_from_slice(&event("[DONE]"));
    event_stream(body.into())
}

/// State of a stream.
enum StreamState {
    Sampling { ids: Vec<u32>, logprobs: Vec<f32> },
    Done,
    Closed,
}

fn streamed(sequence: PendingSequence) -> Response {
    let start = StreamState::Sampling { ids: Vec::new(), logprobs: Vec::new() };
    let chunks = futures::stream::unfold((sequence, start), async |(mut sequence, state)| {
        let (bytes, state) = match state {
            StreamState::Closed => return None,
            StreamState::Done => (event("[DONE]"), StreamState::Closed),
            StreamState::Sampling { ids, logprobs } => {
                next_event(&mut sequence, ids, logprobs).await
            }
        };
        Some((Ok::<_, Infallible>(bytes), (sequence, state)))
    });
    event_stream(Body::from_stream(chunks))
}

async fn next_event(
    sequence: &mut PendingSequence,
    mut ids: Vec<u32>,
    mut logprobs: Vec<f32>,
) -> (Bytes, StreamState) {
    let newest = match sequence.progress.as_mut() {
        Some(progress) => progress.recv().await,
        None => None,
    };
    let Some(newest) = newest else {
        // The engine dropped its sender: the answer is ready, or will never arrive.
        let text = sequence.wait().await.and_then(|finished| sequence.render(&finished));
        return match text {
            Ok(text) => (event(&text), StreamState::Done),
            Err(error) => (error_event(&error), StreamState::Done),
        };
    };
    ids.push(newest.token);
    logprobs.push(newest.logprob);
    let version = sequence.engine.status().weight_version;
    let tokenizer = sequence.engine.tokenizer.as_deref();
    match reply::partial(&sequence.context, (&ids, &logprobs), newest, &version, tokenizer) {
        Ok(text) => (event(&text), StreamState::Sampling { ids, logprobs }),
        Err(e) => (error_event(&ErrorReply::Internal(e.to_string())), StreamState::Done),
    }
}

/// Handler of `/health_generate`: runs one token through the model. A paused engine counts as
/// healthy.
pub(crate) async fn health_generate(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.status().paused {
        return StatusCode::OK;
    }
    let probe = r#"{"input_ids":[0],"sampling_params":{"max_new_tokens":1,"temperature":0}}"#;
    let answer = generate(State(engine), Bytes::from_static(probe.as_bytes()));
    match tokio::time::timeout(PROBE_DEADLINE, answer).await {
        Ok(response) => response.status(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}
