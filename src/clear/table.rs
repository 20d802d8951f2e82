//! A calibration as tables: a row for each length, a column for each method, the choice in brackets.

use std::fmt;

use super::calibration::{Calibration, Choice};
use super::method::Method;
use super::plan::{Concurrency, Reuse, Situation};

/// Space for "[1234.5]".
const LEAST_WIDTH: usize = 8;

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        writeln!(
            f,
            "{}, pages of {}, {:.0} of {:.0} ms; GB/s, the choice in brackets",
            self.cpu.model_name(),
            Size(self.page_bytes),
            milliseconds(self.spent),
            milliseconds(self.budget),
        )?;
        for situation in Situation::ALL {
            // All of one worker are one.
            if self.workers > 1 || situation.concurrency == Concurrency::One {
                self.table(f, situation)?;
            }
        }
        write!(f, "\nworkers a node: {}", self.workers_per_node)?;
        for (rank, scaling) in self.scaling.iter().enumerate() {
            let before = if rank == 0 { " (" } else { ", " };
            write!(f, "{before}{}: {:.1} GB/s", scaling.workers, scaling.gb_per_s)?;
        }
        if self.scaling.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

impl Calibration {
    fn table(&self, f: &mut fmt::Formatter<'_>, situation: Situation) -> fmt::Result {
        let was_measured =
            |method: &Method| self.choices_for(situation).any(|choice| rate(choice, *method).is_some());
        let columns: Vec<Method> = Method::ALL.into_iter().filter(was_measured).collect();
        let memory = match situation.reuse {
            Reuse::Cold => "cold memory",
            Reuse::Soon => "read soon",
        };
        let workers = match situation.concurrency {
            Concurrency::One => 1,
            Concurrency::All => self.workers,
        };
        let title = format!("{memory}, {workers} worker{}", if workers == 1 { "" } else { "s" });
        writeln!(f)?;
        match columns.is_empty() {
            true => write!(f, "{title}")?,
            false => write!(f, "{title:<22}")?,
        }
        for (column, method) in columns.iter().enumerate() {
            // Over the digits, which a bracket or a space follows.
            let behind_the_last = if column == 0 { "" } else { " " };
            write!(f, "{behind_the_last}{:>1$}", method.name(), width(*method) - 1)?;
        }
        writeln!(f)?;
        for choice in self.choices_for(situation) {
            write!(f, "  from {:>8}       ", Size(choice.from_bytes).to_string())?;
            for method in &columns {
                let rate = rate(choice, *method).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
                let cell = if *method == choice.method { format!("[{rate}]") } else { format!("{rate} ") };
                write!(f, "{cell:>0$}", width(*method))?;
            }
            writeln!(f, "  {}, {}", choice.method, choice.reason)?;
        }
        Ok(())
    }
}

fn width(method: Method) -> usize {
    LEAST_WIDTH.max(method.name().len() + 2)
}

/// What a method was seen to write in a choice's class.
fn rate(choice: &Choice, method: Method) -> Option<f64> {
    choice.measured.iter().find(|measured| measured.method == method).map(|measured| measured.gb_per_s)
}

/// Bytes in the largest binary unit that divides them.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        let fits = |(shift, _): &(u32, &str)| self.0 > 0 && self.0.trailing_zeros() >= *shift;
        match units.into_iter().find(fits) {
            Some((shift, unit)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}
