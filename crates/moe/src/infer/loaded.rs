//! Loading a checkpoint folder for the engine.

use super::matrix::WeightFormat;
use super::model::Model;
use crate::train::auxiliary::AuxiliaryWeights;
use crate::{CheckpointError, ModelConfig, Weights};
use camino::Utf8Path;

/// A model loaded from a checkpoint folder.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) model: Model,
    /// End-of-sequence tokens; sampling one ends the sequence.
    pub(crate) eos: Vec<u32>,
}

impl Loaded {
    /// Reads the weights, the end-of-sequence tokens and, if the folder has one, the router
    /// predictor.
    pub(crate) fn read(folder: &Utf8Path, format: WeightFormat) -> Result<Self, CheckpointError> {
        let mut model = Model::build(&Weights::load(folder)?, format)?;
        if let Some(predictor) = AuxiliaryWeights::load(folder, model.config())?.predictor {
            model.predict_routes(predictor.weights());
        }
        Ok(Self { model, eos: eos_tokens(folder)? })
    }
}

/// `eos_token_id` (a number or a list) of `generation_config.json`, else of `config.json`; empty if
/// neither sets it.
fn eos_tokens(folder: &Utf8Path) -> Result<Vec<u32>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Config {
        eos_token_id: Option<serde_json::Value>,
    }
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let text = fs_err::read(&path).map_err(|e| CheckpointError::new(&path, e))?;
        let config: Config =
            serde_json::from_slice(&text).map_err(|e| CheckpointError::new(&path, e))?;
        let list = match config.eos_token_id {
            None | Some(serde_json::Value::Null) => continue,
            Some(list @ serde_json::Value::Array(_)) => list,
            Some(one) => serde_json::Value::Array(vec![one]),
        };
        return serde_json::from_value(list).map_err(|e| CheckpointError::new(&path, e));
    }
    Ok(Vec::new())
}

/// Whether weights of `b` can replace weights of `a` while the KV pool stays as it is.
pub(crate) fn shares_kv_layout(a: &ModelConfig, b: &ModelConfig) -> bool {
    let heads = |c: &ModelConfig| (c.num_key_value_heads, c.head_dim);
    a.shape() == b.shape() && heads(a) == heads(b)
}
