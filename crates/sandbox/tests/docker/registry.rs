//! A registry that a real daemon pulls from: as much of it as a pull asks for, and faults.

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

/// What was pushed.
#[derive(Debug, Clone)]
pub(crate) struct Pushed {
    /// The daemon's id of it.
    pub(crate) id: String,
    /// The manifest's digest.
    pub(crate) digest: String,
}

#[derive(Debug, Default)]
struct Content {
    /// Bodies by what stands after the repository's name, like `blobs/sha256:…`.
    bodies: HashMap<String, (&'static str, Vec<u8>)>,
    /// Paths that fail, how, and how often.
    faults: Vec<(String, u16, &'static str, usize)>,
    asked: Vec<String>,
}

/// It closes when this is dropped.
#[derive(Debug)]
pub(crate) struct Registry {
    /// As names of images begin.
    pub(crate) host: String,
    content: Arc<Mutex<Content>>,
    _served: JoinSet<()>,
}

impl Registry {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let content = Arc::<Mutex<Content>>::default();
        let shared = Arc::clone(&content);
        let mut served = JoinSet::new();
        served.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let content = Arc::clone(&shared);
                connections.spawn(async move { drop(answer(stream, content).await) });
            }
        });
        Self { host, content, _served: served }
    }

    /// An image of one layer with a file of `bytes` bytes, under a tag; `repository` is part of its
    /// content, so that no two are the same.
    pub(crate) fn push(&self, repository: &str, tag: &str, bytes: usize) -> Pushed {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        let mut file = format!("{} {repository}:{tag} {bytes}", self.host).into_bytes();
        file.resize(file.len().max(bytes), 0);
        header.set_size(file.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, "content", &file[..]).unwrap();
        // Not compressed: the daemon looks, whatever the type says.
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

    /// The next `times` requests whose path holds `part` fail.
    pub(crate) fn fail(&self, part: &str, status: u16, body: &'static str, times: usize) {
        self.content.lock().unwrap().faults.push((part.to_owned(), status, body, times));
    }

    /// How many faults were announced and not yet met.
    pub(crate) fn faults_left(&self) -> usize {
        self.content.lock().unwrap().faults.iter().map(|fault| fault.3).sum()
    }

    /// How often paths were asked for that hold `part`.
    pub(crate) fn asked(&self, part: &str) -> usize {
        self.content.lock().unwrap().asked.iter().filter(|path| path.contains(part)).count()
    }
}

async fn answer(mut stream: TcpStream, content: Arc<Mutex<Content>>) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await?;
        request.push(byte);
        // The daemon tries TLS first, whose first byte is no letter.
        if request.len() == 1 && !byte.is_ascii_uppercase() {
            return Ok(());
        }
    }
    let request = String::from_utf8_lossy(&request).into_owned();
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let (status, kind, body) = {
        let mut content = content.lock().unwrap();
        content.asked.push(path.to_owned());
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
