//! HTTP client of the trainer protocol, with retries.

use crate::protocol::{
    CheckpointReply, ErrorBody, LogprobsReply, LogprobsRequest, PROTOCOL_VERSION, StepRequest,
    StepResult, StepState, StepStatus, TrainerInfo,
};
use backon::{ExponentialBuilder, Retryable};
use orchestrate_settings::TlsClientPem;
use orchestrate_types::Retry;
use reqwest::{Method, StatusCode};
use serde::de::DeserializeOwned;
use std::time::Duration;
use tokio::time::Instant;

/// Limit on the time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Shorter than the 5 s after which trainers close idle connections, so that no request is sent on a
/// connection that is being closed.
const POOL_IDLE: Duration = Duration::from_secs(2);
/// Limit on a call that only reads state or accepts a request.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest and longest pause between two status requests for a running step. In between, a pause is
/// 1/`POLL_SHARE` of the time waited, so that a step of any length is noticed about 5 % late at most.
const POLL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
const POLL_SHARE: u32 = 20;
/// Limit on the size of an answer: the log-probs of a large batch as JSON.
const BODY_LIMIT: usize = 512 << 20;
/// Maximum number of attempts of one call before its error is returned.
const TRIES: usize = 6;

/// Why a call to a trainer failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainerErrorKind {
    /// The connection could not be opened, or it broke.
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    /// No complete answer, or no end of the step, within the limit.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The trainer answered with an HTTP error.
    #[error("answered {status} ({code}): {message}")]
    Refused {
        /// HTTP status code.
        status: u16,
        /// Error code of the protocol; empty if the answer has none.
        code: String,
        /// Message of the trainer.
        message: String,
    },
    /// The answer does not follow the protocol.
    #[error("sent an invalid answer: {0}")]
    InvalidReply(String),
    /// The trainer rejected the step or failed; its weights are unchanged.
    #[error("step {step_id} failed: {error}")]
    StepFailed {
        /// Id of the step.
        step_id: String,
        /// Message of the trainer.
        error: String,
    },
    /// The trainer uses another version of the protocol.
    #[error("uses protocol version {0}, but this program uses {PROTOCOL_VERSION}")]
    Protocol(u32),
}

/// A failed call to a trainer: which trainer, which call, and why.
#[derive(Debug, thiserror::Error)]
#[error("trainer {trainer} ({call}): {kind}")]
pub struct TrainerError {
    /// Base URL of the trainer.
    pub trainer: String,
    /// Method and path of the call, e.g. `GET /v1/info`.
    pub call: &'static str,
    /// Why it failed.
    pub kind: TrainerErrorKind,
}

impl TrainerError {
    /// Whether the call may be retried. Steps are idempotent, so a retry never trains twice.
    pub fn retry(&self) -> Retry {
        match &self.kind {
            TrainerErrorKind::Unreachable(_) | TrainerErrorKind::TimedOut(_) => {
                Retry::After(Duration::from_secs(1))
            }
            TrainerErrorKind::Refused { status, .. } => match status {
                408 | 429 | 500 | 502 | 503 | 504 => Retry::After(Duration::from_secs(1)),
                _ => Retry::Never,
            },
            TrainerErrorKind::InvalidReply(_)
            | TrainerErrorKind::StepFailed { .. }
            | TrainerErrorKind::Protocol(_) => Retry::Never,
        }
    }

    fn is_unknown_step(&self) -> bool {
        matches!(self.kind, TrainerErrorKind::Refused { status: 404, .. })
    }
}

/// Client of the trainer at one URL.
#[derive(Clone)]
pub struct TrainerClient {
    base: String,
    token: Option<String>,
    http: reqwest::Client,
}

impl TrainerClient {
    /// A client of the trainer at `base` (e.g. `http://127.0.0.1:7070`), with its bearer token
    /// if it requires one, and the certificates for an `https` URL. Connects on the first call. Proxy
    /// settings in the environment are ignored.
    ///
    /// # Errors
    /// [`TrainerErrorKind::Unreachable`] when the HTTP client cannot be set up, e.g. with a certificate
    /// that is not valid.
    pub fn new(
        base: &str,
        token: Option<String>,
        tls: &TlsClientPem,
    ) -> Result<Self, TrainerError> {
        let base = base.trim_end_matches('/').to_owned();
        // Fails only if a provider is already installed; that one is used then.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(POOL_IDLE)
            .redirect(reqwest::redirect::Policy::none());
        match tls.configure(http).and_then(reqwest::ClientBuilder::build) {
            Ok(http) => Ok(Self { base, token, http }),
            Err(error) => Err(TrainerError {
                trainer: base,
                call: "connect",
                kind: TrainerErrorKind::Unreachable(chain(&error)),
            }),
        }
    }

