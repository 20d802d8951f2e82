//! The description of the CPU under us, and what a description offers, as errors that say so.

use std::sync::OnceLock;

use super::cpu::CpuDescription;
use super::method::{Method, offered_by, refuse_if};
use crate::error::MethodError;

impl CpuDescription {
    /// The CPU this runs on. Reads CPUID once per process: it does not change, and each of some fifteen
    /// reads costs microseconds in a virtual machine.
    pub fn detect() -> Self {
        static HERE: OnceLock<CpuDescription> = OnceLock::new();
        #[cfg(target_arch = "x86_64")]
        let read = super::x86_64::detect;
        #[cfg(not(target_arch = "x86_64"))]
        let read = Self::bare;
        HERE.get_or_init(read).clone()
    }

    /// Whether a CPU so described can run the method.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`] says what is missing and which methods there are.
    pub fn supports(&self, method: Method) -> Result<(), MethodError> {
        refuse_if(method, |method| self.lacks(method))
    }

    /// The methods that a CPU so described can run, never empty.
    pub fn methods(&self) -> Vec<Method> {
        offered_by(|method| self.lacks(method))
    }

    /// The model in words.
    pub(crate) fn model_name(&self) -> String {
        format!("{:?} family {} model {}", self.vendor, self.family, self.model)
    }
}
