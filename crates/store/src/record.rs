//! One attempt's result as bytes: the branches of its conversation, their routing rows, and a
//! human-readable log.
//!
//! Layout: magic `ORCHEPSD`, major and minor version (`u16` little-endian each), four zero bytes,
//! then one zstd frame: length of the JSON part (`u32`), the JSON part, and, for each branch that the
//! JSON part announces, `token_ids u32[T]`, `loss_mask u8[T]`, `rollout_logprobs f32[T]`,
//! `policy_versions i64[T]` and the routing bytes if there are any, all little-endian. The file is
//! named by the blake3 digest of all its bytes. Minor version 1 added branches after the first.

use orchestrate_types::{
    AttemptId, ByteReader, EndsEarly, LengthMismatch, Outcome, PolicyVersion, Trajectory, TurnSpan,
};
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"ORCHEPSD";
const MAJOR: u16 = 1;
const MINOR: u16 = 1;
const HEADER_BYTES: usize = 16;
const ZSTD_LEVEL: i32 = 1;

/// Rows `start..end` were produced under `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowSpan {
    /// Index of the first row.
    pub start: usize,
    /// Index one past the last row.
    pub end: usize,
    /// Policy version whose weights chose the experts.
    pub version: PolicyVersion,
}

/// Routing rows of one trajectory as stored: `[T − 1]` rows of `row_bytes` bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRouting {
    /// Bytes per row: MoE layers × top-k × id width.
    pub row_bytes: usize,
    /// Bytes of the rows, row-major.
    pub data: Vec<u8>,
    /// Which policy version produced which rows.
    pub versions: Vec<RowSpan>,
}

/// One branch of an attempt's conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredBranch {
    /// Its tokens.
    pub trajectory: Trajectory,
    /// Its routing rows; `None` if they were not collected or are incomplete.
    pub routing: Option<StoredRouting>,
}

/// Everything that is stored about an attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeRecord {
    /// Id of the attempt.
    pub attempt: AttemptId,
    /// How the attempt ended.
    pub outcome: Outcome,
    /// The branches of its conversation; empty if it broke before the first turn. A sampled token has
    /// loss mask 1 in exactly one of them.
    pub branches: Vec<StoredBranch>,
    /// Turn log, patch and verdict: JSON that only people and reports read.
    pub detail: serde_json::Value,
    /// JSON object with the numbers that metrics are computed from; stored in the row, not in the
    /// file.
    pub summary: serde_json::Value,
}

