//! One reply of `/inference/v1/generate`.

use crate::error::EngineErrorKind;
use crate::generation::{Finish, Generation, SampledTokens};
use crate::reply::{
    CheckedReply, ExpectedReply, PerToken, ReportedVersion, SplitBody, TokenCounts, check_id,
    check_logprobs, check_tokens, check_versions, invalid_field, routed_rows, single_version,
    truncated,
};
use orchestrate_routing::WireForm;
use orchestrate_types::TokenId;
use serde::Deserialize;
use std::borrow::Cow;

const OUTPUTS: &str = "choices[0].token_ids";
const LOGPROBS: &str = "choices[0].logprobs.content";
const FINISH: &str = "choices[0].finish_reason";
const VERSIONS: &str = "choices[0].weight_versions";
const ROUTED: &str = "choices[0].routed_experts";

#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    request_id: Cow<'a, str>,
    #[serde(borrow)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    output_mode: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    index: usize,
    finish_reason: Option<String>,
    token_ids: Option<PerToken<TokenId>>,
    logprobs: Option<Logprobs>,
    weight_versions: Option<Vec<ReportedVersion>>,
    // Empty, because the payload was cut out. Borrowed, so that its position can be compared.
    routed_experts: Option<&'a str>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Option<PerToken<Logprob>>,
}

#[derive(Deserialize)]
struct Logprob {
    token_id: TokenId,
    logprob: Option<f32>,
}

/// The id by which the server knows a request, in replies and for aborts.
pub(super) fn server_id(request_id: &str) -> String {
    format!("generate-tokens-{request_id}")
}

/// Parses and checks a reply in full.
pub(super) fn read(body: &[u8], expected: &ExpectedReply) -> Result<CheckedReply, EngineErrorKind> {
    let split = SplitBody::new(body)?;
    let reply: Reply<'_> = split.parse()?;
    check_id("request_id", &reply.request_id, &server_id(&expected.request_id))?;
    if let Some(mode) = reply.output_mode.filter(|mode| mode != "tokens") {
        let problem = format!("`{}`, but must be `tokens`", truncated(&mode));
        return Err(invalid_field("output_mode", problem));
    }
    let count = reply.choices.len();
    let Ok([choice]) = <[Choice<'_>; 1]>::try_from(reply.choices) else {
        return Err(invalid_field("choices", format!("{count} choices, but 1 was requested")));
    };
    if choice.index != 0 {
        return Err(invalid_field("choices[0].index", "must be 0"));
    }
    let finish = finish(choice.finish_reason.as_deref())?;
    let Some(PerToken(output_ids)) = choice.token_ids else {
        return Err(invalid_field(OUTPUTS, "missing"));
    };
    let outputs = output_ids.len();
    let never_ran = finish == Finish::Abort && outputs == 0;
    let usage = reply.usage.as_ref();
    let cached = usage
        .and_then(|usage| usage.prompt_tokens_details.as_ref())
        .and_then(|details| details.cached_tokens);
    let counts = TokenCounts {
        prompt: ("usage.prompt_tokens", usage.and_then(|usage| usage.prompt_tokens)),
        outputs: ("usage.completion_tokens", usage.and_then(|usage| usage.completion_tokens)),
        cached: ("usage.prompt_tokens_details.cached_tokens", cached),
    };
    counts.check(outputs, expected, never_ran)?;
    check_tokens(OUTPUTS, &output_ids, expected)?;
    let content = choice.logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref());
    let given = content.map_or(&[][..], |PerToken(given)| given);
    let given = given.iter().map(|entry| (entry.token_id, entry.logprob));
    let logprobs = check_logprobs(LOGPROBS, given, &output_ids)?;
    let versions = match &choice.weight_versions {
        Some(reported) => check_versions(VERSIONS, reported, outputs)?,
        None => single_version(expected.serving, outputs),
    };
    let payload = split.payload(ROUTED, choice.routed_experts)?;
    let form = WireForm::VllmNpy;
    let rows = routed_rows(form, ROUTED, payload, expected, outputs, never_ran)?;
    let sampled = SampledTokens { output_ids, logprobs, versions };
    // Retractions stay 0: a preempted request keeps the rows of the tokens sampled so far.
    let mut generation = Generation::new(sampled, finish, expected.max_new_tokens)?;
    generation.cached_tokens = cached.unwrap_or(0);
    generation.routed_experts = rows;
    // The server also sends rows that were not requested.
    generation.routing_wire_bytes = payload.map_or(0, <[u8]>::len);
    Ok(CheckedReply {
        versions_by_token: choice.weight_versions.is_some(),
        cached_tokens: cached.is_some(),
        dp_rank: None,
        generation,
    })
}

fn finish(reason: Option<&str>) -> Result<Finish, EngineErrorKind> {
    match reason {
        Some("stop") => Ok(Finish::Stop),
        Some("length") => Ok(Finish::Length),
        Some("abort") => Ok(Finish::Abort),
        Some(other) => Err(invalid_field(FINISH, format!("`{}` is unknown", truncated(other)))),
        None => Err(invalid_field(FINISH, "missing")),
    }
}

#[cfg(test)]
mod tests;
