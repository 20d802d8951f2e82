//! Each protocol holds, and is seen to break where something is taken away from it.

use vm_zeroing_loom::{explore, *};

/// It holds in every order.
fn holds(name: &str, preemptions: Option<usize>, model: fn()) {
    let explored = explore(preemptions, model);
    println!("{name}: {} orders", explored.orders);
    assert_eq!(explored.failure, None, "{name}");
}

/// It breaks in one of them, as `how` says.
fn breaks(name: &str, preemptions: Option<usize>, model: fn(), how: &str) {
    let explored = explore(preemptions, model);
    let failure = explored.failure.unwrap_or_else(|| panic!("{name} holds without it"));
    println!("{name}: after {} orders: {failure}", explored.orders);
    assert!(failure.contains(how), "{name}: {failure}");
}

#[test] fn a1() { holds("all stores", Some(2), intact::completion::who_waits_sees_all_stores) }
#[test] fn a2() { holds("nt", Some(2), intact::completion::who_waits_sees_non_temporal_stores) }
#[test] fn a3() { holds("looks", None, intact::completion::who_looks_sees_all_stores) }
#[test] fn a4() { holds("everybody", Some(2), intact::completion::everybody_who_waits_returns) }
#[test] fn b1() { holds("cancel", Some(2), intact::cancel::cancel_against_the_last_chunk) }
#[test] fn b2() { holds("cancel middle", Some(2), intact::cancel::cancel_in_the_middle) }
#[test] fn b3() { holds("stuck", Some(2), intact::cancel::a_worker_that_does_not_come_back) }
#[test] fn x1() { breaks("no fence", Some(2), without_the_fence::completion::who_waits_sees_non_temporal_stores, "Causality") }
#[test] fn x2() { breaks("no release", None, released_without_release::completion::who_looks_sees_all_stores, "Causality") }
#[test] fn x3() { breaks("no lock", Some(2), notified_without_the_lock::completion::who_waits_sees_all_stores, "deadlock") }
#[test] fn x4() { breaks("over a store", Some(2), ended_over_a_store::cancel::cancel_against_the_last_chunk, "ausality") }
#[test] fn x5() { breaks("after the end", Some(2), confirmed_after_the_end::cancel::cancel_against_the_last_chunk, "ausality") }
