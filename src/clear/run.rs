//! One kernel over one range of bytes: heads and tails by ordinary stores, whole lines by the kernel.
//!
//! Needs nothing but `core`, as the kernels: the machine with CLZERO in `tests/machines` runs the same files.

use super::portable::portable;

/// The unit of a whole line: what `CLZERO` and `MOVDIR64B` write, and what write combining wants whole.
pub(super) const LINE: usize = 64;

/// A function that zeroes `len` bytes at a pointer.
pub(super) type Kernel = unsafe fn(*mut u8, usize);

/// A kernel and what it can be given.
#[derive(Debug, Clone, Copy)]
pub(super) enum Store {
    /// Any bytes.
    Bytes(Kernel),
    /// Whole lines only.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no such kernels"))]
    Lines(Kernel),
}

/// Zeroes `ptr .. ptr + len` in ascending order: the bytes before the first and after the last whole line by
/// ordinary stores, the lines by the kernel.
///
/// # Safety
///
/// Every byte of the range is mapped and writable, no Rust reference to one of them is live, and the CPU
/// under us offers the kernel's instructions.
pub(super) unsafe fn run(store: Store, ptr: *mut u8, len: usize) {
    match store {
        // SAFETY: passed on.
        Store::Bytes(kernel) => unsafe { kernel(ptr, len) },
        Store::Lines(kernel) => {
            let head = (ptr.addr().wrapping_neg() & (LINE - 1)).min(len);
            let lines = (len - head) & !(LINE - 1);
            let tail = len - head - lines;
            // SAFETY: the three parts lie one after the other in `ptr .. ptr + len`, which the caller
            // vouches for. If `lines` is not 0, `head` < `LINE` bytes lead to a multiple of `LINE`.
            unsafe {
                portable(ptr, head);
                if lines != 0 {
                    kernel(ptr.wrapping_add(head), lines);
                }
                portable(ptr.wrapping_add(head + lines), tail);
            }
        }
    }
}
