//! Rows of any family from a file: JSON lines, JSON or parquet, plain or compressed by gzip.
//!
//! The invariant: a bad row never hides the good ones behind it, and is named by its place, its id
//! and its reason; rows are read one by one, so a file may be larger than memory (but for JSON
//! that is one document).

mod hub;
mod parquet_file;

use crate::r2e::{R2eRow, RowError};
use crate::repair;
use crate::swe::SweRow;
use crate::task::Task;
use camino::{Utf8Path, Utf8PathBuf};
use flate2::read::MultiGzDecoder;
pub use hub::HubError;
use hub::HubSource;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Chain, Cursor, Read};

/// Bytes of one row; a longer one is no row, or a bomb.
const ROW_BYTES: u64 = 512 << 20;
/// How deep repackaged rows lie in columns `extra_info`.
const WRAPPERS: usize = 3;

/// A row of a known family.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// R2E-Gym, or our own `micro` rows in its columns.
    R2e(Box<R2eRow>),
    /// SWE-bench: full, Lite or Verified.
    Swe(Box<SweRow>),
}

impl Row {
    /// Its id.
    pub fn id(&self) -> String {
        match self {
            Self::R2e(row) => row.id(),
            Self::Swe(row) => row.instance_id.clone(),
        }
    }

    /// Its family: `micro`, `repair`, `r2e` or `swe-bench`.
    pub fn environment(&self) -> &'static str {
        match self {
            Self::R2e(row) if row.micro.is_some() => "micro",
            Self::R2e(row) if row.repair.is_some() => repair::ENVIRONMENT,
            Self::R2e(_) => "r2e",
            Self::Swe(_) => "swe-bench",
        }
    }

    /// Its repository, as the data set names it.
    pub fn repo(&self) -> &str {
        match self {
            Self::R2e(row) => &row.repo_name,
            Self::Swe(row) => &row.repo,
        }
    }

    /// What the agent reads.
    pub fn issue(&self) -> &str {
        match self {
            Self::R2e(row) => row.issue(),
            Self::Swe(row) => &row.problem_statement,
        }
    }

    /// The image it runs in.
    pub fn image(&self) -> String {
        match self {
            Self::R2e(row) => row.docker_image.clone(),
            Self::Swe(row) => row.image(),
        }
    }

    /// Its task.
    ///
    /// # Errors
    /// Never for a row that was loaded: loading checks it.
    pub fn to_task(&self) -> Result<Task, RowError> {
        match self {
            Self::R2e(row) => row.to_task(),
            Self::Swe(row) => Ok(row.to_task()),
        }
    }

    /// Reads a decoded row.
    ///
    /// # Errors
    /// Says why it is no row, or cannot be a task.
    fn of(value: Value) -> Result<Self, String> {
        let has = |column: &str| value.get(column).is_some();
        let said = |error: serde_path_to_error::Error<serde_json::Error>| error.to_string();
        if has("FAIL_TO_PASS") {
            let row = serde_path_to_error::deserialize::<_, SweRow>(value).map_err(said)?;
            match row.problem() {
                Some(problem) => Err(problem),
                None => Ok(Self::Swe(Box::new(row))),
            }
        } else if has("expected_output_json") || has("parsed_commit_content") {
            let row = serde_path_to_error::deserialize::<_, R2eRow>(value).map_err(said)?;
            match row.to_task() {
                Err(error) => Err(error.to_string()),
                Ok(_) => Ok(Self::R2e(Box::new(row))),
            }
        } else {
            let columns = "`expected_output_json`, as R2E-Gym has it, nor `FAIL_TO_PASS`";
            Err(format!("has neither a column {columns}, as SWE-bench has it"))
        }
    }
}

