//! What a CPU offers to clearing, and which methods follow from that.
//!
//! Needs nothing but `core`, as the kernels: the machine with CLZERO in `tests/machines` runs the same files.

use super::method::Method;

/// XCR0 bits 1 and 2: the system saves XMM and YMM registers (Intel SDM volume 1, 13.3).
pub(super) const XCR0_YMM: u64 = 0b110;
/// XCR0 bits 1, 2 and 5 to 7: YMM, opmask and both halves of ZMM state.
pub(super) const XCR0_ZMM: u64 = 0b1110_0110;

/// Who made the CPU, as CPUID leaf 0 says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Vendor {
    /// `GenuineIntel`.
    Intel,
    /// `AuthenticAMD`.
    Amd,
    /// `HygonGenuine`.
    Hygon,
    /// Any other, and every CPU that is not x86-64.
    Other,
}

/// What a CPU says about itself, as far as clearing asks.
///
/// [`detect`](Self::detect) describes the CPU the caller runs on. A description may also be made by hand,
/// from [`bare`](Self::bare), to try the rules on a CPU one does not have. A description that claims more
/// than the real CPU offers is harmless: what is run is checked against both.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CpuDescription {
    /// The maker.
    pub vendor: Vendor,
    /// Family, with the extended family added (leaf 1, EAX).
    pub family: u32,
    /// Model, with the extended model before it (leaf 1, EAX). Maker, family and model together name a design.
    pub model: u32,
    /// Enhanced `REP MOVSB/STOSB` (leaf 7, EBX bit 9).
    pub erms: bool,
    /// Fast short `REP MOVSB` (leaf 7, EDX bit 4). Intel has it from Ice Lake on.
    pub fsrm: bool,
    /// AVX2 (leaf 7, EBX bit 5), whatever the system enabled.
    pub avx2: bool,
    /// AVX-512 Foundation (leaf 7, EBX bit 16), whatever the system enabled.
    pub avx512f: bool,
    /// The system uses XSAVE, so that [`xcr0`](Self::xcr0) can be read (leaf 1, ECX bit 27).
    pub osxsave: bool,
    /// Extended control register 0: the register state that the system saves. 0 without
    /// [`osxsave`](Self::osxsave).
    pub xcr0: u64,
    /// `CLZERO` (leaf 8000_0008h, EBX bit 0; AMD APM volume 3). Believed of AMD and Hygon only.
    pub clzero: bool,
    /// `MOVDIR64B` (leaf 7, ECX bit 28).
    pub movdir64b: bool,
    /// Bytes of the last cache level that is shown; `None` where CPUID does not list caches. A guest may be
    /// shown its host's whole cache, or none.
    pub llc_bytes: Option<u64>,
}

impl CpuDescription {
    /// The x86-64 baseline: nothing optional, no cache listed, maker unknown.
    pub fn bare() -> Self {
        Self {
            vendor: Vendor::Other,
            family: 0,
            model: 0,
            erms: false,
            fsrm: false,
            avx2: false,
            avx512f: false,
            osxsave: false,
            xcr0: 0,
            clzero: false,
            movdir64b: false,
            llc_bytes: None,
        }
    }

    /// The availability contract of every method: what is missing, if anything.
    pub(super) fn lacks(&self, method: Method) -> Option<&'static str> {
        let state = |mask| self.osxsave && self.xcr0 & mask == mask;
        let missing = |offered: bool, reason| if offered { None } else { Some(reason) };
        match method {
            Method::Portable => None,
            _ if cfg!(not(target_arch = "x86_64")) => Some("it needs an x86-64 CPU"),
            Method::RepStosb | Method::RepStosq | Method::Movnti | Method::Sse2 => None,
            Method::Avx2 => missing(self.avx2, "the CPU lacks AVX2").or(missing(
                state(XCR0_YMM),
                "the system has not enabled YMM registers (OSXSAVE and XCR0 bits 1, 2)",
            )),
            Method::Avx512 => missing(self.avx512f, "the CPU lacks AVX-512F").or(missing(
                state(XCR0_ZMM),
                "the system has not enabled ZMM registers (OSXSAVE and XCR0 bits 1, 2, 5, 6, 7)",
            )),
            Method::Clzero => missing(
                matches!(self.vendor, Vendor::Amd | Vendor::Hygon),
                "only AMD and Hygon CPUs have CLZERO",
            )
            .or(missing(self.clzero, "the CPU lacks CLZERO")),
            Method::Movdir64b => missing(self.movdir64b, "the CPU lacks MOVDIR64B"),
        }
    }
}
