//! Status maps, verdicts, test lists and scripts equal those that the official harness recorded for
//! real SWE-bench runs.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use flate2::read::MultiGzDecoder;
use orchestrate_tasks::swe::{
    Harness, LogParser, Outcomes, SPECS, StatusMap, SweRow, TestsStatus, eval_script, grade,
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};

const HARNESSES: [Harness; 2] = [Harness::V4_1_0, Harness::V5_0_2];

#[derive(Deserialize)]
struct Run {
    instance_id: String,
    /// The harness's `report.json`; one run has none.
    report: Option<BTreeMap<String, Value>>,
    swebench_4_1_0: Option<bool>,
    swebench_5_0_2: Option<bool>,
    eval_sh: Option<String>,
    test_output: String,
}

#[derive(Deserialize)]
struct Maps {
    instance_id: String,
    parser: String,
    region: String,
    map_4_1_0: BTreeMap<String, String>,
    map_5_0_2: Option<BTreeMap<String, String>>,
}

fn lines<T: for<'de> Deserialize<'de>>(path: &Path) -> Vec<T> {
    let mut text = String::new();
    MultiGzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A path below the SWE-bench data; `None`, reported as a skip, if it does not exist.
fn data(path: &str) -> Option<PathBuf> {
    orchestrate_e2e::skip::data(&format!("data/swe/{path}"))
}

fn files(folder: &str) -> Vec<PathBuf> {
    let Some(folder) = data(folder) else { return Vec::new() };
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Every recorded run with the official maps of its log.
fn runs() -> impl Iterator<Item = (Run, Maps)> {
    files("verified_logs").into_iter().flat_map(|file| {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        let runs: Vec<Run> = lines(&file);
        let maps: Vec<Maps> = lines(&data(&format!("status_maps/{name}")).unwrap());
        assert_eq!(runs.len(), maps.len());
        runs.into_iter().zip(maps)
    })
}

fn rows() -> HashMap<String, SweRow> {
    let Some(path) = data("rows/verified_100_full.jsonl.gz") else { return HashMap::new() };
    let rows: Vec<SweRow> = lines(&path);
    rows.into_iter().map(|row| (row.instance_id.clone(), row)).collect()
}

/// `owner/name` of an instance.
fn repo(instance_id: &str) -> String {
    instance_id.rsplit_once('-').unwrap().0.replacen("__", "/", 1)
}

/// The row of a run, or the part of it that can be derived from the report.
fn row(rows: &HashMap<String, SweRow>, run: &Run, recorded: &TestsStatus) -> SweRow {
    let all = |list: &Outcomes| [list.success.clone(), list.failure.clone()].concat();
    rows.get(&run.instance_id).cloned().unwrap_or_else(|| SweRow {
        instance_id: run.instance_id.clone(),
        repo: repo(&run.instance_id),
        fail_to_pass: all(&recorded.fail_to_pass),
        pass_to_pass: all(&recorded.pass_to_pass),
        ..SweRow::default()
    })
}

fn words(map: &StatusMap) -> BTreeMap<String, String> {
    map.iter().map(|(name, status)| (name.to_owned(), status.as_str().to_owned())).collect()
}

#[test]
fn status_maps_equal_those_of_both_official_versions() {
    let (mut maps, mut whole) = (0, 0);
    for (run, official) in runs() {
        assert_eq!(run.instance_id, official.instance_id);
        let parser = LogParser::named(&official.parser).unwrap();
        let log = match run.test_output.split(">>>>> Start Test Output").nth(1) {
            Some(tests) if official.region == "slice" => {
                tests.split(">>>>> End Test Output").next().unwrap()
            }
            _ => run.test_output.as_str(),
        };
        whole += usize::from(official.region == "whole");
        for harness in HARNESSES {
            let want = match (harness, &official.map_5_0_2) {
                (Harness::V5_0_2, Some(map)) => map,
                _ => &official.map_4_1_0,
            };
            let found = words(&parser.parse(harness, log.as_bytes()).unwrap());
            assert_eq!(&found, want, "{} by {harness:?}", run.instance_id);
            maps += 1;
        }
    }
    assert!(maps == 0 || (maps == 2 * 281 && whole > 20), "{maps} maps, {whole} of whole logs");
}

#[test]
fn verdicts_and_test_lists_equal_the_recorded_ones() {
    let mut graded = 0;
    let mut rows_of_runs = None;
    for (run, _) in runs() {
        let rows = rows_of_runs.get_or_insert_with(rows);
        let Some(recorded) = run.report.as_ref().map(|report| &report[&run.instance_id]) else {
            continue;
        };
        let recorded_status: TestsStatus =
            serde_json::from_value(recorded["tests_status"].clone()).unwrap();
        let row = row(rows, &run, &recorded_status);
        for (harness, resolved) in
            HARNESSES.into_iter().zip([run.swebench_4_1_0, run.swebench_5_0_2])
        {
            let report = grade(&row, harness, run.test_output.as_bytes()).unwrap();
            assert_eq!(Some(report.resolved), resolved, "{} by {harness:?}", run.instance_id);
            if harness == Harness::V4_1_0 {
                assert_eq!(report.tests_status.as_ref(), Some(&recorded_status));
                let written = report.file(&run.instance_id).unwrap();
                for (key, value) in recorded.as_object().unwrap() {
                    assert_eq!(&written[&run.instance_id][key], value, "{key}");
                }
            }
            graded += 1;
        }
    }
    assert!(graded == 0 || graded == 2 * 280, "{graded}");
}

#[test]
fn scripts_equal_the_recorded_ones_byte_for_byte() {
    let (mut of_rows, mut of_scripts) = (0, 0);
    let mut rows_of_runs = None;
    for (run, _) in runs() {
        let Some(script) = &run.eval_sh else { continue };
        if let Some(row) = rows_of_runs.get_or_insert_with(rows).get(&run.instance_id) {
            assert_eq!(&eval_script(row, Harness::V4_1_0).unwrap(), script, "{}", row.instance_id);
            of_rows += 1;
            continue;
        }
        // Without a row, the commit and the patch are taken from the script, and every version of
        // the repository is tried.
        let base = script.split("core.fileMode=false diff ").nth(1).unwrap().lines().next();
        let (_, patch) = script.split_once("<<'EOF_114329324912'\n").unwrap();
        let (patch, _) = patch.split_once("\nEOF_114329324912\n").unwrap();
        let repo = repo(&run.instance_id);
        let versions =
            SPECS.iter().filter(|spec| spec.repo == repo).flat_map(|spec| spec.versions.split(' '));
        let scripts = versions.map(|version| {
            let row = SweRow {
                instance_id: run.instance_id.clone(),
                repo: repo.clone(),
                version: version.to_owned(),
                base_commit: base.unwrap().to_owned(),
                test_patch: patch.to_owned(),
                ..SweRow::default()
            };
            eval_script(&row, Harness::V4_1_0).unwrap()
        });
        assert!(scripts.into_iter().any(|found| &found == script), "{}", run.instance_id);
        of_scripts += 1;
    }
    assert!(of_rows + of_scripts == 0 || of_rows + of_scripts == 253, "{of_rows} {of_scripts}");
}

#[test]
fn a_log_in_which_nothing_ran_is_not_graded() {
    let row = SweRow {
        repo: "pallets/flask".into(),
        fail_to_pass: vec!["t::a".into()],
        ..SweRow::default()
    };
    let report = |harness, log: &str| grade(&row, harness, log.as_bytes()).unwrap();
    let ran = ">>>>> Start Test Output\nPASSED t::a\n>>>>> End Test Output\n";
    assert!(report(Harness::V4_1_0, ran).resolved && report(Harness::V5_0_2, ran).resolved);
    for bad in ["Patch Apply Failed", "Reset Failed", "Tests Errored", "Tests Timed Out"] {
        let report = report(Harness::V4_1_0, &format!("{ran}x >>>>> {bad}"));
        assert!(!report.patch_successfully_applied && report.tests_status.is_none());
        assert!(report.not_graded.unwrap().contains(bad));
    }
    for missing in ["PASSED t::a\n>>>>> End Test Output", ">>>>> Start Test Output\nPASSED t::a"] {
        assert!(!report(Harness::V4_1_0, missing).patch_successfully_applied);
    }
    let forged = format!("{ran}>>>>> Test Exit Code: 1\n");
    assert!(report(Harness::V4_1_0, &forged).resolved);
    assert!(!report(Harness::V5_0_2, &forged).patch_successfully_applied);
    let silent = ">>>>> Start Test Output\n>>>>> End Test Output\nKilled\n";
    assert!(report(Harness::V4_1_0, silent).patch_successfully_applied);
    let silent = report(Harness::V5_0_2, silent);
    assert_eq!(silent.infra_failure, Some(true));
    assert_eq!(silent.infra_failure_reason.as_deref(), Some("out_of_memory"));
    assert!(!silent.patch_successfully_applied);
}

#[test]
fn results_outside_the_markers_count_only_if_there_are_none_inside() {
    let row = SweRow {
        repo: "pallets/flask".into(),
        fail_to_pass: vec!["t::a".into()],
        ..SweRow::default()
    };
    let (start, end) = (">>>>> Start Test Output", ">>>>> End Test Output");
    for (log, resolved) in [
        (format!("PASSED t::a\n{start}\n{end}\n"), true),
        (format!("{end}\nPASSED t::a\n{start}\n"), true),
        (format!("PASSED t::a\n{start}\nPASSED t::b\n{end}\n"), false),
        (format!("{start}\nFAILED t::a - x\n{end}\nPASSED t::a\n"), false),
        // The second start marker ends the slice, too.
        (format!("{start}\nFAILED t::a - x\n{start}\nPASSED t::a\n{end}\n"), false),
        (format!("PASSED t::a\r{start}\r\n{end}"), true),
    ] {
        for harness in HARNESSES {
            let report = grade(&row, harness, log.as_bytes()).unwrap();
            assert_eq!(report.resolved, resolved, "{log:?}");
        }
    }
}
