//! A gateway on a loopback port.

use crate::scripted::ScriptedSampler;
use orchestrate_gateway::{GatewayOptions, Registration, Registry};
use reqwest::{Client, Response};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A gateway with one episode.
pub struct Server {
    pub address: SocketAddr,
    pub registry: Registry,
    pub episode: Registration,
    client: Client,
    _tasks: JoinSet<()>,
}

/// Options with keep-alives after 20 ms.
pub fn quick() -> GatewayOptions {
    GatewayOptions { keep_alive: Duration::from_millis(20), ..GatewayOptions::default() }
}

impl Server {
    pub async fn start(sampler: Arc<ScriptedSampler>, options: GatewayOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let registry = Registry::new(options);
        let episode = registry.register(sampler);
        let router = registry.router();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { address, registry, episode, client: Client::new(), _tasks: tasks }
    }

    /// The URL of a path of the episode.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{}{path}", self.address, self.episode.path())
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub fn client(&self) -> &Client {
        &self.client
    }
}
