//! Joining replies into one mask, and storing the mask.

#![expect(clippy::unwrap_used, reason = "test helpers")]

use orchestrate_routing::{
    MaskBuilder, PushReport, RoutedRows, RoutingError, RoutingMask, RowVersion,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use proptest::prelude::*;
use std::sync::Arc;

fn shape(experts: usize) -> Arc<ModelShape> {
    Arc::new(ModelShape {
        hidden_layers: 3,
        moe_layers: vec![0, 2],
        experts,
        top_k: 2,
        vocab: 100,
        context: 1000,
    })
}

fn cell(seed: usize, experts: usize) -> [u16; 2] {
    let first = seed * 5 % experts;
    let second = (first + 1 + seed % (experts - 1)) % experts;
    [u16::try_from(first).unwrap(), u16::try_from(second).unwrap()]
}

fn ids(shape: &ModelShape, start: usize, end: usize) -> Vec<u16> {
    (start..end)
        .flat_map(|row| (0..2).flat_map(move |layer| cell(row * 2 + layer, shape.experts)))
        .collect()
}

fn rows(shape: &ModelShape, start: usize, end: usize) -> RoutedRows {
    RoutedRows::from_ids(shape, start, &ids(shape, start, end)).unwrap()
}

const V: PolicyVersion = PolicyVersion(3);

#[test]
fn a_whole_sequence_payload_after_a_resume_is_not_appended_twice() {
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 19), 20, V).unwrap();
    let report = builder.push(rows(&shape, 0, 39), 40, V).unwrap();
    assert_eq!(report, PushReport { new_rows: 20, overlap_rows: 19, drift_rows: 0, mixed_rows: 0 });
    assert_eq!(builder.push(rows(&shape, 0, 39), 40, V).unwrap().new_rows, 0);
    let mask = builder.finish(40).unwrap();
    assert_eq!(mask.rows(), 39);
    assert_eq!(mask.to_vec(), rows(&shape, 0, 39).to_vec());
}

#[test]
fn a_later_prefill_under_new_weights_does_not_overwrite_and_is_counted() {
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 9), 10, PolicyVersion(1)).unwrap();
    let mut later = ids(&shape, 0, 14);
    later[4 * 4] = (0..8).find(|id| *id != later[16] && *id != later[17]).unwrap();
    later.swap(6 * 4, 6 * 4 + 1); // another slot order is the same choice
    let later = RoutedRows::from_ids(&shape, 0, &later).unwrap();
    let report = builder.push(later, 15, PolicyVersion(2)).unwrap();
    assert_eq!(report, PushReport { new_rows: 5, overlap_rows: 9, drift_rows: 1, mixed_rows: 0 });
    let mask = builder.finish(15).unwrap();
    assert_eq!(mask.to_vec(), rows(&shape, 0, 14).to_vec());
    assert_eq!(
        mask.versions(),
        [
            RowVersion { start: 0, end: 9, version: PolicyVersion(1) },
            RowVersion { start: 9, end: 14, version: PolicyVersion(2) },
        ]
    );
}

#[test]
fn stale_rows_of_a_prefix_loaded_from_elsewhere_are_counted_and_never_replace_held_ones() {
    // The KV of the prefix came back from an offload tier into slots with other requests' rows.
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 19), 20, V).unwrap();
    let mut stale = ids(&shape, 100, 119);
    stale.extend(ids(&shape, 19, 29));
    let start = builder.next_start();
    for from in [start, 0] {
        let reply = RoutedRows::from_ids(&shape, from, &stale[from * 4..]).unwrap();
        let report = builder.clone().push(reply, 30, V).unwrap();
        assert_eq!((report.new_rows, report.overlap_rows), (10, 19 - from));
        // One row of overlap is enough to detect it.
        assert!(report.drift_rows > 0 && report.drift_rows + 3 > report.overlap_rows);
    }
    let reply = RoutedRows::from_ids(&shape, start, &stale[start * 4..]).unwrap();
    builder.push(reply, 30, V).unwrap();
    assert_eq!(builder.finish(30).unwrap().to_vec(), rows(&shape, 0, 29).to_vec());
}

#[test]
fn the_row_of_the_last_sampled_token_waits_for_the_next_turn() {
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    assert_eq!(builder.next_start(), 0);
    builder.push(rows(&shape, 0, 7), 8, V).unwrap();
    assert_eq!((builder.rows(), builder.next_start()), (7, 6));
    assert_eq!(
        builder.push(rows(&shape, 8, 11), 12, V).unwrap_err(),
        RoutingError::Gap { have: 7, start: 8 }
    );
    assert_eq!(
        builder.push(rows(&shape, 6, 12), 12, V).unwrap_err(),
        RoutingError::BeyondEnd { end: 12, tokens: 12 }
    );
    let report = builder.push(rows(&shape, 6, 11), 12, V).unwrap();
    assert_eq!(report, PushReport { new_rows: 4, overlap_rows: 1, drift_rows: 0, mixed_rows: 0 });
    assert_eq!(builder.finish(12).unwrap().to_vec(), rows(&shape, 0, 11).to_vec());
}

