//! What every reply is checked for, whatever its form. Everything here is hostile input until it
//! has passed.

use crate::http::{error_message, excerpt};
use crate::{EngineErrorKind, Generation, VersionSpan};
use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError, WireForm, decode, split_body};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// How far above 0 a log-probability may be by rounding.
const LOGPROB_TOLERANCE: f32 = 1e-6;
/// From here on down, engines mean "no log-probability".
const LOGPROB_FLOOR: f32 = -9999.0;

/// What a reply is checked against.
#[derive(Debug, Clone)]
pub struct Expected {
    /// The id that was sent.
    pub request_id: String,
    /// Tokens that were sent.
    pub prompt_tokens: usize,
    /// Tokens that may come.
    pub max_new_tokens: usize,
    /// First position whose row was asked for; `None` = no rows.
    pub routed_experts_start: Option<usize>,
    /// The model.
    pub shape: Arc<ModelShape>,
    /// The version of tokens whose version the server cannot name.
    pub serving: PolicyVersion,
}

impl Expected {
    /// Most bytes a right reply can have; allocations stay within.
    pub(crate) fn body_limit(&self) -> usize {
        let shape = &self.shape;
        let row_text = (shape.hidden_layers * shape.top_k * 4).div_ceil(3) * 4 + 4;
        let tokens = self.prompt_tokens.saturating_add(self.max_new_tokens);
        // Ids, log-probs and text of one token stay far below 512 bytes.
        tokens.saturating_mul(row_text + 512).saturating_add(4 << 20)
    }
}

/// A checked reply, and which optional things it had.
#[derive(Debug)]
pub struct Reading {
    /// What it said.
    pub generation: Generation,
    /// Whether it told the weight version of each token.
    pub versions_by_token: bool,
    /// Whether it told how much of the prompt was cached.
    pub cached_tokens: bool,
    /// The data-parallel replica that answered, where it said so.
    pub dp_rank: Option<u32>,
}

/// Why a reply was refused.
#[derive(Debug)]
pub struct Fault {
    /// In the words of the seam.
    pub kind: EngineErrorKind,
    /// The routing rows' own error, where they were at fault.
    pub routing: Option<RoutingError>,
}

impl From<EngineErrorKind> for Fault {
    fn from(kind: EngineErrorKind) -> Self {
        Self { kind, routing: None }
    }
}

/// An invalid reply, by the field at fault.
pub(crate) fn wrong(field: &str, words: impl Display) -> EngineErrorKind {
    EngineErrorKind::InvalidReply(format!("`{field}`: {words}"))
}

/// A body without its routed experts, which no JSON parser has to see.
pub(crate) struct Cut<'a> {
    body: &'a [u8],
    json: Vec<u8>,
    /// Where they lay in the body; in `json`, an empty string begins at the same place.
    payload: Option<Range<usize>>,
}

/// Parses a body; an error names the field.
pub(crate) fn parse<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T, EngineErrorKind> {
    serde_json::from_slice(body).map_err(|error| explain::<T>(body, &error))
}

fn explain<'de, T: Deserialize<'de>>(
    body: &'de [u8],
    error: &serde_json::Error,
) -> EngineErrorKind {
    if let Some(message) = error_message(body) {
        let words = format!("success with an error inside: {message}");
        return EngineErrorKind::InvalidReply(words);
    }
    if error.is_data() {
        // Read again with an eye on the path: right replies need none.
        let mut json = serde_json::Deserializer::from_slice(body);
        if let Err(error) = serde_path_to_error::deserialize::<_, T>(&mut json) {
            return wrong(&short(&error.path().to_string()), short(&error.inner().to_string()));
        }
    }
    let words = format!("it is no JSON: {error}; it begins `{}`", excerpt(body));
    EngineErrorKind::InvalidReply(words)
}

/// A list with one element per sampled token. It has room for those of most turns from the begin.
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

