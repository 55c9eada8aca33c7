//! What is known of each fault so far, so that an interrupted command goes on.
//!
//! The invariant: an outcome is in the file before it counts, and a line that a crash cut short does not count.

use crate::args::MakeArgs;
use anyhow::{Context, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use fs_err::{File, OpenOptions};
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::repair::Repository;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write as _;

/// What became of one fault.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// A task that was proved.
    Row(Box<R2eRow>),
    /// No task, of this kind.
    #[serde(rename = "unfit")]
    Rejected(String),
    /// A task whose proof failed.
    Unproved {
        /// Its id.
        id: String,
        /// What the proof says.
        why: String,
    },
}

/// The first line: what the outcomes were made from.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    made_from: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    n: usize,
    outcome: Outcome,
}

/// The file of outcomes.
#[derive(Debug)]
pub(super) struct Journal {
    path: Utf8PathBuf,
    file: File,
    known: BTreeMap<usize, Outcome>,
}

impl Journal {
    /// Opens the journal at `path`, or begins it.
    pub(super) fn open(
        path: &Utf8Path,
        args: &MakeArgs,
        repository: &Repository,
    ) -> anyhow::Result<Self> {
        let made_from = digest(args, repository);
        let text = if path.exists() { fs_err::read_to_string(path)? } else { String::new() };
        // What follows the last line end was cut by a crash.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text.get(..whole).unwrap_or_default().lines();
        let mut known = BTreeMap::new();
        if let Some(head) = lines.next() {
            let head: Head =
                serde_json::from_str(head).with_context(|| format!("{path} is not a journal"))?;
            ensure!(
                head.made_from == made_from,
                "{path} was started from another repository or with other options; remove it to start \
                 again, or repeat the command as it was"
            );
            for line in lines {
                let Line { n, outcome } = serde_json::from_str(line)
                    .with_context(|| format!("{path} is damaged; remove it to start again"))?;
                known.insert(n, outcome);
            }
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.set_len(whole as u64)?;
        if whole == 0 {
            write(&mut file, &Head { made_from })?;
        }
        Ok(Self { path: path.to_owned(), file, known })
    }

    /// Outcomes of an earlier command, by place in the order of faults.
    pub(super) fn known(&self) -> BTreeMap<usize, Outcome> {
        self.known.clone()
    }

    /// Keeps the outcome of fault `n`.
    pub(super) fn put(&mut self, n: usize, outcome: &Outcome) -> anyhow::Result<()> {
        if self.known.contains_key(&n) {
            return Ok(());
        }
        write(&mut self.file, &Line { n, outcome: outcome.clone() })
    }

    /// Removes it: the rows are in their own files now.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        Ok(fs_err::remove_file(&self.path)?)
    }
}

fn write(file: &mut File, line: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(file.write_all(&text)?)
}

/// Everything that decides what a fault's outcome is.
fn digest(args: &MakeArgs, repository: &Repository) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut put = |part: &str| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    };
    put(env!("CARGO_PKG_VERSION"));
    put(&args.image);
    put(&args.seed.to_string());
    args.tests.iter().for_each(|path| put(path));
    for file in &repository.files {
        put(&file.path);
        put(&file.content);
    }
    hasher.finalize().to_hex().to_string()
}