#[test]
fn a_mask_without_exactly_tokens_minus_one_rows_is_rejected() {
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 7), 8, V).unwrap();
    for tokens in [0, 1, 7, 9] {
        assert_eq!(
            builder.clone().finish(tokens).unwrap_err(),
            RoutingError::Incomplete { rows: 7, tokens }
        );
    }
    assert_eq!(builder.finish(8).unwrap().rows(), 7);
}

#[test]
fn truncation_cuts_rows_and_makes_the_new_last_token_pending() {
    let shape = shape(8);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 4), 5, PolicyVersion(1)).unwrap();
    builder.push(rows(&shape, 4, 9), 10, PolicyVersion(2)).unwrap();
    builder.truncate(4);
    assert_eq!(builder.rows(), 3);
    builder.truncate(100);
    let mask = builder.finish(4).unwrap();
    assert_eq!(mask.versions(), [RowVersion { start: 0, end: 3, version: PolicyVersion(1) }]);
}

#[test]
fn rows_of_a_different_width_are_rejected() {
    let (narrow, wide) = (shape(8), shape(300));
    let mut builder = MaskBuilder::new(narrow.clone()).unwrap();
    let error = builder.push(rows(&wide, 0, 3), 4, V).unwrap_err();
    assert_eq!(error, RoutingError::RowBytes { found: 8, expected: 4 });
}

#[test]
fn rows_are_read_by_position_and_global_layer() {
    let shape = shape(300);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 70), 71, V).unwrap();
    let mask = builder.finish(71).unwrap();
    let expected: Vec<usize> = cell(61 * 2 + 1, 300).iter().map(|&id| usize::from(id)).collect();
    assert_eq!(mask.experts(61, 2).unwrap(), expected);
    assert_eq!(mask.experts(61, 1), None, "a dense layer");
    assert_eq!(mask.experts(70, 2), None, "the last token has no row");
    assert_eq!(mask.row(usize::MAX), None);
}

#[test]
fn masks_are_built_only_from_valid_parts() {
    let shape = shape(8);
    let data = rows(&shape, 0, 5).to_vec();
    let range = |start, end| RowVersion { start, end, version: V };
    let build = |data: &[u8], versions: &[RowVersion]| {
        RoutingMask::new(shape.clone(), data, versions.to_vec())
    };
    assert_eq!(build(&data, &[range(0, 2), range(2, 5)]).unwrap().rows(), 5);
    for versions in [
        vec![],
        vec![range(0, 4)],
        vec![range(0, 6)],
        vec![range(1, 5)],
        vec![range(0, 2), range(2, 2), range(2, 5)],
    ] {
        assert_eq!(build(&data, &versions), Err(RoutingError::Versions { rows: 5 }));
    }
    assert!(matches!(build(&data[1..], &[range(0, 4)]), Err(RoutingError::RowBytes { .. })));
    let mut repeated = data.clone();
    repeated[8] = repeated[9];
    assert!(matches!(build(&repeated, &[range(0, 5)]), Err(RoutingError::Repeated { .. })));
}

fn stored() -> (RoutingMask, Vec<u8>) {
    let shape = shape(300);
    let mut builder = MaskBuilder::new(shape.clone()).unwrap();
    builder.push(rows(&shape, 0, 4), 5, PolicyVersion(1)).unwrap();
    builder.push(rows(&shape, 3, 9), 10, PolicyVersion(2)).unwrap();
    let mask = builder.finish(10).unwrap();
    let bytes = mask.to_bytes();
    (mask, bytes)
}

#[test]
fn every_flipped_bit_of_a_stored_mask_is_detected() {
    let (mask, bytes) = stored();
    assert_eq!(RoutingMask::from_bytes(&bytes).unwrap(), mask);
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            // The minor version is covered by the checksum, too.
            assert!(RoutingMask::from_bytes(&bad).is_err(), "byte {at} bit {bit}");
        }
    }
}

