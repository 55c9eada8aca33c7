//! Histograms: how often values of which size occur.

use super::{
    Axis, BOTTOM, COLOURS, Caption, HEIGHT, LEFT, RIGHT, Scale, WIDTH, below, figure, grid_lines,
    label,
};
use crate::page::escape;
use std::fmt::Write;

/// Most labels that fit below.
const LABELS: usize = 9;

/// Bars of several series side by side.
#[derive(Debug)]
pub(crate) struct Bars<'a> {
    pub(crate) caption: Caption<'a>,
    pub(crate) scale: Scale,
    /// What each place stands for.
    pub(crate) places: Vec<String>,
    /// Name and a value per place.
    pub(crate) series: Vec<(&'a str, Vec<f64>)>,
}

impl Bars<'_> {
    /// Empty text when there is nothing to show.
    pub(crate) fn draw(&self) -> String {
        let full: Vec<&(&str, Vec<f64>)> =
            self.series.iter().filter(|s| s.1.iter().any(|v| *v > 0.0)).collect();
        if full.is_empty() {
            return String::new();
        }
        let values = full.iter().flat_map(|s| s.1.iter().copied());
        // One below the least, so that the smallest bar is seen too.
        let least = values.clone().filter(|v| *v > 0.0).fold(f64::MAX, f64::min);
        let base = (self.scale == Scale::Log).then_some(least / 2.0);
        let Some(y) = Axis::upright(values.chain(base), self.scale) else { return String::new() };
        let mut svg = String::new();
        grid_lines(&mut svg, &y);
        let floor = HEIGHT - BOTTOM;
        let room = (WIDTH - LEFT - RIGHT) / self.places.len().max(1) as f64;
        let width = room * 0.84 / full.len().max(1) as f64;
        let every = self.places.len().div_ceil(LABELS).max(1);
        for (place, name) in self.places.iter().enumerate() {
            let left = LEFT + room * (place as f64 + 0.08);
            if place % every == 0 {
                below(&mut svg, LEFT + room * (place as f64 + 0.5), name);
            }
            for (index, (series, values)) in full.iter().enumerate() {
                let value = values.get(place).copied().unwrap_or(0.0);
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
                    floor - top,
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
    fn each_value_is_a_bar_and_zeros_are_none() {
        let caption = Caption { title: "sizes", note: "" };
        let places = vec!["<1e-7".to_owned(), "1e-7".to_owned()];
        for scale in [Scale::FromZero, Scale::Log] {
            let series =
                vec![("with", vec![0.9, 0.1]), ("without", vec![0.0, 1.0]), ("no", vec![])];
            let svg = Bars { caption, scale, places: places.clone(), series }.draw();
            assert_eq!(svg.matches("<rect").count(), 3, "{svg}");
            assert_eq!(svg.matches("<li>").count(), 2, "{svg}");
            assert!(svg.contains("&lt;1e-7, 0.9") && !svg.contains("NaN"), "{svg}");
            let none =
                Bars { caption, scale, places: places.clone(), series: vec![("a", vec![0.0])] };
            assert_eq!(none.draw(), "");
        }
    }
}
