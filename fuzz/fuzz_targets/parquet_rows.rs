//! Parquet files of task rows: a changed file gives rows or refusals, and reading ends. Panics of the
//! parquet library are caught by the reader and do not count; any other panic does.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::load;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::sync::{Arc, Once, OnceLock};

const COLUMNS: [(&str, &str); 8] = [
    ("instance_id", "a-1"),
    ("repo", "pallets/flask"),
    ("version", "2.0"),
    ("base_commit", "c"),
    ("problem_statement", "p"),
    ("test_patch", "d"),
    ("FAIL_TO_PASS", "[\"t\"]"),
    ("PASS_TO_PASS", "[]"),
];

#[derive(Debug, Arbitrary)]
struct Input {
    compressed: bool,
    changes: Vec<Change>,
}

fn file(compression: Compression) -> Vec<u8> {
    let columns: String =
        COLUMNS.iter().map(|(name, _)| format!("required binary {name} (UTF8);")).collect();
    let schema =
        parse_message_type(&format!("message rows {{ {columns} }}")).expect("a valid schema");
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::new(properties))
        .expect("memory");
    let mut group = writer.next_row_group().expect("memory");
    for (_, value) in COLUMNS {
        let mut column = group.next_column().expect("memory").expect("a column");
        let values: Vec<ByteArray> = (0..2).map(|_| ByteArray::from(value)).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).expect("memory");
        column.close().expect("memory");
    }
    group.close().expect("memory");
    writer.close().expect("memory");
    bytes
}

/// Ends the process on a panic outside the parquet library, as the fuzzer's own hook does on any.
fn only_own_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let abort = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let place = panic.location().map(|at| at.file().to_owned()).unwrap_or_default();
            let own = place.contains("crates/") || place.contains("fuzz_targets");
            if own && !place.contains("registry") {
                abort(panic);
            }
        }));
    });
}

fuzz_target!(|input: Input| {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let files = FILES.get_or_init(|| [file(Compression::UNCOMPRESSED), file(Compression::SNAPPY)]);
    only_own_panics();
    let mut bytes = files[usize::from(input.compressed)].clone();
    input::change(&mut bytes, &input.changes);
    let path =
        camino::Utf8PathBuf::from(format!("/dev/shm/orchestrate-parquet-{}", std::process::id()));
    std::fs::write(&path, &bytes).expect("a temporary file");
    let Ok(rows) = load::rows(&path) else { return };
    let rows: Vec<_> = rows.take(1 + bytes.len()).collect();
    assert!(rows.len() <= bytes.len(), "more rows than bytes");
    if input.changes.is_empty() {
        // The second row has the id of the first.
        assert!(rows.len() == 2 && rows[0].is_ok(), "{rows:?}");
    }
});
