//! The program's allocator: jemalloc, with the options of [`orchestrate_cli::process`].
#![expect(unsafe_code, reason = "jemalloc reads its options from an exported symbol")]

/// Read by jemalloc when the program starts.
// SAFETY: no other item has this name, and its first word points to a zero-terminated string.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: &[u8] = orchestrate_cli::process::JEMALLOC_OPTIONS;

#[global_allocator]
static HEAP: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
