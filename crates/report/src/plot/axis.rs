//! Axes: the range of values of a chart, their positions, and their labels.
#![expect(clippy::disallowed_methods, reason = "positions and labels of a chart")]

use super::{BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, label, scientific};

/// The mapping of values to heights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Linear, with 0 in view.
    FromZero,
    /// Logarithmic; values that are not above 0 are not drawn.
    Log,
}

impl Scale {
    /// Whether a value can be drawn.
    pub(super) fn shows(self, value: f64) -> bool {
        value.is_finite() && (self == Self::FromZero || value > 0.0)
    }

    /// The lower end of an error bar of half width `bar` around `value`. Cut off at zero for a value that
    /// is not negative, and at a tenth of the value on a logarithmic scale, so that a long bar does not
    /// stretch the axis.
    pub(super) fn lower_end(self, value: f64, bar: f64) -> f64 {
        match self {
            Self::FromZero if value >= 0.0 => (value - bar).max(0.0),
            Self::FromZero => value - bar,
            Self::Log => (value - bar).max(value / 10.0),
        }
    }
}

/// A range of values, and its position in the drawing.
#[derive(Debug, Clone)]
pub(super) struct Axis {
    values: (f64, f64),
    pixels: (f64, f64),
    scale: Scale,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// A vertical axis from one round value to another, around `values`; `None` if none can be drawn.
    pub(super) fn vertical(values: impl Iterator<Item = f64>, scale: Scale) -> Option<Self> {
        let (low, high) = bounds(values.filter(|v| scale.shows(*v)))?;
        let ticks = match scale {
            Scale::FromZero if high > low || low < 0.0 || high > 0.0 => {
                linear_ticks(low.min(0.0), high.max(0.0))
            }
            Scale::FromZero => linear_ticks(0.0, 1.0),
            Scale::Log => log_ticks(low, high),
        };
        let (first, last) = (ticks.first()?.0, ticks.last()?.0);
        Some(Self { values: (first, last), pixels: (HEIGHT - BOTTOM, TOP), scale, ticks })
    }

    /// A horizontal axis over whole steps, exactly from the first to the last; `None` without any.
    pub(super) fn steps(steps: impl Iterator<Item = f64>) -> Option<Self> {
        let (first, last) = bounds(steps)?;
        let last = if last > first { last } else { first + 1.0 };
        let every = round_step((last - first) / 4.0).max(1.0);
        let mut ticks = Vec::new();
        let mut at = (first / every).ceil() * every;
        while at <= last {
            ticks.push((at, format!("{at:.0}")));
            at += every;
        }
        let pixels = (LEFT, WIDTH - RIGHT);
        Some(Self { values: (first, last), pixels, scale: Scale::FromZero, ticks })
    }

    /// The labelled values, in ascending order.
    pub(super) fn ticks(&self) -> &[(f64, String)] {
        &self.ticks
    }

    /// Position of a value, in pixels. Values beyond an end are placed at the end.
    pub(super) fn place(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        let share = match self.scale {
            Scale::FromZero => (value - low) / (high - low),
            Scale::Log => (value.max(f64::MIN_POSITIVE) / low).ln() / (high / low).ln(),
        };
        self.pixels.0 + share.clamp(0.0, 1.0) * (self.pixels.1 - self.pixels.0)
    }
}

/// The next of 1, 2 and 5 times a power of ten, at least `least` (above 0).
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| least <= power * factor * 1.000_001);
    power * factor.unwrap_or(10.0)
}

/// Round values at equal distances, the first at or below `low`, the last at or above `high`.
fn linear_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let step = round_step((high - low) / 4.0);
    let (mut index, last) = ((low / step + 1e-6).floor(), (high / step - 1e-6).ceil());
    let mut ticks = Vec::new();
    while index <= last {
        let value = index * step;
        ticks.push((value, tick_label(value, step, high.abs().max(low.abs()))));
        index += 1.0;
    }
    ticks
}

/// Decades, the first at or below `low`, the last at or above `high`; if there are at most two, also 2
/// and 5 times each of them.
fn log_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let exponent = |value: f64| value.log10();
    let first = (exponent(low) + 1e-9).floor();
    let last = (exponent(high) - 1e-9).ceil().max(first + 1.0);
    let every = ((last - first) / 6.0).ceil();
    let factors: &[f64] = if last - first <= 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let mut ticks = Vec::new();
    let mut at = first;
    while at < last {
        for factor in factors {
            let value = factor * 10f64.powf(at);
            ticks.push((value, label(value)));
        }
        at += every;
    }
    let end = 10f64.powf(at);
    ticks.push((end, label(end)));
    ticks
}

