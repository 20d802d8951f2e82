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

#[test] fn c1() { holds("c1", None, intact::parking::one_worker_and_one_task) }
#[test] fn c2() { holds("c2", Some(2), intact::parking::two_workers_and_two_tasks) }
#[test] fn c3() { holds("c3", Some(2), intact::parking::two_submitters) }
#[test] fn c4() { holds("c4", Some(2), intact::parking::a_nap_until_the_rate_allows_it) }
#[test] fn c5() { holds("c5", Some(2), intact::parking::a_worker_that_was_replaced) }
#[test] fn y1() { breaks("y1", None, without_the_adders_fence::parking::one_worker_and_one_task, "deadlock") }
#[test] fn y2() { breaks("y2", None, without_the_sleepers_fence::parking::one_worker_and_one_task, "deadlock") }
#[test] fn y3() { breaks("y3", Some(2), woken_twice::parking::two_nodes, "deadlock") }
#[test] fn y4() { breaks("y4", Some(2), wakes_not_passed_on::parking::a_task_found_instead_of_another, "deadlock") }
#[test] fn c6() { holds("c6", Some(2), intact::parking::two_nodes) }
#[test] fn c7() { holds("c7", Some(2), intact::parking::a_task_found_instead_of_another) }
