//! Rows of any family from a file: JSON lines, JSON or parquet, plain or compressed with gzip.
//!
//! The invariant: an invalid row never hides the valid ones after it, and is reported with its
//! position, id and reason. A file that is damaged as a whole is an error. Rows are read one by
//! one, so a file may be larger than memory, except for JSON that is one document.

mod hub;
mod hub_files;
mod nemo_gym;
mod parquet_file;

use crate::harbor::{self, HarborRow};
use crate::plain::{self, PlainRow};
use crate::r2e::{R2eRow, RowError};
use crate::repair;
use crate::swe::{Harness, SweRow};
use crate::task::Task;
use crate::text::printable;
use crate::{column, keys};
use camino::{Utf8Path, Utf8PathBuf};
use flate2::read::MultiGzDecoder;
pub use hub::HubError;
use hub::HubSource;
use orchestrate_types::{UniqueKeys, exact_json};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::io::{BufRead, BufReader, Chain, Cursor, Read};

/// Maximum size of one row in bytes, which also limits what a small compressed file can expand to.
const ROW_BYTES: u64 = 512 << 20;
/// Maximum depth of `extra_info` columns around a repackaged row.
const WRAPPERS: usize = 3;
/// Number of lines that may fail before the first row, after which the file is given up.
const LINES_TRIED: usize = 20;
/// Reason for refusing a file without a single entry.
const NOT_ROWS: &str =
    "this is not a task file (JSON lines, a JSON list or parquet; gzip is allowed)";
/// The byte order mark of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Number of invalid predictions that an error names.
const ENTRIES_NAMED: usize = 20;
/// Number of characters of an id, and of a reason, that are printed.
const ID_CHARS: usize = 120;
const REASON_CHARS: usize = 400;

/// A row of a known task family.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// R2E-Gym, or a `micro` or `repair` row in the same columns.
    R2e(Box<R2eRow>),
    /// SWE-bench and its family: SWE-Gym, SWE-rebench, SWE-smith.
    Swe(Box<SweRow>),
    /// A task whose environment an external worker provides.
    Plain(Box<PlainRow>),
    /// A Harbor task.
    Harbor(Box<HarborRow>),
}

impl Row {
    /// The task's id.
    pub fn id(&self) -> String {
        match self {
            Self::R2e(row) => row.id(),
            Self::Swe(row) => row.instance_id.clone(),
            Self::Plain(row) => row.id().to_owned(),
            Self::Harbor(row) => row.id.clone(),
        }
    }

