//! The capability probe against a toy server with every fault that it must find.

use crate::server::{Reply, Seen, options, serve, server_info, shape};
use orchestrate_engine::{ClientOptions, EngineErrorKind, EngineKind, ProbeReport, Severity};
use orchestrate_routing::{RoutedRows, encode_npy, encode_sglang};
use orchestrate_types::ModelShape;
use serde_json::{Value, json};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

/// A fault of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    IgnoresStart,
    CapturesNothing,
    PhysicalExperts,
    FusedSharedExperts,
    OtherModel,
    StaleRows,
    ForgetsPrompts,
    RawLogprobs,
    /// No fault: two tokens are almost equally likely after the first prompt of the temperature check.
    NearTie,
    OldFields,
    ClosedRoute,
    NoTokenRoute,
    NoRows,
    ShortContext,
    Starting,
}

fn numbers(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap().iter();
    list.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// Expert ids of all rows from `start`. Rows change with `call` if they are stale.
fn ids(model: &ModelShape, tokens: &[u32], start: usize, call: usize) -> Vec<u16> {
    let row = |(position, token): (usize, &u32)| {
        let (experts, top_k, token) = (model.experts, model.top_k, *token as usize);
        (0..model.hidden_layers).flat_map(move |layer| {
            let first = position * 5 + token * 3 + layer * 2 + call;
            (0..top_k).map(move |slot| (first + slot * (1 + token % 2)) % experts)
        })
    };
    let inputs = &tokens[..tokens.len() - 1];
    let ids = inputs.iter().enumerate().skip(start).flat_map(row);
    ids.map(|id| u16::try_from(id).unwrap()).collect()
}

struct Toy {
    vllm: bool,
    broken: Broken,
    calls: usize,
    seen: Vec<Vec<u32>>,
}

impl Toy {
    fn payload(&self, tokens: &[u32], start: usize) -> String {
        let mut model = shape();
        let mut start = start;
        match self.broken {
            Broken::PhysicalExperts => model.experts = 64,
            Broken::FusedSharedExperts => model.top_k = 3,
            Broken::OtherModel => (model.hidden_layers, model.moe_layers) = (3, vec![0, 1, 2]),
            Broken::IgnoresStart => start = 0,
            _ => {}
        }
        let call = if self.broken == Broken::StaleRows { self.calls } else { 0 };
        let ids = ids(&model, tokens, start, call);
        let rows = RoutedRows::from_ids(&model, start, &ids).unwrap();
        let text = if self.vllm { encode_npy(&rows, &model) } else { encode_sglang(&rows, &model) };
        let text = text.unwrap();
        if self.broken != Broken::CapturesNothing {
            return text;
        }
        let mut bytes = base64_simd::STANDARD.decode_to_vec(&text).unwrap();
        let data = if self.vllm { 128 } else { 0 };
        bytes[data..].fill(0);
        base64_simd::STANDARD.encode_to_string(&bytes)
    }

    fn generate(&mut self, sent: &Value) -> Value {
        self.calls += 1;
        let key = if self.vllm { "token_ids" } else { "input_ids" };
        let prompt = numbers(&sent[key]);
        let params = &sent["sampling_params"];
        let budget = if self.vllm { &params["max_tokens"] } else { &params["max_new_tokens"] };
        let outputs: Vec<u32> = (0..budget.as_u64().unwrap())
            .map(|n| (prompt.iter().sum::<u32>() + u32::try_from(n).unwrap()) % 1024)
            .collect();
        let tokens = [prompt.as_slice(), &outputs].concat();
        let common = |seen: &Vec<u32>| seen.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let longest = self.seen.iter().map(common).max().unwrap_or(0);
        let cached = match self.broken {
            Broken::ForgetsPrompts => 0,
            _ => longest.min(prompt.len() - 1) / 4 * 4,
        };
        self.seen.push(tokens[..tokens.len() - 1].to_vec());
        let temperature = params["temperature"].as_f64().unwrap();
        let cold = temperature < 0.5 && self.broken != Broken::RawLogprobs;
        let logprob = match (cold, self.broken) {
            (true, Broken::NearTie) if self.calls == 5 => -0.77,
            (true, _) => 0.0,
            (false, _) => -2.5,
        };
        let start = if self.vllm {
            params["routed_experts_prompt_start"].as_u64()
        } else {
            sent["routed_experts_start_len"].as_u64()
        };
        let start = start.map(|start| usize::try_from(start).unwrap());
        let rows = start
            .filter(|_| self.broken != Broken::NoRows)
            .map(|start| self.payload(&tokens, start));
        let new = self.broken != Broken::OldFields;
        let spans = new.then(|| json!([{"version": "default", "start": 0, "end": outputs.len()}]));
        if self.vllm {
            let content: Vec<Value> =
                outputs.iter().map(|id| json!({"token_id": id, "logprob": logprob})).collect();
            return json!({
                "request_id": format!("generate-tokens-{}", sent["request_id"].as_str().unwrap()),
                "usage": {"prompt_tokens": prompt.len(),
                          "prompt_tokens_details": new.then(|| json!({"cached_tokens": cached}))},
                "choices": [{
                    "index": 0, "finish_reason": "length", "token_ids": outputs,
                    "routed_experts": rows, "weight_versions": spans,
                    "logprobs": {"content": content},
                }],
            });
        }
        let triples: Vec<Value> = outputs.iter().map(|id| json!([logprob, id, null])).collect();
        json!({
            "output_ids": outputs,
            "meta_info": {
                "id": sent["rid"], "finish_reason": {"type": "length"},
                "prompt_tokens": prompt.len(), "cached_tokens": new.then_some(cached),
                "weight_version": "default", "weight_versions": spans, "dp_rank": 0,
                "output_token_logprobs": triples, "routed_experts": rows,
            },
        })
    }
}

/// Starts a server with one fault. Returns its URL and the requests it receives.
async fn toy(tasks: &mut JoinSet<()>, vllm: bool, broken: Broken) -> (String, Receiver<Seen>) {
    let toy = Mutex::new(Toy { vllm, broken, calls: 0, seen: Vec::new() });
    serve(tasks, move |path, sent| {
        let context = if broken == Broken::ShortContext { 256 } else { 1024 };
        let models = json!({"data": [{"id": "m", "max_model_len": context}]});
        let reply = |value: Value| Reply::Now(200, value.to_string());
        match path {
            "/generate" | "/inference/v1/generate" => match broken {
                Broken::ClosedRoute => {
                    Reply::Now(403, json!({"error": {"message": "not enabled"}}).to_string())
                }
                Broken::NoTokenRoute => Reply::Now(404, json!({"detail": "x"}).to_string()),
                Broken::Starting => Reply::Busy(503, "0"),
                _ => reply(toy.lock().unwrap().generate(sent)),
            },
            "/server_info" if vllm => {
                reply(json!({"vllm_config": "enable_return_routed_experts=True"}))
            }
            "/server_info" => {
                let mut info = server_info();
                info["context_length"] = json!(context);
                info["page_size"] = json!(4);
                reply(info)
            }
            "/model_info" => reply(json!({"model_path": "m", "weight_version": "default"})),
            "/version" => reply(json!({"version": "0.33.0"})),
            "/v1/models" => reply(models),
            "/weight_info" => reply(json!({"weight_version": "default"})),
            "/metrics" => {
                let text = "vllm:cache_config_info{block_size=\"4\",engine=\"0\"} 1.0\n";
                Reply::Now(200, text.to_owned())
            }
            _ => Reply::Now(404, json!({"detail": "Not Found"}).to_string()),
        }
    })
    .await
}

async fn probe(vllm: bool, broken: Broken) -> ProbeReport {
    let mut tasks = JoinSet::new();
    let (url, _) = toy(&mut tasks, vllm, broken).await;
    let kind = if vllm { EngineKind::Vllm } else { EngineKind::Sglang };
    kind.client(options(&url)).unwrap().probe().await.unwrap()
}

#[tokio::test]
async fn a_supported_server_has_no_findings() {
    for vllm in [false, true] {
        let tie = probe(vllm, Broken::NearTie).await;
        assert_eq!(tie.findings, [], "vllm: {vllm}");
        let report = probe(vllm, Broken::Nothing).await;
        assert_eq!(report.findings, [], "vllm: {vllm}");
        let fact = |name: &str| {
            report.facts.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_str())
        };
        assert_eq!(fact("versions by token"), Some("yes"));
        assert_eq!(fact("cached tokens reported"), Some("yes"));
        assert_eq!(fact("rows that differ when cached"), Some("0 of 48"));
        assert_eq!(fact("data-parallel rank"), (!vllm).then_some("0"));
        assert_eq!(report.info.page_size, 4);
    }
}

