//! What a CPU offers and what is chosen from it (R12, R13, R14), through descriptions and through CPUID.

use std::str::FromStr;

use proptest::prelude::*;
use raw_cpuid::{CpuIdReader, CpuIdResult};

use super::{COLD, boastful, clearer, methods_here};
use crate::clear::rule::{COLD_FROM, COLD_FROM_AT_MOST};
use crate::clear::x86_64::from_cpuid;
use crate::clear::{CpuDescription, Method, Reuse, Vendor, lacks_here};
use crate::error::MethodError;

const HUGE: u64 = 1 << 40;

#[test]
fn names_are_read_back_in_any_case() {
    for method in Method::ALL {
        assert_eq!(Method::from_str(&method.to_string()), Ok(method));
        assert_eq!(method.name().to_uppercase().parse(), Ok(method));
    }
    let Err(MethodError::Unknown { asked, known }) = Method::from_str("memset") else {
        panic!("an unknown name was read");
    };
    assert_eq!(asked, "memset");
    assert_eq!(known, "rep-stosb, rep-stosq, movnti, sse2, avx2, avx512, clzero, movdir64b, portable");
}

#[cfg(feature = "serde")]
#[test]
fn serialised_as_the_name() {
    for method in Method::ALL {
        assert_eq!(serde_json::to_value(method).unwrap(), serde_json::json!(method.name()));
    }
}

#[test]
fn the_baseline_has_what_every_cpu_has() {
    let bare = CpuDescription::bare();
    assert_eq!(
        bare.methods(),
        [Method::RepStosb, Method::RepStosq, Method::Movnti, Method::Sse2, Method::Portable]
    );
    assert_eq!(bare.choose(0, Reuse::Cold), Method::RepStosq);
    assert_eq!(bare.choose(HUGE, Reuse::Cold), Method::Sse2);
}

/// R13: the CPU has the instructions, the system does not save the registers.
#[test]
fn no_wide_vectors_without_their_state() {
    let mut cpu = boastful();
    cpu.vendor = Vendor::Intel;
    assert!(cpu.supports(Method::Avx2).is_ok() && cpu.supports(Method::Avx512).is_ok());

    let mut disabled = cpu.clone();
    disabled.osxsave = false;
    let mut narrow = cpu.clone();
    narrow.xcr0 = 0b11;
    for cpu in [disabled, narrow] {
        for method in [Method::Avx2, Method::Avx512] {
            let refused = cpu.supports(method).unwrap_err().to_string();
            assert!(refused.contains("OSXSAVE and XCR0"), "{refused}");
            assert!(clearer(Some(method), &cpu).is_err());
            assert!(!cpu.methods().contains(&method));
        }
        assert_eq!(cpu.choose(HUGE, Reuse::Cold), Method::Sse2);
    }
    // Each of the three bits of ZMM state is needed; YMM state is enough for 256 bits.
    for bit in 5..8 {
        cpu.xcr0 = !(1 << bit);
        assert!(cpu.supports(Method::Avx512).is_err() && cpu.supports(Method::Avx2).is_ok());
    }
}

/// R14: the bit alone proves nothing.
#[test]
fn clzero_only_of_amd_and_hygon() {
    for vendor in [Vendor::Intel, Vendor::Other] {
        let mut cpu = boastful();
        cpu.vendor = vendor;
        let refused = clearer(Some(Method::Clzero), &cpu).unwrap_err();
        assert!(refused.to_string().contains("only AMD and Hygon CPUs have CLZERO"), "{refused}");
        assert_eq!(cpu.supports(Method::Clzero).unwrap_err().to_string(), {
            let offered = "rep-stosb, rep-stosq, movnti, sse2, avx2, avx512, movdir64b, portable";
            let reason = "only AMD and Hygon CPUs have CLZERO";
            format!("clzero cannot be used: {reason}; this CPU offers {offered}")
        });
        assert_ne!(cpu.choose(HUGE, Reuse::Cold), Method::Clzero);
        assert_ne!(clearer(None, &cpu).unwrap().plan.method_for(HUGE, COLD), Method::Clzero);
    }
    for vendor in [Vendor::Amd, Vendor::Hygon] {
        let mut cpu = boastful();
        cpu.vendor = vendor;
        assert_eq!(cpu.choose(HUGE, Reuse::Cold), Method::Clzero);
        cpu.clzero = false;
        assert!(cpu.supports(Method::Clzero).is_err());
        assert_eq!(cpu.choose(HUGE, Reuse::Cold), Method::Avx2);
    }
}

