//! Floor 1: the instructions that clear memory, which CPU has them, and the choice between them (pure).
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
