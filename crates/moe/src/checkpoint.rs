//! Checkpoint folders in the Hugging Face layout: `config.json`, `model.safetensors` (or shards
//! with `model.safetensors.index.json`), tokenizer files.
//!
//! Invariant: a checkpoint folder is either complete or absent. It is written under a temporary
//! name, synced, and renamed ([`PendingFolder`]).

use crate::weights::{EMBEDDING, HEAD, Tensor, Weights};
use crate::{CheckpointError, ModelConfig};
use camino::{Utf8Path, Utf8PathBuf};
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Folder of chat templates with names.
const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";

/// Extensions of files with weights, and of this trainer's state.
const WEIGHTS: [&str; 11] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack", "onnx", "npz", "state"];

/// Files that each checkpoint has of its own.
const OWN_FILES: [&str; 2] = ["config.json", "trainer.json"];

/// Data type of the values in a safetensors file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredType {
    /// 32-bit float; the values are stored exactly.
    F32,
    /// bfloat16, rounded to nearest, ties to even.
    Bf16,
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Reads a checkpoint folder. Values stored as f32, bf16 or f16 are converted to f32.
    ///
    /// # Errors
    /// If a file is missing or damaged, or a tensor is missing or has the wrong shape or type. The
    /// error names the file and the tensor.
    pub fn load(folder: &Utf8Path) -> Result<Self, CheckpointError> {
        let config = ModelConfig::load(folder)?;
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        if single.exists() || !index.exists() {
            return Self::from_tensors(config, read_tensors(&single)?, &single);
        }
        let text = fs_err::read(&index).map_err(|e| CheckpointError::new(&index, e))?;
        let parsed: ShardIndex =
            serde_json::from_slice(&text).map_err(|e| CheckpointError::new(&index, e))?;
        let mut tensors = BTreeMap::new();
        for shard in parsed.weight_map.into_values().collect::<BTreeSet<_>>() {
            if shard.contains(['/', '\\']) {
                let problem = format!("shard name `{shard}` must not contain `/` or `\\`");
                return Err(CheckpointError::new(&index, problem));
            }
            tensors.extend(read_tensors(&folder.join(shard))?);
        }
        Self::from_tensors(config, tensors, &index)
    }

    /// Writes `config.json` and `model.safetensors` into an existing folder. A tied output head is
    /// written as well, because some engines require it. This is not atomic: use
    /// [`save_checkpoint`], or write into a [`PendingFolder`].
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: &Utf8Path, stored: StoredType) -> Result<(), CheckpointError> {
        let mut config = self.config().clone();
        config.torch_dtype = match stored {
            StoredType::F32 => "float32".into(),
            StoredType::Bf16 => "bfloat16".into(),
        };
        write_json(&folder.join("config.json"), &config)?;
        // SGLang 0.5.23 creates a separate output head and loads its weights even when it is tied.
        let tied = self.config().tie_word_embeddings.then(|| self.tensors().get(EMBEDDING));
        let head = tied.flatten().map(|tensor| (HEAD, tensor));
        let named = self.tensors().iter().map(|(name, tensor)| (name.as_str(), tensor));
        let views = named.chain(head).map(|(name, tensor)| {
            (name, StoredTensor { shape: &tensor.shape, data: &tensor.data, stored })
        });
        write_tensors(&folder.join("model.safetensors"), views)
    }
}

/// Writes a checkpoint folder atomically. If `companions` is given, that model's files other than weights are
/// copied too.
///
/// # Errors
/// If `target` already exists, or a file cannot be written.
pub fn save_checkpoint(
    target: &Utf8Path,
    weights: &Weights,
    stored: StoredType,
    companions: Option<&Utf8Path>,
) -> Result<(), CheckpointError> {
    let pending = PendingFolder::create(target)?;
    weights.write(pending.path(), stored)?;
    if let Some(source) = companions {
        copy_companions(source, pending.path())?;
    }
    pending.publish()
}

