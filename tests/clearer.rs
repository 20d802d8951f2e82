//! The bare stores: a `Clearer` zeroes the part it is given and no other byte, by the method that it names,
//! or refuses and touches nothing.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::mapped::Mapped;
use common::{KIB, MIB, PAGE};
use vm_zeroing::{
    Calibration, CalibrationError, Clearer, Concurrency, CpuDescription, HostRange, Method, MethodError,
    RequestError, Reuse, ZeroingService,
};

/// What every byte holds before.
const STALE: u8 = 0xa5;

/// A range between canaries, and around those pages that nobody may touch.
struct Between {
    memory: Arc<Mapped>,
    range: HostRange,
}

impl Between {
    fn canaries(len: u64) -> Self {
        let memory = Arc::new(Mapped::anonymous(len + 4 * PAGE));
        memory.forbid(0, PAGE);
        memory.forbid(len + 3 * PAGE, PAGE);
        let range = memory.host_range(2 * PAGE, len);
        Self { memory, range }
    }

    /// Puts the old bytes back, canaries included.
    fn make_stale(&self) {
        self.memory.fill(PAGE, self.range.len() + 2 * PAGE, STALE);
    }

    /// `len` bytes at `offset` are zero, everything around them is as it was.
    fn assert_zero_at(&self, offset: u64, len: u64, what: &str) {
        let (from, rest) = (2 * PAGE + offset, self.range.len() - offset - len);
        assert!(self.memory.holds(from, len, 0), "{what}: bytes left of {len} at {offset}");
        assert!(self.memory.holds(PAGE, PAGE + offset, STALE), "{what}: bytes below {len} at {offset}");
        assert!(self.memory.holds(from + len, rest + PAGE, STALE), "{what}: bytes above {len} at {offset}");
    }

    fn assert_untouched(&self, what: &str) {
        assert!(self.memory.holds(PAGE, self.range.len() + 2 * PAGE, STALE), "{what}");
    }
}

/// By each method of this CPU, by the rule, and by a calibration.
fn clearers() -> Vec<(String, Clearer)> {
    let forced = CpuDescription::detect().methods().into_iter();
    let forced = forced.map(|method| (method.to_string(), Clearer::with_method(method).unwrap()));
    let calibrated = Clearer::calibrated(&by_rule()).unwrap();
    forced.chain([("auto".to_owned(), Clearer::auto()), ("calibrated".to_owned(), calibrated)]).collect()
}

/// A calibration that had no time to measure.
fn by_rule() -> Calibration {
    ZeroingService::builder().calibrate(Duration::ZERO).unwrap()
}

/// R12: lengths around a line and a page, at offsets that are no multiples of anything.
#[test]
fn exactly_the_part() {
    let place = Between::canaries(4 * PAGE);
    for (name, clearer) in clearers() {
        for &reuse in Reuse::ALL {
            for len in [0, 1, 63, 64, 65, 127, 4095, 4096, 4097] {
                // From the first byte, up to the last one, and in between.
                for offset in [0, 1, 61, 64, PAGE - 1, PAGE + 7, 4 * PAGE - len] {
                    place.make_stale();
                    clearer.clear(&place.range, offset, len, reuse).unwrap();
                    place.assert_zero_at(offset, len, &name);
                }
            }
        }
    }
}

/// Long enough that another method than that of a small part is chosen.
#[test]
fn exactly_a_long_part() {
    let whole = 4 * MIB;
    let place = Between::canaries(whole);
    for (name, clearer) in clearers() {
        for (offset, len) in [(0, whole), (1, whole - 1), (0, whole - 63), (4095, 3 * MIB + 77)] {
            for &reuse in Reuse::ALL {
                place.make_stale();
                clearer.clear(&place.range, offset, len, reuse).unwrap();
                place.assert_zero_at(offset, len, &name);
            }
        }
    }
}

