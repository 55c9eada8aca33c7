//! A gateway on a loopback port.

use crate::scripted::ScriptedSampler;
use orchestrate_gateway::{GatewayOptions, Registration, Registry, serve_stream};
use reqwest::{Client, Response};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A gateway with one episode.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) registry: Registry,
    pub(crate) episode: Registration,
    client: Client,
    _tasks: JoinSet<()>,
}

/// Options with keep-alives after 20 ms.
pub(crate) fn quick() -> GatewayOptions {
    GatewayOptions { keep_alive: Duration::from_millis(20), ..GatewayOptions::default() }
}

impl Server {
    pub(crate) async fn start(sampler: Arc<ScriptedSampler>, options: GatewayOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let registry = Registry::new(options);
        let episode = registry.register(sampler);
        let router = registry.router();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(serve_stream(stream, router.clone()));
            }
        });
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Each reply has a connection of its own, which the client closes once it has read the reply.
        let client = Client::builder().pool_max_idle_per_host(0).build().unwrap();
        Self { address, registry, episode, client, _tasks: tasks }
    }

    /// The URL of a path of the episode.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{}{path}", self.address, self.episode.path())
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}
