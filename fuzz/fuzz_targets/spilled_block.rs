//! Blocks of the prefix cache in files: a changed file is a miss, and so is one with a recomputed
//! checksum whose content is not a block. Memory use is bounded by one block.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, Model};
use orchestrate_fuzz::naive;
use orchestrate_routing::{
    BLOCK_ROWS, Block, CacheOptions, MaskBuilder, PrefixCache, PrefixChain, RoutedRows,
};
use orchestrate_types::PolicyVersion;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

#[derive(Debug, Arbitrary)]
struct Input {
    model: Model,
    seed: u32,
    /// Number of rows after which the rows repeat; 0 for never. Repeated rows compress, others are
    /// stored uncompressed.
    period: u8,
    changes: Vec<Change>,
    seal: bool,
}

const V: PolicyVersion = PolicyVersion(1);
const ROWS: usize = BLOCK_ROWS;

/// A folder in memory, one per process.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER
        .get_or_init(|| PathBuf::from(format!("/dev/shm/orchestrate-spill-{}", std::process::id())))
}

fuzz_target!(|input: Input| {
    let shape = input.model.shape();
    if !naive::usable(&shape) {
        return;
    }
    let stored = input::rows(&shape, ROWS, input.seed, usize::from(input.period));
    let Ok(rows) = RoutedRows::new(&shape, 0, &stored) else { return };
    let shape = Arc::new(shape);
    let spill = Some((folder().to_owned(), 1 << 20));
    let cache = PrefixCache::open(CacheOptions { bytes: stored.len() as u64, spill })
        .expect("/dev/shm is writable");
    let insert = |first: u32| {
        let mut builder = MaskBuilder::new(Arc::clone(&shape)).expect("a valid shape");
        builder.push(rows.clone(), ROWS + 1, V).expect("rows from the first on");
        let mut chain = PrefixChain::new(&shape, "m", V, "w");
        chain.extend_to(&(first..first + ROWS as u32).collect::<Vec<_>>());
        cache.insert(&mut chain, &mut builder);
        chain
    };
    // Used twice, then evicted by another block.
    let chain = insert(0);
    insert(0);
    insert(1);
    assert_eq!(cache.metrics().spills, 1);

    let entry = std::fs::read_dir(folder()).expect("a folder").next().expect("one file");
    let path = entry.expect("its entry").path();
    let whole = std::fs::read(&path).expect("it was written");
    let mut bytes = whole.clone();
    input::change(&mut bytes, &input.changes);
    if input.seal {
        let changed = bytes != whole;
        seal(&mut bytes, &path);
        assert!(changed || bytes == whole, "this target computes another checksum than the cache");
    }
    std::fs::write(&path, &bytes).expect("write");
    let found = bounded(4 * stored.len() + 2 * bytes.len(), || cache.lookup(&chain));
    let metrics = cache.metrics();
    match found.as_slice() {
        [] => {
            assert!(bytes != whole, "a valid block was rejected");
            assert_eq!((metrics.spill_failures, path.exists()), (1, false));
        }
        [block] => {
            assert!(input.seal || bytes == whole, "changed bytes were accepted");
            assert_eq!(block.bytes().len(), stored.len());
            assert!(bytes != whole || Block::bytes(block) == stored);
            assert_eq!((metrics.spill_failures, metrics.reloads), (0, 1));
        }
        _ => panic!("more blocks than were inserted"),
    }
});

/// Recomputes the checksum: it covers header and key (the file's name) and the frame.
fn seal(bytes: &mut [u8], path: &Path) {
    let name = path.file_stem().and_then(|name| name.to_str()).expect("a key in hexadecimal");
    let key = (0..name.len()).step_by(2).map(|at| u8::from_str_radix(&name[at..at + 2], 16));
    let key: Vec<u8> = key.collect::<Result<_, _>>().expect("a key in hexadecimal");
    let Some(at) = bytes.len().checked_sub(16).filter(|&at| at >= 8) else { return };
    let context = [&b"ORMB\x01\0\0\0"[..], &key].concat();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(context.len() as u64).to_le_bytes()).update(&context).update(&bytes[8..at]);
    let mut sum = [0; 16];
    hasher.finalize_xof().fill(&mut sum);
    bytes[at..].copy_from_slice(&sum);
}
