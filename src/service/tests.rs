//! What a calibration says about small jobs.

use serde_json::{Value, json};

use super::*;

/// Nothing was measured; then what `edit` makes of its choices, as if it had been saved and read back.
fn calibration(edit: impl Fn(&mut Value)) -> Calibration {
    let unmeasured = ZeroingService::builder().calibrate(Duration::ZERO).unwrap();
    let mut saved = serde_json::to_value(unmeasured).unwrap();
    saved["choices"].as_array_mut().unwrap().iter_mut().for_each(edit);
    serde_json::from_value(saved).unwrap()
}

/// Whether a choice is the one for 2 MiB of cold memory and one worker.
fn is_asked(choice: &Value) -> bool {
    choice["reuse"] == "cold" && choice["concurrency"] == "one" && choice["from_bytes"] == SMALL_JOB
}

#[test]
fn small_jobs_are_the_bytes_of_200_microseconds() {
    for (gb_per_s, bytes) in
        [(1.0, 200_000), (0.25, 50_000), (10.0, 2_000_000), (20.97, 4_194_000), (20.98, CHUNK), (92.0, CHUNK)]
    {
        let calibration = calibration(|choice| {
            // What is measured for other lengths, for all workers and in the caches says nothing.
            choice["gb_per_s"] = if is_asked(choice) { json!(gb_per_s) } else { json!(7.0) };
        });
        assert_eq!(small_job(&calibration), Some(bytes), "{gb_per_s} GB/s");
    }
}

#[test]
fn without_a_figure_there_is_no_number_of_bytes() {
    assert_eq!(small_job(&calibration(|_| ())), None);
    let others =
        calibration(|choice| choice["gb_per_s"] = if is_asked(choice) { json!(null) } else { json!(7.0) });
    assert_eq!(small_job(&others), None);
}
