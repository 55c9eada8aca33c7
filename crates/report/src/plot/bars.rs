//! Histograms.

use super::{
    Axis, BOTTOM, COLOURS, Caption, HEIGHT, LEFT, RIGHT, Scale, WIDTH, figure, grid_lines, label,
    label_below,
};
use crate::page::escape;
use std::fmt::Write;

/// Maximum number of labels below the chart.
const LABELS: usize = 9;

/// The bars of several series, side by side in each bin.
#[derive(Debug)]
pub(crate) struct Bars<'a> {
    pub(crate) caption: Caption<'a>,
    pub(crate) scale: Scale,
    /// Name of each bin.
    pub(crate) bins: Vec<String>,
    /// Name, and a value per bin.
    pub(crate) series: Vec<(&'a str, Vec<f64>)>,
}

impl Bars<'_> {
    /// The chart as SVG; empty if no series has a value above 0.
    pub(crate) fn draw(&self) -> String {
        let full: Vec<&(&str, Vec<f64>)> =
            self.series.iter().filter(|s| s.1.iter().any(|v| *v > 0.0)).collect();
        if full.is_empty() {
            return String::new();
        }
        let values = full.iter().flat_map(|s| s.1.iter().copied());
        // The axis starts below the smallest value, so that its bar has a height.
        let least = values.clone().filter(|v| *v > 0.0).fold(f64::MAX, f64::min);
        let base = (self.scale == Scale::Log).then_some(least / 2.0);
        let Some(y) = Axis::vertical(values.chain(base), self.scale) else { return String::new() };
        let mut svg = String::new();
        grid_lines(&mut svg, &y);
        let bottom = HEIGHT - BOTTOM;
        let bin_width = (WIDTH - LEFT - RIGHT) / self.bins.len().max(1) as f64;
        let width = bin_width * 0.84 / full.len().max(1) as f64;
        let every = self.bins.len().div_ceil(LABELS).max(1);
        for (bin, name) in self.bins.iter().enumerate() {
            let left = LEFT + bin_width * (bin as f64 + 0.08);
            if bin % every == 0 {
                label_below(&mut svg, LEFT + bin_width * (bin as f64 + 0.5), name);
            }
            for (index, (series, values)) in full.iter().enumerate() {
                let value = values.get(bin).copied().unwrap_or(0.0);
                if value <= 0.0 {
                    continue;
                }
                let top = y.place(value);
                let _ = write!(
                    svg,
                    "<rect class=\"f{}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" \
                     height=\"{:.1}\"><title>{}: {}, {}</title></rect>",
                    index % COLOURS,
                    left + width * index as f64,
                    bottom - top,
                    escape(series),
                    escape(name),
                    label(value)
                );
            }
        }
        let key: Vec<(usize, &str)> = full.iter().enumerate().map(|(i, s)| (i, s.0)).collect();
        figure(self.caption, &svg, &key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_above_zero_is_a_bar() {
        let caption = Caption { title: "sizes", note: "" };
        let bins = vec!["<1e-7".to_owned(), "1e-7".to_owned()];
        for scale in [Scale::FromZero, Scale::Log] {
            let series =
                vec![("with", vec![0.9, 0.1]), ("without", vec![0.0, 1.0]), ("no", vec![])];
            let svg = Bars { caption, scale, bins: bins.clone(), series }.draw();
            assert_eq!(svg.matches("<rect").count(), 3, "{svg}");
            assert_eq!(svg.matches("<li>").count(), 2, "{svg}");
            assert!(svg.contains("&lt;1e-7, 0.9") && !svg.contains("NaN"), "{svg}");
            let none = Bars { caption, scale, bins: bins.clone(), series: vec![("a", vec![0.0])] };
            assert_eq!(none.draw(), "");
        }
    }
}
