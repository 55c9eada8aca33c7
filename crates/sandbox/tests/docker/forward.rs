//! Connections of a command to this program, its only way out of the sandbox.

use crate::common::{Fixture, SHORT, check_alive};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use orchestrate_sandbox::{Command, ExecResult, Exit, Forward, Sandbox, SandboxErrorKind};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tokio::io::DuplexStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const PORT: u16 = 8471;

/// Functions that the scripts of these tests use.
const PRELUDE: &str = r#"
import http.client, os, socket, struct, sys, threading, time
PORT = 8471
def http_client():
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
def ask(client, method, path, body=None):
    client.request(method, path, body)
    reply = client.getresponse()
    data = reply.read()
    assert reply.status == 200, (reply.status, data)
    return data
def raw():
    return socket.create_connection(("127.0.0.1", PORT), timeout=60)
def small(count, client=None):
    client, taken = client or http_client(), []
    for number in range(count):
        start = time.perf_counter()
        assert ask(client, "POST", "/echo", b"%d" % number) == b"%d" % number
        taken.append(time.perf_counter() - start)
    return taken
def parallel(work, count):
    errors = []
    def guarded():
        try: work()
        except BaseException as error: errors.append(repr(error))
    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not errors, errors
"#;

struct Streams(mpsc::Receiver<DuplexStream>);

