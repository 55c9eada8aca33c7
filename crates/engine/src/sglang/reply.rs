//! One reply of `/generate`.

use crate::error::EngineErrorKind;
use crate::generation::{Finish, Generation, SampledTokens, VersionSpan};
use crate::reply::{
    CheckedReply, ExpectedReply, PerToken, ReportedVersion, SplitBody, TokenCounts, check_id,
    check_logprobs, check_tokens, check_versions, invalid_field, routed_rows, single_version,
    truncated, version,
};
use orchestrate_routing::WireForm;
use orchestrate_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::borrow::Cow;

const OUTPUTS: &str = "output_ids";
const LOGPROBS: &str = "meta_info.output_token_logprobs";
const FINISH: &str = "meta_info.finish_reason";
const VERSION: &str = "meta_info.weight_version";
const VERSIONS: &str = "meta_info.weight_versions";
const ROUTED: &str = "meta_info.routed_experts";

#[derive(Deserialize)]
struct Reply<'a> {
    output_ids: PerToken<TokenId>,
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
    weight_versions: Option<Vec<ReportedVersion>>,
    output_token_logprobs: Option<PerToken<(Option<f32>, TokenId, IgnoredAny)>>,
    dp_rank: Option<u32>,
    // Empty, because the payload was cut out. Borrowed, so that its position can be compared.
    routed_experts: Option<&'a str>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    matched: Option<Matched>,
    message: Option<String>,
    status_code: Option<u16>,
}

/// The stop token or text. Only one value matters: the report of logits that were NaN.
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

/// Parses and checks a reply in full.
pub(super) fn read(body: &[u8], expected: &ExpectedReply) -> Result<CheckedReply, EngineErrorKind> {
    let split = SplitBody::new(body)?;
    let Reply { output_ids: PerToken(output_ids), meta_info: meta } = split.parse()?;
    check_id("meta_info.id", &meta.id, &expected.request_id)?;
    let finish = finish(&meta.finish_reason)?;
    // A request aborted in the waiting queue has no counters and no tokens.
    let never_ran = finish == Finish::Abort && output_ids.is_empty();
    let outputs = output_ids.len();
    let counts = TokenCounts {
        prompt: ("meta_info.prompt_tokens", meta.prompt_tokens),
        outputs: ("meta_info.completion_tokens", meta.completion_tokens),
        cached: ("meta_info.cached_tokens", meta.cached_tokens),
    };
    counts.check(outputs, expected, never_ran)?;
    check_tokens(OUTPUTS, &output_ids, expected)?;
    let given = meta.output_token_logprobs.as_ref().map_or(&[][..], |PerToken(given)| given);
    let given = given.iter().map(|(logprob, id, _)| (*id, *logprob));
    let logprobs = check_logprobs(LOGPROBS, given, &output_ids)?;
    let versions = versions(&meta, outputs)?;
    let payload = split.payload(ROUTED, meta.routed_experts)?;
    let form = WireForm::SglangI32;
    let rows = routed_rows(form, ROUTED, payload, expected, outputs, never_ran)?;
    let sampled = SampledTokens { output_ids, logprobs, versions };
    let mut generation = Generation::new(sampled, finish, expected.max_new_tokens)?;
    generation.cached_tokens = meta.cached_tokens.unwrap_or(0);
    generation.num_retractions = meta.num_retractions.unwrap_or(0);
    generation.routed_experts = rows;
    generation.routing_wire_bytes = payload.map_or(0, <[u8]>::len);
    Ok(CheckedReply {
        versions_by_token: meta.weight_versions.is_some(),
        cached_tokens: meta.cached_tokens.is_some(),
        dp_rank: meta.dp_rank,
        generation,
    })
}

fn finish(reason: &FinishReason) -> Result<Finish, EngineErrorKind> {
    match reason.kind.as_str() {
        "stop" if reason.matched.as_ref().is_some_and(|matched| matched.not_a_number) => {
            Err(invalid_field(FINISH, "the logits were not numbers (\"NaN happened\")"))
        }
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "abort" => match reason.status_code {
            None => Ok(Finish::Abort),
            Some(status) => {
                let message = reason.message.clone().unwrap_or_default();
                Err(EngineErrorKind::refused(status, message))
            }
        },
        other => Err(invalid_field(FINISH, format!("`{}` is unknown", truncated(other)))),
    }
}

fn versions(meta: &MetaInfo<'_>, outputs: usize) -> Result<Vec<VersionSpan>, EngineErrorKind> {
    if outputs == 0 {
        return Ok(Vec::new());
    }
    if let Some(spans) = &meta.weight_versions {
        return check_versions(VERSIONS, spans, outputs);
    }
    // Before 0.5.20 there is one name for the whole reply.
    let name = meta.weight_version.as_deref();
    let name = name.ok_or_else(|| invalid_field(VERSION, "missing"))?;
    Ok(single_version(version(VERSION, name)?, outputs))
}

#[cfg(test)]
mod tests;
