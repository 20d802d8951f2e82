//! Both guests on memory with known contents: what one finds, the other finds.

use std::fs::File;
use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vm_zeroing::KvmSlots;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};
use vmm_sys_util::tempfile::TempFile;

use crate::args::GuestArg;
use crate::guest::{DEV_KVM, Guest, GuestError, Machine};
use crate::identity::Identity;

type Memory = GuestMemoryMmap<()>;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Host threads and, where it can be had, KVM.
fn machines() -> Vec<Machine> {
    let mut machines = vec![Machine::new(GuestArg::Thread, DEV_KVM, |_| ()).unwrap()];
    match Machine::new(GuestArg::Kvm, DEV_KVM, |_| ()) {
        Ok(machine) => machines.push(machine),
        Err(error) => eprintln!("SKIPPED for KVM: {error}"),
    }
    machines
}

type NoError = std::convert::Infallible;

fn start<'a>(machine: &Machine, memory: &'a Arc<Memory>) -> Guest<'a, Memory, KvmSlots<Memory>> {
    Guest::start(machine, &**memory, |vm| KvmSlots::register(vm, memory, 0)).unwrap()
}

/// Anonymous memory, two regions around the hole of the 32-bit addresses and one far above.
fn three_regions() -> (Arc<Memory>, [(u64, u64); 3]) {
    let ranges = [(0, 65 * MIB), (4 * GIB, 2 * MIB + 4096), (9 * GIB - 4096, 4096)];
    let mapped = ranges.map(|(base, len)| (GuestAddress(base), len as usize));
    (Arc::new(Memory::from_ranges(&mapped).unwrap()), ranges)
}

#[test]
fn fresh_memory_is_zero_and_filled_memory_is_secret_to_the_last_word() {
    for machine in machines() {
        let (memory, ranges) = three_regions();
        let words: u64 = ranges.iter().map(|(_, len)| len / 8).sum();
        let done = Mutex::new(0);
        let progress = |bytes| *done.lock().unwrap() += bytes;
        let mut guest = start(&machine, &memory);
        assert_eq!(guest.scan(&progress).unwrap(), 0, "{}", machine.name());
        // Only the low, only the high byte of each word set: every byte of a word counts.
        for secret in [1, 0x8000_0000_0000_0000, 0x5ec2_e700_0000_0001] {
            guest.fill(secret, &progress).unwrap();
            assert_eq!(guest.scan(&progress).unwrap(), words, "{}", machine.name());
        }
        assert_eq!(*done.lock().unwrap(), 7 * words * 8, "{}", machine.name());
        // The host sees what the guest wrote, up to both ends of each region.
        for (base, len) in ranges {
            for address in [base, base + len - 8] {
                let word: u64 = memory.read_obj(GuestAddress(address)).unwrap();
                assert_eq!(word, 0x5ec2_e700_0000_0001, "{}: {address:#x}", machine.name());
            }
        }
    }
}

#[test]
fn one_byte_is_found_once_wherever_it_lies() {
    let (memory, ranges) = three_regions();
    let mut guests: Vec<_> = machines().iter().map(|m| (m.name(), start(m, &memory))).collect();
    let mut places: Vec<u64> = ranges.iter().flat_map(|(base, len)| [*base, base + len - 1]).collect();
    // Around the ends of a small page, a hugepage and one of the guest's pieces.
    places.extend([4095, 4096, 2 * MIB - 1, 2 * MIB, 64 * MIB - 1, 64 * MIB]);
    for place in places {
        memory.write_obj(0x80_u8, GuestAddress(place)).unwrap();
        for (name, guest) in &mut guests {
            assert_eq!(guest.scan(&|_| ()).unwrap(), 1, "{name}: {place:#x}");
        }
        memory.write_obj(0_u8, GuestAddress(place)).unwrap();
    }
    for (name, guest) in &mut guests {
        assert_eq!(guest.scan(&|_| ()).unwrap(), 0, "{name}");
    }
}

#[test]
fn mixtures_of_zero_and_other_words_are_counted_alike() {
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap());
    // A generator with a fixed start: runs of words that are zero and of words that are not.
    let (mut state, mut expected) = (0x2545_f491_4f6c_dd1d_u64, 0);
    let mut at = 0;
    while at < MIB {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let run = state % 5;
        for _ in 0..=run {
            if state & 1 << 40 != 0 && at < MIB {
                memory.write_obj(state, GuestAddress(at)).unwrap();
                expected += 1;
            }
            at += 8;
        }
    }
    for machine in machines() {
        assert_eq!(start(&machine, &memory).scan(&|_| ()).unwrap(), expected, "{}", machine.name());
    }
}

