//! Guarantees of the journal, tested through its public API.

#![expect(clippy::unwrap_used, clippy::panic, reason = "test helpers fail by panicking")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_store::{
    AfterBreak, AttemptState, BatchMember, BatchState, Claim, EpisodeRecord, EpisodeState,
    GroupState, ImageRow, JOURNAL_FILE, NewRun, Reader, RunKind, Sealing, StepState, Store,
    StoreError, StoredBranch,
};
use orchestrate_types::{
    AttemptId, EpisodeId, GroupId, Outcome, PolicyVersion, RunId, Stage, Trajectory,
};
use serde_json::json;
use sqlx::Connection;
use tempfile::TempDir;

const GROUP: GroupId = GroupId::Train { seq: 0 };

fn folder() -> (TempDir, Utf8PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(temp.path().join("run")).unwrap();
    (temp, path)
}

fn new_run() -> NewRun {
    NewRun { run: RunId::generate(), plan_digest: "d".into(), kind: RunKind::Training }
}

async fn create(path: &Utf8Path) -> Store {
    Store::create(path, &new_run()).await.unwrap()
}

fn episode(member: u16) -> EpisodeId {
    EpisodeId { group: GROUP, member }
}

fn record(attempt: AttemptId, outcome: Outcome) -> EpisodeRecord {
    let tokens = vec![7, 8, 9, u32::from(attempt.episode.member)];
    EpisodeRecord {
        attempt,
        outcome,
        branches: vec![StoredBranch {
            trajectory: Trajectory::new(
                tokens,
                vec![0, 0, 1, 1],
                vec![0.0, 0.0, -0.5, -1.5],
                vec![0; 4],
                vec![],
            )
            .unwrap(),
            routing: None,
        }],
        detail: json!({"patch": "diff --git"}),
        summary: json!({"turns": 2}),
    }
}

fn broken() -> Outcome {
    Outcome::Broken { stage: Stage::Setup, error: "no container".into() }
}

async fn claim(store: &Store, episode: EpisodeId) -> AttemptId {
    match store.claim_attempt(episode).await.unwrap() {
        Claim::Attempt(id) => id,
        other => panic!("{other:?}"),
    }
}

async fn raw(path: &Utf8Path, statement: &'static str) {
    let url = format!("sqlite://{}", path.join(JOURNAL_FILE));
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::query(statement).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

#[tokio::test]
async fn sealed_episode_is_read_back_after_a_restart() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "micro__1", 2).await.unwrap();
    let attempt = claim(&store, episode(1)).await;
    let written = record(attempt, Outcome::Scored { reward: 1.0 });
    assert_eq!(store.seal_attempt(&written).await.unwrap(), Sealing::Sealed);
    drop(store);

    let store = Store::open(&path).await.unwrap();
    assert_eq!(store.epoch(), 2);
    let loaded = store.reader().load_episode(episode(1)).await.unwrap();
    assert_eq!(loaded.record.unwrap(), written);
    assert_eq!(loaded.episode.state, EpisodeState::Sealed);
    assert_eq!(loaded.episode.task_id, "micro__1");
    assert_eq!(store.claim_attempt(episode(1)).await.unwrap(), Claim::Sealed);
    assert_eq!(store.reader().sealed_of_group(GROUP).await.unwrap().len(), 1);
}

#[tokio::test]
async fn at_most_one_attempt_of_an_episode_is_sealed() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 1).await.unwrap();
    let first = claim(&store, episode(0)).await;
    assert!(matches!(store.claim_attempt(episode(0)).await, Err(StoreError::Refused { .. })));
    let sealed = record(first, Outcome::Scored { reward: 0.0 });
    store.seal_attempt(&sealed).await.unwrap();
    // The same result delivered twice, and an unrequested result.
    assert!(matches!(store.seal_attempt(&sealed).await, Err(StoreError::Refused { .. })));
    let stranger = AttemptId { episode: episode(0), attempt: 9 };
    let late = record(stranger, Outcome::Scored { reward: 1.0 });
    assert!(matches!(store.seal_attempt(&late).await, Err(StoreError::Refused { .. })));
    let loaded = store.reader().load_episode(episode(0)).await.unwrap();
    assert_eq!(loaded.record.unwrap().outcome, Outcome::Scored { reward: 0.0 });
}

