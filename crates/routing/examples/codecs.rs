//! Compares encodings of routing rows: bytes per row, compression ratio, and speed both ways.
//!
//! `cargo run --release --example codecs -- NAME LAYERS EXPERTS TOP_K PATH …` reads a file of
//! uncompressed rows, `u8 [rows, layers, top_k]`, or a folder of recorded traffic with SGLang or vLLM: JSON
//! files with a list `exchanges` of `request.body_raw` and `response.body_raw`. Without arguments it
//! generates uniform random sets.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "a measurement program, not part of the library"
)]

use serde_json::Value;
use std::path::Path;
use std::time::Instant;

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    experts: usize,
    k: usize,
}

type Codec = (String, bool, Box<dyn Fn(&[u8]) -> Vec<u8>>, Box<dyn Fn(&[u8], usize) -> Vec<u8>>);

fn zstd_codec(
    level: i32,
    name: &str,
    pre: fn(&[u8], usize) -> Vec<u8>,
    post: fn(&[u8], usize) -> Vec<u8>,
    row: usize,
) -> Codec {
    (
        format!("{name}zstd {level}"),
        true,
        Box::new(move |data| zstd::bulk::compress(&pre(data, row), level).unwrap()),
        Box::new(move |data, len| post(&zstd::bulk::decompress(data, len).unwrap(), row)),
    )
}

fn same(data: &[u8], _: usize) -> Vec<u8> {
    data.to_vec()
}

fn transpose(data: &[u8], row: usize) -> Vec<u8> {
    let rows = data.len() / row;
    let mut out = vec![0; data.len()];
    for (r, bytes) in data.chunks_exact(row).enumerate() {
        for (c, &b) in bytes.iter().enumerate() {
            out[c * rows + r] = b;
        }
    }
    out
}

fn untranspose(data: &[u8], row: usize) -> Vec<u8> {
    transpose(data, data.len() / row)
}

fn delta(data: &[u8], row: usize) -> Vec<u8> {
    let mut out = data.to_vec();
    for at in row..data.len() {
        out[at] = data[at].wrapping_sub(data[at - row]);
    }
    out
}

fn undelta(data: &[u8], row: usize) -> Vec<u8> {
    let mut out = data.to_vec();
    for at in row..data.len() {
        out[at] = out[at].wrapping_add(out[at - row]);
    }
    out
}

/// `table[i][c]` = C(c, i + 1).
fn binomials(shape: Shape) -> Vec<Vec<u128>> {
    let mut row: Vec<u128> = vec![1; shape.experts + 1];
    (0..shape.k)
        .map(|_| {
            let mut next = vec![0u128; shape.experts + 1];
            for c in 1..=shape.experts {
                next[c] = next[c - 1] + row[c - 1];
            }
            row.clone_from(&next);
            next
        })
        .collect()
}

fn bits_of(count: u128) -> u32 {
    128 - (count - 1).leading_zeros()
}

fn rank_sets(data: &[u8], shape: Shape, table: &[Vec<u128>]) -> Vec<u8> {
    let bits = bits_of(table[shape.k - 1][shape.experts]);
    let (mut out, mut acc, mut have) = (Vec::with_capacity(data.len()), 0u128, 0);
    let mut cell = vec![0u8; shape.k];
    for ids in data.chunks_exact(shape.k) {
        cell.copy_from_slice(ids);
        cell.sort_unstable();
        let rank: u128 = cell.iter().zip(table).map(|(&c, t)| t[c as usize]).sum();
        acc |= rank << have;
        have += bits;
        while have >= 8 {
            out.push(acc as u8);
            acc >>= 8;
            have -= 8;
        }
    }
    out.push(acc as u8);
    out
}

fn unrank_sets(data: &[u8], len: usize, shape: Shape, table: &[Vec<u128>]) -> Vec<u8> {
    let bits = bits_of(table[shape.k - 1][shape.experts]);
    let (mut acc, mut have, mut at) = (0u128, 0, 0);
    let mut out = vec![0u8; len];
    for cell in out.chunks_exact_mut(shape.k) {
        while have < bits {
            acc |= u128::from(data[at]) << have;
            at += 1;
            have += 8;
        }
        let mut rank = acc & ((1 << bits) - 1);
        acc >>= bits;
        have -= bits;
        for i in (0..shape.k).rev() {
            let c = table[i].partition_point(|&count| count <= rank) - 1;
            rank -= table[i][c];
            cell[i] = c as u8;
        }
    }
    out
}

