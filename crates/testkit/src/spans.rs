//! Records spans and events, so that a test can check what a subscriber would see.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, SpanRef};

/// Fields of a span or event, as text.
pub type Fields = BTreeMap<&'static str, String>;

/// A span and those around it, outermost first: name and fields.
pub type SpanPath = Vec<(&'static str, Fields)>;

/// Collects the closed spans and the events of the current thread.
#[derive(Debug, Clone, Default)]
pub struct SpanCollector(Arc<Mutex<Collected>>);

#[derive(Debug, Default)]
struct Collected {
    spans: Vec<SpanPath>,
    events: Vec<(Fields, SpanPath)>,
}

impl SpanCollector {
    /// Collects on this thread until the guard is dropped.
    pub fn install() -> (Self, DefaultGuard) {
        let collector = Self::default();
        let subscriber = tracing_subscriber::registry().with(collector.clone());
        (collector, tracing::subscriber::set_default(subscriber))
    }

    /// Every span that was closed, with its final fields.
    pub fn spans(&self) -> Vec<SpanPath> {
        self.collected().spans.clone()
    }

    /// Every event, with the spans that it was in.
    pub fn events(&self) -> Vec<(Fields, SpanPath)> {
        self.collected().events.clone()
    }

    fn collected(&self) -> MutexGuard<'_, Collected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Visitor<'a>(&'a mut Fields);

impl Visit for Visitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

fn path<S: for<'a> LookupSpan<'a>>(span: &SpanRef<'_, S>) -> SpanPath {
    let with_fields = |span: SpanRef<'_, S>| {
        let fields = span.extensions().get::<Fields>().cloned().unwrap_or_default();
        (span.name(), fields)
    };
    span.scope().from_root().map(with_fields).collect()
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanCollector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::new();
        attributes.record(&mut Visitor(&mut fields));
        span.extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            values.record(&mut Visitor(fields));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::new();
        event.record(&mut Visitor(&mut fields));
        let path = context.event_span(event).map(|span| path(&span)).unwrap_or_default();
        self.collected().events.push((fields, path));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        if let Some(span) = context.span(&id) {
            self.collected().spans.push(path(&span));
        }
    }
}
