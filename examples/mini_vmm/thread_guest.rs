//! A guest played by a host thread, for machines without KVM: the same programs on the same memory.

use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::guest::GuestError;

/// Bytes copied in or out at a time. No reference to guest memory is ever made: another process may
/// write it at any time.
const BUFFER: usize = 64 << 10;

/// The calling thread, working on `memory` as a guest would on its RAM.
#[derive(Debug)]
pub struct ThreadGuest<'a, M> {
    memory: &'a M,
}

impl<'a, M: GuestMemoryBackend> ThreadGuest<'a, M> {
    /// A guest with this RAM.
    pub fn new(memory: &'a M) -> Self {
        Self { memory }
    }

    /// Counts the 8-byte words of RAM that are not zero.
    pub fn scan(&self, progress: &dyn Fn(u64)) -> Result<u64, GuestError> {
        let mut found = 0;
        let mut buffer = vec![0; BUFFER];
        self.for_each_run(progress, |region, at, len| {
            let run = &mut buffer[..len];
            region.read_slice(run, at).map_err(GuestError::Memory)?;
            let (words, _) = run.as_chunks::<8>();
            found += words.iter().filter(|word| **word != [0; 8]).count() as u64;
            Ok(())
        })?;
        Ok(found)
    }

    /// Writes `secret` into every 8-byte word of RAM.
    pub fn fill(&self, secret: u64, progress: &dyn Fn(u64)) -> Result<(), GuestError> {
        let buffer = secret.to_le_bytes().repeat(BUFFER / 8);
        self.for_each_run(progress, |region, at, len| {
            region.write_slice(&buffer[..len], at).map_err(GuestError::Memory)
        })
    }

    /// Calls `work` for runs of at most [`BUFFER`] bytes that make up all RAM, in ascending order.
    fn for_each_run(
        &self,
        progress: &dyn Fn(u64),
        mut work: impl FnMut(&M::R, MemoryRegionAddress, usize) -> Result<(), GuestError>,
    ) -> Result<(), GuestError> {
        for region in self.memory.iter() {
            let mut at = 0;
            while at < region.len() {
                let len = (region.len() - at).min(BUFFER as u64);
                work(region, MemoryRegionAddress(at), len as usize)?;
                progress(len);
                at += len;
            }
        }
        Ok(())
    }
}
