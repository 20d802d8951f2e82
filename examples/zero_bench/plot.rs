//! GB/s over the length of a call, as SVG.

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Failure;
use crate::contestant::Kind;
use crate::machine::Machine;
use crate::memset::{Line, Memset};
use crate::sizes::show;

/// In pixels: the whole, and what of it belongs to the legend.
const SIZE: (u32, u32) = (1280, 760);
const LEGEND: u32 = 210;
const TITLE: u32 = 64;

/// How far neighbours of the same size stand apart: so many doublings.
const ASIDE: f64 = 0.04;

const FONT: &str = "sans-serif";

/// Told apart by people with any colour vision as far as so many can be (after Okabe and Ito, and Tol).
const COLOURS: [RGBColor; 12] = [
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(86, 180, 233),
    RGBColor(0, 114, 178),
    RGBColor(204, 121, 167),
    RGBColor(136, 34, 85),
    RGBColor(51, 34, 136),
    RGBColor(153, 153, 51),
    RGBColor(120, 120, 120),
    RGBColor(17, 119, 51),
    RGBColor(170, 68, 153),
];

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stroke {
    /// Non-temporal stores.
    Solid,
    /// Stores through the caches.
    Dashed,
    /// Not ours.
    Dotted,
    /// Auto: wide, below the others, so that they show on it.
    Wide,
}

/// One contestant over all sizes.
struct Series<'a> {
    name: &'a str,
    colour: RGBAColor,
    stroke: Stroke,
    /// Where it is drawn and what.
    points: Vec<(f64, &'a Line)>,
}

/// A vertical line.
struct Mark {
    at: u64,
    label: String,
    colour: RGBColor,
}

fn series(data: &Memset) -> Vec<Series<'_>> {
    let first = data.sizes.first().map(|size| size.lines.as_slice()).unwrap_or_default();
    let mut colours = COLOURS.iter().cycle();
    let mut all = Vec::new();
    for (index, line) in first.iter().enumerate() {
        let (colour, stroke) = match (line.kind, line.non_temporal) {
            (Kind::Auto, _) => (BLACK.mix(0.25), Stroke::Wide),
            (Kind::Calibrated, _) => (RGBColor(255, 200, 0).mix(0.5), Stroke::Wide),
            (Kind::AutoWrongHint | Kind::CalibratedWrongHint, _) => continue,
            (Kind::Foreign, _) => (colours.next().unwrap_or(&BLACK).to_rgba(), Stroke::Dotted),
            (Kind::Method, Some(true)) => (colours.next().unwrap_or(&BLACK).to_rgba(), Stroke::Solid),
            (Kind::Method, _) => (colours.next().unwrap_or(&BLACK).to_rgba(), Stroke::Dashed),
        };
        let points = data
            .sizes
            .iter()
            .filter_map(|size| Some((size.size_bytes as f64, size.lines.get(index)?)))
            .collect();
        all.push(Series { name: &line.name, colour, stroke, points });
    }
    // Wide ones first: the others are drawn on them.
    all.sort_by_key(|series| series.stroke != Stroke::Wide);
    // A little aside, so that bars of the same size stand beside each other.
    let middle = all.len() as f64 / 2.0;
    for (index, series) in all.iter_mut().enumerate().filter(|(_, series)| series.stroke != Stroke::Wide) {
        series.points.iter_mut().for_each(|(at, _)| *at *= ((index as f64 - middle) * ASIDE).exp2());
    }
    all
}

/// The methods that stored, in the order of lengths.
fn picks(series: &Series<'_>) -> String {
    let mut methods: Vec<&str> =
        series.points.iter().filter_map(|(_, line)| line.method.as_deref()).collect();
    methods.dedup();
    match methods.as_slice() {
        [first, second, third, .., last] if methods.len() > 3 => {
            format!("{first}, {second}, {third} .. {last}")
        }
        few => few.join(", "),
    }
}

fn marks(data: &Memset, machine: &Machine) -> Vec<Mark> {
    let mut marks: Vec<Mark> = machine
        .llc_bytes
        .map(|at| Mark { at, label: format!("last cache {}", show(at)), colour: RGBColor(90, 90, 90) })
        .into_iter()
        .collect();
    marks.extend(data.crossovers.iter().map(|crossover| Mark {
        at: crossover.from_bytes,
        label: format!("{}: {} from {}", crossover.chooser, crossover.after, show(crossover.from_bytes)),
        colour: if crossover.chooser == "Auto" { BLACK } else { RGBColor(160, 105, 0) },
    }));
    marks.sort_by_key(|mark| mark.at);
    marks
}

/// The plot as the text of an SVG file.
pub fn draw(data: &Memset, machine: &Machine) -> Result<String, Failure> {
    let mut text = String::new();
    // The error type of a drawing is not `Sync` for every backend, so only its words go on.
    draw_to(&mut text, data, machine).map_err(|error| Failure::run(format!("cannot draw: {error}")))?;
    Ok(text)
}

