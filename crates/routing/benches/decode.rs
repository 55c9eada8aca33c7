//! The cost of decoding the routed experts of one trajectory, compared with the least work that any
//! decoder has to do: find the closing quote, one base64 pass, and narrowing without checks.
//!
//! One trajectory of 32,768 tokens in 20 turns, 48 layers, top-8 of 128 experts. Every case is
//! the whole trajectory, from the bodies to checked rows. After criterion's figures it prints ratios
//! of minimum times, measured alternately, which are the least sensitive to a busy machine.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a benchmark measures wall time, prints it, and stops at the first failure"
)]

use base64_simd::{Out, STANDARD};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use memchr::memchr;
use orchestrate_routing::{RoutedRows, WireForm, decode, encode_npy, encode_sglang, split_body};
use orchestrate_types::ModelShape;
use std::hint::black_box;
use std::time::{Duration, Instant};

const TOKENS: usize = 32_768;
const TURNS: usize = 20;
const SCRATCH_BYTES: usize = 96 << 10;
const ROUNDS: usize = 25;

fn shape() -> ModelShape {
    let moe_layers = (0..48).collect();
    ModelShape { hidden_layers: 48, moe_layers, experts: 128, top_k: 8, vocab: 1, context: TOKENS }
}

/// Distinct ids per choice from a deterministic generator, `[rows, layers, k]`.
fn ids(shape: &ModelShape, rows: usize) -> Vec<u16> {
    let mut state = 7u64;
    let mut ids = Vec::with_capacity(rows * shape.ids_per_row());
    for _ in 0..rows * shape.moe_layers.len() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // An odd stride below 128 visits every expert before it repeats one.
        let (first, stride) = (state >> 33, (state >> 50) | 1);
        let choice = (0..8).map(|slot| (first.wrapping_add(slot * stride)) & 127);
        ids.extend(choice.map(|id| u16::try_from(id).unwrap()));
    }
    ids
}

struct Turn {
    body: Vec<u8>,
    payload_at: usize,
    start: usize,
    tokens: usize,
}

struct Case {
    name: &'static str,
    form: WireForm,
    full: bool,
    turns: Vec<Turn>,
}

impl Case {
    fn new(name: &'static str, form: WireForm, full: bool, ids: &[u16]) -> Self {
        let shape = shape();
        let mut turns = Vec::new();
        let mut start = 0;
        for turn in 1..=TURNS {
            let tokens = TOKENS * turn / TURNS;
            let from = if full { 0 } else { start };
            let wanted = &ids[from * shape.ids_per_row()..(tokens - 1) * shape.ids_per_row()];
            let rows = RoutedRows::from_ids(&shape, from, wanted).unwrap();
            let payload = match form {
                WireForm::SglangI32 => encode_sglang(&rows, &shape).unwrap(),
                WireForm::VllmNpy => encode_npy(&rows, &shape).unwrap(),
            };
            let outputs = vec!["[-0.0123,151643,null]"; 300].join(",");
            let head = format!("{{\"logprobs\":[{outputs}],\"routed_experts\":\"");
            let body = [head.as_bytes(), payload.as_bytes(), b"\",\"cached_tokens\":17}"].concat();
            turns.push(Turn { body, payload_at: head.len(), start, tokens });
            start = tokens - 1;
        }
        Self { name, form, full, turns }
    }

    fn bytes(&self) -> usize {
        self.turns.iter().map(|turn| turn.body.len()).sum()
    }

    /// The decoder under test: all turns, keeping the decoded rows.
    fn decode(&self, shape: &ModelShape) -> Vec<RoutedRows> {
        let decode = |turn: &Turn| {
            let split = split_body(&turn.body).unwrap();
            let payload = &turn.body[split.payloads[0].clone()];
            decode(self.form, payload, shape, turn.start, turn.tokens).unwrap()
        };
        self.turns.iter().map(decode).collect()
    }

    /// Only the scan for the closing quotes.
    fn scan(&self) -> usize {
        let quote = |turn: &Turn| memchr(b'"', &turn.body[turn.payload_at..]).unwrap();
        self.turns.iter().map(quote).sum()
    }

    /// The minimum: the scan, one base64 pass over the new part, and narrowing into new memory.
    fn minimum(&self) -> Vec<Vec<u8>> {
        let width = match self.form {
            WireForm::SglangI32 => 4,
            WireForm::VllmNpy => 1,
        };
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut kept = Vec::new();
        for turn in &self.turns {
            let text = &turn.body[turn.payload_at..];
            let text = &text[..memchr(b'"', text).unwrap()];
            let known = if self.full { turn.start * 48 * 8 * width / 3 * 4 } else { 0 };
            let text = &text[known..];
            let mut rows = Vec::with_capacity(text.len() / 4 * 3 / width);
            for block in text.chunks(SCRATCH_BYTES / 3 * 4) {
                let wire = STANDARD.decode(block, Out::from_slice(&mut scratch)).unwrap();
                if width == 1 {
                    rows.extend_from_slice(wire);
                } else {
                    rows.extend(wire.as_chunks::<4>().0.iter().map(|id| id[0]));
                }
            }
            kept.push(rows);
        }
        kept
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let started = Instant::now();
    black_box(work());
    started.elapsed()
}

fn measure(criterion: &mut Criterion) {
    let shape = shape();
    let ids = ids(&shape, TOKENS);
    for (name, form, full) in [
        ("sglang_i32_delta", WireForm::SglangI32, false),
        ("vllm_u8_delta", WireForm::VllmNpy, false),
        ("sglang_i32_full", WireForm::SglangI32, true),
        ("vllm_u8_full", WireForm::VllmNpy, true),
    ] {
        let case = Case::new(name, form, full, &ids);
        let mut group = criterion.benchmark_group(case.name);
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        group.throughput(Throughput::Bytes(u64::try_from(case.bytes()).unwrap()));
        group.bench_function("decode", |bencher| bencher.iter(|| case.decode(&shape)));
        group.bench_function("minimum", |bencher| bencher.iter(|| case.minimum()));
        group.bench_function("scan", |bencher| bencher.iter(|| case.scan()));
        group.finish();

        let mut least = [Duration::MAX; 3];
        for _ in 0..ROUNDS {
            least[0] = least[0].min(timed(|| case.decode(&shape)));
            least[1] = least[1].min(timed(|| case.minimum()));
            least[2] = least[2].min(timed(|| case.scan()));
        }
        let [decode, minimum, scan] = least.map(|time| time.as_secs_f64() * 1e3);
        eprintln!(
            "{name}: {:.1} MB, decode {decode:.1} ms, minimum {minimum:.1} ms, scan {scan:.1} ms, \
             decode/minimum {:.2}, decode/scan {:.2}\n",
            case.bytes() as f64 / 1e6,
            decode / minimum,
            decode / scan,
        );
    }
}

criterion_group!(benches, measure);
criterion_main!(benches);
