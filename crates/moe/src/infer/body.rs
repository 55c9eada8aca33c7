//! Parsing and validation of `/generate` bodies, with SGLang's error messages.

mod sampling;

use super::cache::Namespace;
use super::fields::{Given, Ids, MAX_NAME_BYTES, MAX_PROMPTS, OneOrMany};
use super::request::InvalidBody;
use super::sampling::Sampling;
use sampling::RawSampling;
use serde::{Deserialize, Deserializer};

/// Texts longer than this are refused, in bytes per token of the context.
const TEXT_BYTES_PER_TOKEN: usize = 8;

/// The body of `/generate`. Unknown top-level keys are ignored, as SGLang does.
#[expect(clippy::struct_excessive_bools, reason = "they are fields of the wire format")]
#[derive(Debug, Deserialize)]
pub(crate) struct GenerateBody {
    text: Option<OneOrMany<String, MAX_PROMPTS>>,
    input_ids: Option<Ids>,
    sampling_params: Option<OneOrMany<RawSampling, MAX_PROMPTS>>,
    rid: Option<OneOrMany<String, MAX_PROMPTS>>,
    #[serde(default)]
    return_logprob: bool,
    logprob_start_len: Option<i64>,
    #[serde(default)]
    top_logprobs_num: i64,
    #[serde(default)]
    token_ids_logprob: Given,
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

fn not_null<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    T::deserialize(from)
}

