//! Line charts as SVG text, small enough to stand in a page by the dozen.

use std::fmt::Write;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 34.0;
/// Told apart by colour-blind people too; dashes repeat the difference.
const STYLES: [(&str, &str); 3] = [("#0b62a4", ""), ("#c44e00", "6 3"), ("#4a7a1d", "2 3")];

/// One line: points `(x, y, half width of the error bar)`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) points: Vec<(f64, f64, f64)>,
}

/// A chart over global steps; empty text when no series has a point.
pub(crate) fn chart(title: &str, series: &[Series], from_zero: bool) -> String {
    let points = || series.iter().flat_map(|s| s.points.iter());
    let xs = bounds(points().map(|p| p.0));
    let ys = bounds(points().flat_map(|p| [p.1 - p.2, p.1 + p.2]));
    let (Some((x0, x1)), Some((y0, y1))) = (xs, ys) else { return String::new() };
    let y0 = if from_zero { y0.min(0.0) } else { y0 };
    let (x1, y1) = (if x1 > x0 { x1 } else { x0 + 1.0 }, if y1 > y0 { y1 } else { y0 + 1.0 });
    let x = |v: f64| LEFT + (v - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    let y = |v: f64| HEIGHT - BOTTOM - (v - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);

    let mut svg = format!(
        "<figure><figcaption>{title}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         role=\"img\" aria-label=\"{title}\">"
    );
    let mut put = |text: String| svg.push_str(&text);
    for i in 0..=4 {
        let value = y0 + (y1 - y0) * f64::from(i) / 4.0;
        let at = y(value);
        put(format!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 3.5,
            label(value)
        ));
    }
    for value in [x0, x0 + (x1 - x0) / 2.0, x1] {
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(value),
            HEIGHT - BOTTOM + 14.0,
            label(value)
        ));
    }
    for ((index, line), (colour, dash)) in series.iter().enumerate().zip(STYLES) {
        let mut path = String::new();
        for (i, (px, py, bar)) in line.points.iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", x(*px), y(*py));
            if *bar > 0.0 {
                put(format!(
                    "<line stroke=\"{colour}\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{1:.1}\" \
                     y2=\"{2:.1}\"/>",
                    x(*px),
                    y(py - bar),
                    y(py + bar)
                ));
            }
            if line.points.len() <= 60 {
                put(format!(
                    "<circle fill=\"{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.2\"/>",
                    x(*px),
                    y(*py)
                ));
            }
        }
        put(format!(
            "<path d=\"{path}\" stroke=\"{colour}\" stroke-dasharray=\"{dash}\" fill=\"none\" \
             stroke-width=\"1.6\"/>"
        ));
        if !line.points.is_empty() {
            let at = LEFT + 4.0 + 130.0 * index as f64;
            let (end, text, line_y, text_y) = (at + 18.0, at + 23.0, HEIGHT - 8.0, HEIGHT - 4.5);
            let name = line.name;
            put(format!(
                "<line stroke=\"{colour}\" stroke-dasharray=\"{dash}\" stroke-width=\"2\" \
                 x1=\"{at}\" x2=\"{end}\" y1=\"{line_y}\" y2=\"{line_y}\"/>\
                 <text x=\"{text}\" y=\"{text_y}\">{name}</text>"
            ));
        }
    }
    svg.push_str("</svg></figure>\n");
    svg
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|v| v.is_finite()).fold(None, |range, v| {
        Some(range.map_or((v, v), |(low, high): (f64, f64)| (low.min(v), high.max(v))))
    })
}

fn label(value: f64) -> String {
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
    fn a_chart_has_its_lines_bars_and_labels_and_no_stray_numbers() {
        let points = vec![(0.0, 0.1, 0.02), (10.0, 0.35, 0.03), (20.0, 0.5, 0.0)];
        let svg = chart("Pass@1", &[Series { name: "held out", points }], true);
        for part in ["<path d=\"M", "held out", "Pass@1", "</svg>"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn one_point_and_none_do_not_divide_by_zero() {
        let one = Series { name: "a", points: vec![(3.0, 7.0, 0.0)] };
        assert!(!chart("one", &[one], false).contains("NaN"));
        assert_eq!(chart("none", &[Series { name: "a", points: vec![] }], false), "");
        assert_eq!(
            (label(0.25), label(1.5e-4), label(3.0)),
            ("0.25".into(), "1.5e-4".into(), "3".into())
        );
    }
}
