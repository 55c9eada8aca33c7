//! Replacing a whole file.

use crate::SinkError;
use camino::{Utf8Path, Utf8PathBuf};
use fs_err::File;
use std::io::Write as _;

/// Writes `bytes` under a temporary name next to `path`, syncs and renames: readers see the old file
/// or the new one.
pub(crate) fn replace(path: &Utf8Path, bytes: &[u8]) -> Result<(), SinkError> {
    let temporary = Utf8PathBuf::from(format!("{path}.tmp"));
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs_err::rename(&temporary, path)
    };
    write().map_err(SinkError::file(path))
}
