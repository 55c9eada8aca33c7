//! The bundled policy on the embedded engine with f32 weights: the rows of every branch equal those of a
//! whole prefill of the branch.

use super::conversation;
use super::draw::Agent;
use super::model::policy;
use super::reference::Asked;
use super::wire::Entry;
use camino::Utf8PathBuf;
use orchestrate_engine::{
    ClientOptions, Engine, EngineKind, GenerateRequest, Prompt, Sampling, TlsClientPem, TokenPrompt,
};
use orchestrate_moe::ModelConfig;
use orchestrate_moe::infer::{EngineOptions, EngineServeError, WeightFormat, serve_engine};
use orchestrate_types::{PolicyVersion, RequestId, RunId};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Longest reply, in tokens: a conversation must fit into the policy's context.
const REPLY_TOKENS: usize = 24;

/// The engine, for as long as this is held.
struct Served {
    engine: Arc<dyn Engine>,
    _server: JoinSet<Result<(), EngineServeError>>,
    _stop: DropGuard,
}

async fn serve() -> Served {
    let folder: Utf8PathBuf = policy();
    let shape = ModelConfig::load(&folder).unwrap().shape();
    let options = EngineOptions {
        weight_format: WeightFormat::F32,
        weight_version: "0".into(),
        ..EngineOptions::new(folder)
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let mut server = JoinSet::new();
    server.spawn(serve_engine(options, listener, stop.clone()));
    let client = ClientOptions {
        url,
        api_key: None,
        tls: TlsClientPem::default(),
        shape,
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: Duration::from_mins(1),
        served_model: None,
        chat: orchestrate_engine::ChatServerOptions::default(),
    };
    let (worker, _) = EngineKind::Sglang.connect(client, Duration::from_mins(2)).await.unwrap();
    worker.probe().await.unwrap();
    Served { engine: worker, _server: server, _stop: stop.drop_guard() }
}

/// Routing rows of a prefill of all these tokens, none of which the engine has in its cache.
async fn prefilled(engine: &dyn Engine, tokens: &[u32], number: u64) -> Vec<Vec<u8>> {
    let attempt = "t000009.00-a01".parse().unwrap();
    let request = GenerateRequest {
        request_id: RequestId::new(RunId::generate(), attempt, 0, 0),
        session: format!("prefill-{number}"),
        prompt: Prompt::Tokens(TokenPrompt {
            ids: Arc::new(tokens.to_vec()),
            routed_experts_start: Some(0),
            cache_namespace: PolicyVersion(1000 + number),
        }),
        sampling: Sampling {
            temperature: 1.0,
            top_p: 1.0,
            max_new_tokens: 1,
            stop_token_ids: Vec::new(),
            seed: 1,
        },
        priority: 0,
        deadline: Duration::from_mins(2),
        listener: None,
    };
    let generation = engine.generate(request).await.unwrap().into_tokens().unwrap();
    assert_eq!(generation.cached_tokens, 0);
    let rows = generation.routed_experts.unwrap();
    assert_eq!((rows.start(), rows.rows()), (0, tokens.len()));
    (0..tokens.len() - 1).map(|row| rows.row(row).unwrap().to_vec()).collect()
}

#[tokio::test]
async fn rows_of_all_dialects_equal_a_prefill_by_the_embedded_engine() {
    let served = serve().await;
    let (mut branches, mut rows, mut sampled) = (0, 0, 0);
    for seed in 0..4 {
        let (conversation, client) = conversation(Arc::clone(&served.engine));
        let mut agent = Agent::new(seed);
        let mut known: Vec<Asked> = Vec::new();
        let mut completion = 0;
        for _ in 0..14 {
            let question = agent.question(&known).limited(REPLY_TOKENS);
            let (path, body) = question.request();
            let answer = client.post(path, &body, false).await;
            match (&question.asked, &question.wire) {
                (Asked::Messages { tools, history }, Some(request)) => {
                    let got = request.read(&answer);
                    completion += got.usage.1;
                    for reply in got.replies {
                        let mut history = history.clone();
                        history.push(Entry::Reply(reply));
                        known.push(Asked::Messages { tools: *tools, history });
                    }
                }
                (Asked::Tokens(prompt), _) => {
                    let answer: Value = serde_json::from_str(&answer).unwrap();
                    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
                    completion += ids.len() as u64;
                    let ids = ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap());
                    known.push(Asked::Tokens(prompt.iter().copied().chain(ids).collect()));
                }
                (Asked::Messages { .. }, None) => unreachable!("messages have a dialect"),
            }
        }
        let finished = conversation.finish();
        assert_eq!((finished.routing_problem, finished.failure), (None, None));
        let mut losses = 0;
        for branch in &finished.branches {
            let tokens = branch.trajectory.token_ids();
            let mask = branch.routing.as_ref().unwrap();
            assert_eq!(mask.rows(), tokens.len() - 1);
            branches += 1;
            let expected = prefilled(&*served.engine, tokens, branches).await;
            for (position, expected) in expected.iter().enumerate() {
                let row = mask.row(position).unwrap();
                assert_eq!(row, expected, "row {position} of branch {branches}");
            }
            rows += mask.rows();
            losses += branch.trajectory.response_tokens() as u64;
        }
        assert_eq!(losses, completion, "tokens with loss");
        sampled += losses;
    }
    orchestrate_e2e::say(&format!("{branches} branches, {rows} rows, {sampled} sampled tokens"));
    assert!(branches > 4 && sampled > 100);
}