fn sort_cells(data: &[u8], k: usize) -> Vec<u8> {
    let mut out = data.to_vec();
    out.chunks_exact_mut(k).for_each(<[u8]>::sort_unstable);
    out
}

/// One bit per expert and cell.
fn bitmaps(data: &[u8], shape: Shape) -> Vec<u8> {
    let width = shape.experts.div_ceil(8);
    let mut out = vec![0u8; data.len() / shape.k * width];
    for (cell, bits) in data.chunks_exact(shape.k).zip(out.chunks_exact_mut(width)) {
        for &id in cell {
            bits[usize::from(id) / 8] |= 1 << (id % 8);
        }
    }
    out
}

fn codecs(shape: Shape) -> Vec<Codec> {
    let row = shape.layers * shape.k;
    let mut list: Vec<Codec> =
        vec![("raw".into(), true, Box::new(<[u8]>::to_vec), Box::new(|d, _| d.to_vec()))];
    for level in [-1, 1, 3, 9, 19] {
        list.push(zstd_codec(level, "", same, same, row));
    }
    for level in [1, 3, 9] {
        list.push(zstd_codec(level, "columns + ", transpose, untranspose, row));
    }
    list.push(zstd_codec(3, "delta + ", delta, undelta, row));
    list.push(zstd_codec(
        3,
        "delta + columns + ",
        |d, r| transpose(&delta(d, r), r),
        |d, r| undelta(&untranspose(d, r), r),
        row,
    ));
    let (a, b) = (binomials(shape), binomials(shape));
    list.push((
        "set rank".into(),
        false,
        Box::new(move |d| rank_sets(d, shape, &a)),
        Box::new(move |d, len| unrank_sets(d, len, shape, &b)),
    ));
    for level in [1, 9] {
        list.push((
            format!("sorted + columns + zstd {level}"),
            false,
            Box::new(move |d| {
                zstd::bulk::compress(&transpose(&sort_cells(d, shape.k), row), level).unwrap()
            }),
            Box::new(move |d, len| untranspose(&zstd::bulk::decompress(d, len).unwrap(), row)),
        ));
    }
    list.push((
        "bitmaps + zstd 3".into(),
        false,
        Box::new(move |d| zstd::bulk::compress(&bitmaps(d, shape), 3).unwrap()),
        Box::new(|d, _| d.to_vec()),
    ));
    list
}

/// Bytes of rows, `[rows, layers, top_k]`, of each sequence of a source.
struct Source {
    name: String,
    shape: Shape,
    sequences: Vec<Vec<u8>>,
}

fn table(source: &Source, block_rows: usize) {
    let Source { name, shape, sequences } = source;
    let shape = *shape;
    let row = shape.layers * shape.k;
    let data_bytes: usize = sequences.iter().map(Vec::len).sum();
    let rows = data_bytes / row;
    println!(
        "\n{name}: {rows} rows of {} layers, {} of {} experts, in {} sequences, blocks of {} rows",
        shape.layers,
        shape.k,
        shape.experts,
        sequences.len(),
        if block_rows == WHOLE { "all".to_owned() } else { block_rows.to_string() }
    );
    println!(
        "| codec | order | bytes/row | of raw | write MB/s | read MB/s |\n|---|---|---|---|---|---|"
    );
    let block_bytes = block_rows.saturating_mul(row);
    let blocks: Vec<&[u8]> = sequences.iter().flat_map(|data| data.chunks(block_bytes)).collect();
    // Small sources are repeated, so that every measurement covers about a megabyte.
    let repeats = (1_000_000 / data_bytes).max(1);
    for (codec, ordered, encode, decode) in codecs(shape) {
        let time = |work: &mut dyn FnMut()| {
            (0..3)
                .map(|_| {
                    let start = Instant::now();
                    work();
                    start.elapsed().as_secs_f64()
                })
                .fold(f64::MAX, f64::min)
        };
        let mut packed: Vec<Vec<u8>> = Vec::new();
        let write = time(&mut || {
            for _ in 0..repeats {
                packed = blocks.iter().map(|b| encode(b)).collect();
            }
        });
        let mut back: Vec<Vec<u8>> = Vec::new();
        let read = time(&mut || {
            for _ in 0..repeats {
                back = packed.iter().zip(&blocks).map(|(p, b)| decode(p, b.len())).collect();
            }
        });
        if !codec.starts_with("bitmaps") {
            for (found, block) in back.iter().zip(&blocks) {
                let same = if ordered {
                    found == block
                } else {
                    sort_cells(found, shape.k) == sort_cells(block, shape.k)
                };
                assert!(same, "{codec}");
            }
        }
        let bytes: usize = packed.iter().map(Vec::len).sum();
        let megabytes = (repeats * data_bytes) as f64 / 1e6;
        println!(
            "| {codec} | {} | {:.1} | {:.3} | {:.0} | {:.0} |",
            if ordered { "kept" } else { "lost" },
            bytes as f64 / rows as f64,
            bytes as f64 / data_bytes as f64,
            megabytes / write,
            megabytes / read,
        );
    }
}

