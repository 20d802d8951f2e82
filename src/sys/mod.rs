//! Floor 0: system calls, owned mappings, and the pointers that clearing writes through.
#![allow(unsafe_code)]

pub(crate) mod affinity;
mod chunk;

pub(crate) use chunk::Chunk;
