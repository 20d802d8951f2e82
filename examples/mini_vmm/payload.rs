//! What the guest executes: two small programs, written out byte by byte.
//!
//! Both walk a list of pieces of RAM, pairs of a first address and a number of 8-byte words, ended
//! by a pair without words, and tell the VMM by OUT how far they are. They use no stack, and code,
//! list and page tables live in a memory slot apart (`boot.rs`): so nothing of the guest's own
//! lies in its RAM, and every word of it can be looked at and written.
//!
//! At entry RSI points at the list; for [`FILL`], RAX holds the word to write everywhere.

/// OUT to this port: one more piece of the list is done (the value means nothing).
pub const PORT_PIECE: u16 = 0xe0;
/// OUT to this port: the low half of the number of words that were not zero.
pub const PORT_COUNT_LOW: u16 = 0xe4;
/// OUT to this port: the program is over. From [`SCAN`] the value is the count's high half.
pub const PORT_END: u16 = 0xe8;

/// An instruction's bytes and what they say: AT&T syntax, jumps go to an offset in the program.
pub type Instruction = (&'static [u8], &'static str);

/// Counts in RBX the words that are not zero.
///
/// `repe scasq` runs through zeros and stops behind the first word that is not. Where there is one,
/// another guest's bytes go on: the loop at 0x16 counts the words up to the next zero.
#[rustfmt::skip]
pub const SCAN: &[Instruction] = &[
    (&[0x31, 0xdb],             "xor %ebx,%ebx"),         // 00 nothing found yet
    (&[0x31, 0xc0],             "xor %eax,%eax"),         // 02 the word to compare with
    (&[0x48, 0x8b, 0x3e],       "mov (%rsi),%rdi"),       // 04 the next piece: its address,
    (&[0x48, 0x8b, 0x4e, 0x08], "mov 8(%rsi),%rcx"),      // 07 its words;
    (&[0xe3, 0x20],             "jrcxz 0x2d"),            // 0b without words the list ends
    (&[0x48, 0x83, 0xc6, 0x10], "add $0x10,%rsi"),        // 0d
    (&[0xf3, 0x48, 0xaf],       "repe scas (%rdi),%rax"), // 11 run through zeros
    (&[0x74, 0x13],             "je 0x29"),               // 14 up to the end: the piece is done
    (&[0x48, 0xff, 0xc3],       "inc %rbx"),              // 16 one that is not zero lies behind us
    (&[0xe3, 0x0e],             "jrcxz 0x29"),            // 19 and was the piece's last
    (&[0x48, 0x39, 0x07],       "cmp %rax,(%rdi)"),       // 1b
    (&[0x74, 0xf1],             "je 0x11"),               // 1e zeros again
    (&[0x48, 0x83, 0xc7, 0x08], "add $8,%rdi"),           // 20 another one: step over it
    (&[0x48, 0xff, 0xc9],       "dec %rcx"),              // 24
    (&[0xeb, 0xed],             "jmp 0x16"),              // 27
    (&[0xe7, 0xe0],             "out %eax,$0xe0"),        // 29 the piece is done
    (&[0xeb, 0xd7],             "jmp 4"),                 // 2b
    (&[0x89, 0xd8],             "mov %ebx,%eax"),         // 2d
    (&[0xe7, 0xe4],             "out %eax,$0xe4"),        // 2f the count's low half
    (&[0x48, 0xc1, 0xeb, 0x20], "shr $0x20,%rbx"),        // 31
    (&[0x89, 0xd8],             "mov %ebx,%eax"),         // 35
    (&[0xe7, 0xe8],             "out %eax,$0xe8"),        // 37 its high half, the end
];

/// Writes the word in RAX over every piece.
#[rustfmt::skip]
pub const FILL: &[Instruction] = &[
    (&[0x48, 0x8b, 0x3e],       "mov (%rsi),%rdi"),       // 00 the next piece: its address,
    (&[0x48, 0x8b, 0x4e, 0x08], "mov 8(%rsi),%rcx"),      // 03 its words;
    (&[0xe3, 0x0b],             "jrcxz 0x14"),            // 07 without words the list ends
    (&[0x48, 0x83, 0xc6, 0x10], "add $0x10,%rsi"),        // 09
    (&[0xf3, 0x48, 0xab],       "rep stos %rax,(%rdi)"),  // 0d
    (&[0xe7, 0xe0],             "out %eax,$0xe0"),        // 10 the piece is done
    (&[0xeb, 0xec],             "jmp 0"),                 // 12
    (&[0xe7, 0xe8],             "out %eax,$0xe8"),        // 14 the end
];

/// The bytes of a program.
pub fn bytes(program: &[Instruction]) -> Vec<u8> {
    program.iter().flat_map(|(bytes, _)| bytes.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter};

    /// The bytes do what is written beside them, says a disassembler.
    #[test]
    fn bytes_are_what_is_written_beside_them() {
        for program in [SCAN, FILL] {
            let code = bytes(program);
            let mut formatter = GasFormatter::new();
            formatter.options_mut().set_uppercase_hex(false);
            formatter.options_mut().set_branch_leading_zeros(false);
            let mut found = Vec::new();
            for instruction in &mut Decoder::new(64, &code, DecoderOptions::NONE) {
                let mut text = String::new();
                formatter.format(&instruction, &mut text);
                found.push((instruction.len(), text));
            }
            let written: Vec<_> = program.iter().map(|(b, text)| (b.len(), (*text).to_owned())).collect();
            assert_eq!(found, written);
        }
    }

    /// A jump into the middle of an instruction would decode cleanly above.
    #[test]
    fn jumps_land_on_instructions() {
        for program in [SCAN, FILL] {
            let code = bytes(program);
            let decoded: Vec<_> = Decoder::new(64, &code, DecoderOptions::NONE).into_iter().collect();
            for jump in decoded.iter().filter(|i| i.near_branch_target() != 0) {
                assert!(decoded.iter().any(|i| i.ip() == jump.near_branch_target()), "{jump:?}");
            }
        }
    }
}
