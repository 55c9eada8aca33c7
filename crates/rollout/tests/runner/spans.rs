//! Spans of an attempt, as a `tracing` subscriber sees them.

use crate::world::*;
use orchestrate_testkit::SpanCollector;

#[tokio::test(start_paused = true)]
async fn every_part_of_an_attempt_is_in_its_span() {
    let (collector, guard) = SpanCollector::install();
    let report = world(solving()).run().await;
    drop(guard);
    let spans = collector.spans();
    let named = |name: &str| {
        spans.iter().filter(|path| path.last().unwrap().0 == name).cloned().collect::<Vec<_>>()
    };
    let [attempt] = named("attempt").try_into().unwrap();
    let id = report.attempt.episode.to_string();
    assert_eq!(attempt[0].1["episode_id"], id);
    assert_eq!(attempt[0].1["attempt"], report.attempt.attempt.to_string());
    assert!(attempt[0].1.contains_key("policy_version"));

    let turns: Vec<String> = named("turn").iter().map(|path| path[1].1["turn"].clone()).collect();
    assert_eq!(turns, ["0", "1", "2", "3"]);
    for (name, count) in [("generate", 4), ("exec", 4), ("grade", 1)] {
        let found = named(name);
        assert_eq!(found.len(), count, "{name}");
        for path in found {
            let names: Vec<&str> = path.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, ["attempt", "turn", name]);
        }
    }
    assert!(named("generate").iter().all(|path| path[2].1.contains_key("engine")));
    for (event, path) in collector.events() {
        assert_eq!(path.first().map(|span| span.0), Some("attempt"), "{event:?}");
    }
}
