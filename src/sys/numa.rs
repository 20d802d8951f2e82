//! Where pages are and where they should be: `move_pages(2)`, `get_mempolicy(2)`, `mbind(2)`.

use super::{Chunk, errno, page_size};

/// Node numbers that a mask holds; the kernel's own limit (`MAX_NUMNODES`) is no higher.
const MASK_NODES: usize = 1024;
const WORD: usize = 64;
const MPOL_PREFERRED: libc::c_int = 1;
const MPOL_BIND: libc::c_int = 2;
const MPOL_F_ADDR: libc::c_ulong = 1 << 1;

/// The node that holds the first page of `chunk`; `None` where no page is there yet.
///
/// Asks `move_pages` without targets, which moves nothing and allocates nothing.
pub(crate) fn node_of(chunk: &Chunk<'_>) -> Result<Option<u32>, i32> {
    let page = (chunk.ptr() as usize & !(page_size() as usize - 1)) as *mut libc::c_void;
    let mut status: libc::c_int = -libc::ENOENT;
    // SAFETY: one page address in, one status out, both in variables that outlive the call; without
    // target nodes the call only reports.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            1usize,
            &raw const page,
            std::ptr::null::<libc::c_int>(),
            &raw mut status,
            0,
        )
    };
    if answer < 0 {
        return Err(errno());
    }
    Ok(u32::try_from(status).ok())
}

/// The one node that the memory policy at the start of `chunk` names; `None` where it names none or several.
///
/// Reads the policy itself (`MPOL_F_ADDR` without `MPOL_F_NODE`), which allocates nothing.
pub(crate) fn policy_node(chunk: &Chunk<'_>) -> Result<Option<u32>, i32> {
    let mut mode: libc::c_int = 0;
    let mut mask = [0u64; MASK_NODES / WORD];
    // SAFETY: `mode` and `mask` outlive the call, and `mask` holds the MASK_NODES bits it is said to hold.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            MASK_NODES,
            chunk.ptr(),
            MPOL_F_ADDR,
        )
    };
    if answer < 0 {
        return Err(errno());
    }
    // The upper bits of the mode are flags.
    if !matches!(mode & 0xff, MPOL_PREFERRED | MPOL_BIND) {
        return Ok(None);
    }
    let mut named = (0..MASK_NODES).filter(|node| mask[node / WORD] >> (node % WORD) & 1 == 1);
    Ok(match (named.next(), named.next()) {
        (Some(only), None) => u32::try_from(only).ok(),
        _ => None,
    })
}

/// Binds future pages of `chunk` to `node` (strictly).
pub(crate) fn bind_to_node(chunk: &Chunk<'_>, node: u32) -> Result<(), i32> {
    let node = node as usize;
    let mut mask = [0u64; MASK_NODES / WORD];
    let word = mask.get_mut(node / WORD).ok_or(libc::EINVAL)?;
    *word = 1 << (node % WORD);
    // SAFETY: mbind sets a policy and, without MPOL_MF_MOVE, touches no page; the mask outlives the
    // call. The kernel reads one bit fewer than it is told, hence the + 1.
    let answer = unsafe {
        libc::syscall(libc::SYS_mbind, chunk.ptr(), chunk.len(), MPOL_BIND, mask.as_ptr(), MASK_NODES + 1, 0)
    };
    if answer < 0 { Err(errno()) } else { Ok(()) }
}
