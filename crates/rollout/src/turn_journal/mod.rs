//! What external agents were told, in a file per attempt, so that a run that was killed continues their
//! episodes.
//!
//! A request is recorded when it begins to be sampled, and its reply before any client gets it. After a
//! kill, [`TurnJournals::resume`] reads the records, and the conversation repeats them with the recorded
//! engine calls in place of the engine. `frames.rs` has the file's form, `record.rs` the records,
//! `interned.rs` leaves out what earlier requests had.
//!
//! Nothing is synced: what a killed process has written is safe, and what a machine loses with its power is
//! found to be cut or damaged, so that the attempt is run again. A file is removed once its attempt has an
//! outcome.

#[cfg(any(test, fuzzing))]
pub(crate) mod drawn;
mod frames;
mod interned;
mod record;
#[cfg(test)]
mod tests;

use camino::{Utf8Path, Utf8PathBuf};
use frames::{frame, payloads};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use interned::Interned;
use orchestrate_gateway::LeaseRecord;
use orchestrate_types::{AttemptId, ModelShape};
pub(crate) use record::{ConversationRecord, LimitRecord, RepliedRecord, TakenRecord};
use record::{Described, MalformedRecord, decode, describe, encode, read};
use std::collections::{BTreeMap, HashSet};
use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// What the name of a file ends with, after its attempt.
const SUFFIX: &str = ".turns";

/// Why a turn journal cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TurnJournalError {
    /// A file operation failed. The error names the file.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A record cannot be written, or none was written since an earlier one failed.
    #[error("{path} cannot be written: {problem}")]
    Unwritten {
        /// The file.
        path: Utf8PathBuf,
        /// Why.
        problem: String,
    },
    /// Something else has the name of a turn journal.
    #[error("{path} is not a regular file, so it is not a turn journal; remove it")]
    NotAFile {
        /// Its path.
        path: Utf8PathBuf,
    },
    /// The file is not as it was written.
    #[error("{path} is damaged: {problem}")]
    Damaged {
        /// The file.
        path: Utf8PathBuf,
        /// What does not fit.
        problem: String,
    },
}

/// The turn journals of a run.
#[derive(Debug)]
pub struct TurnJournals {
    folder: Utf8PathBuf,
    /// Attempts of an earlier process that can be continued, with their leases.
    unfinished: Mutex<BTreeMap<AttemptId, LeaseRecord>>,
}

impl TurnJournals {
    /// Opens the folder, which is created if absent. Journals of the attempts in `lost`, the newest ones
    /// of open episodes, are kept to be continued; others are removed. A warning names those of lost
    /// attempts that are damaged or end before their first record, and what is not a regular file, which
    /// stays.
    ///
    /// # Errors
    /// Any file error.
    pub fn open(folder: &Utf8Path, lost: &[AttemptId]) -> std::io::Result<Self> {
        fs_err::create_dir_all(folder)?;
        let mut unfinished = BTreeMap::new();
        for entry in fs_err::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| name.ends_with(SUFFIX)) else { continue };
            let path = folder.join(name);
            if !entry.file_type()?.is_file() {
                tracing::warn!("{}", TurnJournalError::NotAFile { path });
                continue;
            }
            if let Some(&attempt) = lost.iter().find(|attempt| file_name(**attempt) == name) {
                match lease_in(&path, attempt) {
                    Ok(Some(lease)) => {
                        unfinished.insert(attempt, lease);
                        continue;
                    }
                    Ok(None) => tracing::warn!(
                        %attempt,
                        "the run was killed before a worker got the attempt; it is run again"
                    ),
                    Err(error) => tracing::warn!(
                        %error,
                        %attempt,
                        "the attempt cannot be continued; it is run again"
                    ),
                }
            }
            fs_err::remove_file(&path)?;
        }
        Ok(Self { folder: folder.to_owned(), unfinished: Mutex::new(unfinished) })
    }

    /// Whether the attempt can be continued once the run is resumed, if it is lost by then and the newest one
    /// of an open episode. `folder` is that of the journals, which are only read.
    pub fn can_continue(folder: &Utf8Path, attempt: AttemptId) -> bool {
        matches!(lease_in(&folder.join(file_name(attempt)), attempt), Ok(Some(_)))
    }

    /// The attempts that can be continued, with their leases.
    pub fn unfinished(&self) -> Vec<(AttemptId, LeaseRecord)> {
        self.lock().iter().map(|(attempt, lease)| (*attempt, lease.clone())).collect()
    }

    /// The lease of an attempt that can be continued; the next call returns `None`.
    pub(crate) fn take_unfinished(&self, attempt: AttemptId) -> Option<LeaseRecord> {
        self.lock().remove(&attempt)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<AttemptId, LeaseRecord>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, attempt: AttemptId) -> Utf8PathBuf {
        self.folder.join(file_name(attempt))
    }

    /// Begins the journal of an attempt, in place of any earlier one.
    pub(crate) fn create(&self, taken: TakenRecord) -> Result<TurnJournal, TurnJournalError> {
        let path = self.path(taken.attempt);
        // A new file: what has its name may be a link or a pipe.
        remove_if_present(&path)?;
        let mut options = fs_err::OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path)?;
        let writer = Writer { file, interned: Interned::default() };
        let journal = TurnJournal::new(path, writer, Duration::ZERO);
        journal.write(|_| Ok((Described::Taken(taken), Vec::new())))?;
        Ok(journal)
    }

    /// Reads the journal of an attempt that an earlier process began, and opens it for more records.
    pub(crate) fn resume(
        &self,
        attempt: AttemptId,
        shape: &ModelShape,
    ) -> Result<ResumedJournal, TurnJournalError> {
        let path = self.path(attempt);
        let contents = Contents::read(&fs_err::read(&path)?, shape);
        let Contents { taken, used, records, forgotten, restarts, interned, valid } = contents
            .map_err(|MalformedRecord(problem)| TurnJournalError::Damaged {
                path: path.clone(),
                problem,
            })?;
        let records = records.into_iter().filter(|(number, _)| !forgotten.1.contains(number));
        let mut records: Vec<_> = records.map(|(_, record)| record).collect();
        let file = fs_err::OpenOptions::new().append(true).open(&path)?;
        file.set_len(valid as u64)?;
        let journal = TurnJournal::new(path, Writer { file, interned }, used);
        journal.write(|_| Ok((Described::Restarted { forgotten: forgotten.0 }, Vec::new())))?;
        records.push(ConversationRecord::Restarted);
        Ok(ResumedJournal { journal, taken, used, restarts, records })
    }

    /// Removes the journal of an attempt that has an outcome.
    pub(crate) fn remove(&self, attempt: AttemptId) {
        if let Err(error) = remove_if_present(&self.path(attempt)) {
            tracing::warn!(%error, "the next start of the run removes it");
        }
    }
}

