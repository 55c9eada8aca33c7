//! Heat maps: a value for each pair of places.

use super::{BOTTOM, Caption, HEIGHT, LEFT, RIGHT, TOP, WIDTH, below, figure, label};
use crate::page::escape;
use std::fmt::Write;

/// Cells that are the darker the larger their value.
#[derive(Debug)]
pub(crate) struct Grid<'a> {
    pub(crate) caption: Caption<'a>,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// (column from the left, row from below, value above 0).
    pub(crate) cells: Vec<(usize, usize, f64)>,
    /// Labels at their place along the axis, in cells.
    pub(crate) below: Vec<(f64, String)>,
    pub(crate) beside: Vec<(f64, String)>,
    /// Whether the line of equal places is drawn, and darkness follows the logarithm of the value.
    pub(crate) density: bool,
}

impl Grid<'_> {
    /// Empty text when there is nothing to show.
    pub(crate) fn draw(&self) -> String {
        let most = self.cells.iter().map(|c| c.2).fold(0.0, f64::max);
        if most <= 0.0 || self.columns == 0 || self.rows == 0 {
            return String::new();
        }
        let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        let (width, height) = (wide / self.columns as f64, high / self.rows as f64);
        let floor = HEIGHT - BOTTOM;
        let mut svg = String::new();
        for &(column, row, value) in self.cells.iter().filter(|c| c.2 > 0.0) {
            let share = if self.density { value.ln_1p() / most.ln_1p() } else { value / most };
            let _ = write!(
                svg,
                "<rect class=\"f0\" fill-opacity=\"{:.2}\" x=\"{:.1}\" y=\"{:.1}\" \
                 width=\"{width:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
                0.12 + 0.88 * share,
                LEFT + width * column as f64,
                floor - height * (row as f64 + 1.0),
                label(value)
            );
        }
        if self.density {
            let _ = write!(
                svg,
                "<line class=\"mark\" x1=\"{LEFT}\" y1=\"{floor}\" x2=\"{:.1}\" y2=\"{TOP}\"/>",
                WIDTH - RIGHT
            );
        }
        for (place, text) in &self.below {
            below(&mut svg, LEFT + width * place, text);
        }
        for (place, text) in &self.beside {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                floor - height * place + 3.5,
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
    fn the_largest_value_is_darkest_and_an_empty_map_is_nothing() {
        let caption = Caption { title: "scatter", note: "" };
        let mut grid = Grid {
            caption,
            columns: 2,
            rows: 2,
            cells: vec![(0, 0, 1000.0), (1, 1, 1.0)],
            below: vec![(0.0, "1".into())],
            beside: vec![(2.0, "0.5".into())],
            density: true,
        };
        let svg = grid.draw();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains("fill-opacity=\"1.00\"") && svg.contains("class=\"mark\""), "{svg}");
        grid.cells.clear();
        assert_eq!(grid.draw(), "");
    }
}