impl<'a> Cut<'a> {
    /// Takes the body apart. A reply to one prompt has at most one payload.
    pub(crate) fn new(body: &'a [u8]) -> Result<Self, Fault> {
        let split = split_body(body).map_err(|error| routing_fault(ROUTED, error))?;
        if let [_, second, ..] = split.payloads.as_slice() {
            let words = format!("a second payload begins at byte {}", second.start);
            return Err(wrong(ROUTED, words).into());
        }
        Ok(Self { body, json: split.json, payload: split.payloads.into_iter().next() })
    }

    /// Parses the rest; an error names the field.
    pub(crate) fn parse<'de, T: Deserialize<'de>>(&'de self) -> Result<T, Fault> {
        parse(&self.json).map_err(Fault::from)
    }

    /// The payload that belongs to `value`, a borrowed string of the parsed rest: empty where one
    /// was cut out. One that stands under any other key, or under an escaped one, is refused.
    pub(crate) fn payload(
        &self,
        field: &str,
        value: Option<&str>,
    ) -> Result<Option<&'a [u8]>, Fault> {
        match (value, &self.payload) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(wrong(field, "a payload is elsewhere in the reply").into()),
            (Some(value), Some(at))
                if value.is_empty() && self.position(value) == Some(at.start) =>
            {
                Ok(self.body.get(at.clone()))
            }
            (Some(_), _) => Err(wrong(field, "its key is escaped, which no server does").into()),
        }
    }

    /// Where in the parsed rest a string begins that borrows from it.
    fn position(&self, value: &str) -> Option<usize> {
        let begin = self.json.as_ptr().addr();
        let at = value.as_ptr().addr().checked_sub(begin)?;
        (at <= self.json.len()).then_some(at)
    }
}

/// Decodes the payload for what was asked; `None` where no rows were asked for, or none can be.
pub(crate) fn routed_rows(
    form: WireForm,
    field: &str,
    payload: Option<&[u8]>,
    expected: &Expected,
    outputs: usize,
    never_ran: bool,
) -> Result<Option<RoutedRows>, Fault> {
    let (start, text) = match (expected.routed_experts_start, payload) {
        (None, _) => return Ok(None),
        (Some(_), None) if never_ran => return Ok(None),
        (Some(_), None) => return Err(wrong(field, "asked for, and missing").into()),
        (Some(start), Some(text)) => (start, text),
    };
    let tokens = expected.prompt_tokens + outputs;
    let rows = decode(form, text, &expected.shape, start, tokens)
        .map_err(|error| routing_fault(field, error))?;
    match rows.form() {
        PayloadForm::Exact => {}
        PayloadForm::SurplusRow | PayloadForm::WholeSequence => tracing::debug!(
            request_id = expected.request_id,
            form = ?rows.form(),
            "routing payload deviates from what was asked for"
        ),
    }
    Ok(Some(rows))
}

fn routing_fault(field: &str, error: RoutingError) -> Fault {
    Fault { kind: wrong(field, &error), routing: Some(error) }
}

/// Checks who is answered.
pub(crate) fn check_id(field: &str, found: &str, sent: &str) -> Result<(), EngineErrorKind> {
    if found == sent {
        return Ok(());
    }
    Err(wrong(field, format!("it answers request `{}`, asked was `{sent}`", short(found))))
}

/// A foreign word, cut to what a message can bear.
pub(crate) fn short(word: &str) -> String {
    word.chars().take(80).collect::<String>().escape_debug().to_string()
}

/// Checks the sampled tokens themselves.
pub(crate) fn check_tokens(
    field: &str,
    ids: &[TokenId],
    expected: &Expected,
) -> Result<(), EngineErrorKind> {
    let limit = expected.max_new_tokens;
    if ids.len() > limit {
        let words = format!("it has {} tokens, allowed were {limit}", ids.len());
        return Err(wrong(field, words));
    }
    let vocab = expected.shape.vocab;
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => Err(wrong(field, format!("token id {id} is not in the vocabulary of {vocab}"))),
        None => Ok(()),
    }
}

