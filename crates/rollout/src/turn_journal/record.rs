//! Records of a turn journal as bytes: `length of the JSON part u32 | JSON | arrays`, all
//! little-endian. The JSON part announces the arrays.

use super::frames::DamagedFrame;
use super::interned::{Interned, ReplyRequestRecord};
use crate::conversation::{ReplyRequest, Unanswered};
use crate::rows::{CachedRows, JoinedRows};
use crate::sequence::AcceptedCall;
use orchestrate_engine::{Finish, Generation, SampledTokens, VersionSpan};
use orchestrate_gateway::{ErrorCode, LeaseRecord};
use orchestrate_routing::RoutedRows;
use orchestrate_types::{AttemptId, ByteReader, EndsEarly, ModelShape, PolicyVersion, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Version of the records.
const FORMAT: u32 = 1;

/// Why a payload is not a record.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct MalformedRecord(pub(super) String);

impl From<&str> for MalformedRecord {
    fn from(problem: &str) -> Self {
        Self(problem.to_owned())
    }
}

impl From<DamagedFrame> for MalformedRecord {
    fn from(error: DamagedFrame) -> Self {
        Self(error.to_string())
    }
}

impl From<EndsEarly> for MalformedRecord {
    fn from(error: EndsEarly) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for MalformedRecord {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}

/// How an attempt began: a worker took its episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TakenRecord {
    format: u32,
    pub(crate) attempt: AttemptId,
    pub(crate) lease: LeaseRecord,
    /// Policy version of the engines at the time.
    pub(crate) policy_version: PolicyVersion,
    /// Digest of everything else that the attempt's tokens depend on.
    pub(crate) settings: [u8; 32],
}

impl TakenRecord {
    pub(crate) fn new(
        attempt: AttemptId,
        lease: LeaseRecord,
        policy_version: PolicyVersion,
        settings: [u8; 32],
    ) -> Self {
        Self { format: FORMAT, attempt, lease, policy_version, settings }
    }
}

/// One thing that happened to a conversation.
#[derive(Debug, Clone)]
pub(crate) enum ConversationRecord {
    /// A request began to be sampled.
    Asked { number: u32, request: Arc<ReplyRequest> },
    /// A reply was stored. Written before any client gets it.
    Replied(RepliedRecord),
    /// A request got no reply, because the prompt or the episode had reached a limit.
    Limited { number: u32, limit: LimitRecord },
    /// How the last request was answered, after an error or before one.
    Noted(Option<Unanswered>),
    /// The process was killed before this. Requests that have no reply yet are forgotten.
    Restarted,
}

/// A stored reply.
#[derive(Debug, Clone)]
pub(crate) struct RepliedRecord {
    /// Number of its generation.
    pub(crate) number: u32,
    /// Time that it took.
    pub(crate) elapsed: Duration,
    /// Whether a client was shown another text.
    pub(crate) contradicts: bool,
    /// The engine calls that it consists of.
    pub(crate) calls: Vec<AcceptedCall>,
}

/// A limit that left a request without a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LimitRecord {
    Context,
    Time,
}

/// The JSON part.
#[derive(Serialize, Deserialize)]
pub(super) enum Described {
    Taken(TakenRecord),
    Asked {
        number: u32,
        request: ReplyRequestRecord,
        tokens: usize,
    },
    Replied {
        number: u32,
        elapsed_us: u64,
        contradicts: bool,
        calls: Vec<DescribedCall>,
    },
    Limited {
        number: u32,
        limit: LimitRecord,
    },
    Noted(Option<(String, String)>),
    /// `forgotten`: numbers of the records of requests that count as never sent.
    Restarted {
        forgotten: Vec<usize>,
    },
}

