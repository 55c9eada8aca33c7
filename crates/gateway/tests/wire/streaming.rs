//! Text that is sent while it is sampled.

use crate::http::requests;
use crate::scripted::{ScriptedReply, ScriptedSampler, ScriptedTurn};
use crate::server::{Server, quick};
use orchestrate_gateway::{GatewayOptions, SampleError};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Keep-alives that no test lives long enough to see.
fn silent() -> GatewayOptions {
    GatewayOptions { keep_alive: Duration::from_hours(1), ..quick() }
}

fn reply(reasoning: Option<&'static str>, content: &'static str) -> ScriptedTurn {
    ScriptedTurn::Reply(ScriptedReply { reasoning, content, ..ScriptedReply::default() })
}

fn show(reasoning: &'static str, content: &'static str, then: ScriptedTurn) -> ScriptedTurn {
    ScriptedTurn::Show(reasoning, content, Box::new(then))
}

fn wait(permit: &Arc<Notify>, then: ScriptedTurn) -> ScriptedTurn {
    ScriptedTurn::Wait(Arc::clone(permit), Box::new(then))
}

async fn server(turn: &ScriptedTurn) -> (Server, Arc<ScriptedSampler>) {
    let turn = turn.clone();
    let sampler = ScriptedSampler::new(move |_, _| turn.clone());
    (Server::start(sampler.clone(), silent()).await, sampler)
}

/// A streamed reply that is being read.
struct Reading {
    response: reqwest::Response,
    bytes: Vec<u8>,
}

impl Reading {
    async fn begin(server: &Server, path: &str, body: &Value) -> Self {
        let response = server.post(&format!("/v1/{path}"), body).await;
        assert_eq!(response.status(), 200);
        Self { response, bytes: Vec::new() }
    }

    /// The thinking and the text in the events so far.
    fn parts(&self) -> (String, String) {
        let text = String::from_utf8_lossy(&self.bytes);
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let (mut reasoning, mut content) = (String::new(), String::new());
        for event in data.filter_map(|data| serde_json::from_str::<Value>(data).ok()) {
            let delta = &event["delta"];
            let of_choice = &event["choices"][0]["delta"];
            let kind = event["type"].as_str().unwrap_or_default();
            let (thinks, text) = match kind {
                "response.output_text.delta" => (None, delta.as_str()),
                "response.reasoning_summary_text.delta" => (delta.as_str(), None),
                "content_block_delta" => (delta["thinking"].as_str(), delta["text"].as_str()),
                _ => (of_choice["reasoning_content"].as_str(), of_choice["content"].as_str()),
            };
            reasoning.push_str(thinks.unwrap_or_default());
            content.push_str(text.unwrap_or_default());
        }
        (reasoning, content)
    }

    /// Reads until these parts have arrived.
    async fn until(&mut self, reasoning: &str, content: &str) {
        while self.parts() != (reasoning.to_owned(), content.to_owned()) {
            let chunk = self.response.chunk().await.unwrap().unwrap();
            self.bytes.extend(chunk);
        }
    }

    async fn end(mut self) -> String {
        while let Some(chunk) = self.response.chunk().await.unwrap() {
            self.bytes.extend(chunk);
        }
        String::from_utf8(self.bytes).unwrap()
    }
}

#[tokio::test]
async fn text_arrives_while_the_reply_is_sampled() {
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        let permits: [Arc<Notify>; 3] = std::array::from_fn(|_| Arc::default());
        let mut turn = reply(Some("Hm, yes."), "Hello, world.");
        turn = wait(&permits[2], turn);
        turn = show("Hm, yes.", "Hello", turn);
        turn = wait(&permits[1], turn);
        turn = show("Hm, yes", "", turn);
        turn = wait(&permits[0], turn);
        turn = show("Hm", "", turn);
        let (server, sampler) = server(&turn).await;
        let mut reading = Reading::begin(&server, path, &body).await;
        for (parts, permit) in
            [("Hm", ""), ("Hm, yes", ""), ("Hm, yes.", "Hello")].iter().zip(permits)
        {
            reading.until(parts.0, parts.1).await;
            permit.notify_one();
        }
        reading.until("Hm, yes.", "Hello, world.").await;
        let text = reading.end().await;
        assert!(!text.contains("again"), "{text}");
        assert_eq!(sampler.delivered().await, [true], "{path}");
    }
}

#[tokio::test]
async fn a_reply_that_contradicts_its_text_is_an_error_and_is_not_delivered() {
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        for (shown, replied) in [
            (("", "Hello"), (None, "Other")),
            (("", "Hello"), (Some("Hm"), "Hello")),
            (("Hm", "Hello"), (Some("Hm, yes"), "Hello")),
            (("Hm", ""), (None, "Hello")),
        ] {
            let permit = Arc::<Notify>::default();
            let turn = wait(&permit, reply(replied.0, replied.1));
            let (server, sampler) = server(&show(shown.0, shown.1, turn)).await;
            let mut reading = Reading::begin(&server, path, &body).await;
            reading.until(shown.0, shown.1).await;
            permit.notify_one();
            let text = reading.end().await;
            assert!(text.contains("send the request again"), "{text}");
            assert_eq!(sampler.delivered().await, [false], "{path}");
        }
    }
}

#[tokio::test]
async fn text_of_a_failed_call_that_is_sampled_again_is_sent_once() {
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        let permits: [Arc<Notify>; 3] = std::array::from_fn(|_| Arc::default());
        let mut turn = wait(&permits[2], reply(None, "Hello, world."));
        // It is behind, differs, and then continues what was sent.
        turn = show("", "Hello, w", turn);
        turn = wait(&permits[1], show("", "Other", turn));
        turn = wait(&permits[0], show("", "He", turn));
        let (server, _) = server(&show("", "Hello", turn)).await;
        let mut reading = Reading::begin(&server, path, &body).await;
        reading.until("", "Hello").await;
        permits[0].notify_one();
        permits[1].notify_one();
        reading.until("", "Hello, w").await;
        permits[2].notify_one();
        reading.until("", "Hello, world.").await;
        assert!(!reading.end().await.contains("again"));
    }
}

#[tokio::test]
async fn an_error_after_text_is_an_event() {
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        let permit = Arc::<Notify>::default();
        let fail = ScriptedTurn::Fail(SampleError::Ended("the time is up".into()));
        let (server, _) = server(&show("", "Hello", wait(&permit, fail))).await;
        let mut reading = Reading::begin(&server, path, &body).await;
        reading.until("", "Hello").await;
        permit.notify_one();
        assert!(reading.end().await.contains("the time is up"));
    }
}

#[tokio::test]
async fn only_a_single_reply_without_its_tokens_is_shown_early() {
    let (server, _) = server(&show("", "early", reply(None, "late"))).await;
    let [(path, body), ..] = requests();
    for field in [("n", json!(2)), ("logprobs", json!(true)), ("stream", json!(false))] {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body[field.0] = field.1;
        let text = server.post(&format!("/v1/{path}"), &body).await.text().await.unwrap();
        assert!(text.contains("late") && !text.contains("error"), "{text}");
    }
}
