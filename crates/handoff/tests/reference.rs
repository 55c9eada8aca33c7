//! Advantages and the overlong penalty against the golden vectors of `tests/reference`.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use orchestrate_handoff::{AdvantageNorm, GroupSignal, Overlong, group_advantages};
use serde_json::Value;

fn vectors() -> Value {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/vectors/advantages.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn group_advantages_match_their_vectors_in_every_normalisation() {
    for group in vectors()["groups"].as_array().unwrap() {
        let rewards: Vec<Option<f64>> = numbers(&group["rewards"]).into_iter().map(Some).collect();
        let expected = group["expected"].as_object().unwrap();
        assert_eq!(expected.len(), AdvantageNorm::ALL.len());
        for norm in AdvantageNorm::ALL {
            let name = serde_json::to_value(norm).unwrap();
            let found = group_advantages(&rewards, norm);
            let wanted = numbers(&expected[name.as_str().unwrap()]);
            assert_eq!(found.values.len(), wanted.len());
            for (found, wanted) in found.values.iter().zip(wanted) {
                let near = (found.unwrap() - wanted).abs() <= 1e-12 * (1.0 + wanted.abs());
                assert!(near, "{} {name}: {found:?}, expected {wanted}", group["name"]);
            }
            assert_eq!(found.signal == GroupSignal::Usable, group["kept"].as_bool().unwrap());
        }
    }
}

#[test]
fn overlong_penalties_match_their_vectors() {
    for case in vectors()["overlong"].as_array().unwrap() {
        let number = |key: &str| case[key].as_u64().unwrap();
        let overlong =
            Overlong { max_tokens: number("max_tokens"), cache_tokens: number("cache_tokens") };
        let lengths: Vec<u64> = serde_json::from_value(case["lengths"].clone()).unwrap();
        let expected = numbers(&case["expected"]);
        assert_eq!(lengths.len(), expected.len());
        for (length, expected) in lengths.into_iter().zip(expected) {
            let found = overlong.penalty(length);
            assert!((found - expected).abs() < 1e-12, "{length}: {found}, expected {expected}");
        }
    }
}
