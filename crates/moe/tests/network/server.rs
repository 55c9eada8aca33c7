//! Servers under attack, and a client that sends whatever bytes it is told to.

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_http_server::{AllowedFolders, HttpLimits, HttpOptions};
use orchestrate_moe::infer::{EngineOptions, serve_engine};
use orchestrate_moe::train::{TrainerOptions, serve_trainer};
use orchestrate_moe::{ModelConfig, StoredType, Weights, save_checkpoint};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

pub(crate) const TOKEN: &str = "canary-of-the-server";
/// Longest time a client waits for the end of a connection.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// A running server and the folder of its model; dropping it stops the server.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) root: Utf8PathBuf,
    _folder: Option<tempfile::TempDir>,
    _tasks: JoinSet<()>,
    _stop: DropGuard,
}

/// Which server, and a change of its options.
pub(crate) enum Kind {
    Engine(fn(&mut EngineOptions)),
    Trainer,
}

/// Limits that a test does not have to wait for.
pub(crate) fn short_limits() -> HttpLimits {
    HttpLimits {
        max_connections: 8,
        header_time: Duration::from_secs(1),
        body_time: Duration::from_secs(1),
    }
}

/// Options of a server that requires the token.
pub(crate) fn with_token() -> HttpOptions {
    HttpOptions { token: Some(TOKEN.to_owned()), ..HttpOptions::default() }
}

/// Writes a small checkpoint.
pub(crate) fn checkpoint(folder: &Utf8Path, seed: u64) {
    let config: ModelConfig = serde_json::from_value(serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 4096, "rope_theta": 1e4
    }))
    .unwrap();
    save_checkpoint(folder, &Weights::random(config, seed), StoredType::F32, None).unwrap();
}

/// Starts a server and waits until it answers.
pub(crate) async fn serve(kind: Kind, http: HttpOptions) -> TestServer {
    let folder = tempfile::tempdir().unwrap();
    let real = folder.path().canonicalize().unwrap();
    let root = Utf8PathBuf::from_path_buf(real).unwrap();
    checkpoint(&root.join("allowed/policy"), 1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let policy = root.join("allowed/policy");
    match kind {
        Kind::Engine(change) => {
            let mut options = EngineOptions { http, ..EngineOptions::new(policy) };
            change(&mut options);
            let server = serve_engine(options, listener, stop.clone());
            tasks.spawn(async move { server.await.unwrap() });
        }
        Kind::Trainer => {
            let options = TrainerOptions {
                policy,
                checkpoints: root.join("checkpoints"),
                keep: 1,
                batch_roots: AllowedFolders::below([root.join("allowed")]),
                http,
            };
            let server = serve_trainer(options, listener, stop.clone());
            tasks.spawn(async move { server.await.unwrap() });
        }
    }
    let stop = stop.drop_guard();
    let server = TestServer { address, root, _folder: Some(folder), _tasks: tasks, _stop: stop };
    // Connections made before the model is loaded wait in the listener's queue.
    drop(server.connect().await);
    server
}

impl TestServer {
    /// A server of another process.
    pub(crate) fn outside(address: SocketAddr) -> Self {
        let stop = CancellationToken::new().drop_guard();
        let (root, tasks) = (Utf8PathBuf::new(), JoinSet::new());
        Self { address, root, _folder: None, _tasks: tasks, _stop: stop }
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// What the server answers to these bytes until it closes the connection.
    pub(crate) async fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        // A server that has answered may close while the rest is being sent.
        stream.write_all(bytes).await.ok();
        received(&mut stream).await
    }

    /// Status and text of the reply to a request with these headers; `body` is sent as JSON unless
    /// the headers say otherwise.
    pub(crate) async fn request(
        &self,
        line: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> (u16, String) {
        let bearer = format!("Bearer {TOKEN}");
        let host = self.address.to_string();
        let length = body.map_or(0, str::len).to_string();
        let mut all = vec![("host", host.as_str()), ("authorization", &bearer)];
        all.push(("connection", "close"));
        if body.is_some() {
            all.extend([("content-type", "application/json"), ("content-length", &length)]);
        }
        all.retain(|(name, _)| headers.iter().all(|(other, _)| other != name));
        all.extend(headers.iter().filter(|(_, value)| !value.is_empty()));
        let lines: Vec<String> =
            all.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let lines = lines.concat();
        let text = format!("{line} HTTP/1.1\r\n{lines}\r\n{}", body.unwrap_or(""));
        let reply = self.exchange(text.as_bytes()).await;
        (status(&reply), reply)
    }
}

/// Everything that arrives until the connection ends.
pub(crate) async fn received(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset ends the connection as well.
    timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.unwrap().ok();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Status of a reply; 0 if there is none.
pub(crate) fn status(reply: &str) -> u16 {
    reply.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
}
