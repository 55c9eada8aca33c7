//! Runs as lines of JSON: what a report was made of, without the folders of the runs. Files of
//! several machines can be joined.

use super::{ComparedRun, ConfigRuns};
use orchestrate_metrics::collapse::judge;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, BufRead, Write};

/// A line.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    config: String,
    plan: Value,
    run: ComparedRun,
    metrics: Vec<Value>,
}

/// Writes every run as a line: its configuration's name and plan, what it achieved, and its lines of
/// `metrics.jsonl`. Folders are those that `compare` makes, `NAME/seed-N`.
///
/// # Errors
/// Those of `into`.
pub fn write_runs(configs: &[ConfigRuns], mut into: impl Write) -> io::Result<()> {
    for config in configs {
        for run in &config.runs {
            let folder = format!("{}/seed-{}", config.name, run.seed).into();
            let record = Record {
                config: config.name.clone(),
                plan: config.plan.clone(),
                run: ComparedRun { folder, lines: Vec::new(), ..run.clone() },
                metrics: run.lines.clone(),
            };
            serde_json::to_writer(&mut into, &record)?;
            into.write_all(b"\n")?;
        }
    }
    into.flush()
}

/// Reads what [`write_runs`] wrote: one entry per line, each with a single run.
///
/// # Errors
/// Those of `from`; [`io::ErrorKind::InvalidData`] names the line that is none.
pub fn read_runs(from: impl BufRead) -> io::Result<Vec<ConfigRuns>> {
    let read = |(number, line): (usize, io::Result<String>)| {
        let Record { config, plan, mut run, metrics } =
            serde_json::from_str(&line?).map_err(|error| {
                io::Error::new(io::ErrorKind::InvalidData, format!("line {}: {error}", number + 1))
            })?;
        run.report.collapse = judge(&metrics).0;
        run.lines = metrics;
        Ok(ConfigRuns { name: config, plan, runs: vec![run] })
    };
    from.lines().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_written_is_read_back() {
        let mut collapsed = run(2, (1, 0.5), 0.4, None);
        // Loss that is no number: JSON has null for it.
        collapsed.lines.push(json!({
            "global_step": 3, "policy_version": 3, "loss": null, "loss_tokens": 9, "grad_norm": 1.0
        }));
        collapsed.report.collapse = judge(&collapsed.lines).0;
        assert!(collapsed.report.collapse.is_some());
        collapsed.failure = Some("it stopped".to_owned());
        let config = ConfigRuns {
            name: "gspo+r3".to_owned(),
            plan: json!({"run": {"steps": 3}}),
            runs: vec![run(1, (2, 0.4), 0.4, None), collapsed],
        };
        let mut file = Vec::new();
        write_runs(std::slice::from_ref(&config), &mut file).unwrap();
        let read = read_runs(file.as_slice()).unwrap();
        assert_eq!(read.len(), 2);
        for (read, run) in read.iter().zip(&config.runs) {
            assert_eq!((read.name.as_str(), &read.plan), ("gspo+r3", &config.plan));
            let [found] = read.runs.as_slice() else { panic!("one run per line") };
            assert_eq!(found.folder, format!("gspo+r3/seed-{}", run.seed));
            assert_eq!((found.seed, &found.failure), (run.seed, &run.failure));
            assert_eq!((&found.report, &found.lines), (&run.report, &run.lines));
        }
    }

    #[test]
    fn a_line_of_something_else_is_named() {
        let error = read_runs(&b"{}\n"[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("line 1: missing field"), "{error}");
    }
}
