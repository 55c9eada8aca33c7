//! Checks of the replies of every dialect. Replies are hostile input until they have passed.

use crate::error::{EngineErrorKind, ErrorDetail};
use crate::generation::{Generation, VersionSpan};
use crate::http::{error_message, excerpt};
use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError, WireForm, decode, split_body};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// How far above 0 a log-probability may be because of rounding.
const LOGPROB_TOLERANCE: f32 = 1e-6;
/// Engines report this or less for "no log-probability".
const LOGPROB_FLOOR: f32 = -9999.0;

/// The values that a reply is checked against.
#[derive(Debug, Clone)]
pub struct ExpectedReply {
    /// Id of the request.
    pub request_id: String,
    /// Number of prompt tokens that were sent.
    pub prompt_tokens: usize,
    /// Maximum number of output tokens.
    pub max_new_tokens: usize,
    /// First position whose row was requested; `None` = no rows.
    pub routed_experts_start: Option<usize>,
    /// Shape of the model.
    pub shape: Arc<ModelShape>,
    /// Policy version of the tokens if the server does not report one.
    pub serving: PolicyVersion,
}

impl ExpectedReply {
    /// Maximum size of a correct reply in bytes. It bounds all allocations.
    pub(crate) fn body_limit(&self) -> usize {
        let shape = &self.shape;
        let row_text = (shape.hidden_layers * shape.top_k * 4).div_ceil(3) * 4 + 4;
        let tokens = self.prompt_tokens.saturating_add(self.max_new_tokens);
        // Id, log-probability and text of one token stay far below 512 bytes.
        tokens.saturating_mul(row_text + 512).saturating_add(4 << 20)
    }
}

/// A checked reply, and which optional fields it had.
#[derive(Debug)]
pub struct CheckedReply {
    /// The sampled tokens.
    pub generation: Generation,
    /// Whether it reports the weight version of each token.
    pub versions_by_token: bool,
    /// Whether it reports how many prompt tokens were cached.
    pub cached_tokens: bool,
    /// The data-parallel rank that answered, where reported.
    pub dp_rank: Option<u32>,
}

/// The error of an invalid reply; it names the field at fault.
pub(crate) fn invalid_field(field: &str, problem: impl Display) -> EngineErrorKind {
    EngineErrorKind::invalid_reply(format!("`{field}`: {problem}"))
}

fn invalid_routing(field: &str, error: RoutingError) -> EngineErrorKind {
    EngineErrorKind::InvalidReply(ErrorDetail::caused_by(format!("`{field}`"), error))
}

/// A body without its routed experts, so that the JSON parser does not have to read them.
pub(crate) struct SplitBody<'a> {
    body: &'a [u8],
    json: Vec<u8>,
    /// Where the payload lies in `body`. In `json` an empty string starts at the same place.
    payload: Option<Range<usize>>,
}

/// Parses a body; an error names the field.
pub(crate) fn parse<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T, EngineErrorKind> {
    serde_json::from_slice(body).map_err(|error| explain::<T>(body, error))
}

fn explain<'de, T: Deserialize<'de>>(body: &'de [u8], error: serde_json::Error) -> EngineErrorKind {
    if let Some(message) = error_message(body) {
        let message = format!("the HTTP status is success, but the body is an error: {message}");
        return EngineErrorKind::invalid_reply(message);
    }
    if error.is_data() {
        // Parse again to find the path of the field; only invalid replies pay for this.
        let mut json = serde_json::Deserializer::from_slice(body);
        if let Err(error) = serde_path_to_error::deserialize::<_, T>(&mut json) {
            let path = truncated(&error.path().to_string());
            return invalid_field(&path, truncated(&error.inner().to_string()));
        }
    }
    let message = format!("not JSON (starts with `{}`)", excerpt(body));
    EngineErrorKind::InvalidReply(ErrorDetail::caused_by(message, error))
}

/// A list with one element per sampled token. Its initial capacity is enough for most turns.
pub(crate) struct PerToken<T>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for PerToken<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
                let mut list = Vec::with_capacity(256);
                while let Some(element) = elements.next_element()? {
                    list.push(element);
                }
                Ok(list)
            }
        }

        deserializer.deserialize_seq(Elements(PhantomData)).map(Self)
    }
}

const ROUTED: &str = "routed_experts";

