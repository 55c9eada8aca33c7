//! Checking one `/generate` reply. Everything here is hostile input until it has passed.

use crate::http::{error_message, excerpt};
use crate::{EngineErrorKind, Finish, Generation, VersionSpan};
use orchestrate_routing::{PayloadForm, WireForm, decode, split_body};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::borrow::Cow;
use std::sync::Arc;

/// How far above 0 a log-probability may be by rounding.
const LOGPROB_TOLERANCE: f32 = 1e-6;
/// From here on down, engines mean "no log-probability".
const LOGPROB_FLOOR: f32 = -9999.0;

/// What a reply is checked against.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    pub(crate) request_id: String,
    pub(crate) prompt_tokens: usize,
    pub(crate) max_new_tokens: usize,
    pub(crate) routed_experts_start: Option<usize>,
    pub(crate) shape: Arc<ModelShape>,
}

impl Expected {
    /// Most bytes a right reply can have; allocations stay within.
    pub(crate) fn body_limit(&self) -> usize {
        let shape = &self.shape;
        let row_text = (shape.hidden_layers * shape.top_k * 4).div_ceil(3) * 4 + 4;
        let tokens = self.prompt_tokens.saturating_add(self.max_new_tokens);
        // Ids, log-prob triples and text of one token stay far below 512 bytes.
        tokens.saturating_mul(row_text + 512).saturating_add(4 << 20)
    }
}

#[derive(Deserialize)]
struct Reply<'a> {
    output_ids: Vec<TokenId>,
    #[serde(borrow)]
    meta_info: MetaInfo<'a>,
}

#[derive(Deserialize)]
struct MetaInfo<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    finish_reason: FinishReason,
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    cached_tokens: Option<usize>,
    num_retractions: Option<u32>,
    weight_version: Option<String>,
    weight_versions: Option<Vec<Span>>,
    output_token_logprobs: Option<Vec<(Option<f32>, TokenId, IgnoredAny)>>,
    // Empty by now: the payload was cut out, so that no parser ever walks over a mask.
    #[serde(borrow)]
    routed_experts: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    matched: Option<Matched>,
    message: Option<String>,
    status_code: Option<u16>,
}

/// What ended the text; only its one bad form matters.
struct Matched {
    not_a_number: bool,
}

impl<'de> Deserialize<'de> for Matched {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let not_a_number = value.as_str().is_some_and(|text| text.starts_with("NaN happened"));
        Ok(Self { not_a_number })
    }
}

#[derive(Deserialize)]
struct Span {
    version: String,
    start: usize,
    end: usize,
}

fn invalid(words: impl Into<String>) -> EngineErrorKind {
    EngineErrorKind::InvalidReply(words.into())
}

/// Checks a reply in full.
pub(crate) fn check_reply(body: &[u8], expected: &Expected) -> Result<Generation, EngineErrorKind> {
    let split = split_body(body).map_err(|error| invalid(error.to_string()))?;
    let reply: Reply<'_> = serde_json::from_slice(&split.json).map_err(|error| {
        let words = error_message(&split.json).map_or_else(
            || format!("{error}; it begins `{}`", excerpt(body)),
            |message| format!("success with an error inside: {message}"),
        );
        invalid(words)
    })?;
    let (output_ids, meta) = (reply.output_ids, reply.meta_info);
    if meta.id != expected.request_id.as_str() {
        return Err(invalid(format!(
            "it answers request `{}`, asked was `{}`",
            meta.id, expected.request_id
        )));
    }
    let finish = finish(&meta.finish_reason)?;
    // A request aborted in the waiting queue has no counters; it has no tokens either.
    let never_ran = finish == Finish::Abort && output_ids.is_empty();
    check_counts(&meta, output_ids.len(), expected, never_ran)?;
    let vocab = expected.shape.vocab;
    if let Some(id) = output_ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(invalid(format!("token id {id} is not in the vocabulary of {vocab}")));
    }
    let logprobs = logprobs(meta.output_token_logprobs.as_deref(), &output_ids)?;
    let versions = versions(&meta, output_ids.len())?;
    let tokens = expected.prompt_tokens + output_ids.len();
    let payload = match (meta.routed_experts.as_deref(), split.payloads.as_slice()) {
        (None, []) => None,
        (Some(""), [payload]) => body.get(payload.clone()),
        // Under an escaped key, or besides the one in `meta_info`: whose rows are these?
        (None | Some(_), _) => {
            return Err(invalid("routed_experts is not one plain string in meta_info"));
        }
    };
    let routed = match (expected.routed_experts_start, payload) {
        (None, _) => None,
        (Some(_), None) if never_ran => None,
        (Some(_), None) => {
            return Err(invalid("routed experts were asked for and are missing"));
        }
        (Some(start), Some(text)) => {
            let form = WireForm::SglangI32;
            let rows = decode(form, text, &expected.shape, start, tokens)
                .map_err(|error| invalid(error.to_string()))?;
            match rows.form() {
                PayloadForm::Exact => {}
                PayloadForm::SurplusRow | PayloadForm::WholeSequence => tracing::debug!(
                    request_id = expected.request_id,
                    form = ?rows.form(),
                    "routing payload deviates from what was asked for"
                ),
            }
            Some(rows)
        }
    };
    Ok(Generation {
        routing_wire_bytes: payload.map_or(0, <[u8]>::len),
        routed_experts: routed,
        // Who sends the request knows it.
        worker: String::new(),
        cached_tokens: meta.cached_tokens.unwrap_or(0),
        num_retractions: meta.num_retractions.unwrap_or(0),
        output_ids,
        logprobs,
        finish,
        versions,
    })
}

