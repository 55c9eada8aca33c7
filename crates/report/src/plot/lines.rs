//! Lines over global steps.

use super::{
    Axis, BOTTOM, COLOURS, Caption, HEIGHT, Scale, TOP, figure, grid_lines, label, label_below,
    stroke,
};
use crate::page::escape;
use std::fmt::Write;

/// Points of a line are marked one by one up to this number.
const MARKED: usize = 60;

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Number of its colour and dash.
    pub(crate) style: usize,
    /// Drawn thin and left out of the key: one of several that a reader may overlook.
    pub(crate) faint: bool,
    /// `(global step, value, half width of the error bar)`.
    pub(crate) points: Vec<(f64, f64, f64)>,
}

/// A chart of lines.
#[derive(Debug)]
pub(crate) struct Lines<'a> {
    pub(crate) caption: Caption<'a>,
    pub(crate) scale: Scale,
    pub(crate) series: Vec<Series>,
    /// A step that is pointed out, with the reason.
    pub(crate) mark: Option<(f64, &'a str)>,
}

impl Lines<'_> {
    /// The chart as SVG; empty if no series has a value to show.
    pub(crate) fn draw(&self) -> String {
        let seen = || self.series.iter().flat_map(|s| &s.points).filter(|p| self.scale.shows(p.1));
        let ys = seen().flat_map(|p| [p.1, self.scale.lower_end(p.1, p.2), p.1 + p.2]);
        let (Some(x), Some(y)) = (Axis::steps(seen().map(|p| p.0)), Axis::vertical(ys, self.scale))
        else {
            return String::new();
        };
        let mut svg = String::new();
        grid_lines(&mut svg, &y);
        for (step, text) in x.ticks() {
            label_below(&mut svg, x.place(*step), text);
        }
        if let Some((step, why)) = self.mark {
            let at = x.place(step);
            let _ = write!(
                svg,
                "<line class=\"mark\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{:.1}\">\
                 <title>{}</title></line>",
                HEIGHT - BOTTOM,
                escape(why)
            );
        }
        for line in &self.series {
            self.draw_line(&mut svg, line, &x, &y);
        }
        let named = self.series.iter().filter(|s| !s.faint && !s.points.is_empty());
        let key: Vec<(usize, &str)> = named.map(|s| (s.style, s.name.as_str())).collect();
        figure(self.caption, &svg, &key)
    }

    fn draw_line(&self, svg: &mut String, line: &Series, x: &Axis, y: &Axis) {
        let colour = line.style % COLOURS;
        let name = escape(&line.name);
        let (mut path, mut marks) = (String::new(), String::new());
        for &(step, value, bar) in line.points.iter().filter(|p| self.scale.shows(p.1)) {
            let (at_x, at_y) = (x.place(step), y.place(value));
            let command = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{command}{at_x:.1} {at_y:.1}");
            if line.faint || line.points.len() > MARKED {
                continue;
            }
            if bar > 0.0 {
                let _ = write!(
                    marks,
                    "<line class=\"l{colour}\" x1=\"{at_x:.1}\" x2=\"{at_x:.1}\" y1=\"{:.1}\" \
                     y2=\"{:.1}\"/>",
                    y.place(value - bar),
                    y.place(value + bar)
                );
            }
            let _ = write!(
                marks,
                "<circle class=\"f{colour}\" cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"2.4\">\
                 <title>{name}, step {}: {}{}</title></circle>",
                label(step),
                label(value),
                if bar > 0.0 { format!(" ± {}", label(bar)) } else { String::new() }
            );
        }
        let faint = if line.faint { " opacity=\"0.3\" stroke-width=\"1\"" } else { "" };
        let _ = write!(
            svg,
            "<path {} d=\"{path}\"{faint}><title>{name}</title></path>{marks}",
            stroke(line.style)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(scale: Scale, series: Vec<Series>) -> String {
        let caption = Caption { title: "Pass@1", note: "higher is better" };
        Lines { caption, scale, series, mark: Some((10.0, "collapse")) }.draw()
    }

    fn series(name: &str, faint: bool, points: &[(f64, f64, f64)]) -> Series {
        Series { name: name.into(), style: 0, faint, points: points.to_vec() }
    }

    #[test]
    fn chart_has_its_lines_bars_marks_and_labels() {
        let points = [(0.0, 0.1, 0.02), (10.0, 0.35, 0.03), (20.0, 0.5, 0.0)];
        let svg = draw(
            Scale::FromZero,
            vec![
                series("held <out>", false, &points),
                series("other", false, &points[..1]),
                series("seed 3", true, &points),
            ],
        );
        for part in ["d=\"M58.0", "held &lt;out&gt;", "Pass@1", "class=\"mark\"", "higher is"] {
            assert!(svg.contains(part), "{part} is not in {svg}");
        }
        assert!(svg.contains("step 10: 0.35 ± 0.03"));
        assert_eq!(svg.matches("<li>").count(), 2, "faint lines are not in the key");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn logarithmic_chart_leaves_out_values_at_zero() {
        let svg = draw(Scale::Log, vec![series("kl", false, &[(1.0, 0.0, 0.0), (2.0, 1e-5, 0.0)])]);
        assert!(svg.contains("step 2") && !svg.contains("step 1:") && !svg.contains("NaN"));
        assert_eq!(draw(Scale::Log, vec![series("kl", false, &[(1.0, 0.0, 0.0)])]), "");
        assert_eq!(draw(Scale::FromZero, vec![series("none", false, &[])]), "");
    }
}