/// A tick's value with as many decimals as its distance to the next one needs.
fn tick_label(value: f64, step: f64, largest: f64) -> String {
    if value.abs() < step / 2.0 {
        return "0".to_owned();
    }
    if step < 1e-4 || largest >= 1e5 {
        return scientific(value);
    }
    let decimals = [1.0, 0.1, 0.01, 0.001].iter().position(|unit| step >= unit * 0.999);
    match decimals.unwrap_or(4) {
        0 => format!("{value:.0}"),
        1 => format!("{value:.1}"),
        2 => format!("{value:.2}"),
        3 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, v| {
        Some(range.map_or((v, v), |(low, high): (f64, f64)| (low.min(v), high.max(v))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(values: &[f64], scale: Scale) -> Vec<String> {
        let axis = Axis::vertical(values.iter().copied(), scale).unwrap();
        axis.ticks().iter().map(|(_, text)| text.clone()).collect()
    }

    #[test]
    fn ticks_are_round_values_around_the_data() {
        for (values, expected) in [
            (&[37.695, 3.0][..], &["0", "10", "20", "30", "40"][..]),
            (&[0.747, 0.1], &["0", "0.2", "0.4", "0.6", "0.8"]),
            (&[0.4], &["0", "0.1", "0.2", "0.3", "0.4"]),
            (&[3e-5, 1e-5], &["0", "1e-5", "2e-5", "3e-5"]),
            (&[0.0123], &["0", "0.005", "0.010", "0.015"]),
            (&[123_456.0], &["0", "5e4", "1e5", "1.5e5"]),
            (&[-0.3, 0.5], &["-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
            (&[0.0], &["0", "0.5", "1.0"]),
        ] {
            assert_eq!(ticks(values, Scale::FromZero), expected, "{values:?}");
        }
    }

    #[test]
    fn logarithmic_ticks_are_decades() {
        assert_eq!(ticks(&[3e-5, 2e-3], Scale::Log), ["1e-5", "1e-4", "0.001", "0.01"]);
        assert_eq!(ticks(&[2e-4, 4e-4], Scale::Log), ["1e-4", "2e-4", "5e-4", "0.001"]);
        let wide = ticks(&[1e-12, 1.0], Scale::Log);
        assert_eq!(wide, ["1e-12", "1e-10", "1e-8", "1e-6", "1e-4", "0.01", "1"]);
    }

    #[test]
    fn axis_spans_its_values_and_never_divides_by_zero() {
        let axis = |values: &[f64], scale| Axis::vertical(values.iter().copied(), scale);
        assert!(axis(&[], Scale::FromZero).is_none() && axis(&[0.0], Scale::Log).is_none());
        assert!(axis(&[f64::NAN], Scale::FromZero).is_none());
        for (values, scale) in [(&[0.0][..], Scale::FromZero), (&[7.0], Scale::Log)] {
            let axis = axis(values, scale).unwrap();
            assert!(axis.place(values[0]).is_finite());
            assert!(axis.ticks().iter().all(|(value, _)| axis.place(*value).is_finite()));
        }
        let log = axis(&[1e-4, 1e-2], Scale::Log).unwrap();
        let middle = f64::midpoint(log.place(1e-4), log.place(1e-2));
        assert!((log.place(1e-3) - middle).abs() < 1e-9);
        let linear = axis(&[2.0, 4.0], Scale::FromZero).unwrap();
        assert!((linear.place(0.0) - (HEIGHT - BOTTOM)).abs() < 1e-9);
    }

    #[test]
    fn error_bars_do_not_stretch_an_axis_below_zero_or_towards_it() {
        assert!(Scale::FromZero.lower_end(0.1, 0.3).abs() < 1e-12);
        assert!((Scale::FromZero.lower_end(-0.1, 0.3) + 0.4).abs() < 1e-12);
        assert!((Scale::Log.lower_end(1e-4, 1e-4 - 4.6e-12) - 1e-5).abs() < 1e-18);
    }

    #[test]
    fn step_axis_labels_whole_steps() {
        let axis = |first, last| {
            let axis = Axis::steps([first, last].into_iter()).unwrap();
            axis.ticks().iter().map(|(_, text)| text.clone()).collect::<Vec<_>>()
        };
        assert_eq!(axis(0.0, 13.0), ["0", "5", "10"]);
        assert_eq!(axis(1.0, 40.0), ["10", "20", "30", "40"]);
        assert_eq!(axis(1.0, 3.0), ["1", "2", "3"]);
        assert_eq!(axis(5.0, 5.0), ["5", "6"]);
    }
}
