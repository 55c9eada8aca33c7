//! TLS of the servers, reached by the clients that a run uses.

use crate::server::{Kind, TestServer, serve, with_token};
use camino::Utf8Path;
use orchestrate_engine::{EngineErrorKind, EngineKind};
use orchestrate_handoff::{TlsClientPem, TrainerClient, TrainerErrorKind};
use orchestrate_http_server::{HttpOptions, TlsFiles};
use orchestrate_settings::TlsClientFiles;

/// Two folders with an authority and its certificates each; `None`, reported as a skip, without
/// `openssl`.
fn authorities() -> Option<[tempfile::TempDir; 2]> {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    if folders.iter().all(|folder| orchestrate_e2e::certificates::make(folder.path()).unwrap()) {
        return Some(folders);
    }
    orchestrate_e2e::skip::skip_test("tls", "openssl", "openssl is not installed");
    None
}

fn path(folder: &tempfile::TempDir) -> &Utf8Path {
    Utf8Path::from_path(folder.path()).unwrap()
}

/// Serves with the certificates of a folder, to clients of its authority.
async fn serve_tls(kind: Kind, folder: &Utf8Path) -> TestServer {
    let tls = TlsFiles {
        certificate: folder.join("server-cert.pem"),
        key: folder.join("server-key.pem"),
        client_ca: Some(folder.join("ca.pem")),
    };
    serve(kind, HttpOptions { tls: Some(tls), ..with_token() }).await
}

/// What a client trusts and shows, as its settings name it.
fn client(ca: &Utf8Path, own: Option<&Utf8Path>) -> TlsClientPem {
    let files = TlsClientFiles {
        ca: Some(ca.join("ca.pem")),
        certificate: own.map(|folder| folder.join("cert.pem")),
        key: own.map(|folder| folder.join("key.pem")),
    };
    files.read("engine").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_and_servers_accept_only_each_others_authority() {
    let Some([ours, other]) = authorities() else { return };
    let (ours, other) = (path(&ours), path(&other));
    let engine = serve_tls(Kind::Engine(|_| {}), ours).await;
    let trainer = serve_tls(Kind::Trainer, ours).await;
    let engine_url = format!("https://{}", engine.address);
    let trainer_url = format!("https://{}", trainer.address);
    let token = crate::server::TOKEN;
    let wrong = [client(other, Some(ours)), client(ours, None), client(ours, Some(other))];
    let right = client(ours, Some(ours));

    let found = EngineKind::detect(&engine_url, Some(token), &right).await.unwrap();
    assert_eq!(found, EngineKind::Sglang);
    let info = |pem: &TlsClientPem| {
        let client = TrainerClient::new(&trainer_url, Some(token.to_owned()), pem).unwrap();
        async move { client.info().await }
    };
    assert!(info(&right).await.is_ok());
    for pem in &wrong {
        let error = EngineKind::detect(&engine_url, Some(token), pem).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
    }
    // The trainer's client retries for seconds, so it is asked once.
    let error = info(&wrong[0]).await.unwrap_err();
    assert!(matches!(error.kind, TrainerErrorKind::Unreachable(_)), "{error}");

    let no_token = EngineKind::detect(&engine_url, None, &right).await.unwrap_err();
    assert!(matches!(no_token.kind, EngineErrorKind::Refused { status: 401, .. }), "{no_token}");
    let plain = engine.exchange(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(!plain.contains("200"), "{plain}");
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tls =
        TlsFiles { certificate: "/no/cert.pem".into(), key: "/no/key.pem".into(), client_ca: None };
    let http = HttpOptions { tls: Some(tls), ..HttpOptions::default() };
    let options = orchestrate_moe::infer::EngineOptions {
        http,
        ..orchestrate_moe::infer::EngineOptions::new("/no/such/model")
    };
    let stop = tokio_util::sync::CancellationToken::new();
    let error = orchestrate_moe::infer::serve_engine(options, listener, stop).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("/no/cert.pem"), "{source}");
}