#[tokio::test]
async fn episode_is_quarantined_after_broken_attempts_and_reopened_at_the_next_start() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 1).await.unwrap();
    let first = claim(&store, episode(0)).await;
    let after = store.break_attempt(&record(first, broken()), 2).await.unwrap();
    assert_eq!(after, AfterBreak::Retry);
    let second = claim(&store, episode(0)).await;
    assert_eq!(second.attempt, 2);
    let after = store.break_attempt(&record(second, broken()), 2).await.unwrap();
    assert_eq!(after, AfterBreak::Quarantined);
    assert_eq!(store.claim_attempt(episode(0)).await.unwrap(), Claim::Quarantined);
    drop(store);

    let store = Store::open(&path).await.unwrap();
    let third = claim(&store, episode(0)).await;
    assert_eq!(third.attempt, 3);
    let after = store.break_attempt(&record(third, broken()), 2).await.unwrap();
    assert_eq!(after, AfterBreak::Retry, "attempts of an earlier start do not count");
    let broken = store.reader().attempts_of_step(1, AttemptState::Broken).await.unwrap();
    assert_eq!(broken, 3);
}

#[tokio::test]
async fn running_attempt_is_lost_with_its_coordinator() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 2).await.unwrap();
    claim(&store, episode(0)).await;
    let aborted = claim(&store, episode(1)).await;
    store.abort_attempt(aborted).await.unwrap();
    drop(store);
    let store = Store::open(&path).await.unwrap();
    let attempts = store.reader().attempts(episode(0)).await.unwrap();
    assert_eq!(attempts[0].state, AttemptState::Lost);
    assert_eq!(claim(&store, episode(0)).await.attempt, 2);
    assert_eq!(claim(&store, episode(1)).await.attempt, 2);
}

#[tokio::test]
async fn the_newest_lost_attempt_of_an_open_episode_can_be_resumed() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 4).await.unwrap();
    let lost = claim(&store, episode(0)).await;
    let older = claim(&store, episode(1)).await;
    let sealed = claim(&store, episode(2)).await;
    store.seal_attempt(&record(sealed, Outcome::Scored { reward: 1.0 })).await.unwrap();
    let aborted = claim(&store, episode(3)).await;
    store.abort_attempt(aborted).await.unwrap();
    assert_eq!(store.reader().lost_attempts().await.unwrap(), []);
    drop(store);
    let store = Store::open(&path).await.unwrap();
    assert_eq!(store.reader().lost_attempts().await.unwrap(), [lost, older]);
    let newer = claim(&store, episode(1)).await;
    assert_eq!(newer.attempt, 2);
    assert_eq!(store.reader().lost_attempts().await.unwrap(), [lost]);
    store.resume_attempt(lost).await.unwrap();
    for attempt in [lost, older, newer, sealed, aborted] {
        let refused = store.resume_attempt(attempt).await;
        assert!(matches!(refused, Err(StoreError::Refused { .. })), "{attempt}: {refused:?}");
    }
    let row = store.reader().attempts(episode(0)).await.unwrap().remove(0);
    assert_eq!((row.state, row.closed_us), (AttemptState::Intended, None));
    // Lost once more, it is resumed and sealed by the third coordinator.
    drop(store);
    let store = Store::open(&path).await.unwrap();
    store.resume_attempt(lost).await.unwrap();
    let sealed = store.seal_attempt(&record(lost, Outcome::Scored { reward: 0.5 })).await.unwrap();
    assert_eq!(sealed, Sealing::Sealed);
    assert_eq!(store.reader().attempts(episode(0)).await.unwrap().len(), 1);
}

