//! Replies of `/generate` in SGLang's format.

use super::body::ReplyOptions;
use super::request::{Finish, Finished, Progress, Span};
use base64_simd::STANDARD;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use tokenizers::Tokenizer;

/// Data of a sequence that the HTTP handler keeps: id, prompt, options and arrival time.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) rid: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) show: ReplyOptions,
    /// Arrival time, in seconds since the Unix epoch.
    pub(crate) received: f64,
    /// First prompt position whose log-prob is reported.
    pub(crate) logprob_start: usize,
}

#[derive(Serialize)]
struct Reply<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    output_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    meta_info: Meta<'a>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    finish_reason: Option<&'a Finish>,
    prompt_tokens: usize,
    weight_version: &'a str,
    num_retractions: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_time: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<Vec<(Option<f32>, u32, ())>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<Vec<(f32, u32, ())>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs_length: Option<usize>,
    reasoning_tokens: u32,
    completion_tokens: usize,
    cached_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<&'a [Span]>,
    cached_tokens_details: Option<CacheTiers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<String>,
    dp_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    request_received_ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_token_latency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_finished_ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_throughput: Option<f64>,
    response_sent_to_client_ts: f64,
}

/// Cached tokens by storage tier; this engine has only one.
#[derive(Serialize)]
struct CacheTiers {
    device: usize,
    host: usize,
}

impl CacheTiers {
    fn of(cached: usize) -> Option<Self> {
        (cached > 0).then_some(Self { device: cached, host: 0 })
    }
}

impl Serialize for Finish {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        match self {
            Self::Token(token) => {
                map.serialize_entry("type", "stop")?;
                map.serialize_entry("matched", token)?;
            }
            Self::Text(text) => {
                map.serialize_entry("type", "stop")?;
                map.serialize_entry("matched", text)?;
            }
            Self::NotANumber => {
                map.serialize_entry("type", "stop")?;
                map.serialize_entry("matched", "NaN happened")?;
            }
            Self::Length(length) => {
                map.serialize_entry("type", "length")?;
                map.serialize_entry("length", length)?;
            }
            Self::Aborted(message) => {
                map.serialize_entry("type", "abort")?;
                map.serialize_entry("message", message)?;
                map.serialize_entry("status_code", &())?;
                map.serialize_entry("err_type", &())?;
            }
        }
        map.end()
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(3))?;
        map.serialize_entry("version", &*self.version)?;
        map.serialize_entry("start", &self.start)?;
        map.serialize_entry("end", &self.end)?;
        map.end()
    }
}

/// Current time in seconds since the Unix epoch.
pub(crate) fn now_seconds() -> f64 {
    orchestrate_types::unix_micros() as f64 / 1e6
}

/// Renders the final reply of one sequence.
pub(crate) fn finished(
    context: &Context,
    finished: &Finished,
    tokenizer: Option<&Tokenizer>,
) -> serde_json::Result<String> {
    let now = now_seconds();
    let latency = now - context.received;
    let outputs = finished.output_ids.len();
    let decoding = latency - finished.first_token_seconds;
    let positions = context.prompt.iter().skip(context.logprob_start);
    let inputs = finished.input_logprobs.iter().zip(positions).map(|(&lp, &id)| (lp, id, ()));
    let logprobs = context.show.logprobs;
    serde_json::to_string(&Reply {
        text: tokenizer.map(|t| text(t, context, finished)),
        output_ids: &finished.output_ids,
        prompt_token_ids: context.show.prompt_ids.then_some(&context.prompt),
        meta_info: Meta {
            id: &context.rid,
            finish_reason: Some(&finished.finish),
            prompt_tokens: context.prompt.len(),
            weight_version: &finished.weight_version,
            num_retractions: finished.retractions,
            queue_time: Some(finished.queue_seconds),
            input_token_logprobs: logprobs.then(|| inputs.collect()),
            output_token_logprobs: logprobs
                .then(|| triples(&finished.logprobs, &finished.output_ids)),
            output_token_logprobs_length: logprobs.then_some(outputs),
            reasoning_tokens: 0,
            completion_tokens: outputs,
            cached_tokens: finished.cached_tokens,
            weight_versions: Some(&finished.spans),
            cached_tokens_details: CacheTiers::of(finished.cached_tokens),
            routed_experts: finished.rows.as_deref().map(encode_rows),
            dp_rank: None,
            e2e_latency: Some(latency),
            request_received_ts: context.received,
            first_token_latency: Some(finished.first_token_seconds),
            request_finished_ts: Some(now),
            decode_throughput: (outputs > 1 && decoding > 0.0)
                .then(|| (outputs - 1) as f64 / decoding),
            response_sent_to_client_ts: now,
        },
    })
}

