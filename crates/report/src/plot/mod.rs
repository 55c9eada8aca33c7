//! Charts as SVG text, small enough that a page can have dozens. Colours and fonts belong to the style
//! sheet of the page, so that a chart is readable in light and in dark.

mod axis;
mod bars;
mod grid;
mod lines;

pub(crate) use axis::Scale;
pub(crate) use bars::Bars;
pub(crate) use grid::Grid;
pub(crate) use lines::{Lines, Series};

use crate::page::escape;
use axis::Axis;
use std::fmt::Write;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 22.0;
/// Colours in the style sheet.
const COLOURS: usize = 8;
/// Dash patterns. They distinguish series without colour, and once the colours repeat.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "9 3 2 3"];

/// The text above and below a chart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caption<'a> {
    pub(crate) title: &'a str,
    /// How to read the chart, in a sentence.
    pub(crate) note: &'a str,
}

/// Horizontal lines at the ticks of the vertical axis, with their values.
fn grid_lines(svg: &mut String, y: &Axis) {
    for (value, text) in y.ticks() {
        let at = y.place(*value);
        let _ = write!(
            svg,
            "<line class=\"rule\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 3.5
        );
    }
}

/// A label below the chart.
fn label_below(svg: &mut String, x: f64, text: &str) {
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

/// A value as text, to three decimals or two digits.
fn label(value: f64) -> String {
    let size = value.abs();
    if size < 1e-12 {
        "0".to_owned()
    } else if (1e-3..1e5).contains(&size) {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        scientific(value)
    }
}

/// Two digits and the exponent: `1.5e-4`, `2e-4`.
fn scientific(value: f64) -> String {
    format!("{value:.1e}").replace(".0e", "e")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_labelled_as_people_write_them() {
        let labels = [0.0, 0.25, 1.5e-4, 3.0, 123_456.0, 2e-7].map(label);
        assert_eq!(labels, ["0", "0.25", "1.5e-4", "3", "1.2e5", "2e-7"]);
    }
}
