//! Small requests that would need much memory. Alone in its process with `cargo nextest`; the
//! measured memory is that of server and clients together.

use crate::server::{Kind, TestServer, serve, with_token};
use orchestrate_moe::http::{HttpLimits, HttpOptions};
use tokio::io::AsyncWriteExt;

/// Largest body of the server under test, in bytes.
const LARGEST_BODY: usize = 16 << 20;

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let text = fs_err::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

async fn refused(server: &TestServer, what: &str, body: &str) {
    let (status, reply) = server.request("POST /generate", &[], Some(body)).await;
    assert!(
        matches!(status, 400 | 413 | 503),
        "{what}: {status} {}",
        &reply[..reply.len().min(400)]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hostile_bodies_stay_within_twice_the_idle_memory_and_one_body() {
    let http = HttpOptions { limits: HttpLimits::default(), ..with_token() };
    let server = serve(Kind::Engine(|_| {}), http).await;
    let small = r#"{"input_ids":[1,2],"sampling_params":{"max_new_tokens":1}}"#;
    assert_eq!(server.request("POST /generate", &[], Some(small)).await.0, 200);
    let idle = resident();
    let most = 2 * idle + LARGEST_BODY;
    let within = |what: &str| {
        let now = resident();
        assert!(now <= most, "{what}: {} MB of {} MB", now >> 20, most >> 20);
    };

    let prompts = vec!["[1]"; 800].join(",");
    let exploding = format!(r#"{{"input_ids":[{prompts}],"sampling_params":{{"n":1024}}}}"#);
    assert!(exploding.len() < 5000);
    refused(&server, "prompts times n", &exploding).await;
    within("prompts times n");

    let long = vec!["1"; 4000].join(",");
    let long = format!(r#"{{"input_ids":[{long}],"sampling_params":{{"n":1024}}}}"#);
    refused(&server, "a long prompt, n times", &long).await;
    let salt = "s".repeat(1 << 20);
    let salted = format!(
        r#"{{"input_ids":[1],"cache_salt":"{salt}","sampling_params":{{"n":1024,"max_new_tokens":1}}}}"#
    );
    refused(&server, "a large name, n times", &salted).await;
    within("names");

    // Texts whose values in memory are many times as large.
    let mb = 1 << 20;
    for (what, start, unit, end) in [
        ("many prompts", "{\"input_ids\":[", "[1],", "[1]]}"),
        ("many ids", "{\"input_ids\":[", "1,", "1]}"),
        ("many texts", "{\"text\":[", "\"\",", "\"\"]}"),
        ("many parameters", "{\"input_ids\":[[1]],\"sampling_params\":[", "{},", "{}]}"),
        ("many stops", "{\"input_ids\":[1],\"sampling_params\":{\"stop\":[", "\"\",", "\"\"]}}"),
        ("many values", "{\"input_ids\":[[2]],\"sampling_params\":{\"regex\":[", "[],", "[]]}}"),
    ] {
        let body = format!("{start}{}{end}", unit.repeat(8 * mb / unit.len()));
        refused(&server, what, &body).await;
        drop(body);
        within(what);
    }

    // Many bodies at once: those that do not fit are answered, and the rest is given up.
    let mut open = Vec::new();
    for _ in 0..64 {
        let mut stream = server.connect().await;
        let start = format!(
            "POST /generate HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\
             content-type: application/json\r\ncontent-length: {LARGEST_BODY}\r\n\r\n",
            crate::server::TOKEN
        );
        stream.write_all(start.as_bytes()).await.unwrap();
        let chunk = vec![b' '; mb];
        // An answered connection is closed by the server.
        stream.write_all(&chunk).await.ok();
        open.push(stream);
    }
    within("64 bodies at once");
    drop(open);
    assert_eq!(server.request("POST /generate", &[], Some(small)).await.0, 200);
}
