//! Parsing and validation of `/generate` bodies, with SGLang's error messages.

use super::cache::Namespace;
use super::request::InvalidBody;
use super::sampling::Sampling;
use serde::{Deserialize, Deserializer};

/// Error for SGLang sampling parameters that this engine does not implement. They are rejected,
/// because ignoring one would sample from another distribution than requested.
const UNSUPPORTED_SAMPLING: &str = "is not supported by this engine; leave it out";

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// The body of `/generate`. Unknown top-level keys are ignored, as SGLang does.
#[expect(clippy::struct_excessive_bools, reason = "they are fields of the wire format")]
#[derive(Debug, Deserialize)]
pub(crate) struct GenerateBody {
    text: Option<OneOrMany<String>>,
    input_ids: Option<Ids>,
    #[serde(default, deserialize_with = "sampling")]
    sampling_params: Option<OneOrMany<RawSampling>>,
    rid: Option<OneOrMany<String>>,
    #[serde(default)]
    return_logprob: bool,
    logprob_start_len: Option<i64>,
    #[serde(default)]
    top_logprobs_num: i64,
    token_ids_logprob: Option<serde_json::Value>,
    #[serde(default)]
    pub(crate) stream: bool,
    #[serde(default)]
    return_routed_experts: bool,
    #[serde(default, deserialize_with = "not_null")]
    routed_experts_start_len: i64,
    #[serde(default, deserialize_with = "not_null")]
    return_prompt_token_ids: bool,
    extra_key: Option<String>,
    cache_salt: Option<String>,
    priority: Option<i64>,
}

/// One prompt, or a list of prompts.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input_ids must be a list of token ids, or a list of such lists")]
enum Ids {
    One(Vec<i64>),
    Many(Vec<Vec<i64>>),
}

fn not_null<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    T::deserialize(from)
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawSampling {
    #[serde(deserialize_with = "budget")]
    max_new_tokens: Budget,
    min_new_tokens: Option<i64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    n: Option<i64>,
    sampling_seed: Option<i128>,
    stop: Option<OneOrMany<String>>,
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    no_stop_trim: Option<bool>,
    // Accepted, but without effect on sampling.
    spaces_between_special_tokens: Option<bool>,
    stream_interval: Option<i64>,
    custom_params: Option<serde_json::Value>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    stop_regex: Option<serde_json::Value>,
    json_schema: Option<serde_json::Value>,
    regex: Option<serde_json::Value>,
    ebnf: Option<serde_json::Value>,
    structural_tag: Option<serde_json::Value>,
    logit_bias: Option<serde_json::Value>,
    beam_width: Option<serde_json::Value>,
    watermark: Option<serde_json::Value>,
    choice: Option<serde_json::Value>,
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

/// One object or a list of objects, parsed in two steps so that errors name the invalid field.
fn sampling<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<OneOrMany<RawSampling>>, D::Error> {
    let read = |value| serde_json::from_value(value).map_err(serde::de::Error::custom);
    Ok(match serde_json::Value::deserialize(from)? {
        serde_json::Value::Null => None,
        serde_json::Value::Array(many) => {
            Some(OneOrMany::Many(many.into_iter().map(read).collect::<Result<_, _>>()?))
        }
        one => Some(OneOrMany::One(read(one)?)),
    })
}

/// Limits of the engine that bodies are checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds<'a> {
    pub(crate) vocab: usize,
    /// Longest sequence (prompt and output), in tokens.
    pub(crate) context: usize,
    pub(crate) tokenizer: Option<&'a tokenizers::Tokenizer>,
}

/// One validated sequence to generate.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) rid: String,
    pub(crate) input_ids: Vec<u32>,
    pub(crate) sampling: Sampling,
    pub(crate) show: ReplyOptions,
}

/// Optional parts of the reply.
#[expect(clippy::struct_excessive_bools, reason = "independent flags of the wire format")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReplyOptions {
    pub(crate) logprobs: bool,
    pub(crate) prompt_ids: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) no_stop_trim: bool,
}

/// A validated body.
#[derive(Debug)]
pub(crate) struct Checked {
    /// In the order of the reply: by prompt, then by the `n` samples of a prompt.
    pub(crate) prompts: Vec<Prompt>,
    /// Whether the reply is an array.
    pub(crate) array: bool,
    pub(crate) stream: bool,
    pub(crate) logprob_start: Option<i64>,
    pub(crate) routed_start: Option<usize>,
    pub(crate) namespace: Namespace,
    pub(crate) priority: i64,
}

