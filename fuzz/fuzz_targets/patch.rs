//! Unified diffs: the difference of two trees turns one into the other; any other text gives a tree whose
//! paths stay inside it, or an error; a parsed patch reads the same after it was written again.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::TaskFile;
use orchestrate_tasks::patch::{apply, diff, parse};

const LINES: [&str; 12] = [
    "a\n",
    "b\n",
    "\n",
    "+x\n",
    "-y\n",
    "@@ -1 +1 @@\n",
    "--- a/f\n",
    "diff --git a/f b/f\n",
    "é\r\n",
    "\\ No newline at end of file\n",
    "last",
    "\u{85}z\n",
];
const PATHS: [&str; 8] = ["f", "a/b.py", "a b", "q\"uote", "tab\there", "é", "new\nline", "a/b/c"];

#[derive(Debug, Arbitrary)]
struct Input {
    old: Vec<(u8, Vec<u8>)>,
    new: Vec<(u8, Vec<u8>)>,
    changes: Vec<Change>,
}

fn tree(files: &[(u8, Vec<u8>)]) -> Vec<TaskFile> {
    let mut tree = std::collections::BTreeMap::new();
    for (path, lines) in files.iter().take(4) {
        let path = PATHS[usize::from(*path) % PATHS.len()];
        let lines = lines.iter().take(32).map(|&line| LINES[usize::from(line) % LINES.len()]);
        tree.insert(path.to_owned(), lines.collect::<String>());
    }
    tree.into_iter().map(|(path, content)| TaskFile { path, content }).collect()
}

fuzz_target!(|input: Input| {
    let (old, new) = (tree(&input.old), tree(&input.new));
    let made = diff(&old, &new);
    assert_eq!(apply(&old, &made).expect("a patch of this tree"), new, "{made}");

    let mut bytes = made.into_bytes();
    input::change(&mut bytes, &input.changes);
    let text = String::from_utf8_lossy(&bytes);
    // A line of one byte becomes a `String` in a `HunkLine`.
    let parsed = bounded(128 * text.len(), || parse(&text));
    if let Ok(files) = parsed {
        let again: String = files.iter().map(ToString::to_string).collect();
        let named = files.iter().all(|file| !file.path().contains('\r') && !file.path().is_empty());
        if named && files.iter().all(|file| !file.hunks.is_empty()) {
            let _ = parse(&again);
        }
    }
    if let Ok(files) = apply(&old, &text) {
        for file in files {
            let inside = file.path.split('/').all(|part| !matches!(part, "" | "." | ".."));
            assert!(inside && !file.path.contains('\0'), "{:?}", file.path);
        }
    }
});
