//! The guest's boot slot: code, the list of pieces of RAM, page tables. Pure arithmetic.
//!
//! The slot lies above all RAM, so that RAM is the lease and nothing but the lease.

use crate::payload;

/// One region of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRange {
    /// Guest physical address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// Guest RAM that the guest's programs cannot work on.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Identity page tables with one page-directory-pointer table reach 512 GiB.
    #[error("guest RAM at {base:#x} + {len:#x} ends above {limit:#x}, where this guest's page tables end")]
    TooHigh {
        /// Guest physical address.
        base: u64,
        /// Bytes.
        len: u64,
        /// Guest RAM must end here or below.
        limit: u64,
    },
    /// The programs work on 8-byte words.
    #[error("guest RAM at {base:#x} + {len:#x} is not made of whole {PAGE}-byte pages")]
    NotPages {
        /// Guest physical address.
        base: u64,
        /// Bytes.
        len: u64,
    },
}

const PAGE: u64 = 4096;
const LEAF: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// What one PML4 entry maps; the last GiB of it is for the boot slot.
const REACH: u64 = 512 * GIB;
/// The guest says how far it is after each piece.
pub const PIECE: u64 = 64 << 20;
/// A 64-bit task-state segment without its port map.
const TSS_BYTES: u32 = 104;
/// The last byte of [`task_state`]: 256 ports and one byte more.
pub const TSS_LIMIT: u32 = TSS_BYTES + 256 / 8;
/// Present, writable, user: CPL 3 runs natively where ring 0 would be emulated.
const TABLE: u64 = 0x7;
/// The same, as a 2 MiB page.
const LEAF_FLAGS: u64 = 0x87;

/// The bytes of the boot slot and the guest physical addresses in it.
#[derive(Debug, Clone)]
pub struct BootImage {
    /// Where the slot lies.
    pub base: u64,
    /// What it holds: whole pages.
    pub bytes: Vec<u8>,
    /// Entry of [`payload::SCAN`].
    pub scan: u64,
    /// Entry of [`payload::FILL`].
    pub fill: u64,
    /// The task-state segment, for TR.
    pub tss: u64,
    /// The list of pieces, for RSI.
    pub list: u64,
    /// The PML4, for CR3.
    pub tables: u64,
    /// Bytes of each piece, in the order in which the guest works.
    pub pieces: Vec<u64>,
}

impl BootImage {
    /// A boot slot for a guest with this RAM.
    pub fn new(ram: &[RamRange]) -> Result<Self, BootError> {
        let limit = REACH - GIB;
        // The slot keeps clear of the 32-bit addresses, where devices live.
        let mut end = 4 * GIB;
        for &RamRange { base, len } in ram {
            let top = base.checked_add(len).filter(|top| *top <= limit);
            end = end.max(top.ok_or(BootError::TooHigh { base, len, limit })?);
            if base % PAGE != 0 || len % PAGE != 0 {
                return Err(BootError::NotPages { base, len });
            }
        }
        let base = end.next_multiple_of(GIB);

        let pieces = pieces(ram);
        let mut bytes = payload::bytes(payload::SCAN);
        let fill = base + bytes.len() as u64;
        bytes.extend(payload::bytes(payload::FILL));
        bytes.resize(bytes.len().next_multiple_of(256), 0);
        let tss = base + bytes.len() as u64;
        bytes.extend(task_state());
        pad(&mut bytes);
        let list = base + bytes.len() as u64;
        for piece in &pieces {
            bytes.extend(piece.base.to_le_bytes());
            bytes.extend((piece.len / 8).to_le_bytes());
        }
        bytes.extend([0; 16]);
        pad(&mut bytes);

        let tables = base + bytes.len() as u64;
        // At most 511 directories: PML4, PDPT and they fit well into the slot's own GiB.
        let own = RamRange { base, len: bytes.len() as u64 + 514 * PAGE };
        let mapped: Vec<RamRange> = ram.iter().copied().chain([own]).collect();
        bytes.extend(page_tables(&mapped, tables));
        let pieces = pieces.iter().map(|piece| piece.len).collect();
        Ok(Self { base, bytes, scan: base, fill, tss, list, tables, pieces })
    }
}

/// A 64-bit task-state segment that allows the ports 0x00 to 0xff.
///
/// IOPL 3 allows them too, but a software-assisted KVM may forget IOPL and look here. Without a TSS
/// of ours it would take guest RAM at address 0 for one, where zeros allow every port and a secret
/// forbids them.
fn task_state() -> [u8; TSS_LIMIT as usize + 1] {
    let mut tss = [0; TSS_LIMIT as usize + 1];
    tss[102] = TSS_BYTES as u8; // where the map of forbidden ports begins
    tss[TSS_LIMIT as usize] = 0xff; // the map is read two bytes at a time
    tss
}

