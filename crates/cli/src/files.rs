//! Files that are written as a whole.

use camino::Utf8Path;
use orchestrate_coordinator::RunError;
use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

/// Writes a file atomically, and creates missing parent folders. A link is followed; a device or a
/// pipe is written to, not replaced.
pub(crate) fn write_whole(path: &Utf8Path, text: &str) -> Result<(), RunError> {
    let write = || {
        let target = path.canonicalize_utf8().unwrap_or_else(|_| path.to_owned());
        if target.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            return fs_err::write(&target, text);
        }
        let folder = target.parent().unwrap_or(&target);
        fs_err::create_dir_all(folder)?;
        // Removed on an error.
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&target).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|source| RunError::File { path: path.to_owned(), source })
}