    /// Base URL, without a trailing slash.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// Requests the identity and current state of the trainer.
    ///
    /// # Errors
    /// [`TrainerError`]; [`TrainerErrorKind::Protocol`] for another protocol version.
    pub async fn info(&self) -> Result<TrainerInfo, TrainerError> {
        let call = Call { name: "GET /v1/info", method: Method::GET, path: "/v1/info", body: None };
        let info: TrainerInfo = self.call(&call, CALL_TIMEOUT).await?;
        if info.protocol_version == PROTOCOL_VERSION {
            Ok(info)
        } else {
            Err(self.error(call.name, TrainerErrorKind::Protocol(info.protocol_version)))
        }
    }

    /// Submits a step. Submitting the same `step_id` again returns the state of that step.
    ///
    /// # Errors
    /// [`TrainerError`], after retries of temporary failures.
    pub async fn submit_step(&self, request: &StepRequest) -> Result<StepStatus, TrainerError> {
        let name = "POST /v1/steps";
        let body = self.encode(name, request)?;
        let call = Call { name, method: Method::POST, path: "/v1/steps", body: Some(body) };
        let status: StepStatus = self.call(&call, CALL_TIMEOUT).await?;
        self.same_step(name, &request.step_id, status)
    }

    /// Requests the state of a step.
    ///
    /// # Errors
    /// [`TrainerError`]; a step unknown to the trainer gives status 404.
    pub async fn step_status(&self, step_id: &str) -> Result<StepStatus, TrainerError> {
        let name = "GET /v1/steps/{step_id}";
        let path = format!("/v1/steps/{step_id}");
        let call = Call { name, method: Method::GET, path: &path, body: None };
        let status: StepStatus = self.call(&call, CALL_TIMEOUT).await?;
        self.same_step(name, step_id, status)
    }

    /// Waits at most `deadline` until a submitted step is done, and reports every state until then to
    /// `progress`.
    ///
    /// # Errors
    /// [`TrainerErrorKind::StepFailed`], [`TrainerErrorKind::TimedOut`], or an
    /// error of [`TrainerClient::step_status`].
    pub async fn wait_step(
        &self,
        step_id: &str,
        deadline: Duration,
        progress: impl FnMut(&StepState),
    ) -> Result<StepResult, TrainerError> {
        self.wait_until(step_id, (Instant::now(), deadline), progress).await
    }

