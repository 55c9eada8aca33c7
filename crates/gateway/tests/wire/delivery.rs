//! Keep-alives, receipts, and clients that go away.

use crate::http::requests;
use crate::scripted::{ScriptedReply, ScriptedSampler, ScriptedTurn};
use crate::server::{Server, quick};
use orchestrate_gateway::SampleError;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Waits until `is_true`.
async fn until(mut is_true: impl FnMut() -> bool) {
    let waiting = async {
        while !is_true() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), waiting).await.unwrap();
}

/// A turn that comes with a permit.
fn slow(permit: &Arc<Notify>, turn: ScriptedTurn) -> ScriptedTurn {
    ScriptedTurn::Wait(Arc::clone(permit), Box::new(turn))
}

#[tokio::test]
async fn a_slow_reply_begins_with_keep_alives() {
    let reply = ScriptedReply { content: "hello", ..ScriptedReply::default() };
    let permit = Arc::new(Notify::new());
    let turn = slow(&permit, ScriptedTurn::Reply(reply));
    let sampler = ScriptedSampler::new(move |_, _| turn.clone());
    let server = Server::start(sampler.clone(), quick()).await;
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        let mut reply = server.post(&format!("/v1/{path}"), &body).await;
        let (first, keep_alive) = match path {
            "messages" => ("event: ping\n", "event: ping\n"),
            "responses" => ("event: response.created\n", "event: response.in_progress\n"),
            _ => (": keep-alive\n\n", ": keep-alive\n\n"),
        };
        let mut text = String::new();
        while text.matches(keep_alive).count() < 3 {
            text.push_str(std::str::from_utf8(&reply.chunk().await.unwrap().unwrap()).unwrap());
        }
        permit.notify_one();
        text.push_str(&reply.text().await.unwrap());
        assert!(text.starts_with(first), "{text}");
        assert!(text.contains("hello"), "{text}");
        let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
        let numbers: Vec<u64> =
            events.filter_map(|event| event["sequence_number"].as_u64()).collect();
        assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{numbers:?}");
        assert_eq!(
            text.matches("event: response.created").count(),
            usize::from(path == "responses")
        );
    }
    assert_eq!(sampler.delivered().await, [true; 3]);
}

#[tokio::test]
async fn a_late_error_is_an_event() {
    let turn = ScriptedTurn::Fail(SampleError::Ended("the time is up".into()));
    let permit = Arc::new(Notify::new());
    let turn = slow(&permit, turn);
    let server = Server::start(ScriptedSampler::new(move |_, _| turn.clone()), quick()).await;
    for (path, mut body) in requests() {
        body["stream"] = json!(true);
        let reply = server.post(&format!("/v1/{path}"), &body).await;
        assert_eq!(reply.status(), 200);
        permit.notify_one();
        let text = reply.text().await.unwrap();
        assert!(text.contains("the time is up"), "{text}");
        let end = match path {
            "messages" => "event: error\n",
            "responses" => "\"invalid_prompt\"",
            _ => "data: {\"error\"",
        };
        assert!(text.contains(end), "{text}");
    }
}

#[tokio::test]
async fn a_reply_that_was_read_to_its_end_is_delivered() {
    let sampler = ScriptedSampler::writing("hello");
    let server = Server::start(sampler.clone(), quick()).await;
    for stream in [false, true] {
        for (path, mut body) in requests() {
            body["stream"] = json!(stream);
            server.post(&format!("/v1/{path}"), &body).await.text().await.unwrap();
            assert_eq!(sampler.delivered().await, [true], "{path}, stream: {stream}");
        }
    }
    let mut body = requests()[0].1.clone();
    body["n"] = json!(3);
    let reply: Value = server.post("/v1/chat/completions", &body).await.json().await.unwrap();
    assert_eq!(reply["choices"].as_array().unwrap().len(), 3);
    assert_eq!(sampler.delivered().await, [true; 3]);
}

impl Server {
    /// Sends a request over a connection of its own, which stays open.
    async fn send(&self, path: &str, body: &Value) -> TcpStream {
        self.send_with(path, body, "").await
    }

