//! An image registry that supports pulls and injects faults.

use orchestrate_e2e::Daemon;
use serde_json::json;
use std::collections::HashMap;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";

/// A pushed image.
#[derive(Debug, Clone)]
pub(crate) struct Pushed {
    /// Id that a daemon gives the image.
    pub(crate) id: String,
    /// Digest of its manifest.
    pub(crate) digest: String,
}

#[derive(Debug, Default)]
struct Content {
    /// Content types and bodies by path.
    bodies: HashMap<String, (&'static str, Vec<u8>)>,
    /// Faults: part of the path, status, body, and how often it is applied.
    faults: Vec<(String, u16, &'static str, usize)>,
    requests: Vec<String>,
}

/// The registry. Dropping it stops the server.
#[derive(Debug)]
pub(crate) struct Registry {
    /// Host and port, as in image names.
    pub(crate) host: String,
    content: Arc<Mutex<Content>>,
    _served: JoinSet<()>,
}

impl Registry {
    /// Starts a registry that these daemons reach at one address, in the network of each.
    pub(crate) fn start(daemons: &[&Daemon]) -> Self {
        let (content, mut served) = (Arc::<Mutex<Content>>::default(), JoinSet::new());
        let mut port = 0;
        for daemon in daemons {
            let listener = daemon.listen(port).unwrap();
            port = listener.local_addr().unwrap().port();
            listener.set_nonblocking(true).unwrap();
            let listener = TcpListener::from_std(listener).unwrap();
            let shared = Arc::clone(&content);
            served.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    let content = Arc::clone(&shared);
                    connections.spawn(async move { drop(answer(stream, content).await) });
                }
            });
        }
        Self { host: format!("127.0.0.1:{port}"), content, _served: served }
    }

    /// Pushes an image of one layer with a file of `bytes` bytes. Its content includes repository
    /// and tag, so that no two images are the same.
    pub(crate) fn push(&self, repository: &str, tag: &str, bytes: usize) -> Pushed {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        let mut file = format!("{} {repository}:{tag} {bytes}", self.host).into_bytes();
        file.resize(file.len().max(bytes), 0);
        header.set_size(file.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, "content", &file[..]).unwrap();
        // Uncompressed despite the media type: the daemon detects that.
        let layer = archive.into_inner().unwrap();
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = json!({
            "architecture": architecture,
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [sha256(&layer)]},
        });
        let config = serde_json::to_vec(&config).unwrap();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": config.len(), "digest": sha256(&config)},
            "layers": [{"mediaType": LAYER, "size": layer.len(), "digest": sha256(&layer)}],
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let pushed = Pushed { id: sha256(&config), digest: sha256(&manifest) };
        let mut content = self.content.lock().unwrap();
        let mut put = |path: String, kind, body: &[u8]| {
            content.bodies.insert(format!("/v2/{repository}/{path}"), (kind, body.to_vec()));
        };
        put(format!("blobs/{}", sha256(&layer)), "application/octet-stream", &layer);
        put(format!("blobs/{}", pushed.id), "application/octet-stream", &config);
        put(format!("manifests/{}", pushed.digest), MANIFEST, &manifest);
        put(format!("manifests/{tag}"), MANIFEST, &manifest);
        pushed
    }

    /// Makes the next `times` requests whose path contains `part` fail.
    pub(crate) fn fail(&self, part: &str, status: u16, body: &'static str, times: usize) {
        self.content.lock().unwrap().faults.push((part.to_owned(), status, body, times));
    }

    /// Number of faults that were not applied yet.
    pub(crate) fn faults_left(&self) -> usize {
        self.content.lock().unwrap().faults.iter().map(|fault| fault.3).sum()
    }

    /// Number of requests whose path contains `part`.
    pub(crate) fn requests(&self, part: &str) -> usize {
        self.content.lock().unwrap().requests.iter().filter(|path| path.contains(part)).count()
    }
}

async fn answer(mut stream: TcpStream, content: Arc<Mutex<Content>>) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await?;
        request.push(byte);
        // The daemon tries TLS first, whose first byte is not a letter.
        if request.len() == 1 && !byte.is_ascii_uppercase() {
            return Ok(());
        }
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let mut fields = request.split(' ');
    let (method, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
    let (status, kind, body) = {
        let mut content = content.lock().unwrap();
        content.requests.push(path.to_owned());
        let fault = content.faults.iter_mut().find(|f| f.3 > 0 && path.contains(&f.0));
        if let Some((_, status, body, times)) = fault {
            *times -= 1;
            (*status, "application/json", body.as_bytes().to_vec())
        } else if path == "/v2/" {
            (200, "application/json", b"{}".to_vec())
        } else if let Some((kind, body)) = content.bodies.get(path) {
            (200, *kind, body.clone())
        } else {
            let body =
                json!({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]});
            (404, "application/json", serde_json::to_vec(&body).unwrap())
        }
    };
    let digest = if kind == MANIFEST {
        format!("Docker-Content-Digest: {}\r\n", sha256(&body))
    } else {
        String::new()
    };
    let head = format!(
        "HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{digest}\
         Docker-Distribution-Api-Version: registry/2.0\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if method != "HEAD" {
        stream.write_all(&body).await?;
    }
    stream.shutdown().await
}

fn sha256(bytes: &[u8]) -> String {
    let mut child =
        Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    format!("sha256:{}", output.split(' ').next().unwrap())
}
