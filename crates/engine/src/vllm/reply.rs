//! One reply of `/inference/v1/generate`.

use super::ID_PREFIX;
use crate::reply::{
    Counts, Cut, Expected, Fault, PerToken, Reading, Span, check_id, check_logprobs, check_spans,
    check_tokens, one_span, routed_rows, short, wrong,
};
use crate::{EngineErrorKind, Finish, Generation};
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
    weight_versions: Option<Vec<Span>>,
    // Empty: its text was cut out before. Borrowed, so that its place can be compared.
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

/// Checks a reply in full.
pub(super) fn read(body: &[u8], expected: &Expected) -> Result<Reading, Fault> {
    let cut = Cut::new(body)?;
    let reply: Reply<'_> = cut.parse()?;
    check_id("request_id", &reply.request_id, &format!("{ID_PREFIX}{}", expected.request_id))?;
    if let Some(mode) = reply.output_mode.filter(|mode| mode != "tokens") {
        let words = format!("`{}`, but token ids are needed", short(&mode));
        return Err(wrong("output_mode", words).into());
    }
    let count = reply.choices.len();
    let Ok([choice]) = <[Choice<'_>; 1]>::try_from(reply.choices) else {
        return Err(wrong("choices", format!("it has {count}, asked was for one")).into());
    };
    if choice.index != 0 {
        return Err(wrong("choices[0].index", "it is not 0").into());
    }
    let finish = finish(choice.finish_reason.as_deref())?;
    let Some(PerToken(output_ids)) = choice.token_ids else {
        return Err(wrong(OUTPUTS, "it is missing").into());
    };
    let outputs = output_ids.len();
    let never_ran = finish == Finish::Abort && outputs == 0;
    let usage = reply.usage.as_ref();
    let cached = usage
        .and_then(|usage| usage.prompt_tokens_details.as_ref())
        .and_then(|details| details.cached_tokens);
    let counts = Counts {
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
        Some(spans) => check_spans(VERSIONS, spans, outputs)?,
        None => one_span(expected.serving, outputs),
    };
    let payload = cut.payload(ROUTED, choice.routed_experts)?;
    let form = WireForm::VllmNpy;
    let rows = routed_rows(form, ROUTED, payload, expected, outputs, never_ran)?;
    Ok(Reading {
        versions_by_token: choice.weight_versions.is_some(),
        cached_tokens: cached.is_some(),
        dp_rank: None,
        generation: Generation {
            // Sent also where none were asked for.
            routing_wire_bytes: payload.map_or(0, <[u8]>::len),
            routed_experts: rows,
            // Who sends the request knows it.
            worker: String::new(),
            turn: None,
            cached_tokens: cached.unwrap_or(0),
            // A preempted request keeps the rows of tokens already sampled.
            num_retractions: 0,
            output_ids,
            logprobs,
            finish,
            versions,
        },
    })
}

fn finish(reason: Option<&str>) -> Result<Finish, EngineErrorKind> {
    match reason {
        Some("stop") => Ok(Finish::Stop),
        Some("length") => Ok(Finish::Length),
        Some("abort") => Ok(Finish::Abort),
        Some(other) => Err(wrong(FINISH, format!("`{}` is unknown", short(other)))),
        None => Err(wrong(FINISH, "it is missing")),
    }
}

#[cfg(test)]
mod tests;
