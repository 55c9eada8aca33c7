//! Files that older versions wrote are still read.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use orchestrate_metrics::MetricsLine;
use orchestrate_report::{Comparison, read_runs};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Runs of the published comparison, written before lines had a `schema_version`.
fn published() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/src/comparison/mild-seed-1.jsonl.zst");
    zstd::decode_all(std::fs::File::open(path).unwrap()).unwrap()
}

#[test]
fn published_runs_are_read_without_loss() {
    let file = published();
    let runs = read_runs(file.as_slice()).unwrap();
    for (line, config) in BufReader::new(file.as_slice()).lines().zip(&runs) {
        let raw: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let [run] = &config.runs[..] else { panic!("one run per line") };
        let lines = raw["metrics"].as_array().unwrap();
        assert_eq!(lines.len(), run.lines.len());
        for (raw, line) in lines.iter().zip(&run.lines) {
            let written = serde_json::to_value(line).unwrap();
            for (key, value) in raw.as_object().unwrap() {
                assert_eq!(&written[key], value, "{key}");
            }
        }
    }
}

#[test]
fn published_runs_can_be_compared() {
    let runs = read_runs(published().as_slice()).unwrap();
    let steps = |lines: &[MetricsLine]| lines.iter().filter_map(MetricsLine::step).count();
    assert!(runs.iter().all(|config| steps(&config.runs[0].lines) == 40));
    let comparison = Comparison::new(runs);
    assert_eq!(comparison.configs.len(), 11);
    assert_eq!(comparison.time, None, "old lines do not say when they were written");
    let page = comparison.html();
    assert!(page.matches("<figure>").count() >= 10 && !page.contains("NaN"));
    let r3 = comparison.configs.iter().find(|config| config.name == "r3-4").unwrap();
    assert!(r3.kl_train_infer.unwrap().mean < r3.kl_train_infer_no_replay.unwrap().mean);
    assert_eq!(r3.crash_steps, [None]);
}
