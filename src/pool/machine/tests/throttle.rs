//! The rate holds over any time, whatever is asked, paid and changed.

use std::time::Duration;

use proptest::prelude::*;

use crate::pool::machine::Throttle;

/// What the bucket holds at most, as a time.
const DEPTH: f64 = 0.005;

#[derive(Debug, Clone, Copy)]
enum Step {
    Pass(Duration),
    /// So many workers ask, and then each of those that may begin pays for a chunk.
    Begin(u32, u64),
    /// To the moment that the answer named.
    Sleep,
    Change(Option<u64>),
}

fn step(rate: impl Strategy<Value = u64> + 'static) -> impl Strategy<Value = Step> {
    let rate = prop_oneof![8 => rate, 1 => Just(0)];
    prop_oneof![
        4 => (0u64..20_000).prop_map(|micros| Step::Pass(Duration::from_micros(micros))),
        8 => (1..=WORKERS, 1..=CHUNK).prop_map(|(workers, bytes)| Step::Begin(workers, bytes)),
        4 => Just(Step::Sleep),
        2 => prop::option::weighted(0.9, rate).prop_map(Step::Change),
    ]
}

const WORKERS: u32 = 4;
const CHUNK: u64 = 1 << 20;

/// What happened: when, how many bytes were begun, and the rate from then on.
type History = Vec<(f64, u64, Option<u64>)>;

/// Drives a bucket; what it says must agree with itself.
fn drive(throttle: &mut Throttle, steps: &[Step], mut now: Duration) -> History {
    let mut history = vec![(now.as_secs_f64(), 0, throttle.rate())];
    for step in steps {
        match *step {
            Step::Pass(time) => now = now.saturating_add(time),
            Step::Sleep => match throttle.ask(now) {
                Ok(()) => assert_ne!(throttle.rate(), Some(0)),
                Err(None) => assert_eq!(throttle.rate(), Some(0), "only who changes the rate can help"),
                Err(Some(until)) => {
                    assert!(until > now, "it may begin now");
                    now = until;
                    assert_eq!(throttle.ask(now), Ok(()), "who comes when it was told to may begin");
                }
            },
            Step::Begin(workers, bytes) => {
                let may = (0..workers).filter(|_| throttle.ask(now).is_ok()).count() as u64;
                assert!(may == 0 || may == u64::from(workers), "asking changes nothing");
                assert!(may == 0 || throttle.rate() != Some(0));
                (0..may).for_each(|_| throttle.pay(bytes, now));
                history.push((now.as_secs_f64(), may * bytes, throttle.rate()));
            }
            Step::Change(rate) => {
                let wait = |throttle: &mut Throttle| throttle.ask(now).err().flatten();
                let before = wait(throttle);
                let was_paused = throttle.rate() == Some(0);
                throttle.set_rate(rate, now);
                assert_eq!(throttle.rate(), rate);
                // Nobody waits the longer for it, be it that nobody might begin at all.
                if let Some(after) = wait(throttle).filter(|_| !was_paused) {
                    assert!(before.is_some_and(|before| after <= before), "{before:?} became {after:?}");
                }
                history.push((now.as_secs_f64(), 0, rate));
            }
        }
    }
    history
}

/// The bytes begun in any window are no more than what comes in at the highest rate in it, the bucket, and a chunk
/// of each worker. A window in which there was no rate for a time says nothing.
fn check(history: &History, chunk: u64) {
    for (first, (from, ..)) in history.iter().enumerate() {
        let (mut bytes, mut highest) = (0u64, Some(0));
        // The rate when the window opens.
        let before = history[..=first].last().and_then(|(.., rate)| *rate);
        for (to, begun, rate) in &history[first..] {
            highest = highest.and_then(|highest: u64| Some(highest.max((*rate)?).max(before?)));
            let Some(highest) = highest else { break };
            bytes += begun;
            let most = highest as f64 * (to - from + DEPTH) + (u64::from(WORKERS) * chunk) as f64;
            assert!(bytes as f64 <= most * 1.000_001 + 1.0, "{bytes} > {most} from {from} to {to}");
        }
    }
}

proptest! {
    #[test]
    fn the_rate_holds_over_any_time(
        rate in prop_oneof![Just(0u64), 1u64..1 << 32],
        steps in prop::collection::vec(step(1u64..1 << 32), 1..60),
    ) {
        let history = drive(&mut Throttle::new(Some(rate)), &steps, Duration::ZERO);
        check(&history, CHUNK);
    }

    /// A rate that is changed all the time is a rate all the same.
    #[test]
    fn changes_forgive_nothing(rates in prop::collection::vec(1u64..1 << 24, 1..8), times in 1usize..200) {
        let changes = rates.iter().cycle().take(times);
        let steps: Vec<Step> = changes
            .flat_map(|rate| [Step::Begin(WORKERS, CHUNK), Step::Pass(Duration::from_millis(1)), Step::Change(Some(*rate))])
            .collect();
        let history = drive(&mut Throttle::new(Some(rates[0])), &steps, Duration::ZERO);
        check(&history, CHUNK);
    }

    /// As much as it may, to the end: the rate is reached too.
    #[test]
    fn what_is_allowed_is_had(rate in 1u64 << 16..1 << 36, bytes in 1u64..CHUNK) {
        let mut throttle = Throttle::new(Some(rate));
        let steps = [Step::Begin(1, bytes), Step::Sleep].repeat(100);
        let history = drive(&mut throttle, &steps, Duration::ZERO);
        let (last, ..) = history[history.len() - 1];
        let begun: u64 = history.iter().map(|(_, bytes, _)| bytes).sum();
        // The microsecond is what a sleep may be the longer for.
        prop_assert!(begun as f64 >= rate as f64 * (last - 100.0 * 2e-6), "{} bytes in {} s", begun, last);
    }

    /// Any numbers: no panic, no overflow, and 0 stays a pause.
    #[test]
    fn any_numbers(
        rate in prop::option::of(any::<u64>()),
        steps in prop::collection::vec((any::<u64>(), any::<u32>(), any::<u64>(), prop::option::of(any::<u64>()), 0..6), 1..40),
    ) {
        let mut throttle = Throttle::new(rate);
        for (seconds, nanos, bytes, rate, what) in steps {
            let now = match what {
                0 => Duration::MAX,
                1 => Duration::ZERO,
                _ => Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into())),
            };
            let asked = throttle.ask(now);
            prop_assert!(throttle.rate() != Some(0) || asked == Err(None));
            prop_assert!(throttle.rate().is_some() || asked == Ok(()));
            throttle.pay(bytes, now);
            prop_assert_eq!(throttle.longest_chunk().is_some(), throttle.rate().is_some());
            if what == 2 {
                throttle.set_rate(rate.map(|rate| if seconds % 3 == 0 { u64::MAX } else { rate }), now);
            }
        }
        throttle.set_rate(Some(0), Duration::ZERO);
        prop_assert_eq!(throttle.ask(Duration::MAX), Err(None));
    }
}
