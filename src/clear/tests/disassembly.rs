//! The machine code of every kernel (R6): which stores it holds, and that an SFENCE stands between a weakly
//! ordered one and every way out.
//!
//! The code is read from memory at the function's address and followed along all branches, so it is what this
//! build really runs; the test holds with and without optimisation, for methods this CPU lacks too.

use std::arch::naked_asm;
use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};

use crate::clear::{Method, Store, store};

/// What the code between a function's entry and its ways out holds.
struct Code {
    instructions: BTreeMap<u64, Instruction>,
    /// Ways out, or calls, that are reached with a weakly ordered store not yet fenced.
    unfenced: Vec<String>,
    returns: usize,
}

impl Code {
    /// Follows all paths from `entry`. The state at an instruction is whether a weakly ordered store is
    /// behind us and no SFENCE since; each instruction is visited at most once in either state.
    fn read(entry: *const ()) -> Self {
        let memory = File::open("/proc/self/mem").unwrap();
        let mut code = Code { instructions: BTreeMap::new(), unfenced: Vec::new(), returns: 0 };
        let mut seen = HashSet::new();
        let mut paths = vec![(entry as u64, false)];
        while let Some((at, pending)) = paths.pop() {
            if !seen.insert((at, pending)) {
                continue;
            }
            let mut bytes = [0; 15];
            let read = memory.read_at(&mut bytes, at).unwrap();
            let instruction = Decoder::with_ip(64, &bytes[..read], at, DecoderOptions::NONE).decode();
            assert!(!instruction.is_invalid(), "no instruction at {at:#x}: {bytes:x?}");
            code.instructions.insert(at, instruction);
            assert!(code.instructions.len() < 1000, "kernels are small; we have run out of one");

            let pending = match instruction.mnemonic() {
                Mnemonic::Sfence => false,
                mnemonic => pending || is_weakly_ordered(mnemonic),
            };
            let next = (instruction.next_ip(), pending);
            match instruction.flow_control() {
                FlowControl::Next => paths.push(next),
                FlowControl::ConditionalBranch => {
                    paths.extend([next, (instruction.near_branch_target(), pending)]);
                }
                // A tail call too: what it leads to is read on.
                FlowControl::UnconditionalBranch => paths.push((instruction.near_branch_target(), pending)),
                FlowControl::Return | FlowControl::IndirectBranch => {
                    code.returns += 1;
                    if pending {
                        code.unfenced.push(format!("{at:#x}: {:?}", instruction.mnemonic()));
                    }
                }
                // A callee must neither see unfenced stores nor be trusted to fence them.
                FlowControl::Call | FlowControl::IndirectCall => {
                    if pending {
                        code.unfenced.push(format!("{at:#x}: {:?}", instruction.mnemonic()));
                    }
                    paths.push(next);
                }
                FlowControl::Exception | FlowControl::Interrupt => {}
                other => panic!("{at:#x}: a kernel has no business with {other:?}"),
            }
        }
        code
    }

    fn count(&self, wanted: impl Fn(Mnemonic) -> bool) -> usize {
        self.instructions.values().filter(|instruction| wanted(instruction.mnemonic())).count()
    }
}

/// Stores that later stores may overtake (Intel SDM volume 1, 10.4.6.2; MOVDIRI, MOVDIR64B in volume 2; AMD
/// APM volume 3, CLZERO).
fn is_weakly_ordered(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Movnti
            | Movntq
            | Movntdq
            | Movntps
            | Movntpd
            | Movntss
            | Movntsd
            | Vmovntdq
            | Vmovntps
            | Vmovntpd
            | Maskmovq
            | Maskmovdqu
            | Vmaskmovdqu
            | Movdiri
            | Movdir64b
            | Clzero
    )
}

/// The store a method is named after, and how many of them clear one line.
fn intended(method: Method) -> (Mnemonic, usize) {
    match method {
        Method::RepStosb => (Mnemonic::Stosb, 1),
        Method::RepStosq => (Mnemonic::Stosq, 1),
        Method::Movnti => (Mnemonic::Movnti, 8),
        Method::Sse2 => (Mnemonic::Movntdq, 4),
        Method::Avx2 => (Mnemonic::Vmovntdq, 2),
        Method::Avx512 => (Mnemonic::Vmovntdq, 1),
        Method::Clzero => (Mnemonic::Clzero, 1),
        Method::Movdir64b => (Mnemonic::Movdir64b, 1),
        Method::Portable => (Mnemonic::Mov, 3),
    }
}

fn kernel(method: Method) -> *const () {
    match store(method) {
        Store::Bytes(kernel) | Store::Lines(kernel) => kernel as *const (),
        Store::Pattern(kernel) => kernel as *const (),
    }
}

#[test]
fn every_weakly_ordered_store_is_fenced_on_every_path() {
    for method in Method::ALL.into_iter().filter(|method| method.is_non_temporal()) {
        let code = Code::read(kernel(method));
        let (mnemonic, times) = intended(method);
        assert_eq!(code.unfenced, Vec::<String>::new(), "{method}");
        assert_eq!(code.count(is_weakly_ordered), times, "{method} holds other weakly ordered stores");
        assert_eq!(code.count(|found| found == mnemonic), times, "{method}");
        assert!(code.returns > 0 && code.count(|found| found == Mnemonic::Sfence) > 0, "{method}");
    }
}

