//! The program's allocator: jemalloc with the options of `orchestrate`, which can count the bytes held.
#![expect(
    unsafe_code,
    reason = "an allocator has an unsafe interface; this one only forwards calls"
)]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use tikv_jemallocator::Jemalloc;

/// Read by jemalloc when the program starts.
// SAFETY: no other item has this name, and its first word points to a zero-terminated string.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: &[u8] = orchestrate_cli::process::JEMALLOC_OPTIONS;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

static COUNTING: AtomicBool = AtomicBool::new(false);
/// Bytes allocated minus bytes freed since counting started; negative if older memory was freed.
static HELD: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

struct CountingHeap;

/// Effect of some work on the heap, in requested bytes (not pages).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HeapUse {
    /// Bytes held after the work, minus those held before.
    pub(crate) grown: isize,
    /// Peak of the bytes held during the work, minus those held before.
    pub(crate) peak: isize,
}

/// Counts the heap of the whole program until it is dropped. Only one at a time, and not together with
/// [`measure`].
#[derive(Debug)]
pub(crate) struct Counting {
    before: isize,
}

impl Counting {
    pub(crate) fn begin() -> Self {
        COUNTING.store(true, Relaxed);
        Self { before: HELD.load(Relaxed) }
    }

    /// Bytes held now, minus those held at the start.
    pub(crate) fn grown(&self) -> isize {
        HELD.load(Relaxed) - self.before
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        COUNTING.store(false, Relaxed);
    }
}

/// Does `work` and counts the heap of the whole program meanwhile; calls are serialised.
pub(crate) fn measure<T>(work: impl FnOnce() -> T) -> (T, HeapUse) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    HELD.store(0, Relaxed);
    PEAK.store(0, Relaxed);
    COUNTING.store(true, Relaxed);
    let result = work();
    COUNTING.store(false, Relaxed);
    (result, HeapUse { grown: HELD.load(Relaxed), peak: PEAK.load(Relaxed) })
}

#[inline]
fn count(taken: usize, given_back: usize) {
    // While nothing is measured, an allocation costs one load of an unshared byte.
    if COUNTING.load(Relaxed) {
        let change = taken.cast_signed().wrapping_sub(given_back.cast_signed());
        let held = HELD.fetch_add(change, Relaxed).wrapping_add(change);
        PEAK.fetch_max(held, Relaxed);
    }
}

// SAFETY: every call is forwarded to jemalloc with unchanged arguments, and its result is returned
// unchanged; counting only touches atomics and cannot allocate or unwind.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller upholds `alloc`'s contract.
        unsafe { Jemalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller upholds `alloc_zeroed`'s contract.
        unsafe { Jemalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the pointer came from jemalloc with this layout.
        unsafe { Jemalloc.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size, layout.size());
        // SAFETY: the pointer came from jemalloc with this layout.
        unsafe { Jemalloc.realloc(pointer, layout, new_size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_and_growth_are_measured_separately() {
        // Other tests of this process allocate, too, so the bounds have some slack.
        let (kept, heap) = measure(|| {
            drop(std::hint::black_box(vec![1u8; 64 << 20]));
            std::hint::black_box(vec![1u8; 16 << 20])
        });
        assert_eq!(kept.len(), 16 << 20);
        assert!((60 << 20..72 << 20).contains(&heap.peak), "{heap:?}");
        assert!((12 << 20..24 << 20).contains(&heap.grown), "{heap:?}");
    }
}
