//! Filling memory with a line repeated, by the stores that clear.

use std::array;
use std::iter;
use std::sync::atomic::AtomicU64;

use super::method::Method;
use super::run::{self, LINE, PatternKernel, Store};
use super::{lacks_here, portable, store};
use crate::sys::Chunk;

/// Stores `template[i % 64]` to each byte `i` of the chunk and to no other, in ascending order; says which
/// method stored the whole lines. On return they are ordered before all later stores of this thread.
///
/// A method that cannot store a pattern, or that the CPU under us lacks, is replaced: a non-temporal one by
/// `VMOVNTDQ` or `MOVNTDQ`, any other by ordinary stores.
pub(crate) fn fill(method: Method, chunk: &Chunk<'_>, template: &[u8; LINE]) -> Method {
    let (method, kernel) = kernel(method);
    // SAFETY: a chunk's bytes may be written while it lives and nobody holds a reference to them; `kernel`
    // yields what the CPU under us offers.
    unsafe { run::fill(kernel, chunk.ptr(), chunk.len(), template) };
    method
}

fn kernel(wanted: Method) -> (Method, PatternKernel) {
    let others: &[Method] = if wanted.is_non_temporal() { &[Method::Avx2, Method::Sse2] } else { &[] };
    iter::once(wanted)
        .chain(others.iter().copied())
        .find_map(|method| match store(method) {
            Store::Pattern(kernel) if lacks_here(method).is_none() => Some((method, kernel)),
            _ => None,
        })
        .unwrap_or((Method::Portable, portable::lines))
}

/// `count` words of newly allocated memory, all of them `word`.
///
/// By ordinary stores, since pages that the kernel has just zeroed are in the caches. Seen on Zen 5 for 4096
/// words: 23 µs by ordinary stores of any width, page faults included, and 26 to 29 µs by non-temporal ones;
/// 24 and 32 µs where the words are read next; 0.9 and 1.0 µs over memory that the allocator had.
pub(crate) fn filled_words(count: usize, word: u64) -> Box<[AtomicU64]> {
    let template = array::from_fn(|at| word.to_ne_bytes()[at % size_of::<u64>()]);
    let mut words = Box::<[AtomicU64]>::new_uninit_slice(count);
    // SAFETY: the bytes of `words`, which nobody else knows and nobody looks at before they are written.
    let chunk = unsafe { Chunk::from_raw(words.as_mut_ptr().cast(), size_of_val(&*words)) };
    fill(Method::Portable, &chunk, &template);
    // SAFETY: every byte was written, and any bits are a word.
    unsafe { words.assume_init() }
}
