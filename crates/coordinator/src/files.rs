//! The files in a run's folder. All of them are derived from the journal and can be regenerated.

use crate::error::RunError;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err as fs;
use orchestrate_report::{RunReport, metrics_lines, run_page};
use orchestrate_store::Reader;
use orchestrate_tasks::predictions::{self, Prediction};
use serde_json::Value;
use std::io::Write;

/// Folder of a step's batch, relative to the run folder.
pub(crate) fn batch_folder(step: u32) -> Utf8PathBuf {
    Utf8PathBuf::from(format!("batches/{step:06}"))
}

/// Paths and writers of one run folder.
#[derive(Debug)]
pub(crate) struct RunFolder {
    root: Utf8PathBuf,
}

impl RunFolder {
    pub(crate) fn new(root: Utf8PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn path(&self, relative: &Utf8Path) -> Utf8PathBuf {
        self.root.join(relative)
    }

    /// The path from the root of the file system, for a trainer that runs in another directory.
    pub(crate) fn absolute(&self, relative: &Utf8Path) -> Result<Utf8PathBuf, RunError> {
        let path = self.path(relative);
        camino::absolute_utf8(&path).map_err(|source| RunError::File { path, source })
    }

    /// Makes `metrics.jsonl` hold exactly `lines`. Appends what is missing at its end; replaces the file
    /// if it differs otherwise (after a crash, an edit, or in another run's folder). Every line is
    /// written as stored in the journal, even if an older version of the program stored it.
    pub(crate) fn write_metrics(&self, lines: &[Value]) -> Result<(), RunError> {
        let path = self.root.join("metrics.jsonl");
        let mut wanted = String::new();
        for line in lines {
            wanted.push_str(&line.to_string());
            wanted.push('\n');
        }
        let io = |source| RunError::File { path: path.clone(), source };
        let found = fs::read_to_string(&path).unwrap_or_default();
        match wanted.strip_prefix(&found) {
            Some("") if path.exists() => Ok(()),
            Some(rest) if found.is_empty() || found.ends_with('\n') => {
                let mut file =
                    fs::OpenOptions::new().create(true).append(true).open(&path).map_err(io)?;
                file.write_all(rest.as_bytes()).and_then(|()| file.sync_data()).map_err(io)
            }
            Some(_) | None => self.replace(&path, wanted.as_bytes()),
        }
    }

    /// Writes `predictions.jsonl`, and `predictions-N.jsonl` for the Nth of `samples`, counted from 1.
    pub(crate) fn write_predictions(
        &self,
        predictions: &[Prediction],
        samples: &[Vec<Prediction>],
    ) -> Result<(), RunError> {
        let write = |name: &str, predictions: &[Prediction]| {
            let text = predictions::jsonl(predictions).map_err(|e| RunError::stored("patch", e))?;
            self.replace(&self.root.join(name), text.as_bytes())
        };
        for (number, sample) in (1..).zip(samples) {
            write(&format!("predictions-{number}.jsonl"), sample)?;
        }
        write("predictions.jsonl", predictions)
    }

    /// Builds the report from the journal and writes `report.html`.
    pub(crate) async fn write_report(&self, reader: &Reader) -> Result<RunReport, RunError> {
        let report = RunReport::from_journal(reader).await?;
        let page = run_page(&report, &metrics_lines(reader).await?);
        self.replace(&self.root.join("report.html"), page.as_bytes())?;
        Ok(report)
    }

    /// Removes a folder of the run, if it exists.
    pub(crate) fn remove_folder(&self, relative: &Utf8Path) -> Result<(), RunError> {
        let path = self.path(relative);
        match fs::remove_dir_all(&path) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(RunError::File { path, source }),
        }
    }

    fn replace(&self, path: &Utf8Path, bytes: &[u8]) -> Result<(), RunError> {
        let io = |source| RunError::File { path: path.to_owned(), source };
        let temporary = Utf8PathBuf::from(format!("{path}.tmp"));
        let mut file = fs::File::create(&temporary).map_err(io)?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io)?;
        fs::rename(&temporary, path).map_err(io)?;
        fs::File::open(&self.root).and_then(|folder| folder.sync_all()).map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_types::{ModelName, TaskId};
    use serde_json::json;

    fn folder() -> (tempfile::TempDir, RunFolder) {
        let temp = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(temp.path().to_owned()).unwrap();
        (temp, RunFolder::new(root))
    }

    #[test]
    fn metrics_are_appended_and_repaired() {
        let (_temp, folder) = folder();
        let path = folder.path(Utf8Path::new("metrics.jsonl"));
        let lines: Vec<Value> = (0..3).map(|i| json!({"global_step": i})).collect();
        let whole = "{\"global_step\":0}\n{\"global_step\":1}\n{\"global_step\":2}\n";
        for damaged in [
            "",
            "{\"global_step\":0}\n",
            "{\"global_step\":0}\n{\"glo",
            "{\"global_step\":0}\n{\"global_step\":0}\n",
            "\u{0}\u{0}",
            "{\"global_step\":0}\n{\"global_step\":1}\n{\"global_step\":2}\n{\"global_step\":3}\n",
        ] {
            fs::write(&path, damaged).unwrap();
            folder.write_metrics(&lines).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), whole, "{damaged:?}");
        }
    }

    #[test]
    fn each_sample_of_an_evaluation_has_its_predictions() {
        let (temp, folder) = folder();
        let prediction = |patch: &str| Prediction {
            instance_id: TaskId::made_of("a"),
            model_name_or_path: ModelName::made_of("toy"),
            model_patch: Some(patch.to_owned()),
        };
        let samples = [vec![prediction("first\n")], vec![prediction("second\n")]];
        folder.write_predictions(&samples[0], &samples).unwrap();
        let read = |name: &str| fs::read_to_string(temp.path().join(name)).unwrap();
        assert_eq!(read("predictions.jsonl"), read("predictions-1.jsonl"));
        assert!(read("predictions-2.jsonl").contains("second"));
    }
}
