//! vLLM's `.npy` form.

use super::{plain_base64, plain_rows, shape, text, varied};
use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError, WireForm, decode, encode_npy};
use orchestrate_types::ModelShape;
use proptest::prelude::*;

fn decode_npy(
    payload: &str,
    shape: &ModelShape,
    start: usize,
    tokens_total: usize,
) -> Result<RoutedRows, RoutingError> {
    decode(WireForm::VllmNpy, payload.as_bytes(), shape, start, tokens_total)
}

/// A file with an arbitrary header.
fn file(version: [u8; 2], header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY".to_vec();
    bytes.extend_from_slice(&version);
    let length = u32::try_from(header.len()).unwrap().to_le_bytes();
    bytes.extend_from_slice(if version[0] == 1 { &length[..2] } else { &length });
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn header(descr: &str, dims: [usize; 3]) -> String {
    let [rows, layers, top_k] = dims;
    format!(
        "{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {layers}, {top_k}), }}"
    )
}

/// Little-endian bytes of the ids, in the width that `descr` names.
fn data(descr: &str, ids: &[u16]) -> Vec<u8> {
    let width: usize = descr[2..].parse().unwrap();
    ids.iter().flat_map(|&id| u32::from(id).to_le_bytes().into_iter().take(width)).collect()
}

fn payload(descr: &str, shape: &ModelShape, ids: &[u16]) -> String {
    let rows = ids.len() / shape.ids_per_row();
    let header = header(descr, [rows, shape.hidden_layers, shape.top_k]);
    text(&file([1, 0], &header, &data(descr, ids)))
}

fn refusal(result: Result<RoutedRows, RoutingError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn files_written_by_numpy_decode() {
    let small = shape(2, &[0, 1], 8, 2);
    let u8_file = "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3No\
                   YXBlJzogKDEsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg\
                   ICAgICAgICAgICAgICAgICAgIAoBAgME";
    let rows = decode_npy(u8_file, &small, 4, 6).unwrap();
    assert_eq!((rows.start(), rows.to_vec()), (4, vec![1, 2, 3, 4]));
    assert_eq!(encode_npy(&rows, &small).unwrap(), u8_file);
    let wide = shape(2, &[0, 1], 300, 2);
    let u16_file = "k05VTVBZAQB2AHsnZGVzY3InOiAnPHUyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3No\
                    YXBlJzogKDEsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg\
                    ICAgICAgICAgICAgICAgICAgIAoBAAIAAwAEAA==";
    let rows = decode_npy(u16_file, &wide, 0, 2).unwrap();
    assert_eq!(rows.to_vec(), [1, 0, 2, 0, 3, 0, 4, 0]);
    assert_eq!(encode_npy(&rows, &wide).unwrap(), u16_file);
}

#[test]
fn stored_width_follows_the_model_not_the_file() {
    for experts in [8, 256, 257, 600] {
        let shape = shape(3, &[0, 1, 2], experts, 2);
        let ids = varied(&shape, 150);
        let expected = RoutedRows::from_ids(&shape, 0, &ids).unwrap();
        for descr in ["|u1", "<u1", "<u2", "<i2", "<i4"] {
            let result = decode_npy(&payload(descr, &shape, &ids), &shape, 0, 151);
            if experts > 256 && descr.ends_with('1') {
                assert!(refusal(result).contains("one byte cannot represent all experts"));
            } else {
                assert_eq!(result.unwrap(), expected, "{descr} of {experts}");
            }
        }
    }
}

#[test]
fn negative_ids_are_rejected_not_read_as_large_ones() {
    let small = shape(1, &[0], 65_536, 1);
    for descr in ["<i2", "<i4"] {
        let mut bytes = data(descr, &[1, 2]);
        let width = bytes.len() / 2;
        bytes[width..].fill(0xff);
        let text = text(&file([1, 0], &header(descr, [2, 1, 1]), &bytes));
        let error = decode_npy(&text, &small, 7, 10).unwrap_err();
        let experts = 65_536;
        assert_eq!(error, RoutingError::ExpertRange { position: 8, layer: 0, id: -1, experts });
    }
}

#[test]
fn every_header_version_and_any_order_of_entries_is_read() {
    let small = shape(2, &[0, 1], 8, 2);
    for (version, header) in [
        ([1, 0], "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2, 2)}\n"),
        ([2, 0], "{'shape': (1, 2, 2), 'fortran_order': False, 'descr': '|u1', }    \n"),
        ([3, 0], "{\"shape\":(1,2,2,),\"descr\":\"|u1\",\"fortran_order\":False}"),
    ] {
        let text = text(&file(version, header, &[1, 2, 3, 4]));
        assert_eq!(decode_npy(&text, &small, 0, 2).unwrap().to_vec(), [1, 2, 3, 4], "{header}");
    }
}

#[test]
fn invalid_header_is_rejected_with_the_reason() {
    let small = shape(2, &[0, 1], 8, 2);
    let good = header("|u1", [1, 2, 2]);
    for (version, header, words) in [
        ([4, 0], good.clone(), "version must be"),
        ([1, 1], good.clone(), "version must be"),
        ([1, 0], good.replace("|u1", "|i1"), "`descr`"),
        ([1, 0], good.replace("|u1", ">u2"), "`descr`"),
        ([1, 0], good.replace("'|u1'", "[('a', '|u1')]"), "not a dict"),
        ([1, 0], good.replace("False", "True"), "`fortran_order` must be False"),
        ([1, 0], good.replace("(1, 2, 2)", "(1, 2)"), "`shape`"),
        ([1, 0], good.replace("(1, 2, 2)", "(1, 2, 2, 1)"), "`shape`"),
        ([1, 0], good.replace("(1, 2, 2)", "(1, 2, -2)"), "`shape`"),
        ([1, 0], good.replace("(1, 2, 2)", "(01, 2, 2)"), "`shape`"),
        ([1, 0], good.replace("(1, 2, 2)", "(99999999999999999999, 2, 2)"), "`shape`"),
        ([1, 0], good.replace("'shape': (1, 2, 2), ", ""), "not a dict"),
        ([1, 0], good.replace('}', "'shape': (1, 2, 2)}"), "not a dict"),
        ([1, 0], good.replace('}', "'more': 1}"), "not a dict"),
        ([1, 0], good.replace('}', ""), "not a dict"),
        ([1, 0], format!("{good} x"), "not a dict"),
        ([2, 0], format!("{good}{}", " ".repeat(5000)), "longer than 4096"),
        ([1, 0], good.replace("(1, ", "(3, "), "[3, 2, 2], expected [1, 2, 2]"),
        ([1, 0], good.replace("2, 2)", "3, 2)"), "another model"),
        ([1, 0], good.replace("2, 2)", "2, 3)"), "more columns than top-k"),
    ] {
        let text = text(&file(version, &header, &[1, 2, 3, 4]));
        let found = refusal(decode_npy(&text, &small, 0, 2));
        assert!(found.contains(words), "{header}: {found}");
    }
    let no_file = text(b"anything but a file");
    assert!(refusal(decode_npy(&no_file, &small, 0, 2)).contains("does not start like"));
    assert!(decode_npy("", &small, 0, 1).is_err(), "a payload without rows has a header, too");
    for huge in [usize::MAX, usize::MAX / 2, usize::MAX / 4 + 1] {
        let header = header("|u1", [huge, 2, 2]);
        let text = text(&file([1, 0], &header, &[1, 2, 3, 4]));
        assert!(decode_npy(&text, &small, 0, 2).is_err());
        assert!(decode_npy(&text, &small, 0, huge.saturating_add(1)).is_err());
    }
}

#[test]
fn data_length_that_differs_from_the_header_is_rejected() {
    let small = shape(2, &[0, 1], 8, 2);
    let header = header("|u1", [2, 2, 2]);
    for length in (0..20).filter(|&length| length != 8) {
        let text = text(&file([1, 0], &header, &varied_bytes(length)));
        assert!(
            refusal(decode_npy(&text, &small, 0, 3)).contains("length does not match its header")
        );
    }
}

fn varied_bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from(at % 8).unwrap()).collect()
}

