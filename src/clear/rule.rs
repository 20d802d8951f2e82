//! The choice of method when none is asked for. Pure.

use super::cpu::{CpuDescription, Vendor};
use super::method::Method;
use super::plan::{Concurrency, Plan, Reuse, Situation};

/// From this many bytes on non-temporal stores win on cold memory, where they win at all: below, the one
/// fence and the trip to memory cost more than the read for ownership that they save.
///
/// Seen on Zen 5 with cold 2 MiB pages and one thread: `CLZERO` and vector stores take 78 GB/s in pieces of
/// 64 KiB and 95 in pieces of 2 to 8 MiB, where `REP STOSB` takes 42 and 49; at 4 KiB all are alike, at
/// 1 KiB non-temporal stores lose by half. One `REP STOSB` over a whole GiB is as fast as they are there, but
/// no chunk is that long. `MOVNTI` ends at 60, the slowest of the non-temporal ones.
pub(super) const COLD_FROM: u64 = 64 << 10;

/// Where nothing is known about a CPU's non-temporal stores, they start at the size of its last cache, but
/// never later than this: a shown cache may be the host's, hundreds of MiB for two CPUs.
pub(super) const COLD_FROM_AT_MOST: u64 = 2 << 20;

/// The rule of [`CpuDescription::choose`] as steps: the least length and the method from there on. Among the
/// methods that `offered` lets through.
pub(super) fn steps(
    cpu: &CpuDescription,
    reuse: Reuse,
    offered: impl Fn(Method) -> bool,
) -> Vec<(u64, Method)> {
    let first = |wanted: &[Method]| wanted.iter().copied().find(|&method| offered(method));
    let cached: &[Method] =
        if cpu.erms || cpu.fsrm { &[Method::RepStosb, Method::RepStosq] } else { &[Method::RepStosq] };
    let short = first(cached).unwrap_or(Method::Portable);
    let cold: &[Method] = match (reuse, cpu.vendor) {
        (Reuse::Soon, _) => &[],
        // Skylake and its server kin lose with non-temporal stores; FSRM came with Ice Lake.
        (_, Vendor::Intel) if !cpu.fsrm => &[],
        _ => &[Method::Clzero, Method::Avx2, Method::Sse2],
    };
    let bulk = first(cold).unwrap_or(short);
    let bulk_from = match cpu.vendor {
        Vendor::Other => cpu.llc_bytes.unwrap_or(COLD_FROM_AT_MOST).clamp(COLD_FROM, COLD_FROM_AT_MOST),
        _ => COLD_FROM,
    };
    vec![(0, short), (bulk_from, bulk)]
}

impl CpuDescription {
    /// The method for a range of `len` bytes when the caller has no wish and nothing was measured: always one
    /// that the described CPU [`supports`](Self::supports). Depends on nothing but the arguments.
    ///
    /// [`Reuse::Soon`]: as under 64 KiB, for all lengths. [`Reuse::Cold`]:
    ///
    /// - Under 64 KiB: `REP STOSB` where it is fast (ERMS or FSRM), else `REP STOSQ`.
    /// - From 64 KiB: `CLZERO` where there is one, else `VMOVNTDQ` of 32 bytes, else `MOVNTDQ` of 16. They do
    ///   not read the line they overwrite and leave the caches to running guests. The size of the last cache
    ///   does not matter, because cold memory is not in it.
    /// - Intel before Ice Lake (told by FSRM): as under 64 KiB for all lengths, since non-temporal stores
    ///   lose there.
    /// - Other makers: non-temporal only from the size of the last cache on, held between 64 KiB and 2 MiB
    ///   whatever CPUID claims (nothing, 0, or the cache of a whole host).
    ///
    /// `AVX-512` and `MOVDIR64B` write no faster than memory takes and are not chosen unmeasured.
    pub fn choose(&self, len: u64, reuse: Reuse) -> Method {
        let situation = Situation { reuse, concurrency: Concurrency::One };
        Plan::by_rule(self, |method| self.lacks(method).is_none()).method_for(len, situation)
    }
}
