//! Frames between host and supervisor, in both directions: they are split the same however the bytes
//! arrive, every decoded message is encoded to the same bytes, and memory is bounded by what arrived.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_supervisor::FreeSpace;
use orchestrate_supervisor::protocol::{
    AgentEvent, CommandEnd, CommandReport, ExecRequest, Frame, FrameBuffer, HostEvent, Refusal,
    Reply, Request, TreeEnd, is_safe_path,
};

#[derive(Debug, Arbitrary)]
struct Input {
    frames: Vec<(u8, u64, String, Vec<u8>)>,
    changes: Vec<Change>,
    /// Sizes of the pieces in which the bytes arrive.
    pieces: Vec<u8>,
}

/// An encoded message of one of the kinds.
fn message(kind: u8, id: u64, text: &str, data: &[u8]) -> Vec<u8> {
    let (text, data) = (text.to_owned(), data.to_vec());
    let free = FreeSpace { bytes: id, files: id ^ 7 };
    let reply = match kind % 25 {
        0 => {
            let exec = ExecRequest {
                argv: vec![text.clone(), "-c".to_owned()],
                env: vec![(text.clone(), text)],
                timeout_ms: id,
                keep: 9,
                max_output: id >> 3,
                forward_port: u16::from(kind),
            };
            return Request::Exec(exec).encode(id).expect("short");
        }
        1 => return Request::Ping.encode(id).expect("short"),
        2 => {
            let write = Request::Write { path: text, mode: 0o644, first: id % 2 == 0, data };
            return write.encode(id).expect("short");
        }
        3 => return Request::WriteEnd.encode(id).expect("short"),
        4 => return Request::ReadTree { cap: id }.encode(id).expect("short"),
        5 => return Request::Reset.encode(id).expect("short"),
        6 => return Request::Deadline { millis: id }.encode(id).expect("short"),
        7 => Reply::Hello { version: 1, free },
        8 => Reply::DiskFull(free),
        9 => Reply::Output { tail: id % 2 == 0, data },
        10 | 11 => Reply::Done(CommandReport {
            end: if kind % 2 == 0 { CommandEnd::TimedOut } else { CommandEnd::Code(-1) },
            total_bytes: id,
            oom_kills: 1,
            elapsed_us: id,
        }),
        12 => Reply::Ack(Ok(())),
        13 => Reply::Ack(Err(Refusal(text))),
        14 => Reply::TreeFile { path: text, mode: 0o755, size: id },
        15 => Reply::TreeData { data },
        16 => Reply::TreeEnd(TreeEnd::Complete { files: id }),
        17 => Reply::TreeEnd(TreeEnd::TooLarge(text)),
        18 => return Request::Stop.encode(id).expect("short"),
        19 => {
            let event = if id % 2 == 0 { HostEvent::Bytes(data) } else { HostEvent::Taken(id) };
            return Request::Connection { number: id, event }.encode(id).expect("short");
        }
        20 => Reply::Connection { number: id, event: AgentEvent::Opened },
        21 => Reply::Connection { number: id, event: AgentEvent::Bytes(data) },
        22 => Reply::Connection { number: id, event: AgentEvent::Taken(id) },
        23 => Reply::Connection { number: id, event: AgentEvent::Ended },
        _ => Reply::TreeEnd(TreeEnd::Failed(text)),
    };
    reply.encode(id).expect("short")
}

/// The frames of a stream that arrives in pieces, and whether it ended with an error.
fn split(stream: &[u8], sizes: &mut dyn Iterator<Item = usize>) -> (Vec<Frame>, bool) {
    let mut buffer = FrameBuffer::default();
    let (mut frames, mut rest) = (Vec::new(), stream);
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(sizes.next().unwrap_or(rest.len()).clamp(1, rest.len()));
        rest = after;
        buffer.push(piece);
        loop {
            match buffer.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(_) => return (frames, true),
            }
        }
    }
    (frames, false)
}

fuzz_target!(|input: Input| {
    let mut stream = Vec::new();
    for (kind, id, text, data) in input.frames.iter().take(8) {
        stream.extend(message(*kind, *id, text, data));
    }
    input::change(&mut stream, &input.changes);
    let (whole, failed) = bounded(8 * stream.len(), || split(&stream, &mut std::iter::empty()));
    let mut sizes = input.pieces.iter().map(|&size| usize::from(size));
    assert_eq!(split(&stream, &mut sizes), (whole.clone(), failed));
    for frame in &whole {
        // A text of one byte takes nine in a frame, but a `String` of at least 24 and its heap.
        let cap = 16 * frame.payload.len();
        let request = bounded(cap, || Request::decode(frame.kind, &frame.payload));
        let reply = bounded(cap, || Reply::decode(frame.kind, &frame.payload));
        assert!(request.is_err() || reply.is_err(), "one kind has two meanings");
        if let Ok(request) = request {
            let again = request.encode(frame.id).expect("it was a frame");
            assert!(again.ends_with(&frame.payload), "{request:?}");
        }
        if let Ok(reply) = reply {
            let again = reply.encode(frame.id).expect("it was a frame");
            let decoded = split(&again, &mut std::iter::empty()).0;
            let same = Reply::decode(decoded[0].kind, &decoded[0].payload);
            assert_eq!(same.as_ref(), Ok(&reply));
            if let Reply::TreeFile { path, .. } = &reply
                && is_safe_path(path)
            {
                let path = std::path::Path::new(path);
                let normal = |part| matches!(part, std::path::Component::Normal(_));
                assert!(path.components().all(normal), "{path:?} leaves its folder");
            }
        }
    }
});
