//! Kernels with one thing wrong each, which the reader of machine code must find; none of them is ever run.

use std::arch::naked_asm;
use std::collections::BTreeSet;

use iced_x86::Mnemonic;

use super::machine_code::{Code, Fault, Wanted};

const MOVNTI: Wanted = Wanted { mnemonic: Mnemonic::Movnti, bytes: 8 };
const SSE2: Wanted = Wanted { mnemonic: Mnemonic::Movntdq, bytes: 16 };
const AVX2: Wanted = Wanted { mnemonic: Mnemonic::Vmovntdq, bytes: 32 };
const CLZERO: Wanted = Wanted { mnemonic: Mnemonic::Clzero, bytes: 64 };
const MOVDIR64B: Wanted = Wanted { mnemonic: Mnemonic::Movdir64b, bytes: 64 };
const STOSB: Wanted = Wanted { mnemonic: Mnemonic::Stosb, bytes: 1 };
const STOSQ: Wanted = Wanted { mnemonic: Mnemonic::Stosq, bytes: 8 };
const MOV: Wanted = Wanted { mnemonic: Mnemonic::Mov, bytes: 8 };

/// Holds these instructions to be that kernel, and looks what is found wrong.
macro_rules! found {
    ($wanted:expr, [$($line:literal),+ $(,)?], $($fault:ident),*) => {{
        #[unsafe(naked)]
        extern "C" fn kernel() {
            naked_asm!($($line),+)
        }
        let expected: BTreeSet<Fault> = [$(Fault::$fault),*].into();
        assert_eq!(Code::read(kernel as *const ()).faults($wanted), expected, "{}", concat!($($line, "; "),+));
    }};
}

#[test]
fn nothing_is_found_in_sound_kernels() {
    found!(
        SSE2,
        [
            "test rsi, rsi",
            "jz 3f",
            "pxor xmm0, xmm0",
            "2:",
            "movntdq [rdi], xmm0",
            "movntdq [rdi + 16], xmm0",
            "add rdi, 32",
            "sub rsi, 32",
            "jnz 2b",
            "sfence",
            "3:",
            "ret",
        ],
    );
    // Any order within a turn, another address in between, a call outside.
    found!(
        CLZERO,
        [
            "call rax",
            "2:",
            "lea rax, [rdi + 64]",
            "clzero",
            "mov rax, rdi",
            "clzero",
            "sub rdi, -128",
            "sub rsi, 128",
            "jnz 2b",
            "sfence",
            "call rax",
            "ret",
        ],
    );
    found!(
        MOVDIR64B,
        ["2:", "movdir64b rdi, [rdx]", "add rdi, 64", "sub rsi, 64", "jnz 2b", "sfence", "ret"],
    );
    found!(STOSQ, ["shr rcx, 3", "xor eax, eax", "rep stosq", "ret"],);
    found!(MOV, ["2:", "mov [rdi + rcx], rax", "add rcx, 8", "cmp rcx, rsi", "jb 2b", "ret"],);
}

