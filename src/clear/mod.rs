//! Floor 1: the instructions that clear memory, which CPU has them, and the choice between them (pure).
//!
//! [`Method`] names the ways, [`CpuDescription`] says which of them a CPU has and which one is best for a
//! length. A [`Clearer`] is the proof that what it will run exists on the CPU under us, so clearing a
//! [`Chunk`] (itself the proof that its bytes may be written) is safe.
#![allow(unsafe_code)]
/// Placeholder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {}
impl std::fmt::Display for Method {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {}
    }
}
/// Placeholder.
#[derive(Debug)]
pub struct CpuDescription;
