//! vLLM's token-in, token-out route and the control routes of its developer mode.

mod fitness;
mod reply;

use crate::dialect::{Dialect, Limits, Survey};
use crate::http::{CALL_TIMEOUT, Models, Wire, if_known};
use crate::reply::{Expected, Fault, Reading, parse_version};
use crate::{EngineError, EngineErrorKind, EngineInfo, GenerateRequest};
use camino::Utf8Path;
use fitness::{Settings, block_size};
use orchestrate_types::{ModelShape, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// The server puts this before every request id, in replies and for aborts.
const ID_PREFIX: &str = "generate-tokens-";

/// vLLM's `/inference/v1/generate`, 0.31 and later.
#[derive(Debug)]
pub struct Vllm;

#[derive(Serialize)]
struct GenerateBody<'a> {
    request_id: &'a str,
    sampling_params: SamplingParams<'a>,
    cache_salt: String,
    stream: bool,
}

/// Explicit wherever the server would otherwise take the model's own defaults. Unknown keys are
/// ignored without a word.
#[derive(Serialize)]
struct SamplingParams<'a> {
    n: u32,
    max_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: i32,
    min_p: f32,
    #[serde(skip_serializing_if = "<[TokenId]>::is_empty")]
    stop_token_ids: &'a [TokenId],
    seed: u64,
    /// 0: of the chosen token only.
    logprobs: u32,
    detokenize: bool,
    skip_special_tokens: bool,
    routed_experts_prompt_start: usize,
}

#[derive(Deserialize)]
struct VersionReply {
    version: Option<String>,
}

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Success {
    success: bool,
}

impl Dialect for Vllm {
    const GENERATE: &'static str = "/inference/v1/generate";
    const RANK_HEADER: Option<&'static str> = Some("x-data-parallel-rank");

    fn body(request: &GenerateRequest, limits: &Limits) -> String {
        let sampling = &request.sampling;
        let body = GenerateBody {
            request_id: request.request_id.as_str(),
            sampling_params: SamplingParams {
                n: 1,
                max_tokens: limits.max_new_tokens,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: 0,
                min_p: 0.0,
                stop_token_ids: &sampling.stop_token_ids,
                // The server takes a signed 64-bit number.
                seed: sampling.seed >> 1,
                logprobs: 0,
                detokenize: false,
                skip_special_tokens: false,
                // Rows cannot be switched off by request: from the end on there are fewest.
                routed_experts_prompt_start: request
                    .routed_experts_start
                    .unwrap_or(request.token_ids.len()),
            },
            cache_salt: format!("w{}", request.cache_namespace),
            stream: false,
        };
        crate::http::json("token_ids", &request.token_ids, &body)
    }

    fn read(body: &[u8], expected: &Expected) -> Result<Reading, Fault> {
        reply::read(body, expected)
    }

    async fn survey(wire: &Wire, shape: &ModelShape) -> Result<Survey, EngineError> {
        let version: VersionReply = wire.ask("/version").await?;
        let models: Models = wire.ask("/v1/models").await?;
        // Both exist in developer mode only, in which weights can be replaced.
        let settings: Option<Value> = wire.ask_if_known("/server_info").await?;
        let weights: Option<WeightInfo> = wire.ask_if_known("/weight_info").await?;
        let metrics = if_known(wire.read("/metrics").await)?;
        let settings = settings.map(Settings::new);
        let context = models.data.iter().find_map(|model| model.max_model_len);
        let mut findings = fitness::findings(version.version.as_deref(), settings.as_ref());
        findings.extend(crate::fitness::check_context(context, shape.context));
        let block = metrics.as_deref().and_then(block_size);
        let mut facts = settings.as_ref().map(Settings::facts).unwrap_or_default();
        facts.extend(block.map(|block| ("cache block", block.to_string())));
        let version_named = weights.and_then(|weights| parse_version(&weights.weight_version?));
        let first = models.data.into_iter().next();
        Ok(Survey {
            info: EngineInfo {
                engine: format!("vllm {}", version.version.as_deref().unwrap_or("?")),
                model_path: first.map(|model| model.root.unwrap_or(model.id)).unwrap_or_default(),
                routed_experts: settings.as_ref().is_some_and(Settings::returns_routed_experts),
                policy_version: version_named,
                context,
                page_size: block.unwrap_or(1).max(1),
            },
            facts,
            // Taken only with another scheduling policy, which the server does not tell.
            priorities: false,
            ranks: settings.as_ref().map_or(1, Settings::ranks),
            findings,
        })
    }

    async fn pause(wire: &Wire, timeout: Duration) -> Result<(), EngineError> {
        let path = "/pause?mode=abort&clear_cache=true";
        wire.tell("/pause", path, &json!({}), timeout).await.map(|_| ())
    }

    async fn load(
        wire: &Wire,
        checkpoint: &Utf8Path,
        version: &str,
        timeout: Duration,
    ) -> Result<(), EngineError> {
        let rpc = "/collective_rpc";
        let body = json!({
            "method": "reload_weights",
            "kwargs": {"weights_path": checkpoint.as_str()},
            "timeout": timeout.as_secs_f64(),
        });
        wire.tell(rpc, rpc, &body, timeout).await?;
        // Nothing is flushed by itself: cached rows would stay those of the old weights.
        let reset = "/reset_prefix_cache";
        let body = wire.tell(reset, reset, &json!({}), CALL_TIMEOUT).await?;
        let reply: Success = serde_json::from_slice(&body)
            .map_err(|error| wire.error(reset, EngineErrorKind::InvalidReply(error.to_string())))?;
        if !reply.success {
            let words = "it kept its prefix cache, whose rows are those of the old weights";
            return Err(wire.error(reset, EngineErrorKind::InvalidReply(words.to_owned())));
        }
        let update = "/update_weight_version";
        let named = wire.tell(update, update, &json!({"new_version": version}), CALL_TIMEOUT).await;
        if if_known(named)?.is_none() {
            // Releases that cannot name their weights have nothing to compare, either.
            return Ok(());
        }
        let info: WeightInfo = wire.ask("/weight_info").await?;
        if info.weight_version.as_deref() == Some(version) {
            return Ok(());
        }
        let found = info.weight_version.unwrap_or_default();
        let words = format!("it names its weights `{found}` after an update to `{version}`");
        Err(wire.error("/weight_info", EngineErrorKind::InvalidReply(words)))
    }

    async fn resume(wire: &Wire) -> Result<(), EngineError> {
        wire.tell("/resume", "/resume", &json!({}), CALL_TIMEOUT).await.map(|_| ())
    }

    async fn abort(wire: &Wire, request_id: &RequestId) -> Result<(), EngineError> {
        // Without its prefix the id is unknown, and the answer is the same as for a known one.
        let body = json!({"request_ids": [format!("{ID_PREFIX}{request_id}")]});
        let scaled_out = "/inference/v1/abort_requests";
        let done = wire.tell(scaled_out, scaled_out, &body, CALL_TIMEOUT).await;
        if if_known(done)?.is_some() {
            return Ok(());
        }
        let developer = "/abort_requests";
        wire.tell(developer, developer, &body, CALL_TIMEOUT).await.map(|_| ())
    }
}