#[test]
fn every_prefix_of_a_stored_mask_is_refused() {
    let (_, bytes) = stored();
    for end in 0..bytes.len() {
        assert!(RoutingMask::from_bytes(&bytes[..end]).is_err(), "{end}");
    }
    assert!(RoutingMask::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
}

/// Encodes a mask in format version 1: uncompressed rows, then the BLAKE3 digest of all bytes before
/// it.
fn version_one(mask: &RoutingMask) -> Vec<u8> {
    let shape = mask.shape();
    let mut out = b"ORMK\x01\0\0\0".to_vec();
    out.extend((mask.rows() as u64).to_le_bytes());
    for n in [shape.hidden_layers, shape.moe_layers.len(), shape.experts, shape.top_k] {
        out.extend(u32::try_from(n).unwrap().to_le_bytes());
    }
    out.extend((shape.vocab as u64).to_le_bytes());
    out.extend((shape.context as u64).to_le_bytes());
    out.extend(u32::try_from(mask.versions().len()).unwrap().to_le_bytes());
    for &layer in &shape.moe_layers {
        out.extend(u32::try_from(layer).unwrap().to_le_bytes());
    }
    for range in mask.versions() {
        out.extend((range.end as u64).to_le_bytes());
        out.extend(range.version.0.to_le_bytes());
    }
    out.extend(mask.to_vec());
    let digest = blake3::hash(&out);
    out.extend(digest.as_bytes());
    out
}

#[test]
fn version_1_masks_are_read_and_damage_in_them_is_detected() {
    let (mask, _) = stored();
    let old = version_one(&mask);
    assert_eq!(RoutingMask::from_bytes(&old).unwrap(), mask);
    for at in 0..old.len() {
        let mut bad = old.clone();
        bad[at] ^= 1;
        assert!(RoutingMask::from_bytes(&bad).is_err(), "byte {at}");
        assert!(RoutingMask::from_bytes(&old[..at]).is_err(), "prefix {at}");
    }
}

#[test]
fn newer_major_version_is_rejected_with_its_number() {
    let (_, mut bytes) = stored();
    bytes[4] = 3;
    assert_eq!(
        RoutingMask::from_bytes(&bytes).unwrap_err(),
        RoutingError::StoredVersion { major: 3, minor: 0 }
    );
}

/// One call to the engine: how the sequence grows, and how much overlap the payload has.
#[derive(Debug, Clone)]
struct Call {
    observation: usize,
    output: usize,
    overlap: usize,
    repeats: usize,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = (0usize..6, 0usize..8, 0usize..20, 0usize..3).prop_map(
        |(observation, output, overlap, repeats)| Call { observation, output, overlap, repeats },
    );
    proptest::collection::vec(call, 1..8)
}

proptest! {
    #[test]
    fn prop_mask_is_independent_of_turns_aborts_resumes_and_repeats(calls in calls()) {
        let shape = shape(8);
        let mut builder = MaskBuilder::new(shape.clone()).unwrap();
        let mut total = 2;
        for (turn, call) in calls.iter().enumerate() {
            total += call.observation + call.output;
            let start = builder.rows().saturating_sub(call.overlap);
            let payload = rows(&shape, start, (total - 1).max(start));
            let version = PolicyVersion(turn as u64 / 2);
            for _ in 0..=call.repeats {
                let report = builder.push(payload.clone(), total, version).unwrap();
                prop_assert_eq!(report.drift_rows, 0);
                prop_assert_eq!(report.new_rows + report.overlap_rows, payload.rows());
            }
            prop_assert_eq!(builder.rows(), total - 1);
        }
        let mask = builder.finish(total).unwrap();
        let whole = rows(&shape, 0, total - 1);
        prop_assert_eq!(mask.to_vec(), whole.to_vec());
        prop_assert_eq!(mask.versions().last().unwrap().end, total - 1);
        prop_assert_eq!(RoutingMask::from_bytes(&mask.to_bytes()).unwrap(), mask);
    }

    #[test]
    fn prop_drift_compares_expert_sets_not_their_order(
        swaps in proptest::collection::vec(any::<bool>(), 10),
        changes in proptest::collection::vec(any::<bool>(), 10),
    ) {
        let shape = shape(8);
        let mut builder = MaskBuilder::new(shape.clone()).unwrap();
        builder.push(rows(&shape, 0, 10), 11, V).unwrap();
        let mut again = ids(&shape, 0, 10);
        for row in 0..10 {
            if swaps[row] {
                again.swap(row * 4 + 2, row * 4 + 3);
            }
            if changes[row] {
                let (a, b) = (again[row * 4], again[row * 4 + 1]);
                again[row * 4] = (0..8).find(|id| *id != a && *id != b).unwrap();
            }
        }
        let again = RoutedRows::from_ids(&shape, 0, &again).unwrap();
        let report = builder.push(again, 11, V).unwrap();
        prop_assert_eq!(report.drift_rows, changes.iter().filter(|&&c| c).count());
        let (mask, first) = (builder.finish(11).unwrap(), rows(&shape, 0, 10));
        prop_assert_eq!(mask.to_vec(), first.to_vec());
    }
}
