//! A folder of this machine that is added to the images of agents.

use camino::Utf8Path;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempPath;

/// A folder's files as a tar archive, to be unpacked at `/` in an image.
///
/// The archive depends on paths, contents, links and permission bits alone, so that every machine and
/// every run of the same folder shares the images that have it.
#[derive(Debug, Clone)]
pub struct ImageLayer {
    archive: Arc<TempPath>,
    digest: String,
}

impl ImageLayer {
    /// Packs `folder`, which becomes `target`, an absolute path.
    ///
    /// # Errors
    /// If a file cannot be read, or the archive cannot be written to the folder for temporary files.
    pub fn of_folder(folder: &Utf8Path, target: &str) -> io::Result<Self> {
        let archive = tempfile::NamedTempFile::new()?;
        let mut builder = tar::Builder::new(archive.as_file());
        builder.follow_symlinks(false);
        builder.mode(tar::HeaderMode::Deterministic);
        // Sorted, because the order of a folder's entries differs between machines.
        let mut entries = Vec::new();
        collect(folder.as_std_path(), Path::new(""), &mut entries)?;
        entries.sort();
        let target = Path::new(target.trim_start_matches('/'));
        for entry in entries {
            builder
                .append_path_with_name(folder.as_std_path().join(&entry), target.join(&entry))?;
        }
        builder.finish()?;
        drop(builder);
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(archive.path())?)?;
        let mut digest = hasher.finalize().to_hex().to_string();
        digest.truncate(12);
        Ok(Self { archive: Arc::new(archive.into_temp_path()), digest })
    }

    /// Identifies the layer in the tags of images.
    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    /// The archive.
    pub(super) fn path(&self) -> &Path {
        &self.archive
    }
}

/// Paths below `root`, relative to it: all files, links and folders.
fn collect(root: &Path, below: &Path, entries: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        let is_folder = entry.file_type()?.is_dir();
        entries.push(path.clone());
        if is_folder {
            collect(root, &path, entries)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn a_folder_is_packed_the_same_wherever_it_lies() {
        let make = |name: &str| {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path().join(name);
            std::fs::create_dir_all(root.join("bin/deep")).unwrap();
            std::fs::write(root.join("bin/run"), "#!/bin/sh\n").unwrap();
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(root.join("bin/run"), mode).unwrap();
            symlink("run", root.join("bin/link")).unwrap();
            let layer =
                ImageLayer::of_folder(Utf8Path::from_path(&root).unwrap(), "/opt/agent").unwrap();
            (folder, root, layer)
        };
        let ((_a, root, first), (_b, _, second)) = (make("one"), make("two"));
        assert_eq!(first.digest(), second.digest());
        let mut archive = tar::Archive::new(File::open(first.path()).unwrap());
        let entries: Vec<(String, u32)> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let mode = entry.header().mode().unwrap();
                (entry.path().unwrap().display().to_string(), mode)
            })
            .collect();
        let names: Vec<&str> = entries.iter().map(|(name, _)| name.trim_end_matches('/')).collect();
        let expected = ["bin", "bin/deep", "bin/link", "bin/run"];
        assert_eq!(names, expected.map(|name| format!("opt/agent/{name}")));
        assert_eq!(entries[3].1, 0o755);
        std::fs::write(root.join("bin/run"), "#!/bin/bash\n").unwrap();
        let changed = ImageLayer::of_folder(Utf8Path::from_path(&root).unwrap(), "/opt/agent");
        assert_ne!(changed.unwrap().digest(), first.digest());
    }
}
