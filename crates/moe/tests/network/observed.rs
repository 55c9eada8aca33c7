//! Whether a client has read its replies, as an observer is told.

use axum::Router;
use axum::http::Extensions;
use axum::response::IntoResponse as _;
use axum::routing::get;
use camino::Utf8Path;
use orchestrate_http_server::{
    ConnectionObserver, HttpLimits, HttpOptions, HttpServer, Routes, TlsFiles,
};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use tokio_util::sync::CancellationToken;

/// Bytes of a reply: more than a TLS library reads at once.
const REPLY: usize = 400 << 10;

/// More than the observer of one connection is told.
const MOST_TOLD: usize = 16;

/// What an observer was told.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Requested,
    AllRead,
    Dropped,
}

struct Observer(mpsc::Sender<Told>);

impl ConnectionObserver for Observer {
    fn requested(&self, extensions: &mut Extensions) {
        extensions.insert("observed");
        self.0.try_send(Told::Requested).unwrap();
    }

    fn all_read(&self) {
        self.0.try_send(Told::AllRead).unwrap();
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // The test may be over.
        self.0.try_send(Told::Dropped).ok();
    }
}

struct Observed {
    address: SocketAddr,
    told: Mutex<mpsc::Receiver<Told>>,
    _serving: JoinSet<()>,
}

impl Observed {
    async fn serve(tls: Option<TlsFiles>) -> Self {
        Self::serve_with(HttpOptions { tls, ..HttpOptions::default() }).await
    }

    async fn serve_with(options: HttpOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, told) = mpsc::channel(MOST_TOLD);
        let server = HttpServer::new(listener, options).unwrap();
        let server = server.observed_by(move || Arc::new(Observer(sender.clone())));
        let reply = async |axum::Extension(_): axum::Extension<&'static str>| "x".repeat(REPLY);
        let app = Router::new().route("/", get(reply));
        let routes = Routes {
            open: &[],
            own: "",
            max_body_bytes: 0,
            reply: |denial| (denial.status(), denial.to_string()).into_response(),
        };
        let mut serving = JoinSet::new();
        serving.spawn(server.serve(app, routes, CancellationToken::new()));
        Self { address, told: Mutex::new(told), _serving: serving }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// What the observer of a connection was told until it was dropped.
    async fn told(&self) -> Vec<Told> {
        let mut all = Vec::new();
        while all.last() != Some(&Told::Dropped) {
            let next = std::future::poll_fn(|context| self.told.lock().unwrap().poll_recv(context));
            all.push(next.await.unwrap());
        }
        all
    }

    /// Checks what is told of connections that read everything, or a part, and then close.
    async fn check<S: AsyncRead + AsyncWrite + Unpin>(&self, connect: impl AsyncFn() -> S) {
        use Told::{AllRead, Dropped, Requested};
        for (version, headers, requests) in
            [("1.1", "", 1), ("1.1", "", 2), ("1.1", "connection: close\r\n", 1), ("1.0", "", 1)]
        {
            for reads_all in [true, false] {
                let mut client = connect().await;
                let request = format!("GET / HTTP/{version}\r\nhost: localhost\r\n{headers}\r\n");
                for number in 1..=requests {
                    client.write_all(request.as_bytes()).await.unwrap();
                    let mut reply = Vec::new();
                    let is_partial = number == requests && !reads_all;
                    while !reply.ends_with(&b"x".repeat(REPLY)) {
                        assert!(client.read_buf(&mut reply).await.unwrap() > 0);
                        if is_partial {
                            break;
                        }
                    }
                }
                drop(client);
                let end = if reads_all { vec![AllRead, Dropped] } else { vec![Dropped] };
                let expected: Vec<Told> = (0..requests).map(|_| Requested).chain(end).collect();
                assert_eq!(self.told().await, expected, "{version} {headers:?} {requests}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_has_read_its_replies_if_it_closed_after_the_last_byte() {
    let server = Observed::serve(None).await;
    server.check(async || server.connect().await).await;
}

#[tokio::test]
async fn a_client_has_read_its_reply_if_it_keeps_the_connection_until_that_is_closed() {
    let limits = HttpLimits { header_time: Duration::from_secs(2), ..HttpLimits::default() };
    let server = Observed::serve_with(HttpOptions { limits, ..HttpOptions::default() }).await;
    let mut client = server.connect().await;
    client.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    assert_eq!(server.told().await, [Told::Requested, Told::AllRead, Told::Dropped]);
}

#[tokio::test]
async fn a_client_with_tls_has_read_its_replies_if_it_closed_after_the_last_byte() {
    let folder = tempfile::tempdir().unwrap();
    if !orchestrate_e2e::certificates::make(folder.path()).unwrap() {
        orchestrate_e2e::skip::skip_test("tls", "openssl", "openssl is not installed");
        return;
    }
    let folder = Utf8Path::from_path(folder.path()).unwrap();
    let files = TlsFiles {
        certificate: folder.join("server-cert.pem"),
        key: folder.join("server-key.pem"),
        client_ca: None,
    };
    let server = Observed::serve(Some(files)).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join("ca.pem")).unwrap()).unwrap();
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    let connect = async || {
        let name = "127.0.0.1".try_into().unwrap();
        // Dropped without a word in TLS, as many clients end their connections.
        connector.connect(name, server.connect().await).await.unwrap()
    };
    server.check(connect).await;
}
