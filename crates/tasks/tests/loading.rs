//! Loads rows and predictions from files of every supported format.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use camino::{Utf8Path, Utf8PathBuf};
use flate2::Compression as GzipStrength;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use orchestrate_tasks::Origin;
use orchestrate_tasks::load::{self, Refused, Row};
use orchestrate_tasks::predictions::{self, Prediction};
use orchestrate_tasks::swe::SweRow;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::sync::Arc;

/// The path of a file of test data; `None`, reported as a skip, if it does not exist.
fn data(name: &str) -> Option<Utf8PathBuf> {
    let path = orchestrate_e2e::skip::data(&format!("data/swe/{name}"))?;
    Some(Utf8PathBuf::from_path_buf(path).unwrap())
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> Utf8PathBuf {
        let path = Utf8PathBuf::from_path_buf(self.0.path().join(name)).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn rows(path: &Utf8Path) -> (Vec<Row>, Vec<Refused>) {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for row in load::rows(path).unwrap() {
        match row {
            Ok(row) => good.push(row),
            Err(refused) => bad.push(refused),
        }
    }
    (good, bad)
}

fn loaded(bytes: &[u8]) -> (Vec<Row>, Vec<Refused>) {
    let folder = Folder::new();
    rows(&folder.file("rows", bytes))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), GzipStrength::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn swe_row(id: &str) -> Value {
    json!({
        "instance_id": id, "repo": "pallets/flask", "version": "2.0", "base_commit": "c0",
        "problem_statement": "It breaks.", "patch": "", "test_patch": "diff",
        "FAIL_TO_PASS": "[\"t::a\"]", "PASS_TO_PASS": "[]",
    })
}

fn r2e_row(commit: &str) -> Value {
    json!({
        "repo_name": "aiohttp", "docker_image": "i", "commit_hash": commit,
        "parsed_commit_content": "{\"file_diffs\": []}",
        "execution_result_content":
            {"test_file_names": ["test_1.py"], "test_file_codes": ["x"]},
        "problem_statement": "[ISSUE] It breaks. [/ISSUE]",
        "expected_output_json": "{\"a\": \"PASSED\"}",
    })
}

fn json_lines(rows: &[Value]) -> String {
    let lines: Vec<String> = rows.iter().map(|row| format!("{row}\n")).collect();
    lines.concat()
}

#[test]
fn every_real_row_of_swe_bench_loads() {
    for (name, want, repos) in [
        ("rows/verified_100_full.jsonl.gz", 100, vec!["astropy/astropy", "django/django"]),
        ("rows/lite_5_list_typed.json", 5, vec!["django/django"]),
    ] {
        let Some(path) = data(name) else { continue };
        let (good, bad) = rows(&path);
        assert!(bad.is_empty(), "{bad:?}");
        assert_eq!(good.len(), want);
        let known = good.iter().filter(|row| repos.contains(&row.repo())).count();
        assert!(known > 0 && good.iter().all(|row| row.environment() == "swe-bench"));
        let image = good[0].image();
        assert!(image.starts_with("swebench/sweb.eval.x86_64.") && image.contains("_1776_"));
    }
}

#[test]
fn every_real_row_of_r2e_loads_as_published_and_repackaged() {
    let Some(path) = data("r2e/rows.jsonl.gz") else { return };
    let mut text = String::new();
    let file = std::fs::File::open(path).unwrap();
    MultiGzDecoder::new(file).read_to_string(&mut text).unwrap();
    let bare: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["row"].take())
        .collect();
    let (good, bad) = loaded(json_lines(&bare).as_bytes());
    assert_eq!((good.len(), bad), (11, Vec::new()));
    let repackaged = bare.iter().map(|row| {
        json!({"prompt": [{"role": "user", "content": "placeholder"}], "ability": "swe",
               "extra_info": {"extra_info": row.to_string()}})
    });
    let repackaged: Vec<Value> = repackaged.collect();
    assert_eq!(loaded(json_lines(&repackaged).as_bytes()).0, good);
}

#[test]
fn a_plain_row_keeps_a_column_of_a_trainers_data_set_that_has_no_row_in_it() {
    for kept in [json!("see the manual"), json!(["a"]), json!(7), json!(null)] {
        let row = json!({"id": "sum__1", "prompt": "1+1?", "extra_info": kept});
        let (good, bad) = loaded(json_lines(std::slice::from_ref(&row)).as_bytes());
        assert_eq!((good.len(), bad), (1, Vec::new()));
        let task = good[0].to_task().unwrap();
        let keeps = |columns: &serde_json::Map<String, Value>| columns["extra_info"] == kept;
        assert!(matches!(&task.origin, Origin::External(columns) if keeps(columns)), "{task:?}");
    }
}

#[test]
fn invalid_rows_are_refused_with_id_and_reason_and_the_others_load() {
    let changed = |column: &str, value: Value| {
        let mut row = swe_row(&format!("bad-{column}"));
        row[column] = value;
        row.to_string()
    };
    let mut unequal = r2e_row("u");
    unequal["execution_result_content"]["test_file_codes"] = json!([]);
    let mut outside = r2e_row("o");
    outside["execution_result_content"]["test_file_names"] = json!(["../x.py"]);
    let lines = [
        swe_row("good-1").to_string(),
        changed("version", json!("9.9")),
        changed("repo", json!("a/b")),
        changed("FAIL_TO_PASS", json!("[\"a\"")),
        changed("PASS_TO_PASS", json!(["a", 1])),
        changed("base_commit", Value::Null),
        changed("test_patch", json!("")),
        "{\"instance_id\": \"cut".to_owned(),
        String::new(),
        "{\"instance_id\": \"other\"}".to_owned(),
        r2e_row("g").to_string(),
        unequal.to_string(),
        outside.to_string(),
        swe_row("good-1").to_string(),
        swe_row("good-2").to_string(),
    ];
    let (good, bad) = loaded(lines.join("\n").as_bytes());
    let ids: Vec<_> = good.iter().map(Row::id).collect();
    assert_eq!(ids, ["good-1", "aiohttp__g", "good-2"]);
    let found: Vec<_> =
        bad.iter().map(|bad| (bad.id.as_deref().unwrap_or("-"), &bad.reason)).collect();
    let want = [
        ("bad-version", "known: 2.0 2.1"),
        ("bad-repo", "no log parser for `a/b`"),
        ("bad-FAIL_TO_PASS", "EOF while parsing a list"),
        ("bad-PASS_TO_PASS", "expected a string"),
        ("bad-base_commit", "base_commit"),
        ("bad-test_patch", "`test_patch` is empty"),
        ("-", "is not JSON"),
        ("other", "`harbor`, and `id`"),
        ("aiohttp__u", "1 `test_file_names` but 0"),
        ("aiohttp__o", "not a plain file name"),
        ("good-1", "has the id of row 1"),
    ];
    assert_eq!(found.len(), want.len(), "{found:?}");
    for ((id, reason), (want_id, part)) in found.into_iter().zip(want) {
        assert!(id == want_id && reason.contains(part), "{id}: {reason}; not {part}");
    }
    assert_eq!(bad[0].row, 2);
}

#[test]
fn columns_of_r2e_gym_that_would_count_as_absent_are_refused() {
    let with = |column: &str, value: Value| {
        let mut row = r2e_row("r");
        row[column] = value;
        row
    };
    for (row, part) in [
        (with("test_timeout_s", json!(60)), "did you mean `repair.test_timeout_s`?"),
        (
            with("problem_statement", json!("[ISSUE] \n [/ISSUE]")),
            "column `problem_statement`: it is empty",
        ),
        (with("problem_statement", json!("")), "column `problem_statement`: it is empty"),
    ] {
        let (good, bad) = loaded(json_lines(&[row]).as_bytes());
        assert!(good.is_empty() && bad[0].reason.contains(part), "{bad:?}");
        assert_eq!(bad[0].id.as_deref(), Some("aiohttp__r"));
    }
}

#[test]
fn an_image_next_to_a_harbor_task_is_not_ignored() {
    let test = json!({"path": "test.sh", "mode": 0o755, "text": "exit 0"});
    let mut row = json!({"harbor": {
        "id": "a", "name": "o/a", "schema_version": "1.4",
        "image": {"name": "a/b:1", "build_timeout_s": 60.0, "workdir": "/app"},
        "steps": [{"instruction": "Do it.", "tests": [test],
            "verifier": {"timeout_s": 60.0, "artifacts": []}}],
    }, "source": "mine", "image_size": 7});
    let (good, bad) = loaded(row.to_string().as_bytes());
    assert_eq!((good.len(), bad), (1, Vec::new()));
    row["image"] = json!("other/img:1");
    let (good, bad) = loaded(row.to_string().as_bytes());
    let right = "has the key `image`, which is not read; name the image in `harbor.image.name`";
    assert!(good.is_empty() && bad[0].reason == right, "{bad:?}");
}

#[test]
fn lists_of_tests_with_empty_or_repeated_names_are_refused_by_column_and_name() {
    let row = |id: &str, fails: Value, passes: Value| {
        let mut row = swe_row(id);
        row["FAIL_TO_PASS"] = fails;
        row["PASS_TO_PASS"] = passes;
        row
    };
    let lines = [
        row("good", json!(["a", "A", "a "]), json!(["b", "c"])),
        row("empty", json!(["a", ""]), json!([])),
        row("blank", json!(["a"]), json!("[\" \\n\"]")),
        row("twice", json!(["a", "b", "a"]), json!([])),
        row("later-twice", json!(["a"]), json!(["b", "c", "b"])),
        row("both", json!(["a", "b"]), json!(["c", "b"])),
    ];
    let (good, bad) = loaded(json_lines(&lines).as_bytes());
    assert_eq!(good.iter().map(Row::id).collect::<Vec<_>>(), ["good"]);
    let found: Vec<(&str, &str)> =
        bad.iter().map(|bad| (bad.id.as_deref().unwrap_or("-"), bad.reason.as_str())).collect();
    let both = "column `PASS_TO_PASS`: it names the test `b`, and so does `FAIL_TO_PASS`; name it in one of them";
    let want = [
        ("empty", "column `FAIL_TO_PASS`: entry 2 is empty; it must name a test"),
        ("blank", "column `PASS_TO_PASS`: entry 1 is empty; it must name a test"),
        ("twice", "column `FAIL_TO_PASS`: it names the test `a` twice; name it once"),
        ("later-twice", "column `PASS_TO_PASS`: it names the test `b` twice; name it once"),
        ("both", both),
    ];
    assert_eq!(found, want);
}

#[test]
fn json_text_of_a_column_with_a_repeated_key_is_refused() {
    let mut row = r2e_row("r");
    row["expected_output_json"] = json!("{\"a\": \"PASSED\", \"a\": \"FAILED\"}");
    let (good, bad) = loaded(json_lines(&[row, r2e_row("g")]).as_bytes());
    assert_eq!(good.iter().map(Row::id).collect::<Vec<_>>(), ["aiohttp__g"]);
    assert!(bad[0].reason.contains("\"a\" occurs twice"), "{}", bad[0].reason);
}

#[test]
fn rows_whose_files_cannot_exist_together_are_refused_by_column() {
    let row = |id: &str, given: &[&str], hidden: &[&str]| {
        let files: Vec<Value> =
            given.iter().map(|path| json!({"path": path, "content": ""})).collect();
        let codes = vec![""; hidden.len()];
        let mut row = r2e_row(id);
        row["repair"] = json!({"family": "f", "agent_files": files, "test_command": "true",
            "test_timeout_s": 9});
        row["execution_result_content"] =
            json!({"test_file_names": hidden, "test_file_codes": codes});
        row
    };
    let rows = [
        row("fine", &["a.py", "a/b", "a-b", "test_a.py"], &["test_a.py"]),
        row("folder", &["a/b", "a-", "a"], &["test_a.py"]),
        row("deep", &["a", "a-", "a/b/c"], &["test_a.py"]),
        row("twice", &["a", "b", "a"], &["test_a.py"]),
        row("dot", &["a", "./a"], &["test_a.py"]),
        row("slash", &["a/b", "a//b"], &["test_a.py"]),
        row("hidden", &["tests"], &["tests/test_a.py"]),
        row("below", &["tests/x/y"], &["tests/x"]),
        row("again", &["a"], &["t.py", "t.py"]),
        row("staged", &[".grading"], &["t.py"]),
    ];
    let (good, bad) = loaded(json_lines(&rows).as_bytes());
    assert_eq!(good.iter().map(Row::id).collect::<Vec<_>>(), ["aiohttp__fine"]);
    let found: Vec<(usize, &str)> = bad.iter().map(|bad| (bad.row, bad.reason.as_str())).collect();
    let both = "`a` is both a file and the folder of another file";
    for ((row, reason), (column, part)) in found.iter().zip([
        ("`repair.agent_files`", both),
        ("`repair.agent_files`", both),
        ("`repair.agent_files`", "`a` occurs twice"),
        ("repair.agent_files[1].path", "not a valid path"),
        ("repair.agent_files[1].path", "not a valid path"),
        ("`execution_result_content`", "`tests` is both"),
        ("`execution_result_content`", "`tests/x` is both"),
        ("`execution_result_content`", "`t.py` occurs twice"),
        ("`repair.agent_files`", "the grader's own files"),
    ]) {
        assert!(reason.contains(column) && reason.contains(part), "{row}: {reason}");
    }
    assert_eq!(found.len(), 9);
}

#[test]
fn compressed_files_and_json_lists_load_like_json_lines() {
    let values = [swe_row("a-1"), r2e_row("b")];
    let lines = json_lines(&values);
    let want = loaded(lines.as_bytes());
    assert_eq!((want.0.len(), want.1.len()), (2, 0));
    let list = serde_json::to_string_pretty(&values).unwrap();
    let gzipped = [gzip(lines.as_bytes()), gzip(list.as_bytes())];
    for bytes in [list.as_bytes(), &gzipped[0], &gzipped[1], format!("\n\n {lines}").as_bytes()] {
        assert_eq!(loaded(bytes), want);
    }
    assert_eq!(loaded(b""), (vec![], vec![]));
    for text in [&lines, &list] {
        assert_eq!(loaded(format!("\u{feff}{text}").as_bytes()), want);
        assert_eq!(loaded(&gzip(format!("\u{feff}{text}").as_bytes())), want);
    }
}

#[test]
fn an_invalid_element_of_a_list_does_not_hide_the_others() {
    let [first, last] = ["a-1", "a-9"].map(|id| swe_row(id).to_string());
    let good = |bytes: &[u8]| {
        let (good, bad) = loaded(bytes);
        let ids: Vec<String> = good.iter().map(Row::id).collect();
        (ids, bad.into_iter().map(|bad| (bad.row, bad.reason)).collect::<Vec<_>>())
    };
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let invalid: [&[u8]; 14] = [
        br#"{"instance_id": "b", "instance_id": "c"}"#,
        br#"{"instance_id": "b", "seed": 18446744073709551616}"#,
        br#"{"instance_id": "b", "score": NaN}"#,
        br#"{"instance_id": "b", "score": 1e999}"#,
        br#"{"instance_id": "b", "text": "\ud83d"}"#,
        b"{\"instance_id\": \"b\", \"text\": \"\xff\"}",
        b"{\"instance_id\": \"b\", \"text\": \"\0\"}",
        br"{'instance_id': 'b'}",
        br#"{"instance_id": "b",}"#,
        br#"{"instance_id": "b"]"#,
        b"}",
        b"",
        b"7",
        deep.as_bytes(),
    ];
    for element in invalid {
        let list = [b" [ ", first.as_bytes(), b",\n", element, b" , ", last.as_bytes(), b"]\n"];
        let (ids, bad) = good(&list.concat());
        assert_eq!(ids, ["a-1", "a-9"], "{bad:?}");
        assert!(bad.len() == 1 && bad[0].0 == 2, "{bad:?}");
    }
    let tricky = json!({"instance_id": "],\\\"[{", "x": [{"]": ["\\"]}, "}"]});
    for (list, expected) in [
        (format!("[{first}, {tricky}, {last}]"), "has none of the columns"),
        (format!("[{first}, {last}, {{\"instance_id\": \"c"), "the file ends before the list does"),
        (format!("[{first}, {last}] {first}"), "is not a part of the list"),
        (format!("[{first}, {last},]"), "is not JSON"),
    ] {
        let (ids, bad) = good(list.as_bytes());
        assert_eq!(ids, ["a-1", "a-9"], "{bad:?}");
        assert!(bad.len() == 1 && bad[0].1.contains(expected), "{bad:?}");
    }
    for empty in ["[]", " [ \n ] \n"] {
        assert_eq!(good(empty.as_bytes()), (vec![], vec![]));
    }
}

#[test]
fn damaged_gzip_is_an_error_before_any_row_is_used() {
    let lines: Vec<Value> = (0..200).map(|n| swe_row(&format!("a-{n}"))).collect();
    let good = gzip(json_lines(&lines).as_bytes());
    let folder = Folder::new();
    let mut corrupt = good.clone();
    let checksum = corrupt.len() - 6;
    corrupt[checksum] ^= 1;
    for bytes in [&good[..good.len() / 2], &good[..good.len() - 1], &corrupt] {
        let path = folder.file("rows.jsonl.gz", bytes);
        let Err(error) = load::rows(&path) else { panic!("a damaged file was read") };
        let message = error.to_string();
        assert!(message.contains("rows.jsonl.gz") && message.contains("corrupt"), "{message}");
        assert!(predictions::read(&path).is_err());
    }
}

#[test]
fn a_file_without_rows_is_refused_once() {
    let text = "Some notes.\n".repeat(800);
    let numbers = "1\n".repeat(50);
    let mut binary = vec![0_u8; 100_000];
    binary.iter_mut().step_by(50).for_each(|byte| *byte = b'\n');
    for bytes in [text.as_bytes(), numbers.as_bytes(), &binary] {
        let (good, bad) = loaded(bytes);
        assert!(good.is_empty() && bad.len() == 1, "{bad:?}");
        assert!(bad[0].reason.contains("not a task file"), "{bad:?}");
    }
    let (good, bad) = loaded(format!("a comment\nanother\n{}", swe_row("a-1")).as_bytes());
    assert_eq!((good.len(), bad.len()), (1, 2));
}

#[test]
fn python_syntax_is_recognised_and_refusals_are_safe_to_print() {
    let mut row = swe_row("a\u{1b}]0;title\u{7}\n");
    row["FAIL_TO_PASS"] = json!("['t::a', 't::b']");
    let (_, bad) = loaded(row.to_string().as_bytes());
    let message = bad[0].to_string();
    assert!(message.contains("Python's syntax") && message.contains("FAIL_TO_PASS"), "{message}");
    assert!(!message.contains(char::is_control), "{message:?}");
    row["instance_id"] = json!("a".repeat(100_000));
    assert!(loaded(row.to_string().as_bytes()).1[0].to_string().len() < 1000);
}

/// The columns of SWE-bench rows as Hugging Face stores them; test lists as text or as lists.
fn parquet(rows: &[SweRow], lists: bool, compression: Compression) -> Vec<u8> {
    parquet_with(rows, lists, compression, "(UTF8)")
}

/// As [`parquet`], with `annotation` on the type of text columns.
fn parquet_with(
    rows: &[SweRow],
    lists: bool,
    compression: Compression,
    annotation: &str,
) -> Vec<u8> {
    // The columns of every data set of this kind: texts, then lists of tests.
    let (texts, tests) = SweRow::COLUMNS[..9].split_at(7);
    let text = |name: &str| format!("optional binary {name} {annotation};");
    let list = |name: &str| {
        let item = format!("repeated group list {{ optional binary element {annotation}; }}");
        format!("optional group {name} (LIST) {{ {item} }}")
    };
    let mut schema: Vec<String> = texts.iter().map(|name| text(name)).collect();
    schema.extend(tests.iter().map(|name| if lists { list(name) } else { text(name) }));
    let schema = schema.concat();
    let schema = Arc::new(parse_message_type(&format!("message row {{ {schema} }}")).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let values: Vec<Value> = rows.iter().map(|row| serde_json::to_value(row).unwrap()).collect();
    let mut columns = texts.iter().chain(tests);
    while let Some(mut column) = group.next_column().unwrap() {
        let name = *columns.next().unwrap();
        let (mut items, mut present, mut nested) = (Vec::new(), Vec::new(), Vec::new());
        for value in &values {
            let text = value[name].as_str().unwrap();
            if lists && name.contains("_TO_") {
                let list: Vec<String> = serde_json::from_str(text).unwrap();
                present.extend(if list.is_empty() { vec![1] } else { vec![3; list.len()] });
                nested.extend((0..list.len().max(1)).map(|n| i16::from(n > 0)));
                items.extend(list.iter().map(|item| ByteArray::from(item.as_str())));
            } else {
                items.push(ByteArray::from(text));
                present.push(1);
                nested.push(0);
            }
        }
        let nested = (lists && name.contains("_TO_")).then_some(nested.as_slice());
        column.typed::<ByteArrayType>().write_batch(&items, Some(&present), nested).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn parquet_files_load_like_json_lines() {
    let mut rows: Vec<SweRow> = ["a-1", "a-2", "a-3"]
        .into_iter()
        .map(|id| serde_json::from_value(swe_row(id)).unwrap())
        .collect();
    rows[1].fail_to_pass.push("t::b[é]".into());
    rows[2].pass_to_pass = (0..2000).map(|n| format!("t::c[{n}]")).collect();
    let mut want: Vec<Row> = rows.iter().cloned().map(|row| Row::Swe(Box::new(row))).collect();
    let compressions = [
        Compression::SNAPPY,
        Compression::UNCOMPRESSED,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
    ];
    for compression in compressions {
        for lists in [false, true] {
            assert_eq!(loaded(&parquet(&rows, lists, compression)), (want.clone(), vec![]));
            let binary = parquet_with(&rows, lists, compression, "");
            assert_eq!(loaded(&binary), (want.clone(), vec![]));
        }
    }
    rows[1].test_patch.clear();
    want.remove(1);
    let (good, bad) = loaded(&parquet(&rows, true, Compression::SNAPPY));
    assert_eq!(good, want);
    assert_eq!((bad[0].row, bad[0].id.as_deref()), (2, Some("a-2")));
}

#[test]
fn predictions_of_real_tools_are_read() {
    for (name, count, empty) in [
        ("preds_49.jsonl", 50, 0),
        ("preds_verified_3.jsonl", 3, 0),
        ("swe_agent_all_preds_1.jsonl", 1, 0),
        ("mini_preds_dict_groupA.json.gz", 101, 15),
    ] {
        let Some(path) = data(&format!("predictions/{name}")) else { continue };
        let found = predictions::read(&path).unwrap();
        let missing = |p: &&Prediction| p.model_patch.as_deref().unwrap_or_default().is_empty();
        assert_eq!((found.len(), found.iter().filter(missing).count()), (count, empty), "{name}");
        let folder = Folder::new();
        for text in [predictions::jsonl(&found).unwrap(), predictions::preds_json(&found).unwrap()]
        {
            let again = predictions::read(&folder.file("again", text.as_bytes())).unwrap();
            assert_eq!(again, found, "{name}");
        }
    }
}

#[test]
fn predictions_keep_every_byte_of_a_patch() {
    let folder = Folder::new();
    let prediction = |id: &str, patch: Option<&str>| Prediction {
        instance_id: id.parse().unwrap(),
        model_name_or_path: "m/n".parse().unwrap(),
        model_patch: patch.map(Into::into),
    };
    let want = [prediction("a", Some("\ndiff \u{1f}\r\n\n")), prediction("b", None)];
    for text in [predictions::jsonl(&want).unwrap(), predictions::preds_json(&want).unwrap()] {
        assert_eq!(predictions::read(&folder.file("p", text.as_bytes())).unwrap(), want);
    }
    let list = serde_json::to_string(&want).unwrap();
    assert_eq!(predictions::read(&folder.file("p", list.as_bytes())).unwrap(), want);
}

#[test]
fn predictions_with_two_patches_that_differ_are_refused_with_both_keys() {
    let folder = Folder::new();
    let diff = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n";
    for (bad, expected) in [
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": "", "test_result": {"git_patch": diff}}),
            "has no patch, unlike `test_result.git_patch` in `model_patch`",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": null, "patch": diff}),
            "has no patch, unlike `patch` in `model_patch`; keep the one that is meant",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": " \n", "full_output": diff}),
            "has no patch, unlike `full_output`",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": diff, "test_result": {"git_patch": format!("{diff}+c\n")}}),
            "has another patch than `test_result.git_patch` in `model_patch`",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": diff, "prediction": format!("{diff}+c\n")}),
            "has another patch than `prediction` in `model_patch`",
        ),
    ] {
        let error = predictions::read(&folder.file("p", bad.to_string().as_bytes())).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("entry 1") && error.contains(expected), "{bad}: {error}");
    }
    // Of one agent's output, and merged with a row of the data set.
    for (patch, more) in [
        (json!(diff), json!({"test_result": {"git_patch": format!("{diff}\n")}})),
        (
            json!(diff),
            json!({"patch": "diff --git a/b b/b\n", "full_output": "diff --git a/c b/c\n"}),
        ),
        (json!(""), json!({"test_patch": diff, "full_output": "I gave up."})),
    ] {
        let mut entry =
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": patch});
        entry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let read = predictions::read(&folder.file("p", entry.to_string().as_bytes())).unwrap();
        assert_eq!(read[0].model_patch.as_deref(), patch.as_str());
    }
}

#[test]
fn predictions_with_other_keys_are_refused_with_entry_and_key() {
    let folder = Folder::new();
    let good = json!({"instance_id": "a", "model_name_or_path": "m", "model_patch": null});
    let diff = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n";
    for (bad, expected) in [
        (
            json!({"instance_id": "b", "model": "m", "prediction": diff}),
            "has no `model_patch`; did you mean its value at `prediction`?",
        ),
        (json!({"instance_id": "b", "model_name_or_path": "m", "patch": "-"}), "`model_patch`?"),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model-patch": ""}),
            "has the key `model-patch`, which is not read; did you mean `model_patch`?",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": null, "Model_Patch": diff}),
            "has the key `Model_Patch`",
        ),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "test_result": {"git_patch": diff}}),
            "`test_result.git_patch`",
        ),
        (json!({"instance_id": "b", "model_name_or_path": "m", "cost": 1}), "`cost`"),
        (json!({"instance_id": "b", "model": "m", "model_patch": diff}), "`model_name_or_path`?"),
        (json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": 1}), "model_patch"),
        (
            json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": [diff]}),
            "model_patch",
        ),
        (json!({"instance_id": 7, "model_name_or_path": "m", "model_patch": diff}), "instance_id"),
        (
            json!({"instance": "b", "model_name_or_path": "m", "model_patch": diff}),
            "no `instance_id`",
        ),
    ] {
        for text in [format!("{good}\n{bad}"), json!([good, bad]).to_string()] {
            let error = predictions::read(&folder.file("p", text.as_bytes())).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("entry 2") && error.contains(expected), "{bad}: {error}");
        }
    }
    let bad = [json!({"instance_id": "b", "model": "m", "patch": diff}), json!(7), good.clone()];
    let entries = [&good, &bad[0], &bad[2], &bad[1]];
    let keyed = json!({"a": good, "b": {"patch": diff}, "c": bad[2], "d": {"instance_id": "e"}});
    for text in
        [json_lines(&entries.map(Value::clone)), json!(entries).to_string(), keyed.to_string()]
    {
        let error = predictions::read(&folder.file("p", text.as_bytes())).unwrap_err().to_string();
        let all = ["entry 2: has no `model_patch`", "`patch`?; entry", "entry 4: "];
        assert!(all.iter().all(|part| error.contains(part)), "{error}");
    }
    for text in [
        format!(
            "{good}\n{{\"instance_id\": \"b\", \"model_patch\": \"x\", \"model_patch\": \"\"}}"
        ),
        format!("{{\n\"a\": {good},\n\"a\": {good}}}"),
    ] {
        let error = predictions::read(&folder.file("p", text.as_bytes())).unwrap_err().to_string();
        assert!(error.contains("occurs twice"), "{error}");
    }
    let many = json!(vec![bad[0].clone(); 30]).to_string();
    let error = predictions::read(&folder.file("p", many.as_bytes())).unwrap_err().to_string();
    assert!(error.contains("entry 20: ") && error.ends_with("; and 10 more entries"), "{error}");

    let more = json!({"instance_id": "b", "model_name_or_path": "m", "model_patch": diff,
        "patch": "gold", "full_output": "text", "cost": 0.5, "prediction": "another"});
    let read = predictions::read(&folder.file("p", more.to_string().as_bytes())).unwrap();
    assert_eq!(read[0].model_patch.as_deref(), Some(diff));

    let keyed =
        json!({"a": good, "b": {"instance_id": "a", "model_name_or_path": "m", "model_patch": ""}});
    let error = predictions::read(&folder.file("p", keyed.to_string().as_bytes())).unwrap_err();
    assert!(error.to_string().contains("has the `instance_id` a under the id `b`"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn prop_loaders_never_panic(
        base in 0_usize..6, at in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 0..4),
        cut in 0.0..1.3_f64,
    ) {
        let lines = json_lines(&[swe_row("a-1"), r2e_row("b")]);
        let rows: Vec<SweRow> = vec![serde_json::from_value(swe_row("a-1")).unwrap()];
        let mut bytes = match base {
            0 => lines.into_bytes(),
            1 => gzip(lines.as_bytes()),
            2 => format!("[{}]", swe_row("a-1")).into_bytes(),
            3 => parquet(&rows, true, Compression::SNAPPY),
            4 => parquet(&rows, false, Compression::UNCOMPRESSED),
            _ => Vec::new(),
        };
        for (place, byte) in at {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place")]
            let index = (place * bytes.len() as f64) as usize;
            match bytes.get_mut(index) {
                Some(old) => *old = byte,
                None => bytes.push(byte),
            }
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place")]
        bytes.truncate((cut * bytes.len() as f64) as usize);
        let folder = Folder::new();
        let path = folder.file("any", &bytes);
        let found = load::rows(&path).map_or(0, |rows| rows.take(1000).count());
        prop_assert!(found < 1000);
        let _ = predictions::read(&path);
    }
}
