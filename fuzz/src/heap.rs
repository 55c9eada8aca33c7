//! A limit on the memory that one run may use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

/// Memory that a run may use beyond its cap, in bytes.
const SLACK: isize = 1 << 20;

static HELD: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

fn count(change: isize) {
    let held = HELD.fetch_add(change, Relaxed) + change;
    PEAK.fetch_max(held, Relaxed);
}

// SAFETY: forwards every call to the system allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size.cast_signed() - layout.size().cast_signed());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Runs `work`. Panics if it held more than `cap` bytes and 1 MiB at any moment.
pub fn bounded<T>(cap: usize, work: impl FnOnce() -> T) -> T {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let peak = PEAK.load(Relaxed) - before;
    assert!(peak <= cap.cast_signed() + SLACK, "held {peak} bytes where {cap} and 1 MiB are allowed");
    result
}