#[tokio::test]
async fn every_attempt_can_be_loaded_by_its_id() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 2).await.unwrap();
    let first = claim(&store, episode(0)).await;
    store.break_attempt(&record(first, broken()), 3).await.unwrap();
    let second = claim(&store, episode(0)).await;
    let scored = Outcome::Scored { reward: 0.5 };
    store.seal_attempt(&record(second, scored.clone())).await.unwrap();
    let running = claim(&store, episode(1)).await;
    let reader = store.reader();
    for (attempt, outcome) in
        [(first, Some(broken())), (second, Some(scored.clone())), (running, None)]
    {
        let loaded = reader.load_attempt(attempt).await.unwrap();
        let found = loaded.record.map(|record| (record.attempt, record.outcome));
        assert_eq!(found, outcome.map(|outcome| (attempt, outcome)));
        assert_eq!(loaded.episode.id, attempt.episode);
        assert!(loaded.attempts.iter().any(|row| row.id == attempt));
    }
    let none = AttemptId { attempt: 3, ..second };
    assert!(matches!(reader.load_attempt(none).await, Err(StoreError::Absent { .. })));
    // One that runs has no outcome, and a stage counts each of the others once.
    assert_eq!(reader.outcomes_of_step(1).await.unwrap(), [broken(), scored]);
    assert_eq!(reader.outcomes_of_step(2).await.unwrap(), []);
    assert_eq!(reader.outcomes_of_eval(1).await.unwrap(), []);
}

#[tokio::test]
async fn replaced_coordinator_writes_nothing() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 1).await.unwrap();
    let attempt = claim(&store, episode(0)).await;
    raw(&path, "UPDATE run SET epoch = epoch + 1").await;
    let sealed = store.seal_attempt(&record(attempt, Outcome::Scored { reward: 1.0 })).await;
    assert!(matches!(sealed, Err(StoreError::Fenced { epoch: 1 })));
    let step = store.open_step(1, "s", PolicyVersion(0)).await;
    assert!(matches!(step, Err(StoreError::Fenced { .. })));
    assert!(matches!(store.open_eval(0, PolicyVersion(0)).await, Err(StoreError::Fenced { .. })));
    let reader = Reader::open(&path).await.unwrap();
    assert_eq!(reader.attempts(episode(0)).await.unwrap()[0].state, AttemptState::Intended);
    assert!(reader.steps().await.unwrap().is_empty() && reader.evals().await.unwrap().is_empty());
}

#[tokio::test]
async fn second_coordinator_is_rejected_with_the_pid_of_the_first() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    let error = Store::open(&path).await.unwrap_err().to_string();
    assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let path = path.clone();
        readers.spawn(async move { Store::open(&path).await.is_err() });
    }
    assert!(readers.join_all().await.into_iter().all(|refused| refused));
    drop(store);
    assert_eq!(Store::open(&path).await.unwrap().epoch(), 2);
}

#[tokio::test]
async fn creating_an_existing_and_opening_a_missing_journal_fail() {
    let (_temp, path) = folder();
    assert!(matches!(Store::open(&path).await, Err(StoreError::Missing { .. })));
    drop(create(&path).await);
    assert!(matches!(Store::create(&path, &new_run()).await, Err(StoreError::Exists { .. })));
}

#[tokio::test]
async fn run_whose_journal_is_gone_is_not_begun_again() {
    let (_temp, path) = folder();
    drop(create(&path).await);
    let moved = path.join("elsewhere");
    std::fs::rename(path.join(JOURNAL_FILE), &moved).unwrap();
    let lock = std::fs::read(path.join("run.lock")).unwrap();
    assert!(matches!(Store::create(&path, &new_run()).await, Err(StoreError::JournalLost { .. })));
    assert!(!path.join(JOURNAL_FILE).exists());
    assert_eq!(std::fs::read(path.join("run.lock")).unwrap(), lock);
    std::fs::rename(&moved, path.join(JOURNAL_FILE)).unwrap();
    assert_eq!(Store::open(&path).await.unwrap().epoch(), 2);
}

#[tokio::test]
async fn a_journal_says_what_its_run_does_and_an_older_one_does_not() {
    for kind in [RunKind::Training, RunKind::Evaluation] {
        let (_temp, path) = folder();
        let new = NewRun { kind, ..new_run() };
        let store = Store::create(&path, &new).await.unwrap();
        assert_eq!(store.reader().kind().await.unwrap(), Some(kind));
    }
    let (_temp, path) = folder();
    drop(create(&path).await);
    // As an older version made it.
    raw(&path, "ALTER TABLE run DROP COLUMN kind").await;
    raw(&path, "DELETE FROM _sqlx_migrations WHERE version >= 4").await;
    let reader = Reader::open(&path).await.unwrap();
    assert_eq!(reader.kind().await.unwrap(), None);
    let store = Store::open(&path).await.unwrap();
    assert_eq!(store.reader().kind().await.unwrap(), None);
    assert_eq!(store.epoch(), 2);
}

