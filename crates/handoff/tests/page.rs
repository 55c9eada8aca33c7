//! The page for authors of trainers: its examples are what the protocol's types read, no more and no less.
#![expect(clippy::unwrap_used, clippy::panic, reason = "test helpers")]

use orchestrate_handoff::protocol::{
    CheckpointReply, ErrorBody, Hyperparameters, LogprobsReply, LogprobsRequest, StepRequest,
    StepState, StepStatus, TrainerInfo,
};
use orchestrate_types::PolicyVersion;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::ops::Range;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/your-trainer.md");

/// The text of the example in the section of this name.
fn example_text(page: &str, section: &str) -> Range<usize> {
    let heading =
        page.find(&format!("\n### {section}\n")).unwrap_or_else(|| panic!("no section {section}"));
    let start = heading + page[heading..].find("```json\n").unwrap() + "```json\n".len();
    start..start + page[start..].find("```").unwrap()
}

fn example(section: &str) -> Value {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let text = &page[example_text(&page, section)];
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{section}: {error}\n{text}"))
}

fn read<T: DeserializeOwned>(section: &str) -> T {
    let value = example(section);
    serde_json::from_value(value.clone())
        .unwrap_or_else(|error| panic!("{section}: {error}\n{value}"))
}

/// Paths of all objects' keys, outside of arrays.
fn keys(value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => map
            .iter()
            .flat_map(|(key, value)| {
                let below =
                    keys(value).into_iter().map(|path| format!("/{key}{path}")).collect::<Vec<_>>();
                std::iter::once(format!("/{key}")).chain(below)
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Whether `value` is read without the key at this path.
fn reads_without<T: DeserializeOwned>(value: &Value, path: &str) -> bool {
    let mut shorter = value.clone();
    let (parent, key) = path.rsplit_once('/').unwrap();
    shorter.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key);
    serde_json::from_value::<T>(shorter).is_ok()
}

#[test]
fn every_example_is_read() {
    read::<LogprobsRequest>("LogprobsRequest");
    read::<LogprobsReply>("LogprobsReply");
    read::<CheckpointReply>("CheckpointReply");
    read::<ErrorBody>("ErrorBody");
    assert!(matches!(read::<StepStatus>("StepStatus").state, StepState::Done { .. }));
}

/// The example is the step of an empty `[algorithm]`, so that authors see every hyperparameter.
#[test]
fn a_step_is_shown_with_every_hyperparameter() {
    let sent = StepRequest {
        step_id: "01a2-step-000004".to_owned(),
        base_version: PolicyVersion(3),
        manifest: "/runs/first/batches/000004/manifest.json".into(),
        hyperparameters: Hyperparameters::default(),
    };
    let text = serde_json::to_string_pretty(&sent).unwrap() + "\n";
    let page = std::fs::read_to_string(PAGE).unwrap();
    let shown = example_text(&page, "StepRequest");
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        std::fs::write(PAGE, format!("{}{text}{}", &page[..shown.start], &page[shown.end..]))
            .unwrap();
        return;
    }
    let remedy =
        "run ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-handoff --test page";
    assert_eq!(&page[shown], text, "docs/src/your-trainer.md is stale: {remedy}");
}

#[test]
fn info_is_shown_with_all_its_fields() {
    let shown = example("TrainerInfo");
    let written = serde_json::to_value(read::<TrainerInfo>("TrainerInfo")).unwrap();
    assert_eq!(shown, written);
}

/// A trainer that sends only what the page requires is understood, and so is nothing less.
#[test]
fn the_required_metrics_are_exactly_those_shown() {
    let shown = example("StepStatus");
    let needless: Vec<String> = keys(&shown)
        .into_iter()
        .filter(|path| !path.contains("/extreme_token_fraction/"))
        .filter(|path| reads_without::<StepStatus>(&shown, path))
        .collect();
    assert!(needless.is_empty(), "not required: {needless:?}");
}
