//! A pattern goes to every byte of the range and no other, each by its offset in the range.

use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::guarded::{CANARY, Guarded, PAGE};
use super::methods_here;
use crate::clear::pattern::{fill, filled_words};
use crate::clear::{Method, lacks_here};

/// Every byte another one, none of them a canary.
const TEMPLATE: [u8; 64] = {
    let mut template = [0; 64];
    let mut at = 0;
    while at < 64 {
        template[at] = 1 + at as u8;
        at += 1;
    }
    template
};

/// Fills `at .. at + len` between canaries and looks at each byte of the memory.
fn check(memory: &mut Guarded, method: Method, at: usize, len: usize, template: &[u8; 64]) {
    memory.fill(CANARY);
    fill(method, &memory.chunk(at, len), template);
    let wrong = memory.bytes().iter().enumerate().position(|(byte, &found)| {
        let inside = (at..at + len).contains(&byte);
        found != if inside { template[(byte - at) % 64] } else { CANARY }
    });
    assert_eq!(wrong, None, "{method}: filling {len} bytes at {at} of {} got byte wrong", memory.len());
}

#[test]
fn fills_exactly_the_range() {
    let mut memory = Guarded::new(3 * PAGE);
    for method in Method::ALL {
        for len in [0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 4095, 4096, 4097] {
            let last = memory.len() - len;
            // Against the lower guard, against the upper one, and at odd offsets between canaries.
            for at in [0, 1, 7, 8, 63, 64, 65, PAGE - 1, PAGE + 7, last - 1, last] {
                check(&mut memory, method, at, len, &TEMPLATE);
            }
        }
    }
}

/// What replaces a method is one of its kind, and here.
#[test]
fn says_by_which_method() {
    let here = methods_here();
    let mut memory = Guarded::new(PAGE);
    for method in Method::ALL {
        let used = fill(method, &memory.chunk(0, PAGE), &TEMPLATE);
        assert!(here.contains(&used), "{method} ran {used}");
        let zeroes_only = matches!(method, Method::RepStosb | Method::RepStosq | Method::Clzero);
        assert_eq!(used == method, here.contains(&method) && !zeroes_only, "{method} ran {used}");
        assert_eq!(used.is_non_temporal(), method.is_non_temporal(), "{method} ran {used}");
    }
    let best = if lacks_here(Method::Avx2).is_none() { Method::Avx2 } else { Method::Sse2 };
    assert_eq!(fill(Method::Clzero, &memory.chunk(0, PAGE), &TEMPLATE), best);
}

#[test]
fn words_are_filled_whatever_their_number() {
    for count in [0, 1, 7, 8, 9, 63, 4095, 4096, 4097] {
        for word in [0, 0x0123_4567_89ab_cdef, u64::MAX] {
            let words = filled_words(count, word);
            assert_eq!(words.len(), count);
            assert!(words.iter().all(|found| found.load(Ordering::Relaxed) == word), "{count} of {word:#x}");
        }
    }
}

proptest! {
    #[test]
    fn agrees_with_a_naive_oracle(
        method in prop::sample::select(Method::ALL.to_vec()),
        from in 0..3 * PAGE,
        len in 0..=3 * PAGE,
        template in any::<[[u8; 32]; 2]>(),
        seed in any::<u64>(),
    ) {
        let template: [u8; 64] = template.as_flattened().try_into().unwrap();
        let mut memory = Guarded::new(3 * PAGE);
        let len = len.min(memory.len() - from);
        for at in 0..memory.len() {
            memory.set(at, seed.rotate_left(at as u32) as u8);
        }
        let mut wanted = memory.bytes().to_vec();
        let range = wanted.iter_mut().skip(from).take(len);
        range.zip(template.iter().cycle()).for_each(|(byte, stored)| *byte = *stored);
        fill(method, &memory.chunk(from, len), &template);
        prop_assert!(memory.bytes() == wanted, "{method} at {from}, {len} bytes");
    }
}
