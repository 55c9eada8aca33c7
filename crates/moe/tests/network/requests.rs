//! Requests of strangers: wrong secret, wrong host, another site, slow, oversized, too many.

use crate::server::{
    Kind, PATIENCE, TOKEN, TestServer, received, serve, short_limits, status, with_token,
};
use orchestrate_http_server::{HttpLimits, HttpOptions, HttpSetupError};
use orchestrate_moe::infer::{EngineOptions, EngineServeError, serve_engine};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const GENERATE: &str = r#"{"input_ids":[1,2],"sampling_params":{"max_new_tokens":1}}"#;
const LOGPROBS: &str = r#"{"manifest":"/m","replay":true,"temperature":1.0}"#;

/// One attack: its name, the headers that replace the usual ones, and the status that must follow; 0
/// is that of an allowed request.
type Attack = (&'static str, &'static [(&'static str, &'static str)], u16);

const ATTACKS: [Attack; 13] = [
    ("nothing wrong", &[], 0),
    ("no token", &[("authorization", "")], 401),
    ("a wrong token", &[("authorization", "Bearer canary-of-the-serveR")], 401),
    ("a token without its scheme", &[("authorization", TOKEN)], 401),
    ("DNS rebinding", &[("host", "evil.example")], 403),
    ("an address of another network", &[("host", "10.0.0.1:80")], 403),
    ("no host", &[("host", "")], 400),
    ("another site", &[("origin", "http://evil.example")], 403),
    ("a sandboxed page", &[("origin", "null")], 403),
    ("an image of another site", &[("sec-fetch-site", "cross-site")], 403),
    ("a form's body", &[("content-type", "text/plain")], 415),
    ("JSON within a form's type", &[("content-type", "text/plain; application/json")], 415),
    ("no type", &[("content-type", "")], 415),
];

async fn attack(server: &TestServer, post: (&str, &str), allowed: u16) {
    for (name, headers, expected) in ATTACKS {
        let expected = if expected == 0 { allowed } else { expected };
        let (status, text) = server.request(post.0, headers, Some(post.1)).await;
        assert_eq!(status, expected, "{name}: {text}");
        assert!(!text.contains(TOKEN), "{name}: {text}");
    }
    let page = [("host", "localhost:1"), ("origin", "http://localhost:1")];
    assert_eq!(server.request(post.0, &page, Some(post.1)).await.0, allowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_denies_requests_of_strangers() {
    let server = serve(Kind::Engine(|o| o.max_body_bytes = 100_000), with_token()).await;
    attack(&server, ("POST /generate", GENERATE), 200).await;
    // Requests without a body change things, too.
    for line in ["POST /pause_generation", "GET /flush_cache", "POST /abort_request"] {
        assert_eq!(server.request(line, &[("origin", "http://a.example")], None).await.0, 403);
        assert_eq!(server.request(line, &[("authorization", "")], None).await.0, 401);
    }
    for line in ["GET /health", "GET /ready", "GET /ping"] {
        assert_eq!(server.request(line, &[("authorization", "")], None).await.0, 200, "{line}");
    }
    assert_eq!(server.request("GET /health_generate", &[("authorization", "")], None).await.0, 401);
    assert_eq!(server.request("OPTIONS /generate", &[("authorization", "")], None).await.0, 401);
    let large = " ".repeat(100_001);
    assert_eq!(server.request("POST /generate", &[], Some(&large)).await.0, 413);
    let endless = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "a".repeat(100_000));
    assert!(matches!(status(&server.exchange(endless.as_bytes()).await), 0 | 414 | 431));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trainer_denies_requests_of_strangers() {
    let server = serve(Kind::Trainer, with_token()).await;
    // The path of the batch is not below an allowed folder.
    attack(&server, ("POST /v1/logprobs", LOGPROBS), 400).await;
    assert_eq!(server.request("GET /v1/info", &[], None).await.0, 200);
    for line in ["GET /v1/info", "POST /v1/checkpoints", "GET /nothing"] {
        assert_eq!(server.request(line, &[("authorization", "")], None).await.0, 401);
    }
    let large = " ".repeat((1 << 20) + 1);
    assert_eq!(server.request("POST /v1/logprobs", &[], Some(&large)).await.0, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_are_cut_off() {
    let kinds: [fn() -> Kind; 2] = [|| Kind::Engine(|_| {}), || Kind::Trainer];
    for kind in kinds {
        let options = |limits| HttpOptions { limits, ..HttpOptions::default() };
        let hour = Duration::from_hours(1);
        let long = HttpLimits { header_time: hour, body_time: hour, ..short_limits() };
        let server = serve(kind(), options(short_limits())).await;
        let patient = serve(kind(), options(long)).await;
        // It is the limit that cuts a client off: with a longer one, the connection stays open.
        let exchange = async |bytes: &[u8]| {
            tokio::select! {
                reply = server.exchange(bytes) => reply,
                reply = patient.exchange(bytes) => panic!("cut off long before its time: {reply}"),
            }
        };
        let unfinished = b"POST /v1/steps HTTP/1.1\r\nhost: localhost\r\nx-slow: ";
        let reply = exchange(unfinished).await;
        assert!(matches!(status(&reply), 0 | 408), "{reply}");
        assert_eq!(exchange(b"").await, "", "a connection without a request");
        let whole = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\nGET /no";
        assert_eq!(status(&exchange(whole).await), 404, "the second request is slow");
        let body =
            b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                     content-length: 100\r\n\r\n{";
        assert_eq!(status(&exchange(body).await), 408);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_the_limit_get_503_and_free_places_are_used_again() {
    // None is cut off while the limit is reached.
    let limits = HttpLimits { header_time: Duration::from_hours(1), ..short_limits() };
    let http = HttpOptions { limits, ..HttpOptions::default() };
    let server = serve(Kind::Trainer, http).await;
    server.request("GET /v1/info", &[], None).await;
    let mut held = Vec::new();
    for _ in 0..short_limits().max_connections {
        let mut stream = server.connect().await;
        stream.write_all(b"GET /v1/info HTTP/1.1\r\n").await.unwrap();
        held.push(stream);
    }
    let mut one_more = server.connect().await;
    assert_eq!(status(&received(&mut one_more).await), 503);
    drop(held);
    let freed = async {
        while server.request("GET /v1/info", &[], None).await.0 == 503 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.unwrap();
    assert_eq!(server.request("GET /v1/info", &[], None).await.0, 200);
}

#[tokio::test]
async fn an_open_address_without_a_secret_is_refused_before_the_model_is_read() {
    let options = || EngineOptions::new("/no/such/model");
    let stop = CancellationToken::new();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let error = serve_engine(options(), listener, stop.clone()).await.unwrap_err();
    assert!(matches!(error, EngineServeError::Http(HttpSetupError::Open { .. })), "{error}");
    for http in [with_token(), HttpOptions { insecure: true, ..HttpOptions::default() }] {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let options = EngineOptions { http, ..options() };
        let error = serve_engine(options, listener, stop.clone()).await.unwrap_err();
        assert!(matches!(error, EngineServeError::Model(_)), "{error}");
    }
}
