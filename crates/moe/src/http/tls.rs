//! TLS of a server: rustls with the files of [`TlsFiles`].

use super::options::{HttpSetupError, TlsFiles};
use camino::Utf8Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};

/// Reads the files and builds what accepts TLS connections.
///
/// # Errors
/// [`HttpSetupError::TlsFile`] with the file that cannot be read or used.
pub(super) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, HttpSetupError> {
    let provider = Arc::new(crypto::ring::default_provider());
    let chain = certificates(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| problem(&files.key, &e))?;
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| problem(&files.certificate, &e))?;
    let config = match &files.client_ca {
        Some(authorities) => config.with_client_cert_verifier(verifier(authorities, provider)?),
        None => config.with_no_client_auth(),
    };
    let mut config =
        config.with_single_cert(chain, key).map_err(|e| problem(&files.certificate, &e))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Verifies that a client has a certificate of one of the authorities in a file.
fn verifier(
    file: &Utf8Path,
    provider: Arc<crypto::CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, HttpSetupError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|e| problem(file, &e))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|e| problem(file, &e))
}

/// The certificates of a PEM file; at least one.
fn certificates(file: &Utf8Path) -> Result<Vec<CertificateDer<'static>>, HttpSetupError> {
    let read = CertificateDer::pem_file_iter(file).map_err(|e| problem(file, &e))?;
    let found: Vec<_> = read.collect::<Result<_, _>>().map_err(|e| problem(file, &e))?;
    if found.is_empty() {
        return Err(problem(file, &"has no certificate (expected PEM)"));
    }
    Ok(found)
}

fn problem(path: &Utf8Path, problem: &dyn std::fmt::Display) -> HttpSetupError {
    HttpSetupError::TlsFile { path: path.to_owned(), problem: problem.to_string() }
}