    /// The task family: `micro`, `repair`, `r2e`, `plain`, `harbor`, or that of
    /// [`SweFamily::name`](crate::swe::SweFamily).
    pub fn environment(&self) -> &'static str {
        match self {
            Self::R2e(row) if row.micro.is_some() => "micro",
            Self::R2e(row) if row.repair.is_some() => repair::ENVIRONMENT,
            Self::R2e(_) => "r2e",
            Self::Swe(row) => row.family().name(),
            Self::Plain(_) => plain::ENVIRONMENT,
            Self::Harbor(_) => harbor::ENVIRONMENT,
        }
    }

    /// The repository, as the data set names it.
    pub fn repo(&self) -> &str {
        match self {
            Self::R2e(row) => &row.repo_name,
            Self::Swe(row) => &row.repo,
            Self::Plain(row) => row.family(),
            Self::Harbor(row) => &row.name,
        }
    }

    /// The issue text that the agent reads.
    pub fn issue(&self) -> &str {
        match self {
            Self::R2e(row) => row.issue(),
            Self::Swe(row) => &row.problem_statement,
            Self::Plain(row) => row.prompt(),
            Self::Harbor(row) => row.steps.first().map_or("", |step| &step.instruction),
        }
    }

    /// The container image that the task runs in; empty for plain rows.
    pub fn image(&self) -> String {
        match self {
            Self::R2e(row) => row.docker_image.clone(),
            Self::Swe(row) => row.image(),
            Self::Plain(_) => String::new(),
            Self::Harbor(row) => row.image.name.clone(),
        }
    }

    /// The reason why this version of SWE-bench's harness cannot grade the row; `None` if it can, and
    /// for rows that it does not grade.
    fn problem_with(&self, harness: Harness) -> Option<String> {
        match self {
            Self::Swe(row) => row.problem_with(harness),
            Self::R2e(_) | Self::Plain(_) | Self::Harbor(_) => None,
        }
    }

    /// The only version of SWE-bench's harness that can grade the row; `None` if that does not matter.
    pub fn only_harness(&self) -> Option<Harness> {
        let mut able =
            Harness::ALL.into_iter().filter(|&harness| self.problem_with(harness).is_none());
        able.next().filter(|_| able.next().is_none())
    }

    /// Converts the row to a task.
    ///
    /// # Errors
    /// Never for a row returned by [`rows`], which checks it.
    pub fn to_task(&self) -> Result<Task, RowError> {
        match self {
            Self::R2e(row) => row.to_task(),
            Self::Swe(row) => Ok(row.to_task()),
            Self::Plain(row) => Ok(row.to_task()),
            Self::Harbor(row) => {
                row.to_task().map_err(|problem| RowError::Column { row: row.id.clone(), problem })
            }
        }
    }

    /// Reads a row from its JSON value.
    ///
    /// # Errors
    /// The reason why it is not a row, or cannot be a task.
    fn from_value(mut value: Value) -> Result<Self, String> {
        let has = |value: &Value, column: &str| value.get(column).is_some();
        let reason = |error: serde_path_to_error::Error<serde_json::Error>| error.to_string();
        if has(&value, "FAIL_TO_PASS") {
            if has(&value, "test_cmds") {
                return Err(
                    "is a row of SWE-bench-Live (column `test_cmds`), which is not supported: \
                    its images and commands are its own"
                        .to_owned(),
                );
            }
            if let Value::Object(columns) = &value {
                keys::check(columns, &SweRow::COLUMNS, &[])?;
                keys::check_image(columns, &["image", "docker_image", "image_name"])?;
            }
            let row = serde_path_to_error::deserialize::<_, SweRow>(value).map_err(reason)?;
            match row.problem() {
                Some(problem) => Err(problem),
                None => Ok(Self::Swe(Box::new(row))),
            }
        } else if has(&value, "expected_output_json") || has(&value, "parsed_commit_content") {
            if let Value::Object(columns) = &value {
                keys::check(columns, &R2eRow::COLUMNS, &R2eRow::OTHER_NAMES)?;
                let named = ["docker_image", "image", "image_name"];
                let named = named.map(|column| Some((column, columns.get(column)?.as_str()?)));
                let named: Vec<_> = named.into_iter().flatten().collect();
                column::same_image(&named).map_err(|problem| problem.to_string())?;
            }
            let row = serde_path_to_error::deserialize::<_, R2eRow>(value).map_err(reason)?;
            match row.to_task() {
                Err(error) => Err(error.to_string()),
                Ok(_) => Ok(Self::R2e(Box::new(row))),
            }
        } else if let Some(row) = value.get_mut("harbor").map(Value::take) {
            HarborRow::check_keys(&row)?;
            if let Value::Object(columns) = &value {
                keys::check_image(columns, &["harbor.image.name"])?;
            }
            let row = serde_path_to_error::deserialize::<_, HarborRow>(row).map_err(reason)?;
            match row.to_task() {
                Err(problem) => Err(problem.to_string()),
                Ok(_) => Ok(Self::Harbor(Box::new(row))),
            }
        } else if PlainRow::matches(&value) {
            Ok(Self::Plain(Box::new(PlainRow::from_value(value)?)))
        } else {
            Err("has none of the columns `expected_output_json` (R2E-Gym), `FAIL_TO_PASS` (SWE-bench, \
                 SWE-Gym, SWE-rebench, SWE-smith), `harbor`, and `id` with `prompt` (plain rows)"
                .to_owned())
        }
    }
}

/// A row that was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "row {row} ({}): {}",
    printable(id.as_deref().unwrap_or("without id"), ID_CHARS),
    printable(reason, REASON_CHARS)
)]
pub struct Refused {
    /// Position of the row in the file, from 1.
    pub row: usize,
    /// Id of the row, if it has one.
    pub id: Option<String>,
    /// Why the row was refused.
    pub reason: String,
}

/// A file of rows or predictions that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Reading failed.
    #[error("cannot read {path}")]
    Io {
        /// The file.
        path: Utf8PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The compressed file is truncated or corrupt.
    #[error("{path} is a truncated or corrupt gzip file; download or compress it again")]
    Damaged {
        /// The file.
        path: Utf8PathBuf,
        /// The decoder's reason.
        source: std::io::Error,
    },
    /// A data set of the Hugging Face hub cannot be fetched.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Entries are not predictions.
    #[error("{path}, {}", listed(entries))]
    Entries {
        /// The file.
        path: Utf8PathBuf,
        /// The entries by their position in the file, from 1, with the reason for each; not empty.
        entries: Vec<(usize, String)>,
    },
}

/// The first of these entries, and the number of the others.
fn listed(entries: &[(usize, String)]) -> String {
    let named = entries.iter().take(ENTRIES_NAMED);
    let named: Vec<String> = named.map(|(n, reason)| format!("entry {n}: {reason}")).collect();
    let more = match entries.len().saturating_sub(ENTRIES_NAMED) {
        0 => String::new(),
        more => format!("; and {more} more entries"),
    };
    format!("{}{more}", named.join("; "))
}

