//! Spans of a run, as a `tracing` subscriber sees them.

use crate::support::{World, plan, usual};
use orchestrate_testkit::{SpanCollector, SpanPath};
use std::collections::BTreeSet;

fn names(path: &SpanPath) -> Vec<&'static str> {
    path.iter().map(|(name, _)| *name).collect()
}

#[tokio::test]
async fn every_event_of_an_episode_is_inside_its_span() {
    let (collector, guard) = SpanCollector::install();
    let world = World::new(plan(2), usual);
    let end = world.finish().await;
    drop(guard);
    let found: BTreeSet<Vec<&str>> = collector.spans().iter().map(names).collect();
    for expected in [
        &["run", "weight_sync"][..],
        &["run", "step", "group", "episode"],
        &["run", "step", "train"],
        &["run", "step", "weight_sync"],
        &["run", "evaluation", "group", "episode"],
    ] {
        assert!(found.contains(expected), "{expected:?} is not in {found:?}");
    }
    assert!(found.iter().all(|path| path[0] == "run"), "{found:?}");

    for path in collector.spans() {
        for (name, fields) in &path {
            let field = match *name {
                "run" => "run_id",
                "step" | "evaluation" => "step",
                "group" => "group_id",
                "episode" => "episode_id",
                "train" | "weight_sync" => "policy_version",
                // A wait of its episode.
                "queue" => continue,
                other => panic!("{other} is not in the span tree"),
            };
            assert!(fields.contains_key(field), "{name} lacks {field}: {fields:?}");
        }
    }

    // The scripted episodes log what they are; broken attempts are logged by the pool.
    let mut seen = 0;
    for (event, path) in collector.events() {
        let Some(id) = event.get("attempt").or(event.get("episode_id")) else { continue };
        let episode = path.iter().find(|(name, _)| *name == "episode");
        let (_, fields) = episode.unwrap_or_else(|| panic!("{event:?} is in {path:?}"));
        assert!(id.starts_with(&fields["episode_id"]), "{event:?} is in {path:?}");
        seen += 1;
    }
    let episodes = world.episodes.requests.lock().unwrap().len();
    assert!(seen > episodes, "{seen} events of {episodes} attempts, {end:?}");
}
