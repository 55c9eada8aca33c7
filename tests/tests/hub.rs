//! Data sets of the Hugging Face hub, read by the program from an HTTP server that answers as the
//! hub does.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use orchestrate_e2e::{orchestrate, stderr};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// Commit of `main` before and after a push.
const COMMITS: [&str; 2] =
    ["1111111111111111111111111111111111111111", "2222222222222222222222222222222222222222"];

struct Hub {
    url: String,
    /// Files of each commit.
    commits: [BTreeMap<&'static str, String>; 2],
    /// Index of the commit that `main` refers to.
    main: AtomicUsize,
    /// Number of times a file was sent.
    sent: AtomicUsize,
}

impl Hub {
    fn commit(&self, revision: &str) -> Option<usize> {
        let main = self.main.load(Ordering::Relaxed);
        if revision == "main" { Some(main) } else { COMMITS.iter().position(|c| *c == revision) }
    }

    fn file(&self, revision: &str, path: &str) -> Option<(usize, &str)> {
        let commit = self.commit(revision)?;
        Some((commit, self.commits[commit].get(path)?))
    }
}

type Named = (String, String, String);

async fn info(
    State(hub): State<Arc<Hub>>,
    Path((owner, name, revision)): Path<Named>,
) -> Result<impl IntoResponse, StatusCode> {
    let commit = hub.commit(&revision).ok_or(StatusCode::NOT_FOUND)?;
    if (owner.as_str(), name.as_str()) != ("R2E-Gym", "Tiny") {
        return Err(StatusCode::NOT_FOUND);
    }
    let files: Vec<_> = hub.commits[commit].keys().map(|file| json!({"rfilename": file})).collect();
    Ok(axum::Json(json!({"sha": COMMITS[commit], "siblings": files})))
}

/// A file is stored elsewhere: the hub redirects there and gives its identity.
async fn resolve(
    State(hub): State<Arc<Hub>>,
    Path((_, _, revision, path)): Path<(String, String, String, String)>,
) -> Result<impl IntoResponse, StatusCode> {
    let (commit, text) = hub.file(&revision, &path).ok_or(StatusCode::NOT_FOUND)?;
    let headers = [
        ("x-repo-commit", COMMITS[commit].to_owned()),
        ("x-linked-etag", format!("\"{commit}-{}-{}\"", path.replace('/', "-"), text.len())),
        ("location", format!("{}/cdn/{}/{path}", hub.url, COMMITS[commit])),
    ];
    Ok((StatusCode::FOUND, headers))
}

async fn storage(
    State(hub): State<Arc<Hub>>,
    Path((revision, path)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, StatusCode> {
    let (_, text) = hub.file(&revision, &path).ok_or(StatusCode::NOT_FOUND)?;
    let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (begin, last) = range.ok_or(StatusCode::BAD_REQUEST)?;
    let begin: usize = begin.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
    if last.is_empty() {
        hub.sent.fetch_add(1, Ordering::Relaxed);
    }
    let end = last.parse().map_or(text.len(), |last: usize| last + 1).min(text.len());
    let found = format!("bytes {begin}-{}/{}", end - 1, text.len());
    let part = text.get(begin..end).ok_or(StatusCode::RANGE_NOT_SATISFIABLE)?.to_owned();
    Ok((StatusCode::PARTIAL_CONTENT, [(header::CONTENT_RANGE, found)], part))
}

/// One row, at a commit of its repository.
fn row(commit: &str) -> String {
    let text = include_str!("../../crates/rollout/tests/images/r2e_row.json");
    let mut row: Value = serde_json::from_str(text).unwrap();
    row["commit_hash"] = commit.into();
    row["docker_image"] = "nobody/nothing:1".into();
    format!("{row}\n")
}

/// A hub in which `main` has one split at first and two after a push.
async fn hub() -> (Arc<Hub>, JoinSet<std::io::Result<()>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let files = |named: &[(&'static str, String)]| named.iter().cloned().collect();
    let before = files(&[
        ("README.md", "a data set".to_owned()),
        ("data/train-00000-of-00002.jsonl", row("a") + &row("b")),
        ("data/train-00001-of-00002.jsonl", row("c")),
    ]);
    let after =
        files(&[("train.jsonl", row("d")), ("test.jsonl", row("e") + &row("f") + &row("g"))]);
    let hub = Arc::new(Hub {
        url: format!("http://{}", listener.local_addr().unwrap()),
        commits: [before, after],
        main: AtomicUsize::new(0),
        sent: AtomicUsize::new(0),
    });
    let routes = Router::new()
        .route("/api/datasets/{owner}/{name}/revision/{revision}", get(info))
        .route("/datasets/{owner}/{name}/resolve/{revision}/{*path}", get(resolve))
        .route("/cdn/{revision}/{*path}", get(storage))
        .with_state(Arc::clone(&hub));
    let mut served = JoinSet::new();
    served.spawn(async move { axum::serve(listener, routes).await });
    (hub, served)
}

/// Runs the program with its own cache.
fn command(hub: &str, cache: &std::path::Path, args: &[&str]) -> Command {
    let mut command = orchestrate(args).unwrap();
    command.env("HF_ENDPOINT", hub).env("HF_HOME", cache).env_remove("HF_TOKEN");
    command
}

async fn program(hub: &str, cache: &std::path::Path, args: &[&str]) -> Output {
    let mut command = command(hub, cache, args);
    tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_set_is_fetched_once_and_all_files_of_its_split_are_read() {
    let ((hub, _served), cache) = (hub().await, tempfile::tempdir().unwrap());
    let import = ["tasks", "import", "hf://datasets/R2E-Gym/Tiny"];
    for _ in 0..2 {
        let text = said(&program(&hub.url, cache.path(), &import).await);
        assert!(text.contains("usable 3 r2e; refused 0"), "{text}");
        assert_eq!(hub.sent.load(Ordering::Relaxed), 2);
    }
    let list = ["tasks", "list", "--json", "--file", "hf://datasets/R2E-Gym/Tiny/data/*1-of-*"];
    let text = said(&program(&hub.url, cache.path(), &list).await);
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_commit_never_changes_and_one_of_several_splits_must_be_chosen() {
    let ((hub, _served), cache) = (hub().await, tempfile::tempdir().unwrap());
    hub.main.store(1, Ordering::Relaxed);
    let import = ["tasks", "import", "hf://datasets/R2E-Gym/Tiny"];
    let output = program(&hub.url, cache.path(), &import).await;
    assert!(!output.status.success());
    let text = stderr(&output);
    assert!(text.contains("test, train") && text.contains("Tiny/test.jsonl"), "{text}");
    let named = |source: String| ["tasks".to_owned(), "import".to_owned(), source];
    let at = format!("hf://datasets/R2E-Gym/Tiny@{}", COMMITS[0]);
    for (source, usable) in [
        ("hf://datasets/R2E-Gym/Tiny/test.jsonl".to_owned(), "usable 3 r2e"),
        (at.clone(), "usable 3 r2e"),
        (format!("{at}/data/train-00001-of-00002.jsonl"), "usable 1 r2e"),
    ] {
        let args = named(source);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let text = said(&program(&hub.url, cache.path(), &args).await);
        assert!(text.contains(usable), "{args:?}: {text}");
    }
    // A file of a commit that was fetched before needs no hub.
    let args = named(format!("{at}/data/train-00001-of-00002.jsonl"));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let text = said(&program("http://127.0.0.1:1", cache.path(), &args).await);
    assert!(text.contains("usable 1 r2e"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_data_set_or_unreachable_hub_is_named_with_a_remedy() {
    let ((hub, _served), cache) = (hub().await, tempfile::tempdir().unwrap());
    for (url, source, words) in [
        (hub.url.as_str(), "hf://datasets/R2E-Gym/Huge", &["R2E-Gym/Huge", "HF_TOKEN", "404"][..]),
        (hub.url.as_str(), "hf://datasets/R2E-Gym/Tiny@v9", &["`v9`"]),
        (hub.url.as_str(), "hf://datasets/R2E-Gym/Tiny/x/*", &["x/*", "data/train-00000"]),
        ("http://127.0.0.1:1", "hf://datasets/R2E-Gym/Tiny", &["HF_ENDPOINT", "refused"]),
        (hub.url.as_str(), "hf://R2E-Gym/Tiny", &["hf://datasets/OWNER/NAME"]),
    ] {
        let output = program(url, cache.path(), &["tasks", "import", source]).await;
        let text = stderr(&output);
        assert!(!output.status.success() && !text.contains("panicked"), "{text}");
        for word in words {
            assert!(text.contains(word), "{source}: no `{word}` in: {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_of_a_run_names_the_commit() {
    let ((hub, _served), cache) = (hub().await, tempfile::tempdir().unwrap());
    let folder = cache.path().join("run");
    let set = "tasks.file=hf://datasets/R2E-Gym/Tiny/data/*";
    let args =
        ["run", "--run-dir", folder.to_str().unwrap(), "--set", set, "--set", "run.eval_every=0"];
    // A daemon that never answers: the run waits with its plan written.
    let socket = cache.path().join("docker.sock");
    let _daemon = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let host = format!("sandbox.docker_host=unix://{}", socket.display());
    let mut command = command(&hub.url, cache.path(), &[&args[..], &["--set", &host]].concat());
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let path = folder.join("plan.toml");
    while !path.exists() {
        assert_eq!(run.try_wait().unwrap(), None, "the run ended before it had a plan");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let plan = std::fs::read_to_string(path).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    let pinned = format!("hf://datasets/R2E-Gym/Tiny@{}/data/*", COMMITS[0]);
    assert!(plan.contains(&pinned), "{plan}");
}