/// Pins `path` to a commit where it names a data set of the Hugging Face hub, so that the rows
/// loaded from it stay the same; any other path is returned unchanged. Blocking.
///
/// # Errors
/// If the hub does not know the data set, or cannot be reached.
pub fn pinned(path: &str) -> Result<String, LoadError> {
    match HubSource::parse(path) {
        None => Ok(path.to_owned()),
        Some(source) => Ok(source?.pinned()?),
    }
}

/// Whether `path` names a data set of the Hugging Face hub instead of a local file.
pub fn is_on_hub(path: &str) -> bool {
    HubSource::parse(path).is_some()
}

/// The rows of `path`, usable and refused. The format is detected from the file's first bytes. A
/// path may name a data set of the Hugging Face hub, `hf://datasets/OWNER/NAME[@REVISION][/PATH]`,
/// whose files are fetched to its cache. Blocking.
///
/// # Errors
/// If the file cannot be opened or fetched, or is a truncated or corrupt gzip file.
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
        let id_of_record = id(&value);
        let value = unwrapped(value, WRAPPERS).map_err(|reason| Refused {
            row,
            id: id_of_record,
            reason,
        })?;
        let id = id(&value);
        let found = Row::from_value(value).map_err(|reason| Refused { row, id, reason })?;
        match seen.insert(found.id(), row) {
            None => Ok(found),
            Some(first) => {
                let reason = format!("has the id of row {first}");
                Err(Refused { row, id: Some(found.id()), reason })
            }
        }
    }))
}

/// The rows of `path`, as [`rows`]; those that this version of SWE-bench's harness cannot grade are
/// refused with the version that can.
///
/// # Errors
/// As [`rows`].
pub fn rows_for(
    path: &Utf8Path,
    harness: Harness,
) -> Result<impl Iterator<Item = Result<Row, Refused>> + use<>, LoadError> {
    Ok(rows(path)?.enumerate().map(move |(n, row)| {
        let row = row?;
        match row.problem_with(harness) {
            None => Ok(row),
            Some(reason) => Err(Refused { row: n + 1, id: Some(row.id()), reason }),
        }
    }))
}

/// Entries, or the reasons why they cannot be read.
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
    let is_gzip = magic.starts_with(&[0x1f, 0x8b]);
    if is_gzip {
        check_gzip(path)?;
    }
    let start = magic.into_iter().take(read).collect::<Vec<_>>();
    let whole: Chain<Cursor<Vec<u8>>, fs_err::File> = Cursor::new(start).chain(file);
    if is_gzip {
        return text_values(BufReader::new(MultiGzDecoder::new(whole))).map_err(io);
    }
    text_values(BufReader::new(whole)).map_err(io)
}

/// Decompresses the whole file once, so that damage is found before any of its rows is used.
fn check_gzip(path: &Utf8Path) -> Result<(), LoadError> {
    let file = fs_err::File::open(path)
        .map_err(|source| LoadError::Io { path: path.to_owned(), source })?;
    std::io::copy(&mut MultiGzDecoder::new(file), &mut std::io::sink())
        .map(drop)
        .map_err(|source| LoadError::Damaged { path: path.to_owned(), source })
}

/// The entries of a text file: those of a JSON list, or one per line. A byte order mark is skipped.
fn text_values(mut text: impl BufRead + 'static) -> std::io::Result<Values> {
    if text.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        text.consume(BYTE_ORDER_MARK.len());
    }
    let first = loop {
        let part = text.fill_buf()?;
        let blank = part.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        if blank < part.len() || part.is_empty() {
            break part.get(blank).copied();
        }
        text.consume(blank);
    };
    if first == Some(b'[') {
        let mut list = Vec::new();
        text.read_to_end(&mut list)?;
        let start = list.iter().position(|byte| *byte == b'[').map_or(0, |bracket| bracket + 1);
        let mut elements = ListElements { text: list, start, at: start, done: false };
        return Ok(Box::new(std::iter::from_fn(move || elements.next())));
    }
    let lines = JsonLines { text, failed: false };
    let mut entries = Entries { lines, first: VecDeque::new(), started: false };
    Ok(Box::new(std::iter::from_fn(move || entries.next())))
}

/// Entries of JSON lines. A file without any valid entry is refused once, not once per line.
#[derive(Debug)]
struct Entries<R> {
    lines: JsonLines<R>,
    /// Entries up to the first valid one that were read but not returned yet.
    first: VecDeque<Result<Value, String>>,
    started: bool,
}

impl<R: BufRead> Entries<R> {
    fn next(&mut self) -> Option<Result<Value, String>> {
        if !std::mem::replace(&mut self.started, true) {
            self.read_first();
        }
        self.first.pop_front().or_else(|| self.lines.next())
    }

