//! The bar on the terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One bar over the readings of a command. Drawn on standard error, and only if that is a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub fn new(readings: usize) -> Self {
        // Hides itself where standard error is no terminal.
        let target = ProgressDrawTarget::stderr();
        let template = "{wide_bar} {pos} of {len} readings, {eta} left, {msg:24}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Self { bar: ProgressBar::with_draw_target(Some(readings as u64), target).with_style(style) }
    }

    /// Says what goes on now.
    pub fn say(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }

    /// One more reading is done.
    pub fn advance(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    /// Off the terminal, before anything else is printed.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
