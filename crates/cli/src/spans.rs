//! The open spans of this process: what it does and waits for.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterFn, filter_fn};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Number of listed waits.
const MAX_WAITS: usize = 100;

/// Spans that are stages of the run, not waits of an episode.
const STAGES: [&str; 6] = ["start", "step", "evaluation", "train", "weight_sync", "worker"];

/// An open span.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Wait {
    /// What is done, or waited for: the span's name.
    pub(crate) what: String,
    /// Seconds since it began.
    pub(crate) for_s: f64,
    /// The span's fields and those of the spans around it.
    pub(crate) fields: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Open {
    name: &'static str,
    parent: Option<u64>,
    since: Instant,
    fields: Vec<(&'static str, String)>,
}

/// The open spans of this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct OpenSpans(Arc<Mutex<HashMap<u64, Open>>>);

/// The open spans of this process, once [`layer`] is installed.
static SPANS: OnceLock<OpenSpans> = OnceLock::new();

type SpanFilter = FilterFn<fn(&tracing::Metadata<'_>) -> bool>;

/// The open spans of this process; `None` without [`layer`].
pub(crate) fn open() -> Option<&'static OpenSpans> {
    SPANS.get()
}

/// The layer that keeps [`OpenSpans`].
pub(crate) fn layer<S>() -> tracing_subscriber::filter::Filtered<OpenSpans, SpanFilter, S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let is_ours: fn(&tracing::Metadata<'_>) -> bool = |metadata| {
        metadata.is_span()
            && *metadata.level() <= Level::INFO
            && metadata.target().starts_with("orchestrate")
    };
    SPANS.get_or_init(OpenSpans::default).clone().with_filter(filter_fn(is_ours))
}

impl OpenSpans {
    fn spans(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stages, counts and waits at this moment.
    pub(crate) fn snapshot(&self) -> (Vec<Wait>, BTreeMap<String, usize>, Vec<Wait>) {
        let spans = self.spans();
        let parents: HashSet<u64> = spans.values().filter_map(|open| open.parent).collect();
        let (mut stages, mut waits) = (Vec::new(), Vec::new());
        for (id, open) in spans.iter() {
            if STAGES.contains(&open.name) {
                stages.push((open.since, wait(&spans, open)));
            } else if !parents.contains(id) && open.name != "run" {
                waits.push((open.since, open));
            }
        }
        stages.sort_by_key(|(since, _)| *since);
        waits.sort_by_key(|(since, _)| *since);
        let mut count = BTreeMap::new();
        for (_, open) in &waits {
            *count.entry(open.name.to_owned()).or_default() += 1;
        }
        // Of those that wait for their turn there may be thousands, and they say nothing more.
        let listed = waits.into_iter().filter(|(_, open)| open.name != "queue").take(MAX_WAITS);
        let waits = listed.map(|(_, open)| wait(&spans, open)).collect();
        (stages.into_iter().map(|(_, stage)| stage).collect(), count, waits)
    }
}

/// An open span with the fields of all spans around it.
fn wait(spans: &HashMap<u64, Open>, open: &Open) -> Wait {
    let mut fields = BTreeMap::new();
    let mut around = Some(open);
    while let Some(span) = around {
        for (name, value) in &span.fields {
            fields.entry((*name).to_owned()).or_insert_with(|| value.clone());
        }
        around = span.parent.and_then(|parent| spans.get(&parent));
    }
    Wait { what: open.name.to_owned(), for_s: open.since.elapsed().as_secs_f64(), fields }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for OpenSpans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent().map(|p| p.id().into_u64()));
        let mut fields = Vec::new();
        attributes.record(&mut Values(&mut fields));
        let name = attributes.metadata().name();
        let open = Open { name, parent, since: Instant::now(), fields };
        self.spans().insert(id.into_u64(), open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        if let Some(open) = self.spans().get_mut(&id.into_u64()) {
            values.record(&mut Values(&mut open.fields));
        }
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        self.spans().remove(&id.into_u64());
    }
}

/// Collects fields as text.
struct Values<'a>(&'a mut Vec<(&'static str, String)>);

impl Visit for Values<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.push((field.name(), value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.push((field.name(), format!("{value:?}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt as _;

    #[test]
    fn leaves_are_waits_with_the_fields_around_them_and_closed_spans_are_gone() {
        let spans = OpenSpans::default();
        let subscriber = tracing_subscriber::registry().with(spans.clone());
        tracing::subscriber::with_default(subscriber, || {
            let run = tracing::info_span!("run", run_id = "r");
            let step = tracing::info_span!(parent: &run, "step", step = 3);
            let episode = tracing::info_span!(parent: &step, "episode", episode_id = "t1.0");
            let generate =
                tracing::info_span!(parent: &episode, "generate", engine = tracing::field::Empty);
            generate.record("engine", "http://a");
            let other = tracing::info_span!(parent: &step, "episode", episode_id = "t1.1");
            let (stages, open, waits) = spans.snapshot();
            assert_eq!(
                stages.iter().map(|stage| stage.what.as_str()).collect::<Vec<_>>(),
                ["step"]
            );
            assert_eq!(open, BTreeMap::from([("episode".into(), 1), ("generate".into(), 1)]));
            let expected =
                [("engine", "http://a"), ("episode_id", "t1.0"), ("run_id", "r"), ("step", "3")];
            let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(waits.first().unwrap().what, "generate");
            assert_eq!(waits.first().unwrap().fields, BTreeMap::from(expected));
            drop((generate, other, episode, step, run));
        });
        assert_eq!(spans.snapshot(), (Vec::new(), BTreeMap::new(), Vec::new()));
    }
}