#[test]
fn surplus_row_and_whole_sequence_are_accepted() {
    let shape = shape(3, &[1, 2], 16, 2);
    let ids = varied(&shape, 140);
    let full = RoutedRows::from_ids(&shape, 0, &ids).unwrap();
    let whole = encode_npy(&full, &shape).unwrap();
    for start in [2, 63, 64, 65, 139] {
        let rows = decode_npy(&whole, &shape, start, 141).unwrap();
        assert_eq!(rows.form(), PayloadForm::WholeSequence);
        assert_eq!(rows.to_vec(), full.to_vec()[start * shape.row_bytes()..]);
        let rows = decode_npy(&whole, &shape, 0, 140).unwrap();
        assert_eq!((rows.form(), rows.rows()), (PayloadForm::SurplusRow, 139));
    }
    assert!(refusal(decode_npy(&whole, &shape, 1, 141)).contains("start 1 cannot tell"));
    assert!(decode_npy(&whole, &shape, 0, 139).is_err());
    assert!(decode_npy(&whole, &shape, 0, 142).is_err(), "a missing row is never padded");
}

#[test]
fn dense_layers_of_a_file_must_be_zero_and_are_dropped() {
    // Layers are selected by their global numbers.
    let dense = shape(4, &[1, 3], 8, 2);
    let bytes = [0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0, 0, 7, 0];
    let payload = text(&file([1, 0], &header("|u1", [2, 4, 2]), &bytes));
    let rows = decode_npy(&payload, &dense, 5, 8).unwrap();
    assert_eq!(rows.to_vec(), [1, 2, 3, 4, 5, 6, 7, 0]);
    let shifted = shape(4, &[0, 2], 8, 2);
    let error = decode_npy(&payload, &shifted, 5, 8).unwrap_err();
    assert_eq!(error, RoutingError::NotCaptured { position: 5, layer: 0 });
    let all = shape(4, &[1, 2, 3], 8, 2);
    let error = decode_npy(&payload, &all, 5, 8).unwrap_err();
    assert_eq!(error, RoutingError::NotCaptured { position: 5, layer: 2 });
    let less = shape(4, &[3], 8, 2);
    let error = decode_npy(&payload, &less, 5, 8).unwrap_err();
    assert_eq!(error, RoutingError::DenseLayer { position: 5, layer: 1 });
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let shape = shape(2, &[0, 1], 8, 2);
    let payload = payload("|u1", &shape, &varied(&shape, 7));
    assert!(decode_npy(&payload, &shape, 3, 11).is_ok());
    for end in 0..payload.len() {
        assert!(decode_npy(&payload[..end], &shape, 3, 11).is_err(), "prefix of {end}");
    }
}

