//! The sinks of a run: settings, files, and the server that Prometheus scrapes.

use crate::config::ConfigError;
use crate::output;
use crate::wiring::Servers;
use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use camino::Utf8Path;
use orchestrate_coordinator::{Event, Reporter};
use orchestrate_http_server::{Denial, HttpLimits, HttpOptions, HttpServer, Routes};
use orchestrate_sinks::{
    CsvFile, Exposition, METRICS_CONTENT_TYPE, ParquetFile, Sink, Sinks, SinksSettings,
    TensorBoard, Warn,
};
use orchestrate_store::Store;
use orchestrate_types::ConfigProblem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// Maximum number of connections to the server for Prometheus.
const SCRAPERS: usize = 64;
/// Maximum time between two requests of a connection: Prometheus keeps its connection between scrapes.
const IDLE: Duration = Duration::from_mins(5);

/// The sinks of one run.
#[derive(Debug)]
pub(crate) struct RunSinks {
    sinks: Sinks,
    exposition: Option<Exposition>,
    time: Duration,
}

impl RunSinks {
    /// Starts the sinks that the settings name. An address that is in use is a warning.
    ///
    /// # Errors
    /// If the token for `/metrics` is missing, the journal cannot be read, or threads cannot be
    /// started.
    pub(crate) async fn start(
        settings: &SinksSettings,
        folder: &Utf8Path,
        store: &Store,
        servers: &mut Servers,
        reporter: &Arc<dyn Reporter>,
    ) -> anyhow::Result<Self> {
        let mut chosen: Vec<Box<dyn Sink>> = Vec::new();
        if settings.tensorboard {
            chosen.push(Box::new(TensorBoard::new(folder.join("tensorboard"))));
        }
        if settings.csv {
            chosen.push(Box::new(CsvFile::new(folder.join("metrics.csv"))));
        }
        if settings.parquet {
            chosen.push(Box::new(ParquetFile::new(folder.join("metrics.parquet"))));
        }
        let warn = warnings(reporter);
        let exposition = match settings.prometheus_address() {
            Some(address) => {
                let token = settings.prometheus_token().map_err(problem)?;
                let exposition = Exposition::new(store.reader().run().await?.run);
                let is_served = serve(address, token, exposition.clone(), servers, &warn).await?;
                is_served.then_some(exposition)
            }
            None => None,
        };
        chosen.extend(exposition.as_ref().map(Exposition::sink));
        let sinks = Sinks::start(store, chosen, warn)?;
        Ok(Self { sinks, exposition, time: settings.flush_timeout.0 })
    }

    /// A reporter that also tells the sinks about new lines.
    pub(crate) fn reporter(&self, reporter: Arc<dyn Reporter>) -> Arc<dyn Reporter> {
        let journaled = self.sinks.journaled();
        Arc::new(move |event: &Event| {
            reporter.report(event);
            if let Event::StepFinished { .. } | Event::EvalFinished { .. } = event {
                journaled();
            }
        })
    }

    /// Writes what is missing, within the configured time.
    pub(crate) async fn finish(self) {
        let deadline = Instant::now() + self.time;
        self.sinks.finish(self.time).await;
        if let Some(exposition) = self.exposition {
            let left = deadline.saturating_duration_since(Instant::now());
            if !exposition.drained(left).await {
                output::say("warning: sink prometheus: the last values were not scraped in time");
            }
        }
    }
}

fn warnings(reporter: &Arc<dyn Reporter>) -> Warn {
    let reporter = reporter.clone();
    Arc::new(move |message: &str| {
        reporter.report(&Event::Warning { message: message.to_owned() });
    })
}

fn problem(problem: ConfigProblem) -> ConfigError {
    ConfigError::Problems(vec![problem])
}

/// Serves `/metrics`. Returns whether it could listen.
async fn serve(
    address: SocketAddr,
    token: Option<String>,
    exposition: Exposition,
    servers: &mut Servers,
    warn: &Warn,
) -> anyhow::Result<bool> {
    let listener = match TcpListener::bind(address).await {
        Ok(listener) => listener,
        Err(error) => {
            warn(&format!(
                "sink prometheus: cannot listen on {address} ({error}); the run continues without \
                 it; choose another sinks.prometheus"
            ));
            return Ok(false);
        }
    };
    let bound = listener.local_addr()?;
    let limits =
        HttpLimits { max_connections: SCRAPERS, header_time: IDLE, ..HttpLimits::default() };
    let server =
        HttpServer::new(listener, HttpOptions { token, limits, ..HttpOptions::default() })?;
    output::say(format!("prometheus: metrics at http://{bound}/metrics"));
    let scrape = async move || ([(CONTENT_TYPE, METRICS_CONTENT_TYPE)], exposition.scrape());
    let app = Router::new().route("/metrics", get(scrape));
    let routes = Routes { open: &[], own: "", max_body_bytes: 0, reply: denied };
    servers.add(|stop| server.serve(app, routes, stop));
    Ok(true)
}

fn denied(denial: &Denial) -> Response {
    (denial.status(), denial.to_string()).into_response()
}
