//! What came out, as a table for people or one JSON object for programs.

use std::fmt;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

/// The JSON object.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// `kvm` or `thread`.
    pub guest: String,
    /// RAM of each VM.
    pub memory_bytes: u64,
    /// Bytes of a page that backs it.
    pub page_size: u64,
    /// What backs it, for example `hugetlb memfd`.
    pub backing: String,
    /// The method that cleared it.
    pub method: String,
    /// One entry for each cycle of each VM.
    pub cycles: Vec<Cycle>,
    /// Words that any guest saw and that were not zero.
    pub leaked_words: u64,
}

/// VM A's memory went to VM B once.
#[derive(Debug, Clone, Serialize)]
pub struct Cycle {
    /// Which of the VMs at once, from 0.
    pub vm: u32,
    /// What VM A found in the memory it was given.
    pub first_scan_nonzero_words: u64,
    /// What VM B found in it after VM A.
    pub reuse_scan_nonzero_words: u64,
    /// What the teardown cleared.
    pub zero_bytes: u64,
    /// How long that took.
    pub zero_seconds: f64,
    /// 10^9 bytes a second; 0 if nothing was cleared.
    pub zero_gb_per_s: f64,
    /// The part cleared by a worker on the memory's own node, 0 to 1; `null` if unknown.
    pub node_local_share: Option<f64>,
    /// Whether VM B's pages are proved to be VM A's.
    pub same_pages: bool,
}

impl Cycle {
    /// Words that either guest saw and that were not zero.
    pub fn leaked_words(&self) -> u64 {
        self.first_scan_nonzero_words + self.reuse_scan_nonzero_words
    }
}

/// What a VM, or the library for it, did to its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// VM A looks at what it was given.
    FirstScan,
    /// VM A writes its secret.
    Fill,
    /// The library clears.
    Zero,
    /// VM B looks at what it was given.
    ReuseScan,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FirstScan => "VM A scans",
            Self::Fill => "VM A writes its secret",
            Self::Zero => "teardown zeroes",
            Self::ReuseScan => "VM B scans",
        })
    }
}

/// One phase of one cycle, or the sum of several.
#[derive(Debug, Clone)]
pub struct Sample {
    /// What was done.
    pub phase: Phase,
    /// To how many bytes.
    pub bytes: u64,
    /// In which time.
    pub seconds: f64,
    /// By which means.
    pub method: String,
    /// Bytes whose node is known to have been the worker's own; `None` where nobody looked.
    pub node_local_share: Option<f64>,
}

/// 10^9 bytes a second; 0 for no time.
pub fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// The phases of all cycles and VMs as one table: a row for each phase, sums of bytes and seconds.
/// VMs at once overlap in time, so GB/s is what one VM saw.
pub fn table(samples: &[Sample]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["phase", "times", "bytes", "seconds", "GB/s", "method", "node-local"]);
    for column in [1, 2, 3, 4, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for phase in [Phase::FirstScan, Phase::Fill, Phase::Zero, Phase::ReuseScan] {
        let of_phase: Vec<&Sample> = samples.iter().filter(|sample| sample.phase == phase).collect();
        let Some(first) = of_phase.first() else { continue };
        let bytes = of_phase.iter().map(|sample| sample.bytes).sum();
        let seconds = of_phase.iter().map(|sample| sample.seconds).sum();
        table.add_row([
            phase.to_string(),
            of_phase.len().to_string(),
            u64::to_string(&bytes),
            format!("{seconds:.3}"),
            format!("{:.1}", gb_per_s(bytes, seconds)),
            first.method.clone(),
            local_share(&of_phase).map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
        ]);
    }
    table
}

/// The share of all bytes, if it is known of each sample.
fn local_share(samples: &[&Sample]) -> Option<f64> {
    let mut local = 0.0;
    let mut bytes = 0.0;
    for sample in samples {
        local += sample.node_local_share? * sample.bytes as f64;
        bytes += sample.bytes as f64;
    }
    (bytes > 0.0).then(|| local / bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_has_the_promised_keys() {
        let cycle = Cycle {
            vm: 0,
            first_scan_nonzero_words: 1,
            reuse_scan_nonzero_words: 2,
            zero_bytes: 4096,
            zero_seconds: 0.5,
            zero_gb_per_s: gb_per_s(4096, 0.5),
            node_local_share: None,
            same_pages: true,
        };
        let summary = Summary {
            guest: "kvm".to_owned(),
            memory_bytes: 4096,
            page_size: 4096,
            backing: "memfd".to_owned(),
            method: "avx2".to_owned(),
            leaked_words: cycle.leaked_words(),
            cycles: vec![cycle],
        };
        let expected = serde_json::json!({
            "guest": "kvm", "memory_bytes": 4096, "page_size": 4096, "backing": "memfd", "method": "avx2",
            "cycles": [{
                "vm": 0, "first_scan_nonzero_words": 1, "reuse_scan_nonzero_words": 2, "zero_bytes": 4096,
                "zero_seconds": 0.5, "zero_gb_per_s": 8.192e-6, "node_local_share": null, "same_pages": true,
            }],
            "leaked_words": 3,
        });
        assert_eq!(serde_json::to_value(summary).unwrap(), expected);
    }

    #[test]
    fn rows_are_sums_and_shares_are_weighted() {
        let sample = |phase, bytes, seconds, node_local_share| Sample {
            phase,
            bytes,
            seconds,
            method: "avx2".to_owned(),
            node_local_share,
        };
        let text = table(&[
            sample(Phase::Zero, 3_000_000_000, 0.25, Some(1.0)),
            sample(Phase::Fill, 4096, 0.0, None),
            sample(Phase::Zero, 1_000_000_000, 0.25, Some(0.0)),
        ])
        .to_string();
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("avx2")).collect();
        let cells = |row: &str| row.split(['│', '┆']).map(|c| c.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(
            cells(rows[0])[1..8],
            ["VM A writes its secret", "1", "4096", "0.000", "0.0", "avx2", "-"].map(str::to_owned)
        );
        assert_eq!(
            cells(rows[1])[1..8],
            ["teardown zeroes", "2", "4000000000", "0.500", "8.0", "avx2", "75 %"].map(str::to_owned)
        );
    }
}
