//! External workers: who caused the end of an episode, by how its last request was answered.

use crate::world::*;
use axum::http::Extensions;
use axum::response::IntoResponse as _;
use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_gateway::{GatewayOptions, Offers, Registry, Unconfirmed};
use orchestrate_http_server::{ConnectionObserver, HttpOptions, HttpServer, Routes};
use orchestrate_rollout::{
    EpisodeKind, EpisodeRequest, Episodes as _, ExternalWorkers, RolloutSection, Scaffold,
    TurnJournals,
};
use orchestrate_testkit::{FakeReply, FakeRequest};
use orchestrate_types::{Limit, Outcome, Stage};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// What a worker does: bodies of Chat Completions, of which each is the whole request, and the body of its
/// result.
struct Work {
    requests: Vec<Value>,
    result: Value,
}

/// A worker that has taken an episode.
struct Worker {
    address: SocketAddr,
    http: reqwest::Client,
    taken: Value,
}

impl Worker {
    async fn take(address: SocketAddr) -> Self {
        // Fails if another test of this program has installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut worker = Self { address, http: reqwest::Client::new(), taken: Value::Null };
        let take = json!({"worker": "w", "take_id": "1", "wait_s": 60});
        let taken = worker.post("/v1/episodes/take", &take).await.text().await.unwrap();
        worker.taken = serde_json::from_str(&taken).unwrap();
        worker
    }

    fn taken(&self, name: &str) -> &str {
        self.taken[name].as_str().unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        let url = format!("http://{}{path}", self.address);
        let request = self.http.post(url).header("content-type", "application/json");
        request.body(body.to_string()).send().await.unwrap()
    }

    async fn finish(&self, result: &Value) {
        self.post(&format!("/v1/episodes/{}/finish", self.taken("lease")), result).await;
    }
}

/// The receipts of the replies that one connection has sent.
#[derive(Default)]
struct Receipts(Unconfirmed);

impl ConnectionObserver for Receipts {
    fn requested(&self, extensions: &mut Extensions) {
        self.0.confirm();
        extensions.insert(self.0.clone());
    }

    fn all_read(&self) {
        self.0.confirm();
    }
}

/// Runs an episode whose worker does `work`, with a policy that answers by `reply`, from the number of the
/// request in its session. Returns the outcome, and what the worker returned.
async fn episode<T>(
    config: RolloutSection,
    reply: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
    work: impl AsyncFnOnce(Worker) -> T,
) -> (Outcome, T) {
    let (outcome, done, _) = attempt(request(), config, reply, work).await;
    (outcome, done)
}

/// Like [`episode`], with this request for an attempt. Also returns what the engine was asked.
async fn attempt<T>(
    request: EpisodeRequest,
    config: RolloutSection,
    reply: impl Fn(usize) -> FakeReply + Send + Sync + 'static,
    work: impl AsyncFnOnce(Worker) -> T,
) -> (Outcome, T, Vec<FakeRequest>) {
    let offers = Offers::new(Registry::new(GatewayOptions::default()), Duration::from_mins(1));
    let config = RolloutSection { scaffold: Some(Scaffold::External), ..config };
    let mut world = world_in(512, &config, reply);
    let folder = tempfile::tempdir().unwrap();
    let turns = Utf8Path::from_path(folder.path()).unwrap();
    let journals = TurnJournals::open(turns, &[]).unwrap();
    let workers = ExternalWorkers::new(offers.clone(), Duration::from_mins(1), journals);
    world.runner.kind = EpisodeKind::External(workers);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = HttpServer::new(listener, HttpOptions::default()).unwrap();
    let server = server.observed_by(|| Arc::new(Receipts::default()));
    let routes = Routes {
        open: &[],
        own: "/e/",
        max_body_bytes: 1 << 20,
        reply: |denial| (denial.status(), denial.to_string()).into_response(),
    };
    let stop = CancellationToken::new();
    let worker = async { work(Worker::take(address).await).await };
    let episode = async {
        let report = world.runner.run(request, &stop).await;
        world.runner.recorded(report.attempt, &report.outcome);
        report.outcome
    };
    let (outcome, done) = tokio::select! {
        ended = async { tokio::join!(episode, worker) } => ended,
        () = server.serve(offers.router(), routes, CancellationToken::new()) => panic!("it stopped"),
    };
    (outcome, done, world.engine.requests())
}

