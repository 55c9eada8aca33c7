//! Checkpoint folders: configuration, shard index and tensors. A changed folder loads or is refused; what
//! loads has the tensors that its configuration describes, in memory bounded by its files.
#![no_main]

use camino::{Utf8Path, Utf8PathBuf};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_moe::{ModelConfig, Weights};
use std::sync::OnceLock;

const CONFIG: &str = r#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 4, "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "moe_intermediate_size": 1, "intermediate_size": 1, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 8, "tie_word_embeddings": true, "attention_bias": false, "hidden_act": "silu", "mlp_only_layers": [], "decoder_sparse_step": 1, "torch_dtype": "float32"}"#;
const INDEX: &str = r#"{"weight_map": {"a": "model-1.safetensors"}}"#;

#[derive(Debug, Arbitrary)]
struct Input {
    config: Vec<Change>,
    tensors: Vec<Change>,
    index: Option<Vec<Change>>,
}

struct Template {
    folder: Utf8PathBuf,
    tensors: Vec<u8>,
}

/// A folder in memory, one per process, and the tensors of a model with random weights.
fn template() -> &'static Template {
    static TEMPLATE: OnceLock<Template> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let folder =
            Utf8PathBuf::from(format!("/dev/shm/orchestrate-checkpoint-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("/dev/shm is writable");
        std::fs::write(folder.join("config.json"), CONFIG).expect("write");
        let config = ModelConfig::load(&folder).expect("a valid configuration");
        let weights = Weights::random(config, 1);
        weights.write(&folder, orchestrate_moe::StoredType::F32).expect("write");
        let tensors = std::fs::read(folder.join("model.safetensors")).expect("it was written");
        Template { folder, tensors }
    })
}

fn write(path: &Utf8Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("write");
}

fuzz_target!(|input: Input| {
    let Template { folder, tensors } = template();
    let mut config = CONFIG.as_bytes().to_vec();
    input::change(&mut config, &input.config);
    let mut changed = tensors.clone();
    input::change(&mut changed, &input.tensors);
    write(&folder.join("config.json"), &config);
    let (single, index) =
        (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    if let Some(changes) = &input.index {
        let mut text = INDEX.as_bytes().to_vec();
        input::change(&mut text, changes);
        write(&index, &text);
        write(&folder.join("model-1.safetensors"), &changed);
        let _ = std::fs::remove_file(&single);
    } else {
        write(&single, &changed);
        let _ = std::fs::remove_file(&index);
    }
    let unchanged = config == CONFIG.as_bytes() && changed == *tensors && input.index.is_none();
    let cap = 64 * (config.len() + changed.len()) + (1 << 16);
    match bounded(cap, || Weights::load(folder)) {
        Ok(weights) => {
            let shape = bounded(cap, || weights.config().shape());
            assert!(shape.top_k >= 1 && shape.top_k <= shape.experts);
            for tensor in weights.tensors().values() {
                assert_eq!(tensor.shape.iter().product::<usize>(), tensor.data.len());
            }
        }
        Err(error) => assert!(!unchanged, "a valid checkpoint was refused: {error}"),
    }
});