#[test]
fn cached_methods_hold_ordinary_stores_and_no_fence() {
    for method in Method::ALL.into_iter().filter(|method| !method.is_non_temporal()) {
        let code = Code::read(kernel(method));
        let (mnemonic, times) = intended(method);
        assert!(code.count(|found| found == mnemonic) >= times, "{method}");
        assert_eq!(
            code.count(|found| is_weakly_ordered(found) || found == Mnemonic::Sfence),
            0,
            "{method} is not what it says"
        );
        assert!(code.returns > 0, "{method}");
    }
}

/// Lengths beyond 32 bits, for methods this CPU lacks too: what counts and addresses is 64 bits wide.
#[test]
fn counters_and_addresses_are_64_bit() {
    for method in Method::ALL.into_iter().filter(|&method| method != Method::Portable) {
        for instruction in Code::read(kernel(method)).instructions.values() {
            let counts = matches!(
                instruction.mnemonic(),
                Mnemonic::Add | Mnemonic::Sub | Mnemonic::Inc | Mnemonic::Dec | Mnemonic::Shr | Mnemonic::Lea
            );
            if counts && instruction.op0_kind() == OpKind::Register {
                assert!(instruction.op0_register().is_gpr64(), "{method}: {instruction:?}");
            }
            match instruction.mnemonic() {
                Mnemonic::Stosb | Mnemonic::Stosq => {
                    assert!(instruction.has_rep_prefix(), "{method}: one store only");
                    assert_eq!(instruction.op0_kind(), OpKind::MemoryESRDI, "{method}");
                }
                found if is_weakly_ordered(found) && found != Mnemonic::Clzero => {
                    let address = match instruction.op0_kind() {
                        OpKind::Memory => instruction.memory_base(),
                        _ => instruction.op0_register(),
                    };
                    assert!(address.is_gpr64(), "{method}: {instruction:?}");
                }
                _ => {}
            }
        }
    }
}

/// Whole lines: the stores of one turn cover 64 bytes, each byte once.
#[test]
fn a_turn_covers_a_line() {
    for method in Method::ALL.into_iter().filter(|method| method.is_non_temporal()) {
        let code = Code::read(kernel(method));
        let mut parts: Vec<(u64, usize)> = code
            .instructions
            .values()
            .filter(|instruction| is_weakly_ordered(instruction.mnemonic()))
            .map(|instruction| match instruction.mnemonic() {
                Mnemonic::Clzero | Mnemonic::Movdir64b => (0, 64),
                _ => (instruction.memory_displacement64(), instruction.memory_size().size()),
            })
            .collect();
        parts.sort_unstable();
        let end = parts.iter().fold(0, |end, &(from, bytes)| {
            assert_eq!(from, end, "{method}: {parts:?}");
            from + bytes as u64
        });
        assert_eq!(end, 64, "{method}: {parts:?}");
    }
}

/// The reader of machine code itself: it must find what is wrong with these.
#[test]
fn the_reader_finds_a_missing_fence() {
    #[unsafe(naked)]
    extern "C" fn no_fence() {
        naked_asm!("movnti [rdi], rax", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn fence_before_the_store() {
        naked_asm!("sfence", "movntdq [rdi], xmm0", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn early_return() {
        naked_asm!("movnti [rdi], rax", "dec rsi", "jnz 3f", "ret", "3:", "sfence", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn jump_over_the_fence() {
        naked_asm!("movnti [rdi], rax", "test rsi, rsi", "jz 3f", "sfence", "3:", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn store_after_the_fence() {
        naked_asm!("movdir64b rdi, [rdx]", "sfence", "test rsi, rsi", "jz 3f", "clzero", "3:", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn tail_jump() {
        naked_asm!("vmovntdq [rdi], ymm0", "jmp rax")
    }
    #[unsafe(naked)]
    extern "C" fn call_before_the_fence() {
        naked_asm!("movnti [rdi], rax", "call rax", "sfence", "ret")
    }
    #[unsafe(naked)]
    extern "C" fn sound() {
        naked_asm!(
            "test rsi, rsi",
            "jz 4f",
            "call rax",
            "3:",
            "movnti [rdi], rax",
            "dec rsi",
            "jnz 3b",
            "sfence",
            "call rax",
            "4:",
            "ret"
        )
    }
    for (name, function, wrong) in [
        ("no_fence", no_fence as extern "C" fn(), 1),
        ("fence_before_the_store", fence_before_the_store, 1),
        ("early_return", early_return, 1),
        ("jump_over_the_fence", jump_over_the_fence, 1),
        ("store_after_the_fence", store_after_the_fence, 1),
        ("tail_jump", tail_jump, 1),
        ("call_before_the_fence", call_before_the_fence, 1),
        ("sound", sound, 0),
    ] {
        assert_eq!(Code::read(function as *const ()).unfenced.len(), wrong, "{name}");
    }
}
