//! What only x86-64 has: reading CPUID, and the kernels.

mod detect;
pub(super) mod kernels;

pub(super) use detect::detect;
#[cfg(test)]
pub(super) use detect::from_cpuid;

use super::Store;
use super::method::Method;
use super::portable;

/// Whether the registers of a method may not be used: asked of the standard library, which reads XCR0.
pub(super) fn lacks_state(method: Method) -> Option<&'static str> {
    let enabled = match method {
        Method::Avx2 => is_x86_feature_detected!("avx2"),
        Method::Avx512 => is_x86_feature_detected!("avx512f"),
        _ => true,
    };
    if enabled { None } else { Some("the system has not enabled its registers") }
}

/// The kernel of a method.
pub(super) fn store(method: Method) -> Store {
    match method {
        Method::RepStosb => Store::Bytes(kernels::rep_stosb),
        Method::RepStosq => Store::Lines(kernels::rep_stosq),
        Method::Movnti => Store::Pattern(kernels::movnti),
        Method::Sse2 => Store::Pattern(kernels::sse2),
        Method::Avx2 => Store::Pattern(kernels::avx2),
        Method::Avx512 => Store::Pattern(kernels::avx512),
        Method::Clzero => Store::Lines(kernels::clzero),
        Method::Movdir64b => Store::Pattern(kernels::movdir64b),
        Method::Portable => Store::Pattern(portable::lines),
    }
}
