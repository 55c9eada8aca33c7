//! Turn journals with records that are drawn, for tests and fuzzing: whatever is done to the bytes, only
//! records that were written are read.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test helper fails by panicking"
)]

use super::record::{LimitRecord, RepliedRecord};
use super::{Contents, ConversationRecord, Described, Interned, TakenRecord, describe, framed};
use super::{frame, payloads};
use crate::api::Message;
use crate::conversation::{HistoryMessage, ReplyRequest, RequestPrompt, Unanswered};
use crate::rows::{CachedRows, JoinedRows};
use crate::sequence::AcceptedCall;
use orchestrate_engine::{Finish, Generation, SampledTokens, VersionSpan};
use orchestrate_gateway::{AskedSampling, ErrorCode};
use orchestrate_routing::RoutedRows;
use orchestrate_types::{ModelShape, PolicyVersion};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// A number below the given one.
type Draw<'a> = &'a mut dyn FnMut(usize) -> usize;

/// A journal as it was written.
#[derive(Debug)]
pub struct DrawnJournal {
    bytes: Vec<u8>,
    /// Where its records end.
    ends: Vec<usize>,
    shape: ModelShape,
}

impl DrawnJournal {
    /// Draws a journal of up to eight records.
    ///
    /// # Panics
    /// If what was drawn is not valid.
    pub fn draw(draw: Draw<'_>) -> Self {
        let shape = ModelShape {
            hidden_layers: 3,
            moe_layers: vec![1, 2],
            experts: 8,
            top_k: 2,
            vocab: 100,
            context: 4096,
        };
        let lease = json!({"lease": vec![1; 32], "key": vec![2; 32], "worker": "w"});
        let lease = serde_json::from_value(lease).expect("valid");
        let attempt = "t000001.02-a01".parse().expect("valid");
        let taken = TakenRecord::new(attempt, lease, PolicyVersion(0), [0; 32]);
        let first = framed(Duration::ZERO, &Described::Taken(taken), &[]).expect("small");
        let mut journal = Self { ends: vec![first.len()], bytes: first, shape };
        let mut interned = Interned::default();
        for number in 0..u32::try_from(draw(8)).expect("below 8") {
            let record = record(number, &journal.shape, draw);
            let (described, arrays) = describe(&record, &mut interned).expect("valid");
            let used = Duration::from_micros(u64::from(number));
            journal.bytes.extend(framed(used, &described, &arrays).expect("small"));
            journal.ends.push(journal.bytes.len());
        }
        journal
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads bytes that were made of those of this journal.
    ///
    /// # Panics
    /// If a record is read that was not written, or complete records of a cut journal are not.
    pub fn check(&self, changed: &[u8]) {
        let complete = self.ends.iter().filter(|end| **end <= changed.len()).count();
        let contents = match Contents::read(changed, &self.shape) {
            Ok(contents) => contents,
            Err(error) => {
                let is_cut = self.bytes.starts_with(changed) && complete > 0;
                assert!(!is_cut, "records before a cut were not read: {error:?}");
                return;
            }
        };
        let again = Self::written_again(&contents);
        let records = contents.records.len() + 1;
        assert_eq!(self.ends.get(records - 1), Some(&contents.valid));
        assert_eq!(self.bytes.get(..contents.valid), changed.get(..contents.valid));
        assert_eq!(self.bytes.get(..contents.valid), Some(again.as_slice()));
        if self.bytes.starts_with(changed) {
            assert_eq!(records, complete);
        }
    }

    /// Reads the journal with a changed record that has its checksum: it is read or refused.
    ///
    /// # Panics
    /// If reading does.
    pub fn check_record(&self, number: usize, change: impl FnOnce(&mut Vec<u8>)) {
        let (payloads, _) = payloads(&self.bytes).expect("it was not changed");
        let mut payloads: Vec<Vec<u8>> = payloads.into_iter().map(<[u8]>::to_vec).collect();
        let number = number % payloads.len();
        if let Some(payload) = payloads.get_mut(number) {
            change(payload);
        }
        let frames = payloads.iter().filter_map(|payload| frame(payload));
        let _ = Contents::read(&frames.flatten().collect::<Vec<u8>>(), &self.shape);
    }

    /// The records of `contents` as a drawn journal writes them.
    fn written_again(contents: &Contents) -> Vec<u8> {
        let taken = Described::Taken(contents.taken.clone());
        let mut bytes = framed(Duration::ZERO, &taken, &[]).expect("small");
        let mut interned = Interned::default();
        for (used, (_, record)) in (0..).zip(&contents.records) {
            let (described, arrays) = describe(record, &mut interned).expect("valid");
            let used = Duration::from_micros(used);
            bytes.extend(framed(used, &described, &arrays).expect("small"));
        }
        bytes
    }
}

fn record(number: u32, shape: &ModelShape, draw: Draw<'_>) -> ConversationRecord {
    match draw(6) {
        0 | 1 => ConversationRecord::Asked { number, request: Arc::new(request(draw)) },
        2 => ConversationRecord::Replied(RepliedRecord {
            number,
            elapsed: Duration::from_millis(draw(100) as u64),
            contradicts: draw(2) == 0,
            calls: (0..=draw(2)).map(|_| call(shape, draw)).collect(),
        }),
        3 => {
            let limit = if draw(2) == 0 { LimitRecord::Context } else { LimitRecord::Time };
            ConversationRecord::Limited { number, limit }
        }
        4 => {
            let code = ErrorCode::ALL.get(draw(ErrorCode::ALL.len())).filter(|_| draw(2) == 0);
            let note = code.map(|code| Unanswered { code: *code, message: "refused".to_owned() });
            ConversationRecord::Noted(note)
        }
        _ => ConversationRecord::Restarted,
    }
}

/// A request of few different messages, tools and tokens, so that later ones repeat earlier ones.
fn request(draw: Draw<'_>) -> ReplyRequest {
    let prompt = if draw(2) == 0 {
        RequestPrompt::Tokens(
            (0..draw(5)).map(|_| u32::try_from(draw(3)).expect("below 3")).collect(),
        )
    } else {
        let messages = (0..=draw(4)).map(|_| {
            let message: Message = crate::chat::message("user", ["go on", "stop"][draw(2)]);
            Arc::new(HistoryMessage { message, reasoning: None, reply: None, call_ids: Vec::new() })
        });
        let messages = messages.collect();
        let tools = (0..draw(2)).map(|_| json!({"type": "function"})).collect();
        RequestPrompt::Messages { messages, tools: Arc::new(tools), thinking: None }
    };
    ReplyRequest {
        prompt,
        max_tokens: Some(draw(100)),
        stops: Arc::new([]),
        sampling: AskedSampling { temperature: None, top_p: Some(0.5) },
        sample: draw(2),
        repeats: draw(2) == 0,
        overridden: Arc::new([]),
    }
}

fn call(shape: &ModelShape, draw: Draw<'_>) -> AcceptedCall {
    let tokens = 1 + draw(4);
    let sampled = SampledTokens {
        output_ids: (0..tokens).map(|_| u32::try_from(draw(100)).expect("below 100")).collect(),
        logprobs: (0..tokens).map(|_| -(draw(100) as f32)).collect(),
        versions: vec![VersionSpan { version: PolicyVersion(3), start: 0, end: tokens }],
    };
    let mut generation = Generation::new(sampled, Finish::Stop, tokens).expect("valid");
    "http://a:30000".clone_into(&mut generation.worker);
    if draw(2) == 0 {
        let ids = [0, 1].repeat(shape.row_bytes() / 2 * (1 + draw(3)));
        generation.routed_experts = Some(RoutedRows::new(shape, draw(9), &ids).expect("valid"));
    }
    let cached = (draw(3) == 0)
        .then(|| CachedRows { worker: generation.worker.clone(), bytes: vec![7; draw(9)] });
    AcceptedCall {
        joined: JoinedRows { held: draw(5), cached },
        was_leading: draw(2) == 0,
        generation,
    }
}
