//! The report on a whole run of predictions, in the format of SWE-bench's harness.

use camino::Utf8Path;
use orchestrate_rollout::log_files;
use orchestrate_tasks::Task;
use orchestrate_tasks::swe::{self, Harness, InfraFailure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Read as _};

/// Result of grading one prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Resolved,
    Unresolved,
    /// The patch is empty, so it was not graded.
    Empty,
    /// The harness writes no report: the patch does not apply, or its log cannot be graded.
    Error,
    /// The sandbox failed, so the patch was not graded.
    Broken,
}

impl Outcome {
    /// The outcome as people read it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Resolved => "resolved",
            Self::Unresolved => "not resolved",
            Self::Empty => "not graded: the patch is empty",
            Self::Error => "not graded: the patch does not apply, or there is no valid log",
            Self::Broken => "not graded: the sandbox failed",
        }
    }
}

/// The result of one prediction, and what its logs show.
#[derive(Debug, Clone, Copy)]
pub(super) struct Graded {
    pub(super) outcome: Outcome,
    /// The failure of the environment that an instance which is not resolved shows.
    pub(super) infra: Option<InfraFailure>,
}

impl Graded {
    /// A result without logs. A sandbox that failed is a failure of the environment.
    pub(super) fn without_logs(outcome: Outcome) -> Self {
        let unavailable = InfraFailure { reason: "container_unavailable", certain: true };
        Self { outcome, infra: (outcome == Outcome::Broken).then_some(unavailable) }
    }

    /// A result whose logs are in `folder`.
    ///
    /// # Errors
    /// If a log cannot be read.
    pub(super) fn in_folder(outcome: Outcome, folder: &Utf8Path) -> io::Result<Self> {
        let infra = match outcome {
            Outcome::Unresolved | Outcome::Error => infra_failure(folder)?,
            Outcome::Resolved | Outcome::Empty | Outcome::Broken => None,
        };
        Ok(Self { outcome, infra })
    }
}

