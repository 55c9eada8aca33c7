//! Runs as JSON lines: the input of a comparison, so that the comparison can be repeated without the run
//! folders. Files from several machines can be concatenated.

use super::{ComparedRun, ConfigRuns};
use jiff::Timestamp;
use orchestrate_metrics::{MetricsLine, SCHEMA_VERSION, detect_collapse};
use orchestrate_types::now;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, BufRead, Write};

/// One run: a line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Version of the format; 0 in files of versions that did not record it.
    #[serde(default)]
    schema_version: u32,
    time: Option<Timestamp>,
    config: String,
    plan: Value,
    run: ComparedRun,
    metrics: Vec<MetricsLine>,
}

/// Writes every run as one line: name and plan of its configuration, its report, and the lines of its
/// `metrics.jsonl`. Folders are written as `NAME/seed-N`.
///
/// # Errors
/// If writing fails.
pub fn write_runs(configs: &[ConfigRuns], mut into: impl Write) -> io::Result<()> {
    for config in configs {
        for run in &config.runs {
            let folder = format!("{}/seed-{}", config.name, run.seed).into();
            let record = Record {
                schema_version: SCHEMA_VERSION,
                time: Some(now()),
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

/// Reads runs that [`write_runs`] of this or an older version wrote: one entry per line, each with a
/// single run.
///
/// # Errors
/// If reading fails; [`io::ErrorKind::InvalidData`] with the number of a line that is not a run.
pub fn read_runs(from: impl BufRead) -> io::Result<Vec<ConfigRuns>> {
    let read = |(number, line): (usize, io::Result<String>)| {
        let invalid = |error: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("line {}: {error}", number + 1))
        };
        let Record { schema_version, config, plan, mut run, metrics, .. } =
            serde_json::from_str(&line?).map_err(|error| invalid(&error))?;
        if schema_version > SCHEMA_VERSION {
            return Err(invalid(&format!(
                "schema version {schema_version}, but this program reads versions up to \
                 {SCHEMA_VERSION}: upgrade it"
            )));
        }
        run.report.collapse = detect_collapse(&metrics).0;
        run.lines = metrics;
        Ok(ConfigRuns { name: config, plan, runs: vec![run] })
    };
    from.lines().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::*;
    use orchestrate_metrics::StepLine;
    use serde_json::json;

    #[test]
    fn runs_are_read_back_as_written() {
        let mut collapsed = run(2, (1, 0.5), 0.4, None);
        // JSON has null for a loss that is not finite.
        let lost = StepLine {
            global_step: 3,
            episodes: Some(8),
            loss_tokens: Some(9),
            grad_norm: Some(1.0),
            ..StepLine::default()
        };
        collapsed.lines.push(lost.into());
        collapsed.report.collapse = detect_collapse(&collapsed.lines).0;
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
    fn line_that_is_not_a_run_is_named() {
        let error = read_runs(&b"{}\n"[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("line 1: missing field"), "{error}");
    }

    #[test]
    fn newer_format_is_refused() {
        let mut file = Vec::new();
        let config = ConfigRuns {
            name: "a".to_owned(),
            plan: Value::Null,
            runs: vec![run(1, (2, 0.4), 0.4, None)],
        };
        write_runs(&[config], &mut file).unwrap();
        let newer = String::from_utf8(file).unwrap().replacen(":1,", ":9,", 1);
        let error = read_runs(newer.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("schema version 9") && error.contains("upgrade"), "{error}");
    }
}
