//! Evaluations without training: the files that they write, and how they are resumed.

use crate::parts::Kill;
use crate::support::{World, plan, usual};
use orchestrate_coordinator::{Event, FailureClass, RunEnd, RunError, Stop, run_kind};
use orchestrate_store::{JOURNAL_FILE, Reader, RunKind};
use orchestrate_types::{GroupId, PolicyVersion};
use sqlx::Connection as _;
use std::sync::atomic::Ordering;

/// Evaluates until the end; `None` if `kill` ended the evaluation first.
async fn start(world: &World, kill: &std::sync::Arc<Kill>) -> Option<Result<RunEnd, RunError>> {
    let evaluation = world.evaluation(kill).await;
    tokio::select! {
        biased;
        () = kill.died.notified() => None,
        end = evaluation.run(Stop::default()) => Some(end),
    }
}

async fn finish(world: &World) -> RunEnd {
    start(world, &Kill::never()).await.unwrap().unwrap()
}

/// Makes the journal one of a version that did not record what a run does.
async fn make_older(world: &World) {
    let url = format!("sqlite://{}", world.folder.join(JOURNAL_FILE));
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    for statement in
        ["ALTER TABLE run DROP COLUMN kind", "DELETE FROM _sqlx_migrations WHERE version >= 4"]
    {
        sqlx::query(statement).execute(&mut connection).await.unwrap();
    }
    connection.close().await.unwrap();
}

#[tokio::test]
async fn evaluation_measures_held_out_tasks_without_a_trainer() {
    let world = World::new(plan(3), usual);
    let RunEnd::Finished(report) = finish(&world).await else { panic!("stopped") };
    let point = report.baseline.unwrap();
    assert_eq!((point.global_step, point.policy_version, point.tasks), (0, PolicyVersion(0), 2));
    assert_eq!((report.last, report.steps_applied, report.episodes), (None, 0, 0));
    assert!(world.trainer.requests.lock().unwrap().is_empty());
    assert!(world.episodes.requests.lock().unwrap().iter().all(|request| {
        matches!(request.attempt.episode.group, GroupId::Eval { round: 0, .. })
            && !request.want_routing
    }));

    let lines = world.metrics();
    assert_eq!((lines.len(), lines[0]["eval_tasks"].as_u64()), (1, Some(2)));
    let predictions = fs_err::read_to_string(world.folder.join("predictions.jsonl")).unwrap();
    assert!(predictions.contains("\"model_name_or_path\":\"toy-model@0\""), "{predictions}");
    assert!(world.folder.join("report.html").exists());
    let reader = Reader::open(&world.folder).await.unwrap();
    assert_eq!(reader.versions().await.unwrap()[0].checkpoint, "/toy/start");
    assert_eq!(run_kind(&reader, "/toy/other".into()).await.unwrap(), Some(RunKind::Evaluation));
    make_older(&world).await;
    for model in ["/toy/start", "./start"] {
        let kind = run_kind(&reader, model.into()).await.unwrap();
        assert_eq!(kind, Some(RunKind::Evaluation), "{model}");
    }
    let events = world.events.lock().unwrap();
    assert!(matches!(events[0], Event::EvaluationStarted { epoch: 1, .. }), "{events:?}");
    assert!(!events.iter().any(|event| matches!(event, Event::Started { .. })), "{events:?}");
    assert_eq!(world.sandboxes.shut_down.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn evaluation_killed_anywhere_resumes_with_the_same_result() {
    let whole = World::new(plan(1), usual);
    finish(&whole).await;
    let (metrics, sealed) = (whole.metrics(), whole.sealed().await);
    for points in 1.. {
        let world = World::new(plan(1), usual);
        let survived = start(&world, &Kill::after(points)).await.is_some();
        finish(&world).await;
        assert_eq!((world.metrics(), world.sealed().await), (metrics.clone(), sealed.clone()));
        if survived {
            return;
        }
    }
}

#[tokio::test]
async fn finished_evaluation_repeats_no_episode() {
    let world = World::new(plan(1), usual);
    let first = finish(&world).await;
    let episodes = world.episodes.requests.lock().unwrap().len();
    assert_eq!(finish(&world).await, first);
    assert_eq!(world.episodes.requests.lock().unwrap().len(), episodes);
}

#[tokio::test]
async fn stopped_evaluation_can_be_resumed() {
    let world = World::new(plan(1), usual);
    world.episodes.hold.store(true, Ordering::SeqCst);
    let stop = Stop::default();
    let running = world.evaluation(&Kill::never()).await.run(stop.clone());
    let (end, ()) = tokio::join!(running, async {
        world.episodes.started.notified().await;
        stop.drain.cancel();
    });
    assert!(matches!(end.unwrap(), RunEnd::Stopped(_)));
    world.episodes.hold.store(false, Ordering::SeqCst);
    assert!(matches!(finish(&world).await, RunEnd::Finished(_)));
}

#[tokio::test]
async fn evaluation_refuses_the_folder_of_a_training_run() {
    let world = World::new(plan(1), usual);
    world.finish().await;
    make_older(&world).await;
    let reader = Reader::open(&world.folder).await.unwrap();
    let kind = run_kind(&reader, "/toy/start".into()).await.unwrap();
    assert_eq!(kind, Some(RunKind::Training));
    let error = start(&world, &Kill::never()).await.unwrap().unwrap_err();
    assert!(matches!(error, RunError::HoldsTrainingRun), "{error}");
    assert_eq!(error.class(), FailureClass::Config);
}

#[tokio::test]
async fn a_training_run_whose_trainer_begins_at_the_model_is_one_before_its_first_step() {
    let world = World::new(plan(1), usual);
    let store = world.store(RunKind::Training).await;
    store.announce_version(PolicyVersion(0), 0, "/toy/start".into()).await.unwrap();
    let kind = run_kind(store.reader(), "/toy/start".into()).await.unwrap();
    assert_eq!(kind, Some(RunKind::Training));
    drop(store);
    let error = start(&world, &Kill::never()).await.unwrap().unwrap_err();
    assert!(matches!(error, RunError::HoldsTrainingRun), "{error}");
}
