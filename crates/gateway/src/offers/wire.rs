//! Request and reply bodies of the routes for workers.

use super::offered::{FailureKind, OfferEnd, Returned};
use crate::code::ErrorCode;
use crate::content::Object;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use orchestrate_types::{is_unprintable, mended_json};
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum length of a worker's name, of a `take_id` and of a metric's name, in bytes.
const NAME_BYTES: usize = 128;
/// Maximum number of metrics of an episode.
const METRICS: usize = 64;
/// Maximum number of characters kept of a failure's message.
const MESSAGE_CHARS: usize = 4000;

/// A request for an episode.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "the names of the protocol")]
pub(super) struct Take {
    /// Name of the worker, used in messages.
    pub(super) worker: String,
    /// Drawn by the worker for each new episode: a request with the same id gets the same episode.
    pub(super) take_id: String,
    /// Seconds to wait for an episode.
    #[serde(default)]
    pub(super) wait_s: f64,
}

/// An episode that was taken.
#[derive(Debug, Serialize)]
pub(super) struct Taken {
    pub(super) lease: String,
    pub(super) attempt: String,
    pub(super) task: Value,
    pub(super) model: String,
    pub(super) context: usize,
    pub(super) api_key: String,
    pub(super) openai_path: String,
    pub(super) anthropic_path: String,
    pub(super) lease_s: f64,
    pub(super) time_s: f64,
}

/// A result: a reward, or a failure.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Finish {
    reward: Option<f64>,
    #[serde(default, deserialize_with = "metrics")]
    metrics: BTreeMap<String, f64>,
    failure: Option<Object<Failure>>,
}

/// Metrics by name. Of two with the same name, one would be lost without a word.
fn metrics<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    struct Metrics;
    impl<'de> Visitor<'de> for Metrics {
        type Value = BTreeMap<String, f64>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a map of numbers")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut metrics = BTreeMap::new();
            while let Some((name, value)) = entries.next_entry::<String, f64>()? {
                if metrics.contains_key(&name) {
                    let problem = format!("the metric {name:?} occurs twice; send it once");
                    return Err(A::Error::custom(problem));
                }
                metrics.insert(name, value);
            }
            Ok(metrics)
        }
    }
    from.deserialize_map(Metrics)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
    kind: Kind,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Environment,
    Agent,
    Timeout,
}

/// Why a request of a worker is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum Problem {
    #[error("{0}")]
    Invalid(String),
    #[error("this lease is over: {0}; take another episode")]
    Over(String),
    #[error(
        "the run does not know this lease: it ended long ago, or the run was restarted without it. A result that \
         was returned before counts; without one, the run repeats the episode. Stop working on it and take another \
         episode"
    )]
    Unknown,
    #[error("the run was restarted and has not restored this lease yet; send it again")]
    NotRestored,
    #[error("another result was returned for this lease before; the first one counts")]
    OtherResult,
    #[error("the result has arrived but is not stored yet; send it again")]
    NotStored,
    #[error("the run is over: there are no more episodes")]
    RunOver,
    #[error("no such route; workers use /v1/episodes/take and /v1/episodes/LEASE/...")]
    NoRoute,
}

impl Problem {
    fn parts(&self) -> (StatusCode, ErrorCode) {
        match self {
            Self::Invalid(_) => (StatusCode::BAD_REQUEST, ErrorCode::InvalidWorkerRequest),
            Self::Over(_) => (StatusCode::GONE, ErrorCode::LeaseOver),
            Self::Unknown => (StatusCode::GONE, ErrorCode::LeaseUnknown),
            Self::NotRestored => (StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Overloaded),
            Self::OtherResult => (StatusCode::CONFLICT, ErrorCode::OtherResult),
            Self::NotStored => (StatusCode::SERVICE_UNAVAILABLE, ErrorCode::NotStored),
            Self::RunOver => (StatusCode::GONE, ErrorCode::RunOver),
            Self::NoRoute => (StatusCode::NOT_FOUND, ErrorCode::NoRoute),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, code) = self.parts();
        (status, Json(json!({"error": {"code": code.as_str(), "message": self.to_string()}})))
            .into_response()
    }
}

/// Reads a body. Text in it that is not Unicode becomes U+FFFD: the message of a worker's error may quote
/// what its environment printed.
pub(super) fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let body = mended_json(body);
    let mut reader = serde_json::Deserializer::from_slice(&body);
    serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| error.to_string())
        .and_then(|Object(value)| reader.end().map(|()| value).map_err(|error| error.to_string()))
        .map_err(|error| Problem::Invalid(format!("the body is invalid: {error}")))
}

fn check_name(what: &str, name: &str) -> Result<(), Problem> {
    let is_good = !name.is_empty() && name.len() <= NAME_BYTES && !name.contains(is_unprintable);
    let problem = || format!("{what} must have 1 to {NAME_BYTES} printable bytes");
    is_good.then_some(()).ok_or_else(|| Problem::Invalid(problem()))
}

impl Take {
    pub(super) fn check(&self) -> Result<(), Problem> {
        check_name("worker", &self.worker)?;
        check_name("take_id", &self.take_id)
    }
}

impl Finish {
    /// Checks a result.
    pub(super) fn check(self) -> Result<Returned, Problem> {
        let Self { reward, metrics, failure } = self;
        let invalid = |text: String| Err(Problem::Invalid(text));
        if metrics.len() > METRICS {
            return invalid(format!("metrics must have at most {METRICS} entries"));
        }
        for (name, value) in &metrics {
            check_name("the name of a metric", name)?;
            if !value.is_finite() {
                return invalid(format!("the metric {name} must be a finite number"));
            }
        }
        let end = match (reward, failure) {
            (Some(reward), None) if (0.0..=1.0).contains(&reward) => {
                // -0 would be shown as another number than 0.
                OfferEnd::Returned { reward: reward + 0.0, metrics }
            }
            (Some(reward), None) => {
                return invalid(format!("reward = {reward}: must be from 0 to 1"));
            }
            (None, Some(Object(Failure { kind, message }))) => {
                let kind = match kind {
                    Kind::Environment => FailureKind::Environment,
                    Kind::Agent => FailureKind::Agent,
                    Kind::Timeout => FailureKind::TimeOut,
                };
                let message = message.chars().take(MESSAGE_CHARS).collect();
                OfferEnd::Failed { kind, message }
            }
            (Some(_), Some(_)) | (None, None) => {
                return invalid("a result has either a reward or a failure".to_owned());
            }
        };
        let digest = *blake3::hash(format!("{end:?}").as_bytes()).as_bytes();
        Ok(Returned { end, digest })
    }
}