#[test]
fn every_changed_character_is_refused_or_decodes_to_its_own_value() {
    let shape = shape(2, &[0, 1], 8, 2);
    for rows in [3, 4, 5] {
        let good = payload("|u1", &shape, &varied(&shape, rows)).into_bytes();
        let data_at = plain_base64(&good).unwrap().len() - rows * 4;
        let mut accepted = 0;
        for at in 0..good.len() {
            for c in (0..=255).filter(|&c| c != good[at]) {
                let mut bad = good.clone();
                bad[at] = c;
                let Ok(found) = decode(WireForm::VllmNpy, &bad, &shape, 0, rows + 1) else {
                    continue;
                };
                let bytes = plain_base64(&bad).unwrap();
                let ids: Vec<i64> = bytes[data_at..].iter().map(|&id| i64::from(id)).collect();
                assert_eq!(Some(found.to_vec()), plain_rows(&shape, &ids), "{c} at {at}");
                accepted += 1;
            }
        }
        assert!(accepted > 0, "some changes give other valid ids");
    }
}

proptest! {
    #[test]
    fn prop_decoding_agrees_with_the_naive_decoder(
        (experts, top_k) in prop_oneof![2usize..20, 250usize..300, Just(600)]
            .prop_flat_map(|experts| (Just(experts), 1usize..experts.min(12))),
        hidden in 1usize..5,
        rows in 0usize..140,
        start in 0usize..140,
        dense in any::<u8>(),
        kind in 0usize..3,
        broken in prop::option::of((any::<prop::sample::Index>(), 0i64..700)),
    ) {
        let moe: Vec<usize> = (0..hidden).filter(|layer| *layer == 0 || dense >> layer & 1 == 0).collect();
        let shape = shape(hidden, &moe, experts, top_k);
        let ids = varied(&shape, rows);
        let mut cells = ids.chunks(top_k);
        let mut wire: Vec<i64> = Vec::new();
        for layer in (0..rows).flat_map(|_| 0..hidden) {
            if moe.contains(&layer) {
                wire.extend(cells.next().unwrap().iter().map(|&id| i64::from(id)));
            } else {
                wire.extend(std::iter::repeat_n(0, top_k));
            }
        }
        let descr = ["<u2", "<i2", "<i4"][kind];
        if let Some((index, id)) = broken && !wire.is_empty() {
            let at = index.index(wire.len());
            wire[at] = id;
        }
        let width: usize = descr[2..].parse().unwrap();
        let bytes: Vec<u8> =
            wire.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)).collect();
        let payload = text(&file([1, 0], &header(descr, [rows, hidden, top_k]), &bytes));
        let found = decode_npy(&payload, &shape, start, start + rows + 1);
        match (found, plain_rows(&shape, &wire)) {
            (Ok(found), Some(plain)) => prop_assert_eq!(found.to_vec(), plain),
            (Err(RoutingError::LayersIdentical { .. } | RoutingError::NotCaptured { .. }), _)
            | (Err(_), None) => {}
            (Ok(_), None) => prop_assert!(false, "accepted an invalid payload"),
            (Err(error), Some(_)) => prop_assert!(false, "{}", error),
        }
    }
}
