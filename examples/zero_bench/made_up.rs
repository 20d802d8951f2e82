//! Figures that nobody measured, for the tests of what is made of figures.

use vm_zeroing::Method;

use crate::contend::{AtOnce, Beside, Contend, Line as MethodLine, Reader};
use crate::contestant::{Crossover, Kind, State};
use crate::machine::Machine;
use crate::measure::Shape;
use crate::memset::{Memset, at_size};
use crate::mmap::{Line, Mmap, OfPages};
use crate::stats::Stats;

/// A machine of the tests' own.
pub fn made_up_machine() -> Machine {
    Machine {
        cpu: "Model <&> 9".to_owned(),
        llc_bytes: Some(32 << 20),
        l2_bytes: None,
        kernel: "6.1".to_owned(),
        libc: "glibc 2.99".to_owned(),
        ..Machine::here().unwrap()
    }
}

/// Two sizes, of which the larger one is twice as fast for all but the cached methods.
pub fn made_up(state: State) -> Memset {
    let field = [
        ("rep-stosb", Kind::Method, Some(Method::RepStosb), 40.0),
        ("clzero", Kind::Method, Some(Method::Clzero), 50.0),
        ("libc::memset", Kind::Foreign, None, 200.0),
        ("Auto", Kind::Auto, Some(Method::Clzero), 50.0),
        ("Auto, calibrated", Kind::Calibrated, Some(Method::Clzero), 45.0),
        ("Auto, wrong hint", Kind::AutoWrongHint, Some(Method::RepStosb), 40.0),
        ("calibrated, wrong hint", Kind::CalibratedWrongHint, Some(Method::RepStosb), 40.0),
    ];
    let sizes = [(4096, 1.0), (64 << 20, 2.0)].map(|(size, times)| {
        let of_each = field.map(|(name, kind, method, rate)| {
            let rate = if method == Some(Method::RepStosb) { rate } else { rate * times };
            let early = kind == Kind::Auto && size == 4096;
            let method = if early { Some(Method::RepStosb) } else { method };
            (name.to_owned(), kind, method, Stats::of(vec![rate - 1.0, rate, rate + 1.0]))
        });
        at_size(size, Shape::new(state, 1, size, 1 << 26, 1 << 19), of_each.into())
    });
    Memset {
        state,
        page_size: "2 MiB pages".to_owned(),
        huge_share: None,
        threads: 1,
        runs: 3,
        yardstick: "rep-stosb".to_owned(),
        sizes: sizes.into(),
        crossovers: vec![Crossover {
            chooser: "Auto",
            from_bytes: 64 << 10,
            before: Method::RepStosb,
            after: Method::Clzero,
        }],
    }
}

pub fn made_up_mmap() -> Mmap {
    let line = |name: &str, rate: f64, relative| Line {
        name: name.to_owned(),
        threads: 2,
        gb_per_s: Stats::of(vec![rate]),
        relative,
    };
    let lines = vec![line("kernel, populate", 10.0, 1.0), line("service", 40.0, 4.0)];
    let (page_size, huge_share) = ("transparent hugepages".to_owned(), Some(0.5));
    Mmap { runs: 1, pages: vec![OfPages { page_size, huge_share, bytes: 1 << 30, chunk_bytes: 4096, lines }] }
}

pub fn made_up_contend() -> Contend {
    let beside = |method: &str, non_temporal, slowdown| Beside {
        method: method.to_owned(),
        non_temporal,
        ns_per_load: Stats::of(vec![10.0 * slowdown]),
        slowdown,
        gb_per_s: Stats::of(vec![33.0]),
    };
    let line = MethodLine {
        method: "avx2".to_owned(),
        non_temporal: true,
        gb_per_s: Stats::of(vec![80.0]),
        per_thread: 40.0,
    };
    Contend {
        page_size: "4 KiB pages".to_owned(),
        runs: 1,
        call_bytes: 4 << 20,
        at_once: vec![AtOnce { threads: 2, lines: vec![line] }],
        readers: vec![Reader {
            buffer_bytes: 8 << 20,
            clearing_threads: 1,
            alone_ns: Stats::of(vec![10.0]),
            beside: vec![beside("rep-stosb", false, 3.0), beside("avx2", true, 1.5)],
        }],
    }
}