impl axum::serve::Listener for Streams {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.recv().await {
            Some(stream) => (stream, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A server with an echo, a reply that goes on only after a second request, and an endless reply.
fn server() -> Router {
    let seen = Arc::new(Notify::new());
    let notify = Arc::clone(&seen);
    let stream = move || {
        let seen = Arc::clone(&seen);
        let second = async move {
            seen.notified().await;
            Ok::<_, io::Error>(Bytes::from_static(b"second\n"))
        };
        let first = async { Ok(Bytes::from_static(b"first\n")) };
        let both =
            futures::StreamExt::chain(futures::stream::once(first), futures::stream::once(second));
        async { Body::from_stream(both) }
    };
    let endless = || async {
        let piece = Bytes::from(vec![0; 65536]);
        Body::from_stream(futures::stream::repeat_with(move || Ok::<_, io::Error>(piece.clone())))
    };
    Router::new()
        .route("/echo", post(|body: Bytes| async move { body }))
        .route("/stream", get(stream))
        .route("/endless", get(endless))
        .route("/seen", post(move || async move { notify.notify_one() }))
        .layer(DefaultBodyLimit::disable())
}

/// Runs Python code while the server answers its requests.
async fn serve(sandbox: &mut Box<dyn Sandbox>, code: &str) -> ExecResult {
    let (accepted, streams) = mpsc::channel(Forward::MAX_CONNECTIONS);
    let mut server_task = JoinSet::new();
    server_task.spawn(axum::serve(Streams(streams), server()).into_future());
    let stop = CancellationToken::new();
    let forward = Forward { port: PORT, accepted, stop: &stop };
    sandbox.exec_forwarding(&python(code), forward).await.unwrap()
}

fn python(code: &str) -> Command {
    let mut command = Command::shell("", 5 * SHORT);
    command.argv = ["python3", "-c", &format!("{PRELUDE}{code}")].map(str::to_owned).to_vec();
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_an_agents_requests_and_streams_pass_through_the_forwarded_port() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let result = serve(
        &mut sandbox,
        r#"
taken = sorted(small(1000))
print("one connection: p50 %.0f us, p99 %.0f us" % (taken[500] * 1e6, taken[990] * 1e6))
start = time.perf_counter()
parallel(lambda: small(50), 20)
print("20 connections: %.0f requests per second" % (1000 / (time.perf_counter() - start)))
big, start = os.urandom(8 << 20), time.perf_counter()
assert ask(http_client(), "POST", "/echo", big) == big
print("8 MiB both ways: %.0f ms" % ((time.perf_counter() - start) * 1e3))
def several():
    assert ask(http_client(), "POST", "/echo", big) == big
parallel(several, 3)
client = http_client()
client.request("GET", "/stream")
reply = client.getresponse()
assert reply.readline() == b"first\n"
ask(http_client(), "POST", "/seen")
assert reply.read() == b"second\n"
"#,
    )
    .await;
    assert_eq!(result.exit, Exit::Code(0), "{}", result.text());
    eprintln!("{}", result.text());
    // The port serves the next command, too, and nothing listens while none asks for it.
    let again = serve(&mut sandbox, "small(20)").await;
    assert_eq!(again.exit, Exit::Code(0), "{}", again.text());
    let closed = sandbox.exec(&python("raw()")).await.unwrap();
    assert!(closed.text().contains("ConnectionRefusedError"), "{}", closed.text());
    // Ports of closed connections stay in use for a while, so the container is not reused.
    let name = sandbox.name().to_owned();
    sandbox.close().await.unwrap();
    let next = fixture.open().await;
    assert_ne!(next.name(), name);
    next.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_hostile_connections_neither_grow_nor_occupy_process_1() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let result = serve(
        &mut sandbox,
        r#"
def of_process_1(name):
    lines = open("/proc/1/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
def ticks():
    return sum(map(int, open("/proc/1/stat").read().rsplit(")", 1)[1].split()[11:13]))
held = []
def never_read():
    held.append(raw())
    held[-1].sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
def flood():
    one = raw()
    held.append(one)
    one.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
    one.settimeout(0.2)
    end = time.time() + 2
    try:
        while time.time() < end: one.send(bytes(1 << 16))
    except OSError: pass
def reset():
    for _ in range(100):
        one = raw()
        one.sendall(b"POST /echo HTTP/1.1\r\n")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
parallel(never_read, 10)
# A flood may take every place of a new connection; one that is open keeps its own.
open_before = http_client()
small(1, open_before)
others = [threading.Thread(target=work) for work in [flood] * 4 + [reset] * 2]
for other in others: other.start()
small(200, open_before)
for other in others: other.join()
for number in range(20):
    half = raw()
    held.append(half)
    half.shutdown(socket.SHUT_WR)
# What is already on its way may take a while on a busy machine; after it, process 1 must rest.
for _ in range(20):
    before = ticks()
    time.sleep(2)
    idle = ticks() - before
    if idle < 20: break
print("ticks while idle:", idle)
assert idle < 20
for one in held: one.close()
small(20)
opened = []
for number in range(1000):
    try: opened.append(raw())
    except OSError as error: print(number, error); break
assert len(opened) == 1000
def has_ended(one):
    one.settimeout(0.001)
    try: return one.recv(1) == b""
    except TimeoutError: return False
    except ConnectionError: return True
deadline, waiting = time.time() + 120, opened
while len(waiting) > 64 and time.time() < deadline:
    waiting = [one for one in waiting if not has_ended(one)]
assert len(waiting) <= 64, len(waiting)
for one in opened: one.close()
# Process 1 has room for others as soon as it has seen these ends.
deadline = time.time() + 120
while True:
    try: small(20); break
    except (OSError, http.client.HTTPException):
        if time.time() > deadline: raise
        time.sleep(0.1)
print("process 1 at most", of_process_1("VmHWM:"), "kB")
assert of_process_1("VmHWM:") < 48 << 10
"#,
    )
    .await;
    assert_eq!(result.exit, Exit::Code(0), "{}", result.text());
    eprintln!("{}", result.text());
    check_alive(&mut sandbox).await;
    sandbox.close().await.unwrap();
    fixture.finish().await;
}

#[tokio::test]
async fn docker_a_forwarding_command_is_stopped_at_once_and_the_sandbox_works_after_it() {
    let Some(fixture) = Fixture::new().await else { return };
    let mut sandbox = fixture.open().await;
    let stop = CancellationToken::new();
    let (accepted, mut streams) = mpsc::channel(1);
    let (started, code) = (Instant::now(), "one = raw(); print('open', flush=True); one.recv(1)");
    let forward = Forward { port: PORT, accepted, stop: &stop };
    let command = python(code);
    let receiver = async {
        let stream = streams.recv().await.unwrap();
        stop.cancel();
        stream
    };
    let (result, mut stream) = tokio::join!(sandbox.exec_forwarding(&command, forward), receiver);
    let result = result.unwrap();
    assert_eq!(result.exit, Exit::Stopped);
    assert_eq!(result.text(), "open\n");
    assert!(started.elapsed() < 2 * SHORT, "only its time limit ended the command");
    assert_eq!(tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 1]).await.unwrap(), 0);
    check_alive(&mut sandbox).await;
    // Without a receiver, connections are closed and the command goes on.
    let (accepted, streams) = mpsc::channel(1);
    drop(streams);
    let stop = CancellationToken::new();
    let forward = Forward { port: PORT, accepted, stop: &stop };
    let closed = sandbox.exec_forwarding(&python("print(raw().recv(1))"), forward).await.unwrap();
    assert_eq!(closed.text(), "b''\n");
    let (accepted, _streams) = mpsc::channel(1);
    let forward = Forward { port: 0, accepted, stop: &stop };
    let refused = sandbox.exec_forwarding(&python(""), forward).await.unwrap_err();
    assert!(matches!(refused.kind, SandboxErrorKind::Refused { .. }), "{refused}");
    sandbox.close().await.unwrap();
    fixture.finish().await;
}
