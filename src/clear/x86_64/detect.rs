//! CPUID and XCR0 into a [`CpuDescription`].

use std::arch::asm;

use raw_cpuid::{CpuId, CpuIdReader, CpuIdReaderNative};

use crate::clear::cpu::{CpuDescription, Vendor};

/// No CPU lists more caches; ends the walk over a leaf that never says "no more".
const MOST_CACHES: u32 = 16;

/// The CPU this runs on.
pub(crate) fn detect() -> CpuDescription {
    from_cpuid(CpuIdReaderNative, || {
        let (low, high): (u32, u32);
        // SAFETY: called only if OSXSAVE is set, and then XGETBV of register 0 is allowed at every
        // privilege level (Intel SDM volume 2, XGETBV). It reads no memory.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
        }
        u64::from(high) << 32 | u64::from(low)
    })
}

/// The CPU that answers `reader`. `xcr0` is called only if the system enabled XSAVE.
pub(crate) fn from_cpuid<R: CpuIdReader>(reader: R, xcr0: impl FnOnce() -> u64) -> CpuDescription {
    let cpu = CpuId::with_cpuid_reader(reader.clone());
    let vendor = match cpu.get_vendor_info().as_ref().map(|info| info.as_str()) {
        Some("GenuineIntel") => Vendor::Intel,
        Some("AuthenticAMD") => Vendor::Amd,
        Some("HygonGenuine") => Vendor::Hygon,
        _ => Vendor::Other,
    };
    let osxsave = cpu.get_feature_info().is_some_and(|info| info.has_oxsave());
    let (family, model) = family_and_model(reader.cpuid1(1).eax);
    let structured = cpu.get_extended_feature_info();
    // raw-cpuid has no names for the FSRM and MOVDIR64B bits of leaf 7.
    let leaf7 = structured.as_ref().map(|_| reader.cpuid2(7, 0));
    CpuDescription {
        vendor,
        family,
        model,
        erms: structured.as_ref().is_some_and(|info| info.has_rep_movsb_stosb()),
        fsrm: leaf7.is_some_and(|leaf| leaf.edx >> 4 & 1 == 1),
        avx2: structured.as_ref().is_some_and(|info| info.has_avx2()),
        avx512f: structured.as_ref().is_some_and(|info| info.has_avx512f()),
        osxsave,
        xcr0: if osxsave { xcr0() } else { 0 },
        clzero: cpu.get_processor_capacity_feature_info().is_some_and(|info| info.has_cl_zero()),
        movdir64b: leaf7.is_some_and(|leaf| leaf.ecx >> 28 & 1 == 1),
        llc_bytes: cache_leaf(&cpu, &reader, vendor).and_then(|leaf| last_cache(&reader, leaf)),
    }
}

/// What leaf 1 says in EAX. (raw-cpuid adds the two parts of the family in 8 bits.)
fn family_and_model(signature: u32) -> (u32, u32) {
    let base = signature >> 8 & 0xf;
    let family = if base == 0xf { base + (signature >> 20 & 0xff) } else { base };
    let extended = if base == 0xf || base == 6 { signature >> 16 & 0xf } else { 0 };
    (family, extended << 4 | signature >> 4 & 0xf)
}

/// The leaf that lists caches, in the format that Intel and AMD share.
fn cache_leaf<R: CpuIdReader>(cpu: &CpuId<R>, reader: &R, vendor: Vendor) -> Option<u32> {
    match vendor {
        Vendor::Amd | Vendor::Hygon => {
            let features = cpu.get_extended_processor_and_feature_identifiers()?;
            (features.has_topology_extensions() && reader.cpuid1(0x8000_0000).eax >= 0x8000_001d)
                .then_some(0x8000_001d)
        }
        Vendor::Intel | Vendor::Other => (reader.cpuid1(0).eax >= 4).then_some(4),
    }
}

/// Bytes of the highest level in a cache leaf. Its fields hold one less than what they count.
fn last_cache<R: CpuIdReader>(reader: &R, leaf: u32) -> Option<u64> {
    (0..MOST_CACHES)
        .map(|index| reader.cpuid2(leaf, index))
        .take_while(|cache| cache.eax & 0x1f != 0)
        .max_by_key(|cache| cache.eax >> 5 & 7)
        .map(|cache| {
            let field = |from: u32, mask: u32| u64::from(cache.ebx >> from & mask) + 1;
            let line = field(0, 0xfff) * field(12, 0x3ff) * field(22, 0x3ff);
            line.saturating_mul(u64::from(cache.ecx) + 1)
        })
}
