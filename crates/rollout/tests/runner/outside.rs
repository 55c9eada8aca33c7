//! External workers: who caused the end of an episode, by how its last request was answered.

use crate::world::*;
use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_gateway::{GatewayOptions, Offers, Registry};
use orchestrate_rollout::{Episodes as _, Outside, RolloutSection, Scaffold, TurnJournals};
use orchestrate_testkit::FakeReply;
use orchestrate_types::{Limit, Outcome, Stage};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What a worker does: bodies of Chat Completions, of which each is the whole request, and the body of its
/// result.
struct Work {
    requests: Vec<Value>,
    result: Value,
}

/// Runs an episode whose worker does `work`, with a policy that answers every request by `reply`. Returns
/// the outcome and the statuses of the replies.
async fn outcome(
    config: RolloutSection,
    reply: impl Fn() -> FakeReply + Send + Sync + 'static,
    work: Work,
) -> (Outcome, Vec<u16>) {
    let offers = Offers::new(Registry::new(GatewayOptions::default()), Duration::from_mins(1));
    let config = RolloutSection { scaffold: Some(Scaffold::Outside), ..config };
    let mut world = world_in(512, &config, move |_| reply());
    let folder = tempfile::tempdir().unwrap();
    let turns = Utf8Path::from_path(folder.path()).unwrap();
    let journals = TurnJournals::open(turns, &[]).unwrap();
    world.runner.outside = Some(Outside::new(offers.clone(), Duration::from_mins(1), journals));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let worker = async {
        // Fails if another test of this program has installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::new();
        let post = |path: String, body: Value| {
            let url = format!("{address}{path}");
            let request = http.post(url).header("content-type", "application/json");
            request.body(body.to_string()).send()
        };
        let take = json!({"worker": "w", "take_id": "1", "wait_s": 60});
        let taken = post("/v1/episodes/take".to_owned(), take).await.unwrap();
        let taken: Value = serde_json::from_str(&taken.text().await.unwrap()).unwrap();
        let text = |name: &str| taken[name].as_str().unwrap().to_owned();
        let mut statuses = Vec::new();
        for body in work.requests {
            let path = format!("{}/chat/completions", text("openai_path"));
            let reply = post(path, body).await.unwrap();
            statuses.push(reply.status().as_u16());
            drop(reply.text().await);
        }
        let finish = format!("/v1/episodes/{}/finish", text("lease"));
        drop(post(finish, work.result).await);
        statuses
    };
    let episode = async {
        let report = world.runner.run(request(), &stop).await;
        world.runner.recorded(report.attempt, &report.outcome);
        report.outcome
    };
    tokio::select! {
        ended = async { tokio::join!(episode, worker) } => ended,
        served = async { axum::serve(listener, offers.router()).await } => panic!("{served:?}"),
    }
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
