//! Heat maps.
#![expect(clippy::disallowed_methods, reason = "positions and labels of a chart")]

use super::{BOTTOM, Caption, HEIGHT, LEFT, RIGHT, TOP, WIDTH, figure, label, label_below};
use crate::page::escape;
use std::fmt::Write;

/// Cells that are darker the larger their value is.
#[derive(Debug)]
pub(crate) struct Grid<'a> {
    pub(crate) caption: Caption<'a>,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// `(column from the left, row from the bottom, value above 0)`.
    pub(crate) cells: Vec<(usize, usize, f64)>,
    /// Labels below the map, with their distance from the left in cells.
    pub(crate) below: Vec<(f64, String)>,
    /// Labels left of the map, with their distance from the bottom in cells.
    pub(crate) left: Vec<(f64, String)>,
    /// Whether the diagonal is drawn and darkness follows the logarithm of the value.
    pub(crate) density: bool,
}

impl Grid<'_> {
    /// The map as SVG; empty if no cell has a value.
    pub(crate) fn draw(&self) -> String {
        let most = self.cells.iter().map(|c| c.2).fold(0.0, f64::max);
        if most <= 0.0 || self.columns == 0 || self.rows == 0 {
            return String::new();
        }
        let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        let (width, height) = (wide / self.columns as f64, high / self.rows as f64);
        let bottom = HEIGHT - BOTTOM;
        let mut svg = String::new();
        for &(column, row, value) in self.cells.iter().filter(|c| c.2 > 0.0) {
            let share = if self.density { value.ln_1p() / most.ln_1p() } else { value / most };
            let _ = write!(
                svg,
                "<rect class=\"f0\" fill-opacity=\"{:.2}\" x=\"{:.1}\" y=\"{:.1}\" \
                 width=\"{width:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
                0.12 + 0.88 * share,
                LEFT + width * column as f64,
                bottom - height * (row as f64 + 1.0),
                label(value)
            );
        }
        if self.density {
            let _ = write!(
                svg,
                "<line class=\"mark\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{:.1}\" y2=\"{TOP}\"/>",
                WIDTH - RIGHT
            );
        }
        for (place, text) in &self.below {
            label_below(&mut svg, LEFT + width * place, text);
        }
        for (place, text) in &self.left {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                bottom - height * place + 3.5,
                escape(text)
            );
        }
        figure(self.caption, &svg, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_value_is_darkest_and_an_empty_map_is_not_drawn() {
        let caption = Caption { title: "scatter", note: "" };
        let mut grid = Grid {
            caption,
            columns: 2,
            rows: 2,
            cells: vec![(0, 0, 1000.0), (1, 1, 1.0)],
            below: vec![(0.0, "1".into())],
            left: vec![(2.0, "0.5".into())],
            density: true,
        };
        let svg = grid.draw();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains("fill-opacity=\"1.00\"") && svg.contains("class=\"mark\""), "{svg}");
        grid.cells.clear();
        assert_eq!(grid.draw(), "");
    }
}
