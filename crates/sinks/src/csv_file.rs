//! The sink `csv`: `metrics.csv` in the run folder, a row for each line.

use crate::error::SinkError;
use crate::follow::Sink;
use crate::line::Line;
use crate::replace::replace;
use camino::Utf8PathBuf;
use fs_err::{File, OpenOptions};
use orchestrate_metrics::catalogue;
use serde_json::Value;
use std::io::Write as _;

/// Columns that every line has, before those of the metrics.
const COMMON: [&str; 4] = ["schema_version", "time", "global_step", "policy_version"];

/// Writes the lines to a CSV file (RFC 4180, lines end with a line feed). The columns are the keys of
/// `metrics.jsonl`: those of steps, then those of evaluations. Missing values are empty; objects and
/// lists are JSON.
///
/// Its position is the file itself: it holds the first bytes of the text that the lines give, and
/// the rest is appended. A file with any other content is replaced.
#[derive(Debug)]
pub struct CsvFile {
    path: Utf8PathBuf,
    /// The file at its end, and the number of lines in it; `None` until it was compared.
    open: Option<(File, usize)>,
}

impl CsvFile {
    /// The sink that writes to `path`.
    pub fn new(path: Utf8PathBuf) -> Self {
        Self { path, open: None }
    }

    /// Compares the file with the text of all lines, and completes or replaces it.
    fn repair(&self, lines: &[Line]) -> Result<File, SinkError> {
        let mut wanted = self.encode(|writer| writer.write_record(columns()))?;
        wanted.extend(self.rows(lines)?);
        let found = match fs_err::read(&self.path) {
            Ok(found) => found,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(SinkError::file(&self.path)(error)),
        };
        let rest = wanted.strip_prefix(found.as_slice());
        if rest.is_none() {
            replace(&self.path, &wanted)?;
        }
        let io = SinkError::file(&self.path);
        let mut file =
            OpenOptions::new().create(true).append(true).open(&self.path).map_err(&io)?;
        append(&mut file, rest.unwrap_or_default()).map_err(io)?;
        Ok(file)
    }

    fn rows(&self, lines: &[Line]) -> Result<Vec<u8>, SinkError> {
        self.encode(|writer| {
            lines
                .iter()
                .try_for_each(|line| writer.write_record(columns().map(|key| cell(line, key))))
        })
    }

    fn encode(
        &self,
        write: impl FnOnce(&mut csv::Writer<Vec<u8>>) -> csv::Result<()>,
    ) -> Result<Vec<u8>, SinkError> {
        let problem = |problem| SinkError::Encoding { path: self.path.clone(), problem };
        let mut writer = csv::Writer::from_writer(Vec::new());
        write(&mut writer).map_err(|error| problem(error.to_string()))?;
        writer.into_inner().map_err(|error| problem(error.to_string()))
    }
}

impl Sink for CsvFile {
    fn name(&self) -> &'static str {
        "csv"
    }

    fn update(&mut self, lines: &[Line]) -> Result<(), SinkError> {
        // Taken out, so that after an error the file is compared again.
        let file = match self.open.take() {
            Some((mut file, written)) => {
                let rest = self.rows(lines.get(written..).unwrap_or_default())?;
                append(&mut file, &rest).map_err(SinkError::file(&self.path))?;
                file
            }
            None => self.repair(lines)?,
        };
        self.open = Some((file, lines.len()));
        Ok(())
    }
}

fn append(file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    file.write_all(bytes)?;
    file.sync_data()
}

fn columns() -> impl Iterator<Item = &'static str> {
    COMMON.into_iter().chain(catalogue().map(|metric| metric.name))
}

fn cell(line: &Line, key: &str) -> String {
    match line.get(key) {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::tests::run_of;

    #[test]
    fn file_is_continued_completed_or_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(folder.path().join("metrics.csv")).unwrap();
        let lines = run_of(3);
        let mut sink = CsvFile::new(path.clone());
        for seen in 0..=lines.len() {
            sink.update(&lines[..seen]).unwrap();
        }
        let whole = fs_err::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 1 + lines.len());
        assert!(whole.contains("\"{\"\"2\"\":0.01}\""), "{whole}");
        for damaged in [
            whole[..whole.len() / 2].to_owned(),
            whole[..3].to_owned(),
            format!("{whole}0,,,\n"),
            whole.replacen("0.25", "0.26", 1),
            String::new(),
        ] {
            fs_err::write(&path, damaged).unwrap();
            CsvFile::new(path.clone()).update(&lines).unwrap();
            assert_eq!(fs_err::read_to_string(&path).unwrap(), whole);
        }
    }

    #[test]
    fn lines_that_could_not_be_written_are_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(folder.path().join("absent")).unwrap();
        let mut sink = CsvFile::new(root.join("metrics.csv"));
        let error = sink.update(&run_of(1)).unwrap_err().to_string();
        assert!(error.contains("metrics.csv") && error.contains("writable"), "{error}");
        fs_err::create_dir(&root).unwrap();
        sink.update(&run_of(2)).unwrap();
        let text = fs_err::read_to_string(root.join("metrics.csv")).unwrap();
        assert_eq!(text.lines().count(), 4);
    }
}