impl<'a> SplitBody<'a> {
    /// Splits a body. A reply to one prompt has at most one payload.
    pub(crate) fn new(body: &'a [u8]) -> Result<Self, EngineErrorKind> {
        let split = split_body(body).map_err(|error| invalid_routing(ROUTED, error))?;
        if let [_, second, ..] = split.payloads.as_slice() {
            let problem = format!("a second payload starts at byte {}", second.start);
            return Err(invalid_field(ROUTED, problem));
        }
        Ok(Self { body, json: split.json, payload: split.payloads.into_iter().next() })
    }

    /// Parses the rest of the body; an error names the field.
    pub(crate) fn parse<'de, T: Deserialize<'de>>(&'de self) -> Result<T, EngineErrorKind> {
        parse(&self.json)
    }

    /// The payload that belongs to `value`, a string borrowed from the parsed rest, which is empty
    /// where a payload was cut out. A payload under any other key, or an escaped one, is refused.
    pub(crate) fn payload(
        &self,
        field: &str,
        value: Option<&str>,
    ) -> Result<Option<&'a [u8]>, EngineErrorKind> {
        match (value, &self.payload) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(invalid_field(field, "the payload is under another key")),
            (Some(value), Some(at))
                if value.is_empty() && self.position(value) == Some(at.start) =>
            {
                Ok(self.body.get(at.clone()))
            }
            (Some(_), _) => {
                Err(invalid_field(field, "the key is escaped, which no supported server does"))
            }
        }
    }

    /// The offset in `json` of a string that borrows from it.
    fn position(&self, value: &str) -> Option<usize> {
        let start = self.json.as_ptr().addr();
        let at = value.as_ptr().addr().checked_sub(start)?;
        (at <= self.json.len()).then_some(at)
    }
}

/// Decodes the payload against the request. `None` if no rows were requested, or if there are none
/// because the request never ran.
pub(crate) fn routed_rows(
    form: WireForm,
    field: &str,
    payload: Option<&[u8]>,
    expected: &ExpectedReply,
    outputs: usize,
    never_ran: bool,
) -> Result<Option<RoutedRows>, EngineErrorKind> {
    let (start, text) = match (expected.routed_experts_start, payload) {
        (None, _) => return Ok(None),
        (Some(_), None) if never_ran => return Ok(None),
        (Some(_), None) => return Err(invalid_field(field, "requested, but missing")),
        (Some(start), Some(text)) => (start, text),
    };
    let tokens = expected.prompt_tokens + outputs;
    let rows = decode(form, text, &expected.shape, start, tokens)
        .map_err(|error| invalid_routing(field, error))?;
    match rows.form() {
        PayloadForm::Exact => {}
        PayloadForm::SurplusRow | PayloadForm::WholeSequence => tracing::debug!(
            request_id = expected.request_id,
            form = ?rows.form(),
            "routing payload has more rows than requested"
        ),
    }
    Ok(Some(rows))
}

/// Checks that the reply answers the request that was sent.
pub(crate) fn check_id(field: &str, found: &str, sent: &str) -> Result<(), EngineErrorKind> {
    if found == sent {
        return Ok(());
    }
    let found = truncated(found);
    Err(invalid_field(field, format!("answers request `{found}`, but `{sent}` was sent")))
}

/// The first 80 characters of untrusted text, escaped, for error messages.
pub(crate) fn truncated(text: &str) -> String {
    text.chars().take(80).collect::<String>().escape_debug().to_string()
}

/// Checks the sampled token ids.
pub(crate) fn check_tokens(
    field: &str,
    ids: &[TokenId],
    expected: &ExpectedReply,
) -> Result<(), EngineErrorKind> {
    let limit = expected.max_new_tokens;
    if ids.len() > limit {
        let problem = format!("{} tokens, but at most {limit} were requested", ids.len());
        return Err(invalid_field(field, problem));
    }
    let vocab = expected.shape.vocab;
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => {
            Err(invalid_field(field, format!("token id {id} is outside the vocabulary of {vocab}")))
        }
        None => Ok(()),
    }
}