fn finish(reason: &FinishReason) -> Result<Finish, EngineErrorKind> {
    match reason.kind.as_str() {
        "stop" if reason.matched.as_ref().is_some_and(|matched| matched.not_a_number) => {
            Err(invalid("its logits were not numbers (\"NaN happened\")"))
        }
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "abort" => match reason.status_code {
            None => Ok(Finish::Abort),
            Some(status) => {
                let message = reason.message.clone().unwrap_or_default();
                Err(EngineErrorKind::Refused { status, message })
            }
        },
        other => Err(invalid(format!("finish reason `{other}` is unknown"))),
    }
}

fn check_counts(
    meta: &MetaInfo<'_>,
    outputs: usize,
    expected: &Expected,
    never_ran: bool,
) -> Result<(), EngineErrorKind> {
    let prompt = expected.prompt_tokens;
    match meta.prompt_tokens {
        Some(found) if found != prompt => {
            return Err(invalid(format!("it had a prompt of {found} tokens, sent were {prompt}")));
        }
        Some(_) => {}
        None if never_ran => {}
        None => return Err(invalid("prompt_tokens is missing")),
    }
    if meta.completion_tokens.is_some_and(|count| count != outputs) {
        return Err(invalid("completion_tokens is not the number of output_ids"));
    }
    if outputs > expected.max_new_tokens {
        let limit = expected.max_new_tokens;
        return Err(invalid(format!("it has {outputs} output tokens, allowed were {limit}")));
    }
    if meta.cached_tokens.is_some_and(|cached| cached > prompt) {
        return Err(invalid("cached_tokens is more than the prompt has"));
    }
    Ok(())
}

fn logprobs(
    triples: Option<&[(Option<f32>, TokenId, IgnoredAny)]>,
    output_ids: &[TokenId],
) -> Result<Vec<f32>, EngineErrorKind> {
    let triples = triples.unwrap_or_default();
    if triples.len() != output_ids.len() {
        let (found, wanted) = (triples.len(), output_ids.len());
        return Err(invalid(format!("{found} log-probabilities for {wanted} output tokens")));
    }
    let mut logprobs = Vec::with_capacity(triples.len());
    for (index, ((logprob, id, _), output)) in triples.iter().zip(output_ids).enumerate() {
        if id != output {
            return Err(invalid(format!(
                "log-probability {index} belongs to token {id}, the output token is {output}"
            )));
        }
        match logprob {
            Some(value) if *value > LOGPROB_FLOOR && *value <= LOGPROB_TOLERANCE => {
                logprobs.push(value.min(0.0));
            }
            Some(value) => {
                return Err(invalid(format!("log-probability {index} is {value}")));
            }
            None => return Err(invalid(format!("log-probability {index} is null"))),
        }
    }
    Ok(logprobs)
}

/// The policy version an engine's word stands for; it says `default` for the weights it began with.
pub(crate) fn parse_version(word: &str) -> Option<PolicyVersion> {
    if word == "default" {
        return Some(PolicyVersion(0));
    }
    word.parse().ok().map(PolicyVersion)
}

fn versions(meta: &MetaInfo<'_>, outputs: usize) -> Result<Vec<VersionSpan>, EngineErrorKind> {
    let number = |word: &str| {
        parse_version(word).ok_or_else(|| {
            invalid(format!("weight version `{word}` is not a number: weights must be synced"))
        })
    };
    if outputs == 0 {
        return Ok(Vec::new());
    }
    let Some(spans) = &meta.weight_versions else {
        let word = meta.weight_version.as_deref();
        let version = number(word.ok_or_else(|| invalid("weight_version is missing"))?)?;
        return Ok(vec![VersionSpan { version, start: 0, end: outputs }]);
    };
    let mut covered: Vec<VersionSpan> = Vec::new();
    let mut next = 0;
    for span in spans.iter().filter(|span| span.start != span.end) {
        if span.start != next || span.end < span.start {
            return Err(invalid("weight_versions has a gap or an overlap"));
        }
        next = span.end;
        covered.push(VersionSpan {
            version: number(&span.version)?,
            start: span.start,
            end: span.end,
        });
    }
    if next != outputs {
        return Err(invalid(format!("weight_versions covers {next} of {outputs} output tokens")));
    }
    Ok(covered)
}

#[cfg(test)]
mod tests;