impl GenerateBody {
    /// Validates the body. `new_rid` creates an id for a request without one.
    ///
    /// # Errors
    /// If a value is invalid or not supported.
    pub(crate) fn check(
        self,
        bounds: Bounds<'_>,
        mut new_rid: impl FnMut() -> String,
    ) -> Result<Checked, InvalidBody> {
        if self.top_logprobs_num != 0 || self.token_ids_logprob.is_some_and(|v| !v.is_null()) {
            return Err(
                "top_logprobs_num and token_ids_logprob are not supported by this engine".into()
            );
        }
        let (lists, mut array) = prompts(self.text, self.input_ids, bounds)?;
        let raw = match self.sampling_params {
            None => vec![RawSampling::default(); lists.len()],
            Some(OneOrMany::One(one)) => vec![one; lists.len()],
            Some(OneOrMany::Many(many)) if many.len() == lists.len() => many,
            Some(OneOrMany::Many(_)) => {
                return Err("sampling_params must be one object, or one per prompt.".into());
            }
        };
        let rids = match self.rid {
            None => None,
            Some(OneOrMany::One(rid)) if lists.len() == 1 => Some(vec![rid]),
            Some(OneOrMany::Many(many)) if many.len() == lists.len() => Some(many),
            Some(_) => return Err("rid must be one string per prompt.".into()),
        };
        let start = self.routed_experts_start_len;
        let mut checked = Vec::new();
        for (index, (input_ids, raw)) in lists.into_iter().zip(raw).enumerate() {
            let length = input_ids.len();
            check_routed_start(start, length)?;
            let limit = i64::try_from(length).unwrap_or(i64::MAX);
            if self.logprob_start_len.is_some_and(|s| s > limit || s < -1) {
                return Err(format!(
                    "logprob_start_len must be in -1..={length} for a prompt of {length} tokens."
                )
                .into());
            }
            let n = raw.n.unwrap_or(1);
            if !(1..=1024).contains(&n) {
                return Err(format!("n must be between 1 and 1024, got {n}.").into());
            }
            array |= n > 1;
            let show = ReplyOptions {
                logprobs: self.return_logprob,
                prompt_ids: self.return_prompt_token_ids,
                skip_special_tokens: raw.skip_special_tokens.unwrap_or(true),
                no_stop_trim: raw.no_stop_trim.unwrap_or(false),
            };
            let sampling = raw.check(length, bounds)?;
            for stream in 0..n.unsigned_abs() {
                let given = rids.as_ref().filter(|_| n == 1).and_then(|r| r.get(index)).cloned();
                checked.push(Prompt {
                    rid: given.unwrap_or_else(&mut new_rid),
                    input_ids: input_ids.clone(),
                    sampling: Sampling { stream, ..sampling.clone() },
                    show,
                });
            }
        }
        if self.stream && checked.len() > 1 {
            return Err("streaming is supported for one sequence per request only.".into());
        }
        Ok(Checked {
            prompts: checked,
            array,
            stream: self.stream,
            logprob_start: self.logprob_start_len.filter(|_| self.return_logprob),
            routed_start: self.return_routed_experts.then(|| usize::try_from(start).unwrap_or(0)),
            namespace: Namespace {
                extra_key: self.extra_key.unwrap_or_default(),
                cache_salt: self.cache_salt.unwrap_or_default(),
            },
            priority: self.priority.unwrap_or(0),
        })
    }
}

fn check_routed_start(start: i64, length: usize) -> Result<(), InvalidBody> {
    if start < 0 {
        return Err(format!(
            "recv_req.routed_experts_start_len={start} is lower than 0. Please use a \
             non-negative routed_experts_start_len."
        )
        .into());
    }
    if usize::try_from(start).is_ok_and(|s| s > length) {
        return Err(format!(
            "recv_req.routed_experts_start_len={start} is higher than the number of input tokens \
             len(req.origin_input_ids)={length}. Please use a smaller routed_experts_start_len."
        )
        .into());
    }
    Ok(())
}

