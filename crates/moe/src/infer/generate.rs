//! `/generate`: from a body to sequences on the engine thread and back, as one reply or a stream.

use super::body::{Checked, GenerateBody, Prompt};
use super::reply::{self, Context};
use super::request::{Command, Finished, Job, Progress, Refusal};
use super::server::{Engine, Failure, parse};
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// A health probe slower than this means the engine is stuck.
const PROBE_DEADLINE: Duration = Duration::from_secs(20);

/// A sequence on its way through the engine. Dropped early, it aborts the sequence.
struct Flight {
    engine: Arc<Engine>,
    context: Context,
    answer: oneshot::Receiver<Result<Finished, Refusal>>,
    progress: Option<mpsc::Receiver<Progress>>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.engine.live().remove(&self.context.rid);
        // The engine sees the closed channel at its next step; this wakes it if it sleeps. A full
        // queue means that it is awake.
        self.answer.close();
        self.engine.commands.try_send(Command::Sweep).ok();
    }
}

impl Flight {
    async fn land(&mut self) -> Result<Finished, Failure> {
        match (&mut self.answer).await {
            Ok(Ok(finished)) => Ok(finished),
            Ok(Err(Refusal::QueueFull)) => Err(Failure::QueueFull),
            Err(_) => Err(Failure::Stopped),
        }
    }

    fn render(&self, finished: &Finished) -> Result<String, Failure> {
        reply::finished(&self.context, finished, self.engine.tokenizer.as_deref())
            .map_err(|e| Failure::Internal(e.to_string()))
    }
}

/// The handler.
pub(crate) async fn generate(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let received = reply::now_seconds();
    let parsed = match parse::<GenerateBody>(&body) {
        Ok(parsed) => parsed,
        Err(failure) => return failure.into_response(),
    };
    drop(body);
    let stream = parsed.stream;
    let fresh = || {
        let number = engine.rids.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{number:016x}", received.to_bits())
    };
    let checked = parsed.check(engine.bounds(), fresh).map_err(Failure::Invalid);
    let launched = match checked {
        Ok(checked) => launch(&engine, checked, received).await,
        Err(failure) => Err(failure),
    };
    match launched {
        Err(failure) if stream => streamed_failure(&failure),
        Err(failure) => failure.into_response(),
        Ok((mut flights, _)) if stream => match flights.pop() {
            Some(flight) => streamed(flight),
            None => Failure::Internal("no sequence".into()).into_response(),
        },
        Ok((flights, array)) => match landed(flights, array).await {
            Ok(text) => json_text(text),
            Err(failure) => failure.into_response(),
        },
    }
}

async fn launch(
    engine: &Arc<Engine>,
    checked: Checked,
    received: f64,
) -> Result<(Vec<Flight>, bool), Failure> {
    let started = Instant::now();
    let mut flights = Vec::with_capacity(checked.prompts.len());
    for Prompt { rid, input_ids, sampling, show } in checked.prompts {
        if !engine.live().insert(rid.clone()) {
            return Err(Failure::Invalid(format!("Duplicate request ID detected: {rid}")));
        }
        let (reply, answer) = oneshot::channel();
        let (sender, progress) = if checked.stream {
            let (sender, progress) = mpsc::channel(sampling.max_new_tokens.max(1));
            (Some(sender), Some(progress))
        } else {
            (None, None)
        };
        // -1 asks for output tokens only; so does the prompt's length.
        let start = checked.logprob_start.and_then(|s| usize::try_from(s).ok());
        let logprob_start = start.filter(|&s| s < input_ids.len());
        flights.push(Flight {
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
        engine.commands.send(command).await.map_err(|_| Failure::Stopped)?;
    }
    Ok((flights, checked.array))
}

/// Waits for all sequences and joins their replies.
async fn landed(flights: Vec<Flight>, array: bool) -> Result<String, Failure> {
    let mut texts = Vec::with_capacity(flights.len());
    for mut flight in flights {
        let finished = flight.land().await?;
        texts.push(flight.render(&finished)?);
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

/// Errors of a stream arrive inside it, after HTTP 200.
fn failure_event(failure: &Failure) -> Bytes {
    let error = serde_json::json!({
        "error": {
            "message": failure.message(),
            "type": "invalid_request_error",
            "code": 400,
            "retryable": false,
        }
    });
    event(&error.to_string())
}

fn streamed_failure(failure: &Failure) -> Response {
    let mut body = failure_event(failure).to_vec();
    body.extend_from_slice(&event("[DONE]"));
    event_stream(body.into())
}

/// Where a stream stands.
enum Stage {
    Sampling { ids: Vec<u32>, logprobs: Vec<f32> },
    Done,
    Closed,
}

fn streamed(flight: Flight) -> Response {
    let start = Stage::Sampling { ids: Vec::new(), logprobs: Vec::new() };
    let chunks = futures::stream::unfold((flight, start), async |(mut flight, stage)| {
        let (bytes, stage) = match stage {
            Stage::Closed => return None,
            Stage::Done => (event("[DONE]"), Stage::Closed),
            Stage::Sampling { ids, logprobs } => next_event(&mut flight, ids, logprobs).await,
        };
        Some((Ok::<_, Infallible>(bytes), (flight, stage)))
    });
    event_stream(Body::from_stream(chunks))
}

async fn next_event(
    flight: &mut Flight,
    mut ids: Vec<u32>,
    mut logprobs: Vec<f32>,
) -> (Bytes, Stage) {
    let newest = match flight.progress.as_mut() {
        Some(progress) => progress.recv().await,
        None => None,
    };
    let Some(newest) = newest else {
        // The engine dropped its end, so the answer is there or never comes.
        let text = flight.land().await.and_then(|finished| flight.render(&finished));
        return match text {
            Ok(text) => (event(&text), Stage::Done),
            Err(failure) => (failure_event(&failure), Stage::Done),
        };
    };
    ids.push(newest.token);
    logprobs.push(newest.logprob);
    let version = flight.engine.status().weight_version;
    let tokenizer = flight.engine.tokenizer.as_deref();
    match reply::partial(&flight.context, (&ids, &logprobs), newest, &version, tokenizer) {
        Ok(text) => (event(&text), Stage::Sampling { ids, logprobs }),
        Err(e) => (failure_event(&Failure::Internal(e.to_string())), Stage::Done),
    }
}

/// Runs one token through the model; a paused engine is healthy all the same.
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
