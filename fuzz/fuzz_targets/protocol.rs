//! Messages between coordinator and trainer, metrics lines and stored comparisons: any JSON is a value
//! or an error, and a value that was read is written and read again without change.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_handoff::protocol::{
    CheckpointReply, ErrorBody, LogprobsReply, LogprobsRequest, StepRequest, StepStatus,
    TrainerInfo,
};
use orchestrate_metrics::{Detector, MetricsLine};
use orchestrate_report::read_runs;
use serde::Serialize;
use serde::de::DeserializeOwned;

const SEEDS: [&str; 10] = [
    r#"{"protocol_version": 1, "trainer": "t 0.1", "model": {"hidden_layers": 2, "moe_layers": [0, 1], "experts": 4, "top_k": 2, "vocab": 9, "context": 64}, "algorithms": ["reinforce"], "policy_version": 3, "lineage": 0, "last_step_id": null, "checkpoint": "/c", "world_size": 1, "devices": ["cpu"]}"#,
    r#"{"step_id": "r-1", "state": "running", "phase": "update", "progress": 0.5}"#,
    r#"{"step_id": "r-1", "state": "failed", "error": "no"}"#,
    r#"{"step_id": "r-1", "state": "queued"}"#,
    r#"{"policy_version": 3, "logprobs": [[0.0, -0.5]], "mismatch": {}, "disagreement": null}"#,
    r#"{"manifest": "/b/manifest.json", "replay": true, "temperature": 1.0}"#,
    r#"{"checkpoint": "/c", "policy_version": 3}"#,
    r#"{"error": {"code": "conflict", "message": "busy"}}"#,
    r#"{"schema_version": 1, "step": 1, "episodes": 8, "reward_mean": 0.5, "time": "2026-01-01T00:00:00Z"}"#,
    r#"{"schema_version": 1, "step": 1, "eval_tasks": 8, "eval_solved": 0.5}"#,
];

#[derive(Debug, Arbitrary)]
struct Input {
    seed: u8,
    changes: Vec<Change>,
}

fn round<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(body: &[u8]) {
    let read = bounded(64 * body.len() + (1 << 16), || serde_json::from_slice::<T>(body));
    if let Ok(value) = read {
        let text = serde_json::to_vec(&value).expect("every message can be written");
        assert_eq!(serde_json::from_slice::<T>(&text).expect("it was written"), value);
    }
}

fuzz_target!(|input: Input| {
    let mut body = SEEDS[usize::from(input.seed) % SEEDS.len()].as_bytes().to_vec();
    input::change(&mut body, &input.changes);
    round::<TrainerInfo>(&body);
    round::<StepRequest>(&body);
    round::<StepStatus>(&body);
    round::<LogprobsRequest>(&body);
    round::<LogprobsReply>(&body);
    round::<CheckpointReply>(&body);
    round::<ErrorBody>(&body);
    round::<MetricsLine>(&body);
    if let Ok(line) = serde_json::from_slice::<MetricsLine>(&body) {
        let mut detector = Detector::default();
        for _ in 0..3 {
            let _ = detector.observe(&line);
        }
    }
    let _ = read_runs(&body[..]);
});
