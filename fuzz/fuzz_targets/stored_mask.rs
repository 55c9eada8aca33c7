//! Stored masks: only what was stored is read, even if the checksum was recomputed. Memory use is
//! bounded by the rows that exist.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, Model, Sent};
use orchestrate_fuzz::naive;
use orchestrate_routing::{RoutedRows, RoutingMask, RowVersion};
use orchestrate_types::PolicyVersion;
use std::sync::Arc;

#[derive(Debug, Arbitrary)]
struct Input {
    model: Model,
    sent: Sent,
    split: u8,
    changes: Vec<Change>,
    seal: bool,
}

/// Limit on memory: rows may be much larger than the compressed file that they are read from.
const CAP: usize = 4 << 20;

fuzz_target!(|input: Input| {
    let shape = input.model.shape();
    if !naive::usable(&shape) {
        return;
    }
    let ids = input.sent.wire_ids(&shape);
    let k = shape.top_k;
    let stored: Vec<u8> = ids
        .chunks_exact(k)
        .enumerate()
        .filter(|(cell, _)| shape.moe_layers.contains(&(cell % shape.hidden_layers)))
        .flat_map(|(_, cell)| cell)
        .flat_map(|id| id.to_le_bytes().into_iter().take(shape.id_bytes()))
        .collect();
    let Ok(rows) = RoutedRows::new(&shape, 0, &stored) else { return };
    let (rows, cut) = (rows.rows(), 1 + usize::from(input.split) % 8);
    let mut versions = Vec::new();
    for start in (0..rows).step_by(cut) {
        let version = PolicyVersion(start as u64);
        versions.push(RowVersion { start, end: (start + cut).min(rows), version });
    }
    let shape = Arc::new(shape);
    let mask = RoutingMask::new(shape, &stored, versions).expect("rows were checked");
    let whole = mask.to_bytes();
    assert_eq!(RoutingMask::from_bytes(&whole).as_ref(), Ok(&mask));

    let mut bytes = whole.clone();
    input::change(&mut bytes, &input.changes);
    let changed = bytes != whole;
    if input.seal {
        seal(&mut bytes);
        assert!(changed || bytes == whole, "this target computes another checksum than the mask");
    }
    let found = bounded(CAP, || RoutingMask::from_bytes(&bytes));
    match found {
        Ok(found) if input.seal => {
            // A different but valid mask: it can be stored and read again.
            assert_eq!(RoutingMask::from_bytes(&found.to_bytes()), Ok(found));
        }
        Ok(found) => assert!(!changed && found == mask, "changed bytes were accepted"),
        Err(error) => assert!(changed || input.seal, "stored bytes were rejected: {error}"),
    }
});

/// Recomputes the checksum, so that the code behind it is reached: that of version 1 covers all bytes
/// before it, that of version 2 header and frame.
fn seal(bytes: &mut [u8]) {
    let number = |bytes: &[u8], at: usize| {
        bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
    };
    if bytes.get(4) == Some(&1) {
        if let Some(at) = bytes.len().checked_sub(32) {
            let digest = *blake3::hash(&bytes[..at]).as_bytes();
            bytes[at..].copy_from_slice(&digest);
        }
        return;
    }
    let (layers, ranges, mixed) = (number(bytes, 20), number(bytes, 48), number(bytes, 52));
    let frame = 56 + 4 * layers + 16 * (ranges + mixed);
    let Some(at) = bytes.len().checked_sub(16).filter(|&at| at >= frame) else { return };
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(frame as u64).to_le_bytes()).update(&bytes[..at]);
    let mut sum = [0; 16];
    hasher.finalize_xof().fill(&mut sum);
    bytes[at..].copy_from_slice(&sum);
}
