//! The machine code of every kernel (R6): which stores it holds, in which loop, counted by what, and that an
//! SFENCE stands between a weakly ordered one and every way out. What each of these checks must find wrong is in
//! `counterexamples`.

use std::collections::BTreeSet;

use iced_x86::Mnemonic;

use super::machine_code::{Code, Fault, Wanted, is_weakly_ordered};
use crate::clear::{Method, Store, portable, run, store};

/// The store a method is named after.
fn wanted(method: Method) -> Wanted {
    let (mnemonic, bytes) = match method {
        Method::RepStosb => (Mnemonic::Stosb, 1),
        Method::RepStosq => (Mnemonic::Stosq, 8),
        Method::Movnti => (Mnemonic::Movnti, 8),
        Method::Sse2 => (Mnemonic::Movntdq, 16),
        Method::Avx2 => (Mnemonic::Vmovntdq, 32),
        Method::Avx512 => (Mnemonic::Vmovntdq, 64),
        Method::Clzero => (Mnemonic::Clzero, 64),
        Method::Movdir64b => (Mnemonic::Movdir64b, 64),
        Method::Portable => (Mnemonic::Mov, 8),
    };
    Wanted { mnemonic, bytes }
}

fn kernel(method: Method) -> *const () {
    match store(method) {
        Store::Bytes(kernel) | Store::Lines(kernel) => kernel as *const (),
        Store::Pattern(kernel) => kernel as *const (),
    }
}

/// Zeroing and filling: the kernels of patterns are the kernels of zeroes.
#[test]
fn every_kernel_is_what_its_name_says() {
    for method in Method::ALL {
        if method == Method::Portable && cfg!(debug_assertions) {
            println!("{method}: not optimised, its loop calls what stores; looked at in optimised builds");
            continue;
        }
        assert_eq!(wanted(method).is_weakly_ordered(), method.is_non_temporal(), "{method}");
        assert_eq!(Code::read(kernel(method)).faults(wanted(method)), BTreeSet::<Fault>::new(), "{method}");
    }
}

/// What leads to a kernel and away from it: cuts, heads, tails. It holds neither fences nor stores that need one,
/// so together with the above no path through a clear or a fill leaves a store unfenced.
#[test]
fn heads_and_tails_are_ordinary_stores() {
    for (name, function) in [
        ("run", run::run as *const ()),
        ("fill", run::fill as *const ()),
        ("lines", portable::lines as *const ()),
        ("bytes", portable::bytes as *const ()),
    ] {
        let code = Code::read(function);
        assert!(!code.has(|found| is_weakly_ordered(found) || found == Mnemonic::Sfence), "{name}");
    }
}
