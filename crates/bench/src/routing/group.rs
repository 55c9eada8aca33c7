//! Groups whose members start with the same prompt: its rows are fetched once and held once.

use super::conversation::{absorb, check};
use super::floors::{self, Floor};
use super::measure::{Case, Limits, Meter};
use super::workload::{Conversation, Size, VOCAB, Wire};
use anyhow::ensure;
use orchestrate_routing::{CacheOptions, MaskBuilder, PrefixCache, PrefixChain, RoutingMask};
use orchestrate_types::{PolicyVersion, TokenId};

/// Groups of conversations, one after the other, through one prefix cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    pub(super) name: &'static str,
    pub(super) count: usize,
    pub(super) members: usize,
    /// Number of tokens that the members of a group share.
    pub(super) prompt: usize,
    /// Final number of tokens of each member, and its turns after the prompt.
    pub(super) size: Size,
}

/// Measures `groups` over `rounds`.
pub(super) fn measure(groups: &Groups, rounds: u32, seed: u64) -> anyhow::Result<Case> {
    let size = &groups.size;
    let first = Conversation::draw_after(size, groups.prompt, &[], seed);
    let mut members = vec![];
    for member in 1..groups.members as u64 {
        members.push(Conversation::draw_after(size, groups.prompt, &first.rows, seed + member));
    }
    members.insert(0, first);
    let (mut meter, mut floor) = (Meter::new(), Floor::default());
    let (mut body, mut kept_bytes) = (Vec::new(), 0);
    for round in 0..rounds {
        floor.rewind();
        let cache =
            meter.case(0, || PrefixCache::open(CacheOptions { bytes: u64::MAX, spill: None }))?;
        // The list of masks belongs to the benchmark and is not measured.
        let mut masks: Vec<RoutingMask> = Vec::with_capacity(groups.count * groups.members);
        for group in 0..groups.count {
            for (member, conversation) in members.iter().enumerate() {
                let tokens = tokens(size.tokens, groups.prompt, group, member);
                let shape = &conversation.shape;
                let (mut chain, mut builder) = meter.case(0, || {
                    let mut chain = PrefixChain::new(shape, "bench", PolicyVersion(0), "");
                    chain.extend_to(tokens.get(..groups.prompt).unwrap_or_default());
                    let mut builder = MaskBuilder::new(shape.clone())?;
                    builder.seed(cache.lookup(&chain), PolicyVersion(0));
                    anyhow::Ok((chain, builder))
                })?;
                for &turn in &conversation.turns {
                    let start = builder.next_start();
                    let payload =
                        conversation.write_reply(Wire::SglangI32, turn, start, &mut body)?;
                    let mut measure_floor = |meter: &mut Meter| {
                        meter.floor(|| floor.delta(Wire::SglangI32, &body, payload.start))
                    };
                    if round % 2 == 0 {
                        measure_floor(&mut meter)?;
                    }
                    meter.case(body.len(), || {
                        absorb(Wire::SglangI32, &body, start, turn.total, shape, &mut builder)?;
                        chain.extend_to(tokens.get(..turn.total - 1).unwrap_or_default());
                        cache.insert(&mut chain, &mut builder);
                        anyhow::Ok(())
                    })?;
                    if round % 2 == 1 {
                        measure_floor(&mut meter)?;
                    }
                }
                let mask = meter.case(0, || {
                    drop(chain);
                    builder.finish(size.tokens)
                })?;
                check(&mask, conversation)?;
                masks.push(mask);
            }
        }
        kept_bytes = RoutingMask::held_together(&masks);
        meter.case(0, || drop(cache));
        meter.end_round();
    }
    let row_bytes = size.shape().row_bytes();
    let own = (size.tokens - 1 - groups.prompt) * groups.members;
    let once = groups.count * (groups.prompt + own) * row_bytes;
    let note = format!(
        "{} masks of {} rows hold {kept_bytes} bytes; each group's {} prompt rows are held once. \
         Without sharing they would hold {} bytes",
        groups.count * groups.members,
        size.tokens - 1,
        groups.prompt,
        groups.count * groups.members * (size.tokens - 1) * row_bytes,
    );
    ensure!(kept_bytes == once, "bug: {}: {note}; expected {once}", groups.name);
    let limits = Limits { ratio: Some(1.5), seconds: None, memory: true };
    let mut case = meter.finish(groups.name, floors::DELTA_NARROW, kept_bytes as u64, limits);
    case.note = note;
    Ok(case)
}

/// Tokens of one member; the prompt tokens are the same for the whole group.
fn tokens(length: usize, prompt: usize, group: usize, member: usize) -> Vec<TokenId> {
    let vocab = VOCAB as usize;
    (0..length)
        .map(|at| {
            let writer = if at < prompt { 0 } else { member + 1 };
            TokenId::try_from((at * 7919 + group * 104_729 + writer * 1_299_709) % vocab)
                .unwrap_or(0)
        })
        .collect()
}
