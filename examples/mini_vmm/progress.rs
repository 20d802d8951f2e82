//! The bar on the terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One bar for all VMs: bytes scanned, written and cleared, of all there are to do.
///
/// Hidden unless asked for; also hidden where standard error is no terminal.
#[derive(Debug, Clone)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar over `bytes` bytes of work.
    pub fn new(bytes: u64, visible: bool) -> Self {
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let template = "{wide_bar} {binary_bytes} of {binary_total_bytes}, {msg}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_style(style);
        Self { bar }
    }

    /// Says what goes on: `"cycle 2: VM A scans"`.
    pub fn phase(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }

    /// `bytes` more are done.
    pub fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Takes the bar off the terminal, before anything else is printed.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