/// The outcome of an episode whose worker does `work`, and the statuses of the replies.
async fn outcome(
    config: RolloutSection,
    reply: impl Fn() -> FakeReply + Send + Sync + 'static,
    work: Work,
) -> (Outcome, Vec<u16>) {
    let work = async |worker: Worker| {
        let mut statuses = Vec::new();
        for body in work.requests {
            let path = format!("{}/chat/completions", worker.taken("openai_path"));
            let reply = worker.post(&path, &body).await;
            statuses.push(reply.status().as_u16());
            drop(reply.text().await);
        }
        worker.finish(&work.result).await;
        statuses
    };
    episode(config, move |_| reply(), work).await
}

fn user(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

fn messages(more: &Value) -> Value {
    let mut messages = vec![json!({"role": "user", "content": "a"})];
    messages.extend(more.as_array().unwrap().iter().cloned());
    json!({"messages": messages})
}

/// Requests that the gateway refuses for their form.
fn refused() -> Vec<Value> {
    let object = json!({"name": "bash", "arguments": {"command": "ls"}});
    vec![
        messages(&json!([{"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": object}]}])),
        messages(&json!([{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}])),
        messages(&json!([{"role": "function", "name": "bash", "content": "ok"}])),
        messages(&json!([{"role": "user", "content": 3}])),
        json!({"messages": []}),
        json!("no object"),
    ]
}

fn reply() -> FakeReply {
    stop(turn_ids(&[bash("ls")]))
}

fn reward(reward: f64) -> Value {
    json!({"reward": reward})
}

#[tokio::test]
async fn a_refused_request_breaks_the_attempt_whatever_the_worker_returns() {
    let failure = |kind: &str| json!({"failure": {"kind": kind, "message": "m"}});
    let results = [reward(0.0), reward(1.0), failure("agent"), failure("timeout")];
    for (at, wrong) in refused().into_iter().enumerate() {
        let result = results[at % results.len()].clone();
        let work = Work { requests: vec![user("a"), wrong.clone()], result };
        let (outcome, statuses) = outcome(RolloutSection::default(), reply, work).await;
        assert_eq!(statuses, [200, 400], "{wrong}");
        let Outcome::Broken { stage: Stage::Exec, error } = outcome else {
            panic!("{wrong}: {outcome:?}")
        };
        assert!(error.contains("last request was refused"), "{error}");
    }
}

#[tokio::test]
async fn a_worker_that_sends_a_better_request_keeps_its_reward() {
    let requests = vec![user("a"), refused().remove(1), user("b")];
    let work = Work { requests, result: reward(0.25) };
    let (outcome, statuses) = outcome(RolloutSection::default(), reply, work).await;
    assert_eq!(statuses, [200, 400, 200]);
    assert_eq!(outcome, Outcome::Scored { reward: 0.25 });
}

#[tokio::test]
async fn a_reported_failure_of_the_agent_is_no_damage_of_a_sandbox() {
    for (kind, limit) in [("agent", Limit::AgentFailure), ("timeout", Limit::EpisodeTime)] {
        let result = json!({"failure": {"kind": kind, "message": "m"}});
        let work = Work { requests: vec![user("a")], result };
        let (outcome, _) = outcome(RolloutSection::default(), reply, work).await;
        assert_eq!(outcome, Outcome::Truncated { limit, reward: 0.0 });
    }
}

#[tokio::test]
async fn a_full_context_truncates_unless_the_worker_compacts_its_history() {
    let long = user(&"word ".repeat(600));
    for (requests, expected) in [
        (
            vec![user("a"), long.clone()],
            Outcome::Truncated { limit: Limit::SequenceTokens, reward: 0.25 },
        ),
        (vec![user("a"), long.clone(), user("b")], Outcome::Scored { reward: 0.25 }),
    ] {
        let work = Work { requests, result: reward(0.25) };
        let (outcome, statuses) = outcome(RolloutSection::default(), reply, work).await;
        assert_eq!(statuses[..2], [200, 400]);
        assert_eq!(outcome, expected);
    }
    // The policy has not been asked, so it cannot be the cause.
    let work = Work { requests: vec![long], result: reward(0.0) };
    let (outcome, _) = outcome(RolloutSection::default(), reply, work).await;
    let Outcome::Broken { stage: Stage::Setup, error } = outcome else { panic!("{outcome:?}") };
    assert!(error.contains("rollout.max_sequence_tokens"), "{error}");
}

