//! Tests of the floor. Here because kernels are not public.

mod bounds;
mod calibration;
mod choice;
mod clzero;
mod counterexamples;
mod decide;
mod disassembly;
mod guarded;
mod machine_code;
mod pattern;

use super::{Clearer, Concurrency, CpuDescription, Method, Reuse, Situation, lacks_here};
use crate::error::MethodError;

const COLD: Situation = Situation { reuse: Reuse::Cold, concurrency: Concurrency::All };

/// By a method, or by the rule.
fn clearer(wanted: Option<Method>, cpu: &CpuDescription) -> Result<Clearer, MethodError> {
    wanted.map_or_else(|| Ok(Clearer::by_rule(cpu)), |method| Clearer::only(method, cpu))
}

/// The methods of the CPU under us; says aloud which ones it lacks.
fn methods_here() -> Vec<Method> {
    Method::ALL
        .into_iter()
        .filter(|&method| match lacks_here(method) {
            None => true,
            Some(reason) => {
                println!("skipped: {method} ({reason})");
                false
            }
        })
        .collect()
}

/// A description that claims everything.
fn boastful() -> CpuDescription {
    let mut cpu = CpuDescription::bare();
    cpu.vendor = super::Vendor::Amd;
    cpu.erms = true;
    cpu.fsrm = true;
    cpu.avx2 = true;
    cpu.avx512f = true;
    cpu.osxsave = true;
    cpu.xcr0 = !0;
    cpu.clzero = true;
    cpu.movdir64b = true;
    cpu
}