/// Copies a model's files other than weights from `source` to `target`: every file from which a tokenizer, a
/// chat template, a processor or settings of generation may be read, whatever its name.
///
/// # Errors
/// If a file cannot be copied.
pub fn copy_companions(source: &Utf8Path, target: &Utf8Path) -> Result<(), CheckpointError> {
    copy_files(source, target, is_companion)?;
    let templates = source.join(ADDITIONAL_TEMPLATES);
    if templates.is_dir() {
        let copies = target.join(ADDITIONAL_TEMPLATES);
        fs_err::create_dir(&copies).map_err(|e| CheckpointError::io(&copies, e))?;
        copy_files(&templates, &copies, |name| Utf8Path::new(name).extension() == Some("jinja"))?;
    }
    Ok(())
}

fn is_companion(name: &str) -> bool {
    let extension = Utf8Path::new(name).extension().unwrap_or_default();
    !(name.starts_with('.')
        || name.ends_with(".index.json")
        || OWN_FILES.contains(&name)
        || WEIGHTS.contains(&extension))
}

/// Copies the files of a folder whose names are `wanted`; other folders in it are left out.
fn copy_files(
    source: &Utf8Path,
    target: &Utf8Path,
    wanted: impl Fn(&str) -> bool,
) -> Result<(), CheckpointError> {
    for entry in source.read_dir_utf8().map_err(|e| CheckpointError::new(source, e))? {
        let entry = entry.map_err(|e| CheckpointError::new(source, e))?;
        // Of a link, what it names: a model of a download cache consists of links.
        if !wanted(entry.file_name()) || !entry.path().is_file() {
            continue;
        }
        let bytes =
            fs_err::read(entry.path()).map_err(|e| CheckpointError::new(entry.path(), e))?;
        let to = target.join(entry.file_name());
        fs_err::write(&to, bytes).map_err(|e| CheckpointError::io(&to, e))?;
    }
    Ok(())
}

/// A folder that is being written under a temporary name next to its final path. It is removed if
/// it is dropped before [`PendingFolder::publish`].
#[derive(Debug)]
pub struct PendingFolder {
    temporary: Utf8PathBuf,
    target: Utf8PathBuf,
    published: bool,
}

impl PendingFolder {
    /// Creates the temporary folder, replacing one that an earlier attempt left.
    ///
    /// # Errors
    /// If `target` already exists, or the temporary folder cannot be created.
    pub fn create(target: &Utf8Path) -> Result<Self, CheckpointError> {
        if target.exists() {
            return Err(CheckpointError::new(
                target,
                "already exists; remove it, or choose another path",
            ));
        }
        let name = target.file_name().unwrap_or("checkpoint");
        let temporary = target.with_file_name(format!(".{name}.partial"));
        if temporary.exists() {
            fs_err::remove_dir_all(&temporary).map_err(|e| CheckpointError::new(&temporary, e))?;
        }
        fs_err::create_dir_all(&temporary).map_err(|e| CheckpointError::io(&temporary, e))?;
        Ok(Self { temporary, target: target.to_owned(), published: false })
    }

    /// The temporary folder; files are written here.
    pub fn path(&self) -> &Utf8Path {
        &self.temporary
    }

    /// Syncs all files and the folder, then renames the folder to its final path.
    ///
    /// # Errors
    /// If syncing or renaming fails. The final path is not created if the rename fails.
    pub fn publish(mut self) -> Result<(), CheckpointError> {
        let fail = |e: std::io::Error| CheckpointError::io(&self.target, e);
        sync_all(self.temporary.as_std_path()).map_err(fail)?;
        fs_err::rename(&self.temporary, &self.target).map_err(fail)?;
        if let Some(parent) = self.target.parent().filter(|p| !p.as_str().is_empty()) {
            sync_folder(parent).map_err(fail)?;
        }
        self.published = true;
        Ok(())
    }
}

impl Drop for PendingFolder {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the next attempt clears and reuses the temporary folder.
            drop(fs_err::remove_dir_all(&self.temporary));
        }
    }
}

/// Syncs a folder with everything in it.
fn sync_all(folder: &std::path::Path) -> std::io::Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_all(&entry.path())?;
        } else {
            fs_err::File::open(entry.path())?.sync_all()?;
        }
    }
    fs_err::File::open(folder)?.sync_all()
}

