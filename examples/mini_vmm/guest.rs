//! The guest: a KVM vCPU, or a host thread where KVM cannot be had.

use std::error::Error;
use std::ffi::{CStr, CString};
use std::io;
use std::sync::Arc;

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion};

use crate::args::GuestArg;
use crate::boot::{BootError, RamRange};
use crate::kvm_guest::KvmGuest;
use crate::thread_guest::ThreadGuest;

/// A guest that cannot be started, or did not do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// KVM is missing, closed to this user, or of no use.
    #[error("{path:?} {what}: {source}; run as a user who may open it, or with --guest thread")]
    NoKvm {
        /// KVM's device.
        path: CString,
        /// What it did not do.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A KVM call failed.
    #[error("{what} failed: {source}")]
    Kvm {
        /// The ioctl.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel could not make a page of the guest's memory present.
    #[error(
        "the guest touched memory that the host cannot provide (KVM_RUN: EFAULT): \
         is a hugepage missing, or a file behind guest RAM too short?"
    )]
    NotBacked,
    /// The vCPU left the guest for a reason the programs give it none for.
    #[error("the guest stopped unexpectedly: {0}")]
    Exit(String),
    /// The guest said that it was done before it was.
    #[error("the guest ended {pieces} pieces of its RAM too early")]
    Unfinished {
        /// Pieces not done.
        pieces: usize,
    },
    /// Guest RAM that the guest cannot work on.
    #[error(transparent)]
    Ram(#[from] BootError),
    /// Guest RAM could not be registered with the VM.
    #[error("guest RAM cannot be registered with KVM: {0}")]
    Slots(#[source] Box<dyn Error + Send + Sync>),
    /// No memory for the boot slot.
    #[error("cannot map the guest's boot slot: {0}")]
    BootSlot(#[source] vm_memory::mmap::MmapRegionError),
    /// Guest memory that the host cannot reach.
    #[error("guest memory cannot be accessed: {0}")]
    Memory(#[source] GuestMemoryError),
}

/// Where the kernel offers KVM.
pub const DEV_KVM: &CStr = c"/dev/kvm";

/// What guests run on.
#[derive(Debug)]
pub enum Machine {
    /// KVM vCPUs.
    Kvm(Kvm),
    /// Host threads.
    Threads,
}

impl Machine {
    /// What `--guest` asks for, on the KVM at `path`. `notice` hears why `auto` did without KVM.
    pub fn new(asked: GuestArg, path: &CStr, notice: impl FnOnce(GuestError)) -> Result<Self, GuestError> {
        match asked {
            GuestArg::Thread => Ok(Self::Threads),
            GuestArg::Kvm => open_kvm(path).map(Self::Kvm),
            GuestArg::Auto => Ok(open_kvm(path).map(Self::Kvm).unwrap_or_else(|error| {
                notice(error);
                Self::Threads
            })),
        }
    }

    /// How guests scan, for the table.
    pub fn scans_by(&self) -> &'static str {
        match self {
            Self::Kvm(_) => "guest's repe scasq",
            Self::Threads => "thread's reads",
        }
    }

    /// How guests fill, for the table.
    pub fn fills_by(&self) -> &'static str {
        match self {
            Self::Kvm(_) => "guest's rep stosq",
            Self::Threads => "thread's writes",
        }
    }

    /// The name in the JSON object.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kvm(_) => "kvm",
            Self::Threads => "thread",
        }
    }
}

fn open_kvm(path: &CStr) -> Result<Kvm, GuestError> {
    let failed = |what| {
        move |error: kvm_ioctls::Error| GuestError::NoKvm { path: path.into(), what, source: error.into() }
    };
    let kvm = Kvm::new_with_path(path).map_err(failed("cannot be opened"))?;
    kvm.create_vm().map_err(failed("makes no VM"))?;
    Ok(kvm)
}

/// One guest on `memory`.
#[derive(Debug)]
pub enum Guest<'a, M, S> {
    /// On a vCPU.
    Kvm(Box<KvmGuest<S>>),
    /// On the calling thread.
    Thread(ThreadGuest<'a, M>),
}

impl<'a, M: GuestMemoryBackend, S> Guest<'a, M, S> {
    /// Starts a guest whose RAM is all of `memory`; `register` makes the KVM slots of it that the
    /// guest then holds.
    pub fn start<E: Into<Box<dyn Error + Send + Sync>>>(
        machine: &Machine,
        memory: &'a M,
        register: impl FnOnce(&Arc<VmFd>) -> Result<S, E>,
    ) -> Result<Self, GuestError> {
        let Machine::Kvm(kvm) = machine else {
            return Ok(Self::Thread(ThreadGuest::new(memory)));
        };
        let vm = kvm.create_vm().map_err(|e| GuestError::Kvm { what: "KVM_CREATE_VM", source: e.into() })?;
        let vm = Arc::new(vm);
        let slots = register(&vm).map_err(|error| GuestError::Slots(error.into()))?;
        let ram: Vec<RamRange> =
            memory.iter().map(|r| RamRange { base: r.start_addr().raw_value(), len: r.len() }).collect();
        Ok(Self::Kvm(Box::new(KvmGuest::new(kvm, vm, slots, &ram)?)))
    }

    /// Counts the 8-byte words of RAM that are not zero. `progress` hears of the bytes done.
    pub fn scan(&mut self, progress: &dyn Fn(u64)) -> Result<u64, GuestError> {
        match self {
            Self::Kvm(guest) => guest.scan(progress),
            Self::Thread(guest) => guest.scan(progress),
        }
    }

    /// Writes `secret` into every 8-byte word of RAM. `progress` hears of the bytes done.
    pub fn fill(&mut self, secret: u64, progress: &dyn Fn(u64)) -> Result<(), GuestError> {
        match self {
            Self::Kvm(guest) => guest.fill(secret, progress),
            Self::Thread(guest) => guest.fill(secret, progress),
        }
    }
}
