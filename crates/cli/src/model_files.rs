//! The files of a run's model: a run that is resumed must find them as they were when it began, because half of
//! its results are of them.

use crate::config::ConfigError;
use crate::error::InputError;
use crate::files::write_whole;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_engine::EngineSettings;
use orchestrate_types::ByteSize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _, Seek as _, SeekFrom};

/// Name of the record in the run's folder.
pub(crate) const MODEL_FILES: &str = "model-files.json";

/// Larger files are sampled: checkpoints have many gigabytes, and training changes nearly all of their bytes.
const WHOLE: ByteSize = ByteSize::mib(64);
/// Number of the samples, evenly spread from the first byte to the last, and the size of each.
const SAMPLES: u64 = 16;
const SAMPLE: ByteSize = ByteSize::mib(1);

/// Files that decide about tokens and weights, besides templates and shards of weights.
const NAMES: [&str; 11] = [
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Records the files of the model and the tokenizer in the run's `folder`, or compares them with the record.
///
/// # Errors
/// If a file was changed, added or removed after the run began, or cannot be read.
pub(crate) fn check(engine: &EngineSettings, folder: &Utf8Path) -> anyhow::Result<()> {
    let record = folder.join(MODEL_FILES);
    let found = digests(engine)?;
    let recorded: BTreeMap<Utf8PathBuf, String> = match fs_err::read(&record) {
        Ok(recorded) => serde_json::from_slice(&recorded)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(write_whole(&record, &serde_json::to_string_pretty(&found)?)?);
        }
        Err(error) => return Err(error.into()),
    };
    let files: BTreeSet<&Utf8PathBuf> = recorded.keys().chain(found.keys()).collect();
    let changed = files.into_iter().find(|file| recorded.get(*file) != found.get(*file));
    let Some(file) = changed else { return Ok(()) };
    let what = match (recorded.get(file), found.get(file)) {
        (Some(_), None) => "is missing",
        (None, Some(_)) => "was added after the run started",
        (Some(_), Some(_)) | (None, None) => "was changed after the run started",
    };
    let error = format!("{what}; restore the files of the model, or start a new run");
    Err(ConfigError::Layer { name: file.to_string(), error }.into())
}

/// Digests of the files of the model and the tokenizer, by path. A folder that does not exist has none: a chat
/// server's model is not here.
fn digests(engine: &EngineSettings) -> Result<BTreeMap<Utf8PathBuf, String>, InputError> {
    let mut digests = BTreeMap::new();
    for folder in [&engine.model, engine.tokenizer_folder()] {
        let Ok(entries) = folder.read_dir_utf8() else { continue };
        for entry in entries.flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            let extension = path.extension().unwrap_or_default();
            let decides = NAMES.contains(&name) || matches!(extension, "jinja" | "safetensors");
            if decides && path.is_file() && !digests.contains_key(path) {
                let unreadable = |source| InputError::Unreadable { file: path.to_owned(), source };
                digests.insert(path.to_owned(), digest(path).map_err(unreadable)?);
            }
        }
    }
    Ok(digests)
}

fn digest(path: &Utf8Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let size = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    if size <= WHOLE.0 {
        hasher.update_reader(file)?;
        return Ok(format!("blake3:{}", hasher.finalize().to_hex()));
    }
    hasher.update(&size.to_le_bytes());
    let mut sample = vec![0; usize::try_from(SAMPLE.0).map_err(io::Error::other)?];
    for number in 0..SAMPLES {
        file.seek(SeekFrom::Start((size - SAMPLE.0) * number / (SAMPLES - 1)))?;
        file.read_exact(&mut sample)?;
        hasher.update(&sample);
    }
    Ok(format!("blake3 of {SAMPLES} samples:{}", hasher.finalize().to_hex()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_engine::EngineSection;

    fn engine(model: &Utf8Path) -> EngineSettings {
        EngineSection { model: Some(model.to_string()), ..EngineSection::default() }
            .check()
            .unwrap()
    }

    #[test]
    fn a_run_is_not_resumed_with_other_files_of_its_model() {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8Path::from_path(guard.path()).unwrap();
        let (model, folder) = (root.join("model"), root.join("run"));
        fs_err::create_dir_all(&model).unwrap();
        let check = || check(&engine(&model), &folder);
        let write = |name: &str, text: &str| fs_err::write(model.join(name), text).unwrap();
        write("config.json", "{}");
        write("README.md", "one");
        check().unwrap();
        write("README.md", "two");
        check().unwrap();
        for (name, text, part) in [
            ("config.json", "{ }", "config.json: was changed after the run started"),
            ("chat_template.jinja", "", "chat_template.jinja: was added after the run started"),
        ] {
            write(name, text);
            let error = check().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("start a new run"), "{error}");
            fs_err::remove_file(model.join(name)).unwrap();
            write("config.json", "{}");
            check().unwrap();
        }
        fs_err::remove_file(model.join("config.json")).unwrap();
        let error = check().unwrap_err().to_string();
        assert!(error.contains("config.json: is missing"), "{error}");
    }

    #[test]
    fn both_ends_of_a_large_file_are_sampled() {
        let guard = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(guard.path()).unwrap().join("w.safetensors");
        let size = WHOLE.0 + 12_345;
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        let of_zeros = digest(&path).unwrap();
        assert!(of_zeros.starts_with("blake3 of 16 samples:"), "{of_zeros}");
        for at in [0, size - 1] {
            let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            let written = |file: &mut std::fs::File, byte: u8| {
                file.seek(SeekFrom::Start(at)).unwrap();
                std::io::Write::write_all(file, &[byte]).unwrap();
            };
            written(&mut file, 1);
            assert_ne!(digest(&path).unwrap(), of_zeros, "{at}");
            written(&mut file, 0);
        }
        assert_eq!(digest(&path).unwrap(), of_zeros);
    }
}