#[test]
fn guests_at_once_see_their_own_memory() {
    for machine in machines() {
        let found: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..=4_u64)
                .map(|vm| {
                    let machine = &machine;
                    scope.spawn(move || {
                        let ranges = [(GuestAddress(0), (vm * 4 * MIB) as usize)];
                        let memory = Arc::new(Memory::from_ranges(&ranges).unwrap());
                        let mut guest = start(machine, &memory);
                        guest.fill(vm, &|_| ()).unwrap();
                        let word: u64 = memory.read_obj(GuestAddress(4 * MIB - 8)).unwrap();
                        assert_eq!(word, vm);
                        guest.scan(&|_| ()).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(found, [1, 2, 3, 4].map(|vm| vm * 4 * MIB / 8), "{}", machine.name());
    }
}

#[test]
fn without_kvm_auto_says_so_and_takes_threads() {
    let nowhere = c"/nonexistent/kvm";
    let mut heard = None;
    let machine = Machine::new(GuestArg::Auto, nowhere, |error| heard = Some(error.to_string())).unwrap();
    assert_eq!(machine.name(), "thread");
    let heard = heard.unwrap();
    assert!(heard.contains("/nonexistent/kvm") && heard.contains("No such file"), "{heard}");
    // /dev/null opens, but is no KVM.
    for path in [nowhere, c"/dev/null"] {
        let error = Machine::new(GuestArg::Kvm, path, |_| ()).unwrap_err();
        assert!(matches!(error, GuestError::NoKvm { .. }), "{error}");
    }
}

extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Signals end KVM_RUN with EINTR, between instructions and before a vCPU is entered.
#[test]
fn signals_do_not_end_a_guest() {
    let Ok(machine @ Machine::Kvm(_)) = Machine::new(GuestArg::Kvm, DEV_KVM, |_| ()) else {
        eprintln!("SKIPPED: no KVM");
        return;
    };
    let signal = SIGRTMIN();
    register_signal_handler(signal, nothing).unwrap();
    let thread = std::thread::spawn(move || {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), (8 * MIB) as usize)]).unwrap());
        let mut guest = start(&machine, &memory);
        for secret in 0..50 {
            guest.fill(secret, &|_| ()).unwrap();
            assert_eq!(guest.scan(&|_| ()).unwrap(), if secret == 0 { 0 } else { MIB });
        }
    });
    while !thread.is_finished() {
        thread.kill(signal).unwrap();
        std::thread::yield_now();
    }
    thread.join().unwrap();
}

#[test]
fn ram_out_of_the_guests_reach_is_an_error() {
    let Ok(machine @ Machine::Kvm(_)) = Machine::new(GuestArg::Kvm, DEV_KVM, |_| ()) else {
        eprintln!("SKIPPED: no KVM");
        return;
    };
    let memory = Memory::from_ranges(&[(GuestAddress(600 * GIB), 4096)]).unwrap();
    let error = Guest::start(&machine, &memory, |_| Ok::<_, NoError>(())).unwrap_err();
    assert!(matches!(error, GuestError::Ram(_)), "{error}");
}

/// RAM without a memory slot: the guest's first access goes nowhere.
#[test]
fn a_guest_that_stops_early_is_an_error() {
    let Ok(machine @ Machine::Kvm(_)) = Machine::new(GuestArg::Kvm, DEV_KVM, |_| ()) else {
        eprintln!("SKIPPED: no KVM");
        return;
    };
    let memory = Memory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
    let mut guest = Guest::start(&machine, &memory, |_| Ok::<_, NoError>(())).unwrap();
    let error = guest.scan(&|_| ()).unwrap_err();
    assert!(matches!(error, GuestError::Exit(_) | GuestError::Kvm { .. }), "{error}");
}

/// RAM behind the end of its file.
#[test]
fn memory_that_the_host_cannot_provide_is_an_error() {
    let Ok(machine @ Machine::Kvm(_)) = Machine::new(GuestArg::Kvm, DEV_KVM, |_| ()) else {
        eprintln!("SKIPPED: no KVM");
        return;
    };
    let file = TempFile::new().unwrap().into_file();
    let memory = Arc::new(mapped(&file, 0, MIB));
    let error = start(&machine, &memory).scan(&|_| ()).unwrap_err();
    assert!(matches!(error, GuestError::NotBacked), "{error}");
}

fn mapped(file: &File, offset: u64, len: u64) -> Memory {
    let place = FileOffset::new(file.try_clone().unwrap(), offset);
    Memory::from_ranges_with_files([(GuestAddress(0), len as usize, Some(place))]).unwrap()
}

fn touch(memory: &Memory, len: u64) {
    for at in (0..len).step_by(4096) {
        memory.write_obj(1_u8, GuestAddress(at)).unwrap();
    }
}

#[test]
fn two_mappings_of_the_same_bytes_are_the_same_pages() {
    let file = TempFile::new().unwrap().into_file();
    let other = TempFile::new().unwrap().into_file();
    for file in [&file, &other] {
        file.set_len(4 * MIB).unwrap();
    }
    let whole = mapped(&file, 0, 2 * MIB);
    // The same bytes as two regions, the second half first.
    let halves = [(GuestAddress(0), MIB), (GuestAddress(GIB), 0)]
        .map(|(at, offset)| (at, MIB as usize, Some(FileOffset::new(file.try_clone().unwrap(), offset))));
    let halves = Memory::from_ranges_with_files(halves).unwrap();
    let shifted = mapped(&file, MIB, 2 * MIB);
    let elsewhere = mapped(&other, 0, 2 * MIB);
    for memory in [&whole, &shifted, &elsewhere] {
        touch(memory, 2 * MIB);
    }
    touch(&halves, MIB);

    let identity = |memory: &Memory| Identity::of(memory).unwrap();
    assert!(identity(&whole).same_pages(&identity(&whole)));
    assert!(identity(&whole).same_pages(&identity(&halves)));
    assert!(!identity(&whole).same_pages(&identity(&shifted)));
    assert!(!identity(&whole).same_pages(&identity(&elsewhere)));
    assert!(!identity(&whole).same_pages(&identity(&mapped(&file, 0, MIB))));
}

#[test]
fn memory_without_a_file_is_never_the_same_by_its_file() {
    let anonymous = || {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap();
        touch(&memory, MIB);
        memory
    };
    let (a, b) = (anonymous(), anonymous());
    assert!(!Identity::of(&a).unwrap().same_pages(&Identity::of(&b).unwrap()));
}