fn sync_folder(path: &Utf8Path) -> std::io::Result<()> {
    fs_err::File::open(path)?.sync_all()
}

/// Writes `value` as indented JSON with a final newline.
pub(crate) fn write_json<T: serde::Serialize>(
    path: &Utf8Path,
    value: &T,
) -> Result<(), CheckpointError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| CheckpointError::new(path, e))?;
    text.push(b'\n');
    fs_err::write(path, text).map_err(|e| CheckpointError::io(path, e))
}

/// Reads every tensor of one safetensors file as f32. A tensor of any type other than f32, bf16 and
/// f16 is an error.
pub(crate) fn read_tensors(path: &Utf8Path) -> Result<BTreeMap<String, Tensor>, CheckpointError> {
    let bytes = fs_err::read(path).map_err(|e| CheckpointError::new(path, e))?;
    let damaged =
        |e| CheckpointError::new(path, format!("incomplete or damaged safetensors file: {e}"));
    let file = SafeTensors::deserialize(&bytes).map_err(damaged)?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter() {
        let raw = view.data();
        let data = match view.dtype() {
            Dtype::F32 => elements(raw).map(f32::from_le_bytes).collect(),
            Dtype::BF16 => elements(raw).map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
            Dtype::F16 => elements(raw).map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
            other => {
                let problem =
                    format!("tensor `{name}` has type {other:?}; must be f32, bf16 or f16");
                return Err(CheckpointError::new(path, problem));
            }
        };
        tensors.insert(name.to_owned(), Tensor { shape: view.shape().to_vec(), data });
    }
    Ok(tensors)
}

fn elements<const N: usize>(raw: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    raw.as_chunks::<N>().0.iter().copied()
}

/// A borrowed tensor and the type in which it is stored.
pub(crate) struct StoredTensor<'a> {
    pub(crate) shape: &'a [usize],
    pub(crate) data: &'a [f32],
    pub(crate) stored: StoredType,
}

impl View for StoredTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.stored {
            StoredType::F32 => Dtype::F32,
            StoredType::Bf16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(match self.stored {
            StoredType::F32 => self.data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            StoredType::Bf16 => {
                self.data.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()
            }
        })
    }

    fn data_len(&self) -> usize {
        self.data.len()
            * match self.stored {
                StoredType::F32 => 4,
                StoredType::Bf16 => 2,
            }
    }
}

