//! Lines of older versions are still read, and the catalogue is complete and documented.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use orchestrate_metrics::{
    EvalLine, MetricsLine, StepLine, Threshold, catalogue, catalogue_markdown, detect_collapse,
};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Lines written before `schema_version` was introduced: an evaluation, a step of GRPO with R3 that also
/// measured without replay, one of RSPO with router-shift weights, one of PR2 with its predictor.
const OLD: &str = include_str!("data/before-schema-1.jsonl");

fn old() -> Vec<(Value, MetricsLine)> {
    let read = |text| (serde_json::from_str(text).unwrap(), serde_json::from_str(text).unwrap());
    OLD.lines().map(read).collect()
}

#[test]
fn lines_of_the_previous_version_are_read_without_loss() {
    for (raw, line) in old() {
        let written = serde_json::to_value(&line).unwrap();
        for (key, value) in raw.as_object().unwrap() {
            assert_eq!(&written[key], value, "{key}");
        }
        assert_eq!((&written["schema_version"], &written["time"]), (&0.into(), &Value::Null));
        let again: MetricsLine = serde_json::from_value(written).unwrap();
        assert_eq!(again, line);
    }
}

#[test]
fn fields_of_old_lines_keep_their_values() {
    let lines: Vec<MetricsLine> = old().into_iter().map(|(_, line)| line).collect();
    let [evaluation, r3, rspo, pr2] = &lines[..] else { panic!("four lines") };
    let evaluation = evaluation.evaluation().unwrap();
    assert_eq!((evaluation.global_step, evaluation.eval_k), (0, Some(2)));
    assert_eq!(evaluation.counted_tasks(), Some(200));
    let r3 = r3.step().unwrap();
    assert_eq!((r3.global_step, r3.policy_version.0), (1, 1));
    assert!(r3.has_training() && r3.route_drift.is_some());
    let extreme = r3.extreme_token_fraction.as_ref().unwrap();
    assert!(extreme.beyond(Threshold::T2) >= extreme.beyond(Threshold::T10));
    assert!(r3.kl_train_infer_no_replay > r3.kl_train_infer);
    assert!(!r3.probability_grid.as_ref().unwrap().entries().is_empty());
    assert_eq!(r3.sandbox_hosts.as_ref().unwrap().len(), 1);
    assert!(rspo.step().unwrap().router_shift.is_some());
    assert!(pr2.step().unwrap().predictor_loss.is_some());
    assert_eq!(detect_collapse(&lines), (None, Vec::new()));
}

#[test]
fn every_key_of_a_line_is_in_the_catalogue() {
    let identity = ["schema_version", "time", "global_step", "policy_version"];
    let names = |value: Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let step = serde_json::to_value(StepLine::default()).unwrap();
    let evaluation = serde_json::to_value(EvalLine::default()).unwrap();
    for (line, metrics) in [(step, StepLine::METRICS), (evaluation, EvalLine::METRICS)] {
        let expected: Vec<&str> =
            identity.into_iter().chain(metrics.iter().map(|metric| metric.name)).collect();
        assert_eq!(names(line), expected);
    }
    let all: BTreeSet<&str> = catalogue().map(|metric| metric.name).collect();
    assert_eq!(all.len(), catalogue().count(), "names are unique");
    for metric in catalogue() {
        assert!(!metric.unit.is_empty() && metric.meaning.trim().len() > 8, "{metric:?}");
    }
}

#[test]
fn metrics_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/metrics.md");
    let page = catalogue_markdown();
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &page).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/src/metrics.md is out of date: ORCHESTRATE_REGENERATE=1 cargo test -p \
         orchestrate-metrics"
    );
}