#[tokio::test]
async fn old_copy_of_the_journal_is_rejected() {
    let (_temp, path) = folder();
    drop(create(&path).await);
    drop(Store::open(&path).await.unwrap());
    raw(&path, "UPDATE run SET epoch = 1").await;
    let error = Store::open(&path).await.unwrap_err();
    assert!(matches!(error, StoreError::OldCopy { journal_epoch: 1, lock_epoch: 2, .. }));
}

#[tokio::test]
async fn step_passes_through_each_state_once() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 2).await.unwrap();
    for member in 0..2 {
        let attempt = claim(&store, episode(member)).await;
        store.seal_attempt(&record(attempt, Outcome::Scored { reward: 1.0 })).await.unwrap();
    }
    store.keep_group(GROUP).await.unwrap();
    assert!(store.drop_group(GROUP, "late").await.is_err());
    let group = store.reader().group(GROUP).await.unwrap().unwrap();
    assert_eq!((group.state, group.reason), (GroupState::Kept, None));

    store.open_step(1, "run-00001", PolicyVersion(0)).await.unwrap();
    let members: Vec<BatchMember> =
        (0..2).map(|m| BatchMember { episode: episode(m), advantage: f64::from(m) }).collect();
    let folder = Utf8Path::new("batches/000001");
    assert!(store.publish_batch(1, "digest").await.is_err());
    store.assemble_batch(1, PolicyVersion(0), folder, &members[..1]).await.unwrap();
    store.assemble_batch(1, PolicyVersion(0), folder, &members).await.unwrap();
    store.publish_batch(1, "digest").await.unwrap();
    assert!(store.assemble_batch(1, PolicyVersion(0), folder, &members).await.is_err());
    assert_eq!(store.reader().batch_members(1).await.unwrap()[1], (episode(1), 1.0));

    store.open_step(2, "run-00002", PolicyVersion(1)).await.unwrap();
    let twice = store
        .assemble_batch(2, PolicyVersion(1), Utf8Path::new("batches/000002"), &members[..1])
        .await;
    assert!(matches!(twice, Err(StoreError::Refused { .. })), "INV-4");

    assert!(store.finish_step(1, &json!({})).await.is_err());
    store.record_result(1, &json!({"policy_version": 1})).await.unwrap();
    store.announce_version(PolicyVersion(1), 0, Utf8Path::new("ck/1")).await.unwrap();
    assert!(!store.reader().versions().await.unwrap()[0].live);
    store.version_live(PolicyVersion(1)).await.unwrap();
    store.finish_step(1, &json!({"global_step": 1})).await.unwrap();
    store.skip_step(2, "all groups solved", &json!({"global_step": 2})).await.unwrap();
    store.open_eval(1, PolicyVersion(1)).await.unwrap();
    store.finish_eval(1, &json!({"global_step": 1, "eval_tasks": 3})).await.unwrap();
    assert!(store.finish_eval(1, &json!({})).await.is_err());
    store.retire_batch(1).await.unwrap();

    let steps = store.reader().steps().await.unwrap();
    assert_eq!((steps[0].state, steps[1].state), (StepState::Applied, StepState::Skipped));
    assert_eq!(store.reader().batches().await.unwrap()[0].state, BatchState::Retired);
    assert!(store.reader().versions().await.unwrap()[0].live);
    let lines = store.reader().metrics().await.unwrap();
    let shape: Vec<(i64, bool)> = lines
        .iter()
        .map(|l| (l["global_step"].as_i64().unwrap(), l.get("eval_tasks").is_some()))
        .collect();
    assert_eq!(shape, [(1, false), (1, true), (2, false)]);
}

