use super::*;
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,40}"
}

fn request() -> impl Strategy<Value = Request> {
    let exec = (
        proptest::collection::vec(text(), 0..4),
        proptest::collection::vec((text(), text()), 0..3),
        any::<[u64; 3]>(),
        any::<u16>(),
    );
    let event = prop_oneof![
        any::<Vec<u8>>().prop_map(HostEvent::Bytes),
        any::<u64>().prop_map(HostEvent::Taken),
        Just(HostEvent::Closed),
    ];
    prop_oneof![
        exec.prop_map(|(argv, env, [timeout_ms, keep, max_output], forward_port)| {
            Request::Exec(ExecRequest { argv, env, timeout_ms, keep, max_output, forward_port })
        }),
        Just(Request::Ping),
        (text(), any::<u32>(), any::<bool>(), any::<Vec<u8>>())
            .prop_map(|(path, mode, first, data)| Request::Write { path, mode, first, data }),
        Just(Request::WriteEnd),
        any::<u64>().prop_map(|cap| Request::ReadTree { cap }),
        (proptest::collection::vec(text(), 0..4), text(), any::<u64>())
            .prop_map(|(skip, send, cap)| Request::MarkTree { skip, send, cap }),
        Just(Request::ListChanges),
        Just(Request::DiskUse),
        proptest::collection::vec(text(), 0..4).prop_map(|skip| Request::MarkSystem { skip }),
        Just(Request::ListSystem),
        (proptest::collection::vec(text(), 0..4), any::<u64>())
            .prop_map(|(paths, cap)| Request::ReadFiles { paths, cap }),
        Just(Request::Reset),
        any::<u64>().prop_map(|millis| Request::Deadline { millis }),
        (any::<u64>(), event).prop_map(|(number, event)| Request::Connection { number, event }),
        Just(Request::Stop),
        text().prop_map(|path| Request::Root { path }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let end = prop_oneof![
        any::<i32>().prop_map(CommandEnd::Code),
        any::<i32>().prop_map(CommandEnd::Signal),
        Just(CommandEnd::TimedOut),
        Just(CommandEnd::NotStarted),
        Just(CommandEnd::Flooded),
        Just(CommandEnd::Abandoned),
        Just(CommandEnd::Stopped),
    ];
    let event = prop_oneof![
        Just(AgentEvent::Opened),
        any::<Vec<u8>>().prop_map(AgentEvent::Bytes),
        any::<u64>().prop_map(AgentEvent::Taken),
        Just(AgentEvent::Ended),
        Just(AgentEvent::Closed),
    ];
    prop_oneof![
        (any::<u32>(), any::<[u64; 2]>()).prop_map(|(version, [bytes, files])| Reply::Hello {
            version,
            free: FreeSpace { bytes, files }
        }),
        any::<[u64; 2]>().prop_map(|[bytes, files]| Reply::DiskFull(FreeSpace { bytes, files })),
        any::<[u64; 2]>().prop_map(|[bytes, files]| Reply::DiskUse(DiskUse { bytes, files })),
        (any::<bool>(), any::<Vec<u8>>()).prop_map(|(tail, data)| Reply::Output { tail, data }),
        (end, any::<u64>(), any::<u32>(), any::<u64>()).prop_map(
            |(end, total_bytes, oom_kills, elapsed_us)| Reply::Done(CommandReport {
                end,
                total_bytes,
                oom_kills,
                elapsed_us
            })
        ),
        Just(Reply::Ack(Ok(()))),
        text().prop_map(|reason| Reply::Ack(Err(Refusal(reason)))),
        text().prop_map(Reply::Damaged),
        (text(), any::<u32>(), any::<u64>()).prop_map(|(path, mode, size)| Reply::TreeFile {
            path,
            mode,
            size
        }),
        any::<Vec<u8>>().prop_map(|data| Reply::TreeData { data }),
        text().prop_map(|path| Reply::TreeItem(ChangedItem::Removed { path })),
        (text(), any::<u32>(), any::<u64>(), any::<[bool; 2]>()).prop_map(
            |(path, mode, size, [is_new, is_binary])| Reply::TreeItem(ChangedItem::Written {
                path,
                mode,
                size,
                is_new,
                is_binary
            })
        ),
        any::<u64>().prop_map(|files| Reply::TreeEnd(TreeEnd::Complete { files })),
        text().prop_map(|path| Reply::TreeEnd(TreeEnd::TooLarge(path))),
        text().prop_map(|reason| Reply::TreeEnd(TreeEnd::Failed(reason))),
        (any::<u64>(), event).prop_map(|(number, event)| Reply::Connection { number, event }),
    ]
}

proptest! {
    #[test]
    fn prop_requests_decode_to_what_was_encoded(requests in proptest::collection::vec(request(), 1..5), cut in 1_usize..50) {
        let mut stream = Vec::new();
        for (id, request) in (0..).zip(&requests) {
            stream.extend(request.encode(id).unwrap());
        }
        let (mut frames, mut seen) = (FrameBuffer::default(), Vec::new());
        for piece in stream.chunks(cut) {
            frames.push(piece);
            while let Some(frame) = frames.next_frame().unwrap() {
                assert_eq!(frame.id, seen.len() as u64);
                seen.push(Request::decode(frame.kind, &frame.payload).unwrap());
            }
        }
        assert_eq!(seen, requests);
    }

    #[test]
    fn prop_replies_decode_to_what_was_encoded(reply in reply()) {
        let mut frames = FrameBuffer::default();
        frames.push(&reply.encode(7).unwrap());
        let frame = frames.next_frame().unwrap().unwrap();
        assert_eq!(Reply::decode(frame.kind, &frame.payload).unwrap(), reply);
    }

    #[test]
    fn prop_decoding_arbitrary_bytes_never_panics(kind: u8, payload: Vec<u8>, stream: Vec<u8>) {
        let _ = Request::decode(kind, &payload);
        let _ = Reply::decode(kind, &payload);
        let mut frames = FrameBuffer::default();
        frames.push(&stream);
        while let Ok(Some(_)) = frames.next_frame() {}
    }
}

#[test]
fn frames_longer_than_the_limit_are_rejected_by_their_header() {
    let mut frames = FrameBuffer::default();
    frames.push(&[0xff; 13]);
    assert_eq!(frames.next_frame(), Err(ProtocolError::TooLong(u32::MAX as usize)));
    let big = Request::Write { path: "a".into(), mode: 0, first: true, data: vec![0; MAX_FRAME] };
    assert!(matches!(big.encode(1), Err(ProtocolError::TooLong(_))));
}

#[test]
fn trailing_bytes_and_unknown_kinds_are_rejected() {
    assert_eq!(Request::decode(2, &[0]), Err(ProtocolError::Malformed(2)));
    assert_eq!(Reply::decode(65, &[2]), Err(ProtocolError::Malformed(65)));
    assert_eq!(Request::decode(99, &[]), Err(ProtocolError::UnknownKind(99)));
    // A connection's number without an event, and an unknown event.
    assert_eq!(Request::decode(14, &[0; 8]), Err(ProtocolError::Malformed(14)));
    assert_eq!(Reply::decode(75, &[9; 9]), Err(ProtocolError::Malformed(75)));
}

#[test]
fn only_plain_relative_paths_are_safe() {
    for good in ["a", "a/b.py", "..a/b..", "ä/ö"] {
        assert!(is_safe_path(good), "{good}");
    }
    for bad in ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0b"] {
        assert!(!is_safe_path(bad), "{bad}");
    }
    assert!(!is_safe_path(&"x".repeat(300)));
}
