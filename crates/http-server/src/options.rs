//! Who may reach a server, and what one client may use of it.

use camino::Utf8PathBuf;
use std::net::SocketAddr;
use std::time::Duration;

/// Who may reach a server, and how.
#[derive(Clone, Default)]
pub struct HttpOptions {
    /// Token that clients must send as `Authorization: Bearer …`; `None` asks for none.
    pub token: Option<String>,
    /// Serve TLS with these files; `None` serves plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Host names, besides `localhost` and IP addresses, by which clients may address the server.
    pub allowed_hosts: Vec<String>,
    /// Listen on an address that other hosts reach, even without a token or client certificates.
    pub insecure: bool,
    /// Limits on connections and requests.
    pub limits: HttpLimits,
}

/// PEM files of a TLS server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, followed by intermediate ones.
    pub certificate: Utf8PathBuf,
    /// Private key of the certificate.
    pub key: Utf8PathBuf,
    /// Certificates of the authorities that sign clients' certificates. With them, a client
    /// without such a certificate is rejected (mutual TLS).
    pub client_ca: Option<Utf8PathBuf>,
}

/// Limits on connections and requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpLimits {
    /// Maximum number of open connections; a further one is answered with status 503 and closed.
    pub max_connections: usize,
    /// Maximum time for a TLS handshake, for the headers of a request, and between two requests of
    /// a connection.
    pub header_time: Duration,
    /// Maximum time for the body of a request.
    pub body_time: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            header_time: Duration::from_secs(10),
            body_time: Duration::from_secs(30),
        }
    }
}

impl HttpOptions {
    /// Whether only clients that know a secret are answered.
    fn authenticates(&self) -> bool {
        self.token.is_some() || self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some())
    }

    /// Refuses an address that other hosts reach while anybody would be answered.
    ///
    /// # Errors
    /// [`HttpSetupError::Open`], and [`HttpSetupError::EmptyToken`].
    pub fn check(&self, address: SocketAddr) -> Result<(), HttpSetupError> {
        if self.token.as_deref().is_some_and(|token| token.trim().is_empty()) {
            return Err(HttpSetupError::EmptyToken);
        }
        if address.ip().is_loopback() {
            return Ok(());
        }
        if !self.authenticates() {
            if !self.insecure {
                return Err(HttpSetupError::Open { address });
            }
            tracing::warn!(%address, "every host that reaches this address controls the server");
        } else if self.tls.is_none() {
            tracing::warn!(%address, "the token is sent without encryption; use TLS");
        }
        Ok(())
    }

    /// Whether a request may address the server by any name: only where it also needs a secret,
    /// which a web page that a browser shows does not have.
    pub(crate) fn any_host(&self, address: SocketAddr) -> bool {
        !address.ip().is_loopback() && self.authenticates() && self.allowed_hosts.is_empty()
    }
}

impl std::fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpOptions")
            .field("token", &self.token.as_ref().map(|_| "(not shown)"))
            .field("tls", &self.tls)
            .field("allowed_hosts", &self.allowed_hosts)
            .field("insecure", &self.insecure)
            .field("limits", &self.limits)
            .finish()
    }
}

/// Why a server cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum HttpSetupError {
    /// The address is reachable from other hosts, which would be answered without a secret.
    #[error(
        "{address} is reachable from other hosts, which could load weights and use the model \
         without a secret"
    )]
    Open {
        /// The address.
        address: SocketAddr,
    },
    /// The token is empty.
    #[error("the token is empty; remove it to serve without one")]
    EmptyToken,
    /// The listener has no address.
    #[error("the listener's address cannot be read")]
    Address(#[source] std::io::Error),
    /// A TLS file cannot be read or used.
    #[error("TLS file {path}: {problem}")]
    TlsFile {
        /// The file.
        path: Utf8PathBuf,
        /// The problem.
        problem: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls(client_ca: Option<&str>) -> TlsFiles {
        let client_ca = client_ca.map(Into::into);
        TlsFiles { certificate: "cert.pem".into(), key: "key.pem".into(), client_ca }
    }

    #[test]
    fn open_addresses_need_a_token_or_client_certificates() {
        let all: SocketAddr = "0.0.0.0:1".parse().unwrap();
        let loopback: SocketAddr = "[::1]:1".parse().unwrap();
        let plain = HttpOptions::default();
        assert!(matches!(plain.check(all), Err(HttpSetupError::Open { .. })));
        assert!(plain.check("[::]:1".parse().unwrap()).is_err());
        assert!(plain.check("192.168.0.1:1".parse().unwrap()).is_err());
        assert!(
            plain.check(loopback).is_ok() && plain.check("127.3.0.1:1".parse().unwrap()).is_ok()
        );
        let only_tls = HttpOptions { tls: Some(tls(None)), ..Default::default() };
        assert!(only_tls.check(all).is_err(), "a server's certificate does not name its clients");
        for enough in [
            HttpOptions { token: Some("t".into()), ..Default::default() },
            HttpOptions { tls: Some(tls(Some("ca.pem"))), ..Default::default() },
            HttpOptions { insecure: true, ..Default::default() },
        ] {
            assert!(enough.check(all).is_ok(), "{enough:?}");
        }
        let empty = HttpOptions { token: Some(" ".into()), ..Default::default() };
        assert!(matches!(empty.check(loopback), Err(HttpSetupError::EmptyToken)));
    }

    #[test]
    fn debug_output_hides_the_token() {
        let options = HttpOptions { token: Some("canary".into()), ..Default::default() };
        assert!(!format!("{options:?}").contains("canary"));
    }
}
