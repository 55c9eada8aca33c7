//! Lets an agent reach the listed addresses outside its sandbox (`agent.egress`), through the port
//! on which the gateway listens: a client that uses it as HTTPS proxy requests a tunnel with
//! `CONNECT`.
//!
//! The sandbox itself has no network: this program resolves names and opens connections. The
//! policy's commands can use every address that the agent can.

use axum::Router;
use orchestrate_gateway::serve_stream;
use std::io::{self, Cursor};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::time::timeout;

const METHOD: &[u8] = b"CONNECT ";
const END_OF_HEAD: &[u8] = b"\r\n\r\n";
/// Maximum size of the head of a tunnel request, in bytes.
const HEAD_BYTES: usize = 8 * 1024;
/// Time limit for reading the head of a request, and for opening a connection.
const SETUP_TIMEOUT: Duration = Duration::from_secs(15);

/// Serves one connection of an agent: a tunnel to an address in `allowed` (`host:port`), or
/// requests to the gateway.
pub(super) async fn serve(stream: DuplexStream, routes: Router, allowed: Arc<Vec<String>>) {
    if allowed.is_empty() {
        return serve_stream(stream, routes).await;
    }
    if let Err(error) = try_serve(stream, routes, &allowed).await {
        tracing::debug!(%error, "an agent's connection ended early");
    }
}

async fn try_serve(mut stream: DuplexStream, routes: Router, allowed: &[String]) -> io::Result<()> {
    let mut head = Vec::new();
    while head.len() < METHOD.len() && METHOD.starts_with(&head) {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
    }
    if !head.starts_with(METHOD) {
        let (reader, writer) = tokio::io::split(stream);
        let stream = tokio::io::join(Cursor::new(head).chain(reader), writer);
        serve_stream(stream, routes).await;
        return Ok(());
    }
    let read = timeout(SETUP_TIMEOUT, read_head(&mut stream, &mut head)).await;
    let Some(target) = read.unwrap_or(Ok(None))? else {
        return refuse(&mut stream, "400 Bad Request", "not a request for a tunnel").await;
    };
    if !allowed.contains(&target) {
        tracing::warn!(target, "an agent requested an address that agent.egress does not list");
        let problem = format!("agent.egress does not list {target}");
        return refuse(&mut stream, "403 Forbidden", &problem).await;
    }
    let opened = timeout(SETUP_TIMEOUT, TcpStream::connect(&target)).await;
    let mut outside = match opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => {
            tracing::warn!(target, %error, "cannot open an agent's connection");
            let problem = format!("{target}: {error}");
            return refuse(&mut stream, "502 Bad Gateway", &problem).await;
        }
    };
    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    tracing::info!(target, "an agent's connection to an outside address was opened");
    let (sent, received) = copy_bidirectional(&mut stream, &mut outside).await?;
    tracing::info!(target, sent, received, "an agent's connection ended");
    Ok(())
}

/// Reads the head of a request. Returns the address it names, in lower case, or `None` if it is
/// invalid.
async fn read_head(stream: &mut DuplexStream, head: &mut Vec<u8>) -> io::Result<Option<String>> {
    while !head.ends_with(END_OF_HEAD) {
        // Byte by byte: what follows the head belongs to the tunnel.
        if head.len() >= HEAD_BYTES {
            return Ok(None);
        }
        head.push(stream.read_u8().await?);
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = std::str::from_utf8(line).unwrap_or_default();
    let mut words = line.split(' ').skip(1);
    let (target, version) = (words.next(), words.next());
    let is_http = version.is_some_and(|version| version.starts_with("HTTP/1."));
    let target = target.filter(|_| is_http).map(str::to_ascii_lowercase);
    Ok(target.filter(|target| is_address(target)))
}

async fn refuse(stream: &mut DuplexStream, status: &str, problem: &str) -> io::Result<()> {
    let length = problem.len();
    let reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{problem}"
    );
    stream.write_all(reply.as_bytes()).await?;
    stream.shutdown().await
}

