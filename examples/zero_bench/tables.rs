//! Tables for people.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use vm_zeroing::Calibration;

use crate::calibrate::situation;
use crate::contend::Contend;
use crate::contestant::Kind;
use crate::memset::Memset;
use crate::mmap::Mmap;
use crate::sizes::show;

/// A table whose columns after the first are aligned to the right.
fn table<T: ToString>(header: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    let header: Vec<String> = header.into_iter().map(|cell| cell.to_string()).collect();
    table.load_preset(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(&header);
    for column in 1..header.len() {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// How wide tables may be: the terminal, or what a reader of a file has.
pub fn width() -> u16 {
    Table::new().width().unwrap_or(100)
}

/// Contestants down, sizes across; as many tables, one below the other, as the width asks for.
pub fn rates(data: &Memset, width: u16) -> String {
    const NAME: usize = 26;
    const CELL: usize = 21;
    let across = (usize::from(width).saturating_sub(NAME) / CELL).max(1);
    let blocks = data.sizes.chunks(across).map(|sizes| {
        let mut header = vec![String::new()];
        header.extend(sizes.iter().map(|size| show(size.size_bytes)));
        let mut table = table(header);
        let names = sizes.first().map(|size| size.lines.as_slice()).unwrap_or_default();
        for (row, line) in names.iter().enumerate() {
            let mut cells = vec![line.name.clone()];
            cells.extend(sizes.iter().map(|size| {
                let line = size.lines.get(row);
                line.map_or(String::new(), |line| {
                    format!("{}  {:>4.2}x", line.gb_per_s.show(1), line.relative)
                })
            }));
            table.add_row(cells);
        }
        table.to_string()
    });
    blocks.collect::<Vec<_>>().join("\n")
}

/// Sizes down: the best single method, what Auto picked and how much of the best it reached.
pub fn choices(data: &Memset) -> String {
    let mut kinds = vec![
        (Kind::Auto, "Auto"),
        (Kind::Calibrated, "calibrated"),
        (Kind::AutoWrongHint, "Auto,\nwrong hint"),
        (Kind::CalibratedWrongHint, "calibrated,\nwrong hint"),
    ];
    // Those that took part.
    kinds.retain(|(kind, _)| data.sizes.iter().any(|size| size.line(*kind).is_some()));
    let mut header = vec!["size", "best"];
    header.extend(kinds.iter().map(|(_, name)| name));
    let mut table = table(header);
    for size in &data.sizes {
        let best = size.lines.iter().find(|line| line.kind == Kind::Method && line.name == size.best);
        let mut cells = vec![
            show(size.size_bytes),
            best.map_or(String::new(), |best| format!("{} {:.1}", best.name, best.gb_per_s.median)),
        ];
        cells.extend(kinds.iter().map(|(kind, _)| {
            size.line(*kind).map_or("-".to_owned(), |line| {
                format!("{} {:.2}", line.method.as_deref().unwrap_or("?"), line.of_best)
            })
        }));
        table.add_row(cells);
    }
    table.to_string()
}

/// Kinds of pages down: the kernel's ways, then the service.
pub fn mmap(data: &Mmap) -> String {
    let mut table = table(["pages", "who clears", "threads", "GB/s", "median", "ratio"]);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    for pages in &data.pages {
        for (row, line) in pages.lines.iter().enumerate() {
            table.add_row([
                if row == 0 { pages.page_size.clone() } else { String::new() },
                line.name.clone(),
                line.threads.to_string(),
                line.gb_per_s.show(1),
                format!("{:.1}", line.gb_per_s.median),
                format!("{:.2}x", line.relative),
            ]);
        }
    }
    table.to_string()
}

/// Methods down, numbers of threads across.
pub fn at_once(data: &Contend, width: u16) -> String {
    const NAME: usize = 17;
    const CELL: usize = 25;
    let across = (usize::from(width).saturating_sub(NAME) / CELL).max(1);
    let blocks = data.at_once.chunks(across).map(|counts| {
        let mut header = vec!["threads".to_owned()];
        header.extend(counts.iter().map(|count| count.threads.to_string()));
        let mut table = table(header);
        let names = counts.first().map(|count| count.lines.as_slice()).unwrap_or_default();
        for (row, line) in names.iter().enumerate() {
            let mut cells = vec![line.method.clone()];
            cells.extend(counts.iter().map(|count| {
                let line = count.lines.get(row);
                line.map_or(String::new(), |line| {
                    format!("{}  {:>5.1} each", line.gb_per_s.show(1), line.per_thread)
                })
            }));
            table.add_row(cells);
        }
        table.to_string()
    });
    blocks.collect::<Vec<_>>().join("\n")
}

/// Methods down, what the reader works on across, and what those reach who clear beside each.
pub fn readers(data: &Contend, width: u16) -> String {
    const NAMES: usize = 28;
    const CELL: usize = 35;
    let across = (usize::from(width).saturating_sub(NAMES) / CELL).max(1);
    let blocks = data.readers.chunks(across).map(|readers| {
        let mut header = vec!["beside it".to_owned(), "stores".to_owned()];
        let mut alone = vec!["nobody".to_owned(), "-".to_owned()];
        for reader in readers {
            header.extend([format!("reads {}: ns", show(reader.buffer_bytes)), "clears".to_owned()]);
            alone.extend([format!("{}  1.00x", reader.alone_ns.show(2)), "-".to_owned()]);
        }
        let mut table = table(header);
        table.add_row(alone);
        let names = readers.first().map(|reader| reader.beside.as_slice()).unwrap_or_default();
        for (row, beside) in names.iter().enumerate() {
            let stores = if beside.non_temporal { "non-temporal" } else { "cached" };
            let mut cells = vec![beside.method.clone(), stores.to_owned()];
            for beside in readers.iter().filter_map(|reader| reader.beside.get(row)) {
                cells.push(format!("{}  {:.2}x", beside.ns_per_load.show(2), beside.slowdown));
                cells.push(format!("{:.1}", beside.gb_per_s.median));
            }
            table.add_row(cells);
        }
        table.to_string()
    });
    blocks.collect::<Vec<_>>().join("\n")
}

/// Choices down: for whom, from which length, which method, how fast, and why, with the three fastest.
pub fn choices_of(calibration: &Calibration, width: u16) -> String {
    let mut table = table(["for", "from", "method", "GB/s", "why (GB/s of the fastest)"]);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    for column in [2, 4] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
    let mut before = String::new();
    for choice in calibration.choices() {
        let situation = situation(choice.reuse, choice.concurrency, calibration.workers());
        let fastest = choice.measured.iter().take(3);
        let fastest: Vec<String> = fastest.map(|of| format!("{} {:.1}", of.method, of.gb_per_s)).collect();
        let reason = match fastest.as_slice() {
            [] => choice.reason.to_string(),
            fastest => format!("{} ({})", choice.reason, fastest.join(", ")),
        };
        table.add_row([
            if situation == before { String::new() } else { situation.clone() },
            show(choice.from_bytes),
            choice.method.to_string(),
            choice.gb_per_s.map_or("-".to_owned(), |rate| format!("{rate:.1}")),
            reason,
        ]);
        before = situation;
    }
    table.to_string()
}
