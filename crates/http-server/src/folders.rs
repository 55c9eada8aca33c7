//! Which folders a request may name.

use camino::{Utf8Path, Utf8PathBuf};

/// The folders below which a request may name files and folders.
///
/// A path outside of them is refused without touching the disk, so that replies do not tell whether
/// it exists. Symbolic links may point anywhere below these folders, and not out of them.
#[derive(Debug, Clone, Default)]
pub struct AllowedFolders {
    /// Absolute paths; `None` allows every path.
    roots: Option<Vec<Utf8PathBuf>>,
}

/// A path is not allowed, or there is nothing at an allowed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not below a folder that this server may read from, or is missing there")]
pub struct NotAllowed;

impl AllowedFolders {
    /// Allows every path.
    pub fn any() -> Self {
        Self { roots: None }
    }

    /// Allows what is below these folders, and the folders themselves. A folder may be created
    /// later; a relative one is one below the current folder.
    pub fn below(roots: impl IntoIterator<Item = Utf8PathBuf>) -> Self {
        Self { roots: Some(roots.into_iter().filter_map(|root| absolute(&root)).collect()) }
    }

    /// The real path of a file. Blocking.
    ///
    /// # Errors
    /// [`NotAllowed`] if it is outside, or missing.
    pub fn file(&self, path: &Utf8Path) -> Result<Utf8PathBuf, NotAllowed> {
        let Some(roots) = &self.roots else {
            return path.canonicalize_utf8().map_err(|_| NotAllowed);
        };
        let path = absolute(path).ok_or(NotAllowed)?;
        if path.components().any(|part| part.as_str() == "..") {
            return Err(NotAllowed);
        }
        let real: Vec<Utf8PathBuf> =
            roots.iter().filter_map(|root| root.canonicalize_utf8().ok()).collect();
        if !roots.iter().chain(&real).any(|root| path.starts_with(root)) {
            return Err(NotAllowed);
        }
        let path = path.canonicalize_utf8().map_err(|_| NotAllowed)?;
        if real.iter().any(|root| path.starts_with(root)) { Ok(path) } else { Err(NotAllowed) }
    }

    /// The real path of a folder, none of whose entries is a link out of the allowed folders.
    /// Blocking.
    ///
    /// # Errors
    /// [`NotAllowed`] if it or an entry is outside, or missing.
    pub fn folder(&self, path: &Utf8Path) -> Result<Utf8PathBuf, NotAllowed> {
        let real = self.file(path)?;
        for entry in real.read_dir_utf8().map_err(|_| NotAllowed)? {
            self.file(entry.map_err(|_| NotAllowed)?.path())?;
        }
        Ok(real)
    }
}

/// The path from the root of the file system, without reading the disk.
fn absolute(path: &Utf8Path) -> Option<Utf8PathBuf> {
    Utf8PathBuf::from_path_buf(std::path::absolute(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_what_is_really_below_a_root_is_allowed() {
        let guard = tempfile::tempdir().unwrap();
        let base = Utf8PathBuf::from_path_buf(guard.path().canonicalize().unwrap()).unwrap();
        for folder in ["root/model", "root/linked", "outside/model", "root-2/model"] {
            fs_err::create_dir_all(base.join(folder)).unwrap();
            fs_err::write(base.join(folder).join("config.json"), "{}").unwrap();
        }
        fs_err::write(base.join("outside/model/secret"), "x").unwrap();
        symlink(base.join("outside/model"), base.join("root/out")).unwrap();
        symlink(base.join("root/model"), base.join("root/in")).unwrap();
        symlink(base.join("outside/model/secret"), base.join("root/linked/weights")).unwrap();
        symlink(base.join("root"), base.join("alias")).unwrap();
        let allowed = AllowedFolders::below([base.join("root"), base.join("later")]);
        assert_eq!(allowed.folder(&base.join("root/model")).unwrap(), base.join("root/model"));
        assert_eq!(allowed.folder(&base.join("root/in")).unwrap(), base.join("root/model"));
        for path in [
            "root/out",
            "root/linked",
            "root/missing",
            "root/../outside/model",
            "root-2/model",
            "outside/model",
            "outside/missing",
            "later/model",
        ] {
            assert_eq!(allowed.folder(&base.join(path)), Err(NotAllowed), "{path}");
        }
        fs_err::create_dir_all(base.join("later/model")).unwrap();
        assert!(allowed.folder(&base.join("later/model")).is_ok());
        // A root that is itself a link: both of its names are allowed.
        let aliased = AllowedFolders::below([base.join("alias")]);
        assert!(aliased.folder(&base.join("alias/model")).is_ok());
        assert!(aliased.folder(&base.join("root/model")).is_ok());
        assert!(AllowedFolders::any().folder(&base.join("outside/model")).is_ok());
        assert_eq!(AllowedFolders::below([]).folder(&base), Err(NotAllowed));
    }
}
