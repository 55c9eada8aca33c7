//! Files that are written as a whole.

use camino::Utf8Path;
use orchestrate_coordinator::RunError;
use orchestrate_rollout::replace_file;

/// The mode of files that may hold secrets: for their owner alone.
const OWN: u32 = 0o600;

/// Writes a file atomically, and creates missing parent folders. A link is followed; a device or a
/// pipe is written to, not replaced.
pub(crate) fn write_whole(path: &Utf8Path, text: &str) -> Result<(), RunError> {
    let write = || {
        let target = path.canonicalize_utf8().unwrap_or_else(|_| path.to_owned());
        if target.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            return fs_err::write(&target, text);
        }
        replace_file(&target, text.as_bytes(), OWN)
    };
    write().map_err(|source| RunError::File { path: path.to_owned(), source })
}