/// A row that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("row {row} ({}): {reason}", id.as_deref().unwrap_or("without id"))]
pub struct Refused {
    /// Its place in the file, from 1.
    pub row: usize,
    /// Its id, if it has one.
    pub id: Option<String>,
    /// What is wrong with it.
    pub reason: String,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Reading failed.
    #[error("cannot read {path}")]
    Io {
        /// The file.
        path: Utf8PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A data set of the Hugging Face hub cannot be had.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// An entry is not what the file should hold.
    #[error("{path}, entry {entry}: {reason}")]
    Entry {
        /// The file.
        path: Utf8PathBuf,
        /// Which one, from 1.
        entry: usize,
        /// What is wrong.
        reason: String,
    },
}

impl LoadError {
    pub(crate) fn entry(path: &Utf8Path, entry: usize, reason: String) -> Self {
        Self::Entry { path: path.to_owned(), entry, reason }
    }
}

/// `path` as it is, or, where it names a data set of the Hugging Face hub, at the commit that it has
/// now: rows loaded by the answer stay the same. Blocking.
///
/// # Errors
/// If the hub does not know the data set, or cannot be reached.
pub fn pinned(path: &str) -> Result<String, LoadError> {
    match HubSource::parse(path) {
        None => Ok(path.to_owned()),
        Some(source) => Ok(source?.pinned()?),
    }
}

/// The rows of `path`, good and bad. The format is known by the file's first bytes. A path may name
/// a data set of the Hugging Face hub, `hf://datasets/OWNER/NAME[@REVISION][/PATH]`, whose files are
/// fetched to its cache. Blocking.
///
/// # Errors
/// If the file cannot be opened, or fetched.
pub fn rows(
    path: &Utf8Path,
) -> Result<impl Iterator<Item = Result<Row, Refused>> + use<>, LoadError> {
    let files = match HubSource::parse(path.as_str()) {
        None => vec![path.to_owned()],
        Some(source) => source?.fetch()?,
    };
    let files = files.iter().map(|file| values(file)).collect::<Result<Vec<_>, _>>()?;
    let mut seen = HashMap::new();
    Ok(files.into_iter().flatten().enumerate().map(move |(n, value)| {
        let row = n + 1;
        let value = value.map_err(|reason| Refused { row, id: None, reason })?;
        let value = unwrapped(value, WRAPPERS);
        let id = id(&value);
        let found = Row::of(value).map_err(|reason| Refused { row, id, reason })?;
        match seen.insert(found.id(), row) {
            None => Ok(found),
            Some(first) => {
                let reason = format!("has the id of row {first}");
                Err(Refused { row, id: Some(found.id()), reason })
            }
        }
    }))
}

/// Entries, or what is wrong with them.
pub(crate) type Values = Box<dyn Iterator<Item = Result<Value, String>>>;

/// The entries of a file, as JSON.
pub(crate) fn values(path: &Utf8Path) -> Result<Values, LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), source };
    let mut file = fs_err::File::open(path).map_err(io)?;
    let mut magic = [0_u8; 4];
    let mut read = 0;
    while let Some(rest) = magic.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match file.read(rest).map_err(io)? {
            0 => break,
            more => read += more,
        }
    }
    if &magic == b"PAR1" {
        return Ok(parquet_file::values(file.into_parts().0));
    }
    let start = magic.into_iter().take(read).collect::<Vec<_>>();
    let whole: Chain<Cursor<Vec<u8>>, fs_err::File> = Cursor::new(start).chain(file);
    if magic.starts_with(&[0x1f, 0x8b]) {
        return text_values(BufReader::new(MultiGzDecoder::new(whole))).map_err(io);
    }
    text_values(BufReader::new(whole)).map_err(io)
}

/// Entries of a text: those of one JSON document, or one per line.
fn text_values(mut text: impl BufRead + 'static) -> std::io::Result<Values> {
    let first = loop {
        let part = text.fill_buf()?;
        let blank = part.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        if blank < part.len() || part.is_empty() {
            break part.get(blank).copied();
        }
        text.consume(blank);
    };
    if first == Some(b'[') {
        return Ok(match serde_json::from_reader::<_, Vec<Value>>(text) {
            Ok(entries) => Box::new(entries.into_iter().map(Ok)),
            Err(error) => Box::new(std::iter::once(Err(format!("is not JSON: {error}")))),
        });
    }
    let mut lines = JsonLines { text, failed: false };
    Ok(Box::new(std::iter::from_fn(move || lines.next())))
}

/// JSON objects, each from a new line on; one may be spread over lines, as a document is that
/// people shall read.
#[derive(Debug)]
struct JsonLines<R> {
    text: R,
    failed: bool,
}

impl<R: BufRead> JsonLines<R> {
    fn next(&mut self) -> Option<Result<Value, String>> {
        while !self.failed {
            let mut line = Vec::new();
            let read = self.text.by_ref().take(ROW_BYTES).read_until(b'\n', &mut line);
            match read {
                Err(error) => {
                    self.failed = true;
                    return Some(Err(format!("cannot be read: {error}")));
                }
                Ok(0) => return None,
                Ok(read) if read as u64 == ROW_BYTES => {
                    self.failed = true;
                    return Some(Err(format!("is longer than {ROW_BYTES} bytes")));
                }
                Ok(_) if line.trim_ascii().is_empty() => {}
                Ok(_) => return Some(self.entry(&line)),
            }
        }
        None
    }

    fn entry(&mut self, line: &[u8]) -> Result<Value, String> {
        let error = match serde_json::from_slice(line) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        // A line that only begins an object begins a document that goes on.
        if line.trim_ascii() == b"{" {
            let rest = self.text.by_ref().take(ROW_BYTES);
            let mut document = serde_json::Deserializer::from_reader(line.chain(rest));
            return Value::deserialize(&mut document).map_err(|error| {
                self.failed = true;
                format!("is not JSON: {error}")
            });
        }
        Err(format!("is not JSON: {error}"))
    }
}

/// The row inside columns of a trainer's own data set: rLLM and verl keep it in `extra_info`,
/// decoded or as a text.
fn unwrapped(mut value: Value, depth: usize) -> Value {
    let has = |column: &str| value.get(column).is_some();
    if depth == 0 || has("FAIL_TO_PASS") || has("expected_output_json") {
        return value;
    }
    let inner = match value.get_mut("extra_info").map(Value::take) {
        Some(Value::String(text)) => serde_json::from_str(&text).ok(),
        Some(inner @ Value::Object(_)) => Some(inner),
        _ => None,
    };
    inner.map_or(value, |inner| unwrapped(inner, depth - 1))
}

/// What names a row that may be broken.
fn id(row: &Value) -> Option<String> {
    let text = |column: &str| Some(row.get(column)?.as_str()?.to_owned());
    let of_commit = || Some(format!("{}__{}", text("repo_name")?, text("commit_hash")?));
    text("instance_id").or_else(of_commit)
}
