//! Every byte of the range and no other, whatever the method, length and alignment (R12).

use std::sync::LazyLock;

use proptest::prelude::*;

use super::guarded::{CANARY, Guarded, PAGE};
use super::{COLD, clearer, methods_here};
use crate::clear::{Clearer, CpuDescription, Method, Vendor, first_nonzero};
use crate::sys::Chunk;

const LENGTHS: [usize; 12] = [0, 1, 7, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097];

/// By every method this CPU has, by the rule for this CPU, and by rules for others.
static CLEARERS: LazyLock<Vec<(String, Clearer)>> = LazyLock::new(|| {
    let here = CpuDescription::detect();
    let mut absurd = here.clone();
    (absurd.vendor, absurd.llc_bytes) = (Vendor::Other, Some(0));
    let forced = methods_here().into_iter().map(|method| (method.to_string(), Some(method), here.clone()));
    let auto = [("here", here.clone()), ("bare", CpuDescription::bare()), ("absurd", absurd)]
        .map(|(name, cpu)| (format!("auto ({name})"), None, cpu));
    forced.chain(auto).map(|(name, wanted, cpu)| (name, clearer(wanted, &cpu).unwrap())).collect()
});

#[test]
fn clears_exactly_the_range() {
    let mut memory = Guarded::new(4 * PAGE);
    for (name, clearer) in CLEARERS.iter() {
        for len in LENGTHS {
            let last = memory.len() - len;
            // Against the lower guard, against the upper one, and at odd offsets between canaries.
            for at in [0, last, 1, 63, 64, 65, PAGE - 1, PAGE, PAGE + 7, last.saturating_sub(1)] {
                memory.check(at.min(last), len, name, |chunk| {
                    clearer.clear_chunk(chunk, COLD);
                });
            }
        }
    }
}

#[test]
fn clears_long_ranges_at_odd_offsets() {
    const LEN: usize = (1 << 20) + 3;
    let mut memory = Guarded::new(LEN + PAGE);
    let last = memory.len() - LEN;
    for (name, clearer) in CLEARERS.iter() {
        for at in [0, 1, 61, 64, last - 1, last] {
            memory.check(at, LEN, name, |chunk| {
                assert_eq!(clearer.clear_chunk(chunk, COLD), clearer.plan.method_for(LEN as u64, COLD));
            });
        }
    }
}

proptest! {
    #[test]
    fn agrees_with_a_naive_oracle(
        which in any::<prop::sample::Index>(),
        from in 0..3 * PAGE,
        len in 0..=3 * PAGE,
        seed in any::<u64>(),
    ) {
        let (name, clearer) = which.get(&CLEARERS);
        let mut memory = Guarded::new(3 * PAGE);
        let len = len.min(memory.len() - from);
        for at in 0..memory.len() {
            memory.set(at, (seed.rotate_left(at as u32) as u8) | 1);
        }
        let mut wanted = memory.bytes().to_vec();
        wanted.iter_mut().skip(from).take(len).for_each(|byte| *byte = 0);
        clearer.clear_chunk(&memory.chunk(from, len), COLD);
        prop_assert!(memory.bytes() == wanted, "{name} at {from}, {len} bytes");
    }

    #[test]
    fn first_nonzero_agrees_with_a_naive_oracle(
        from in 0..2 * PAGE,
        len in 0..=2 * PAGE,
        stray in prop::collection::vec((0..2 * PAGE, 1u8..), 0..3),
    ) {
        let mut memory = Guarded::new(2 * PAGE);
        let len = len.min(memory.len() - from);
        for (at, byte) in stray {
            memory.set(at, byte);
        }
        let wanted = memory.bytes()[from..from + len].iter().position(|&byte| byte != 0);
        prop_assert_eq!(first_nonzero(&memory.chunk(from, len)), wanted);
    }
}

#[test]
fn first_nonzero_finds_every_single_byte() {
    const LEN: usize = 777;
    let mut memory = Guarded::new(PAGE);
    let from = memory.len() - LEN;
    assert_eq!(first_nonzero(&memory.chunk(from, LEN)), None);
    memory.set(from - 1, 1);
    assert_eq!(first_nonzero(&memory.chunk(from, LEN)), None, "looked below the range");
    for at in 0..LEN {
        memory.set(from + at, 0x80);
        assert_eq!(first_nonzero(&memory.chunk(from, LEN)), Some(at));
        memory.set(from + at, 0);
    }
}

/// A length beyond 32 bits, without the memory: 2 MiB of one memfd mapped over and over, and a last piece of
/// its own, which a truncated length never reaches.
#[test]
fn clears_more_than_4_gib() {
    const PIECE: usize = 2 << 20;
    const PIECES: usize = 2048;
    const LAST: usize = PIECE + 4096 + 5;
    let len = PIECE * PIECES + LAST;
    // SAFETY: plain system calls on a file and addresses of our own; the fixed mappings lie in the
    // reservation just made.
    let start = unsafe {
        let file = libc::memfd_create(c"clear-test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(file >= 0);
        assert_eq!(libc::ftruncate(file, (3 * PIECE) as i64), 0);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = libc::mmap(std::ptr::null_mut(), len + 2 * PIECE, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        for piece in 0..=PIECES {
            // The last mapping shows the file's second and third piece, every other one the first.
            let (bytes, offset) = if piece == PIECES { (2 * PIECE, PIECE) } else { (PIECE, 0) };
            let at = start.byte_add(piece * PIECE);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mmap(at, bytes, rw, flags, file, offset as i64), at);
        }
        assert_eq!(libc::close(file), 0);
        start.cast::<u8>()
    };
    let end = start.wrapping_add(len);
    for method in methods_here() {
        if method == Method::Portable && cfg!(debug_assertions) {
            println!("skipped: {method} (slow without optimisation; one loop in Rust, counting in usize)");
            continue;
        }
        let clearer = clearer(Some(method), &CpuDescription::detect()).unwrap();
        // SAFETY: the last piece and the byte behind it are mapped, as is all of the range; nobody else
        // knows the addresses.
        let (left, behind) = unsafe {
            end.wrapping_sub(LAST).write_bytes(CANARY, LAST + 1);
            clearer.clear_chunk(&Chunk::from_raw(start, len), COLD);
            (first_nonzero(&Chunk::from_raw(end.wrapping_sub(LAST), LAST)), end.read_volatile())
        };
        assert_eq!((left, behind), (None, CANARY), "{method}");
    }
    // SAFETY: the reservation with all that was mapped into it is ours alone.
    unsafe { libc::munmap(start.cast(), len + 2 * PIECE) };
}