#[tokio::test]
async fn a_last_reply_that_a_limit_of_the_run_cut_off_truncates() {
    let cut = |tokens| FakeReply::Tokens { ids: vec![7; tokens], finish: Finish::Length };
    let config = RolloutSection { max_response_tokens: Some(4), ..RolloutSection::default() };
    let own = {
        let mut request = user("a");
        request["max_tokens"] = json!(3);
        request
    };
    for (request, tokens, expected) in [
        (user("a"), 4, Outcome::Truncated { limit: Limit::ResponseTokens, reward: 0.5 }),
        (own, 3, Outcome::Scored { reward: 0.5 }),
    ] {
        let work = Work { requests: vec![request], result: reward(0.5) };
        let (outcome, statuses) = outcome(config.clone(), move || cut(tokens), work).await;
        assert_eq!((statuses, outcome), (vec![200], expected));
    }
}

/// A connection of an agent.
struct Connection(TcpStream);

impl Connection {
    async fn send(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.0.write_all((head + &body).as_bytes()).await.unwrap();
    }

    /// Reads a reply to its end.
    async fn read(&mut self) -> String {
        let mut reply = Vec::new();
        while !reply.ends_with(b"0\r\n\r\n") {
            assert!(self.0.read_buf(&mut reply).await.unwrap() > 0, "{reply:?}");
        }
        String::from_utf8(reply).unwrap()
    }
}

