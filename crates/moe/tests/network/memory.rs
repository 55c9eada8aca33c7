//! Small requests that would need much memory, sent to the built program, whose memory is measured.

use crate::server::TestServer;
use std::io::BufRead;
use std::process::{Child, Stdio};
use tokio::io::AsyncWriteExt;

/// Largest body of the server under test, in bytes.
const LARGEST_BODY: usize = 8 << 20;

/// `orchestrate serve-engine` as a process of its own; it ends when it is dropped.
struct Program(Child);

impl Program {
    /// Starts the server and waits until it listens. `None`, reported as a skip, if the program is
    /// not built.
    fn start() -> Option<(Self, TestServer)> {
        let line = ["serve-engine", "--listen", "127.0.0.1:0", "--api-key-env", "KEY"];
        let line = [&line[..], &["--model", "environments/micro/policy"]].concat();
        let Ok(mut command) = orchestrate_e2e::orchestrate(&line) else {
            let why = "the program is not built (cargo build -p orchestrate-cli)";
            orchestrate_e2e::skip::skip_test("hostile_bodies", "program", why);
            return None;
        };
        command.env("KEY", crate::server::TOKEN).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = String::new();
        let mut output = std::io::BufReader::new(child.stderr.take().unwrap());
        while !said.contains("http://") {
            assert!(output.read_line(&mut said).unwrap() > 0, "{said}");
        }
        let address = said.split("http://").nth(1).unwrap().trim().parse().unwrap();
        // The pipe stays open, so that the program may go on to write.
        child.stderr = Some(output.into_inner());
        Some((Self(child), TestServer::outside(address)))
    }

    /// Resident memory of the process, in bytes.
    fn resident(&self) -> usize {
        let file = format!("/proc/{}/statm", self.0.id());
        let text = fs_err::read_to_string(file).unwrap();
        let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
        pages * 4096
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
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
    let Some((program, server)) = Program::start() else { return };
    let small = r#"{"input_ids":[1,2],"sampling_params":{"max_new_tokens":1}}"#;
    assert_eq!(server.request("POST /generate", &[], Some(small)).await.0, 200);
    let idle = program.resident();
    let most = 2 * idle + LARGEST_BODY;
    let within = |what: &str| {
        let now = program.resident();
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
        let body = format!("{start}{}{end}", unit.repeat(7 * mb / unit.len()));
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
