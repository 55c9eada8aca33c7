//! Files of task rows: any bytes give rows or errors, and reading ends.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::{load, predictions};

const SWE: &str = r#"{"instance_id": "a-1", "repo": "pallets/flask", "version": "2.0", "base_commit": "c", "problem_statement": "p", "test_patch": "d", "FAIL_TO_PASS": "[\"t\"]", "PASS_TO_PASS": []}"#;
const R2E: &str = r#"{"extra_info": {"repo_name": "r", "docker_image": "i", "commit_hash": "c", "parsed_commit_content": "{\"file_diffs\": []}", "execution_result_content": {"test_file_names": [], "test_file_codes": []}, "problem_statement": "p", "expected_output_json": {"a": "PASSED"}}}"#;

#[derive(Debug, Arbitrary)]
struct Input {
    list: bool,
    changes: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let mut bytes = match input.list {
        true => format!("[{SWE},\n{R2E}]"),
        false => format!("{SWE}\n{R2E}\n"),
    }
    .into_bytes();
    input::change(&mut bytes, &input.changes);
    let path = camino::Utf8PathBuf::from(format!("/tmp/orchestrate-fuzz-{}", std::process::id()));
    std::fs::write(&path, &bytes).expect("a temporary file");
    let rows: Vec<_> = load::rows(&path).expect("the file exists").take(1 + bytes.len()).collect();
    assert!(rows.len() <= bytes.len());
    if input.changes.is_empty() {
        assert!(rows.len() == 2 && rows.iter().all(Result::is_ok), "{rows:?}");
    }
    let _ = predictions::read(&path);
});