/// Token ids of every prompt, and whether the body held a list of prompts.
fn prompts(
    text: Option<OneOrMany<String>>,
    input_ids: Option<Ids>,
    bounds: Bounds<'_>,
) -> Result<(Vec<Vec<u32>>, bool), InvalidBody> {
    let (lists, array) = match (text, input_ids) {
        (None, None) => {
            return Err("Either text, input_ids or input_embeds should be provided.".into());
        }
        (Some(_), Some(_)) => return Err("Only one of text and input_ids may be provided.".into()),
        (Some(text), None) => {
            let tokenizer = bounds.tokenizer.ok_or(
                "text requires a tokenizer.json in the model folder; send input_ids instead.",
            )?;
            let encode = |text: String| {
                let encoding = tokenizer.encode(text, true).map_err(|e| e.to_string())?;
                Ok::<_, InvalidBody>(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
            };
            match text {
                OneOrMany::One(text) => (vec![encode(text)?], false),
                OneOrMany::Many(many) => {
                    (many.into_iter().map(encode).collect::<Result<_, _>>()?, true)
                }
            }
        }
        (None, Some(Ids::One(one))) => (vec![one], false),
        (None, Some(Ids::Many(many))) => (many, true),
    };
    if lists.is_empty() || lists.iter().any(Vec::is_empty) {
        return Err("input_ids cannot be empty.".into());
    }
    let narrow = |id: i64| {
        u32::try_from(id).ok().filter(|&t| (t as usize) < bounds.vocab).ok_or_else(|| {
            format!("token id {id} is outside the vocabulary (0..{}).", bounds.vocab)
        })
    };
    let checked = lists.into_iter().map(|list| list.into_iter().map(narrow).collect());
    Ok((checked.collect::<Result<_, _>>()?, array))
}

impl RawSampling {
    fn check(self, prompt: usize, bounds: Bounds<'_>) -> Result<Sampling, InvalidBody> {
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
        let stop = match self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(one)) => vec![one],
            Some(OneOrMany::Many(many)) => many,
        };
        let stop: Vec<String> = stop.into_iter().filter(|s| !s.is_empty()).collect();
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
        let ids = self.stop_token_ids.unwrap_or_default();
        let narrow = |id| {
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
            stop_token_ids: ids.into_iter().map(narrow).collect::<Result<_, _>>()?,
            stop,
            ignore_eos: self.ignore_eos.unwrap_or(false),
        })
    }

    fn reject_unsupported(&self) -> Result<(), InvalidBody> {
        let neutral = |value: Option<f64>, neutral: f64| {
            value.is_none_or(|v| v.to_bits() == neutral.to_bits())
        };
        let given = |value: &Option<serde_json::Value>| {
            !value.as_ref().is_none_or(|v| v.is_null() || v == &serde_json::json!(false))
        };
        for (name, present) in [
            ("frequency_penalty", !neutral(self.frequency_penalty, 0.0)),
            ("presence_penalty", !neutral(self.presence_penalty, 0.0)),
            ("repetition_penalty", !neutral(self.repetition_penalty, 1.0)),
            ("stop_regex", given(&self.stop_regex)),
            ("json_schema", given(&self.json_schema)),
            ("regex", given(&self.regex)),
            ("ebnf", given(&self.ebnf)),
            ("structural_tag", given(&self.structural_tag)),
            ("logit_bias", given(&self.logit_bias)),
            ("beam_width", given(&self.beam_width)),
            ("watermark", given(&self.watermark)),
            ("choice", given(&self.choice)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(body: Value) -> Result<Checked, InvalidBody> {
        let body: GenerateBody =
            serde_json::from_value(body).map_err(|e| InvalidBody(e.to_string()))?;
        let bounds = Bounds { vocab: 100, context: 64, tokenizer: None };
        body.check(bounds, || "new".into())
    }

    #[test]
    fn plain_body_gets_documented_defaults() {
        let checked = check(json!({"input_ids": [1, 2], "no_such_field": 1})).unwrap();
        let sampling = &checked.prompts[0].sampling;
        assert_eq!((sampling.max_new_tokens, sampling.top_k, sampling.seed), (62, None, None));
        assert!(!checked.array && checked.routed_start.is_none());
    }

    #[test]
    fn invalid_bodies_are_rejected_with_the_reason() {
        for (body, part) in [
            (json!({"input_ids": []}), "input_ids cannot be empty."),
            (json!({}), "Either text, input_ids"),
            (json!({"text": "a"}), "tokenizer.json"),
            (json!({"input_ids": [100]}), "token id 100 is outside the vocabulary"),
            (json!({"input_ids": [-1]}), "token id -1"),
            (json!({"input_ids": [1, [2]]}), "list of such lists"),
            (json!({"input_ids": [1], "sampling_params": {"seed": 1}}), "unknown field `seed`"),
            (json!({"input_ids": [1], "sampling_params": {"temperature": -1}}), "got -1."),
            (json!({"input_ids": [1], "sampling_params": {"top_k": 0}}), "top_k must be"),
            (
                json!({"input_ids": [1], "sampling_params": {"regex": "a"}}),
                "regex is not supported",
            ),
            (json!({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}), "got -1."),
            (json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 64}}), "total of 65"),
            (json!({"input_ids": vec![1; 64]}), "The input (64 tokens) is longer"),
            (json!({"input_ids": [1], "routed_experts_start_len": 2}), "is higher than the number"),
            (json!({"input_ids": [1], "routed_experts_start_len": -1}), "is lower than 0"),
            (json!({"input_ids": [1], "routed_experts_start_len": null}), "null"),
            (json!({"input_ids": [1], "logprob_start_len": 5}), "logprob_start_len"),
            (json!({"input_ids": [1], "top_logprobs_num": 2}), "not supported"),
        ] {
            let message = check(body.clone()).unwrap_err().to_string();
            assert!(message.contains(part), "{body}: {message}");
        }
    }

    #[test]
    fn each_prompt_and_sample_becomes_one_sequence() {
        let body = json!({"input_ids": [[1], [2, 3]], "sampling_params": {"n": 2}});
        let checked = check(body).unwrap();
        let streams: Vec<u64> = checked.prompts.iter().map(|p| p.sampling.stream).collect();
        assert_eq!(streams, [0, 1, 0, 1]);
        assert!(checked.array);
    }

    #[test]
    fn null_max_new_tokens_reaches_the_context_end() {
        let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": null}});
        assert_eq!(check(body).unwrap().prompts[0].sampling.max_new_tokens, 63);
    }
}
