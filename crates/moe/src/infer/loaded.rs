//! A checkpoint folder as the engine serves it.

use super::matrix::WeightFormat;
use super::model::Model;
use crate::train::side::Side;
use crate::{CheckpointError, ModelConfig, Weights};
use camino::Utf8Path;

/// A model folder, loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) model: Model,
    /// Tokens that end a sequence by themselves.
    pub(crate) eos: Vec<u32>,
}

impl Loaded {
    /// Reads weights, the router predictor if there is one, and the end-of-sequence tokens.
    pub(crate) fn read(folder: &Utf8Path, format: WeightFormat) -> Result<Self, CheckpointError> {
        let mut model = Model::build(&Weights::load(folder)?, format)?;
        if let Some(predictor) = Side::load(folder, model.config())?.predictor {
            model.predict_routes(predictor.weights());
        }
        Ok(Self { model, eos: eos_tokens(folder)? })
    }
}

/// `eos_token_id` of `generation_config.json`, or else of `config.json`; one number or a list.
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

/// Whether weights of one can take the place of the other's without touching the KV pool.
pub(crate) fn same_form(a: &ModelConfig, b: &ModelConfig) -> bool {
    let heads = |c: &ModelConfig| (c.num_key_value_heads, c.head_dim);
    a.shape() == b.shape() && heads(a) == heads(b)
}
