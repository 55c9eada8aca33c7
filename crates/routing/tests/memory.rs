//! Memory used to decode one reply: its rows once, and nothing proportional to its text.
#![expect(unsafe_code, reason = "an allocator that counts")]

use orchestrate_routing::{RoutedRows, WireForm, decode, encode_npy, encode_sglang, split_body};
use orchestrate_types::ModelShape;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

fn grew(bytes: usize) {
    let held = HELD.get().wrapping_add(bytes);
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call is forwarded unchanged to the system allocator; the counters are thread-local
// and need no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        grew(new_size);
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Peak of the bytes that `work` allocates on top of those held before.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get() - before)
}

fn body(payload: &str) -> Vec<u8> {
    format!(r#"{{"text":"x","meta_info":{{"id":"1","routed_experts":"{payload}","n":2}}}}"#)
        .into_bytes()
}

#[test]
fn a_reply_is_decoded_with_one_copy_of_its_rows_and_none_of_its_text() {
    let layers: Vec<usize> = (0..48).collect();
    let shape = ModelShape {
        hidden_layers: 48,
        moe_layers: layers,
        experts: 128,
        top_k: 8,
        vocab: 1,
        context: 4096,
    };
    let rows = 2000;
    let ids: Vec<u16> = (0..rows * shape.ids_per_row())
        .map(|at| u16::try_from((at + at / 384 * 5) % 128).unwrap())
        .collect();
    let made = RoutedRows::from_ids(&shape, 0, &ids).unwrap();
    let stored = rows * shape.row_bytes();
    // The last block has capacity for its other rows; working memory fits the L1 cache.
    let allowed = stored + 64 * shape.row_bytes() + (64 << 10);
    for (form, payload) in [
        (WireForm::SglangI32, encode_sglang(&made, &shape).unwrap()),
        (WireForm::VllmNpy, encode_npy(&made, &shape).unwrap()),
    ] {
        let body = body(&payload);
        let (found, peak) = peak_of(|| {
            let split = split_body(&body).unwrap();
            decode(form, &body[split.payloads[0].clone()], &shape, 0, rows + 1).unwrap()
        });
        assert_eq!(found, made);
        assert!(peak <= allowed, "{form:?}: {peak} bytes for {stored} of rows");
        // Of a whole sequence, only the requested rows are ever in memory.
        let (tail, peak) =
            peak_of(|| decode(form, payload.as_bytes(), &shape, rows - 10, rows + 1).unwrap());
        assert_eq!(tail.rows(), 10);
        assert!(peak <= 64 * shape.row_bytes() + (64 << 10), "{form:?}: {peak} for ten rows");
    }
}
