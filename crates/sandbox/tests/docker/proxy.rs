//! A proxy in front of the daemon's socket that loses, delays or replaces answers to chosen
//! requests.

use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

/// What is done to a request.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The daemon performs the request, but the connection breaks before its answer.
    LoseAnswer,
    /// The request is never answered.
    Silence,
    /// The proxy answers with this error; the daemon never receives the request.
    Answer(u16, &'static str),
    /// The proxy answers with this JSON; the daemon never receives the request.
    AnswerJson(String),
}

#[derive(Debug)]
struct Rule {
    wanted: [String; 2],
    fault: Fault,
    times: usize,
}

/// The proxy. Its socket closes when this is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) host: String,
    rules: Arc<Mutex<Vec<Rule>>>,
    _folder: tempfile::TempDir,
    _served: JoinSet<()>,
}

impl Proxy {
    /// Starts a proxy in front of the daemon's socket; `None` if the daemon does not use a socket.
    pub(crate) fn start() -> Option<Self> {
        let daemon = std::env::var("DOCKER_HOST").ok().filter(|host| !host.is_empty());
        let daemon = daemon.unwrap_or_else(|| "unix:///var/run/docker.sock".to_owned());
        let daemon = daemon.strip_prefix("unix://")?.to_owned();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("docker.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let rules = Arc::new(Mutex::new(Vec::new()));
        let (mut served, shared) = (JoinSet::new(), Arc::clone(&rules));
        served.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (daemon, rules) = (daemon.clone(), Arc::clone(&shared));
                connections.spawn(async move {
                    let _ = connection(client, &daemon, &rules).await;
                });
            }
        });
        let host = format!("unix://{}", path.display());
        Some(Self { host, rules, _folder: folder, _served: served })
    }

    /// Applies a fault to the next `times` requests whose first line contains both strings.
    pub(crate) fn fault(&self, wanted: [&str; 2], fault: Fault, times: usize) {
        let wanted = wanted.map(str::to_owned);
        self.rules.lock().unwrap().push(Rule { wanted, fault, times });
    }

    /// Number of faults that were not applied yet.
    pub(crate) fn faults_left(&self) -> usize {
        self.rules.lock().unwrap().iter().map(|rule| rule.times).sum()
    }

    /// Removes all faults.
    pub(crate) fn clear_faults(&self) {
        self.rules.lock().unwrap().clear();
    }
}

/// Serves one request: the driver opens a connection for each.
async fn connection(
    mut client: UnixStream,
    daemon: &str,
    rules: &Mutex<Vec<Rule>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if client.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
    let fault = rules.lock().unwrap().iter_mut().find_map(|rule| {
        let applies = rule.times > 0 && rule.wanted.iter().all(|part| line.contains(part));
        applies
            .then(|| rule.times -= usize::from(rule.times < usize::MAX))
            .map(|()| rule.fault.clone())
    });
    match fault {
        None => {
            let mut upstream = UnixStream::connect(daemon).await?;
            upstream.write_all(&head).await?;
            copy_bidirectional(&mut client, &mut upstream).await?;
        }
        Some(Fault::LoseAnswer) => {
            let mut upstream = UnixStream::connect(daemon).await?;
            upstream.write_all(&head).await?;
            let (mut from_client, mut to_daemon) = (vec![0; 65_536], vec![0; 1]);
            let (mut reader, mut writer) = upstream.split();
            loop {
                tokio::select! {
                    _ = reader.read(&mut to_daemon) => return Ok(()),
                    count = client.read(&mut from_client) => {
                        let count = count?;
                        writer.write_all(from_client.get(..count).unwrap_or_default()).await?;
                        if count == 0 {
                            let _ = reader.read(&mut to_daemon).await?;
                            return Ok(());
                        }
                    }
                }
            }
        }
        Some(Fault::Silence) => std::future::pending::<()>().await,
        Some(Fault::Answer(status, message)) => {
            answer(client, status, &format!("{{\"message\":\"{message}\"}}")).await?;
        }
        Some(Fault::AnswerJson(body)) => answer(client, 200, &body).await?,
    }
    Ok(())
}

async fn answer(mut client: UnixStream, status: u16, body: &str) -> std::io::Result<()> {
    let answer = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    client.write_all(answer.as_bytes()).await?;
    client.shutdown().await?;
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await?;
    Ok(())
}