fn draw_to(text: &mut String, data: &Memset, machine: &Machine) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (title, below) = root.split_vertically(TITLE);
    let (left, legend) = below.split_horizontally(SIZE.0 - LEGEND);
    title.draw(&Text::new(
        format!("Clearing {} memory on {}, threads: {}", data.state, data.page_size, data.threads),
        (20, 12),
        (FONT, 22).into_font(),
    ))?;
    title.draw(&Text::new(
        format!(
            "{} family {} model {}, Linux {}, {}; mean of {} runs, bars: standard deviation",
            machine.cpu, machine.family, machine.model, machine.kernel, machine.libc, data.runs
        ),
        (20, 40),
        (FONT, 14).into_font().color(&BLACK.mix(0.7)),
    ))?;

    let (series, marks) = (series(data), marks(data, machine));
    let ends = data.sizes.first().zip(data.sizes.last());
    let (from, to) = ends.map_or((1.0, 2.0), |(a, b)| (a.size_bytes as f64 / 1.6, b.size_bytes as f64 * 1.6));
    let marks: Vec<Mark> = marks.into_iter().filter(|mark| (from..to).contains(&(mark.at as f64))).collect();
    let highest = |line: &Line| line.gb_per_s.mean + line.gb_per_s.stdev.unwrap_or(0.0);
    let lines = series.iter().flat_map(|series| series.points.iter().map(|(_, line)| highest(line)));
    let top = lines.fold(1.0, f64::max);
    // Room above the lines for the labels of the marks, one below the other.
    let row = 0.045 * top;
    let ceiling = top * 1.05 + row * marks.len() as f64;

    let mut chart = ChartBuilder::on(&left)
        .margin_left(12)
        .margin_right(16)
        .margin_bottom(8)
        .x_label_area_size(52)
        .y_label_area_size(60)
        .build_cartesian_2d((from..to).log_scale().base(2.0), 0.0..ceiling)?;
    chart
        .configure_mesh()
        .x_labels(24)
        .x_label_formatter(&|bytes| show(bytes.round() as u64))
        .x_desc("bytes cleared in a call")
        .y_label_formatter(&|rate| if top > 10.0 { format!("{rate:.0}") } else { format!("{rate:.1}") })
        .y_desc("GB/s (10^9 bytes a second)")
        .label_style((FONT, 13))
        .axis_desc_style((FONT, 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.1))
        .draw()?;

    for (index, mark) in marks.iter().enumerate() {
        let at = mark.at as f64;
        let height = ceiling - row * (index as f64 + 0.6);
        chart.draw_series(DashedLineSeries::new(
            [(at, 0.0), (at, height)],
            2,
            4,
            mark.colour.stroke_width(1),
        ))?;
        // To the side where there is room.
        let right = (at / from).ln() < 0.6 * (to / from).ln();
        let (side, aside) = if right { (HPos::Left, 5) } else { (HPos::Right, -5) };
        let style = (FONT, 13).into_font().color(&mark.colour).pos(Pos::new(side, VPos::Center));
        let label = EmptyElement::at((at, height)) + Text::new(mark.label.clone(), (aside, 0), style);
        chart.draw_series([label])?;
    }
    for series in &series {
        let points = series.points.iter().map(|(at, line)| (*at, line.gb_per_s.mean));
        let style = series.colour.stroke_width(if series.stroke == Stroke::Wide { 9 } else { 2 });
        match series.stroke {
            Stroke::Solid | Stroke::Wide => chart.draw_series(LineSeries::new(points, style)).map(drop)?,
            Stroke::Dashed => chart.draw_series(DashedLineSeries::new(points, 8, 4, style)).map(drop)?,
            Stroke::Dotted => chart.draw_series(DashedLineSeries::new(points, 2, 3, style)).map(drop)?,
        }
        if series.stroke == Stroke::Wide {
            continue;
        }
        chart.draw_series(series.points.iter().map(|(at, line)| {
            let (mean, stdev) = (line.gb_per_s.mean, line.gb_per_s.stdev.unwrap_or(0.0));
            let bar = series.colour.filled();
            ErrorBar::new_vertical(*at, (mean - stdev).max(0.0), mean, mean + stdev, bar, 7)
        }))?;
    }

    let mut y = 10;
    for (heading, strokes) in [
        ("non-temporal stores", vec![Stroke::Solid]),
        ("stores through the caches", vec![Stroke::Dashed]),
        ("not this library's", vec![Stroke::Dotted]),
        ("chosen", vec![Stroke::Wide]),
    ] {
        let of_them: Vec<&Series<'_>> =
            series.iter().filter(|series| strokes.contains(&series.stroke)).collect();
        if of_them.is_empty() {
            continue;
        }
        legend.draw(&Text::new(heading, (6, y), (FONT, 14).into_font().color(&BLACK.mix(0.7))))?;
        y += 24;
        for series in of_them {
            let middle = y + 7;
            let ends = [(10, middle), (52, middle)];
            let style = series.colour.stroke_width(if series.stroke == Stroke::Wide { 9 } else { 2 });
            match series.stroke {
                Stroke::Solid | Stroke::Wide => legend.draw(&PathElement::new(ends, style))?,
                Stroke::Dashed => legend.draw(&DashedPathElement::new(ends, 8, 4, style))?,
                Stroke::Dotted => legend.draw(&DashedPathElement::new(ends, 2, 3, style))?,
            }
            if series.stroke != Stroke::Wide {
                legend.draw(&Circle::new((31, middle), 3, series.colour.filled()))?;
            }
            legend.draw(&Text::new(series.name, (60, y), (FONT, 14).into_font()))?;
            y += 22;
            // What Auto took, the shortest calls first.
            let picks = if series.stroke == Stroke::Wide { picks(series) } else { String::new() };
            if !picks.is_empty() {
                legend.draw(&Text::new(picks, (60, y - 3), (FONT, 12).into_font().color(&BLACK.mix(0.7))))?;
                y += 20;
            }
        }
        y += 12;
    }
    root.present()?;
    drop(chart);
    Ok(())
}