/// RAM in pieces of at most [`PIECE`] bytes.
fn pieces(ram: &[RamRange]) -> Vec<RamRange> {
    let mut pieces = Vec::new();
    for range in ram {
        let mut done = 0;
        while done < range.len {
            let len = PIECE.min(range.len - done);
            pieces.push(RamRange { base: range.base + done, len });
            done += len;
        }
    }
    pieces
}

/// PML4, page-directory-pointer table and directories, to be loaded at `at`, that map each 2 MiB page
/// touching one of the ranges to itself.
fn page_tables(mapped: &[RamRange], at: u64) -> Vec<u8> {
    let mut pdpt = [0_u64; 512];
    let mut directories: Vec<[u64; 512]> = Vec::new();
    for (gib, entry) in (0_u64..).zip(pdpt.iter_mut()) {
        let mut directory = [0_u64; 512];
        for (page, leaf) in (0_u64..).zip(directory.iter_mut()) {
            let address = gib * GIB + page * LEAF;
            if mapped.iter().any(|r| r.base < address + LEAF && address < r.base + r.len) {
                *leaf = address | LEAF_FLAGS;
            }
        }
        if directory != [0; 512] {
            *entry = (at + (2 + directories.len() as u64) * PAGE) | TABLE;
            directories.push(directory);
        }
    }
    let mut pml4 = [0_u64; 512];
    pml4[0] = (at + PAGE) | TABLE;
    let tables = [pml4, pdpt].into_iter().chain(directories);
    tables.flatten().flat_map(u64::to_le_bytes).collect()
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(PAGE as usize), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(image: &BootImage, address: u64) -> u64 {
        let at = (address - image.base) as usize;
        u64::from_le_bytes(image.bytes[at..at + 8].try_into().unwrap())
    }

    /// What the MMU would make of `address`, or `None`.
    fn walk(image: &BootImage, address: u64) -> Option<u64> {
        let mut table = image.tables;
        for shift in [39, 30, 21] {
            let entry = word(image, table + ((address >> shift) & 511) * 8);
            if entry & 0x7 != 0x7 {
                return None;
            }
            table = entry & 0x000f_ffff_ffff_f000;
            if entry & 0x80 != 0 {
                return Some(table + address % LEAF);
            }
        }
        None
    }

    const RAMS: &[&[RamRange]] = &[
        &[RamRange { base: 0, len: PAGE }],
        &[RamRange { base: 0, len: 512 << 20 }],
        &[RamRange { base: 0, len: (512 << 20) + PAGE }],
        &[RamRange { base: 0, len: 3 * GIB }, RamRange { base: 4 * GIB, len: 5 * GIB + LEAF }],
        &[RamRange { base: 0, len: 511 * GIB }],
    ];

    #[test]
    fn ram_and_boot_slot_are_mapped_to_themselves() {
        for ram in RAMS {
            let image = BootImage::new(ram).unwrap();
            let slot = RamRange { base: image.base, len: image.bytes.len() as u64 };
            for range in ram.iter().chain([&slot]) {
                for address in [range.base, range.base + range.len / 2, range.base + range.len - 1] {
                    assert_eq!(walk(&image, address), Some(address), "{ram:x?}");
                }
                assert!(image.base >= 4 * GIB && (range == &slot || range.base + range.len <= image.base));
            }
        }
    }

    #[test]
    fn holes_are_not_mapped() {
        let image = BootImage::new(RAMS[3]).unwrap();
        for address in [3 * GIB, 3 * GIB + 12345, 4 * GIB - 1, 9 * GIB + LEAF, image.base + GIB] {
            assert_eq!(walk(&image, address), None, "{address:#x}");
        }
    }

    #[test]
    fn the_list_covers_ram_once_and_ends() {
        for ram in RAMS {
            let image = BootImage::new(ram).unwrap();
            let (mut at, mut next) = (image.list, Vec::new());
            while word(&image, at + 8) != 0 {
                next.push(RamRange { base: word(&image, at), len: word(&image, at + 8) * 8 });
                at += 16;
            }
            assert!(at + 16 <= image.tables);
            assert_eq!(next.iter().map(|p| p.len).collect::<Vec<_>>(), image.pieces);
            // Neighbouring pieces joined again are the RAM.
            let mut joined: Vec<RamRange> = Vec::new();
            for piece in next {
                assert!(piece.len <= PIECE);
                match joined.last_mut() {
                    Some(last) if last.base + last.len == piece.base => last.len += piece.len,
                    _ => joined.push(piece),
                }
            }
            assert_eq!(&joined, ram);
        }
    }

    #[test]
    fn ram_out_of_reach_is_an_error() {
        for (base, len) in [(0, 511 * GIB + PAGE), (600 * GIB, PAGE), (u64::MAX - PAGE + 1, PAGE)] {
            let error = BootImage::new(&[RamRange { base, len }]).unwrap_err();
            assert!(matches!(error, BootError::TooHigh { .. }), "{error}");
        }
        let error = BootImage::new(&[RamRange { base: 0, len: PAGE + 8 }]).unwrap_err();
        assert!(matches!(error, BootError::NotPages { .. }), "{error}");
    }
}
