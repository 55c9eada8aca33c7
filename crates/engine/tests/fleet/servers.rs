//! Servers over HTTP that are killed and restarted during conversations.

use crate::scripted::sample;
use camino::Utf8Path;
use orchestrate_engine::{
    Engine as _, Fleet, FleetOptions, FleetWorker, GenerateRequest, Prompt, SglangClient,
    SglangOptions, TokenPrompt,
};
use orchestrate_routing::MaskBuilder;
use orchestrate_synthetic::{EnginePlan, Latency, Script, expected_rows, serve};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, RunId};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

const TURNS: usize = 6;
const OBSERVATION: [u32; 6] = [1, 40, 41, 2, 1, 7];

fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 3,
        moe_layers: vec![1, 2],
        experts: 16,
        top_k: 2,
        vocab: 64,
        context: 4096,
    }
}

fn plan() -> EnginePlan {
    let script = Script {
        end_of_message: 2,
        header: vec![1, 7],
        ends_before: 1,
        ends_per_turn: 2,
        turns: TURNS,
        call_head: vec![10],
        drawn: (20..30).collect(),
        drawn_tokens: 20,
        call_tail: vec![11, 2],
        submit: vec![12, 2],
    };
    let latency = Latency { base_ms: 20.0, prefill_ms_per_1k: 0.0, decode_ms: 0.0, jitter: 0.5 };
    EnginePlan {
        shape: shape(),
        script,
        latency,
        page_tokens: 4,
        cache_tokens: 0,
        update_ms: 5,
        tells_time: false,
    }
}

/// A server with its own runtime, so that killing it also closes all connections.
struct Server {
    runtime: Option<Runtime>,
    address: SocketAddr,
}

impl Server {
    fn start(address: Option<SocketAddr>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let address = address.unwrap_or_else(|| ([127, 0, 0, 1], 0).into());
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            serve(plan(), TcpListener::from_std(listener).unwrap()).await.unwrap();
        });
        Self { runtime: Some(runtime), address }
    }

    /// Kills the server. Returns when its sockets are closed.
    fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::block_in_place(|| runtime.shutdown_timeout(Duration::from_secs(5)));
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn fleet(servers: &[Server]) -> Arc<Fleet> {
    let worker = |server: &Server| {
        let options = SglangOptions {
            url: server.url(),
            api_key: None,
            tls: orchestrate_engine::TlsClientPem::default(),
            shape: shape(),
            max_in_flight: 64,
            require_routed_experts: true,
            sync_timeout: Duration::from_mins(1),
            served_model: None,
            chat: orchestrate_engine::ChatServerOptions::default(),
        };
        let engine = Arc::new(SglangClient::new(options).unwrap());
        FleetWorker { name: server.url(), engine, is_up: true }
    };
    let options = FleetOptions {
        max_in_flight: 64,
        // Also the time limit of a probe: three late ones take a live server out of service.
        probe_interval: Duration::from_secs(2),
        out_of_service_timeout: Duration::from_mins(1),
    };
    Arc::new(Fleet::start(servers.iter().map(worker).collect(), options).unwrap())
}

fn request(session: usize, turn: u32, tokens: &[u32], start: usize, tries: u32) -> GenerateRequest {
    let attempt = format!("t{session:06}.00-a01").parse().unwrap();
    let mut request = crate::scripted::request(&format!("s{session}"), 0);
    request.request_id = RequestId::new(RunId::generate(), attempt, turn, tries);
    request.prompt = Prompt::Tokens(TokenPrompt {
        ids: Arc::new(tokens.to_vec()),
        routed_experts_start: Some(start),
        cache_namespace: PolicyVersion(0),
    });
    request.sampling.seed = session as u64;
    request
}

/// Result of one conversation.
struct Conversation {
    tokens: Vec<u32>,
    rows: Vec<u8>,
    drift: usize,
    workers: Vec<String>,
}