#[tokio::test]
async fn damaged_trajectory_file_is_named_and_rejected() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 1).await.unwrap();
    let attempt = claim(&store, episode(0)).await;
    store.seal_attempt(&record(attempt, Outcome::Scored { reward: 1.0 })).await.unwrap();
    let digest = store.reader().attempts(episode(0)).await.unwrap()[0].blob.clone().unwrap();
    let file = path.join("blobs").join(&digest[..2]).join(format!("{digest}.zst"));
    let sound = fs_err::read(&file).unwrap();
    let mut bad = sound.clone();
    *bad.last_mut().unwrap() ^= 0x80;
    fs_err::write(&file, &bad).unwrap();
    let error = store.reader().load_episode(episode(0)).await.unwrap_err();
    assert!(matches!(&error, StoreError::Record { path, .. } if path == &file), "{error}");
    fs_err::write(&file, &sound[..sound.len() / 2]).unwrap();
    assert!(store.reader().load_episode(episode(0)).await.is_err());
    fs_err::remove_file(&file).unwrap();
    assert!(store.reader().load_episode(episode(0)).await.is_err());
}

#[tokio::test]
async fn files_without_a_row_are_removed_at_the_next_start() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.open_group(GROUP, 1, "t", 1).await.unwrap();
    let attempt = claim(&store, episode(0)).await;
    store.seal_attempt(&record(attempt, Outcome::Scored { reward: 1.0 })).await.unwrap();
    drop(store);
    let half = path.join("blobs/123-0.tmp");
    let orphan = path.join("blobs/ab").join(format!("ab{}.zst", "0".repeat(62)));
    fs_err::create_dir_all(path.join("blobs/ab")).unwrap();
    fs_err::write(&half, b"half").unwrap();
    fs_err::write(&orphan, b"orphan").unwrap();
    let store = Store::open(&path).await.unwrap();
    assert!(!half.exists() && !orphan.exists());
    assert!(store.reader().load_episode(episode(0)).await.unwrap().record.is_some());
}

#[tokio::test]
async fn full_disk_is_reported_and_committed_data_stays_readable() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    store.limit_pages(40).await;
    let mut opened = 0;
    let error = loop {
        let id = GroupId::Train { seq: opened };
        match store.open_group(id, 1, &"x".repeat(4096), 4).await {
            Ok(()) => opened += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, StoreError::Full { folder } if folder == &path), "{error}");
    assert!(error.to_string().contains("free some space"));
    assert_eq!(store.reader().train_groups().await.unwrap(), opened);
    store.limit_pages(100_000).await;
    store.open_group(GroupId::Train { seq: opened }, 1, "t", 4).await.unwrap();
}

#[tokio::test]
async fn damaged_journals_are_rejected_without_panic() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    for seq in 0..50 {
        store.open_group(GroupId::Train { seq }, 1, "t", 4).await.unwrap();
    }
    drop(store);
    raw(&path, "PRAGMA wal_checkpoint(TRUNCATE)").await;
    let journal = path.join(JOURNAL_FILE);
    let sound = fs_err::read(&journal).unwrap();
    let mut refused = 0;
    for i in 0..24 {
        let mut bad = sound.clone();
        let at = i * sound.len() / 24;
        let end = (at + 512).min(bad.len());
        bad[at..end].fill(0xA5);
        for side in ["-wal", "-shm"] {
            let _ = fs_err::remove_file(format!("{journal}{side}"));
        }
        fs_err::write(&journal, &bad).unwrap();
        match Store::open(&path).await {
            Ok(store) => drop(store),
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
        }
    }
    assert!(refused >= 12, "only {refused} of 24 damaged journals were rejected");
    fs_err::write(&journal, b"this is not a database, but it is long enough to be read").unwrap();
    let error = Store::open(&path).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
}

#[tokio::test]
async fn image_is_recorded_once_and_outlives_its_coordinator() {
    let (_temp, path) = folder();
    let store = create(&path).await;
    let image = |id: &str| ImageRow {
        name: "a:latest".into(),
        image_id: id.into(),
        digest: Some("sha256:d".into()),
    };
    let records = store.image_records();
    assert_eq!(records.get("a:latest").await.unwrap(), None);
    assert_eq!(records.record(&image("1")).await.unwrap(), image("1"));
    assert_eq!(records.record(&image("2")).await.unwrap(), image("1"));
    drop(store);
    let store = Store::open(&path).await.unwrap();
    assert_eq!(store.reader().images().await.unwrap(), [image("1")]);
    let late = ImageRow { name: "b".into(), ..image("3") };
    let error = records.record(&late).await.unwrap_err();
    assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
}
