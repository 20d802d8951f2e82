//! A guest on a KVM vCPU.
//!
//! The vCPU starts in 64-bit mode at CPL 3: where KVM has no hardware to rely on, ring 0 is emulated
//! (25 MiB/s) and CPL 3 runs natively. IOPL 3 lets it report by OUT all the same.
#![allow(unsafe_code)]

use std::sync::Arc;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use crate::boot::{BootImage, RamRange, TSS_LIMIT};
use crate::guest::GuestError;
use crate::payload;

/// Where KVM on Intel keeps three pages of its own: just below 4 GiB, where no RAM lies.
const KVM_OWN_PAGES: usize = 0xfffb_d000;

const CR0: u64 = 0x8005_0033; // PG AM WP NE ET MP PE
const CR4: u64 = 1 << 5 | 1 << 9 | 1 << 10; // PAE OSFXSR OSXMMEXCPT
const EFER: u64 = 1 << 8 | 1 << 10; // LME LMA
const RFLAGS: u64 = 0x3002; // IOPL 3; bit 1 is always set; ascending string operations

/// A VM whose one vCPU runs the two programs on the VM's RAM.
///
/// Fields drop in order: the vCPU, the RAM slots (`S`), the VM, the boot slot's memory.
#[derive(Debug)]
pub struct KvmGuest<S> {
    vcpu: VcpuFd,
    slots: S,
    shell: Shell,
    image: BootImage,
}

/// What is left of a VM without its vCPU; to be dropped after its RAM slots.
#[derive(Debug)]
pub struct Shell {
    _vm: Arc<VmFd>,
    _boot: MmapRegion,
}

fn failed(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> GuestError {
    move |error| GuestError::Kvm { what, source: error.into() }
}

impl<S> KvmGuest<S> {
    /// A guest in `vm`, whose RAM the caller has registered as `slots`.
    /// The boot slot takes the last slot number there is, and memory above `ram`.
    pub fn new(kvm: &Kvm, vm: Arc<VmFd>, slots: S, ram: &[RamRange]) -> Result<Self, GuestError> {
        let image = BootImage::new(ram)?;
        // KVM asks for this on Intel before the first vCPU exists.
        vm.set_tss_address(KVM_OWN_PAGES).map_err(failed("KVM_SET_TSS_ADDR"))?;
        let boot = MmapRegion::new(image.bytes.len()).map_err(GuestError::BootSlot)?;
        boot.as_volatile_slice().write_slice(&image.bytes, 0).map_err(|e| GuestError::Memory(e.into()))?;
        let slot = kvm_userspace_memory_region {
            slot: u32::try_from(kvm.get_nr_memslots().saturating_sub(1)).unwrap_or(u32::MAX),
            flags: 0,
            guest_phys_addr: image.base,
            memory_size: image.bytes.len() as u64,
            userspace_addr: boot.as_ptr() as u64,
        };
        // SAFETY: `boot` maps `memory_size` bytes at `userspace_addr`, nobody holds a reference to
        // them, and `Shell` unmaps them only after it has closed the VM.
        unsafe { vm.set_user_memory_region(slot) }.map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;

        let vcpu = vm.create_vcpu(0).map_err(failed("KVM_CREATE_VCPU"))?;
        let cpuid =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed("KVM_GET_SUPPORTED_CPUID"))?;
        vcpu.set_cpuid2(&cpuid).map_err(failed("KVM_SET_CPUID2"))?;
        let mut sregs = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
        user_mode(&mut sregs, &image);
        vcpu.set_sregs(&sregs).map_err(failed("KVM_SET_SREGS"))?;
        Ok(Self { vcpu, slots, shell: Shell { _vm: vm, _boot: boot }, image })
    }

    /// Counts the 8-byte words of RAM that are not zero.
    pub fn scan(&mut self, progress: &dyn Fn(u64)) -> Result<u64, GuestError> {
        self.run(self.image.scan, 0, progress)
    }

    /// Writes `secret` into every 8-byte word of RAM.
    pub fn fill(&mut self, secret: u64, progress: &dyn Fn(u64)) -> Result<(), GuestError> {
        self.run(self.image.fill, secret, progress).map(drop)
    }

    /// Ends the vCPU's life: nothing runs it any more, since running it takes `&mut self`.
    pub fn stop(self) -> (VcpuFd, S, Shell) {
        (self.vcpu, self.slots, self.shell)
    }

    /// Runs the program at `entry` to its end and returns the number it reported.
    fn run(&mut self, entry: u64, rax: u64, progress: &dyn Fn(u64)) -> Result<u64, GuestError> {
        let regs = kvm_regs { rip: entry, rax, rsi: self.image.list, rflags: RFLAGS, ..kvm_regs::default() };
        self.vcpu.set_regs(&regs).map_err(failed("KVM_SET_REGS"))?;
        let mut pieces = self.image.pieces.iter();
        let mut low = 0;
        loop {
            let (port, value) = match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, &[a, b, c, d])) => (port, u32::from_le_bytes([a, b, c, d])),
                Ok(exit) => return Err(GuestError::Exit(format!("{exit:x?}"))),
                // A signal for the VMM's thread.
                Err(error) if error.errno() == libc::EINTR => continue,
                Err(error) if error.errno() == libc::EFAULT => return Err(GuestError::NotBacked),
                Err(error) => return Err(failed("KVM_RUN")(error)),
            };
            match port {
                payload::PORT_PIECE => progress(pieces.next().copied().unwrap_or(0)),
                payload::PORT_COUNT_LOW => low = value,
                payload::PORT_END if pieces.len() == 0 => {
                    self.finish_out()?;
                    return Ok(u64::from(value) << 32 | u64::from(low));
                }
                payload::PORT_END => return Err(GuestError::Unfinished { pieces: pieces.len() }),
                _ => return Err(GuestError::Exit(format!("OUT of {value:#x} to port {port:#x}"))),
            }
        }
    }

    /// An OUT is complete, and the registers are consistent, only when the vCPU is entered next
    /// (KVM API, KVM_EXIT_IO): enters the kernel without entering the guest, before the registers are
    /// set for another program.
    fn finish_out(&mut self) -> Result<(), GuestError> {
        self.vcpu.set_kvm_immediate_exit(1);
        let ended = match self.vcpu.run() {
            Err(error) if error.errno() == libc::EINTR => Ok(()),
            Err(error) => Err(failed("KVM_RUN")(error)),
            Ok(exit) => Err(GuestError::Exit(format!("{exit:x?}"))),
        };
        self.vcpu.set_kvm_immediate_exit(0);
        ended
    }
}

/// 64-bit mode at CPL 3. No IDT: an exception ends the VM.
fn user_mode(sregs: &mut kvm_sregs, image: &BootImage) {
    let data = kvm_segment {
        selector: 0x2b,
        limit: u32::MAX,
        type_: 3, // data, writable, accessed
        present: 1,
        dpl: 3,
        s: 1,
        db: 1,
        g: 1,
        ..kvm_segment::default()
    };
    let code = kvm_segment { selector: 0x33, type_: 11, db: 0, l: 1, ..data };
    sregs.cs = code;
    for segment in [&mut sregs.ss, &mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs] {
        *segment = data;
    }
    // As at reset: present, a busy TSS. Only where it lies is ours.
    sregs.tr.base = image.tss;
    sregs.tr.limit = TSS_LIMIT;
    sregs.cr0 = CR0;
    sregs.cr3 = image.tables;
    sregs.cr4 = CR4;
    sregs.efer = EFER;
}