/// Runs one conversation and joins its rows, like an episode.
async fn converse(fleet: Arc<Fleet>, session: usize, turns: watch::Sender<usize>) -> Conversation {
    let id = u32::try_from(session).unwrap() % 10;
    let mut tokens = vec![1, 50 + id, 51, 52, 53, 2, 1, 7];
    let mut rows = MaskBuilder::new(Arc::new(shape())).unwrap();
    let (mut drift, mut workers) = (0, Vec::new());
    for turn in 0..TURNS {
        let mut tries = 0;
        let mut reply = loop {
            let number = u32::try_from(turn).unwrap();
            let request = request(session, number, &tokens, rows.next_start(), tries);
            match sample(fleet.as_ref(), request).await {
                Ok(reply) => break reply,
                Err(error) => assert!(tries < 5, "{error}"),
            }
            tries += 1;
        };
        tokens.extend(reply.output_ids());
        let version = reply.versions()[0].version;
        let part = reply.routed_experts.take().unwrap();
        drift += rows.push(part, tokens.len(), version).unwrap().drift_rows;
        workers.push(reply.worker);
        turns.send_modify(|turns| *turns += 1);
        if turn + 1 < TURNS {
            tokens.extend(OBSERVATION);
        }
    }
    let mask = rows.finish(tokens.len()).unwrap();
    Conversation { tokens, rows: mask.to_vec(), drift, workers }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_loses_no_conversation_and_no_row() {
    const CONVERSATIONS: usize = 24;
    let mut servers: Vec<Server> = (0..3).map(|_| Server::start(None)).collect();
    let fleet = fleet(&servers);
    fleet.sync_weights(Utf8Path::new("/c"), PolicyVersion(1)).await.unwrap();
    let turns = watch::Sender::new(0);
    let mut conversations = JoinSet::new();
    for session in 0..CONVERSATIONS {
        conversations.spawn(converse(Arc::clone(&fleet), session, turns.clone()));
    }
    turns.subscribe().wait_for(|turns| *turns >= CONVERSATIONS * TURNS / 3).await.unwrap();
    let killed = servers[0].url();
    servers[0].kill();
    let mut moved = 0;
    for result in conversations.join_all().await {
        let end = result.tokens.len() - 1;
        let expected = expected_rows(&shape(), PolicyVersion(1), &result.tokens, 0..end).unwrap();
        assert!(expected.chunks().flatten().eq(&result.rows), "every row is correct");
        assert_eq!(result.drift, 0, "tokens prefilled again have the same rows");
        let mut places = result.workers.clone();
        places.dedup();
        assert!(places.len() <= 2, "at most one move: {places:?}");
        assert!(places.len() == 1 || places[0] == killed, "conversations of other servers stay");
        moved += places.len() - 1;
    }
    assert!(moved > 0, "the killed server had conversations");
    assert_eq!(fleet.moves(), moved as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_returns_serves_only_the_weights_it_missed() {
    let mut servers: Vec<Server> = (0..2).map(|_| Server::start(None)).collect();
    let fleet = fleet(&servers);
    fleet.sync_weights(Utf8Path::new("/c/3"), PolicyVersion(3)).await.unwrap();
    servers[0].kill();
    fleet.sync_weights(Utf8Path::new("/c/4"), PolicyVersion(4)).await.unwrap();
    let (url, address) = (servers[0].url(), servers[0].address);
    // It starts with weights named `default`, as after any restart.
    servers[0] = Server::start(Some(address));
    let turns = watch::Sender::new(0);
    let mut answered = false;
    for session in 0..200 {
        let result = converse(Arc::clone(&fleet), session, turns.clone()).await;
        let end = result.tokens.len() - 1;
        let expected = expected_rows(&shape(), PolicyVersion(4), &result.tokens, 0..end).unwrap();
        assert!(expected.chunks().flatten().eq(&result.rows), "rows of version 4 alone");
        fleet.close_session(&format!("s{session}"));
        if result.workers.contains(&url) {
            answered = true;
            break;
        }
    }
    assert!(answered, "it came back: {:?}", fleet.status());
}