/// Why stored bytes are not a valid record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[source] std::io::Error),
    /// The bytes are not those that were written.
    #[error("its bytes have digest {found}, but the journal records {expected}")]
    Digest {
        /// Digest in the journal, hexadecimal.
        expected: String,
        /// Digest of the bytes read, hexadecimal.
        found: String,
    },
    /// The file does not start with the magic bytes of this format.
    #[error("it does not start with the magic bytes of a stored trajectory")]
    Magic,
    /// A newer version of this program wrote it.
    #[error("it has format version {0}, but this program reads only version 1: upgrade to read it")]
    Newer(u16),
    /// Parts do not fit together.
    #[error("it is malformed: {0}")]
    Malformed(&'static str),
    /// Parts are missing.
    #[error("it is malformed: {0}")]
    Truncated(#[from] EndsEarly),
    /// The JSON part is damaged.
    #[error("its description is malformed")]
    Json(#[from] serde_json::Error),
    /// The arrays of the trajectory differ in length.
    #[error(transparent)]
    Length(#[from] LengthMismatch),
    /// Compressing or decompressing failed.
    #[error("it cannot be (de)compressed: {0}")]
    Compression(#[source] std::io::Error),
}

#[derive(Serialize, Deserialize)]
struct Description {
    attempt: AttemptId,
    outcome: Outcome,
    tokens: Option<usize>,
    turns: Vec<TurnSpan>,
    routing: Option<RoutingDescription>,
    /// Branches after the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    branches: Vec<BranchDescription>,
    detail: serde_json::Value,
}

#[derive(Serialize, Deserialize)]
struct BranchDescription {
    tokens: usize,
    turns: Vec<TurnSpan>,
    routing: Option<RoutingDescription>,
}

#[derive(Serialize, Deserialize)]
struct RoutingDescription {
    row_bytes: usize,
    bytes: usize,
    versions: Vec<RowSpan>,
}

impl EpisodeRecord {
    /// Encodes the record as a file. CPU-bound: about 1 ms per MiB.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, RecordError> {
        let mut described = self.branches.iter().map(BranchDescription::of);
        let first = described.next();
        let (tokens, turns, routing) = match first {
            Some(BranchDescription { tokens, turns, routing }) => (Some(tokens), turns, routing),
            None => (None, Vec::new(), None),
        };
        let description = serde_json::to_vec(&Description {
            attempt: self.attempt,
            outcome: self.outcome.clone(),
            tokens,
            turns,
            routing,
            branches: described.collect(),
            detail: self.detail.clone(),
        })?;
        let length = u32::try_from(description.len())
            .map_err(|_| RecordError::Malformed("its description is larger than 4 GiB"))?;
        let mut body = length.to_le_bytes().to_vec();
        body.extend_from_slice(&description);
        for StoredBranch { trajectory: t, routing } in &self.branches {
            body.extend(t.token_ids().iter().flat_map(|v| v.to_le_bytes()));
            body.extend_from_slice(t.loss_mask());
            body.extend(t.rollout_logprobs().iter().flat_map(|v| v.to_le_bytes()));
            body.extend(t.policy_versions().iter().flat_map(|v| v.to_le_bytes()));
            body.extend_from_slice(routing.as_ref().map_or(&[], |r| r.data.as_slice()));
        }
        let mut file = Vec::with_capacity(HEADER_BYTES + body.len() / 2);
        file.extend_from_slice(MAGIC);
        file.extend_from_slice(&MAJOR.to_le_bytes());
        file.extend_from_slice(&MINOR.to_le_bytes());
        file.extend_from_slice(&[0; 4]);
        zstd::stream::copy_encode(body.as_slice(), &mut file, ZSTD_LEVEL)
            .map_err(RecordError::Compression)?;
        Ok(file)
    }

    /// Decodes a file that must have the given digest. `summary` comes from the row.
    pub(crate) fn decode(
        file: &[u8],
        digest: &str,
        summary: serde_json::Value,
    ) -> Result<Self, RecordError> {
        let found = blake3::hash(file).to_hex().to_string();
        if found != digest {
            return Err(RecordError::Digest { expected: digest.to_owned(), found });
        }
        let rest = file.strip_prefix(MAGIC).ok_or(RecordError::Magic)?;
        let mut header = ByteReader::new(rest);
        let major = u16::from_le_bytes(header.array()?);
        if major > MAJOR {
            return Err(RecordError::Newer(major));
        }
        let _minor_and_reserved = header.take(HEADER_BYTES - MAGIC.len() - 2)?;
        let body = zstd::stream::decode_all(header.rest()).map_err(RecordError::Compression)?;
        let mut body = ByteReader::new(&body);
        let length = u32::from_le_bytes(body.array()?) as usize;
        let about: Description = serde_json::from_slice(body.take(length)?)?;
        let Description { attempt, outcome, tokens, turns, routing, branches, detail } = about;
        let first = tokens.map(|tokens| BranchDescription { tokens, turns, routing });
        let described = first.into_iter().chain(branches);
        let branches = described.map(|branch| branch.read(&mut body)).collect::<Result<_, _>>()?;
        if !body.rest().is_empty() {
            return Err(RecordError::Malformed("it has bytes after its end"));
        }
        Ok(Self { attempt, outcome, branches, detail, summary })
    }
}

impl BranchDescription {
    fn of(branch: &StoredBranch) -> Self {
        Self {
            tokens: branch.trajectory.len(),
            turns: branch.trajectory.turns().to_vec(),
            routing: branch.routing.as_ref().map(|r| RoutingDescription {
                row_bytes: r.row_bytes,
                bytes: r.data.len(),
                versions: r.versions.clone(),
            }),
        }
    }

    /// Reads the branch's arrays from the front of `body`.
    fn read(self, body: &mut ByteReader<'_>) -> Result<StoredBranch, RecordError> {
        let Self { tokens, turns, routing } = self;
        let trajectory = Trajectory::new(
            body.values(tokens, u32::from_le_bytes)?,
            body.take(tokens)?.to_vec(),
            body.values(tokens, f32::from_le_bytes)?,
            body.values(tokens, i64::from_le_bytes)?,
            turns,
        )?;
        let routing = match routing {
            None => None,
            Some(r) => Some(StoredRouting {
                row_bytes: r.row_bytes,
                data: body.take(r.bytes)?.to_vec(),
                versions: r.versions,
            }),
        };
        Ok(StoredBranch { trajectory, routing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn branch(tokens: usize, routing: bool) -> StoredBranch {
        let version = PolicyVersion(3);
        let trajectory = Trajectory::new(
            (0..u32::try_from(tokens).unwrap()).collect(),
            (0..tokens).map(|i| u8::from(i % 2 == 1)).collect(),
            (0..tokens).map(|i| -0.1 * i as f32).collect(),
            vec![3; tokens],
            vec![TurnSpan {
                prompt_end: tokens / 2,
                output_end: tokens,
                policy_version: version,
                cached_tokens: 1,
                finish: "stop".into(),
            }],
        )
        .unwrap();
        StoredBranch {
            routing: routing.then(|| StoredRouting {
                row_bytes: 6,
                data: (0u8..=250).cycle().take((tokens - 1) * 6).collect(),
                versions: vec![RowSpan { start: 0, end: tokens - 1, version }],
            }),
            trajectory,
        }
    }

    fn record(branches: Vec<StoredBranch>) -> EpisodeRecord {
        EpisodeRecord {
            attempt: "t000012.03-a01".parse().unwrap(),
            outcome: Outcome::Scored { reward: 1.0 },
            branches,
            detail: serde_json::json!({"patch": "diff"}),
            summary: serde_json::json!({"turns": 1}),
        }
    }

    fn digest(bytes: &[u8]) -> String {
        blake3::hash(bytes).to_hex().to_string()
    }

    #[test]
    fn record_round_trips() {
        for branches in [
            vec![],
            vec![branch(2, true)],
            vec![branch(0, false)],
            vec![branch(40, true), branch(1, false), branch(7, true)],
        ] {
            let record = record(branches);
            let bytes = record.encode().unwrap();
            let back =
                EpisodeRecord::decode(&bytes, &digest(&bytes), record.summary.clone()).unwrap();
            assert_eq!(back, record);
        }
    }

    #[test]
    fn every_flipped_byte_is_detected() {
        let bytes = record(vec![branch(30, true), branch(5, true)]).encode().unwrap();
        let name = digest(&bytes);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x01;
            assert!(EpisodeRecord::decode(&bad, &name, serde_json::Value::Null).is_err(), "{at}");
        }
    }

    #[test]
    fn newer_major_version_is_rejected_with_its_number() {
        let mut bytes = record(vec![branch(3, false)]).encode().unwrap();
        bytes[8] = 2;
        let error = EpisodeRecord::decode(&bytes, &digest(&bytes), serde_json::Value::Null);
        assert!(error.unwrap_err().to_string().contains("format version 2"));
    }

    proptest! {
        /// Content that is malformed although its digest matches never panics.
        #[test]
        fn prop_arbitrary_content_never_panics(mut body in proptest::collection::vec(any::<u8>(), 0..200), n in 0u32..64) {
            body.splice(0..0, n.to_le_bytes());
            let mut file = MAGIC.to_vec();
            file.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
            zstd::stream::copy_encode(body.as_slice(), &mut file, 1).unwrap();
            let _ = EpisodeRecord::decode(&file, &digest(&file), serde_json::Value::Null);
        }
    }
}
