//! How the servers of `serve-engine` and `serve-trainer` are reached.

use crate::error::UsageError;
use camino::Utf8PathBuf;
use clap::Args;
use orchestrate_http_server::{HttpLimits, HttpOptions, HttpSetupError, TlsFiles};
use std::net::SocketAddr;
use std::num::NonZeroU32;

/// Options of a server that listens on the network.
#[derive(Debug, Args)]
pub(crate) struct NetworkArgs {
    /// PEM file with the server's certificate: serve HTTPS.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<Utf8PathBuf>,
    /// PEM file with the private key of `--tls-cert`.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<Utf8PathBuf>,
    /// PEM file with authorities: only clients with a certificate of one of them are served
    /// (mutual TLS).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<Utf8PathBuf>,
    /// Host name by which clients address the server; may be repeated. On a loopback address, or
    /// without a secret, only localhost, IP addresses and these names are answered.
    #[arg(long = "allowed-host", value_name = "NAME")]
    allowed_hosts: Vec<String>,
    /// Maximum number of open connections.
    #[arg(long, default_value = "1024", value_name = "N")]
    max_connections: NonZeroU32,
    /// Listen on an address that other hosts reach, without a token or client certificates.
    #[arg(long)]
    insecure: bool,
}

impl NetworkArgs {
    /// The options of a server at `listen` whose clients must send `token`.
    ///
    /// # Errors
    /// [`UsageError`] for an address that other hosts reach, if anybody would be answered there.
    pub(crate) fn options(
        self,
        listen: SocketAddr,
        token: Option<String>,
    ) -> Result<HttpOptions, UsageError> {
        let tls = match (self.tls_cert, self.tls_key) {
            (Some(certificate), Some(key)) => {
                Some(TlsFiles { certificate, key, client_ca: self.tls_client_ca })
            }
            (Some(_), None) | (None, Some(_) | None) => None,
        };
        let max_connections = usize::try_from(self.max_connections.get()).unwrap_or(usize::MAX);
        let options = HttpOptions {
            token,
            tls,
            allowed_hosts: self.allowed_hosts,
            insecure: self.insecure,
            limits: HttpLimits { max_connections, ..HttpLimits::default() },
        };
        match options.check(listen) {
            Err(HttpSetupError::Open { address }) => Err(UsageError::OpenAddress { address }),
            // The server itself reports the rest.
            Ok(()) | Err(_) => Ok(options),
        }
    }
}
