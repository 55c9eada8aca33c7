use super::*;
use std::net::SocketAddr;

/// A forwarder on a free port, and what it told the host.
struct World {
    forwarder: Forwarder,
    address: SocketAddr,
    sent: Vec<(u64, AgentEvent)>,
}

impl World {
    fn new() -> Self {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let forwarder = Forwarder::bind(address.port()).unwrap();
        Self { forwarder, address, sent: Vec::new() }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }

    /// Waits once and advances; the number of descriptors that were ready.
    fn step(&mut self) -> usize {
        let now = Instant::now();
        let watched: Vec<_> = self.forwarder.watched(now).collect();
        let ready = crate::sys::wait(&watched, Some(Duration::from_millis(5))).unwrap();
        let sent = &mut self.sent;
        let now = Instant::now();
        let mut send = |number, event| {
            sent.push((number, event));
            Ok(())
        };
        self.forwarder.advance(&ready, now, &mut send).unwrap();
        ready.iter().filter(|ready| ready.read || ready.write).count()
    }

    fn settle(&mut self) {
        while self.step() > 0 {}
    }

    fn tell(&mut self, number: u64, event: HostEvent) {
        let sent = &mut self.sent;
        let mut send = |number, event| {
            sent.push((number, event));
            Ok(())
        };
        self.forwarder.handle(number, event, Instant::now(), &mut send).unwrap();
    }

    fn bytes(&self, of: u64) -> usize {
        let bytes = self.sent.iter().filter(|(number, _)| *number == of);
        bytes
            .map(|(_, event)| if let AgentEvent::Bytes(data) = event { data.len() } else { 0 })
            .sum()
    }
}

#[test]
fn bytes_and_ends_are_carried_in_both_directions() {
    let mut world = World::new();
    let mut client = world.connect();
    client.write_all(b"ask").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    world.settle();
    let expected =
        [(1, AgentEvent::Opened), (1, AgentEvent::Bytes(b"ask".to_vec())), (1, AgentEvent::Ended)];
    assert_eq!(world.sent, expected);
    world.tell(1, HostEvent::Bytes(b"answer".to_vec()));
    world.tell(1, HostEvent::Closed);
    assert_eq!(world.sent.last(), Some(&(1, AgentEvent::Taken(6))));
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");
    assert!(world.forwarder.connections.is_empty());
    // Numbers that are gone or never were.
    world.tell(1, HostEvent::Bytes(b"late".to_vec()));
    world.tell(7, HostEvent::Closed);
}

#[test]
fn a_flood_is_read_no_further_than_the_window_and_does_not_spin() {
    let mut world = World::new();
    let mut flood = world.connect();
    flood.set_nonblocking(true).unwrap();
    let mut quiet = world.connect();
    let piece = vec![1; READ_BYTES];
    for _ in 0..400 {
        let _ = flood.write(&piece);
        world.step();
    }
    assert_eq!(world.bytes(1), WINDOW);
    // Nothing is ready although more bytes wait, and the neighbour is served.
    assert_eq!(world.step(), 0);
    quiet.write_all(b"x").unwrap();
    world.settle();
    assert_eq!(world.bytes(2), 1);
    world.tell(1, HostEvent::Taken(1000));
    world.settle();
    assert_eq!(world.bytes(1), WINDOW + 1000);
    // More than was outstanding does not widen the window.
    world.tell(1, HostEvent::Taken(u64::MAX));
    world.settle();
    assert!(world.bytes(1) <= 2 * WINDOW + 1000);
}

#[test]
fn a_process_that_never_reads_makes_nobody_store_more_than_the_window() {
    let mut world = World::new();
    let client = world.connect();
    world.settle();
    for _ in 0..400 {
        let taken: u64 = world
            .sent
            .drain(..)
            .map(|(_, event)| if let AgentEvent::Taken(bytes) = event { bytes } else { 0 })
            .sum();
        // A host that sends only what the window allows.
        let waiting = world.forwarder.connections[&1].unsent.len();
        assert!(waiting <= WINDOW && taken <= WINDOW as u64);
        world.tell(1, HostEvent::Bytes(vec![0; (WINDOW - waiting).min(READ_BYTES)]));
        world.step();
    }
    assert_eq!(world.step(), 0, "a full socket keeps process 1 busy");
    // A host that sends more loses the connection.
    world.tell(1, HostEvent::Bytes(vec![0; WINDOW]));
    assert_eq!(world.sent.last(), Some(&(1, AgentEvent::Closed)));
    drop(client);
}

#[test]
fn many_connections_are_bounded_in_number_and_rate() {
    let mut world = World::new();
    let mut clients = Vec::new();
    for _ in 0..ACCEPTS + 40 {
        clients.push(world.connect());
        world.step();
    }
    let opened =
        |world: &World| world.sent.iter().filter(|(_, event)| *event == AgentEvent::Opened).count();
    assert_eq!(opened(&world), MAX_CONNECTIONS);
    assert_eq!(world.forwarder.connections.len(), MAX_CONNECTIONS);
    // The refused ones are at their end.
    let last = clients.get_mut(MAX_CONNECTIONS).unwrap();
    assert_eq!(last.read(&mut [0; 1]).unwrap_or(0), 0);
    let now = Instant::now();
    if now < world.forwarder.accepted.0 + ACCEPT_INTERVAL {
        assert!(world.forwarder.accepted.1 <= ACCEPTS);
    }
    drop(clients);
    world.settle();
    let ended = world.sent.iter().filter(|(_, event)| *event == AgentEvent::Ended).count();
    assert_eq!(ended, MAX_CONNECTIONS);
}

#[test]
fn a_reset_ends_the_connection() {
    let mut world = World::new();
    let mut client = world.connect();
    world.settle();
    world.tell(1, HostEvent::Bytes(b"unread".to_vec()));
    // Closing a socket with unread bytes resets the connection.
    client.write_all(b"x").unwrap();
    drop(client);
    world.settle();
    world.tell(1, HostEvent::Bytes(b"more".to_vec()));
    world.settle();
    assert_eq!(world.sent.last(), Some(&(1, AgentEvent::Closed)));
    assert!(world.forwarder.connections.is_empty());
}

#[test]
fn a_closed_connection_lingers_for_a_while_and_discards_what_arrives() {
    let mut world = World::new();
    let mut client = world.connect();
    world.settle();
    world.tell(1, HostEvent::Bytes(b"answer".to_vec()));
    world.tell(1, HostEvent::Closed);
    client.write_all(&[0; 4096]).unwrap();
    world.settle();
    assert_eq!(world.bytes(1), 0);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
    assert_eq!(world.forwarder.connections.len(), 1);
    let until = world.forwarder.next_check(Instant::now()).unwrap();
    while !world.forwarder.connections.is_empty() {
        world.step();
        assert!(Instant::now() < until + 60 * LINGER);
    }
    assert!(Instant::now() >= until);
}

#[test]
fn the_port_is_free_at_once_after_its_connections() {
    let mut world = World::new();
    let client = world.connect();
    world.settle();
    let port = world.address.port();
    // Closed by this side first, so that its socket waits in TIME_WAIT.
    drop(world.forwarder);
    drop(client);
    let again = Forwarder::bind(port).unwrap();
    assert!(Forwarder::bind(port).is_err());
    drop(again);
    assert!(TcpStream::connect(world.address).is_err());
}