/// Renders a streamed reply: all output so far, without the fields known only at the end.
pub(crate) fn partial(
    context: &Context,
    (output_ids, logprobs): (&[u32], &[f32]),
    newest: Progress,
    weight_version: &str,
    tokenizer: Option<&Tokenizer>,
) -> serde_json::Result<String> {
    let show = context.show;
    serde_json::to_string(&Reply {
        text: tokenizer.map(|t| decode(t, output_ids, show.skip_special_tokens)),
        output_ids,
        prompt_token_ids: show.prompt_ids.then_some(&context.prompt),
        meta_info: Meta {
            id: &context.rid,
            finish_reason: None,
            prompt_tokens: context.prompt.len(),
            weight_version,
            num_retractions: 0,
            queue_time: None,
            input_token_logprobs: show.logprobs.then(Vec::new),
            output_token_logprobs: show.logprobs.then(|| triples(logprobs, output_ids)),
            output_token_logprobs_length: show.logprobs.then_some(output_ids.len()),
            reasoning_tokens: 0,
            completion_tokens: output_ids.len(),
            cached_tokens: newest.cached_tokens,
            weight_versions: None,
            cached_tokens_details: CacheTiers::of(newest.cached_tokens),
            routed_experts: None,
            dp_rank: None,
            e2e_latency: None,
            request_received_ts: context.received,
            first_token_latency: None,
            request_finished_ts: None,
            decode_throughput: None,
            response_sent_to_client_ts: now_seconds(),
        },
    })
}

fn triples(logprobs: &[f32], ids: &[u32]) -> Vec<(f32, u32, ())> {
    logprobs.iter().zip(ids).map(|(&lp, &id)| (lp, id, ())).collect()
}

/// Base64 of the expert ids as little-endian 32-bit integers, row-major; empty without rows.
fn encode_rows(ids: &[u16]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| u32::from(id).to_le_bytes()).collect();
    STANDARD.encode_to_string(&bytes)
}

fn decode(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    // Ids outside the tokenizer's vocabulary have no text.
    tokenizer.decode(ids, skip_special).unwrap_or_default()
}

/// The output text. The matched stop token or string is removed unless `no_stop_trim` is set.
fn text(tokenizer: &Tokenizer, context: &Context, finished: &Finished) -> String {
    let (ids, show) = (finished.output_ids.as_slice(), context.show);
    match &finished.finish {
        Finish::Token(_) if !show.no_stop_trim => {
            let kept = ids.split_last().map_or(ids, |(_, rest)| rest);
            decode(tokenizer, kept, show.skip_special_tokens)
        }
        Finish::Text(stop) if !show.no_stop_trim => {
            let mut text = decode(tokenizer, ids, show.skip_special_tokens);
            if let Some(at) = text.find(stop.as_str()) {
                text.truncate(at);
            }
            text
        }
        Finish::Token(_)
        | Finish::Text(_)
        | Finish::NotANumber
        | Finish::Length(_)
        | Finish::Aborted(_) => decode(tokenizer, ids, show.skip_special_tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_encoded_as_base64_of_little_endian_int32() {
        assert_eq!(encode_rows(&[1, 2, 3, 4]), "AQAAAAIAAAADAAAABAAAAA==");
        assert_eq!(encode_rows(&[]), "");
    }

    #[test]
    fn finish_reasons_have_the_documented_format() {
        let text = |f: Finish| serde_json::to_string(&f).unwrap();
        assert_eq!(text(Finish::Token(7)), r#"{"type":"stop","matched":7}"#);
        assert_eq!(text(Finish::Length(3)), r#"{"type":"length","length":3}"#);
        assert_eq!(
            text(Finish::Aborted("Aborted")),
            r#"{"type":"abort","message":"Aborted","status_code":null,"err_type":null}"#
        );
    }
}