/// How many tokens an engine reports, each as `(field, count)`.
pub(crate) struct TokenCounts<'a> {
    pub(crate) prompt: (&'a str, Option<usize>),
    pub(crate) outputs: (&'a str, Option<usize>),
    pub(crate) cached: (&'a str, Option<usize>),
}

impl TokenCounts<'_> {
    /// Compares the counts with the request and the reply. A request that never ran may have none.
    pub(crate) fn check(
        &self,
        outputs: usize,
        expected: &ExpectedReply,
        never_ran: bool,
    ) -> Result<(), EngineErrorKind> {
        let prompt = expected.prompt_tokens;
        match self.prompt {
            (field, Some(found)) if found != prompt => {
                return Err(invalid_field(
                    field,
                    format!("{found} tokens, but {prompt} were sent"),
                ));
            }
            (field, None) if !never_ran => return Err(invalid_field(field, "missing")),
            (_, Some(_) | None) => {}
        }
        match self.outputs {
            (field, Some(found)) if found != outputs => {
                let problem = format!("{found} tokens, but the reply has {outputs}");
                return Err(invalid_field(field, problem));
            }
            (_, Some(_) | None) => {}
        }
        match self.cached {
            (field, Some(found)) if found > prompt => {
                Err(invalid_field(field, format!("{found} tokens, but the prompt has {prompt}")))
            }
            (_, Some(_) | None) => Ok(()),
        }
    }
}

/// Checks log-probabilities, each with the token that it claims to belong to.
pub(crate) fn check_logprobs(
    field: &str,
    given: impl ExactSizeIterator<Item = (TokenId, Option<f32>)>,
    outputs: &[TokenId],
) -> Result<Vec<f32>, EngineErrorKind> {
    if given.len() != outputs.len() {
        let problem = format!("{} entries for {} output tokens", given.len(), outputs.len());
        return Err(invalid_field(field, problem));
    }
    let mut logprobs = Vec::with_capacity(outputs.len());
    for (index, ((id, logprob), &output)) in given.zip(outputs).enumerate() {
        if id != output {
            let problem = format!("entry {index} is for token {id}, the output token is {output}");
            return Err(invalid_field(field, problem));
        }
        match logprob {
            Some(value) if value > LOGPROB_FLOOR && value <= LOGPROB_TOLERANCE => {
                logprobs.push(value.min(0.0));
            }
            Some(value) => return Err(invalid_field(field, format!("entry {index} is {value}"))),
            None => return Err(invalid_field(field, format!("entry {index} is null"))),
        }
    }
    Ok(logprobs)
}

/// The policy version of an engine's weights, from the name that it gives them; `None` if the name is not
/// a number. SGLang and vLLM call the weights that they started with `default`: version 0.
pub(crate) fn parse_version(name: &str) -> Option<PolicyVersion> {
    if name == "default" {
        return Some(PolicyVersion(0));
    }
    name.parse().ok().map(PolicyVersion)
}

/// Like [`parse_version`], for a field of a reply.
pub(crate) fn version(field: &str, name: &str) -> Result<PolicyVersion, EngineErrorKind> {
    parse_version(name).ok_or_else(|| {
        let name = truncated(name);
        invalid_field(field, format!("`{name}` is not a policy version; sync the weights"))
    })
}

/// One element of `[{version, start, end}]` over the output tokens, as both engines send it.
#[derive(Debug, Deserialize)]
pub(crate) struct ReportedVersion {
    version: String,
    start: usize,
    end: usize,
}

/// Checks that the versions cover all output tokens, in order.
pub(crate) fn check_versions(
    field: &str,
    reported: &[ReportedVersion],
    outputs: usize,
) -> Result<Vec<VersionSpan>, EngineErrorKind> {
    let mut spans: Vec<VersionSpan> = Vec::new();
    let mut next = 0;
    for span in reported.iter().filter(|span| span.start != span.end) {
        if span.start != next || span.end < span.start {
            return Err(invalid_field(field, "has a gap or an overlap"));
        }
        next = span.end;
        let version = version(field, &span.version)?;
        spans.push(VersionSpan { version, start: span.start, end: span.end });
    }
    if next != outputs {
        return Err(invalid_field(field, format!("covers {next} of {outputs} output tokens")));
    }
    Ok(spans)
}

/// One version for all output tokens.
pub(crate) fn single_version(version: PolicyVersion, outputs: usize) -> Vec<VersionSpan> {
    if outputs == 0 { Vec::new() } else { vec![VersionSpan { version, start: 0, end: outputs }] }
}
