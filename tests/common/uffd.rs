//! userfaultfd(2): pages whose bytes a handler decides, and poisoned pages.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::PAGE;

const UFFD_API: u64 = 0xaa;
const FEATURE_POISON: u64 = 1 << 14;
const MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;

/// The number of a request that reads and writes an argument of `size` bytes (`_IOWR` of asm-generic/ioctl.h).
const fn request(number: u64, size: usize) -> libc::c_ulong {
    3 << 30 | (size as libc::c_ulong) << 16 | UFFD_API << 8 | number
}

/// A userfaultfd over missing pages.
#[derive(Debug)]
pub struct Userfaultfd {
    file: File,
    /// Addresses of faults that were told of and not answered.
    waiting: Mutex<BTreeSet<u64>>,
}

impl Userfaultfd {
    /// Registers a range; says aloud why not.
    pub fn register(base: u64, len: u64) -> Option<Self> {
        // SAFETY: a flag in, a descriptor out.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            println!("skipped: no userfaultfd: {}", std::io::Error::last_os_error());
            return None;
        }
        // SAFETY: the kernel just gave us this descriptor.
        let own = Self { file: unsafe { File::from_raw_fd(fd as i32) }, waiting: Mutex::default() };
        let mut features = FEATURE_POISON;
        if own.ioctl(request(0x3f, 24), &mut [UFFD_API, features, 0]).is_err() {
            println!("this kernel has no UFFDIO_POISON");
            // The handshake can be had once per descriptor unless it failed.
            features = 0;
            own.ioctl(request(0x3f, 24), &mut [UFFD_API, features, 0]).ok()?;
        }
        match own.ioctl(request(0, 32), &mut [base, len, MODE_MISSING, 0]) {
            Ok(()) => Some(own),
            Err(error) => {
                println!("skipped: cannot register with userfaultfd: {error}");
                None
            }
        }
    }

    fn ioctl(&self, request: libc::c_ulong, words: &mut [u64]) -> std::io::Result<()> {
        // SAFETY: each request is given the words of its struct, which the call may change.
        let answer = unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, words.as_mut_ptr()) };
        if answer < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Poisons missing pages; `None` (said aloud) where the kernel cannot.
    pub fn poison(&self, base: u64, len: u64) -> Option<()> {
        match self.ioctl(request(8, 32), &mut [base, len, 0, 0]) {
            Ok(()) => Some(()),
            Err(error) => {
                println!("skipped: UFFDIO_POISON: {error}");
                None
            }
        }
    }

    /// Waits until somebody stands before a missing page. Nobody is let on.
    pub fn wait_for_a_fault(&self) {
        assert!(super::readable(&self.file, -1));
    }

    /// Waits until so many threads stand before missing pages, at different addresses. Nobody is let on.
    pub fn wait_for_faults(&self, count: usize) {
        let mut waiting = self.waiting.lock().unwrap();
        while waiting.len() < count {
            self.wait_for_a_fault();
            waiting.extend(self.next_fault());
        }
    }

    /// The address that a fault is told of, if one is.
    fn next_fault(&self) -> Option<u64> {
        // A struct uffd_msg: the event in its first byte, the address in its third word.
        let mut message = [0u8; 32];
        match (&self.file).read(&mut message) {
            Ok(32) if message[0] == EVENT_PAGEFAULT => {
                Some(u64::from_ne_bytes(message[16..24].try_into().unwrap()) & !(PAGE - 1))
            }
            _ => None,
        }
    }

    /// Brings one page (of any size). Somebody else may have done so before.
    pub fn answer(&self, address: u64, page: &[u8]) {
        let _ = self.ioctl(request(3, 40), &mut [address, page.as_ptr() as u64, page.len() as u64, 0, 0]);
    }

    /// Answers every fault with a page full of `byte`, until dropped.
    pub fn answer_with(self, byte: u8) -> Handler {
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let page = vec![byte; PAGE as usize];
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
            waiting.into_iter().for_each(|address| self.answer(address, &page));
            while !stop.load(Ordering::Relaxed) {
                let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd, alive during the call. Looks at `stop` every now and then.
                unsafe { libc::poll(&raw mut poll, 1, 50) };
                if let Some(address) = self.next_fault() {
                    self.answer(address, &page);
                }
            }
        });
        Handler { over, thread: Some(thread) }
    }
}

#[derive(Debug)]
pub struct Handler {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
