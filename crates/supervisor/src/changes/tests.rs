use super::*;
use std::os::unix::fs::symlink;

fn changes(tree: &MarkedTree, root: &Path) -> (Vec<ChangedItem>, TreeEnd) {
    let (mut items, mut end) = (Vec::new(), None);
    tree.send_changes(root, |reply| {
        match reply {
            Reply::TreeItem(item) => items.push(item),
            Reply::TreeEnd(e) => end = Some(e),
            other => panic!("not expected: {other:?}"),
        }
        Ok(())
    })
    .unwrap();
    (items, end.unwrap())
}

fn paths(items: &[ChangedItem]) -> Vec<String> {
    let text = |item: &ChangedItem| match item {
        ChangedItem::Removed { path } => format!("-{path}"),
        ChangedItem::Written { path, is_new, is_binary, .. } => {
            let binary = if *is_binary { "(binary)" } else { "" };
            format!("{}{path}{binary}", if *is_new { '+' } else { '~' })
        }
    };
    items.iter().map(text).collect()
}

fn read(root: &Path, names: &[&str], cap: u64) -> (Vec<(String, Vec<u8>)>, TreeEnd) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let (mut files, mut end) = (Vec::<(String, Vec<u8>)>::new(), None);
    send_files(root, &names, cap, |reply| {
        match reply {
            Reply::TreeFile { path, .. } => files.push((path, Vec::new())),
            Reply::TreeData { data } => files.last_mut().unwrap().1.extend(data),
            Reply::TreeEnd(e) => end = Some(e),
            other => panic!("not expected: {other:?}"),
        }
        Ok(())
    })
    .unwrap();
    (files, end.unwrap())
}

fn skip() -> Vec<String> {
    [".git", "/.venv"].map(str::to_owned).to_vec()
}

#[test]
fn changes_are_those_of_content_and_executable_bit() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in ["same", "touched", "edited", "gone", "linked", "run", "deep/x"] {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "one\n").unwrap();
    }
    std::fs::create_dir(root.join(".git")).unwrap();
    let tree = mark(root, &skip()).unwrap();
    assert_eq!(changes(&tree, root).0, []);

    // Written again with the same content, and with another one of the same size at the old time.
    std::fs::remove_file(root.join("touched")).unwrap();
    std::fs::write(root.join("touched"), "one\n").unwrap();
    let time = std::fs::metadata(root.join("edited")).unwrap().modified().unwrap();
    std::fs::write(root.join("edited"), "two\n").unwrap();
    File::options().write(true).open(root.join("edited")).unwrap().set_modified(time).unwrap();
    std::fs::remove_file(root.join("gone")).unwrap();
    std::fs::remove_file(root.join("linked")).unwrap();
    symlink("/etc/passwd", root.join("linked")).unwrap();
    std::fs::set_permissions(root.join("run"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(root.join("new"), "a\0b").unwrap();
    std::fs::write(root.join(".git/index"), "x").unwrap();
    for folder in [".venv", "env", "deep/.venv"] {
        std::fs::create_dir(root.join(folder)).unwrap();
        std::fs::write(root.join(folder).join("evil.pth"), "x").unwrap();
    }
    std::fs::write(root.join("env/pyvenv.cfg"), "x").unwrap();
    std::fs::create_dir_all(root.join(".mypy_cache/3.11")).unwrap();
    std::fs::write(root.join(".mypy_cache/CACHEDIR.TAG"), "x").unwrap();
    std::fs::write(root.join(".mypy_cache/3.11/builtins.data.json"), "{}").unwrap();
    let (items, end) = changes(&tree, root);
    let expected = ["-gone", "+deep/.venv/evil.pth", "~edited", "~linked", "+new(binary)", "~run"];
    assert_eq!(paths(&items), expected);
    assert_eq!(end, TreeEnd::Complete { files: 6 });
}

#[test]
fn links_are_files_whose_content_is_their_target() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::fs::create_dir(root.join("d")).unwrap();
    for (name, target) in [("same", "d"), ("moved", "d"), ("file", "d"), ("gone", "absent")] {
        symlink(target, root.join(name)).unwrap();
    }
    std::fs::write(root.join("real"), "d").unwrap();
    symlink("d", root.join(".gitignore")).unwrap();
    let tree = mark(root, &skip()).unwrap();
    assert_eq!(changes(&tree, root).0, []);
    tree.send_named(root, ".gitignore", 99, |reply| {
        assert_eq!(reply, Reply::TreeEnd(TreeEnd::Complete { files: 0 }));
        Ok(())
    })
    .unwrap();
    for name in ["moved", "file", "gone", "real"] {
        std::fs::remove_file(root.join(name)).unwrap();
    }
    symlink("real", root.join("moved")).unwrap();
    std::fs::write(root.join("file"), "d").unwrap();
    symlink("d", root.join("real")).unwrap();
    symlink("/etc", root.join("d/new")).unwrap();
    let (items, _) = changes(&tree, root);
    assert_eq!(paths(&items), ["-gone", "+d/new", "~file", "~moved", "~real"]);
    let modes = items.iter().filter_map(|item| match item {
        ChangedItem::Written { path, mode, .. } => Some((path.as_str(), is_link(*mode))),
        ChangedItem::Removed { .. } => None,
    });
    let expected = [("d/new", true), ("file", false), ("moved", true), ("real", true)];
    assert_eq!(modes.collect::<Vec<_>>(), expected);
}