/// Writes one safetensors file that its user alone may read (mode 0600), like every file of a run.
pub(crate) fn write_tensors<'a>(
    path: &Utf8Path,
    views: impl Iterator<Item = (&'a str, StoredTensor<'a>)>,
) -> Result<(), CheckpointError> {
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(views, Some(metadata), path.as_std_path()).map_err(|error| {
        match error {
            SafeTensorError::IoError(error) => CheckpointError::io(path, error),
            other => CheckpointError::new(path, other),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn config() -> ModelConfig {
        serde_json::from_value(serde_json::json!({
            "model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "moe_intermediate_size": 4, "num_experts": 3, "num_experts_per_tok": 2,
            "norm_topk_prob": true, "vocab_size": 11, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "max_position_embeddings": 32, "rope_theta": 1e4
        }))
        .unwrap()
    }

    fn scratch() -> (tempfile::TempDir, Utf8PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, path)
    }

    #[test]
    fn sizes_that_no_model_has_are_refused() {
        let (_guard, root) = scratch();
        for (key, size) in [
            ("num_attention_heads", u64::MAX),
            ("head_dim", 1 << 40),
            ("num_hidden_layers", 1 << 32),
            ("num_experts", u64::MAX / 2),
            ("hidden_size", 0),
            ("vocab_size", 1 << 60),
        ] {
            let mut json = serde_json::to_value(config()).unwrap();
            json[key] = size.into();
            fs_err::write(root.join("config.json"), json.to_string()).unwrap();
            let error = Weights::load(&root).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} is {size}")), "{error}");
        }
        // Sizes of which each is allowed, but with more tensors than any file names.
        let mut large = config();
        (large.num_hidden_layers, large.num_experts) = (4096, 4096);
        let error = Weights::from_tensors(large, BTreeMap::new(), &root).unwrap_err().to_string();
        assert!(error.contains("requires more than 50331648 tensors, but there are 0"), "{error}");
    }

    #[test]
    fn models_that_would_be_computed_wrong_are_refused_by_name() {
        let (_guard, root) = scratch();
        let yarn = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4});
        let older = serde_json::json!({"type": "linear", "factor": 4.0});
        for (key, value, part) in [
            ("rope_parameters", yarn, "`yarn`"),
            ("rope_scaling", older, "`linear`"),
            ("use_sliding_window", true.into(), "sliding window"),
            ("rms_norm_eps", (-1.0).into(), "rms_norm_eps is -1"),
        ] {
            let mut json = serde_json::to_value(config()).unwrap();
            json[key] = value;
            fs_err::write(root.join("config.json"), json.to_string()).unwrap();
            let error = Weights::load(&root).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let mut json = serde_json::to_value(config()).unwrap();
        json["rope_parameters"] = serde_json::json!({"rope_type": "default", "rope_theta": 1e4});
        json["rope_scaling"] = serde_json::Value::Null;
        json["use_sliding_window"] = false.into();
        fs_err::write(root.join("config.json"), json.to_string()).unwrap();
        ModelConfig::load(&root).unwrap();

        for value in [f32::NAN, f32::INFINITY] {
            let (config, mut tensors) = Weights::random(config(), 7).into_parts();
            *tensors.get_mut("model.norm.weight").unwrap().data.last_mut().unwrap() = value;
            let error = Weights::from_tensors(config, tensors, &root).unwrap_err().to_string();
            assert!(error.contains("`model.norm.weight` has values that are infinite"), "{error}");
        }
    }

    #[test]
    fn saved_model_loads_back_unchanged() {
        let (_guard, root) = scratch();
        fs_err::write(root.join("tokenizer.json"), "{}").unwrap();
        let weights = Weights::random(config(), 7);
        assert_eq!(weights, Weights::random(config(), 7));
        let target = root.join("v0");
        save_checkpoint(&target, &weights, StoredType::F32, Some(&root)).unwrap();
        assert_eq!(Weights::load(&target).unwrap().tensors(), weights.tensors());
        assert!(target.join("tokenizer.json").exists());
        let weights_file = fs_err::metadata(target.join("model.safetensors")).unwrap();
        assert_eq!(
            weights_file.permissions().mode() & 0o777,
            0o600,
            "engines of other users read it"
        );
        let again = save_checkpoint(&target, &weights, StoredType::F32, None).unwrap_err();
        assert!(again.to_string().contains("already exists"), "{again}");

        let small = root.join("bf16");
        save_checkpoint(&small, &weights, StoredType::Bf16, None).unwrap();
        let rounded = Weights::load(&small).unwrap();
        assert_eq!(rounded.config().torch_dtype, "bfloat16");
        for (name, tensor) in weights.tensors() {
            for (a, b) in tensor.data.iter().zip(rounded.get(name).unwrap()) {
                assert!((a - b).abs() <= a.abs() / 128.0, "{name}");
            }
        }
    }

    #[test]
    fn a_checkpoint_keeps_every_file_of_the_model_but_weights_and_state() {
        let (_guard, root) = scratch();
        let kept = [
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "vocab.json",
            "merges.txt",
            "tokenizer.model",
            "chat_template.jinja",
            "chat_template.json",
            "generation_config.json",
            "preprocessor_config.json",
            "processor_config.json",
            "tokenization_own.py",
            "additional_chat_templates/tool_use.jinja",
        ];
        let left = ["pytorch_model.bin", "model.safetensors.index.json", "trainer.json", ".hidden"];
        let source = root.join("source");
        fs_err::create_dir_all(source.join(ADDITIONAL_TEMPLATES)).unwrap();
        for name in kept.iter().chain(&left) {
            fs_err::write(source.join(name), name).unwrap();
        }
        fs_err::create_dir(source.join("figures")).unwrap();
        let weights = Weights::random(config(), 7);
        // Each checkpoint copies what the one before it has.
        for (from, to) in [("source", "v0"), ("v0", "v1")] {
            save_checkpoint(&root.join(to), &weights, StoredType::F32, Some(&root.join(from)))
                .unwrap();
            for name in kept {
                assert_eq!(fs_err::read_to_string(root.join(to).join(name)).unwrap(), name);
            }
            for name in left.iter().chain(&["figures"]) {
                assert!(!root.join(to).join(name).exists(), "{name}");
            }
        }
    }

    #[test]
    fn tied_head_is_written_and_must_equal_the_embedding() {
        let (_guard, root) = scratch();
        let weights = Weights::random(config(), 7);
        let embedding = weights.get(EMBEDDING).unwrap();
        for stored in [StoredType::F32, StoredType::Bf16] {
            let target = root.join(format!("{stored:?}"));
            save_checkpoint(&target, &weights, stored, None).unwrap();
            let file = read_tensors(&target.join("model.safetensors")).unwrap();
            assert_eq!(file[HEAD], file[EMBEDDING]);
            let read = Weights::load(&target).unwrap();
            assert!(read.get(HEAD).is_none(), "a tied head is not a separate parameter");
            assert_eq!(read.parameters(), weights.parameters());
        }
        let mut tensors = weights.tensors().clone();
        let mut other = Tensor { shape: vec![11, 8], data: embedding.to_vec() };
        tensors.insert(HEAD.to_owned(), other.clone());
        assert_eq!(Weights::from_tensors(config(), tensors.clone(), &root).unwrap(), weights);
        other.data[5] += 1.0;
        tensors.insert(HEAD.to_owned(), other);
        let error = Weights::from_tensors(config(), tensors, &root).unwrap_err().to_string();
        assert!(error.contains("`lm_head.weight`") && error.contains("tied"), "{error}");
    }

    #[test]
    fn errors_name_file_and_tensor() {
        let (_guard, root) = scratch();
        let weights = Weights::random(config(), 7);
        let target = root.join("m");
        save_checkpoint(&target, &weights, StoredType::F32, None).unwrap();
        let file = target.join("model.safetensors");
        let whole = fs_err::read(&file).unwrap();

        fs_err::write(&file, &whole[..whole.len() / 2]).unwrap();
        let error = Weights::load(&target).unwrap_err().to_string();
        assert!(
            error.contains("model.safetensors") && error.contains("incomplete or damaged"),
            "{error}"
        );

        let mut tensors = weights.tensors().clone();
        tensors.remove("model.norm.weight");
        let error = Weights::from_tensors(config(), tensors, &file).unwrap_err().to_string();
        assert!(error.contains("`model.norm.weight` is missing"), "{error}");

        let mut tensors = weights.tensors().clone();
        tensors.get_mut("model.norm.weight").unwrap().shape = vec![9];
        let error = Weights::from_tensors(config(), tensors, &file).unwrap_err().to_string();
        assert!(error.contains("has shape [9]") && error.contains("[8]"), "{error}");

        fs_err::remove_file(&file).unwrap();
        assert!(Weights::load(&target).unwrap_err().to_string().contains("model.safetensors"));
    }

    #[test]
    fn shards_are_found_through_the_index() {
        let (_guard, root) = scratch();
        let weights = Weights::random(config(), 3);
        write_json(&root.join("config.json"), weights.config()).unwrap();
        let mut map = serde_json::Map::new();
        for (part, odd) in [("a.safetensors", false), ("b.safetensors", true)] {
            let views = weights.tensors().iter().enumerate().filter(|(i, _)| (i % 2 == 1) == odd);
            let views = views.map(|(_, (name, t))| {
                map.insert(name.clone(), part.into());
                let stored = StoredType::F32;
                (name.as_str(), StoredTensor { shape: &t.shape, data: &t.data, stored })
            });
            write_tensors(&root.join(part), views).unwrap();
        }
        let index = serde_json::json!({ "weight_map": map });
        write_json(&root.join("model.safetensors.index.json"), &index).unwrap();
        assert_eq!(Weights::load(&root).unwrap(), weights);
    }
}
