//! The gateway of a run whose episodes are run by external workers.

use crate::config::ConfigError;
use crate::error::UsageError;
use crate::output;
use axum::Json;
use axum::http::Extensions;
use axum::response::{IntoResponse as _, Response};
use orchestrate_gateway::{
    ErrorCode, GatewayOptions, GatewaySettings, Offers, Registry, Unconfirmed,
};
use orchestrate_http_server::{
    ConnectionObserver, Denial, HttpLimits, HttpOptions, HttpServer, Routes, TlsFiles,
};
use orchestrate_rollout::{ExternalWorkers, RolloutSettings, TurnJournals};
use orchestrate_types::ConfigProblem;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Bytes of all worker requests that are received at the same time. Requests of agents have their
/// own limit.
const WORKER_BYTES: usize = 16 << 20;
/// Largest request of an agent, in bytes.
const AGENT_BYTES: usize = 8 << 20;
/// Maximum time between two requests of a connection: longer than clients keep an idle one.
const IDLE: Duration = Duration::from_secs(90);
/// Time for which the server still answers workers that the run is over.
const CLOSING_TIME: Duration = Duration::from_millis(500);

/// A gateway that listens but does not serve yet.
#[derive(Debug)]
pub(crate) struct Gateway {
    server: HttpServer,
    offers: Offers,
    grace: Duration,
}

impl Gateway {
    /// Listens on the configured address, and prints it.
    ///
    /// # Errors
    /// If the secret is missing, the address is in use, other hosts can reach it without a secret,
    /// or a TLS file is invalid.
    pub(crate) async fn listen(settings: &GatewaySettings) -> anyhow::Result<Self> {
        let problems = |problem| ConfigError::Problems(vec![problem]);
        let address = settings.address().map_err(problems)?;
        let options = http_options(settings).map_err(problems)?;
        let scheme = if options.tls.is_some() { "https" } else { "http" };
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| UsageError::ListenForWorkers { address, source })?;
        let bound = listener.local_addr()?;
        let server = HttpServer::new(listener, options)?.observed_by(Receipts::open);
        output::say(format!("gateway: workers take episodes at {scheme}://{bound}"));
        let agents = GatewayOptions {
            body_limit: AGENT_BYTES,
            require_key: true,
            ..GatewayOptions::default()
        };
        let offers = Offers::new(Registry::new(agents), settings.lease.0);
        Ok(Self { server, offers, grace: settings.grace.0 })
    }

    /// The offers of this gateway, for the runner.
    pub(crate) fn external(&self, journals: TurnJournals) -> ExternalWorkers {
        ExternalWorkers::new(self.offers.clone(), self.grace, journals)
    }

    /// Serves workers until `stop` is cancelled.
    pub(crate) async fn serve(self, stop: CancellationToken) {
        let routes = Routes { open: &[], own: "/e/", max_body_bytes: WORKER_BYTES, reply: denied };
        let (offers, unserved) = (self.offers.clone(), CancellationToken::new());
        let closed = unserved.clone();
        let close = async move {
            stop.cancelled().await;
            offers.close();
            // Workers that ask for another episode are now told that the run is over.
            tokio::time::sleep(CLOSING_TIME).await;
            closed.cancel();
        };
        tokio::join!(self.server.serve(self.offers.router(), routes, unserved), close);
    }
}

/// The receipts of the replies that one connection has sent.
#[derive(Default)]
struct Receipts(Unconfirmed);

impl Receipts {
    fn open() -> Arc<dyn ConnectionObserver> {
        Arc::new(Self::default())
    }
}

impl ConnectionObserver for Receipts {
    fn requested(&self, extensions: &mut Extensions) {
        self.0.confirm();
        extensions.insert(self.0.clone());
    }

    fn all_read(&self) {
        self.0.confirm();
    }
}

fn http_options(settings: &GatewaySettings) -> Result<HttpOptions, ConfigProblem> {
    let tls = match (&settings.tls_cert, &settings.tls_key) {
        (Some(certificate), Some(key)) => Some(TlsFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            client_ca: settings.tls_client_ca.clone(),
        }),
        (None, _) | (_, None) => None,
    };
    let token = settings.secret()?;
    let limits = HttpLimits {
        max_connections: settings.max_connections,
        header_time: IDLE,
        ..HttpLimits::default()
    };
    let allowed_hosts = settings.allowed_hosts.clone();
    Ok(HttpOptions { token, tls, allowed_hosts, insecure: false, limits })
}

fn denied(denial: &Denial) -> Response {
    let code = code_of(denial).as_str();
    let error = json!({"error": {"code": code, "message": denial.to_string()}});
    (denial.status(), Json(error)).into_response()
}

/// The code of a request that no route sees.
fn code_of(denial: &Denial) -> ErrorCode {
    match denial {
        Denial::Unauthorized => ErrorCode::Unauthorized,
        Denial::MissingHost | Denial::BodyEnded(_) => ErrorCode::BadRequest,
        Denial::Host(_) => ErrorCode::HostNotAllowed,
        Denial::CrossSite => ErrorCode::CrossSite,
        Denial::ContentType => ErrorCode::ContentType,
        Denial::BodyTooLarge(_) => ErrorCode::BodyTooLarge,
        Denial::BodyTimedOut => ErrorCode::BodyTimedOut,
        Denial::BodiesFull => ErrorCode::Busy,
    }
}

/// Refuses plain rows for a scaffold that needs a sandbox.
pub(crate) fn needs_workers(rollout: &RolloutSettings) -> ConfigProblem {
    let scaffold = serde_json::to_value(rollout.scaffold).unwrap_or_default();
    ConfigProblem::new(
        "rollout.scaffold",
        scaffold.as_str().unwrap_or_default(),
        "must be \"external\": the task file has plain rows, whose environment an external worker provides",
    )
}
