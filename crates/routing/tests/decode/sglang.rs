//! SGLang's int32 form: accepted payloads, and errors with their position for all others.

use super::{shape, text, varied, wire};
use orchestrate_routing::{
    MaskBuilder, PayloadForm, PushReport, RoutedRows, RoutingError, WireForm, decode, encode_npy,
    encode_sglang,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use proptest::prelude::*;
use std::sync::Arc;

fn decode_sglang(
    base64: &str,
    shape: &ModelShape,
    start: usize,
    tokens_total: usize,
) -> Result<RoutedRows, RoutingError> {
    decode(WireForm::SglangI32, base64.as_bytes(), shape, start, tokens_total)
}

fn patched(shape: &ModelShape, rows: usize, at_id: usize, id: i32) -> String {
    let mut bytes = wire(shape, &varied(shape, rows));
    bytes[4 * at_id..4 * at_id + 4].copy_from_slice(&id.to_le_bytes());
    text(&bytes)
}

#[test]
fn published_example_decodes() {
    let shape = shape(2, &[0, 1], 8, 2);
    let payload = "AQAAAAIAAAADAAAABAAAAAUAAAAGAAAABwAAAAAAAAA=";
    let rows = decode_sglang(payload, &shape, 3, 6).unwrap();
    assert_eq!((rows.start(), rows.rows(), rows.form()), (3, 2, PayloadForm::Exact));
    assert_eq!(rows.to_vec(), [1, 2, 3, 4, 5, 6, 7, 0]);
    assert_eq!(rows.row(4).unwrap(), [5, 6, 7, 0]);
    assert_eq!(rows.row(5), None);
    assert_eq!(encode_sglang(&rows, &shape).unwrap(), payload);
}

#[test]
fn an_empty_payload_has_no_rows() {
    let shape = shape(2, &[0, 1], 8, 2);
    for (start, total) in [(0, 0), (0, 1), (4, 5), (5, 5)] {
        assert_eq!(decode_sglang("", &shape, start, total).unwrap().rows(), 0);
    }
    assert!(matches!(
        decode_sglang("", &shape, 6, 5),
        Err(RoutingError::StartBeyondEnd { start: 6, tokens: 5 })
    ));
    assert!(decode_sglang("", &shape, 0, 5).is_err());
}

#[test]
fn one_surplus_row_at_the_end_is_dropped_and_reported() {
    let shape = shape(2, &[0, 1], 8, 2);
    let ids = varied(&shape, 10);
    for start in [0, 3, 5] {
        let payload = text(&wire(&shape, &ids[start * shape.ids_per_row()..]));
        let rows = decode_sglang(&payload, &shape, start, 10).unwrap();
        assert_eq!((rows.rows(), rows.form()), (9 - start, PayloadForm::SurplusRow));
        let exact = RoutedRows::from_ids(&shape, start, &ids[start * 4..9 * 4]).unwrap();
        assert_eq!(rows.to_vec(), exact.to_vec());
        assert!(decode_sglang(&payload, &shape, start, 9).is_err(), "two surplus rows");
    }
}

#[test]
fn only_the_tail_is_decoded_when_the_engine_ignores_the_start() {
    let shape = shape(2, &[0, 1], 8, 2);
    let ids = varied(&shape, 20);
    for start in 2..20 {
        let payload = text(&wire(&shape, &ids));
        let rows = decode_sglang(&payload, &shape, start, 21).unwrap();
        assert_eq!((rows.start(), rows.rows()), (start, 20 - start));
        assert_eq!(rows.form(), PayloadForm::WholeSequence);
        let tail = RoutedRows::from_ids(&shape, start, &ids[start * 4..]).unwrap();
        assert_eq!(rows.to_vec(), tail.to_vec());
    }
    // One row more than asked for from start 1 may be either deviation.
    let payload = text(&wire(&shape, &ids));
    let error = decode_sglang(&payload, &shape, 1, 21).unwrap_err();
    assert!(error.to_string().contains("cannot tell apart"), "{error}");
}

#[test]
fn rows_before_the_overlap_row_of_a_whole_sequence_are_skipped_and_that_row_is_compared() {
    let shape = Arc::new(shape(2, &[0, 1], 8, 2));
    let ids = varied(&shape, 40);
    let row_ids = shape.ids_per_row();
    let rows = |start: usize, end: usize| {
        RoutedRows::from_ids(&shape, start, &ids[start * row_ids..end * row_ids]).unwrap()
    };
    let mut held = MaskBuilder::new(shape.clone()).unwrap();
    held.push(rows(0, 19), 20, PolicyVersion(0)).unwrap();
    let start = held.next_start();
    assert_eq!(start, 18);
    let joined = |payload: &str| {
        let rows = decode_sglang(payload, &shape, start, 40)?;
        assert_eq!(rows.form(), PayloadForm::WholeSequence);
        let mut builder = held.clone();
        let report = builder.push(rows, 40, PolicyVersion(0))?;
        Ok::<_, RoutingError>((report, builder.finish(40)?.to_vec()))
    };
    let right = (
        PushReport { new_rows: 20, overlap_rows: 1, drift_rows: 0, mixed_rows: 0 },
        rows(0, 39).to_vec(),
    );
    let whole = wire(&shape, &ids[..39 * row_ids]);
    assert_eq!(joined(&text(&whole)).unwrap(), right);

    // Unneeded rows may hold anything: the rows held were checked when they arrived.
    let skipped = start * row_ids * 4;
    let mut noise = whole.clone();
    noise[..skipped].fill(0xff);
    let mut noise = text(&noise);
    noise.replace_range(0..4, "!!!!");
    assert_eq!(joined(&noise).unwrap(), right);

    // From the overlap row on everything is checked.
    let mut bad = whole.clone();
    bad[skipped..skipped + 4].copy_from_slice(&8i32.to_le_bytes());
    assert_eq!(
        joined(&text(&bad)).unwrap_err(),
        RoutingError::ExpertRange { position: 18, layer: 0, id: 8, experts: 8 }
    );

    // Rows of other positions are detected, and the held row is kept.
    let shifted = wire(&shape, &ids[row_ids..40 * row_ids]);
    let (report, bytes) = joined(&text(&shifted)).unwrap();
    assert_eq!((report.overlap_rows, report.drift_rows), (1, 1));
    assert_eq!(bytes[..19 * shape.row_bytes()], right.1[..19 * shape.row_bytes()]);
}

#[test]
fn physical_ids_of_a_load_balancer_with_spare_experts_are_refused() {
    // 64 experts of the model in 72 physical slots: slot ids exceed the model's range.
    let model = shape(2, &[0, 1], 64, 2);
    let places = ModelShape { experts: 72, ..model.clone() };
    let payload = text(&wire(&places, &varied(&places, 40)));
    let error = decode_sglang(&payload, &model, 0, 41).unwrap_err();
    let RoutingError::ExpertRange { id: 64..72, experts: 64, .. } = error else {
        panic!("{error}");
    };
    assert!(error.to_string().contains("EPLB"), "{error}");
    let error = RoutingError::ExpertRange { position: 0, layer: 0, id: -1, experts: 64 };
    assert!(!error.to_string().contains("EPLB"), "{error}");
}

#[test]
fn rows_missing_past_the_end_of_a_capture_buffer_are_refused() {
    // A prefill of 600 tokens through a buffer of 512: the rest is missing or zero.
    let shape = shape(2, &[0, 1], 8, 2);
    let ids = varied(&shape, 600);
    let short = text(&wire(&shape, &ids[..512 * shape.ids_per_row()]));
    let error = decode_sglang(&short, &shape, 0, 601).unwrap_err();
    assert!(matches!(error, RoutingError::Length { rows: 600, .. }), "{error}");
    let mut zeros = ids;
    zeros[512 * shape.ids_per_row()..].fill(0);
    let error = decode_sglang(&text(&wire(&shape, &zeros)), &shape, 0, 601).unwrap_err();
    assert_eq!(error, RoutingError::NotCaptured { position: 512, layer: 0 });
}

#[test]
fn all_zero_captures_are_refused() {
    for (experts, top_k) in [(8, 2), (300, 2), (8, 1)] {
        let shape = shape(2, &[0, 1], experts, top_k);
        let payload = text(&wire(&shape, &vec![0; 10 * shape.ids_per_row()]));
        let error = decode_sglang(&payload, &shape, 0, 11).unwrap_err();
        assert_eq!(error, RoutingError::NotCaptured { position: 0, layer: 0 });
    }
    // With few rows, a layer of zeros at top-1 may be a coincidence.
    let shape = shape(2, &[0, 1], 8, 1);
    let payload = text(&wire(&shape, &[0; 6]));
    assert_eq!(decode_sglang(&payload, &shape, 0, 4).unwrap().rows(), 3);
}

#[test]
fn one_layer_sent_for_all_is_refused() {
    let shape = shape(4, &[0, 1, 2, 3], 64, 2);
    let ids: Vec<u16> =
        (0..20u16).flat_map(|row| (0..4).flat_map(move |_| [row, row + 1])).collect();
    let error = decode_sglang(&text(&wire(&shape, &ids)), &shape, 0, 21).unwrap_err();
    assert_eq!(error, RoutingError::LayersIdentical { rows: 20, layers: 4 });
    assert!(decode_sglang(&text(&wire(&shape, &ids[..80])), &shape, 0, 11).is_ok(), "few rows");
}

#[test]
fn equal_layers_of_repeated_tokens_are_accepted() {
    let shape = shape(2, &[0, 1], 8, 2);
    let ids = [3u16, 4, 3, 4].repeat(20);
    assert_eq!(decode_sglang(&text(&wire(&shape, &ids)), &shape, 0, 21).unwrap().rows(), 20);
}

#[test]
fn invalid_ids_are_reported_with_position_and_global_layer() {
    let shape = shape(3, &[1, 2], 8, 2);
    // Row 2 on the wire: 6 ids; dense layer 0 is ids 0..2, layer 1 ids 2..4.
    let at = 2 * 6;
    for (slot, id, expected) in [
        (2, 8, RoutingError::ExpertRange { position: 7, layer: 1, id: 8, experts: 8 }),
        (5, -1, RoutingError::ExpertRange { position: 7, layer: 2, id: -1, experts: 8 }),
        (2, 70_000, RoutingError::ExpertRange { position: 7, layer: 1, id: 70_000, experts: 8 }),
        (0, 1, RoutingError::DenseLayer { position: 7, layer: 0 }),
    ] {
        let payload = patched(&shape, 5, at + slot, id);
        assert_eq!(decode_sglang(&payload, &shape, 5, 11).unwrap_err(), expected);
    }
    let first = i32::from(varied(&shape, 5)[2 * 4]);
    let payload = patched(&shape, 5, at + 3, first);
    assert_eq!(
        decode_sglang(&payload, &shape, 5, 11).unwrap_err(),
        RoutingError::Repeated { position: 7, layer: 1, id: usize::try_from(first).unwrap() }
    );
}

#[test]
fn dense_layers_are_dropped_by_number() {
    let shape = shape(5, &[1, 3], 8, 2);
    let ids = varied(&shape, 6);
    let rows = decode_sglang(&text(&wire(&shape, &ids)), &shape, 0, 7).unwrap();
    let plain: Vec<u16> = rows.to_vec().iter().map(|&id| u16::from(id)).collect();
    assert_eq!(plain, ids);
    let shifted = ModelShape { moe_layers: vec![1, 2], ..shape.clone() };
    let error = decode_sglang(&text(&wire(&shape, &ids)), &shifted, 0, 7).unwrap_err();
    assert!(
        matches!(
            error,
            RoutingError::NotCaptured { layer: 2, .. } | RoutingError::DenseLayer { layer: 3, .. }
        ),
        "{error}"
    );
}

#[test]
fn id_width_follows_the_model_not_the_data() {
    let narrow = shape(1, &[0], 256, 2);
    let wide = shape(1, &[0], 257, 2);
    let payload = text(&wire(&narrow, &[1, 2, 3, 4]));
    assert_eq!(decode_sglang(&payload, &narrow, 0, 3).unwrap().to_vec(), [1, 2, 3, 4]);
    assert_eq!(decode_sglang(&payload, &wide, 0, 3).unwrap().to_vec(), [1, 0, 2, 0, 3, 0, 4, 0]);
    let error = RoutedRows::from_ids(&narrow, 4, &[1, 2, 3, 256]).unwrap_err();
    assert_eq!(error, RoutingError::ExpertRange { position: 5, layer: 0, id: 256, experts: 256 });
}

#[test]
fn extra_columns_are_refused_with_the_flag_to_turn_off() {
    let served = shape(2, &[0, 1], 9, 3);
    let configured = ModelShape { top_k: 2, ..served.clone() };
    let payload = text(&wire(&served, &varied(&served, 5)));
    let error = decode_sglang(&payload, &configured, 0, 6).unwrap_err();
    assert!(error.to_string().contains("--disable-shared-experts-fusion"), "{error}");
}

#[test]
fn a_valid_payload_cut_short_or_missing_a_group_is_refused() {
    let shape = shape(2, &[1], 8, 2);
    let payload = text(&wire(&shape, &varied(&shape, 7)));
    for end in 0..payload.len() {
        assert!(decode_sglang(&payload[..end], &shape, 3, 11).is_err(), "prefix of {end}");
    }
    for at in (0..payload.len()).step_by(4) {
        let cut = format!("{}{}", &payload[..at], &payload[(at + 4).min(payload.len())..]);
        assert!(decode_sglang(&cut, &shape, 3, 11).is_err(), "without group at {at}");
    }
}

#[test]
fn other_alphabets_white_space_and_inner_padding_are_refused() {
    let shape = shape(1, &[0], 256, 2);
    let payload = text(&wire(&shape, &[62 << 2, 255, 3, 4, 5, 6]));
    assert!(decode_sglang(&payload, &shape, 0, 4).is_ok());
    for wrong in ["\n", " ", "-", "_", "=", "\u{e9}", "\0"] {
        for at in 0..payload.len() - wrong.len() {
            let mut bad = payload.clone();
            bad.replace_range(at..at + wrong.len(), wrong);
            assert!(decode_sglang(&bad, &shape, 0, 4).is_err(), "{wrong:?} at {at}");
        }
    }
    let trailing_bits = format!("{}//", &payload[..payload.len() - 2]);
    assert!(decode_sglang(&trailing_bits, &shape, 0, 4).is_err());
}

#[test]
fn large_payloads_decode_across_blocks() {
    let layers: Vec<usize> = (0..48).collect();
    let shape = shape(48, &layers, 128, 8);
    let ids = varied(&shape, 200);
    let payload = text(&wire(&shape, &ids));
    let rows = decode_sglang(&payload, &shape, 0, 201).unwrap();
    assert!(rows.to_vec().iter().map(|&id| u16::from(id)).eq(ids.iter().copied()));
    let tail = decode_sglang(&payload, &shape, 131, 201).unwrap();
    assert_eq!(tail.to_vec(), &rows.to_vec()[131 * shape.row_bytes()..]);
    assert_eq!(encode_sglang(&rows, &shape).unwrap(), payload);
}

#[test]
fn shapes_without_rows_are_refused() {
    let good = shape(2, &[0, 1], 8, 2);
    for bad in [
        ModelShape { moe_layers: vec![], ..good.clone() },
        ModelShape { moe_layers: vec![1, 0], ..good.clone() },
        ModelShape { moe_layers: vec![0, 2], ..good.clone() },
        ModelShape { top_k: 0, ..good.clone() },
        ModelShape { top_k: 9, ..good.clone() },
        ModelShape { experts: 65_537, ..good.clone() },
        ModelShape { hidden_layers: usize::MAX, ..good.clone() },
    ] {
        assert!(matches!(decode_sglang("", &bad, 0, 0), Err(RoutingError::Shape(_))), "{bad:?}");
    }
}

proptest! {
    #[test]
    fn prop_encoded_rows_round_trip(
        dense in 0usize..3,
        moe in 1usize..4,
        top_k in 1usize..4,
        experts in prop_oneof![4usize..20, 250usize..400],
        rows in 0usize..8,
        start in 0usize..50,
    ) {
        let layers: Vec<usize> = (dense..dense + moe).collect();
        let shape = shape(dense + moe, &layers, experts, top_k);
        let ids: Vec<u16> = varied(&shape, rows).iter().map(|id| id + 1)
            .map(|id| if usize::from(id) == experts { 0 } else { id }).collect();
        let made = RoutedRows::from_ids(&shape, start, &ids).unwrap();
        let payload = encode_sglang(&made, &shape).unwrap();
        prop_assert_eq!(&payload, &text(&wire(&shape, &ids)));
        let read = decode_sglang(&payload, &shape, start, start + rows + 1).unwrap();
        prop_assert_eq!(read, made);
    }

    #[test]
    fn prop_proper_prefixes_of_a_valid_payload_are_refused(
        hidden in 1usize..4,
        experts in prop_oneof![4usize..20, 250usize..400],
        top_k in 1usize..4,
        rows in 1usize..70,
        start in 0usize..90,
        cut in any::<prop::sample::Index>(),
        npy in any::<bool>(),
    ) {
        let layers: Vec<usize> = (0..hidden).collect();
        let shape = shape(hidden, &layers, experts, top_k);
        let made = RoutedRows::from_ids(&shape, start, &varied(&shape, rows));
        prop_assume!(made.is_ok());
        let made = made.unwrap();
        let (form, payload) = if npy {
            (WireForm::VllmNpy, encode_npy(&made, &shape).unwrap())
        } else {
            (WireForm::SglangI32, encode_sglang(&made, &shape).unwrap())
        };
        let tokens = start + rows + 1;
        prop_assert_eq!(decode(form, payload.as_bytes(), &shape, start, tokens).unwrap(), made);
        let prefix = &payload.as_bytes()[..cut.index(payload.len())];
        prop_assert!(decode(form, prefix, &shape, start, tokens).is_err(), "{} bytes", prefix.len());
    }

    #[test]
    fn prop_decoder_never_panics(
        payload in "[A-Za-z0-9+/=]{0,80}",
        start in 0usize..10,
        total in 0usize..12,
        hidden in 1usize..4,
        top_k in 1usize..3,
    ) {
        let shape = shape(hidden, &[hidden - 1], 4, top_k);
        if let Ok(rows) = decode_sglang(&payload, &shape, start, total) {
            prop_assert_eq!(rows.rows(), total.saturating_sub(1).saturating_sub(start));
        }
    }

    #[test]
    fn prop_swapped_layers_and_top_k_are_refused(rows in 1usize..8) {
        // 4 layers × top-2 and 2 layers × top-4 have the same product: ids then repeat.
        let served = shape(4, &[0, 1, 2, 3], 8, 2);
        let configured = shape(2, &[0, 1], 8, 4);
        let ids: Vec<u16> = [1u16, 2, 2, 3, 4, 5, 5, 6].repeat(rows);
        let error = decode_sglang(&text(&wire(&served, &ids)), &configured, 0, rows + 1).unwrap_err();
        prop_assert_eq!(error, RoutingError::Repeated { position: 0, layer: 0, id: 2 });
    }
}