/// A record as its frame.
fn framed(
    used: Duration,
    described: &Described,
    arrays: &[u8],
) -> Result<Vec<u8>, MalformedRecord> {
    let frame = frame(&encode(used, described, arrays)?);
    frame.ok_or_else(|| MalformedRecord::from("a record is larger than 4 GiB"))
}

fn file_name(attempt: AttemptId) -> String {
    format!("{attempt}{SUFFIX}")
}

fn remove_if_present(path: &Utf8Path) -> std::io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// The lease of an attempt by its journal, all of which is checked. `None` if it ends before its first
/// record: the process was killed before the worker got the episode.
fn lease_in(path: &Utf8Path, attempt: AttemptId) -> Result<Option<LeaseRecord>, TurnJournalError> {
    let damaged = |problem: String| TurnJournalError::Damaged { path: path.to_owned(), problem };
    if !fs_err::symlink_metadata(path)?.is_file() {
        return Err(TurnJournalError::NotAFile { path: path.to_owned() });
    }
    let bytes = fs_err::read(path)?;
    let (payloads, _) = payloads(&bytes).map_err(|error| damaged(error.to_string()))?;
    let Some(first) = payloads.first() else { return Ok(None) };
    match decode(first) {
        Ok((_, Described::Taken(taken), _)) if taken.attempt == attempt => Ok(Some(taken.lease)),
        Ok(_) => Err(damaged("it does not begin with its attempt".to_owned())),
        Err(MalformedRecord(problem)) => Err(damaged(problem)),
    }
}

/// What the bytes of a journal say.
#[derive(Debug)]
struct Contents {
    taken: TakenRecord,
    /// Time of the attempt at the last record.
    used: Duration,
    /// All records but the first, with their numbers.
    records: Vec<(usize, ConversationRecord)>,
    /// See [`forgotten`].
    forgotten: (Vec<usize>, HashSet<usize>),
    /// How often the attempt will have been continued.
    restarts: u32,
    interned: Interned,
    /// Number of bytes before a record that was cut.
    valid: usize,
}

