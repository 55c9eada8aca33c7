//! vLLM's token-in, token-out route and the control routes of its developer mode.

mod capability;
mod reply;

use crate::api::EngineInfo;
use crate::capability::check_context;
use crate::dialect::{Capabilities, Dialect, GenerateOptions};
use crate::error::{EngineError, EngineErrorKind, ErrorDetail};
use crate::http::{CALL_TIMEOUT, ModelList, Server, body_with_ids, if_supported};
use crate::reply::{CheckedReply, ExpectedReply, parse_version};
use crate::request::{GenerateRequest, TokenPrompt};
use camino::Utf8Path;
use capability::{ServerSettings, block_size};
use orchestrate_types::{ModelShape, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// vLLM's `/inference/v1/generate`, version 0.31 and later.
#[derive(Debug)]
pub struct Vllm;

#[derive(Serialize)]
struct GenerateBody<'a> {
    request_id: &'a str,
    sampling_params: SamplingParams<'a>,
    cache_salt: String,
    stream: bool,
}

/// Values are explicit where the server would otherwise use the model's own defaults. The server
/// ignores unknown keys silently.
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
    /// 0 = of the sampled token only.
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
    // Its frames hold new tokens alone.
    const STREAMS: bool = false;

    fn body(request: &GenerateRequest, prompt: &TokenPrompt, options: &GenerateOptions) -> String {
        let sampling = &request.sampling;
        let body = GenerateBody {
            request_id: request.request_id.as_str(),
            sampling_params: SamplingParams {
                n: 1,
                max_tokens: options.max_new_tokens,
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
                // A request cannot switch rows off. Starting at the end returns the fewest.
                routed_experts_prompt_start: prompt
                    .routed_experts_start
                    .unwrap_or(prompt.ids.len()),
            },
            cache_salt: format!("w{}", prompt.cache_namespace),
            stream: false,
        };
        body_with_ids("token_ids", &prompt.ids, &body)
    }

    fn read(body: &[u8], expected: &ExpectedReply) -> Result<CheckedReply, EngineErrorKind> {
        reply::read(body, expected)
    }

    async fn capabilities(
        server: &Server,
        shape: &ModelShape,
    ) -> Result<Capabilities, EngineError> {
        let version: VersionReply = server.get_json("/version").await?;
        let models: ModelList = server.get_json("/v1/models").await?;
        // These routes exist only in developer mode, which weight updates also need.
        let settings: Option<Value> = server.get_json_if_supported("/server_info").await?;
        let weights: Option<WeightInfo> = server.get_json_if_supported("/weight_info").await?;
        let metrics = if_supported(server.get("/metrics").await)?;
        let settings = settings.map(ServerSettings::new);
        let context = models.data.iter().find_map(|model| model.max_model_len);
        let mut findings = capability::findings(version.version.as_deref(), settings.as_ref());
        findings.extend(check_context(context, shape.context));
        let block = metrics.as_deref().and_then(block_size);
        let mut facts = settings.as_ref().map(ServerSettings::facts).unwrap_or_default();
        facts.extend(block.map(|block| ("cache block", block.to_string())));
        let policy_version = weights.and_then(|weights| parse_version(&weights.weight_version?));
        let first = models.data.into_iter().next();
        Ok(Capabilities {
            info: EngineInfo {
                engine: format!("vllm {}", version.version.as_deref().unwrap_or("?")),
                model_path: first.map(|model| model.root.unwrap_or(model.id)).unwrap_or_default(),
                routed_experts: settings
                    .as_ref()
                    .is_some_and(ServerSettings::returns_routed_experts),
                policy_version,
                context,
                page_size: block.unwrap_or(1).max(1),
            },
            facts,
            // They need another scheduling policy, which the server does not report.
            priorities: false,
            streams_increments: true,
            ranks: settings.as_ref().map_or(1, ServerSettings::ranks),
            findings,
        })
    }

    async fn pause(server: &Server, timeout: Duration) -> Result<(), EngineError> {
        let path = "/pause?mode=abort&clear_cache=true";
        server.post_json("/pause", path, &json!({}), timeout).await.map(|_| ())
    }

    async fn load(
        server: &Server,
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
        server.post_json(rpc, rpc, &body, timeout).await?;
        // The server does not clear it by itself: cached rows would be those of the old weights.
        let reset = "/reset_prefix_cache";
        let body = server.post_json(reset, reset, &json!({}), CALL_TIMEOUT).await?;
        let reply: Success = serde_json::from_slice(&body).map_err(|error| {
            let detail = ErrorDetail::caused_by("cannot parse the reply", error);
            server.error(reset, EngineErrorKind::InvalidReply(detail))
        })?;
        if !reply.success {
            let message = "it kept its prefix cache, which has rows of the old weights";
            return Err(server.error(reset, EngineErrorKind::invalid_reply(message)));
        }
        let update = "/update_weight_version";
        let named =
            server.post_json(update, update, &json!({"new_version": version}), CALL_TIMEOUT).await;
        if if_supported(named)?.is_none() {
            // Releases that cannot name their weights cannot report a name either.
            return Ok(());
        }
        let info: WeightInfo = server.get_json("/weight_info").await?;
        if info.weight_version.as_deref() == Some(version) {
            return Ok(());
        }
        let found = info.weight_version.unwrap_or_default();
        let message = format!("its weights are named `{found}` after an update to `{version}`");
        Err(server.error("/weight_info", EngineErrorKind::invalid_reply(message)))
    }

    async fn resume(server: &Server) -> Result<(), EngineError> {
        server.post_json("/resume", "/resume", &json!({}), CALL_TIMEOUT).await.map(|_| ())
    }

    async fn abort(server: &Server, request_id: &RequestId) -> Result<(), EngineError> {
        // An id without the prefix is unknown, but the server would still answer 200.
        let body = json!({"request_ids": [reply::server_id(request_id.as_str())]});
        let scaled_out = "/inference/v1/abort_requests";
        let done = server.post_json(scaled_out, scaled_out, &body, CALL_TIMEOUT).await;
        if if_supported(done)?.is_some() {
            return Ok(());
        }
        let developer = "/abort_requests";
        server.post_json(developer, developer, &body, CALL_TIMEOUT).await.map(|_| ())
    }
}
