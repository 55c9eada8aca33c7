//! The formats that a run writes, pinned by golden files, and those of older versions, which it reads.
//!
//! `ORCHESTRATE_REGENERATE=1` rewrites the golden files.

use crate::support::{World, plan, usual};
use orchestrate_coordinator::RunEnd;
use orchestrate_report::{RunReport, metrics_lines};
use orchestrate_store::Reader;
use orchestrate_types::Outcome;
use serde_json::Value;
use std::path::Path;

/// Sets what differs from run to run to a fixed value of its type.
fn without_clock(mut value: Value) -> Value {
    for (key, value) in value.as_object_mut().unwrap() {
        let seconds = key.starts_with("time_") || key == "seconds";
        if seconds || key.starts_with("loop_lag_") || key == "tokens_per_s" {
            assert!(value.is_f64(), "{key}: {value}");
            *value = 0.5.into();
        } else if key == "time" {
            assert!(value.as_str().unwrap().ends_with('Z'), "{value}");
            *value = "2026-01-02T03:04:05.678Z".into();
        }
    }
    value
}

fn assert_golden(name: &str, lines: &[Value]) {
    let mut text = lines.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
    text.push('\n');
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/journey/golden").join(name);
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, &text).unwrap();
    }
    assert_eq!(text, fs_err::read_to_string(&path).unwrap(), "{name}");
}

fn lines_of(world: &World) -> Vec<Value> {
    let text = fs_err::read_to_string(world.folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| without_clock(serde_json::from_str(line).unwrap())).collect()
}

#[tokio::test]
async fn written_formats_match_the_golden_files() {
    let world = World::new(plan(1), usual);
    let RunEnd::Finished(report) = world.finish().await else { panic!("stopped") };
    assert_golden("metrics.jsonl", &lines_of(&world));
    let summary = without_clock(serde_json::to_value(&report).unwrap());
    let mut means = without_clock(summary["means"].clone());
    means["step_seconds"] = 0.5.into();
    let summary = match summary {
        Value::Object(mut summary) => {
            summary.insert("means".to_owned(), means);
            Value::Object(summary)
        }
        other => panic!("{other}"),
    };
    assert_golden("summary.json", &[summary]);
    let reader = Reader::open(&world.folder).await.unwrap();
    let result = reader.step(1).await.unwrap().unwrap().result.unwrap();
    assert_golden("step_result.json", &[without_clock(result)]);
}

#[tokio::test]
async fn skipped_step_has_every_key_but_no_training_metrics() {
    let mut plan = plan(1);
    plan.run.eval_every = 0;
    let world = World::new(plan, |_| Outcome::Scored { reward: 1.0 });
    world.finish().await;
    assert_golden("skipped_step.jsonl", &lines_of(&world));
}

/// Makes every stored line and result one of the version before `schema_version` and `time`.
async fn make_old(world: &World) {
    let journal = format!("sqlite://{}", world.folder.join("orchestrate.db"));
    let pool = sqlx::SqlitePool::connect(&journal).await.unwrap();
    for statement in [
        "UPDATE steps SET metrics = json_remove(metrics, '$.schema_version', '$.time'), \
         result = json_remove(result, '$.schema_version', '$.time')",
        "UPDATE evals SET metrics = json_remove(metrics, '$.schema_version', '$.time', \
         '$.eval_tasks_trusted')",
    ] {
        assert!(sqlx::query(statement).execute(&pool).await.unwrap().rows_affected() > 0);
    }
    pool.close().await;
}

#[tokio::test]
async fn journal_of_the_previous_version_is_reported_and_resumed() {
    let mut world = World::new(plan(1), usual);
    let RunEnd::Finished(before) = world.finish().await else { panic!("stopped") };
    make_old(&world).await;

    let reader = Reader::open(&world.folder).await.unwrap();
    let old = RunReport::from_journal(&reader).await.unwrap();
    assert_eq!(RunReport { time: before.time, ..old.clone() }, before);
    assert_eq!(old.time, None);
    drop(reader);

    world.plan = plan(2);
    let RunEnd::Finished(after) = world.finish().await else { panic!("stopped") };
    assert_eq!(after.steps_applied, 2);
    let reader = Reader::open(&world.folder).await.unwrap();
    let versions: Vec<u32> = metrics_lines(&reader)
        .await
        .unwrap()
        .iter()
        .map(|line| {
            line.step()
                .map_or_else(|| line.evaluation().unwrap().schema_version, |l| l.schema_version)
        })
        .collect();
    assert_eq!(versions, [0, 0, 0, 1, 1], "old lines stay as they were written");
    let text = fs_err::read_to_string(world.folder.join("metrics.jsonl")).unwrap();
    assert!(!text.lines().next().unwrap().contains("schema_version"), "{text}");
}

#[tokio::test]
async fn unreadable_metrics_line_is_named_in_the_error() {
    let world = World::new(plan(1), usual);
    world.finish().await;
    let journal = format!("sqlite://{}", world.folder.join("orchestrate.db"));
    let pool = sqlx::SqlitePool::connect(&journal).await.unwrap();
    let damage = "UPDATE steps SET metrics = json_set(metrics, '$.grad_norm', 'high')";
    sqlx::query(damage).execute(&pool).await.unwrap();
    pool.close().await;
    let reader = Reader::open(&world.folder).await.unwrap();
    let error = RunReport::from_journal(&reader).await.unwrap_err();
    let error = orchestrate_coordinator::RunError::from(error).to_string();
    assert!(error.contains("line 2") && error.contains("grad_norm"), "{error}");
}
