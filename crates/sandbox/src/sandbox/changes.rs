//! Marking a tree, listing what changed since, and reading named files.

use super::DockerSandbox;
use crate::api::{ChangedFile, FileEntry, TreeChanges, TreeMark};
use crate::error::{SandboxError, SandboxErrorKind};
use orchestrate_supervisor::protocol::{
    ChangedItem, Refusal, Reply, Request, TreeEnd, is_safe_path,
};
use orchestrate_types::ByteSize;

/// Bytes of paths in one request, well below the largest frame.
const PATH_BYTES: usize = 256 * 1024;
/// Bytes of paths in one list of changes.
const MAX_LISTED_BYTES: usize = 16 << 20;

impl DockerSandbox {
    /// Marks the tree, and returns the files that `mark` asks for.
    pub(super) async fn mark(&mut self, mark: &TreeMark) -> Result<Vec<FileEntry>, SandboxError> {
        let TreeMark { skip, send, cap } = mark.clone();
        let id = self.link.send(&Request::MarkTree { skip, send, cap: cap.0 }).await?;
        self.receive_files("mark_tree", id, cap).await
    }

    /// Reads the regular files among `paths`, in several requests if the paths need more than one
    /// frame.
    pub(super) async fn read_named(
        &mut self,
        paths: &[String],
        cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError> {
        if let Some(bad) = paths.iter().find(|path| !is_safe_path(path)) {
            let refusal = Refusal(format!("`{bad}` is not a plain relative path"));
            return Err(self.refused("read_files", refusal));
        }
        let (mut files, mut left) = (Vec::new(), cap.0);
        let mut rest = paths;
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest.iter().take_while(|path| {
                bytes += path.len() + 8;
                bytes <= PATH_BYTES
            });
            let (part, later) = rest.split_at(count.count().max(1).min(rest.len()));
            rest = later;
            let part = part.to_vec();
            let id = self.link.send(&Request::ReadFiles { paths: part, cap: left }).await?;
            let read = self.receive_files("read_files", id, ByteSize(left)).await?;
            left -= read.iter().map(|file| file.content.len() as u64).sum::<u64>().min(left);
            files.extend(read);
        }
        Ok(files)
    }

    /// Lists what changed since the mark.
    pub(super) async fn changes(&mut self) -> Result<TreeChanges, SandboxError> {
        let id = self.link.send(&Request::ListChanges).await?;
        self.receive_changes("list_changes", id).await
    }

    /// Marks the file system.
    pub(super) async fn mark_all(&mut self, skip: &[String]) -> Result<(), SandboxError> {
        let id = self.link.send(&Request::MarkSystem { skip: skip.to_vec() }).await?;
        self.receive_changes("mark_system", id).await.map(|_| ())
    }

    /// Lists what changed in the file system since the mark.
    pub(super) async fn system_changes(&mut self) -> Result<TreeChanges, SandboxError> {
        let id = self.link.send(&Request::ListSystem).await?;
        self.receive_changes("list_system_changes", id).await
    }

    /// Receives changes, then the end.
    async fn receive_changes(
        &mut self,
        call: &'static str,
        id: u64,
    ) -> Result<TreeChanges, SandboxError> {
        let (mut changes, mut bytes) = (TreeChanges::default(), 0);
        loop {
            let item = match self.link.receive().await? {
                (from, Reply::TreeItem(item)) if from == id => item,
                (from, Reply::TreeEnd(end)) if from == id => {
                    return match end {
                        TreeEnd::Complete { .. } => Ok(changes),
                        TreeEnd::TooLarge(what) => Err(self.too_large(what)),
                        TreeEnd::Failed(why) => Err(self.refused(call, Refusal(why))),
                    };
                }
                (_, other) => {
                    return Err(self
                        .link
                        .protocol_error(format!("expected a change, got {other:?}")));
                }
            };
            let (ChangedItem::Removed { path } | ChangedItem::Written { path, .. }) = &item;
            if !is_safe_path(path) {
                return Err(self.link.protocol_error(format!("invalid changed path `{path}`")));
            }
            bytes += path.len();
            if bytes > MAX_LISTED_BYTES {
                // The rest of the reply is not read, so the stream cannot be used any more.
                let cap = ByteSize(MAX_LISTED_BYTES as u64);
                let what = format!("the paths of its changed files take more than {cap}");
                return Err(self.error(SandboxErrorKind::Damaged { what }));
            }
            match item {
                ChangedItem::Removed { path } => changes.removed.push(path),
                ChangedItem::Written { path, mode, size, is_new, is_binary } => {
                    changes.written.push(ChangedFile { path, mode, size, is_new, is_binary });
                }
            }
        }
    }

    fn too_large(&self, what: String) -> SandboxError {
        let cap = ByteSize(MAX_LISTED_BYTES as u64);
        self.error(SandboxErrorKind::TooLarge { what, cap })
    }

    /// Receives files in the order in which they are sent, then the end.
    pub(super) async fn receive_files(
        &mut self,
        call: &'static str,
        id: u64,
        cap: ByteSize,
    ) -> Result<Vec<FileEntry>, SandboxError> {
        let mut files: Vec<FileEntry> = Vec::new();
        let (mut missing, mut total) = (0_u64, 0_u64);
        loop {
            match self.link.receive().await? {
                (from, Reply::TreeFile { path, mode, size }) if from == id && missing == 0 => {
                    total = total.saturating_add(size);
                    if !is_safe_path(&path) || total > cap.0 {
                        return Err(self.link.protocol_error(format!("invalid file `{path}`")));
                    }
                    missing = size;
                    files.push(FileEntry { path, mode, content: Vec::new() });
                }
                (from, Reply::TreeData { data }) if from == id => {
                    let (Some(left), Some(file)) =
                        (missing.checked_sub(data.len() as u64), files.last_mut())
                    else {
                        return Err(self.link.protocol_error("more content than announced"));
                    };
                    missing = left;
                    file.content.extend_from_slice(&data);
                }
                (from, Reply::TreeEnd(end)) if from == id => {
                    return match end {
                        TreeEnd::Complete { files: count }
                            if missing == 0 && count == files.len() as u64 =>
                        {
                            Ok(files)
                        }
                        TreeEnd::Complete { .. } => {
                            Err(self.link.protocol_error("a file is missing"))
                        }
                        TreeEnd::TooLarge(what) => {
                            Err(self.error(SandboxErrorKind::TooLarge { what, cap }))
                        }
                        TreeEnd::Failed(reason) => Err(self.refused(call, Refusal(reason))),
                    };
                }
                (_, other) => {
                    return Err(self
                        .link
                        .protocol_error(format!("expected a file, got {other:?}")));
                }
            }
        }
    }
}
