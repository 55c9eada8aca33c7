//! TLS of a server: rustls with the files of [`TlsFiles`].

use crate::closing::Socket;
use crate::options::{HttpSetupError, TlsFiles};
use camino::Utf8Path;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// A TLS connection. Many clients end theirs without saying so in TLS; that is an end like any other, because
/// HTTP tells where a request ends.
pub(crate) struct TlsSocket(pub(crate) TlsStream<TcpStream>);

impl Socket for TlsSocket {
    const ENDS_FIRST: bool = false;

    fn tcp(&mut self) -> &mut TcpStream {
        self.0.get_mut().0
    }
}

impl AsyncRead for TlsSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer).map(|read| match read {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            other => other,
        })
    }
}

impl AsyncWrite for TlsSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Reads the files and builds what accepts TLS connections.
///
/// # Errors
/// [`HttpSetupError::TlsFile`] with the file that cannot be read or used.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, HttpSetupError> {
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
