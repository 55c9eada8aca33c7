//! Files of task rows: any bytes give rows or errors, and reading ends.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::{load, predictions, swe};

const SWE: &str = r#"{"instance_id": "a-1", "repo": "pallets/flask", "version": "2.0", "base_commit": "c", "problem_statement": "p", "test_patch": "d", "FAIL_TO_PASS": "[\"t\"]", "PASS_TO_PASS": []}"#;
const R2E: &str = r#"{"extra_info": {"repo_name": "r", "docker_image": "i", "commit_hash": "c", "parsed_commit_content": "{\"file_diffs\": []}", "execution_result_content": {"test_file_names": [], "test_file_codes": []}, "problem_statement": "p", "expected_output_json": {"a": "PASSED"}}}"#;
const SMITH: &str = r#"{"instance_id": "Suor__funcy.207a7810.x", "repo": "swesmith/Suor__funcy.207a7810", "problem_statement": "p", "patch": "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n", "FAIL_TO_PASS": ["t/b.py::t"], "PASS_TO_PASS": ["t/c.py::t"]}"#;
const REBENCH: &str = r#"{"instance_id": "o__r-1", "repo": "o/r", "base_commit": "c", "problem_statement": "p", "test_patch": "diff --git a/t b/t\ndeleted file mode 100644\n", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [], "install_config": {"test_cmd": "pytest -rA", "install": null, "log_parser": "parse_log_pytest"}}"#;
const NEMO: &str = r#"{"responses_create_params": {"metadata": {"dataset_name": "SWE-Gym/SWE-Gym", "instance_dict": "{\"instance_id\": \"python__mypy-1\", \"repo\": \"python/mypy\", \"version\": \"1.4\", \"base_commit\": \"c\", \"problem_statement\": \"p\", \"test_patch\": \"+[case a]\", \"FAIL_TO_PASS\": [\"t\"], \"PASS_TO_PASS\": []}"}}}"#;

#[derive(Debug, Arbitrary)]
struct Input {
    list: bool,
    changes: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let mut bytes = match input.list {
        true => format!("[{SWE},\n{R2E},{SMITH},\n{REBENCH},{NEMO}]"),
        false => format!("{SWE}\n{R2E}\n{SMITH}\n{REBENCH}\n{NEMO}\n"),
    }
    .into_bytes();
    input::change(&mut bytes, &input.changes);
    let path = camino::Utf8PathBuf::from(format!("/tmp/orchestrate-fuzz-{}", std::process::id()));
    std::fs::write(&path, &bytes).expect("a temporary file");
    let rows: Vec<_> = load::rows(&path).expect("the file exists").take(1 + bytes.len()).collect();
    assert!(rows.len() <= bytes.len());
    for row in rows.iter().flatten() {
        let task = row.to_task().expect("a row that was read");
        let start = task.start().map(|start| start.patch).unwrap_or_default();
        assert!(start.is_empty() || !task.gold_patch.is_empty());
        if let load::Row::Swe(row) = row {
            let _ = swe::eval_script(row, swe::Harness::V5_0_2);
        }
    }
    if input.changes.is_empty() {
        assert!(rows.len() == 5 && rows.iter().all(Result::is_ok), "{rows:?}");
    }
    let _ = predictions::read(&path);
});
