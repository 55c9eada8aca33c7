//! Compares ways to store routing rows: bytes per row, ratio, and speed both ways.
//!
//! `cargo run --release --example codecs -- NAME LAYERS EXPERTS TOP_K FILE …` reads files of bare
//! rows, `u8 [rows, layers, top_k]`; without arguments it makes uniform random sets.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "a measuring program, not a part of the library"
)]

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

fn table(name: &str, shape: Shape, data: &[u8], block_rows: usize) {
    let row = shape.layers * shape.k;
    let rows = data.len() / row;
    println!(
        "\n{name}: {rows} rows of {} layers, {} of {} experts, blocks of {block_rows} rows",
        shape.layers, shape.k, shape.experts
    );
    println!(
        "| codec | order | bytes/row | of raw | write MB/s | read MB/s |\n|---|---|---|---|---|---|"
    );
    for (codec, ordered, encode, decode) in codecs(shape) {
        let blocks: Vec<&[u8]> = data.chunks(block_rows * row).collect();
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
        let write = time(&mut || packed = blocks.iter().map(|b| encode(b)).collect());
        let mut back: Vec<Vec<u8>> = Vec::new();
        let read = time(&mut || {
            back = packed.iter().zip(&blocks).map(|(p, b)| decode(p, b.len())).collect();
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
        let megabytes = data.len() as f64 / 1e6;
        println!(
            "| {codec} | {} | {:.1} | {:.3} | {:.0} | {:.0} |",
            if ordered { "kept" } else { "lost" },
            bytes as f64 / rows as f64,
            bytes as f64 / data.len() as f64,
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

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut sources = Vec::new();
    if args.is_empty() {
        let shape = Shape { layers: 48, experts: 128, k: 8 };
        sources.push(("uniform".to_owned(), shape, uniform(shape, 8192)));
    }
    for source in args.chunks_exact(5) {
        let number = |i: usize| source[i].parse().unwrap();
        let shape = Shape { layers: number(1), experts: number(2), k: number(3) };
        sources.push((source[0].clone(), shape, std::fs::read(&source[4]).unwrap()));
    }
    for (name, shape, data) in sources {
        for block_rows in [64, 8192] {
            table(&name, shape, &data, block_rows);
        }
    }
}