#[tokio::test]
async fn the_probe_makes_its_calls_in_order() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = toy(&mut tasks, false, Broken::Nothing).await;
    EngineKind::Sglang.client(options(&url)).unwrap().probe().await.unwrap();
    let mut sent = Vec::new();
    let mut ids = std::collections::BTreeSet::new();
    while let Ok(call) = seen.try_recv() {
        if call.path == "/generate" {
            let prompt = numbers(&call.body["input_ids"]).len();
            sent.push((prompt, call.body["routed_experts_start_len"].as_u64()));
            assert!(ids.insert(call.body["rid"].as_str().unwrap().to_owned()), "a new id per try");
        }
    }
    assert_eq!(sent, [(48, Some(0)), (48, Some(0)), (48, Some(47)), (55, Some(49)), (48, None)]);
}

#[tokio::test]
async fn a_busy_server_is_asked_again() {
    for status in [429, 503] {
        let mut tasks = JoinSet::new();
        let toy =
            Mutex::new(Toy { vllm: false, broken: Broken::Nothing, calls: 0, seen: Vec::new() });
        let (refused, described) = (AtomicU32::new(0), AtomicU32::new(0));
        let (url, _) = serve(&mut tasks, move |path, sent| match path {
            // Two of three generations are refused, and the first two descriptions.
            "/generate" if refused.fetch_add(1, Ordering::Relaxed) % 3 < 2 => {
                Reply::Busy(status, "0")
            }
            "/server_info" if described.fetch_add(1, Ordering::Relaxed) < 2 => {
                Reply::Busy(status, "0")
            }
            "/generate" => Reply::Now(200, toy.lock().unwrap().generate(sent).to_string()),
            "/server_info" => Reply::Now(200, server_info().to_string()),
            _ => Reply::Now(200, json!({"weight_version": "default"}).to_string()),
        })
        .await;
        let report = EngineKind::Sglang.client(options(&url)).unwrap().probe().await.unwrap();
        assert_eq!(report.findings, []);
    }
}