/// The first failure of the environment that the logs in `folder` show.
fn infra_failure(folder: &Utf8Path) -> io::Result<Option<InfraFailure>> {
    let mut logs: Box<dyn io::Read> = Box::new(io::empty());
    for path in log_files(folder) {
        match fs_err::File::open(&path) {
            Ok(file) => logs = Box::new(logs.chain(file).chain(&b"\n"[..])),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    swe::infra_failure(BufReader::new(logs))
}

/// The harness's report on a whole run. Predictions whose sandbox failed are listed as errors, and
/// since version 5 as failures of the environment, too.
pub(super) fn run_report(
    tasks: &[Task],
    results: &BTreeMap<&str, Graded>,
    harness: Harness,
) -> Value {
    let ids = |wanted: &[Outcome]| -> Vec<&str> {
        let of = results.iter().filter(|(_, graded)| wanted.contains(&graded.outcome));
        of.map(|(id, _)| *id).collect()
    };
    let completed = ids(&[Outcome::Resolved, Outcome::Unresolved]);
    let (resolved, unresolved) = (ids(&[Outcome::Resolved]), ids(&[Outcome::Unresolved]));
    let (empty, errors) = (ids(&[Outcome::Empty]), ids(&[Outcome::Error, Outcome::Broken]));
    let submitted: Vec<&str> = results.keys().copied().collect();
    let all: BTreeSet<&str> = tasks.iter().map(|task| task.id.as_str()).collect();
    let incomplete: Vec<&&str> = all.iter().filter(|id| !results.contains_key(**id)).collect();
    let mut report = json!({
        "total_instances": all.len(),
        "submitted_instances": submitted.len(),
        "completed_instances": completed.len(),
        "resolved_instances": resolved.len(),
        "unresolved_instances": unresolved.len(),
        "empty_patch_instances": empty.len(),
        "error_instances": errors.len(),
        "completed_ids": completed,
        "incomplete_ids": incomplete,
        "empty_patch_ids": empty,
        "submitted_ids": submitted,
        "resolved_ids": resolved,
        "unresolved_ids": unresolved,
        "error_ids": errors,
        "schema_version": 2,
    });
    match harness {
        Harness::V4_1_0 => {}
        Harness::V5_0_2 => add_failures(&mut report, results),
    }
    report
}

/// Adds what version 5 reports about failures of the environment. These instances stay in the lists
/// of unresolved ones and of errors.
fn add_failures(report: &mut Value, results: &BTreeMap<&str, Graded>) {
    let failures = |certain: bool| -> Vec<&str> {
        let of = results
            .iter()
            .filter(|(_, graded)| graded.infra.is_some_and(|failure| failure.certain == certain));
        of.map(|(id, _)| *id).collect()
    };
    let (infra, ambiguous) = (failures(true), failures(false));
    let reasons: BTreeMap<&str, &str> =
        results.iter().filter_map(|(id, graded)| Some((*id, graded.infra?.reason))).collect();
    let Some(report) = report.as_object_mut() else { return };
    for (key, value) in [
        ("infra_failure_instances", json!(infra.len())),
        ("ambiguous_failure_instances", json!(ambiguous.len())),
        ("infra_failure_ids", json!(infra)),
        ("ambiguous_failure_ids", json!(ambiguous)),
        ("failure_reasons", json!(reasons)),
    ] {
        report.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use camino::Utf8PathBuf;
    use orchestrate_tasks::micro::{MicroCounts, generate};

    /// The keys that version 5.0.2 writes, without those on containers and images that it left.
    const KEYS: [&str; 20] = [
        "total_instances",
        "submitted_instances",
        "completed_instances",
        "resolved_instances",
        "unresolved_instances",
        "infra_failure_instances",
        "ambiguous_failure_instances",
        "empty_patch_instances",
        "error_instances",
        "completed_ids",
        "incomplete_ids",
        "empty_patch_ids",
        "submitted_ids",
        "resolved_ids",
        "unresolved_ids",
        "infra_failure_ids",
        "ambiguous_failure_ids",
        "failure_reasons",
        "error_ids",
        "schema_version",
    ];

    #[test]
    fn version_5_names_the_instances_whose_environment_failed() {
        let counts = MicroCounts { train: 8, held_out: 0, held_out_families: 0 };
        let tasks = generate(1, counts);
        let temporary = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(temporary.path().to_owned()).unwrap();
        let with_logs = |name: &str, outcome, tests: Option<&str>, steps: &str| {
            let folder = root.join(name);
            fs_err::create_dir(&folder).unwrap();
            let [log, others] = log_files(&folder);
            if let Some(tests) = tests {
                fs_err::write(log, tests).unwrap();
            }
            fs_err::write(others, steps).unwrap();
            Graded::in_folder(outcome, &folder).unwrap()
        };
        let results = [
            // The last line has no end, and must not be joined with the next file's first one.
            with_logs("certain", Outcome::Unresolved, Some("a\nKilled"), "Container started\n"),
            with_logs("ambiguous", Outcome::Unresolved, Some("collected 0 items\n"), ""),
            with_logs("steps", Outcome::Error, None, "Cannot connect to the Docker daemon"),
            with_logs("patch", Outcome::Unresolved, Some("1 failed"), "Result: False"),
            with_logs("solved", Outcome::Resolved, Some("Killed\n"), ""),
            Graded::without_logs(Outcome::Broken),
            Graded::without_logs(Outcome::Empty),
        ];
        let id = |n: usize| tasks.get(n).unwrap().id.as_str();
        let results: BTreeMap<&str, Graded> =
            results.into_iter().enumerate().map(|(n, graded)| (id(n), graded)).collect();
        let report = run_report(&tasks, &results, Harness::V5_0_2);
        let object = report.as_object().unwrap();
        assert!(KEYS.iter().all(|key| object.contains_key(*key)) && object.len() == KEYS.len());
        let of = |key: &str| object.get(key).unwrap().clone();
        assert_eq!(of("infra_failure_ids"), json!([id(0), id(2), id(5)]));
        assert_eq!(of("ambiguous_failure_ids"), json!([id(1)]));
        assert_eq!(
            of("failure_reasons"),
            json!({id(0): "out_of_memory", id(1): "no_tests_collected",
                id(2): "container_unavailable", id(5): "container_unavailable"})
        );
        assert_eq!(of("unresolved_ids"), json!([id(0), id(1), id(3)]));
        assert_eq!(of("error_ids"), json!([id(2), id(5)]));
        assert_eq!(of("completed_ids"), json!([id(0), id(1), id(3), id(4)]));
        assert_eq!((of("resolved_ids"), of("incomplete_ids")), (json!([id(4)]), json!([id(7)])));
        assert_eq!(of("infra_failure_instances"), json!(3));

        let empty = run_report(&tasks, &BTreeMap::new(), Harness::V5_0_2);
        assert!(KEYS.iter().all(|key| empty.get(key).is_some()));
        let older = run_report(&tasks, &results, Harness::V4_1_0);
        assert_eq!(older.as_object().unwrap().len(), KEYS.len() - 5);
    }
}