    /// Submits a step and waits for its end. The step is submitted again to a trainer that restarted
    /// and lost it. A trainer that has already applied it returns the stored result.
    ///
    /// # Errors
    /// The errors of [`TrainerClient::wait_step`].
    pub async fn apply_step(
        &self,
        request: &StepRequest,
        deadline: Duration,
        mut progress: impl FnMut(&StepState),
    ) -> Result<StepResult, TrainerError> {
        let started = Instant::now();
        let submitted = async {
            loop {
                match self.submit_step(request).await {
                    Ok(status) => {
                        if let Some(result) = self.finished(status, &mut progress)? {
                            return Ok(result);
                        }
                    }
                    Err(error) if error.retry() != Retry::Never => {
                        self.warn(&request.step_id, &error);
                        tokio::time::sleep(POLL.1).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                }
                match self.wait_until(&request.step_id, (started, deadline), &mut progress).await {
                    Err(error) if error.is_unknown_step() => self.warn(&request.step_id, &error),
                    other => return other,
                }
            }
        };
        tokio::time::timeout_at(started + deadline, submitted).await.unwrap_or_else(|_| {
            Err(self.error("POST /v1/steps", TrainerErrorKind::TimedOut(deadline)))
        })
    }

    /// Recomputes log-probabilities of a batch; nothing changes. May take as long as `deadline`.
    ///
    /// # Errors
    /// [`TrainerError`].
    pub async fn logprobs(
        &self,
        request: &LogprobsRequest,
        deadline: Duration,
    ) -> Result<LogprobsReply, TrainerError> {
        let name = "POST /v1/logprobs";
        let body = self.encode(name, request)?;
        let call = Call { name, method: Method::POST, path: "/v1/logprobs", body: Some(body) };
        self.call(&call, deadline).await
    }

    /// Has the trainer write a checkpoint. May take as long as `deadline`.
    ///
    /// # Errors
    /// [`TrainerError`].
    pub async fn checkpoint(&self, deadline: Duration) -> Result<CheckpointReply, TrainerError> {
        let call = Call {
            name: "POST /v1/checkpoints",
            method: Method::POST,
            path: "/v1/checkpoints",
            body: Some(b"{}".to_vec()),
        };
        self.call(&call, deadline).await
    }

    async fn wait_until(
        &self,
        step_id: &str,
        (started, deadline): (Instant, Duration),
        mut progress: impl FnMut(&StepState),
    ) -> Result<StepResult, TrainerError> {
        let name = "GET /v1/steps/{step_id}";
        let waited = async {
            let waiting_since = Instant::now();
            loop {
                match self.step_status(step_id).await {
                    Ok(status) => {
                        if let Some(result) = self.finished(status, &mut progress)? {
                            return Ok(result);
                        }
                    }
                    // A trainer keeps its steps across a restart; only the deadline ends the wait.
                    Err(error) if error.retry() != Retry::Never => self.warn(step_id, &error),
                    Err(error) => return Err(error),
                }
                let pause = waiting_since.elapsed() / POLL_SHARE;
                tokio::time::sleep(pause.clamp(POLL.0, POLL.1)).await;
            }
        };
        tokio::time::timeout_at(started + deadline, waited)
            .await
            .unwrap_or_else(|_| Err(self.error(name, TrainerErrorKind::TimedOut(deadline))))
    }

    fn finished(
        &self,
        status: StepStatus,
        progress: &mut impl FnMut(&StepState),
    ) -> Result<Option<StepResult>, TrainerError> {
        progress(&status.state);
        match status.state {
            StepState::Queued | StepState::Running { .. } => Ok(None),
            StepState::Done { result } => Ok(Some(*result)),
            StepState::Failed { error } => Err(self.error(
                "POST /v1/steps",
                TrainerErrorKind::StepFailed { step_id: status.step_id, error },
            )),
        }
    }

    fn warn(&self, step_id: &str, error: &TrainerError) {
        tracing::warn!(trainer = self.base, step_id, %error, "step is not confirmed, retrying");
    }

    fn same_step(
        &self,
        call: &'static str,
        step_id: &str,
        status: StepStatus,
    ) -> Result<StepStatus, TrainerError> {
        if status.step_id == step_id {
            return Ok(status);
        }
        let message = format!("requested step {step_id}, but the answer is for {}", status.step_id);
        Err(self.error(call, TrainerErrorKind::InvalidReply(message)))
    }

    fn encode(
        &self,
        call: &'static str,
        body: &impl serde::Serialize,
    ) -> Result<Vec<u8>, TrainerError> {
        serde_json::to_vec(body).map_err(|error| {
            let message = format!("the request cannot be encoded as JSON: {error}");
            self.error(call, TrainerErrorKind::InvalidReply(message))
        })
    }

    /// One call with retries. Every call of the protocol may be repeated: reads change nothing,
    /// steps have their id, a checkpoint written twice is the same checkpoint.
    async fn call<T: DeserializeOwned>(
        &self,
        call: &Call<'_>,
        timeout: Duration,
    ) -> Result<T, TrainerError> {
        let backoff = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_delay(Duration::from_secs(5))
            .with_max_times(TRIES - 1)
            .with_jitter();
        let tries = || async {
            tokio::time::timeout(timeout, self.call_once(call))
                .await
                .unwrap_or_else(|_| Err(self.error(call.name, TrainerErrorKind::TimedOut(timeout))))
        };
        let body = tries.retry(backoff).when(|error| error.retry() != Retry::Never).await?;
        serde_json::from_slice(&body).map_err(|error| {
            self.error(call.name, TrainerErrorKind::InvalidReply(error.to_string()))
        })
    }

    async fn call_once(&self, call: &Call<'_>) -> Result<Vec<u8>, TrainerError> {
        let fail = |kind| self.error(call.name, kind);
        let unreachable =
            |error: reqwest::Error| fail(TrainerErrorKind::Unreachable(chain(&error)));
        let mut request =
            self.http.request(call.method.clone(), format!("{}{}", self.base, call.path));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = &call.body {
            request = request.header("content-type", "application/json").body(body.clone());
        }
        let mut response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
            if body.len() + chunk.len() > BODY_LIMIT {
                let message = format!("its answer is longer than {BODY_LIMIT} bytes");
                return Err(fail(TrainerErrorKind::InvalidReply(message)));
            }
            body.extend_from_slice(&chunk);
        }
        if status.is_success() { Ok(body) } else { Err(fail(refused(status, &body))) }
    }

    fn error(&self, call: &'static str, kind: TrainerErrorKind) -> TrainerError {
        TrainerError { trainer: self.base.clone(), call, kind }
    }
}

impl std::fmt::Debug for TrainerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainerClient")
            .field("base", &self.base)
            .field("token", &self.token.as_ref().map(|_| "(not shown)"))
            .finish_non_exhaustive()
    }
}

struct Call<'a> {
    name: &'static str,
    method: Method,
    path: &'a str,
    body: Option<Vec<u8>>,
}

fn refused(status: StatusCode, body: &[u8]) -> TrainerErrorKind {
    let (code, message) = serde_json::from_slice::<ErrorBody>(body).map_or_else(
        |_| (String::new(), String::from_utf8_lossy(body).chars().take(300).collect()),
        |body| (body.error.code, body.error.message),
    );
    TrainerErrorKind::Refused { status: status.as_u16(), code, message }
}

/// An error with its causes, because reqwest's own text names only the URL.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