    /// The same, with more lines of its head.
    async fn send_with(&self, path: &str, body: &Value, lines: &str) -> TcpStream {
        let body = body.to_string();
        let head = format!(
            "POST {}/v1/{path} HTTP/1.1\r\nhost: a\r\n{lines}content-length: {}\r\n\r\n{body}",
            self.episode.path(),
            body.len()
        );
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_sampling() {
    let sampler = ScriptedSampler::new(|_, _| ScriptedTurn::Hang);
    let server = Server::start(sampler.clone(), quick()).await;
    let mut dropped = 0;
    for stream in [false, true] {
        for (path, mut body) in requests() {
            body["stream"] = json!(stream);
            let connection = server.send(path, &body).await;
            until(|| sampler.requests().len() > dropped).await;
            if stream {
                // The stream has begun.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            drop(connection);
            dropped += 1;
            until(|| sampler.dropped() == dropped).await;
        }
    }
}

#[tokio::test]
async fn a_reply_that_was_read_in_part_is_not_delivered() {
    let content: &'static str = "x".repeat(20 << 20).leak();
    let sampler = ScriptedSampler::writing(content);
    let server = Server::start(sampler.clone(), quick()).await;
    for stream in [false, true] {
        for (path, mut body) in requests() {
            body["stream"] = json!(stream);
            let mut connection = server.send(path, &body).await;
            connection.read_exact(&mut [0; 4000]).await.unwrap();
            drop(connection);
            assert_eq!(sampler.delivered().await, [false], "{path}, stream: {stream}");
        }
    }
}

/// Reads one reply to its end.
async fn read_reply(stream: &mut TcpStream) -> String {
    let mut reply = Vec::new();
    while !reply.ends_with(b"0\r\n\r\n") {
        assert!(stream.read_buf(&mut reply).await.unwrap() > 0, "{reply:?}");
    }
    String::from_utf8(reply).unwrap()
}

#[tokio::test]
async fn a_small_reply_that_was_read_in_part_is_not_delivered() {
    // All of it is in the kernel's buffers when the client closes its end.
    let content: &'static str = "x".repeat(4000).leak();
    let sampler = ScriptedSampler::writing(content);
    let server = Server::start(sampler.clone(), quick()).await;
    for stream in [false, true] {
        for (path, mut body) in requests() {
            body["stream"] = json!(stream);
            let mut connection = server.send(path, &body).await;
            connection.read_exact(&mut [0; 100]).await.unwrap();
            until(|| sampler.sent()).await;
            drop(connection);
            assert_eq!(sampler.delivered().await, [false], "{path}, stream: {stream}");
        }
    }
}

#[tokio::test]
async fn a_connection_that_is_used_again_has_delivered_its_reply() {
    let sampler = ScriptedSampler::writing("hello");
    let server = Server::start(sampler.clone(), quick()).await;
    for (path, body) in requests() {
        let mut connection = server.send(path, &body).await;
        assert!(read_reply(&mut connection).await.contains("hello"));
        connection.write_all(b"GET /models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        assert_eq!(sampler.delivered().await, [true], "{path}");
    }
}

#[tokio::test]
async fn a_client_that_closes_after_the_last_byte_has_the_reply() {
    let sampler = ScriptedSampler::writing("hello");
    let server = Server::start(sampler.clone(), quick()).await;
    for ends in ["connection: close\r\n", ""] {
        for (path, body) in requests() {
            let mut connection = server.send_with(path, &body, ends).await;
            read_reply(&mut connection).await;
            drop(connection);
            assert_eq!(sampler.delivered().await, [true], "{path}, {ends:?}");
        }
    }
}

#[tokio::test]
async fn a_repeated_request_is_marked() {
    let sampler = ScriptedSampler::writing("hello");
    let server = Server::start(sampler.clone(), quick()).await;
    for count in ["0", "1"] {
        let request = server.client().post(server.url("/v1/messages")).json(&requests()[2].1);
        let request = request.header("x-stainless-retry-count", count);
        assert_eq!(request.send().await.unwrap().status(), 200);
    }
    let marks: Vec<bool> = sampler.requests().iter().map(|request| request.repeats).collect();
    assert_eq!(marks, [false, true]);
}
