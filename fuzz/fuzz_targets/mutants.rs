//! Faults inserted into Python source: each changes the text, and only within its span. The same
//! source always gives the same faults.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_tasks::repair::mutants;

const PIECES: [&str; 40] = [
    "def f(a, b=1, *c, d: int = 2, **e):",
    "class C:",
    "if a < b and not c:",
    "elif a in b:",
    "else:",
    "for x in range(0, len(a) - 1):",
    "while True:",
    "return a + b[1:2]",
    "x = a * 2 // b",
    "x += 1",
    "break",
    "continue",
    "pass",
    "yield x",
    "lambda y: y <= 0",
    "f(a, b)",
    "x = [i for i in a if i]",
    "try:",
    "except E as e:",
    "finally:",
    "with a as b:",
    "async def g(self):",
    "await f(1)",
    "return not a is None",
    "'''text",
    "'''",
    "f\"{a!r:>{b}}\"",
    "# note",
    "@decorated",
    "global x",
    "match a:",
    "case [1, *_]:",
    "\\",
    "(",
    ")",
    "\t",
    "\r",
    "é = 'ü' + \"\u{1f600}\"",
    "del x",
    "\0",
];

#[derive(Debug, Arbitrary)]
struct Input {
    /// Pieces of lines: index and indentation. If the high bit of the latter is set, the piece
    /// continues the line.
    pieces: Vec<(u8, u8)>,
    changes: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let mut text = Vec::new();
    for (piece, depth) in &input.pieces {
        if depth & 0x80 == 0 {
            text.push(b'\n');
            text.extend(std::iter::repeat_n(b' ', usize::from(depth % 6) * 4));
        }
        text.extend(PIECES[usize::from(*piece) % PIECES.len()].as_bytes());
    }
    input::change(&mut text, &input.changes);
    let source = String::from_utf8_lossy(&text);
    let found = mutants(&source);
    for mutant in &found {
        let changed = mutant.apply(&source).expect("the fault was found in this text");
        assert!(changed != source, "the text is unchanged: {mutant:?}");
        assert!(changed.starts_with(&source[..mutant.span.start]));
        assert!(changed.ends_with(&source[mutant.span.end..]));
        assert!(!mutant.function.is_empty());
        let line = source[..mutant.span.start].matches('\n').count();
        assert_eq!(mutant.line, line, "{mutant:?}");
    }
    assert_eq!(found, mutants(&source));
});
