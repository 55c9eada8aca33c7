//! Records the outcome of each fault, so that an interrupted command can be resumed.
//!
//! The invariant: an outcome is written to the file before it is used, and a last line that a crash
//! left incomplete is ignored.

use crate::args::MakeArgs;
use crate::config::Settings;
use crate::error::{InputError, OutputError};
use crate::wiring;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_rollout::RewardSettings;
use orchestrate_sandbox::SandboxLimits;
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::repair::Repository;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};

/// Outcome of one fault.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// A verified task.
    Row(Box<R2eRow>),
    /// The fault does not become a task; the reason.
    #[serde(rename = "unfit")]
    Rejected(String),
    /// A task that could not be verified.
    #[serde(rename = "unproved")]
    Unverified {
        /// Id of the task.
        id: String,
        /// The problems that were found.
        why: String,
    },
}

/// The first line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    /// Digest of the command's inputs, in hexadecimal.
    made_from: String,
}

/// Every other line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    /// Position of the fault in the order in which faults are tried, from 0.
    n: usize,
    outcome: Outcome,
}

/// The file of outcomes.
#[derive(Debug)]
pub(super) struct Journal {
    path: Utf8PathBuf,
    file: File,
    /// Outcomes that the file contained when it was opened.
    known: BTreeMap<usize, Outcome>,
}

impl Journal {
    /// Opens the journal at `path`, or creates it.
    ///
    /// # Errors
    /// If it cannot be read or written, or was made by a command with other inputs.
    pub(super) fn open(
        path: &Utf8Path,
        args: &MakeArgs,
        settings: &Settings,
        repository: &Repository,
    ) -> anyhow::Result<Self> {
        let made_from = digest(args, settings, repository)?;
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => {
                return Err(InputError::Unreadable { file: path.to_owned(), source }.into());
            }
        };
        // Text after the last line feed is a line that a crash left incomplete.
        let complete = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text.get(..complete).unwrap_or_default().lines();
        let mut known = BTreeMap::new();
        if let Some(header) = lines.next() {
            let header: Header = serde_json::from_str(header)
                .map_err(|error| unusable(path, format!("it is not a journal: {error}")))?;
            if header.made_from != made_from {
                let why = "it was started from another repository or with other options; remove it to \
                           start again, or repeat the original command";
                return Err(unusable(path, why.to_owned()).into());
            }
            for (place, line) in lines.enumerate() {
                // After the header.
                let place = place + 2;
                let damaged = |why: String| {
                    let why =
                        format!("its line {place} is damaged; remove it to start again: {why}");
                    unusable(path, why)
                };
                let Line { n, outcome } =
                    serde_json::from_str(line).map_err(|error| damaged(error.to_string()))?;
                if known.insert(n, outcome).is_some() {
                    // Two commands wrote it at the same time, or it was put together by hand.
                    return Err(damaged(format!("fault {n} has two outcomes")).into());
                }
            }
        }
        let failed = |source| OutputError { file: path.to_owned(), source };
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        file.set_len(complete as u64).map_err(failed)?;
        if complete == 0 {
            write(&mut file, &Header { made_from }).map_err(failed)?;
        }
        Ok(Self { path: path.to_owned(), file, known })
    }

    /// Outcomes of an earlier, interrupted command, by position in the order of faults.
    pub(super) fn known(&self) -> BTreeMap<usize, Outcome> {
        self.known.clone()
    }

    /// Records the outcome of the fault at position `n`, unless it is already recorded.
    pub(super) fn record(&mut self, n: usize, outcome: &Outcome) -> anyhow::Result<()> {
        if self.known.contains_key(&n) {
            return Ok(());
        }
        let line = Line { n, outcome: outcome.clone() };
        Ok(write(&mut self.file, &line).map_err(|source| self.failed(source))?)
    }

    /// Removes the file, once the rows are in their own files.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(&self.path).map_err(|source| self.failed(source))?)
    }

    fn failed(&self, source: io::Error) -> OutputError {
        OutputError { file: self.path.clone(), source }
    }
}

fn unusable(path: &Utf8Path, why: String) -> InputError {
    InputError::Journal { file: path.to_owned(), why }
}

fn write(file: &mut File, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

/// Digest of everything that determines the outcomes: version, image, seed, tests, rules, limits and
/// repository.
fn digest(args: &MakeArgs, settings: &Settings, repository: &Repository) -> anyhow::Result<String> {
    let RewardSettings { compat, harness, strict } = settings.reward;
    let rules = serde_json::to_string(&(compat, harness, strict))?;
    let SandboxLimits { memory, cpu_millis, pids, tmpfs } = wiring::limits(settings);
    let mut hasher = blake3::Hasher::new();
    let mut put = |part: &str| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    };
    put(env!("CARGO_PKG_VERSION"));
    put(&args.image);
    put(&args.seed.to_string());
    args.tests.iter().for_each(|path| put(path));
    put(&rules);
    put(&format!("{memory}, {cpu_millis}, {pids}, {tmpfs}"));
    for file in &repository.files {
        put(&file.path);
        put(&file.content);
    }
    Ok(hasher.finalize().to_hex().to_string())
}