/// Whatever is claimed, only what the CPU under us has is run.
#[test]
fn a_boast_runs_nothing_that_is_not_there() {
    let here = methods_here();
    for method in Method::ALL {
        let forced = clearer(Some(method), &boastful());
        assert_eq!(forced.is_ok(), here.contains(&method), "{method}");
        if let Err(MethodError::Unavailable { asked, reason, offered }) = forced {
            assert_eq!(asked, method);
            assert_eq!(Some(reason.as_str()), lacks_here(method));
            assert!(offered.split(", ").eq(here.iter().map(|method| method.name())), "{offered}");
        }
    }
    let auto = clearer(None, &boastful()).unwrap();
    for len in [0, 1, COLD_FROM, HUGE] {
        assert!(here.contains(&auto.plan.method_for(len, COLD)));
    }
}

/// R12: what is known about caches never moves the threshold out of its bounds.
#[test]
fn absurd_caches_are_clamped() {
    for (llc_bytes, from) in [
        (None, COLD_FROM_AT_MOST),
        (Some(0), COLD_FROM),
        (Some(1), COLD_FROM),
        (Some(1 << 20), 1 << 20),
        (Some(300 << 20), COLD_FROM_AT_MOST),
        (Some(u64::MAX), COLD_FROM_AT_MOST),
    ] {
        let mut cpu = CpuDescription::bare();
        cpu.llc_bytes = llc_bytes;
        assert_eq!(
            (cpu.choose(from - 1, Reuse::Cold), cpu.choose(from, Reuse::Cold)),
            (Method::RepStosq, Method::Sse2),
            "{llc_bytes:?}"
        );
        for vendor in [Vendor::Amd, Vendor::Hygon, Vendor::Intel] {
            let mut cpu = boastful();
            (cpu.vendor, cpu.llc_bytes) = (vendor, llc_bytes);
            assert_eq!(cpu.choose(COLD_FROM - 1, Reuse::Cold), Method::RepStosb);
            assert!(cpu.choose(COLD_FROM, Reuse::Cold).is_non_temporal());
        }
    }
}

#[test]
fn intel_before_ice_lake_stays_in_the_caches() {
    let mut cpu = boastful();
    (cpu.vendor, cpu.fsrm) = (Vendor::Intel, false);
    assert_eq!(cpu.choose(HUGE, Reuse::Cold), Method::RepStosb);
    cpu.erms = false;
    assert_eq!(cpu.choose(HUGE, Reuse::Cold), Method::RepStosq);
}

proptest! {
    #[test]
    fn the_choice_is_always_offered(
        bits in any::<[bool; 7]>(),
        xcr0 in any::<u64>(),
        vendor in prop::sample::select(vec![Vendor::Intel, Vendor::Amd, Vendor::Hygon, Vendor::Other]),
        llc_bytes in any::<Option<u64>>(),
        len in any::<u64>(),
    ) {
        let [erms, fsrm, avx2, avx512f, osxsave, clzero, movdir64b] = bits;
        let cpu = CpuDescription {
            vendor, erms, fsrm, avx2, avx512f, osxsave, xcr0, clzero, movdir64b, llc_bytes,
            ..CpuDescription::bare()
        };
        prop_assert!(cpu.supports(cpu.choose(len, Reuse::Cold)).is_ok());
        prop_assert!(cpu.methods().contains(&cpu.choose(len, Reuse::Cold)));
        let soon = cpu.choose(len, Reuse::Soon);
        prop_assert!(cpu.supports(soon).is_ok() && !soon.is_non_temporal(), "kept in the caches: {soon}");
        let run = clearer(None, &cpu).unwrap().plan.method_for(len, COLD);
        prop_assert!(cpu.supports(run).is_ok() && lacks_here(run).is_none());
    }
}

/// CPUID answers made up for a test: (leaf, subleaf) and the registers; all else is zero.
#[derive(Clone)]
struct Answers(Vec<((u32, u32), [u32; 4])>);

impl CpuIdReader for Answers {
    fn cpuid2(&self, eax: u32, ecx: u32) -> CpuIdResult {
        let found = self.0.iter().find(|(leaf, _)| *leaf == (eax, ecx));
        let [eax, ebx, ecx, edx] = found.map_or([0; 4], |(_, registers)| *registers);
        CpuIdResult { eax, ebx, ecx, edx }
    }
}

