//! What the library logs, collected. One collector a process, so the test that wants it runs in a child.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Metadata, Subscriber};

/// One log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub level: Level,
    /// The message and the fields as `name=value`.
    pub text: String,
}

static EVENTS: Mutex<Vec<Event>> = Mutex::new(Vec::new());

/// Collects from here on, on all threads.
pub fn collect() {
    tracing::subscriber::set_global_default(Collector { into: &EVENTS }).unwrap();
}

/// What came so far at this level.
pub fn at(level: Level) -> Vec<String> {
    let events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    events.iter().filter(|event| event.level == level).map(|event| event.text.clone()).collect()
}

/// Not without a size: LeakSanitizer takes what is pointed behind for lost.
struct Collector {
    into: &'static Mutex<Vec<Event>>,
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("vm_zeroing")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let event = Event { level: *event.metadata().level(), text: text.0 };
        self.into.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?} "),
            name => write!(self.0, "{name}={value:?} "),
        };
    }
}