/// Limits of the engine that bodies are checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds<'a> {
    pub(crate) vocab: usize,
    /// Longest sequence (prompt and output), in tokens.
    pub(crate) context: usize,
    /// Maximum number of sequences of a request: prompts times samples.
    pub(crate) sequences: usize,
    /// Maximum number of prompt tokens of a request, each counted once per sample.
    pub(crate) tokens: usize,
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
        if self.top_logprobs_num != 0 || self.token_ids_logprob.0 {
            return Err(
                "top_logprobs_num and token_ids_logprob are not supported by this engine".into()
            );
        }
        let (lists, mut array) = prompts(self.text, self.input_ids, bounds)?;
        let raw = match self.sampling_params {
            None => vec![RawSampling::default()],
            Some(given) if !given.is_list || given.values.len() == lists.len() => given.values,
            Some(_) => {
                return Err("sampling_params must be one object, or one per prompt.".into());
            }
        };
        let samples = samples(&raw, &lists, bounds)?;
        let rids = match self.rid {
            None => None,
            Some(rid) if rid.values.len() == lists.len() => Some(rid.values),
            Some(_) => return Err("rid must be one string per prompt.".into()),
        };
        let names = rids.iter().flatten().chain(&self.extra_key).chain(&self.cache_salt);
        if names.into_iter().any(|name| name.len() > MAX_NAME_BYTES) {
            return Err(format!(
                "rid, extra_key and cache_salt must have at most {MAX_NAME_BYTES} bytes each."
            )
            .into());
        }
        let start = self.routed_experts_start_len;
        let mut checked = Vec::new();
        // One object of sampling parameters is that of every prompt.
        let each = raw.iter().cycle().zip(samples);
        for (index, (input_ids, (raw, n))) in lists.into_iter().zip(each).enumerate() {
            let length = input_ids.len();
            check_routed_start(start, length)?;
            let limit = i64::try_from(length).unwrap_or(i64::MAX);
            if self.logprob_start_len.is_some_and(|s| s > limit || s < -1) {
                return Err(format!(
                    "logprob_start_len must be in -1..={length} for a prompt of {length} tokens."
                )
                .into());
            }
            array |= n > 1;
            let show = ReplyOptions {
                logprobs: self.return_logprob,
                prompt_ids: self.return_prompt_token_ids,
                skip_special_tokens: raw.skip_special_tokens.unwrap_or(true),
                no_stop_trim: raw.no_stop_trim.unwrap_or(false),
            };
            let sampling = raw.check(length, bounds)?;
            for stream in 0..n {
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

/// Number of samples of each prompt. All of them are counted here, before any is created.
fn samples(
    raw: &[RawSampling],
    lists: &[Vec<u32>],
    bounds: Bounds<'_>,
) -> Result<Vec<u64>, InvalidBody> {
    let (mut samples, mut sequences, mut tokens) = (Vec::with_capacity(lists.len()), 0, 0);
    for (list, raw) in lists.iter().zip(raw.iter().cycle()) {
        let n = raw.n.unwrap_or(1);
        let count = usize::try_from(n).ok().filter(|n| (1..=1024).contains(n));
        let count = count.ok_or_else(|| format!("n must be between 1 and 1024, got {n}."))?;
        sequences += count;
        tokens += count.saturating_mul(list.len());
        samples.push(n.unsigned_abs());
    }
    let Bounds { sequences: most_sequences, tokens: most_tokens, .. } = bounds;
    if sequences > most_sequences || tokens > most_tokens {
        return Err(format!(
            "the request has {sequences} sequences (prompts times n) with {tokens} prompt tokens, \
             but may have at most {most_sequences} sequences with {most_tokens} tokens; send \
             several requests."
        )
        .into());
    }
    Ok(samples)
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
    text: Option<OneOrMany<String, MAX_PROMPTS>>,
    input_ids: Option<Ids>,
    bounds: Bounds<'_>,
) -> Result<(Vec<Vec<u32>>, bool), InvalidBody> {
    let ids = match (text, input_ids) {
        (None, None) => {
            return Err("Either text, input_ids or input_embeds should be provided.".into());
        }
        (Some(_), Some(_)) => return Err("Only one of text and input_ids may be provided.".into()),
        (Some(text), None) => encode(&text, bounds)?,
        (None, Some(ids)) => ids,
    };
    if ids.lists.is_empty() || ids.lists.iter().any(Vec::is_empty) {
        return Err("input_ids cannot be empty.".into());
    }
    let outside = ids.lists.iter().flatten().find(|&&id| id as usize >= bounds.vocab);
    if let Some(id) = ids.invalid.or(outside.map(|&id| id.into())) {
        let vocab = bounds.vocab;
        return Err(format!("token id {id} is outside the vocabulary (0..{vocab}).").into());
    }
    Ok((ids.lists, ids.is_list))
}

/// Tokenises texts. A tokenizer needs a hundred times the memory of a text, so texts that cannot
/// fit the context are not given to it.
fn encode(text: &OneOrMany<String, MAX_PROMPTS>, bounds: Bounds<'_>) -> Result<Ids, InvalidBody> {
    let tokenizer = bounds
        .tokenizer
        .ok_or("text requires a tokenizer.json in the model folder; send input_ids instead.")?;
    let most = bounds.context.saturating_mul(TEXT_BYTES_PER_TOKEN);
    let bytes: usize = text.values.iter().map(String::len).sum();
    if bytes > most {
        return Err(format!(
            "text has {bytes} bytes, but may have at most {most}; send input_ids instead."
        )
        .into());
    }
    let one = |text: &String| {
        let encoding = tokenizer.encode_fast(text.as_str(), true).map_err(|e| e.to_string())?;
        Ok::<_, InvalidBody>(encoding.get_ids().to_vec())
    };
    let lists = text.values.iter().map(one).collect::<Result<_, _>>()?;
    Ok(Ids { lists, is_list: text.is_list, invalid: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(body: Value) -> Result<Checked, InvalidBody> {
        let body: GenerateBody =
            serde_json::from_value(body).map_err(|e| InvalidBody(e.to_string()))?;
        let bounds =
            Bounds { vocab: 100, context: 64, sequences: 100, tokens: 200, tokenizer: None };
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
            (json!({"input_ids": [1], "sampling_params": {"n": 101}}), "101 sequences"),
            (json!({"input_ids": [1], "sampling_params": {"n": 1025}}), "between 1 and 1024"),
            (json!({"input_ids": vec![1; 30], "sampling_params": {"n": 7}}), "210 prompt tokens"),
            (
                json!({"input_ids": vec![[1]; 51], "sampling_params": {"n": 2}}),
                "102 sequences (prompts times n)",
            ),
            (json!({"input_ids": [1], "rid": "r".repeat(513)}), "at most 512 bytes"),
            (json!({"input_ids": [1], "cache_salt": "s".repeat(513)}), "at most 512 bytes"),
            (json!({"input_ids": [1], "sampling_params": {"stop": vec!["a"; 33]}}), "at most 32"),
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