/// How many tokens an engine says it saw, wrote, and found cached.
pub(crate) struct Counts<'a> {
    /// Each as its field's name and value.
    pub(crate) prompt: (&'a str, Option<usize>),
    pub(crate) outputs: (&'a str, Option<usize>),
    pub(crate) cached: (&'a str, Option<usize>),
}

impl Counts<'_> {
    /// Compares with what was sent and came. A request that never ran may have none.
    pub(crate) fn check(
        &self,
        outputs: usize,
        expected: &Expected,
        never_ran: bool,
    ) -> Result<(), EngineErrorKind> {
        let prompt = expected.prompt_tokens;
        match self.prompt {
            (field, Some(found)) if found != prompt => {
                return Err(wrong(field, format!("{found} tokens, sent were {prompt}")));
            }
            (field, None) if !never_ran => return Err(wrong(field, "it is missing")),
            (_, Some(_) | None) => {}
        }
        match self.outputs {
            (field, Some(found)) if found != outputs => {
                return Err(wrong(field, format!("{found} tokens, sent back are {outputs}")));
            }
            (_, Some(_) | None) => {}
        }
        match self.cached {
            (field, Some(found)) if found > prompt => {
                Err(wrong(field, format!("{found} tokens of a prompt of {prompt}")))
            }
            (_, Some(_) | None) => Ok(()),
        }
    }
}

/// Checks log-probabilities, each with the token it says it belongs to.
pub(crate) fn check_logprobs(
    field: &str,
    given: impl ExactSizeIterator<Item = (TokenId, Option<f32>)>,
    outputs: &[TokenId],
) -> Result<Vec<f32>, EngineErrorKind> {
    if given.len() != outputs.len() {
        let words = format!("{} entries for {} output tokens", given.len(), outputs.len());
        return Err(wrong(field, words));
    }
    let mut logprobs = Vec::with_capacity(outputs.len());
    for (index, ((id, logprob), &output)) in given.zip(outputs).enumerate() {
        if id != output {
            let words = format!("entry {index} is of token {id}, the output token is {output}");
            return Err(wrong(field, words));
        }
        match logprob {
            Some(value) if value > LOGPROB_FLOOR && value <= LOGPROB_TOLERANCE => {
                logprobs.push(value.min(0.0));
            }
            Some(value) => return Err(wrong(field, format!("entry {index} is {value}"))),
            None => return Err(wrong(field, format!("entry {index} is null"))),
        }
    }
    Ok(logprobs)
}

/// The policy version an engine's word stands for; both say `default` for the weights they began
/// with.
pub(crate) fn parse_version(word: &str) -> Option<PolicyVersion> {
    if word == "default" {
        return Some(PolicyVersion(0));
    }
    word.parse().ok().map(PolicyVersion)
}

/// As [`parse_version`], of a reply.
pub(crate) fn version(field: &str, word: &str) -> Result<PolicyVersion, EngineErrorKind> {
    parse_version(word).ok_or_else(|| {
        wrong(field, format!("`{}` is not a number: weights must be synced", short(word)))
    })
}

/// `[{version, start, end}]` over the output tokens, as both engines send it.
#[derive(Debug, Deserialize)]
pub(crate) struct Span {
    version: String,
    start: usize,
    end: usize,
}

/// Checks that spans cover all output tokens, in order.
pub(crate) fn check_spans(
    field: &str,
    spans: &[Span],
    outputs: usize,
) -> Result<Vec<VersionSpan>, EngineErrorKind> {
    let mut covered: Vec<VersionSpan> = Vec::new();
    let mut next = 0;
    for span in spans.iter().filter(|span| span.start != span.end) {
        if span.start != next || span.end < span.start {
            return Err(wrong(field, "it has a gap or an overlap"));
        }
        next = span.end;
        let version = version(field, &span.version)?;
        covered.push(VersionSpan { version, start: span.start, end: span.end });
    }
    if next != outputs {
        return Err(wrong(field, format!("it covers {next} of {outputs} output tokens")));
    }
    Ok(covered)
}

/// All output tokens under one version.
pub(crate) fn one_span(version: PolicyVersion, outputs: usize) -> Vec<VersionSpan> {
    if outputs == 0 { Vec::new() } else { vec![VersionSpan { version, start: 0, end: outputs }] }
}
