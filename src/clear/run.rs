//! One kernel over one range of bytes: heads and tails by ordinary stores, whole lines by the kernel.
//!
//! Needs nothing but `core`, as the kernels: the machine with CLZERO in `tests/machines` runs the same files.

use super::portable;

/// The unit of a whole line: what `CLZERO` and `MOVDIR64B` write, and what write combining wants whole.
pub(super) const LINE: usize = 64;

/// A function that zeroes `len` bytes at a pointer.
pub(super) type Kernel = unsafe fn(*mut u8, usize);

/// A function that stores a line again and again over `len` bytes, whole lines, at a pointer.
pub(super) type PatternKernel = unsafe fn(*mut u8, usize, &[u8; LINE]);

/// A kernel and what it can be given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Store {
    /// Any bytes. Zeroes only.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no such kernels"))]
    Bytes(Kernel),
    /// Whole lines. Zeroes only.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no such kernels"))]
    Lines(Kernel),
    /// Whole lines, all of them the same; to zero is to fill with [`ZEROES`].
    Pattern(PatternKernel),
}

/// A line where `MOVDIR64B` and vector loads read it at once.
#[repr(align(64))]
struct Line([u8; LINE]);

static ZEROES: Line = Line([0; LINE]);

/// Zeroes `ptr .. ptr + len` in ascending order: the bytes before the first and after the last whole line by
/// ordinary stores, the lines by the kernel.
///
/// # Safety
///
/// Every byte of the range is mapped and writable, no Rust reference to one of them is live, and the CPU
/// under us offers the kernel's instructions.
pub(super) unsafe fn run(store: Store, ptr: *mut u8, len: usize) {
    let (zeroes, parts) = (&ZEROES.0, Parts::of(ptr, len));
    // SAFETY: the parts lie one after the other in `ptr .. ptr + len`, which the caller vouches for, as for
    // the instructions; what is given to a kernel of lines are whole lines.
    unsafe {
        match store {
            Store::Bytes(kernel) => kernel(ptr, len),
            Store::Lines(kernel) => parts.store(zeroes, zeroes, |lines, len| kernel(lines, len)),
            Store::Pattern(kernel) => parts.store(zeroes, zeroes, |lines, len| kernel(lines, len, zeroes)),
        }
    }
}

/// Stores `template[i % 64]` to each byte `ptr + i` of `ptr .. ptr + len`, else as [`run`].
///
/// # Safety
///
/// As [`run`].
pub(super) unsafe fn fill(kernel: PatternKernel, ptr: *mut u8, len: usize, template: &[u8; LINE]) {
    let parts = Parts::of(ptr, len);
    // The head has used up that much of the template when the first whole line begins.
    let mut line = Line(*template);
    line.0.rotate_left(parts.head);
    // SAFETY: as in `run`.
    unsafe { parts.store(template, &line.0, |lines, len| kernel(lines, len, &line.0)) }
}

/// A range cut at the borders of its whole lines.
struct Parts {
    ptr: *mut u8,
    /// Bytes before the first whole line: fewer than a line.
    head: usize,
    /// Bytes in whole lines.
    lines: usize,
    /// Bytes after the last whole line: fewer than a line.
    tail: usize,
}

impl Parts {
    fn of(ptr: *mut u8, len: usize) -> Self {
        let head = (ptr.addr().wrapping_neg() & (LINE - 1)).min(len);
        let lines = len.wrapping_sub(head) & !(LINE - 1);
        Self { ptr, head, lines, tail: len.wrapping_sub(head).wrapping_sub(lines) }
    }

    /// Stores `head` to the head, `line` to the tail, and lets `kernel` store to the whole lines.
    ///
    /// # Safety
    ///
    /// Every byte of the range is mapped and writable, and no Rust reference to one of them is live.
    unsafe fn store(&self, head: &[u8; LINE], line: &[u8; LINE], kernel: impl FnOnce(*mut u8, usize)) {
        let lines = self.ptr.wrapping_add(self.head);
        // SAFETY: head and tail are shorter than a line, and within the range that the caller vouches for.
        unsafe { portable::bytes(self.ptr, self.head, head) };
        if self.lines != 0 {
            kernel(lines, self.lines);
        }
        // SAFETY: as the head.
        unsafe { portable::bytes(lines.wrapping_add(self.lines), self.tail, line) };
    }
}
