//! Joining the routing rows of several engine calls, against the vectors of `tests/reference`.

#![expect(clippy::unwrap_used, reason = "test helpers")]

use orchestrate_routing::{MaskBuilder, RoutedRows, RoutingError};
use orchestrate_types::{ModelShape, PolicyVersion};
use serde_json::Value;
use std::sync::Arc;

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn flat(value: &Value) -> Vec<u16> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        other => vec![u16::try_from(other.as_u64().unwrap()).unwrap()],
    }
}

#[test]
fn rows_of_three_calls_join_as_in_the_reference() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/vectors/stitching.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let layers = number(&file["layers"]);
    let shape = Arc::new(ModelShape {
        hidden_layers: layers,
        moe_layers: (0..layers).collect(),
        experts: number(&file["experts"]),
        top_k: number(&file["top_k"]),
        vocab: 100,
        context: 100,
    });
    let mut checked = 0;
    for case in file["cases"].as_array().unwrap() {
        let expected = &case["expected"];
        let mut builder = MaskBuilder::new(shape.clone()).unwrap();
        let (mut total, mut drift, mut outcome) = (0, 0, Ok(()));
        for call in case["calls"].as_array().unwrap() {
            total = number(&call["tokens"]);
            let rows =
                RoutedRows::from_ids(&shape, number(&call["start"]), &flat(&call["rows"])).unwrap();
            let version = PolicyVersion(call["version"].as_u64().unwrap());
            match builder.push(rows, total, version) {
                Ok(report) => drift += report.drift_rows,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        checked += 1;
        // Rows that no call delivers are a gap; they are never invented.
        if let Some(gap) = expected.get("gap") {
            let (have, start) = (number(&gap["have"]), number(&gap["start"]));
            assert_eq!(outcome.unwrap_err(), RoutingError::Gap { have, start });
            continue;
        }
        outcome.unwrap();
        assert_eq!(drift, number(&expected["drift_rows"]), "{}", case["name"]);
        if !case["length"].is_null() {
            total = number(&case["length"]);
            builder.truncate(total);
        }
        let mask = builder.finish(total).unwrap();
        let rows = expected["rows"].as_array().unwrap();
        assert_eq!((mask.rows(), rows.len()), (total - 1, total - 1));
        for (t, row) in rows.iter().enumerate() {
            let row: Vec<u8> = flat(row).iter().map(|&id| u8::try_from(id).unwrap()).collect();
            assert_eq!(mask.row(t).unwrap(), row, "row {t}");
        }
        let versions: Vec<u64> = serde_json::from_value(expected["versions"].clone()).unwrap();
        let found: Vec<u64> = mask
            .versions()
            .iter()
            .flat_map(|range| vec![range.version.0; range.end - range.start])
            .collect();
        assert_eq!(found, versions, "{}", case["name"]);
    }
    assert_eq!(checked, 3);
}
