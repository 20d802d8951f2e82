//! Sealed memory files: seals that leave existing mappings writable are no obstacle and stay as they are; a
//! mapping that a seal keeps from being written is an error, not a signal.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::files::{seal, sealable, seals};
use common::mapped::{Mapped, punch};
use common::{MIB, PAGE, all_zero, assert_exact, fill, is_zero, service};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, MmapRegion};
use vm_memory::{GuestRegionCollection, GuestRegionMmap};
use vm_zeroing::{Cause, Intent, JobError, ZeroRequest};

const LEN: u64 = 9 * MIB;

#[test]
fn seals_that_leave_the_mapping_writable() {
    let sizes = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    let service = service();
    for kinds in [sizes, sizes | libc::F_SEAL_SEAL, sizes | libc::F_SEAL_FUTURE_WRITE] {
        for intent in [Intent::Teardown, Intent::Boot] {
            let file = sealable(LEN);
            let offset = FileOffset::new(file.try_clone().unwrap(), 0);
            let memory = GuestMemoryMmap::<()>::from_ranges_with_files([(
                GuestAddress(0),
                LEN as usize,
                Some(offset),
            )]);
            let memory = Arc::new(memory.unwrap());
            fill(&*memory, 0, LEN);
            // With a hole in it.
            punch(&file, 4 * MIB, 3 * PAGE);
            seal(&file, kinds);
            let report = all_zero(&service.zero(&memory, intent).unwrap());
            assert_exact(&*memory, &report, &[(0, LEN)]);
            assert_eq!(seals(&file), kinds);
        }
    }
}

/// A private mapping of a file that can no longer be written: the copies are ours to clear, the file is not.
#[test]
fn a_private_mapping_of_a_file_sealed_against_writing() {
    let file = sealable(LEN);
    fill(
        &GuestMemoryMmap::<()>::from_ranges_with_files([(
            GuestAddress(0),
            LEN as usize,
            Some(FileOffset::new(file.try_clone().unwrap(), 0)),
        )])
        .unwrap(),
        0,
        LEN,
    );
    seal(&file, libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK);
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let private = MmapRegion::build(Some(offset), LEN as usize, rw, libc::MAP_PRIVATE).unwrap();
    let region = GuestRegionMmap::<()>::new(private, GuestAddress(0)).unwrap();
    let memory = Arc::new(GuestRegionCollection::from_regions(vec![region]).unwrap());
    for intent in [Intent::Boot, Intent::Teardown] {
        let report = all_zero(&service().zero(&memory, intent).unwrap());
        assert_eq!(report.erased_bytes, LEN);
        assert!(is_zero(&*memory, 0, LEN));
    }
}

#[test]
fn a_mapping_that_a_seal_keeps_from_being_written() {
    let file = sealable(LEN);
    seal(&file, libc::F_SEAL_FUTURE_WRITE);
    let memory = Arc::new(Mapped::shared_read_only(&file, LEN));
    let service = service();
    let error = service.submit(ZeroRequest::host([memory.host_range(0, LEN)])).unwrap().wait().unwrap_err();
    let JobError::Failed { cause: Cause::System { errno, .. }, report, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*errno, report.zero_bytes(), report.total_bytes), (libc::EINVAL, 0, LEN));
    all_zero(
        &service.submit(ZeroRequest::host([Arc::new(Mapped::anonymous(LEN)).host_range(0, LEN)])).unwrap(),
    );
}