/// Distinct ids per cell, every set equally likely.
fn uniform(shape: Shape, rows: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut data = Vec::new();
    for _ in 0..rows * shape.layers {
        let from = data.len();
        while data.len() < from + shape.k {
            let id = (next() >> 20) as u8 % shape.experts as u8;
            if !data[from..].contains(&id) {
                data.push(id);
            }
        }
    }
    data
}

/// Rows of the sequences in a folder of recordings whose rows were sent from the start, without those
/// that are a prefix of another.
fn recorded(folder: &Path, row: usize) -> Vec<Vec<u8>> {
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut found: Vec<Vec<u8>> = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        // Recordings of models with dense layers have rows of another shape.
        if file.extension().is_none_or(|ext| ext != "json") || name.starts_with("dense_layers") {
            continue;
        }
        let recording: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for exchange in recording["exchanges"].as_array().into_iter().flatten() {
            let body = |side: &str| exchange[side]["body_raw"].as_str().unwrap_or_default();
            let asked: Value = serde_json::from_str(body("request")).unwrap_or_default();
            let Ok(reply) = serde_json::from_str::<Value>(body("response")) else { continue };
            let starts = [
                &asked["routed_experts_start_len"],
                &asked["routed_experts_prompt_start"],
                &asked["sampling_params"]["routed_experts_prompt_start"],
            ];
            if starts.iter().all(|start| start.as_u64().unwrap_or(0) == 0) {
                payloads(&reply, &mut |text| found.push(stored(text)));
            }
        }
    }
    assert!(found.iter().all(|rows| rows.len() % row == 0), "rows of another shape");
    found.sort();
    let begins_next =
        |at: usize| found.get(at + 1).is_some_and(|next| next.starts_with(&found[at]));
    (0..found.len()).filter(|&at| !begins_next(at)).map(|at| found[at].clone()).collect()
}

/// Every text under the key `routed_experts`.
fn payloads(value: &Value, take: &mut impl FnMut(&str)) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                match value.as_str() {
                    Some(text) if key == "routed_experts" => take(text),
                    _ => payloads(value, take),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| payloads(item, take)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Stored form of a payload in either engine's format: one byte per id.
fn stored(base64: &str) -> Vec<u8> {
    let bytes = base64_simd::STANDARD.decode_to_vec(base64).unwrap();
    if bytes.starts_with(b"\x93NUMPY") {
        let data_at = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        return bytes[data_at..].to_vec();
    }
    let ids = bytes.as_chunks::<4>().0.iter().map(|id| i32::from_le_bytes(*id));
    ids.map(|id| u8::try_from(id).unwrap()).collect()
}

/// More rows than any sequence has.
const WHOLE: usize = 1 << 40;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut sources = Vec::new();
    if args.is_empty() {
        let shape = Shape { layers: 48, experts: 128, k: 8 };
        let sequences = vec![uniform(shape, 8192)];
        sources.push(Source { name: "uniform".to_owned(), shape, sequences });
    }
    for source in args.chunks_exact(5) {
        let number = |i: usize| source[i].parse().unwrap();
        let shape = Shape { layers: number(1), experts: number(2), k: number(3) };
        let (path, row) = (Path::new(&source[4]), shape.layers * shape.k);
        let sequences = if path.is_dir() {
            recorded(path, row)
        } else {
            std::fs::read(path).unwrap().chunks(8192 * row).map(<[u8]>::to_vec).collect()
        };
        sources.push(Source { name: source[0].clone(), shape, sequences });
    }
    for source in &sources {
        for block_rows in [64, WHOLE] {
            table(source, block_rows);
        }
    }
}
