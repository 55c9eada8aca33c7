//! Runs in folders that cannot be written to: an archive, another user's run, a read-only mount.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_store::{JOURNAL_FILE, NewRun, Reader, RunKind, Store};
use orchestrate_types::{GroupId, RunId};
use std::process::{Command, Output, Stdio};

/// A folder mounted read-only onto itself or, if mounting fails, without write permission; restored
/// when dropped. Permissions do not stop root, but root may mount.
struct ReadOnly<'a>(&'a Utf8Path);

impl<'a> ReadOnly<'a> {
    /// Makes a folder read-only; `None` if neither way works.
    fn make(folder: &'a Utf8Path) -> Option<Self> {
        let path = folder.as_str();
        let mounted = run("mount", &["--bind", path, path])
            && run("mount", &["-o", "remount,ro,bind", path, path]);
        if !mounted {
            assert!(run("chmod", &["-R", "a-w", path]));
        }
        let made = Self(folder);
        std::fs::write(folder.join("probe"), "").is_err().then_some(made)
    }
}

impl Drop for ReadOnly<'_> {
    fn drop(&mut self) {
        run("umount", &["-l", self.0.as_str()]);
        run("chmod", &["-R", "u+w", self.0.as_str()]);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    let status = Command::new(program).args(args).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn orchestrate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orchestrate")).args(args).output().unwrap()
}

fn files(folder: &Utf8Path) -> Vec<String> {
    let entries = folder.read_dir_utf8().unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_owned()).collect();
    names.sort();
    names
}

/// Closes a run's journal. Dropping a store leaves that to background threads: if two connections close at
/// the same moment, neither is the last one, and the write-ahead log stays.
async fn close(store: Store) {
    let closer = store.closer();
    drop(store);
    closer.close().await;
}

/// A run folder with a plan and a group of episodes; the store is still open.
async fn run_folder(folder: &Utf8Path) -> Store {
    let new = NewRun { run: RunId::generate(), plan_digest: "d".into(), kind: RunKind::Evaluation };
    let store = Store::create(folder, &new).await.unwrap();
    std::fs::write(folder.join("plan.toml"), "").unwrap();
    store.open_eval(0, orchestrate_types::PolicyVersion(0)).await.unwrap();
    store.open_group(GroupId::Eval { round: 0, index: 0 }, 0, "toy", 1).await.unwrap();
    store
}

fn opens_without_writing(folder: &Utf8Path) {
    let Some(_guard) = ReadOnly::make(folder) else {
        let _ = std::io::Write::write_all(
            &mut std::io::stderr(),
            b"skipped: read-only run folders (cannot mount, and permissions do not stop root)\n",
        );
        return;
    };
    let before = files(folder);
    for command in [&["show"][..], &["show", "--json"], &["analyze"], &["compare", "--runs"]] {
        let output = orchestrate(&[command, &[folder.as_str()]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {text}");
        if command == ["analyze"] {
            assert!(text.contains("read-only") && text.contains("--out"), "{text}");
        }
    }
    let shown = orchestrate(&["show", folder.as_str()]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("v00000-00000.00"), "{shown:?}");
    assert_eq!(files(folder), before, "something was written");
}

#[tokio::test]
async fn closed_run_in_a_read_only_folder_can_be_shown_analyzed_and_compared() {
    let temp = tempfile::tempdir().unwrap();
    let folder = Utf8PathBuf::from_path_buf(temp.path().join("run")).unwrap();
    let store = run_folder(&folder).await;
    close(store).await;
    let wal = folder.join(format!("{JOURNAL_FILE}-wal"));
    assert!(!wal.exists(), "{:?}", files(&folder));
    opens_without_writing(&folder);
}

#[tokio::test]
async fn killed_run_in_a_read_only_folder_can_be_shown_analyzed_and_compared() {
    let temp = tempfile::tempdir().unwrap();
    let live = Utf8PathBuf::from_path_buf(temp.path().join("live")).unwrap();
    let store = run_folder(&live).await;
    // A killed process leaves the write-ahead log unmerged.
    let killed = live.with_file_name("killed");
    assert!(run("cp", &["-r", live.as_str(), killed.as_str()]));
    assert!(killed.join(format!("{JOURNAL_FILE}-wal")).metadata().unwrap().len() > 0);
    opens_without_writing(&killed);

    std::fs::remove_file(killed.join(format!("{JOURNAL_FILE}-shm"))).unwrap();
    let Some(_guard) = ReadOnly::make(&killed) else { return };
    let error = Reader::open(&killed).await.unwrap_err();
    assert!(error.to_string().contains("copy the folder"), "{error}");
    drop(store);
}

#[tokio::test]
async fn page_replaces_neither_files_of_the_run_nor_links_nor_devices() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let run = Utf8PathBuf::from(path("run"));
    close(run_folder(&run).await).await;
    let analyze = |out: &str| orchestrate(&["analyze", run.as_str(), "--out", out]);

    let journal = std::fs::read(run.join(JOURNAL_FILE)).unwrap();
    let refused = analyze(run.join(JOURNAL_FILE).as_str());
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
    assert_eq!(std::fs::read(run.join(JOURNAL_FILE)).unwrap(), journal);
    assert_eq!(analyze("").status.code(), Some(2));

    std::fs::write(path("page.tmp"), "precious").unwrap();
    assert!(analyze(&path("page.html")).status.success());
    assert_eq!(std::fs::read_to_string(path("page.tmp")).unwrap(), "precious");

    std::os::unix::fs::symlink(path("page.html"), path("link.html")).unwrap();
    std::fs::write(path("page.html"), "").unwrap();
    assert!(analyze(&path("link.html")).status.success());
    assert!(std::fs::symlink_metadata(path("link.html")).unwrap().is_symlink());
    assert!(!std::fs::read_to_string(path("page.html")).unwrap().is_empty());

    std::fs::create_dir(path("folder")).unwrap();
    assert_eq!(analyze(&path("folder")).status.code(), Some(6));
    let before = files(&Utf8PathBuf::from(path("")));
    assert_eq!(before, ["folder", "link.html", "page.html", "page.tmp", "run"]);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let shown = Command::new(env!("CARGO_BIN_EXE_orchestrate"))
        .args(["config", "show"])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(shown.status.code(), Some(6), "{}", String::from_utf8_lossy(&shown.stderr));
    assert!(std::fs::metadata("/dev/full").is_ok_and(|meta| !meta.is_file()));
}
