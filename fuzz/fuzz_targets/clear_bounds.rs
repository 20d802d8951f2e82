//! A method zeroes the part it was given and nothing else, whatever was there before; a part that leaves its
//! range is refused and nothing is stored.
//!
//! Input: one byte for the method (after the last of them: the choice by rule), one of flags (bit 0: read
//! soon; bit 1: offset and length are folded into the range), offset and length (8 bytes each,
//! little-endian), then what the memory holds, over and over.
//!
//! AddressSanitizer does not see stores made in assembly. What goes astray is found by comparing every byte
//! around the part, and by the pages on both sides that nobody may touch.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use vm_zeroing::{Clearer, Concurrency, CpuDescription, HostRange, Method, MethodError, RequestError, Reuse};

const PAGE: usize = 4096;
/// What the clearer is told of.
const RANGE: usize = 64 << 10;
/// The range, and a page of canaries on both sides.
const SEEN: usize = RANGE + 2 * PAGE;

static MEMORY: LazyLock<Memory> = LazyLock::new(Memory::new);

/// By each method in turn, and by the rule; an error where this CPU lacks the method.
static CLEARERS: LazyLock<Vec<(Option<Method>, Result<Clearer, MethodError>)>> = LazyLock::new(|| {
    let forced = Method::ALL.map(|method| (Some(method), Clearer::with_method(method)));
    forced.into_iter().chain([(None, Ok(Clearer::auto()))]).collect()
});

fuzz_target!(|data: &[u8]| {
    let mut input = Unstructured::new(data);
    // An exhausted input goes on as zeros.
    let [method, flags] = input.arbitrary::<[u8; 2]>().unwrap_or([0; 2]);
    let [offset, len] = input.arbitrary::<[u64; 2]>().unwrap_or([0; 2]);
    let (asked, clearer) = &CLEARERS[usize::from(method) % CLEARERS.len()];
    let clearer = match clearer {
        Ok(clearer) => clearer,
        Err(error) => return refused(*asked, error),
    };
    let reuse = if flags & 1 == 0 { Reuse::Cold } else { Reuse::Soon };
    let (offset, len) = if flags & 2 == 0 { (offset, len) } else { folded(offset, len) };

    let before = content(input.take_rest());
    MEMORY.write(&before);
    let answer = clearer.clear(&MEMORY.range, offset, len, reuse);
    let after = MEMORY.read();

    let mut wanted = before;
    match offset.checked_add(len) {
        Some(end) if end <= RANGE as u64 => {
            wanted[PAGE..][offset as usize..end as usize].fill(0);
            let method = answer.expect("the part lies in the range");
            assert_eq!(method, clearer.method_for(len, reuse, Concurrency::One), "another one than was told");
            assert!(asked.is_none_or(|asked| asked == method), "another one than was asked for");
            assert!(asked.is_some() || reuse == Reuse::Cold || !method.is_non_temporal(), "kept in no cache");
        }
        _ => match answer {
            Err(RequestError::OutOfRange { offset: from, len: bytes, range_len }) => {
                assert_eq!((from, bytes, range_len), (offset, len, RANGE as u64));
            }
            other => panic!("{len} bytes at {offset} leave the range: {other:?}"),
        },
    }
    // The search is slow under the fuzzer, the comparison is not.
    if after != wanted
        && let Some(at) = (0..SEEN).find(|at| after[*at] != wanted[*at])
    {
        let (found, wanted) = (after[at], wanted[at]);
        let at = at as i64 - PAGE as i64;
        panic!("{asked:?}, {len} bytes at {offset}: byte {at} is {found:#x} where {wanted:#x} was expected");
    }
});

/// A part of the range, the whole and the empty one at its end included.
fn folded(offset: u64, len: u64) -> (u64, u64) {
    let offset = offset % (RANGE as u64 + 1);
    (offset, len % (RANGE as u64 - offset + 1))
}

/// The pattern over and over, on an odd period, and never zero in the canaries.
fn content(pattern: &[u8]) -> Vec<u8> {
    let pattern = if pattern.is_empty() { &[0xa5] } else { pattern };
    let mut bytes = pattern.repeat(SEEN.div_ceil(pattern.len()));
    bytes.truncate(SEEN);
    for canaries in [0..PAGE, PAGE + RANGE..SEEN] {
        bytes[canaries].iter_mut().for_each(|byte| *byte |= 1);
    }
    bytes
}

/// The error says what was asked for and what there is.
fn refused(asked: Option<Method>, error: &MethodError) {
    let here: Vec<&str> = CpuDescription::detect().methods().iter().map(|method| method.name()).collect();
    match error {
        MethodError::Unavailable { asked: named, offered, .. } => {
            assert_eq!((Some(*named), offered.as_str()), (asked, here.join(", ").as_str()));
        }
        other => panic!("{asked:?}: {other}"),
    }
}

/// One mapping for all inputs: guard, canaries, range, canaries, guard. Seen by raw pointers only.
struct Memory {
    seen: usize,
    range: HostRange,
}

impl Memory {
    fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice, whose inner pages are then opened. It
        // is never unmapped, and nobody holds a reference to its bytes.
        unsafe {
            let whole = libc::mmap(std::ptr::null_mut(), SEEN + 2 * PAGE, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(whole, libc::MAP_FAILED);
            let seen = whole.byte_add(PAGE);
            assert_eq!(libc::mprotect(seen, SEEN, libc::PROT_READ | libc::PROT_WRITE), 0);
            let range = HostRange::new(seen.byte_add(PAGE).cast(), RANGE, Arc::new(()));
            Self { seen: seen as usize, range: range.expect("whole pages") }
        }
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), SEEN);
        // SAFETY: as many bytes as are mapped, and only this thread touches them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.seen as *mut u8, SEEN) };
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; SEEN];
        // SAFETY: as many bytes as are mapped, and only this thread touches them.
        unsafe { std::ptr::copy_nonoverlapping(self.seen as *const u8, bytes.as_mut_ptr(), SEEN) };
        bytes
    }
}
