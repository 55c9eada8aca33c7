//! Sampling parameters of a `/generate` body.

use super::Bounds;
use crate::infer::fields::{
    Capped, FromOne, Given, MAX_STOP_BYTES, MAX_STOP_IDS, MAX_STOPS, OneOrMany,
};
use crate::infer::request::InvalidBody;
use crate::infer::sampling::Sampling;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer};
use std::sync::Arc;

/// Error for SGLang sampling parameters that this engine does not implement. They are rejected,
/// because ignoring one would sample from another distribution than requested.
const UNSUPPORTED_SAMPLING: &str = "is not supported by this engine; leave it out";

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RawSampling {
    #[serde(deserialize_with = "budget")]
    max_new_tokens: Budget,
    min_new_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    pub(super) n: Option<i64>,
    sampling_seed: Option<i128>,
    stop: Option<OneOrMany<String, MAX_STOPS>>,
    stop_token_ids: Option<Capped<i64, MAX_STOP_IDS>>,
    ignore_eos: Option<bool>,
    pub(super) skip_special_tokens: Option<bool>,
    pub(super) no_stop_trim: Option<bool>,
    // Accepted, but without effect on sampling.
    spaces_between_special_tokens: Option<bool>,
    stream_interval: Option<i64>,
    custom_params: Given,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    stop_regex: Given,
    json_schema: Given,
    regex: Given,
    ebnf: Given,
    structural_tag: Given,
    logit_bias: Given,
    beam_width: Given,
    watermark: Given,
    choice: Given,
}

/// `max_new_tokens`: 128 if absent, up to the end of the context if null.
#[derive(Debug, Clone, Copy, Default)]
enum Budget {
    #[default]
    Absent,
    Unlimited,
    Tokens(i64),
}

fn budget<'de, D: Deserializer<'de>>(from: D) -> Result<Budget, D::Error> {
    Ok(Option::<i64>::deserialize(from)?.map_or(Budget::Unlimited, Budget::Tokens))
}

impl<'de> FromOne<'de> for RawSampling {
    const KIND: &'static str = "an object of sampling parameters";

    fn from_object<A: MapAccess<'de>>(object: A) -> Result<Self, A::Error> {
        Self::deserialize(MapAccessDeserializer::new(object))
    }
}

impl RawSampling {
    pub(super) fn check(&self, prompt: usize, bounds: Bounds<'_>) -> Result<Sampling, InvalidBody> {
        self.reject_unsupported()?;
        let temperature = self.temperature.unwrap_or(1.0);
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(format!(
                "temperature must be a non-negative finite number, got {temperature}."
            )
            .into());
        }
        let top_p = self.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(format!("top_p must be in (0, 1], got {top_p}.").into());
        }
        let min_p = self.min_p.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&min_p) {
            return Err(format!("min_p must be in [0, 1], got {min_p}.").into());
        }
        let top_k = self.top_k.unwrap_or(-1);
        if top_k < -1 || top_k == 0 {
            return Err(format!("top_k must be -1 (disable) or at least 1, got {top_k}.").into());
        }
        let max_new_tokens = budget_tokens(self.max_new_tokens, prompt, bounds.context)?;
        let min_new_tokens = self.min_new_tokens.unwrap_or(0);
        let min_new_tokens = usize::try_from(min_new_tokens).ok().filter(|&m| m <= max_new_tokens);
        let min_new_tokens = min_new_tokens.ok_or_else(|| {
            format!("min_new_tokens must be in [0, max_new_tokens({max_new_tokens})].")
        })?;
        let stop = self.stop.iter().flat_map(|stop| &stop.values);
        let stop: Arc<[String]> = stop.filter(|text| !text.is_empty()).cloned().collect();
        if stop.iter().any(|text| text.len() > MAX_STOP_BYTES) {
            return Err(format!("a stop string must have at most {MAX_STOP_BYTES} bytes.").into());
        }
        if !stop.is_empty() && bounds.tokenizer.is_none() {
            return Err(
                "stop requires a tokenizer.json in the model folder; use stop_token_ids.".into()
            );
        }
        let seed = self.sampling_seed.map(|seed| {
            let wide = || format!("sampling_seed must fit into 64 bits, got {seed}.");
            i64::try_from(seed).map(i64::cast_unsigned).or(u64::try_from(seed)).map_err(|_| wide())
        });
        let seed = seed.transpose()?;
        let ids = self.stop_token_ids.iter().flat_map(|ids| &ids.0);
        let narrow = |&id: &i64| {
            u32::try_from(id).map_err(|_| format!("stop token id {id} is not a valid token id."))
        };
        #[expect(clippy::cast_possible_truncation, reason = "sampling is done in f32")]
        let f32 = |v: f64| v as f32;
        Ok(Sampling {
            max_new_tokens,
            min_new_tokens,
            temperature: f32(temperature),
            top_k: usize::try_from(top_k).ok(),
            top_p: f32(top_p),
            min_p: f32(min_p),
            seed,
            stream: 0,
            stop_token_ids: ids.map(narrow).collect::<Result<_, _>>()?,
            stop,
            ignore_eos: self.ignore_eos.unwrap_or(false),
        })
    }

    fn reject_unsupported(&self) -> Result<(), InvalidBody> {
        let neutral = |value: Option<f64>, neutral: f64| {
            value.is_none_or(|v| v.to_bits() == neutral.to_bits())
        };
        for (name, present) in [
            ("frequency_penalty", !neutral(self.frequency_penalty, 0.0)),
            ("presence_penalty", !neutral(self.presence_penalty, 0.0)),
            ("repetition_penalty", !neutral(self.repetition_penalty, 1.0)),
            ("stop_regex", self.stop_regex.0),
            ("json_schema", self.json_schema.0),
            ("regex", self.regex.0),
            ("ebnf", self.ebnf.0),
            ("structural_tag", self.structural_tag.0),
            ("logit_bias", self.logit_bias.0),
            ("beam_width", self.beam_width.0),
            ("watermark", self.watermark.0),
            ("choice", self.choice.0),
        ] {
            if present {
                return Err(format!("{name} {UNSUPPORTED_SAMPLING}.").into());
            }
        }
        Ok(())
    }
}

/// Maximum number of output tokens after a prompt of `prompt` tokens. A request that does not fit
/// the context is rejected rather than shortened.
fn budget_tokens(budget: Budget, prompt: usize, context: usize) -> Result<usize, InvalidBody> {
    if prompt >= context {
        return Err(format!(
            "The input ({prompt} tokens) is longer than the model's context length ({context} \
             tokens)."
        )
        .into());
    }
    let wanted = match budget {
        Budget::Absent => 128.min(context - prompt),
        Budget::Unlimited => context - prompt,
        Budget::Tokens(n) => usize::try_from(n)
            .map_err(|_| format!("max_new_tokens must be at least 0, got {n}."))?,
    };
    if prompt.saturating_add(wanted) > context {
        return Err(format!(
            "Requested token count exceeds the model's maximum context length of {context} \
             tokens. You requested a total of {} tokens: {prompt} tokens from the input messages \
             and {wanted} tokens for the completion. Please reduce the number of tokens in the \
             input messages or the completion to fit within the limit.",
            prompt.saturating_add(wanted)
        )
        .into());
    }
    Ok(wanted)
}