#[tokio::test]
async fn every_fault_is_found_with_its_name_and_remedy() {
    use Severity::{Refusal, Warning};
    for (broken, name, severity, remedy) in [
        (Broken::IgnoresStart, "start-ignored", Refusal, "upgrade"),
        (Broken::CapturesNothing, "moe-backend", Refusal, "--moe-runner-backend"),
        (Broken::PhysicalExperts, "physical-experts", Refusal, "load balancing"),
        (Broken::FusedSharedExperts, "fused-shared-experts", Refusal, "fusion"),
        (Broken::OtherModel, "routed-experts", Refusal, "engine.model"),
        (Broken::StaleRows, "stale-rows", Refusal, "HiCache"),
        (Broken::ForgetsPrompts, "prefix-cache", Warning, "prefix cache"),
        (Broken::RawLogprobs, "raw-logprobs", Warning, "temperature 1"),
        (Broken::OldFields, "versions", Warning, "upgrade"),
        (Broken::ClosedRoute, "closed-route", Refusal, "--enable-scale-out"),
        (Broken::NoTokenRoute, "no-token-route", Refusal, "/inference/v1/generate"),
        (Broken::NoRows, "generation", Refusal, "log"),
        (Broken::ShortContext, "context", Warning, "max_sequence_tokens"),
        (Broken::Starting, "generation", Refusal, "log"),
    ] {
        for vllm in [false, true] {
            let report = probe(vllm, broken).await;
            let found = report.findings.iter().find(|finding| finding.name == name);
            let found = found.unwrap_or_else(|| panic!("{broken:?} {vllm}: {report:?}"));
            assert_eq!(found.severity, severity, "{broken:?}");
            assert!(found.remedy.contains(remedy), "{broken:?}: {found}");
            assert_eq!(report.refusals().next().is_some(), severity == Refusal, "{report:?}");
            if broken == Broken::OldFields {
                assert!(report.warnings().any(|finding| finding.name == "cached-tokens"));
            }
        }
    }
}

#[tokio::test]
async fn a_server_without_rows_is_probed_without_them() {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, |path, sent| match path {
        "/server_info" => {
            let mut info = server_info();
            info["enable_return_routed_experts"] = json!(false);
            Reply::Now(200, info.to_string())
        }
        "/generate" => {
            let mut toy = Toy { vllm: false, broken: Broken::Nothing, calls: 0, seen: Vec::new() };
            Reply::Now(200, toy.generate(sent).to_string())
        }
        _ => Reply::Now(200, json!({"weight_version": "default"}).to_string()),
    })
    .await;
    let options = ClientOptions { require_routed_experts: false, ..options(&url) };
    let report = EngineKind::Sglang.client(options).unwrap().probe().await.unwrap();
    let names: Vec<_> = report.findings.iter().map(|finding| finding.name).collect();
    assert_eq!(names, ["routing-off"]);
    let mut generations = 0;
    while let Ok(call) = seen.try_recv() {
        generations += u32::from(call.path == "/generate");
    }
    assert_eq!(generations, 1);
}

#[tokio::test]
async fn an_unreachable_server_is_an_error_not_a_finding() {
    let client = EngineKind::Sglang.client(options("http://127.0.0.1:9")).unwrap();
    let error = client.probe().await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
    let mut tasks = JoinSet::new();
    let (url, _) = serve(&mut tasks, |path, _| match path {
        "/generate" => Reply::Never(None),
        "/server_info" => Reply::Now(200, server_info().to_string()),
        _ => Reply::Now(200, json!({}).to_string()),
    })
    .await;
    let client = EngineKind::Sglang.client(options(&url)).unwrap();
    let probe = tokio::time::timeout(Duration::from_millis(200), client.probe());
    assert!(probe.await.is_err(), "it waits for a server that is warming up");
}
