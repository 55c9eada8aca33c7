//! What a scrape returns for lines with every metric: real `promtool` accepts it, and the dashboard and
//! the alert rules in `monitoring/` use no other names.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use orchestrate_e2e::{root, skip, stderr};
use orchestrate_metrics::{EvalLine, Metric, StepLine, ValueKind};
use orchestrate_sinks::{Exposition, Line};
use orchestrate_types::RunId;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A line with a value for each of its metrics.
fn whole_line(metrics: &[Metric], marker: &str) -> Line {
    let mut line = Map::new();
    line.insert("schema_version".to_owned(), json!(1));
    line.insert("time".to_owned(), json!("2026-01-02T03:04:05Z"));
    line.insert("global_step".to_owned(), json!(3));
    line.insert("policy_version".to_owned(), json!(2));
    for metric in metrics {
        let value = match (metric.kind, metric.name) {
            (ValueKind::Count, _) => json!(3),
            (ValueKind::Number, _) => json!(0.5),
            (ValueKind::Structured, name) => structured(name),
        };
        line.insert(metric.name.to_owned(), value);
    }
    assert!(line.contains_key(marker));
    Line::new(Value::Object(line)).unwrap()
}

fn structured(name: &str) -> Value {
    match name {
        "broken_attempts_by_stage" => {
            json!({"setup": 1, "generate": 0, "exec": 0, "collect": 0, "grade": 2, "record": 0})
        }
        "suspicious" => json!({"tampered \"x\"\\\n": 1}),
        "forks" => json!({"tools": 2}),
        "recognised_requests" => json!({"returned": 2}),
        "overridden_fields" => json!({"temperature": 2}),
        "worker_metrics" => json!({"score": 0.25}),
        "ratio" => json!({"mean": 1.0, "max": 2.0, "clipped_high": 0.1, "clipped_low": 0.1}),
        "rollout_ratio" => json!({
            "mean": 1.0, "max": 2.0, "effective_share": 0.9, "weight_mean": 1.0, "corrected": 0.0,
        }),
        "router_shift" => json!({"mean": 1.0, "floored": 0.0}),
        "value" => json!({"loss": 0.1, "explained_variance": 0.5}),
        "extreme_token_fraction" | "extreme_token_fraction_no_replay" => json!({"2": 0.01}),
        "sandbox_hosts" => json!([{
            "host": "a", "in_service": true, "taken_out": 0, "capacity": 4, "open": 1, "idle": 1,
            "started": 9,
        }]),
        // Distributions and lists, which are not exported.
        "expert_load" => json!([[1.0]]),
        name if name.starts_with("probability_grid") => json!([[0, 0, 1]]),
        _ => json!([1]),
    }
}

fn scrape() -> String {
    let exposition = Exposition::new(RunId::generate());
    let lines =
        [whole_line(StepLine::METRICS, "episodes"), whole_line(EvalLine::METRICS, "eval_tasks")];
    exposition.sink().update(&lines).unwrap();
    exposition.scrape()
}

/// Real `promtool` with these arguments and this standard input; `None`, reported as a skip, where
/// there is none.
fn promtool(arguments: &[&str], input: &str) -> Option<Output> {
    let program = std::env::var_os("ORCHESTRATE_PROMETHEUS")
        .map_or_else(|| PathBuf::from("promtool"), |folder| Path::new(&folder).join("promtool"));
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        skip::skip("sinks", "no promtool in ORCHESTRATE_PROMETHEUS or on the search path");
        return None;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Some(child.wait_with_output().unwrap())
}

#[test]
fn promtool_accepts_every_name_type_and_help_text() {
    let text = scrape();
    let Some(output) = promtool(&["check", "metrics"], &text) else { return };
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(output.status.success() && said.trim().is_empty(), "{said}\n{text}");
    // The check is able to fail.
    let wrong = promtool(&["check", "metrics"], "# TYPE a_total gauge\na_total 1\n").unwrap();
    assert!(!wrong.status.success());
}

#[test]
fn every_scalar_metric_is_exported() {
    let text = scrape();
    for metric in StepLine::METRICS.iter().chain(EvalLine::METRICS) {
        let stem = metric.name.trim_end_matches("_s").trim_end_matches("_ms");
        let is_exported = text.contains(&format!("# TYPE orchestrate_{stem}"));
        let is_expected =
            metric.kind != ValueKind::Structured || structured(metric.name).is_object();
        assert_eq!(is_exported, is_expected, "{}", metric.name);
    }
}

/// Words of `text` that start with `orchestrate_`.
fn names(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_part(c)).filter(|word| word.starts_with("orchestrate_"));
    words.map(str::to_owned).collect()
}

#[test]
fn dashboard_and_rules_use_exported_names_only() {
    let exported: BTreeSet<String> = scrape()
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
        .collect();
    let read = |name: &str| std::fs::read_to_string(root().join("monitoring").join(name)).unwrap();
    let dashboard: Value = serde_json::from_str(&read("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 8, "{} panels", panels.len());
    for text in [dashboard.to_string(), read("alerts.yml")] {
        let used = names(&text);
        assert!(used.len() >= 5, "{used:?}");
        let unknown: Vec<_> = used.difference(&exported).collect();
        assert!(unknown.is_empty(), "names that are not exported: {unknown:?}");
    }
}

#[test]
fn promtool_accepts_the_alert_rules_and_they_fire() {
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]] {
        let file = root().join("monitoring").join(arguments[2]);
        let Some(output) = promtool(&[arguments[0], arguments[1], file.to_str().unwrap()], "")
        else {
            return;
        };
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
        assert!(output.status.success() && said.contains("SUCCESS"), "{said}");
    }
}
