use super::drawn::DrawnJournal;
use super::*;
use orchestrate_types::PolicyVersion;
use proptest::prelude::*;
use serde_json::json;
use std::os::unix::fs::symlink;

fn attempts() -> [AttemptId; 2] {
    ["t000001.02-a01", "t000001.03-a01"].map(|id| id.parse().unwrap())
}

fn lease() -> LeaseRecord {
    let lease = json!({"lease": vec![1; 32], "key": vec![2; 32], "worker": "w"});
    serde_json::from_value(lease).unwrap()
}

fn taken(attempt: AttemptId) -> TakenRecord {
    TakenRecord::new(attempt, lease(), PolicyVersion(0), [0; 32])
}

/// A folder with the journal of the second attempt; that of the first is missing.
fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let folder = Utf8PathBuf::try_from(temp.path().to_owned()).unwrap();
    TurnJournals::open(&folder, &[]).unwrap().create(taken(attempts()[1])).unwrap();
    (temp, folder)
}

/// The attempts that a resumed run continues.
fn continued(folder: &Utf8Path) -> Vec<AttemptId> {
    let journals = TurnJournals::open(folder, &attempts()).unwrap();
    journals.unfinished().into_iter().map(|(attempt, _)| attempt).collect()
}

#[test]
fn a_file_that_ends_before_its_first_record_is_told_from_a_damaged_one() {
    let (_temp, folder) = folder();
    let [first, second] = attempts();
    let whole = fs_err::read(folder.join(file_name(second))).unwrap();
    let path = folder.join(file_name(first));
    for length in 0..whole.len() {
        fs_err::write(&path, &whole[..length]).unwrap();
        assert!(matches!(lease_in(&path, first), Ok(None)), "{length} bytes");
        assert!(!TurnJournals::can_continue(&folder, first));
        if length > 4 {
            let mut bad = whole[..length].to_vec();
            bad[4] ^= 1;
            fs_err::write(&path, &bad).unwrap();
            let error = lease_in(&path, first).unwrap_err();
            assert!(matches!(error, TurnJournalError::Damaged { .. }), "{length} bytes: {error}");
        }
        assert_eq!(continued(&folder), [second], "{length} bytes");
        assert!(!path.exists());
    }
    assert!(TurnJournals::can_continue(&folder, second));
    // Complete, but of another attempt.
    fs_err::write(&path, &whole).unwrap();
    assert!(matches!(lease_in(&path, first), Err(TurnJournalError::Damaged { .. })));
}

/// Puts something at a path.
type Make<'a> = (&'a str, Box<dyn Fn(&Utf8Path) + 'a>);

#[test]
fn what_is_not_a_regular_file_stays_and_blocks_nothing() {
    let (_temp, folder) = folder();
    let [first, second] = attempts();
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs_err::copy(folder.join(file_name(second)), outside.path()).unwrap();
    let path = folder.join(file_name(first));
    let kinds: [Make<'_>; 4] = [
        ("folder", Box::new(|path| fs_err::create_dir(path).unwrap())),
        ("link", Box::new(|path| symlink(outside.path(), path).unwrap())),
        ("dangling link", Box::new(|path| symlink("/nonexistent", path).unwrap())),
        (
            "pipe",
            Box::new(|path| {
                assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
            }),
        ),
    ];
    for (kind, make) in kinds {
        make(&path);
        make(&folder.join("notes.turns"));
        assert_eq!(continued(&folder), [second], "{kind}");
        assert!(!TurnJournals::can_continue(&folder, first));
        for path in [&path, &folder.join("notes.turns")] {
            assert!(fs_err::symlink_metadata(path).is_ok(), "the {kind} was removed");
        }
        // An attempt with this name.
        let journals = TurnJournals::open(&folder, &[second]).unwrap();
        let before = fs_err::read(outside.path()).unwrap();
        match journals.create(taken(first)) {
            Ok(_) => {
                assert_ne!(kind, "folder");
                assert!(TurnJournals::can_continue(&folder, first), "{kind}");
                fs_err::remove_file(&path).unwrap();
            }
            Err(error) => {
                assert_eq!(kind, "folder");
                assert!(error.to_string().contains(path.as_str()), "{error}");
                fs_err::remove_dir(&path).unwrap();
            }
        }
        assert_eq!(fs_err::read(outside.path()).unwrap(), before, "the target was written");
        let other = folder.join("notes.turns");
        fs_err::remove_file(&other).or_else(|_| fs_err::remove_dir(&other)).unwrap();
    }
}

#[test]
fn a_file_of_no_lost_attempt_is_removed() {
    let (_temp, folder) = folder();
    // Another way to write the id of a lost attempt is another name.
    let whole = fs_err::read(folder.join(file_name(attempts()[1]))).unwrap();
    for name in ["t1.2-a1.turns", "notes.turns"] {
        fs_err::write(folder.join(name), &whole).unwrap();
        assert_eq!(continued(&folder), [attempts()[1]]);
        assert!(!folder.join(name).exists());
    }
}

fn journal() -> impl Strategy<Value = DrawnJournal> {
    proptest::collection::vec(any::<u8>(), 0..160).prop_map(|choices| {
        let mut choices = choices.into_iter();
        DrawnJournal::draw(&mut |below| usize::from(choices.next().unwrap_or(0)) % below.max(1))
    })
}

/// Bytes of a journal with a part of them replaced.
fn replaced(bytes: &[u8], at: prop::sample::Index, length: usize, with: &[u8]) -> Vec<u8> {
    let at = at.index(bytes.len());
    let mut bytes = bytes.to_vec();
    let end = (at + length).min(bytes.len());
    bytes.splice(at..end, with.iter().copied());
    bytes
}

proptest! {
    #[test]
    fn prop_records_are_read_as_they_were_written(
        journal in journal(),
        cut in any::<prop::sample::Index>(),
    ) {
        journal.check(journal.bytes());
        journal.check(&journal.bytes()[..cut.index(journal.bytes().len())]);
    }

    #[test]
    fn prop_a_damaged_journal_has_no_record_that_was_not_written(
        journal in journal(),
        at in any::<prop::sample::Index>(),
        length in 0usize..40,
        with in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        journal.check(&replaced(journal.bytes(), at, length, &with));
    }

    #[test]
    fn prop_a_changed_record_with_its_checksum_is_read_or_refused(
        journal in journal(),
        number in 0usize..9,
        at in any::<prop::sample::Index>(),
        length in 0usize..9,
        with in proptest::collection::vec(any::<u8>(), 0..9),
    ) {
        journal.check_record(number, |record| *record = replaced(record, at, length, &with));
    }
}