/// Whether a text is `host:port`, in lower case.
pub(super) fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_name = |host: &str| {
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        let is_part = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-:_".contains(&b);
        !host.is_empty() && host.bytes().all(is_part)
    };
    is_name(host) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::duplex;
    use tokio::net::TcpListener;
    use tokio::task::JoinSet;

    /// Starts a server that sends its input back in upper case.
    async fn outside(tasks: &mut JoinSet<()>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tasks.spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut got = [0; 4];
                stream.read_exact(&mut got).await.unwrap();
                stream.write_all(&got.map(|byte| byte.to_ascii_uppercase())).await.unwrap();
            }
        });
        address
    }

    /// Sends text in pieces, and returns the whole reply.
    async fn ask(pieces: &[&str], allowed: &[&str]) -> String {
        let routes = Router::new().route("/hello", get(async || "from the gateway"));
        let list = Arc::new(allowed.iter().map(|&text| text.to_owned()).collect());
        let (mut agent, stream) = duplex(1024);
        let mut served = JoinSet::new();
        served.spawn(serve(stream, routes, list));
        for piece in pieces {
            agent.write_all(piece.as_bytes()).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut reply = String::new();
        if pieces.concat().starts_with("GET") || allowed.is_empty() {
            agent.shutdown().await.unwrap();
        }
        agent.read_to_string(&mut reply).await.unwrap();
        drop(agent);
        served.join_next().await.unwrap().unwrap();
        reply
    }

    #[tokio::test]
    async fn a_listed_address_is_reached_and_no_other() {
        let mut tasks = JoinSet::new();
        let address = outside(&mut tasks).await;
        let connect = format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        let reply = ask(&[&connect[..3], &connect[3..], "ping"], &[&address]).await;
        assert_eq!(reply, "HTTP/1.1 200 Connection established\r\n\r\nPING");
        // Bytes that came with the head belong to the tunnel.
        let reply = ask(&[&format!("{connect}ping")], &[&address]).await;
        assert!(reply.ends_with("\r\n\r\nPING"), "{reply}");
        let reply = ask(&[&connect], &["pypi.org:443"]).await;
        assert!(reply.starts_with("HTTP/1.1 403 "), "{reply}");
        assert!(reply.ends_with(&format!("agent.egress does not list {address}")), "{reply}");
        let closed = ask(&["CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n"], &["127.0.0.1:1"]).await;
        assert!(closed.starts_with("HTTP/1.1 502 "), "{closed}");
    }

    #[tokio::test]
    async fn requests_to_the_gateway_pass_and_other_bytes_are_refused() {
        let get = "GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        for allowed in [&[][..], &["pypi.org:443"]] {
            let reply = ask(&[&get[..2], &get[2..]], allowed).await;
            assert!(reply.ends_with("from the gateway"), "{reply}");
        }
        for wrong in [
            "CONNECT pypi.org:443\r\n\r\n".to_owned(),
            "CONNECT  HTTP/1.1\r\n\r\n".to_owned(),
            format!("CONNECT {}", "x".repeat(HEAD_BYTES)),
        ] {
            let reply = ask(&[&wrong], &["pypi.org:443"]).await;
            assert!(reply.starts_with("HTTP/1.1 400 "), "{wrong}: {reply}");
        }
        // Without a list there are no tunnels.
        let reply = ask(&["CONNECT pypi.org:443 HTTP/1.1\r\n\r\n"], &[]).await;
        assert!(!reply.contains("200"), "{reply}");
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for right in ["pypi.org:443", "127.0.0.1:80", "[::1]:8080", "host_1:1"] {
            assert!(is_address(right), "{right}");
        }
        for wrong in [
            "pypi.org",
            "pypi.org:0",
            ":443",
            "https://pypi.org:443",
            "*.org:443",
            "a:b",
            "A.org:1",
        ] {
            assert!(!is_address(wrong), "{wrong}");
        }
    }
}