#[derive(Serialize, Deserialize)]
pub(super) struct DescribedCall {
    tokens: usize,
    finish: DescribedFinish,
    versions: Vec<(PolicyVersion, usize, usize)>,
    cached_tokens: usize,
    retractions: u32,
    wire_bytes: usize,
    worker: String,
    /// First row and size in bytes.
    rows: Option<(usize, usize)>,
    held: usize,
    /// Worker and size in bytes.
    cached_rows: Option<(String, usize)>,
    was_leading: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum DescribedFinish {
    Stop,
    Length,
    Abort,
}

/// A payload: `used`, the attempt's time so far, and a record.
pub(super) fn encode(
    used: Duration,
    described: &Described,
    arrays: &[u8],
) -> Result<Vec<u8>, MalformedRecord> {
    let json = serde_json::to_vec(described)?;
    let length = u32::try_from(json.len()).map_err(|_| "its description is too large")?;
    let mut payload = Vec::with_capacity(12 + json.len() + arrays.len());
    payload.extend_from_slice(&micros(used).to_le_bytes());
    payload.extend_from_slice(&length.to_le_bytes());
    payload.extend_from_slice(&json);
    payload.extend_from_slice(arrays);
    Ok(payload)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The parts of a payload.
pub(super) fn decode(
    payload: &[u8],
) -> Result<(Duration, Described, ByteReader<'_>), MalformedRecord> {
    let mut parts = ByteReader::new(payload);
    let used = Duration::from_micros(u64::from_le_bytes(parts.array()?));
    let length = u32::from_le_bytes(parts.array()?) as usize;
    let described: Described = serde_json::from_slice(parts.take(length)?)?;
    if let Described::Taken(TakenRecord { format, .. }) = &described
        && *format != FORMAT
    {
        return Err(MalformedRecord(format!("it has format {format}, not {FORMAT}")));
    }
    Ok((used, described, parts))
}

/// Describes a record; returns its arrays, too.
pub(super) fn describe(
    record: &ConversationRecord,
    interned: &mut Interned,
) -> Result<(Described, Vec<u8>), MalformedRecord> {
    let mut arrays = Vec::new();
    let described = match record {
        ConversationRecord::Asked { number, request } => {
            let (request, tokens) = interned.add(request)?;
            arrays.extend(tokens.iter().flat_map(|id| id.to_le_bytes()));
            Described::Asked { number: *number, request, tokens: tokens.len() }
        }
        ConversationRecord::Replied(RepliedRecord { number, elapsed, contradicts, calls }) => {
            let calls = calls.iter().map(|call| DescribedCall::of(call, &mut arrays)).collect();
            let elapsed_us = micros(*elapsed);
            Described::Replied { number: *number, elapsed_us, contradicts: *contradicts, calls }
        }
        ConversationRecord::Limited { number, limit } => {
            Described::Limited { number: *number, limit: *limit }
        }
        ConversationRecord::Noted(unanswered) => {
            let parts = |note: &Unanswered| (note.code.as_str().to_owned(), note.message.clone());
            Described::Noted(unanswered.as_ref().map(parts))
        }
        ConversationRecord::Restarted => Described::Restarted { forgotten: Vec::new() },
    };
    Ok((described, arrays))
}

/// The record that was described; `None` for the beginning of the attempt.
pub(super) fn read(
    described: Described,
    mut arrays: ByteReader<'_>,
    interned: &mut Interned,
    shape: &ModelShape,
) -> Result<Option<ConversationRecord>, MalformedRecord> {
    let record = match described {
        Described::Taken(_) => return Ok(None),
        Described::Asked { number, request, tokens } => {
            let tokens = arrays.values(tokens, TokenId::from_le_bytes)?;
            ConversationRecord::Asked {
                number,
                request: Arc::new(interned.read(request, &tokens)?),
            }
        }
        Described::Replied { number, elapsed_us, contradicts, calls } => {
            let calls = calls.into_iter().map(|call| call.read(&mut arrays, shape));
            ConversationRecord::Replied(RepliedRecord {
                number,
                elapsed: Duration::from_micros(elapsed_us),
                contradicts,
                calls: calls.collect::<Result<_, _>>()?,
            })
        }
        Described::Limited { number, limit } => ConversationRecord::Limited { number, limit },
        Described::Noted(None) => ConversationRecord::Noted(None),
        Described::Noted(Some((code, message))) => {
            let known = ErrorCode::ALL.iter().find(|known| known.as_str() == code);
            let code = *known.ok_or_else(|| MalformedRecord(format!("unknown code {code}")))?;
            ConversationRecord::Noted(Some(Unanswered { code, message }))
        }
        Described::Restarted { .. } => ConversationRecord::Restarted,
    };
    if !arrays.rest().is_empty() {
        return Err("it has bytes after its end".into());
    }
    Ok(Some(record))
}

impl DescribedCall {
    /// Describes a call, and appends its arrays.
    fn of(call: &AcceptedCall, arrays: &mut Vec<u8>) -> Self {
        let AcceptedCall { generation, joined: JoinedRows { held, cached }, was_leading } = call;
        arrays.extend(generation.output_ids().iter().flat_map(|id| id.to_le_bytes()));
        arrays.extend(generation.logprobs().iter().flat_map(|value| value.to_le_bytes()));
        let rows = generation.routed_experts.as_ref().map(|rows| {
            rows.chunks().for_each(|chunk| arrays.extend_from_slice(chunk));
            (rows.start(), rows.rows() * rows.row_bytes())
        });
        let cached_rows = cached.as_ref().map(|CachedRows { worker, bytes }| {
            arrays.extend_from_slice(bytes);
            (worker.clone(), bytes.len())
        });
        Self {
            tokens: generation.output_ids().len(),
            finish: match generation.finish() {
                Finish::Stop => DescribedFinish::Stop,
                Finish::Length => DescribedFinish::Length,
                Finish::Abort => DescribedFinish::Abort,
            },
            versions: generation
                .versions()
                .iter()
                .map(|&VersionSpan { version, start, end }| (version, start, end))
                .collect(),
            cached_tokens: generation.cached_tokens,
            retractions: generation.num_retractions,
            wire_bytes: generation.routing_wire_bytes,
            worker: generation.worker.clone(),
            rows,
            held: *held,
            cached_rows,
            was_leading: *was_leading,
        }
    }

    /// Reads the call's arrays from the front of `arrays`.
    fn read(
        self,
        arrays: &mut ByteReader<'_>,
        shape: &ModelShape,
    ) -> Result<AcceptedCall, MalformedRecord> {
        let span = |(version, start, end)| VersionSpan { version, start, end };
        let sampled = SampledTokens {
            output_ids: arrays.values(self.tokens, TokenId::from_le_bytes)?,
            logprobs: arrays.values(self.tokens, f32::from_le_bytes)?,
            versions: self.versions.into_iter().map(span).collect(),
        };
        let finish = match self.finish {
            DescribedFinish::Stop => Finish::Stop,
            DescribedFinish::Length => Finish::Length,
            DescribedFinish::Abort => Finish::Abort,
        };
        let mut generation = Generation::new(sampled, finish, self.tokens)
            .map_err(|error| MalformedRecord(error.to_string()))?;
        generation.cached_tokens = self.cached_tokens;
        generation.num_retractions = self.retractions;
        generation.routing_wire_bytes = self.wire_bytes;
        generation.worker = self.worker;
        if let Some((start, bytes)) = self.rows {
            let rows = RoutedRows::new(shape, start, arrays.take(bytes)?)
                .map_err(|error| MalformedRecord(error.to_string()))?;
            generation.routed_experts = Some(rows);
        }
        let cached = match self.cached_rows {
            Some((worker, bytes)) => {
                Some(CachedRows { worker, bytes: arrays.take(bytes)?.to_vec() })
            }
            None => None,
        };
        let joined = JoinedRows { held: self.held, cached };
        Ok(AcceptedCall { generation, joined, was_leading: self.was_leading })
    }
}