    fn read_first(&mut self) {
        while self.first.len() < LINES_TRIED {
            let Some(entry) = self.lines.next() else { break };
            let is_good = entry.is_ok();
            self.first.push_back(entry);
            if is_good {
                return;
            }
        }
        if self.first.len() > 1 {
            self.first = [Err(NOT_ROWS.to_owned())].into();
            self.lines.failed = true;
        }
    }
}

/// JSON objects, each starting on a new line; one may span several lines.
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
        let problem = match json_value(line) {
            Ok(value) if !value.is_object() => return Err("is not a JSON object".to_owned()),
            Ok(value) => return Ok(value),
            Err(problem) => problem,
        };
        // A line with only an opening brace starts a document that spans several lines.
        if line.trim_ascii() == b"{" {
            let rest = self.text.by_ref().take(ROW_BYTES);
            let mut document = serde_json::Deserializer::from_reader(line.chain(rest));
            return match UniqueKeys::deserialize(&mut document) {
                Ok(UniqueKeys(value)) => Ok(value),
                Err(error) => {
                    self.failed = true;
                    Err(not_json(error))
                }
            };
        }
        Err(problem)
    }
}

/// The value of an entry.
///
/// # Errors
/// The reason if it is not JSON, or would lose a repeated key or digits of a number.
fn json_value(text: &[u8]) -> Result<Value, String> {
    exact_json(text).map_err(not_json)
}

fn not_json(error: impl Display) -> String {
    format!("is not JSON: {error}")
}

/// The elements of a JSON list, found by its brackets and quotes alone, so that an invalid element (one
/// with `NaN`, say) does not hide those after it.
#[derive(Debug)]
struct ListElements {
    text: Vec<u8>,
    /// Where the first element begins.
    start: usize,
    /// Where the next element begins.
    at: usize,
    done: bool,
}

impl ListElements {
    fn next(&mut self) -> Option<Result<Value, String>> {
        if self.done {
            let rest = std::mem::take(&mut self.text).split_off(self.at);
            self.at = 0;
            return (!rest.trim_ascii().is_empty())
                .then(|| Err("is not a part of the list, which ends before it".to_owned()));
        }
        let rest = self.text.get(self.at..).unwrap_or_default();
        let Some(length) = element_length(rest) else {
            self.done = true;
            self.at = self.text.len();
            return Some(Err("is not complete: the file ends before the list does".to_owned()));
        };
        let element = rest.get(..length).unwrap_or_default();
        self.done = rest.get(length) == Some(&b']');
        let is_empty_list = self.done && self.at == self.start && element.trim_ascii().is_empty();
        let value = json_value(element);
        self.at += length + 1;
        if is_empty_list { self.next() } else { Some(value) }
    }
}

/// Length of the text up to the comma or bracket that ends an element; `None` if there is none.
fn element_length(text: &[u8]) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    text.iter().position(|byte| {
        if in_string {
            in_string = escaped || *byte != b'"';
            escaped = !escaped && *byte == b'\\';
            return false;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => depth += 1,
            b',' | b']' if depth == 0 => return true,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        false
    })
}

/// The row inside an entry of a trainer's data set: rLLM and verl store it in `extra_info`, as an
/// object or as JSON text, and NeMo-Gym in members of its own. At most `depth` levels are
/// unwrapped.
///
/// # Errors
/// The reason why the entry has no row that can be a task.
fn unwrapped(mut value: Value, depth: usize) -> Result<Value, String> {
    let has = |column: &str| value.get(column).is_some();
    if depth == 0 || has("FAIL_TO_PASS") || has("expected_output_json") || has("harbor") {
        return Ok(value);
    }
    if let Some(inner) = nemo_gym::inner(&mut value) {
        return unwrapped(inner?, depth - 1);
    }
    // A column without a row in it stays: it may be a plain row's own.
    let Some(inner) = parsed(value.get("extra_info").cloned()) else { return Ok(value) };
    unwrapped(inner, depth - 1)
}

/// An object as it is, or the JSON value that a text contains.
fn parsed(value: Option<Value>) -> Option<Value> {
    match value? {
        Value::String(text) => exact_json(text.as_bytes()).ok(),
        inner @ Value::Object(_) => Some(inner),
        _ => None,
    }
}

/// The id of a row that may be invalid.
fn id(row: &Value) -> Option<String> {
    let text = |column: &str| Some(row.get(column)?.as_str()?.to_owned());
    let of_commit = || Some(format!("{}__{}", text("repo_name")?, text("commit_hash")?));
    let of_harbor = || Some(row.get("harbor")?.get("id")?.as_str()?.to_owned());
    text("instance_id").or_else(of_commit).or_else(of_harbor).or_else(|| text("id"))
}
