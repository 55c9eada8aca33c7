//! Token-level sampling: vLLM's `/inference/v1/generate`, for clients that render prompts
//! themselves.

use crate::answer::{Frames, body_of, connection_of, envelope, note, with_headers};
use crate::dialect::Dialect;
use crate::episode::Episode;
use crate::fields;
use crate::options::GatewayOptions;
use crate::problem::{Kind, Problem};
use crate::sampler::{AskedSampling, Finish, RoutedExperts, SampledTokens, TokenRequest};
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::response::Response;
use base64_simd::STANDARD;
use bytes::Bytes;
use orchestrate_types::mended_json;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The fields of a request that are read; [`fields::TOKENS`] decides about all others.
#[derive(Deserialize)]
struct Wanted {
    token_ids: Vec<u32>,
    #[serde(default)]
    sampling_params: Parameters,
}

#[derive(Deserialize, Default)]
struct Parameters {
    max_tokens: Option<usize>,
    routed_experts_prompt_start: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
}

#[derive(Serialize)]
struct Reply<'a> {
    request_id: &'a str,
    choices: [Choice<'a>; 1],
    usage: Usage,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    token_ids: &'a [u32],
    finish_reason: &'static str,
    logprobs: Logprobs,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<Rows>,
}

#[derive(Serialize)]
struct Logprobs {
    content: Vec<Logprob>,
}

#[derive(Serialize)]
struct Logprob {
    token: String,
    logprob: f32,
}

/// Routing rows. `data` comes first, because clients cut it out of the reply's text.
#[derive(Serialize)]
struct Rows {
    data: String,
    shape: [usize; 3],
    dtype: &'static str,
    start: usize,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: Cached,
}

#[derive(Serialize)]
struct Cached {
    cached_tokens: usize,
}

/// Samples a reply to a tokenised prompt. Errors have OpenAI's format.
pub(crate) async fn generate(
    State(options): State<Arc<GatewayOptions>>,
    Extension(episode): Extension<Episode>,
    request: Request,
) -> Response {
    match try_generate(&options, &episode, request).await {
        Ok(response) => response,
        Err(problem) => {
            note(&episode, &problem);
            problem.response(Dialect::Chat)
        }
    }
}

async fn try_generate(
    options: &GatewayOptions,
    episode: &Episode,
    request: Request,
) -> Result<Response, Problem> {
    let connection = connection_of(&request);
    let (body, repeats) = body_of(options, episode, request).await?;
    let mut request = TokenRequest { repeats, ..parse(&body)? };
    if episode.sampler().honours_sampling() {
        request.sampling.check("sampling_params.")?;
        request.overridden.honour_sampling();
    }
    let prompt = Arc::clone(&request.token_ids);
    let overridden = request.overridden.header();
    let sampled = episode.sampler().generate(request).await?;
    let envelope = envelope(episode);
    let body = reply(&envelope.id, prompt.len(), &sampled)?;
    let frames = Frames::new(vec![body], vec![sampled.receipt], connection);
    Ok(with_headers(Body::from_stream(frames.stream()), "application/json", &envelope, overridden))
}

pub(crate) fn parse(body: &[u8]) -> Result<TokenRequest, Problem> {
    let body = &*mended_json(body);
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(Problem::new(Kind::Invalid, "the body must be a JSON object with `token_ids`"));
    }
    let wanted: Wanted =
        serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_slice(body))
            .map_err(|error| Problem::field(error.path().to_string(), error.inner()))?;
    let Wanted { token_ids, sampling_params } = wanted;
    let overridden = fields::check(body, &fields::TOKENS)?;
    if token_ids.is_empty() {
        return Err(Problem::field("token_ids", "a prompt has at least one token"));
    }
    let Parameters { max_tokens, routed_experts_prompt_start, temperature, top_p } =
        sampling_params;
    if max_tokens == Some(0) {
        return Err(Problem::field("sampling_params.max_tokens", "must be at least 1"));
    }
    let rows_from = routed_experts_prompt_start.unwrap_or(0);
    Ok(TokenRequest {
        token_ids: token_ids.into(),
        max_tokens,
        rows_from,
        sampling: AskedSampling { temperature, top_p },
        repeats: false,
        overridden,
    })
}

fn reply(id: &str, prompt: usize, sampled: &SampledTokens) -> Result<Bytes, Problem> {
    let SampledTokens { token_ids, logprobs, finish, cached, rows, .. } = sampled;
    let content = token_ids.iter().zip(logprobs);
    let content = content
        .map(|(id, &logprob)| Logprob { token: format!("token_id:{id}"), logprob })
        .collect();
    let rows = rows.as_ref().map(|rows| {
        let RoutedExperts { start, bytes, shape, dtype } = rows;
        Rows { data: STANDARD.encode_to_string(bytes), shape: *shape, dtype, start: *start }
    });
    let reply = Reply {
        request_id: id,
        choices: [Choice {
            index: 0,
            token_ids,
            finish_reason: if *finish == Finish::Length { "length" } else { "stop" },
            logprobs: Logprobs { content },
            routed_experts: rows,
        }],
        usage: Usage {
            prompt_tokens: prompt,
            completion_tokens: token_ids.len(),
            total_tokens: prompt + token_ids.len(),
            prompt_tokens_details: Cached { cached_tokens: *cached },
        },
    };
    let bytes = serde_json::to_vec(&reply);
    bytes.map(Bytes::from).map_err(|error| Problem::new(Kind::Failed, error.to_string()))
}
