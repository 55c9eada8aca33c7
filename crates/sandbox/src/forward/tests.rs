use super::*;
use tokio_util::sync::CancellationToken;

/// Requests until `count` are there.
async fn requests(carrier: &mut Carrier<'_>, count: usize) -> Vec<Request> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(carrier.requests().await);
    }
    all
}

fn request(number: u64, event: HostEvent) -> Request {
    Request::Connection { number, event }
}

#[tokio::test]
async fn bytes_and_ends_are_carried_in_both_directions() {
    let (stop, (accepted, mut streams)) = (CancellationToken::new(), mpsc::channel(4));
    let mut carrier = Carrier::new(Some(Forward { port: 9000, accepted, stop: &stop }));
    carrier.receive(1, AgentEvent::Opened).unwrap();
    carrier.receive(1, AgentEvent::Bytes(b"ask".to_vec())).unwrap();
    carrier.receive(1, AgentEvent::Ended).unwrap();
    let mut stream = streams.recv().await.unwrap();
    let serve = async {
        let mut asked = String::new();
        stream.read_to_string(&mut asked).await.unwrap();
        stream.write_all(b"answer").await.unwrap();
        drop(stream);
        asked
    };
    let (asked, sent) = tokio::join!(serve, requests(&mut carrier, 3));
    assert_eq!(asked, "ask");
    let expected = [HostEvent::Taken(3), HostEvent::Bytes(b"answer".to_vec()), HostEvent::Closed];
    assert_eq!(sent, expected.map(|event| request(1, event)));
    // Late events of a connection that this side has closed.
    carrier.receive(1, AgentEvent::Taken(6)).unwrap();
    carrier.receive(1, AgentEvent::Closed).unwrap();
    assert!(carrier.connections.is_empty());
}

#[tokio::test]
async fn what_the_protocol_does_not_allow_is_refused() {
    let (stop, (accepted, _streams)) = (CancellationToken::new(), mpsc::channel(200));
    assert!(Carrier::new(None).receive(1, AgentEvent::Opened).is_err());
    let mut carrier = Carrier::new(Some(Forward { port: 9000, accepted, stop: &stop }));
    assert!(carrier.receive(1, AgentEvent::Ended).is_err());
    carrier.receive(1, AgentEvent::Opened).unwrap();
    assert!(carrier.receive(1, AgentEvent::Opened).is_err());
    for bytes in [1, u64::MAX] {
        assert!(carrier.receive(1, AgentEvent::Taken(bytes)).is_err());
    }
    // Nothing reads the stream, so that this waits here.
    carrier.receive(1, AgentEvent::Bytes(vec![0; WINDOW])).unwrap();
    assert!(carrier.receive(1, AgentEvent::Bytes(vec![0; WINDOW])).is_err());
    for number in 2..=MAX_CONNECTIONS as u64 {
        carrier.receive(number, AgentEvent::Opened).unwrap();
    }
    assert!(carrier.receive(MAX_CONNECTIONS as u64 + 1, AgentEvent::Opened).is_err());
}

#[tokio::test]
async fn a_server_that_does_not_read_holds_up_nobody_and_one_that_writes_waits_for_the_window() {
    let (stop, (accepted, mut streams)) = (CancellationToken::new(), mpsc::channel(4));
    let mut carrier = Carrier::new(Some(Forward { port: 9000, accepted, stop: &stop }));
    for number in [1, 2] {
        carrier.receive(number, AgentEvent::Opened).unwrap();
    }
    let (_deaf, mut other) = (streams.recv().await.unwrap(), streams.recv().await.unwrap());
    carrier.receive(1, AgentEvent::Bytes(vec![0; WINDOW])).unwrap();
    let mut writer = JoinSet::new();
    writer.spawn(async move { other.write_all(&vec![7; 2 * WINDOW]).await });
    let mut sent = 0;
    let until_quiet = async {
        loop {
            for one in carrier.requests().await {
                if let Request::Connection { number: 2, event: HostEvent::Bytes(data) } = one {
                    sent += data.len();
                }
            }
        }
    };
    let quiet = std::time::Duration::from_millis(300);
    assert!(tokio::time::timeout(quiet, until_quiet).await.is_err());
    assert_eq!(sent, WINDOW);
    assert!(writer.try_join_next().is_none(), "the server waits for the window");
}

#[tokio::test]
async fn stop_is_sent_once_and_without_a_receiver_everything_is_closed() {
    let (stop, (accepted, streams)) = (CancellationToken::new(), mpsc::channel(4));
    let mut carrier = Carrier::new(Some(Forward { port: 9000, accepted, stop: &stop }));
    stop.cancel();
    assert_eq!(carrier.requests().await, [Request::Stop]);
    carrier.receive(1, AgentEvent::Opened).unwrap();
    drop(streams);
    assert_eq!(requests(&mut carrier, 1).await, [request(1, HostEvent::Closed)]);
    carrier.receive(2, AgentEvent::Opened).unwrap();
    assert_eq!(requests(&mut carrier, 1).await, [request(2, HostEvent::Closed)]);
    assert!(carrier.connections.is_empty());
}
