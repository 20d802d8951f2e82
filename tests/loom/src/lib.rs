//! The protocols of the pool, run by loom in every order of their steps: the library's own files over loom's
//! primitives, and the same with something taken away, which must go wrong. See `README.md`.
#![cfg(not(test))]
#![allow(
    dead_code,
    unused_imports,
    unused_mut,
    clippy::arc_with_non_send_sync,
    clippy::duplicate_mod,
    clippy::nonminimal_bool,
    reason = "variants are copies, and not written by hand; loom runs one thread at a time"
)]

#[path = "../../../src/extent/mod.rs"]
mod extent;
mod sync;

include!(concat!(env!("OUT_DIR"), "/variants.rs"));

/// What came of a model.
#[derive(Debug)]
pub struct Explored {
    /// How many orders were run.
    pub orders: usize,
    /// What went wrong in the last of them.
    pub failure: Option<String>,
}

/// Runs a model in every order of its steps in which running threads are interrupted `preemptions` times at most
/// (`None`: in every order), until one goes wrong.
pub fn explore(preemptions: Option<usize>, model: fn()) -> Explored {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    let orders = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    let failed = catch_unwind(AssertUnwindSafe(|| {
        builder.check(move || {
            count.fetch_add(1, Ordering::Relaxed);
            sync::begin();
            model();
        });
    }));
    let failure = failed.err().map(|what| {
        let text = what.downcast_ref::<String>().cloned();
        text.or_else(|| what.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    });
    Explored { orders: orders.load(Ordering::Relaxed), failure }
}
