//! Each protocol holds in every order of its steps, and is seen to break where something is taken away from it.
//!
//! The number: how often a thread that could go on is interrupted by another one, at most.

use vm_zeroing_loom::explore;

/// One test for each model, of the library as it is.
macro_rules! holds {
    ($($test:ident: $preemptions:expr, $protocol:ident::$model:ident;)*) => {$(
        #[test]
        fn $test() {
            let explored = explore($preemptions, vm_zeroing_loom::intact::$protocol::$model);
            println!("{}: {} orders", stringify!($test), explored.orders);
            assert_eq!(explored.failure, None);
        }
    )*};
}

/// One test for each thing that is taken away: a model goes wrong, as the text says.
macro_rules! breaks {
    ($($variant:ident: $preemptions:expr, $protocol:ident::$model:ident, $how:expr;)*) => {$(
        #[test]
        fn $variant() {
            let explored = explore($preemptions, vm_zeroing_loom::$variant::$protocol::$model);
            let failure = explored.failure.expect("it holds without that");
            println!("{}: {} orders, then: {failure}", stringify!($variant), explored.orders);
            assert!(failure.contains($how), "{failure}");
        }
    )*};
}

/// Loom's words for memory that somebody touches without having been told of who touched it before.
const UNTOLD: &str = "Causality violation";
/// And for threads that all wait.
const FOR_EVER: &str = "deadlock";

holds! {
    who_waits_sees_all_stores: Some(3), completion::who_waits_sees_all_stores;
    who_waits_sees_non_temporal_stores: Some(3), completion::who_waits_sees_non_temporal_stores;
    who_looks_sees_all_stores: None, completion::who_looks_sees_all_stores;
    everybody_who_waits_returns: Some(3), completion::everybody_who_waits_returns;
    cancel_against_the_last_chunk: Some(3), cancel::cancel_against_the_last_chunk;
    cancel_in_the_middle: Some(3), cancel::cancel_in_the_middle;
    a_worker_that_does_not_come_back: None, cancel::a_worker_that_does_not_come_back;

    one_worker_and_one_task: None, parking::one_worker_and_one_task;
    one_worker_that_remembers: None, parking::one_worker_that_remembers;
    two_workers_that_remember: Some(2), parking::two_workers_that_remember;
    two_workers_and_two_tasks: Some(3), parking::two_workers_and_two_tasks;
    two_submitters: Some(2), parking::two_submitters;
    two_nodes: Some(3), parking::two_nodes;
    a_task_found_instead_of_another: Some(3), parking::a_task_found_instead_of_another;
    a_nap_until_the_rate_allows_it: Some(2), parking::a_nap_until_the_rate_allows_it;
    a_worker_that_was_replaced: Some(2), parking::a_worker_that_was_replaced;
    a_sleeper_that_is_told_to_leave: Some(2), parking::a_sleeper_that_is_told_to_leave;

    submit_against_drop: Some(3), closing::submit_against_drop;
    the_last_worker_out: Some(2), closing::the_last_worker_out;
    dropped_twice: Some(3), closing::dropped_twice;
    drop_against_a_stuck_worker: None, closing::drop_against_a_stuck_worker;

    one_token_at_a_time: None, burst::one_at_a_time;
    a_token_seen_while_it_is_taken: None, burst::seen_while_it_is_taken;
}

breaks! {
    without_the_fence: Some(2), completion::who_waits_sees_non_temporal_stores, "of chunk";
    released_without_release: Some(2), completion::who_looks_sees_all_stores, UNTOLD;
    notified_without_the_lock: Some(2), completion::who_waits_sees_all_stores, FOR_EVER;
    waiting_is_not_counted: Some(2), completion::who_waits_sees_all_stores, FOR_EVER;
    let_go_after_the_waiters: Some(2), completion::who_waits_sees_all_stores, UNTOLD;
    told_before_the_end: Some(2), completion::who_looks_sees_all_stores, "readable and not over";
    rung_without_a_mark: Some(2), completion::who_looks_sees_all_stores, "over and not readable";
    ended_over_a_store: Some(2), cancel::cancel_against_the_last_chunk, UNTOLD;
    confirmed_after_the_end: Some(2), cancel::cancel_against_the_last_chunk, UNTOLD;
    stop_is_not_heard: Some(2), cancel::a_worker_that_does_not_come_back, FOR_EVER;
    looked_before_the_lock_of_the_wait: Some(2), cancel::a_worker_that_does_not_come_back, FOR_EVER;

    without_the_adders_fence: Some(2), parking::one_worker_and_one_task, FOR_EVER;
    without_the_sleepers_fence: Some(2), parking::one_worker_and_one_task, FOR_EVER;
    woken_twice: Some(2), parking::two_nodes, FOR_EVER;
    wakes_are_not_passed_on: Some(2), parking::a_task_found_instead_of_another, FOR_EVER;
    naps_that_stay_idle: Some(2), parking::a_nap_until_the_rate_allows_it, FOR_EVER;
    counted_after_the_look: Some(2), parking::one_worker_that_remembers, FOR_EVER;
    counted_before_it_is_queued: Some(2), parking::one_worker_that_remembers, FOR_EVER;
    left_in_silence: Some(2), parking::a_worker_that_was_replaced, FOR_EVER;

    entered_without_the_lock: Some(2), closing::submit_against_drop, FOR_EVER;
    called_without_a_count: Some(2), closing::the_last_worker_out, FOR_EVER;
    called_by_permits: Some(2), parking::a_sleeper_that_is_told_to_leave, FOR_EVER;
    asleep_without_a_look_at_the_flag: Some(2), closing::the_last_worker_out, FOR_EVER;

    given_back_by_everybody: Some(2), burst::one_at_a_time, "had twice";
    not_given_back_when_dropped: Some(2), burst::seen_while_it_is_taken, "given back";
}
