//! Requests that name files outside of the allowed folders.

use crate::server::{Kind, TestServer, checkpoint, serve, with_token};
use serde_json::json;
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;

/// The reply's status and body with the path that was sent left out.
async fn probe(server: &TestServer, line: &str, body: serde_json::Value, path: &str) -> String {
    let (status, reply) = server.request(line, &[], Some(&body.to_string())).await;
    let text = reply.split("\r\n\r\n").nth(1).unwrap_or("").replace(path, "PATH");
    format!("{status} {text}")
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_come_from_allowed_folders_and_replies_do_not_tell_what_exists() {
    let server = serve(Kind::Engine(|_| {}), with_token()).await;
    let root = &server.root;
    checkpoint(&root.join("outside/policy"), 2);
    checkpoint(&root.join("allowed/next"), 3);
    symlink(root.join("outside/policy"), root.join("allowed/link")).unwrap();
    fs_err::create_dir(root.join("allowed/stolen")).unwrap();
    let secret = root.join("outside/policy/model.safetensors");
    symlink(secret, root.join("allowed/stolen/model.safetensors")).unwrap();
    let line = "POST /update_weights_from_disk";
    let mut replies = BTreeSet::new();
    for path in [
        "/etc".to_owned(),
        "/no/such/folder".to_owned(),
        "/root/.ssh".to_owned(),
        root.join("outside/policy").to_string(),
        root.join("outside/missing").to_string(),
        root.join("allowed/missing").to_string(),
        root.join("allowed/link").to_string(),
        root.join("allowed/stolen").to_string(),
        root.join("allowed/../outside/policy").to_string(),
    ] {
        replies.insert(probe(&server, line, json!({"model_path": path}), &path).await);
    }
    assert_eq!(replies.len(), 1, "{replies:#?}");
    assert!(replies.first().unwrap().starts_with("400 "), "{replies:?}");
    let next = root.join("allowed/next").to_string();
    let update = json!({"model_path": next, "weight_version": "7"});
    assert!(probe(&server, line, update.clone(), &next).await.starts_with("200 "));
    // A replayed update changes nothing.
    assert!(probe(&server, line, update, &next).await.starts_with("200 "));
    let (_, info) = server.request("GET /server_info", &[], None).await;
    assert!(info.contains(r#""weight_version":"7""#), "{info}");
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_come_from_allowed_folders_and_replies_do_not_tell_what_exists() {
    let server = serve(Kind::Trainer, with_token()).await;
    let root = &server.root;
    for folder in ["outside/b", "allowed/b", "allowed/linked"] {
        fs_err::create_dir_all(root.join(folder)).unwrap();
        fs_err::write(root.join(folder).join("manifest.json"), "{").unwrap();
    }
    symlink(root.join("outside/b"), root.join("allowed/link")).unwrap();
    symlink("/etc/hostname", root.join("allowed/linked/0000.safetensors")).unwrap();
    let line = "POST /v1/logprobs";
    let body = |path: &str| json!({"manifest": path, "replay": true, "temperature": 1.0});
    let mut replies = BTreeSet::new();
    for folder in
        ["outside/b", "outside/missing", "allowed/missing", "allowed/link", "allowed/linked"]
    {
        let path = root.join(folder).join("manifest.json").to_string();
        replies.insert(probe(&server, line, body(&path), &path).await);
    }
    assert_eq!(replies.len(), 1, "{replies:#?}");
    assert!(replies.first().unwrap().contains("bad_manifest_path"), "{replies:?}");
    let inside = root.join("allowed/b/manifest.json").to_string();
    let damaged = probe(&server, line, body(&inside), &inside).await;
    assert!(damaged.contains("bad_batch"), "{damaged}");
}
