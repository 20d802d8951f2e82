//! The ways to clear, by name.

use std::fmt;
use std::str::FromStr;

use crate::error::MethodError;

/// Which instructions clear memory.
///
/// A method says how the whole 64-byte lines of a range are stored. The bytes before the first and after
/// the last whole line are ordinary stores with every method, so that nothing outside the range is touched.
///
/// Written and parsed by the names in [`Method::name`]; parsing ignores the case of ASCII letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Method {
    /// `REP STOSB`, through the caches. Every x86-64 CPU; fast where CPUID shows ERMS.
    RepStosb,
    /// `REP STOSQ`, through the caches. Every x86-64 CPU.
    RepStosq,
    /// `MOVNTI`: eight non-temporal 8-byte stores a line. Every x86-64 CPU.
    Movnti,
    /// `MOVNTDQ` of 16 bytes: four non-temporal stores a line. Every x86-64 CPU.
    Sse2,
    /// `VMOVNTDQ` of 32 bytes: two non-temporal stores a line. AVX2, with YMM state enabled.
    Avx2,
    /// `VMOVNTDQ` of 64 bytes: one non-temporal store a line. AVX-512F, with ZMM state enabled.
    Avx512,
    /// `CLZERO`: one line without reading it. AMD and Hygon CPUs that show the bit.
    Clzero,
    /// `MOVDIR64B`: one line in one direct store. CPUs that show the bit.
    Movdir64b,
    /// Volatile 8-byte stores written in Rust, through the caches. Every architecture; all there is
    /// outside x86-64, where it is compiled but untested.
    Portable,
}

impl Method {
    /// All methods, whether this CPU has them or not.
    pub const ALL: [Method; 9] = [
        Method::RepStosb,
        Method::RepStosq,
        Method::Movnti,
        Method::Sse2,
        Method::Avx2,
        Method::Avx512,
        Method::Clzero,
        Method::Movdir64b,
        Method::Portable,
    ];

    /// The name on command lines and in reports: `rep-stosb`, `rep-stosq`, `movnti`, `sse2`, `avx2`,
    /// `avx512`, `clzero`, `movdir64b`, `portable`.
    pub const fn name(self) -> &'static str {
        match self {
            Method::RepStosb => "rep-stosb",
            Method::RepStosq => "rep-stosq",
            Method::Movnti => "movnti",
            Method::Sse2 => "sse2",
            Method::Avx2 => "avx2",
            Method::Avx512 => "avx512",
            Method::Clzero => "clzero",
            Method::Movdir64b => "movdir64b",
            Method::Portable => "portable",
        }
    }

    /// Whether the stores bypass the caches and are weakly ordered, so that only an `SFENCE` of the core
    /// that issued them puts them before its later stores.
    pub const fn is_non_temporal(self) -> bool {
        match self {
            Method::Movnti
            | Method::Sse2
            | Method::Avx2
            | Method::Avx512
            | Method::Clzero
            | Method::Movdir64b => true,
            Method::RepStosb | Method::RepStosq | Method::Portable => false,
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(asked: &str) -> Result<Self, MethodError> {
        Self::ALL
            .into_iter()
            .find(|method| method.name().eq_ignore_ascii_case(asked))
            .ok_or_else(|| MethodError::Unknown { asked: asked.to_owned(), known: list(&Self::ALL) })
    }
}

/// The names, separated by commas.
fn list(methods: &[Method]) -> String {
    methods.iter().map(|method| method.name()).collect::<Vec<_>>().join(", ")
}

/// The methods for which nothing is missing.
pub(super) fn offered_by(lacks: impl Fn(Method) -> Option<&'static str>) -> Vec<Method> {
    Method::ALL.into_iter().filter(|&method| lacks(method).is_none()).collect()
}

/// An error if something is missing for the method asked for.
pub(super) fn refuse_if(
    asked: Method,
    lacks: impl Fn(Method) -> Option<&'static str>,
) -> Result<(), MethodError> {
    match lacks(asked) {
        None => Ok(()),
        Some(reason) => Err(MethodError::Unavailable {
            asked,
            reason: reason.to_owned(),
            offered: list(&offered_by(lacks)),
        }),
    }
}
