//! Charts as SVG text, small enough to stand in a page by the dozen. Colours and type belong to the
//! page's style sheet, so that a chart is right in light and in dark.

mod bars;
mod grid;
mod lines;

pub(crate) use bars::Bars;
pub(crate) use grid::Grid;
pub(crate) use lines::{Lines, Series};

use crate::page::escape;
use std::fmt::Write;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 22.0;
/// Colours of the style sheet.
pub(crate) const COLOURS: usize = 8;
/// They repeat what colours say, and go on saying it where colours come again.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "9 3 2 3"];

/// How a value becomes a height.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Linear, and 0 is in view.
    FromZero,
    /// Logarithmic; values that are not above 0 are not drawn.
    Log,
}

impl Scale {
    fn shows(self, value: f64) -> bool {
        value.is_finite() && (self == Self::FromZero || value > 0.0)
    }
}

/// What stands above and below a chart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caption<'a> {
    pub(crate) title: &'a str,
    /// How to read it, in a sentence.
    pub(crate) note: &'a str,
}

/// A range of values and where they lie on the paper.
#[derive(Debug, Clone, Copy)]
struct Axis {
    values: (f64, f64),
    paper: (f64, f64),
    scale: Scale,
}

impl Axis {
    /// `None` where there is nothing to show.
    fn upright(values: impl Iterator<Item = f64>, scale: Scale) -> Option<Self> {
        let (low, high) = bounds(values.filter(|v| scale.shows(*v)))?;
        let values = match scale {
            Scale::FromZero if high > low.min(0.0) => (low.min(0.0), high),
            Scale::FromZero => (low, low + 1.0),
            Scale::Log if high > low => (low, high),
            Scale::Log => (low / 2.0, low * 2.0),
        };
        Some(Self { values, paper: (HEIGHT - BOTTOM, TOP), scale })
    }

    fn place(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        let share = match self.scale {
            Scale::FromZero => (value - low) / (high - low),
            Scale::Log => (value / low).ln() / (high / low).ln(),
        };
        self.paper.0 + share.clamp(0.0, 1.0) * (self.paper.1 - self.paper.0)
    }

    /// Five values, evenly spread on the paper.
    fn ticks(&self) -> [f64; 5] {
        let (low, high) = self.values;
        [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| match self.scale {
            Scale::FromZero => low + (high - low) * share,
            Scale::Log => low * (high / low).powf(share),
        })
    }
}

/// Horizontal lines with their values.
fn grid_lines(svg: &mut String, y: &Axis) {
    for value in y.ticks() {
        let at = y.place(value);
        let _ = write!(
            svg,
            "<line class=\"rule\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 3.5,
            label(value)
        );
    }
}

/// A value below the chart.
fn below(svg: &mut String, x: f64, text: &str) {
    let y = HEIGHT - BOTTOM + 14.0;
    let text = escape(text);
    let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{text}</text>");
}

/// The chart in its frame: title, drawing, key, note.
fn figure(caption: Caption<'_>, svg: &str, key: &[(usize, &str)]) -> String {
    let (title, note) = (escape(caption.title), escape(caption.note));
    let mut out = format!(
        "<figure><figcaption>{title}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         role=\"img\" aria-label=\"{title}\">{svg}</svg>"
    );
    if key.len() > 1 {
        out.push_str("<ul class=\"key\">");
        for (index, name) in key {
            let _ = write!(
                out,
                "<li><svg viewBox=\"0 0 22 8\"><line {} x1=\"0\" x2=\"22\" y1=\"4\" y2=\"4\"/>\
                 </svg>{}</li>",
                stroke(*index),
                escape(name)
            );
        }
        out.push_str("</ul>");
    }
    if !note.is_empty() {
        let _ = write!(out, "<p class=\"note\">{note}</p>");
    }
    out.push_str("</figure>\n");
    out
}

/// Attributes of the line of series `index`.
fn stroke(index: usize) -> String {
    let dash = DASHES.get((index + index / COLOURS) % DASHES.len()).copied().unwrap_or_default();
    format!("class=\"l{}\" stroke-dasharray=\"{dash}\"", index % COLOURS)
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, v| {
        Some(range.map_or((v, v), |(low, high): (f64, f64)| (low.min(v), high.max(v))))
    })
}

/// A value as people write it.
pub(crate) fn label(value: f64) -> String {
    let size = value.abs();
    if size < 1e-12 {
        "0".to_owned()
    } else if !(1e-3..1e5).contains(&size) {
        format!("{value:.1e}")
    } else {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_labelled_as_people_write_them() {
        let labels = [0.0, 0.25, 1.5e-4, 3.0, 123_456.0].map(label);
        assert_eq!(labels, ["0", "0.25", "1.5e-4", "3", "1.2e5"]);
    }

    #[test]
    fn an_axis_spans_its_values_and_never_divides_by_zero() {
        let axis = |values: &[f64], scale| Axis::upright(values.iter().copied(), scale);
        assert!(axis(&[], Scale::FromZero).is_none() && axis(&[0.0], Scale::Log).is_none());
        assert!(axis(&[f64::NAN], Scale::FromZero).is_none());
        for (values, scale) in [(&[0.0][..], Scale::FromZero), (&[7.0], Scale::Log)] {
            let axis = axis(values, scale).unwrap();
            assert!(
                axis.place(values[0]).is_finite() && axis.ticks().iter().all(|t| t.is_finite())
            );
        }
        let log = axis(&[1e-4, 1e-2], Scale::Log).unwrap();
        let middle = f64::midpoint(log.place(1e-4), log.place(1e-2));
        assert!((log.place(1e-3) - middle).abs() < 1e-9);
        let linear = axis(&[2.0, 4.0], Scale::FromZero).unwrap();
        assert!((linear.place(0.0) - (HEIGHT - BOTTOM)).abs() < 1e-9);
    }
}