/// The number of the policy's reply that a text has.
fn number(reply: &str) -> usize {
    let (_, after) = reply.split_once("sample-").unwrap_or_else(|| panic!("{reply}"));
    after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_reply_that_was_not_read_over_the_network_is_sent_again() {
    let work = async |worker: Worker| {
        let openai = worker.taken("openai_path").to_owned();
        let anthropic = openai.strip_suffix("/v1").unwrap().to_owned();
        let connect = async || Connection(TcpStream::connect(worker.address).await.unwrap());
        for stream in [false, true] {
            for (path, field) in [
                (format!("{openai}/chat/completions"), "messages"),
                (format!("{openai}/responses"), "input"),
                (format!("{anthropic}/v1/messages"), "messages"),
            ] {
                let content = format!("{path}, {stream}");
                let body = json!({"stream": stream, "max_tokens": 50, field: [
                    {"role": "user", "content": content}]});
                // The client closes in the middle of its reply.
                let mut client = connect().await;
                client.send(&path, &body).await;
                client.0.read_exact(&mut [0; 20]).await.unwrap();
                drop(client);
                // It has read the reply that it asks for again, and keeps its connection.
                let mut client = connect().await;
                client.send(&path, &body).await;
                let first = number(&client.read().await);
                client.send(&path, &body).await;
                let second = number(&client.read().await);
                // Two more at the same time.
                let mut clients = [connect().await, connect().await];
                for other in &mut clients {
                    other.send(&path, &body).await;
                }
                let [third, fourth] = &mut clients;
                let mut more = [number(&third.read().await), number(&fourth.read().await)];
                more.sort_unstable();
                let expected = [1, 2, 3].map(|later| first + later);
                assert_eq!([second, more[0], more[1]], expected, "{content}");
            }
        }
        worker.finish(&reward(1.0)).await;
    };
    // The engine numbers the calls of a session, and each sample of a first request has its own.
    let sampled = AtomicUsize::new(0);
    let reply = move |_| {
        let number = sampled.fetch_add(1, Ordering::Relaxed);
        stop(turn_ids(&[bash(&format!("sample-{number}"))]))
    };
    let config = RolloutSection { max_turns: Some(100), ..RolloutSection::default() };
    let (outcome, ()) = episode(config, reply, work).await;
    // Six requests, with four replies each.
    assert_eq!(outcome, Outcome::Scored { reward: 1.0 });
}

#[tokio::test]
async fn tools_that_prompts_do_not_show_are_listed() {
    let work = async |worker: Worker| {
        let path = format!("{}/chat/completions", worker.taken("openai_path"));
        let tool = json!({"type": "function", "function": {
            "name": "bash", "parameters": {"type": "object", "properties": {}}}});
        let messages = json!([{"role": "user", "content": "a"}]);
        let mut listed = Vec::new();
        for tools in [json!([]), json!([tool])] {
            let reply = worker.post(&path, &json!({"tools": tools, "messages": messages})).await;
            assert_eq!(reply.status(), 200);
            let fields = reply.headers().get("x-overridden-fields");
            listed.push(fields.map_or("", |fields| fields.to_str().unwrap()).to_owned());
        }
        worker.finish(&reward(1.0)).await;
        listed
    };
    let reply = |_| stop(turn_ids(&[bash("ls")]));
    let (_, listed, _) = attempt(request(), RolloutSection::default(), reply, work).await;
    assert_eq!(listed, ["", "tools"]);
}

#[tokio::test]
async fn agents_decide_how_their_replies_are_sampled_in_evaluations_alone() {
    let work = async |worker: Worker| {
        let openai = worker.taken("openai_path");
        let tokens = openai.strip_suffix("/v1").unwrap().to_owned() + "/inference/v1/generate";
        let mut overridden = Vec::new();
        for (path, body) in [
            (format!("{openai}/chat/completions"), user("a")),
            (
                format!("{openai}/chat/completions"),
                json!({"temperature": 0.5, "top_p": 0.9, "seed": 3, "messages": [
                    {"role": "user", "content": "a"}]}),
            ),
            (tokens, json!({"token_ids": [1, 2], "sampling_params": {"temperature": 0.25}})),
        ] {
            let reply = worker.post(&path, &body).await;
            assert_eq!(reply.status(), 200, "{path}");
            let listed = reply.headers().get("x-overridden-fields");
            overridden.push(listed.map_or("", |listed| listed.to_str().unwrap()).to_owned());
        }
        worker.finish(&reward(1.0)).await;
        overridden
    };
    for (id, sampled, overridden) in [
        (
            "t000001.02-a01",
            [(1.0, 1.0); 3],
            ["", "seed, temperature, top_p", "sampling_params.temperature"],
        ),
        ("v00001-00002.00-a01", [(1.0, 1.0), (0.5, 0.9), (0.25, 1.0)], ["", "seed", ""]),
    ] {
        let request = EpisodeRequest { attempt: id.parse().unwrap(), ..request() };
        let reply = |_| stop(turn_ids(&[bash("ls")]));
        let (_, listed, asked) = attempt(request, RolloutSection::default(), reply, work).await;
        let found = asked.iter().map(|asked| (asked.sampling.temperature, asked.sampling.top_p));
        assert_eq!(found.collect::<Vec<_>>(), sampled, "{id}");
        assert_eq!(listed, overridden, "{id}");
    }
}

#[tokio::test]
async fn a_reply_is_continued_by_its_signature_and_by_its_id() {
    let work = async |worker: Worker| {
        let openai = worker.taken("openai_path").to_owned();
        let anthropic = openai.strip_suffix("/v1").unwrap().to_owned();
        let ask = async |path: &str, body: Value| {
            let reply = worker.post(path, &body).await;
            assert_eq!(reply.status(), 200);
            serde_json::from_str::<Value>(&reply.text().await.unwrap()).unwrap()
        };
        let user = |text: &str| json!({"role": "user", "content": text});
        let path = format!("{anthropic}/v1/messages");
        let request = |messages: &[Value]| json!({"max_tokens": 50, "messages": messages});
        // Two equal replies to one request.
        ask(&path, request(&[user("a")])).await;
        let second = ask(&path, request(&[user("a")])).await;
        assert_eq!(second["content"][0]["thinking"], "hm");
        let again = json!({"role": "assistant", "content": second["content"]});
        ask(&path, request(&[user("a"), again, user("b")])).await;

        let path = format!("{openai}/responses");
        ask(&path, json!({"input": "c"})).await;
        let second = ask(&path, json!({"input": "c"})).await;
        ask(&path, json!({"previous_response_id": second["id"], "input": "d"})).await;
        worker.finish(&reward(1.0)).await;
    };
    let reply = |_| stop(chat().assistant("<think>\nhm\n</think>\n\nDone.", &[]).unwrap());
    let (outcome, (), asked) = attempt(request(), RolloutSection::default(), reply, work).await;
    assert_eq!(outcome, Outcome::Scored { reward: 1.0 });
    let sessions: Vec<&str> = asked.iter().map(|asked| asked.session.as_str()).collect();
    assert_eq!(sessions.len(), 6);
    for dialect in sessions.chunks(3) {
        let [first, second, third] = dialect else { panic!("{sessions:?}") };
        assert_ne!(first, second);
        assert_eq!(second, third);
    }
}