#[test]
fn a_missing_fence_is_found() {
    found!(MOVNTI, ["2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "ret"], Unfenced);
    // Before the stores.
    found!(
        MOVNTI,
        ["sfence", "2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "ret"],
        Unfenced
    );
    // Jumped over.
    found!(
        MOVNTI,
        [
            "2:",
            "movnti [rdi], rax",
            "add rdi, 8",
            "sub rsi, 8",
            "jnz 2b",
            "test rdx, rdx",
            "jz 3f",
            "sfence",
            "3:",
            "ret",
        ],
        Unfenced
    );
    // An early return from within the loop.
    found!(
        MOVNTI,
        [
            "2:",
            "movnti [rdi], rax",
            "test rdx, rdx",
            "jnz 3f",
            "ret",
            "3:",
            "add rdi, 8",
            "sub rsi, 8",
            "jnz 2b",
            "sfence",
            "ret",
        ],
        Unfenced,
        Turn
    );
    // Another kind of fence does not order these stores before later ones.
    found!(
        MOVNTI,
        ["2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "lfence", "ret"],
        Unfenced
    );
    // Left by a jump, or before a call.
    found!(MOVNTI, ["2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "jmp rax"], Unfenced);
    found!(
        MOVNTI,
        ["2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "call rax", "sfence", "ret"],
        Unfenced
    );
    // In a callee.
    found!(
        MOVNTI,
        [
            "2:",
            "movnti [rdi], rax",
            "add rdi, 8",
            "sub rsi, 8",
            "jnz 2b",
            "sfence",
            "call 3f",
            "ret",
            "3:",
            "movnti [rdi], rax",
            "ret",
        ],
        Unfenced,
        OtherStore
    );
    // A store behind the fence.
    found!(
        CLZERO,
        [
            "2:",
            "mov rax, rdi",
            "clzero",
            "add rdi, 64",
            "sub rsi, 64",
            "jnz 2b",
            "sfence",
            "test rdx, rdx",
            "jz 3f",
            "clzero",
            "3:",
            "ret",
        ],
        Unfenced,
        OtherStore
    );
}

#[test]
fn a_fence_without_need_is_found() {
    found!(STOSB, ["mov rcx, rsi", "rep stosb", "sfence", "ret"], Fence);
    found!(MOV, ["2:", "mov [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "sfence", "ret"], Fence);
}

#[test]
fn another_store_in_the_loop_is_found() {
    macro_rules! beside {
        ($($line:literal),+ $(; $more:ident)?) => {
            found!(
                SSE2,
                ["2:", "movntdq [rdi], xmm0", $($line,)+ "add rdi, 16", "sub rsi, 16", "jnz 2b", "sfence", "ret"],
                OtherStore, Turn $(, $more)?
            )
        };
    }
    // Ordinary ones: named, implied, read and written, conditional, scattered.
    beside!("mov [rdi], rax");
    beside!("mov byte ptr [rdx], 0");
    beside!("movdqa [rdi], xmm0");
    beside!("vmovdqu [rdi + 8], ymm0");
    beside!("stosb");
    beside!("push rax", "pop rax");
    beside!("or byte ptr [rdi], 0");
    beside!("lock xadd [rdi], rax");
    beside!("vmaskmovps [rdi], xmm1, xmm2");
    beside!("vpscatterdd [rdi + zmm1]{{k1}}, zmm2");
    beside!("fxsave [rdi]");
    // Weakly ordered ones of another kind, or another width.
    beside!("movnti [rdi + 16], rax");
    beside!("movntps [rdi + 16], xmm0");
    beside!("maskmovdqu xmm0, xmm1");
    beside!("clzero");
    beside!("movdir64b rdi, [rdx]");
    // A callee could do anything.
    beside!("call rax"; Unfenced);
}

#[test]
fn a_store_that_is_not_the_intended_one_is_found() {
    // Half as wide under the same name.
    found!(
        AVX2,
        ["2:", "vmovntdq [rdi], xmm0", "add rdi, 16", "sub rsi, 16", "jnz 2b", "sfence", "ret"],
        NoStore,
        OtherStore
    );
    // Ordinary ones under a non-temporal name.
    found!(
        AVX2,
        ["2:", "vmovdqa [rdi], ymm0", "add rdi, 32", "sub rsi, 32", "jnz 2b", "ret"],
        NoStore,
        OtherStore
    );
    // Non-temporal ones under a cached name.
    found!(
        MOV,
        ["2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "sfence", "ret"],
        Fence,
        NoStore,
        OtherStore
    );
    // Once, not in a loop.
    found!(MOVNTI, ["movnti [rdi], rax", "sfence", "ret"], NoStore, OtherStore, Turn);
    found!(STOSB, ["stosb", "ret"], NoStore);
    found!(STOSB, ["mov rcx, rsi", "rep stosd", "ret"], NoStore, OtherStore);
    // A loop without an end.
    found!(MOVNTI, ["2:", "movnti [rdi], rax", "sfence", "jmp 2b"], NoReturn, Turn);
}

#[test]
fn counters_and_addresses_under_64_bits_are_found() {
    // Counted down.
    found!(
        MOVNTI,
        ["2:", "movnti [rdi], rax", "add rdi, 8", "sub esi, 8", "jnz 2b", "sfence", "ret"],
        Narrow
    );
    // Cut off before the loop: by a register's move onto itself, through memory, by a shift.
    found!(
        MOVNTI,
        ["mov esi, esi", "2:", "movnti [rdi], rax", "add rdi, 8", "sub rsi, 8", "jnz 2b", "sfence", "ret"],
        Narrow
    );
    found!(STOSB, ["mov ecx, [rsp + 8]", "rep stosb", "ret"], Narrow);
    found!(STOSQ, ["shr ecx, 3", "rep stosq", "ret"], Narrow);
    // Counted or addressed by half a register.
    found!(STOSB, ["addr32 rep stosb", "ret"], Narrow);
    found!(
        SSE2,
        ["2:", "movntdq [edi], xmm0", "add rdi, 16", "sub rsi, 16", "jnz 2b", "sfence", "ret"],
        Narrow,
        Turn
    );
    found!(
        CLZERO,
        ["2:", "mov rax, rdi", "addr32 clzero", "add rdi, 64", "sub rsi, 64", "jnz 2b", "sfence", "ret"],
        Narrow
    );
    found!(
        MOVDIR64B,
        ["2:", "movdir64b edi, [edx]", "add rdi, 64", "sub rsi, 64", "jnz 2b", "sfence", "ret"],
        Narrow,
        Turn
    );
}

#[test]
fn a_turn_that_misses_or_repeats_bytes_is_found() {
    macro_rules! turn {
        ($($line:literal),+) => {
            found!(SSE2, ["2:", "movntdq [rdi], xmm0", $($line,)+ "sfence", "ret"], Turn)
        };
    }
    // A hole, an overlap, a step too long or too short, downwards.
    turn!("movntdq [rdi + 32], xmm0", "add rdi, 48", "sub rsi, 48", "jnz 2b");
    turn!("movntdq [rdi + 8], xmm0", "add rdi, 24", "sub rsi, 24", "jnz 2b");
    turn!("add rdi, 32", "sub rsi, 32", "jnz 2b");
    turn!("movntdq [rdi + 16], xmm0", "add rdi, 16", "sub rsi, 16", "jnz 2b");
    turn!("sub rdi, 16", "sub rsi, 16", "jnz 2b");
    // Another pointer, an index.
    turn!("movntdq [rdx + 16], xmm0", "add rdi, 32", "add rdx, 32", "sub rsi, 32", "jnz 2b");
    turn!("movntdq [rdi + rdx], xmm0", "add rdi, 32", "sub rsi, 32", "jnz 2b");
    // The pointer forgotten, or lost.
    turn!("sub rsi, 16", "jnz 2b");
    turn!("add rdi, 16", "imul rdi, rdi", "sub rsi, 16", "jnz 2b");
    // The counter by another step, or not what the branch looks at, or looked at in another way.
    turn!("add rdi, 16", "sub rsi, 8", "jnz 2b");
    turn!("sub rsi, 16", "add rdi, 16", "jnz 2b");
    turn!("add rdi, 16", "sub rsi, 16", "ja 2b");
    turn!("add rdi, 16", "sub rsi, 16", "jz 3f", "jmp 2b", "3:");
    // A line that only some turns store.
    turn!("test rdx, rdx", "jz 4f", "movntdq [rdi + 16], xmm0", "4:", "add rdi, 32", "sub rsi, 32", "jnz 2b");
}