impl Contents {
    fn read(bytes: &[u8], shape: &ModelShape) -> Result<Self, MalformedRecord> {
        let (payloads, valid) = payloads(bytes)?;
        let parsed = payloads.into_iter().map(decode).collect::<Result<Vec<_>, _>>()?;
        let Some((_, Described::Taken(taken), _)) = parsed.first() else {
            return Err(MalformedRecord::from("it does not begin with the attempt"));
        };
        let taken = taken.clone();
        let used = parsed.last().map_or(Duration::ZERO, |(used, ..)| *used);
        let forgotten = forgotten(parsed.iter().map(|(_, record, _)| record));
        let (mut records, mut interned, mut restarts) = (Vec::new(), Interned::default(), 1);
        for (number, (_, described, arrays)) in parsed.into_iter().enumerate() {
            let record = read(described, arrays, &mut interned, shape).map_err(
                |MalformedRecord(problem)| MalformedRecord(format!("record {number}: {problem}")),
            )?;
            if matches!(record, Some(ConversationRecord::Restarted)) {
                restarts += 1;
            }
            records.extend(record.map(|record| (number, record)));
        }
        Ok(Self { taken, used, records, forgotten, restarts, interned, valid })
    }
}

/// Numbers of the records of requests that count as never sent, because no reply came of them or of a later
/// one before the process was killed: those of the last process, and those of all. A client that sends such
/// a request again gets the reply that it would have got without the kill.
fn forgotten<'a>(records: impl Iterator<Item = &'a Described>) -> (Vec<usize>, HashSet<usize>) {
    let mut all = HashSet::new();
    // Record, number and whether there was an answer, of the requests of one process.
    let mut asked: Vec<(usize, u32, bool)> = Vec::new();
    for (index, record) in records.enumerate() {
        match record {
            Described::Asked { number, .. } => asked.push((index, *number, false)),
            Described::Replied { number, .. } | Described::Limited { number, .. } => {
                if let Some((.., answered)) = asked.iter_mut().find(|(_, asked, _)| asked == number)
                {
                    *answered = true;
                }
            }
            Described::Restarted { forgotten } => {
                all.extend(forgotten.iter().copied());
                asked.clear();
            }
            Described::Taken(_) | Described::Noted(_) => {}
        }
    }
    let needed = asked.iter().rposition(|(.., answered)| *answered).map_or(0, |last| last + 1);
    let last: Vec<usize> = asked.iter().skip(needed).map(|(index, ..)| *index).collect();
    all.extend(last.iter().copied());
    (last, all)
}

/// An attempt as an earlier process left it.
#[derive(Debug)]
pub(crate) struct ResumedJournal {
    pub(crate) journal: TurnJournal,
    pub(crate) taken: TakenRecord,
    /// Time of the attempt that was used. The time after the last record is not counted.
    pub(crate) used: Duration,
    /// How often the attempt has been continued, this time included.
    pub(crate) restarts: u32,
    /// What happened, oldest first.
    pub(crate) records: Vec<ConversationRecord>,
}

/// The turn journal of one attempt.
#[derive(Debug)]
pub(crate) struct TurnJournal {
    path: Utf8PathBuf,
    writer: Mutex<Result<Writer, Closed>>,
    began: Instant,
    used_before: Duration,
}

#[derive(Debug)]
struct Writer {
    file: fs_err::File,
    interned: Interned,
}

/// Why nothing more is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closed {
    Ended,
    Failed,
}

impl TurnJournal {
    fn new(path: Utf8PathBuf, writer: Writer, used_before: Duration) -> Self {
        Self { path, writer: Mutex::new(Ok(writer)), began: Instant::now(), used_before }
    }

    /// Appends a record. Nothing is written once the journal is closed.
    pub(crate) fn append(&self, record: &ConversationRecord) -> Result<(), TurnJournalError> {
        self.write(|interned| describe(record, interned))
    }

    fn write(
        &self,
        describe: impl FnOnce(&mut Interned) -> Result<(Described, Vec<u8>), MalformedRecord>,
    ) -> Result<(), TurnJournalError> {
        let unwritten = |problem: &dyn std::fmt::Display| TurnJournalError::Unwritten {
            path: self.path.clone(),
            problem: problem.to_string(),
        };
        let mut state = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let writer = match &mut *state {
            Ok(writer) => writer,
            Err(Closed::Ended) => return Ok(()),
            Err(Closed::Failed) => {
                return Err(unwritten(&"an earlier record could not be written"));
            }
        };
        let used = self.used_before + self.began.elapsed();
        let frame = describe(&mut writer.interned)
            .and_then(|(described, arrays)| framed(used, &described, &arrays));
        let written = match frame {
            Ok(frame) => writer.file.write_all(&frame).map_err(|error| unwritten(&error)),
            Err(MalformedRecord(problem)) => Err(unwritten(&problem)),
        };
        if written.is_err() {
            *state = Err(Closed::Failed);
        }
        written
    }

    /// Lets every later record fail.
    #[cfg(test)]
    pub(crate) fn fail(&self) {
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = Err(Closed::Failed);
    }

    /// Ends the journal: later records are not part of the attempt.
    pub(crate) fn close(&self) {
        let mut state = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_ok() {
            *state = Err(Closed::Ended);
        }
    }
}
