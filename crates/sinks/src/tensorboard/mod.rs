//! The sink `tensorboard`: event files in the folder `tensorboard` of the run folder.

mod event;
mod record;

use crate::error::SinkError;
use crate::follow::Sink;
use crate::line::Line;
use camino::{Utf8Path, Utf8PathBuf};
use event::{encoded_line, encoded_version};
use fs_err::{File, OpenOptions};
use record::{append_record, records};
use std::io::Write as _;

/// End of the names of this sink's files. Files with other names are left alone.
const SUFFIX: &str = ".orchestrate";

/// Writes each line as one event with a scalar for every number, at the line's step and time.
///
/// Its position is the number of events in its files. A line is one record, and so is complete or
/// absent. Each start of the run that has a line to write begins a new file, because the end of the
/// last one may be half a record; `tensorboard` reads files in the order of their names and skips
/// such an end. If the events differ from the lines, all files are written again.
///
/// Values are 32-bit floats, as `tensorboard` stores scalars.
#[derive(Debug)]
pub struct TensorBoard {
    folder: Utf8PathBuf,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The files were not compared yet, or could not be written.
    Unknown,
    /// The files hold this number of lines, and the next line begins a new one.
    Compared { lines: usize },
    /// This file is open at its end; all files together hold this number of lines.
    Open { file: File, lines: usize },
}

impl TensorBoard {
    /// The sink that writes to `folder`, which is created with the first line.
    pub fn new(folder: Utf8PathBuf) -> Self {
        Self { folder, state: State::Unknown }
    }

    /// This sink's files, in order.
    fn files(&self) -> Result<Vec<Utf8PathBuf>, SinkError> {
        let entries = match self.folder.read_dir_utf8() {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(SinkError::file(&self.folder)(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(SinkError::file(&self.folder))?.into_path();
            if number_of(&path).is_some() {
                files.push(path);
            }
        }
        files.sort_by_key(|path| number_of(path));
        Ok(files)
    }

    /// The number of lines that the files hold; 0 after they were removed because they differ.
    fn compare(&self, lines: &[Line]) -> Result<usize, SinkError> {
        let files = self.files()?;
        let mut expected = lines.iter();
        for path in &files {
            let bytes = fs_err::read(path).map_err(SinkError::file(path))?;
            let mut found = records(&bytes);
            let version = found.next();
            let is_ours = version.is_none_or(|record| record == encoded_version());
            let agrees = |record: &[u8]| {
                expected.next().is_some_and(|line| record == encoded_line(line).as_slice())
            };
            if !is_ours || !found.all(agrees) {
                files.iter().try_for_each(|path| {
                    fs_err::remove_file(path).map_err(SinkError::file(path))
                })?;
                return Ok(0);
            }
        }
        Ok(lines.len() - expected.len())
    }

    /// Creates the next file.
    fn create(&self) -> Result<File, SinkError> {
        fs_err::create_dir_all(&self.folder).map_err(SinkError::file(&self.folder))?;
        let last = self.files()?.last().and_then(|path| number_of(path)).unwrap_or(0);
        let path = self.folder.join(format!("events.out.tfevents.{:010}{SUFFIX}", last + 1));
        OpenOptions::new().create_new(true).append(true).open(&path).map_err(SinkError::file(&path))
    }
}

impl Sink for TensorBoard {
    fn name(&self) -> &'static str {
        "tensorboard"
    }

    fn update(&mut self, lines: &[Line]) -> Result<(), SinkError> {
        // After an error the files are compared again.
        let (file, written) = match std::mem::replace(&mut self.state, State::Unknown) {
            State::Unknown => (None, self.compare(lines)?),
            State::Compared { lines } => (None, lines),
            State::Open { file, lines } => (Some(file), lines),
        };
        let new = lines.get(written..).unwrap_or_default();
        if new.is_empty() {
            self.state = match file {
                Some(file) => State::Open { file, lines: written },
                None => State::Compared { lines: written },
            };
            return Ok(());
        }
        let mut bytes = Vec::new();
        let mut file = if let Some(file) = file {
            file
        } else {
            append_record(&mut bytes, encoded_version());
            self.create()?
        };
        for line in new {
            append_record(&mut bytes, &encoded_line(line));
        }
        let written = file.write_all(&bytes).and_then(|()| file.sync_data());
        written.map_err(SinkError::file(&self.folder))?;
        self.state = State::Open { file, lines: lines.len() };
        Ok(())
    }
}

/// The number in the name of one of this sink's files.
fn number_of(path: &Utf8Path) -> Option<u64> {
    path.file_name()?.strip_prefix("events.out.tfevents.")?.strip_suffix(SUFFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::tests::run_of;

    /// The lines that the files of `folder` hold, as encoded events.
    fn events(folder: &Utf8Path) -> Vec<Vec<u8>> {
        let files = TensorBoard::new(folder.to_owned()).files().unwrap();
        let mut events = Vec::new();
        for path in files {
            let bytes = fs_err::read(path).unwrap();
            events.extend(records(&bytes).skip(1).map(<[u8]>::to_vec));
        }
        events
    }

    #[test]
    fn files_cut_at_any_byte_are_continued_without_loss_or_duplicates() {
        let lines = run_of(3);
        let expected: Vec<Vec<u8>> = lines.iter().map(encoded_line).collect();
        let temp = tempfile::tempdir().unwrap();
        let whole = Utf8PathBuf::from_path_buf(temp.path().join("whole")).unwrap();
        TensorBoard::new(whole.clone()).update(&lines).unwrap();
        let name = "events.out.tfevents.0000000001.orchestrate";
        let bytes = fs_err::read(whole.join(name)).unwrap();
        for length in (0..=bytes.len()).step_by(7).chain([bytes.len()]) {
            let folder = whole.with_file_name(format!("cut-{length}"));
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join(name), &bytes[..length]).unwrap();
            TensorBoard::new(folder.clone()).update(&lines).unwrap();
            assert_eq!(events(&folder), expected, "{length}");
            let left = fs_err::read(folder.join(name)).unwrap();
            assert_eq!(left, &bytes[..length], "an existing file is never changed");
        }
    }

    #[test]
    fn each_start_begins_a_file_and_events_of_other_lines_are_replaced() {
        let lines = run_of(4);
        let temp = tempfile::tempdir().unwrap();
        let folder = Utf8PathBuf::from_path_buf(temp.path().join("tensorboard")).unwrap();
        for (at_start, later) in [(0, 1), (2, 3), (3, 3), (3, 5)] {
            let mut sink = TensorBoard::new(folder.clone());
            for seen in [at_start, later, later] {
                sink.update(&lines[..seen]).unwrap();
            }
        }
        let sink = TensorBoard::new(folder.clone());
        assert_eq!(sink.files().unwrap().len(), 3, "the third start has nothing to write");
        let expected: Vec<Vec<u8>> = lines.iter().map(encoded_line).collect();
        assert_eq!(events(&folder), expected);
        // Another run's lines, and fewer lines than were written.
        for other in [&lines[1..], &lines[..2]] {
            TensorBoard::new(folder.clone()).update(other).unwrap();
            assert_eq!(events(&folder), other.iter().map(encoded_line).collect::<Vec<_>>());
        }
    }
}