fn vendor_leaf(name: &str, most: u32) -> [u32; 4] {
    let word = |at: usize| u32::from_le_bytes(name.as_bytes()[at..at + 4].try_into().unwrap());
    [most, word(0), word(8), word(4)]
}

#[test]
fn reads_intel_cpuid() {
    let cpu = from_cpuid(
        Answers(vec![
            ((0, 0), vendor_leaf("GenuineIntel", 7)),
            // Emerald Rapids.
            ((1, 0), [0xc06f2, 0, 1 << 27, 0]),
            // L1d, L2 of 2 MiB, L3 of 300 MiB: 20 ways, 64 bytes a line, 245760 sets.
            ((4, 0), [1 << 5 | 1, 11 << 22 | 63, 63, 0]),
            ((4, 1), [2 << 5 | 3, 15 << 22 | 63, 2047, 0]),
            ((4, 2), [3 << 5 | 3, 19 << 22 | 63, 245_759, 0]),
            ((7, 0), [0, 1 << 5 | 1 << 9 | 1 << 16, 1 << 28, 1 << 4]),
            // A bit that means something else on Intel.
            ((0x8000_0000, 0), [0x8000_0008, 0, 0, 0]),
            ((0x8000_0008, 0), [0, 1, 0, 0]),
        ]),
        || 0xe7,
    );
    let wanted = CpuDescription {
        vendor: Vendor::Intel,
        family: 6,
        model: 0xcf,
        erms: true,
        fsrm: true,
        avx2: true,
        avx512f: true,
        osxsave: true,
        xcr0: 0xe7,
        clzero: true,
        movdir64b: true,
        llc_bytes: Some(300 << 20),
    };
    assert_eq!(cpu, wanted);
    assert!(cpu.supports(Method::Clzero).is_err());
}

#[test]
fn reads_amd_and_hygon_cpuid() {
    for (name, vendor) in [("AuthenticAMD", Vendor::Amd), ("HygonGenuine", Vendor::Hygon)] {
        let cpu = from_cpuid(
            Answers(vec![
                ((0, 0), vendor_leaf(name, 7)),
                // Turin, of Zen 5.
                ((1, 0), [0xb0_0f21, 0, 0, 0]),
                ((0x8000_0000, 0), [0x8000_001d, 0, 0, 0]),
                ((0x8000_0001, 0), [0, 0, 1 << 22, 0]),
                ((0x8000_0008, 0), [0, 1, 0, 0]),
                ((0x8000_001d, 0), [3 << 5 | 3, 15 << 22 | 63, 32767, 0]),
            ]),
            || panic!("XGETBV without OSXSAVE"),
        );
        assert_eq!((cpu.vendor, cpu.clzero, cpu.xcr0), (vendor, true, 0));
        assert_eq!((cpu.family, cpu.model), (26, 2));
        assert_eq!(cpu.llc_bytes, Some(32 << 20));
        assert!(cpu.supports(Method::Clzero).is_ok());
    }
}

/// R12: leaves that are missing, never end, or hold nonsense.
#[test]
fn survives_nonsense_in_cpuid() {
    assert_eq!(from_cpuid(Answers(vec![]), || 0), CpuDescription::bare());

    #[derive(Clone)]
    struct Ones;
    impl CpuIdReader for Ones {
        fn cpuid2(&self, _: u32, _: u32) -> CpuIdResult {
            CpuIdResult { eax: !0, ebx: !0, ecx: !0, edx: !0 }
        }
    }
    let cpu = from_cpuid(Ones, || !0);
    assert_eq!(cpu.vendor, Vendor::Other);
    assert!(cpu.supports(Method::Clzero).is_err());
    assert_eq!(cpu.choose(COLD_FROM_AT_MOST, Reuse::Cold), Method::Avx2);
}

#[test]
fn the_cpu_under_us_agrees_with_the_standard_library() {
    let here = CpuDescription::detect();
    println!("{here:?}: {}", here.methods().iter().map(Method::to_string).collect::<Vec<_>>().join(", "));
    assert_eq!(here.supports(Method::Avx2).is_ok(), is_x86_feature_detected!("avx2"));
    assert_eq!(here.supports(Method::Avx512).is_ok(), is_x86_feature_detected!("avx512f"));
}
