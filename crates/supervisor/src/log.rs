//! Messages on stderr. The host reads them to explain why a container ended.

use std::io::Write as _;

pub(crate) fn line(text: &str) {
    // A failed write is ignored: the stream may be closed, and there is nowhere else to report it.
    let _ = writeln!(std::io::stderr(), "supervisor: {text}");
}
