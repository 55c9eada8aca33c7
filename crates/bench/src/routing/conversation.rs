//! Conversations: from reply bodies to a finished mask.

use super::floors::{self, Floor};
use super::measure::{Case, Limits, Meter};
use super::workload::{Conversation, Mode, Size, Wire};
use anyhow::{Context as _, ensure};
use orchestrate_routing::{MaskBuilder, RoutingMask, decode, split_body};
use orchestrate_types::{ModelShape, PolicyVersion};

/// Maximum time for the standard conversation with deltas, in seconds, independent of the floor.
const DELTA_SECONDS: f64 = 0.030;
/// Largest number of tokens to which [`DELTA_SECONDS`] applies.
const DELTA_TOKENS: usize = 32_768;

/// One kind of conversation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) wire: Wire,
    pub(super) mode: Mode,
    pub(super) size: Size,
}

/// Measures `kind` over `rounds`.
pub(super) fn measure(kind: &Kind, rounds: u32, seed: u64) -> anyhow::Result<Case> {
    let conversation = Conversation::draw(&kind.size, seed);
    let (mut meter, mut floor) = (Meter::new(), Floor::default());
    let mut body = Vec::new();
    for round in 0..rounds {
        let mut builder = MaskBuilder::new(conversation.shape.clone())?;
        floor.rewind();
        for &turn in &conversation.turns {
            let asked = builder.next_start();
            let start = if kind.mode == Mode::Full { 0 } else { asked };
            let payload = conversation.write_reply(kind.wire, turn, start, &mut body)?;
            let measure_floor = |meter: &mut Meter, floor: &mut Floor| {
                meter.floor(|| match kind.mode {
                    Mode::Delta => floor.delta(kind.wire, &body, payload.start),
                    Mode::Full => Floor::scan(&body, payload.start).map(|text| {
                        std::hint::black_box(text);
                    }),
                })
            };
            // Whichever runs second finds the body in the CPU cache, so the order alternates.
            if round % 2 == 0 {
                measure_floor(&mut meter, &mut floor)?;
            }
            meter.case(body.len(), || {
                absorb(kind.wire, &body, asked, turn.total, &conversation.shape, &mut builder)
            })?;
            if round % 2 == 1 {
                measure_floor(&mut meter, &mut floor)?;
            }
        }
        let mask = meter.case(0, || builder.finish(kind.size.tokens))?;
        check(&mask, &conversation)?;
        drop(mask);
        meter.end_round();
    }
    let (floor, ratio) = match (kind.mode, kind.wire) {
        (Mode::Full, _) => (floors::FULL, 1.3),
        (Mode::Delta, Wire::SglangI32) => (floors::DELTA_NARROW, 1.5),
        (Mode::Delta, Wire::VllmU8 | Wire::VllmU16) => (floors::DELTA_COPY, 1.5),
    };
    let standard = kind.mode == Mode::Delta && kind.size.tokens <= DELTA_TOKENS;
    let limits =
        Limits { ratio: Some(ratio), seconds: standard.then_some(DELTA_SECONDS), memory: true };
    Ok(meter.finish(kind.name, floor, conversation.mask_bytes(), limits))
}

/// Does what the engine client and the episode do with the rows of a reply.
pub(super) fn absorb(
    wire: Wire,
    body: &[u8],
    start: usize,
    total: usize,
    shape: &ModelShape,
    builder: &mut MaskBuilder,
) -> anyhow::Result<()> {
    let split = split_body(body)?;
    let payload = split.payloads.into_iter().next().context("the body has no rows")?;
    let text = body.get(payload).unwrap_or_default();
    let rows = decode(wire.form(), text, shape, start, total)?;
    builder.push(rows, total, PolicyVersion(0))?;
    Ok(())
}

/// Fails if the mask's rows differ from the rows that were drawn.
pub(super) fn check(mask: &RoutingMask, conversation: &Conversation) -> anyhow::Result<()> {
    let mut rest = conversation.rows.as_slice();
    for chunk in mask.chunks() {
        rest = rest.strip_prefix(chunk).context("bug: the mask differs from the drawn rows")?;
    }
    ensure!(rest.is_empty(), "bug: the mask has fewer rows than were drawn");
    Ok(())
}