#[test]
fn missing_unreadable_or_replaced_root_is_no_failure() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = dir.path().join("work");
    std::fs::create_dir_all(root.join("d")).unwrap();
    std::fs::write(root.join("d/a"), "x").unwrap();
    std::fs::write(outside.path().join("secret"), "x").unwrap();
    let tree = mark(&root, &[]).unwrap();
    for folder in ["d", ""] {
        let none = std::fs::Permissions::from_mode(0o000);
        std::fs::set_permissions(root.join(folder), none).unwrap();
    }
    assert_eq!(changes(&tree, &root).0, []);
    std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::set_permissions(root.join("d"), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!(paths(&changes(&tree, &root).0), ["-d/a"]);
    symlink(outside.path(), &root).unwrap();
    assert_eq!(paths(&changes(&tree, &root).0), ["-d/a"]);
    assert_eq!(read(&root, &["secret"], 99), (Vec::new(), TreeEnd::Complete { files: 0 }));
}

#[test]
fn files_are_read_without_following_symlinks_and_within_a_cap() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::fs::create_dir(root.join("d")).unwrap();
    std::fs::write(root.join("d/a"), "12345").unwrap();
    symlink("d", root.join("link")).unwrap();
    symlink("d/a", root.join("file")).unwrap();
    File::create(root.join("sparse")).unwrap().set_len(3 << 30).unwrap();
    let asked = ["d/a", "link/a", "file", "absent", "../x", "d"];
    let found = [("d/a", "12345"), ("file", "d/a"), ("d", "")];
    let found = found.map(|(path, text)| (path.to_owned(), text.as_bytes().to_vec())).to_vec();
    assert_eq!(read(root, &asked, 8), (found, TreeEnd::Complete { files: 3 }));
    assert_eq!(read(root, &asked, 7).1, TreeEnd::TooLarge("file".into()));
    assert_eq!(read(root, &["d/a"], 4).1, TreeEnd::TooLarge("d/a".into()));
    assert_eq!(read(root, &["sparse"], 1 << 20).1, TreeEnd::TooLarge("sparse".into()));
}

#[test]
fn what_is_neither_a_file_nor_a_symlink_is_named_without_being_opened() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::fs::create_dir(root.join("folder")).unwrap();
    std::fs::write(root.join("file"), "1").unwrap();
    symlink("file", root.join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let status = std::process::Command::new("mkfifo").arg(root.join("fifo")).status().unwrap();
    assert!(status.success());
    let asked = ["folder", "file", "link", "socket", "fifo"].map(str::to_owned);
    let mut special = Vec::new();
    send_files(root, &asked, 9, |reply| {
        if let Reply::TreeFile { path, mode, .. } = reply
            && crate::protocol::is_special(mode)
        {
            special.push(path);
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(special, ["folder", "socket", "fifo"]);
}

#[test]
fn too_many_or_too_deep_entries_are_too_large() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut tree = mark(root, &[]).unwrap();
    let mut deep = root.to_owned();
    for _ in 0..=MAX_DEPTH {
        deep.push("d");
    }
    std::fs::create_dir_all(&deep).unwrap();
    assert!(matches!(changes(&tree, root).1, TreeEnd::TooLarge(_)));
    std::fs::remove_dir_all(root.join("d")).unwrap();
    assert_eq!(changes(&tree, root).1, TreeEnd::Complete { files: 0 });
    // As if almost all entries were used.
    for name in ["a", "b", "c"] {
        std::fs::write(root.join(name), "x").unwrap();
    }
    tree.entries = 2_usize.wrapping_sub(MAX_ADDED_ENTRIES);
    let added = tree.entries.wrapping_add(MAX_ADDED_ENTRIES);
    let mut walk = Walk {
        root,
        skip: &[],
        entries: added,
        path_bytes: 1 << 20,
        give_up_at: Instant::now() + WALK_TIME,
        known: None,
        files: Vec::new(),
        folders: Vec::new(),
    };
    assert!(matches!(walk.run(), Err(TreeEnd::TooLarge(_))));
}

#[test]
fn digest_tells_contents_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut buffer = vec![0; 16];
    let mut digest_of = |content: &[u8]| {
        let path = dir.path().join("x");
        std::fs::write(&path, content).unwrap();
        digest(&path, content.len() as u64, &mut buffer).unwrap()
    };
    let contents: [&[u8]; 7] =
        [b"", b"\0", b"a", b"a\0", &[7; 16], &[7; 17], b"0123456789abcdef0123456789abcdeF"];
    let mut seen: Vec<u64> = contents.iter().map(|content| digest_of(content)).collect();
    assert_eq!(digest_of(b"a"), seen[2]);
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), contents.len());
}