/// What `method_for` foretells, `clear` does and says.
#[test]
fn the_method_that_was_foretold() {
    let place = Between::canaries(4 * MIB);
    for (name, clearer) in clearers() {
        for shift in 0..=22 {
            for len in [(1 << shift) - 1, 1 << shift] {
                for &reuse in Reuse::ALL {
                    let told = clearer.method_for(len, reuse, Concurrency::One);
                    let taken = clearer.clear(&place.range, 0, len, reuse).unwrap();
                    assert_eq!(taken, told, "{name}, {len} bytes, {reuse:?}");
                    assert!(CpuDescription::detect().supports(taken).is_ok());
                }
            }
        }
    }
}

#[test]
fn one_method_alone_is_taken_at_its_word() {
    for method in CpuDescription::detect().methods() {
        let clearer = Clearer::with_method(method).unwrap();
        for (len, reuse, concurrency) in situations() {
            assert_eq!(clearer.method_for(len, reuse, concurrency), method);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn what_is_read_soon_stays_in_the_caches() {
    let overridden = by_rule().with_method(Reuse::Cold, .., uncached());
    let calibrated = Clearer::calibrated(&overridden).unwrap();
    for clearer in [Clearer::auto(), calibrated] {
        for (len, reuse, concurrency) in situations() {
            let method = clearer.method_for(len, reuse, concurrency);
            assert!(reuse != Reuse::Soon || !method.is_non_temporal(), "{method} for {len} bytes");
        }
    }
}

/// The rule alone, seen from outside: it is what `CpuDescription::choose` says.
#[test]
fn unmeasured_it_is_the_rule() {
    let (here, calibrated) = (CpuDescription::detect(), Clearer::calibrated(&by_rule()).unwrap());
    for (len, reuse, concurrency) in situations() {
        assert_eq!(Clearer::auto().method_for(len, reuse, concurrency), here.choose(len, reuse));
        // Between the classes the nearer one decides, so that the rule may start up to half a class off.
        if len.is_power_of_two()
            && len.trailing_zeros().is_multiple_of(2)
            && (4 * KIB..=64 * MIB).contains(&len)
        {
            assert_eq!(calibrated.method_for(len, reuse, concurrency), here.choose(len, reuse), "{len}");
        }
    }
}

/// An override holds for its lengths (from half of the least class to half of the one beyond the last), for
/// its reuse, and however many clear.
#[cfg(target_arch = "x86_64")]
#[test]
fn what_a_calibration_says_holds_for_its_lengths() {
    let (small, method) = (Clearer::auto(), uncached());
    let calibration = by_rule().with_method(Reuse::Cold, 16 * KIB..=64 * KIB, method);
    let clearer = Clearer::calibrated(&calibration).unwrap();
    for &concurrency in Concurrency::ALL {
        let cold = |len| clearer.method_for(len, Reuse::Cold, concurrency);
        assert_eq!([8 * KIB, 16 * KIB, 64 * KIB, 128 * KIB - 1].map(cold), [method; 4]);
        let ruled = |len| small.method_for(len, Reuse::Cold, concurrency);
        assert_eq!([0, 1, 8 * KIB - 1].map(cold), [0, 1, 8 * KIB - 1].map(ruled));
        assert_ne!(cold(8 * KIB - 1), method);
        assert_eq!(cold(256 * KIB), calibration.choice(256 * KIB, Reuse::Cold, concurrency).unwrap().method);
        assert_ne!(clearer.method_for(16 * KIB, Reuse::Soon, concurrency), method);
    }
    // And it is what runs.
    let place = Between::canaries(128 * KIB);
    place.make_stale();
    assert_eq!(clearer.clear(&place.range, 13, 20 * KIB, Reuse::Cold).unwrap(), method);
    place.assert_zero_at(13, 20 * KIB, "calibrated");
}

#[test]
fn a_part_that_leaves_the_range_is_refused() {
    let whole = 3 * PAGE;
    let place = Between::canaries(whole);
    place.make_stale();
    let outside = [
        (0, whole + 1),
        (1, whole),
        (whole - 1, 2),
        (whole, 1),
        (whole + 1, 0),
        (0, u64::MAX),
        (1, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (u64::MAX - PAGE + 1, PAGE + 64),
    ];
    for (name, clearer) in clearers() {
        for (offset, len) in outside {
            let refused = clearer.clear(&place.range, offset, len, Reuse::Cold).unwrap_err();
            let said = refused.to_string();
            let RequestError::OutOfRange { offset: from, len: bytes, range_len } = refused else {
                panic!("{name}: {said}");
            };
            assert_eq!((from, bytes, range_len), (offset, len, whole));
            assert!(said.contains(&offset.to_string()) && said.contains(&whole.to_string()), "{said}");
            place.assert_untouched(&name);
        }
        // The empty part at the very end is no such thing.
        clearer.clear(&place.range, whole, 0, Reuse::Soon).unwrap();
        place.assert_untouched(&name);
    }
    let empty = place.memory.host_range(2 * PAGE, 0);
    assert!(Clearer::auto().clear(&empty, 0, 0, Reuse::Cold).is_ok());
    assert!(Clearer::auto().clear(&empty, 0, 1, Reuse::Cold).is_err());
    place.assert_untouched("an empty range");
}

#[test]
fn a_method_that_is_not_here_is_named() {
    let here = CpuDescription::detect().methods();
    let names: Vec<_> = here.iter().map(|method| method.name()).collect();
    let absent: Vec<_> = Method::ALL.into_iter().filter(|method| !here.contains(method)).collect();
    if absent.is_empty() {
        println!("skipped: this CPU has every method");
    }
    for method in absent {
        let refused = Clearer::with_method(method).unwrap_err();
        let said = refused.to_string();
        let MethodError::Unavailable { asked, reason, offered } = refused.clone() else { panic!("{said}") };
        assert_eq!((asked, offered), (method, names.join(", ")));
        assert!(
            said.starts_with(method.name()) && said.contains(&reason) && said.ends_with(&names.join(", "))
        );

        let chosen = by_rule().with_method(Reuse::Cold, .., method);
        let wanted = CalibrationError::Method(refused);
        assert_eq!(Clearer::calibrated(&chosen).unwrap_err(), wanted);
        assert!(wanted.to_string().contains(&said), "{wanted}");
    }
}

#[test]
fn a_calibration_of_another_cpu_is_refused() {
    let mut other = CpuDescription::detect();
    other.family += 1;
    let calibration = ZeroingService::builder().cpu(other).calibrate(Duration::ZERO).unwrap();
    let refused = Clearer::calibrated(&calibration).unwrap_err();
    assert!(matches!(refused, CalibrationError::OtherCpu { .. }), "{refused}");
    let family = CpuDescription::detect().family;
    for named in [format!("family {}", family + 1), format!("family {family} ")] {
        assert!(refused.to_string().contains(&named), "{refused}");
    }
}

/// The last of this CPU's methods that bypasses the caches, which the rule does not take for small parts.
#[cfg(target_arch = "x86_64")]
fn uncached() -> Method {
    let methods = CpuDescription::detect().methods();
    methods.into_iter().rev().find(|method| method.is_non_temporal()).unwrap()
}

/// Lengths around all powers of two, up to the largest, for each reuse and concurrency.
fn situations() -> impl Iterator<Item = (u64, Reuse, Concurrency)> {
    let lengths = (0..64).flat_map(|shift| [(1 << shift) - 1, 1 << shift]).chain([u64::MAX]);
    lengths.flat_map(|len| {
        let pairs = Reuse::ALL
            .iter()
            .copied()
            .flat_map(|reuse| Concurrency::ALL.iter().map(move |workers| (reuse, *workers)));
        pairs.map(move |(reuse, workers)| (len, reuse, workers))
    })
}
