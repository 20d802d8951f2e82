//! The length of a chunk stays within its bounds and settles.

use std::time::Duration;

use proptest::prelude::*;

use crate::pool::machine::Grain;

fn time() -> impl Strategy<Value = Duration> {
    let short = (0..4_000_000u64).prop_map(Duration::from_nanos);
    prop_oneof![8 => short, 1 => any::<u64>().prop_map(Duration::from_secs), 1 => Just(Duration::MAX)]
}

proptest! {
    /// Whatever it learns from.
    #[test]
    fn within_bounds(
        most in any::<u64>(),
        limits in prop::collection::vec(prop::option::of(any::<u64>()), 1..60),
        lessons in prop::collection::vec((any::<bool>(), any::<u64>(), time()), 1..60),
    ) {
        let mut grain = Grain::new(most);
        let longest = most.max(Grain::LEAST);
        prop_assert!(grain.next(None) > longest / 2, "it begins with the longest");
        for ((whole, bytes, took), limit) in lessons.into_iter().zip(limits) {
            let (before, limited) = (grain.next(None), grain.next(limit));
            prop_assert!(before.is_power_of_two() && limited.is_power_of_two());
            prop_assert!((Grain::LEAST..=longest).contains(&before));
            prop_assert!((Grain::LEAST..=before).contains(&limited));
            prop_assert!(limit.is_none_or(|limit| limited <= limit.max(Grain::LEAST)));
            let bytes = if whole { before } else { bytes };
            grain.learn(bytes, took);
            let after = grain.next(None);
            if took > Grain::TARGET {
                prop_assert_eq!(after, (before / 2).max(Grain::LEAST));
            } else if after > before {
                prop_assert!(after / 2 == before && bytes >= before && took < Grain::TARGET / 4);
            } else {
                prop_assert_eq!(after, before);
            }
        }
    }

    /// On memory of one speed it comes to a length that takes as long as it should, or to one of its bounds, and
    /// stays there; whatever it was used to.
    #[test]
    fn settles(most in 16u32..40, used_to in 0u32..40, bytes_per_ms in 1u64..1 << 40) {
        let mut grain = Grain::new(1 << most);
        for _ in 0..used_to {
            grain.learn(grain.next(None), Grain::TARGET * 2);
        }
        let took = |bytes: u64| Duration::from_secs_f64(bytes as f64 / bytes_per_ms as f64 / 1000.0);
        for _ in 0..40 {
            grain.learn(grain.next(None), took(grain.next(None)));
        }
        let settled = grain.next(None);
        prop_assert!(settled == Grain::LEAST || took(settled) <= Grain::TARGET, "too long: {}", settled);
        prop_assert!(settled == 1 << most || took(settled) >= Grain::TARGET / 4, "too short: {}", settled);
        grain.learn(settled, took(settled));
        prop_assert_eq!(grain.next(None), settled);
    }
}
