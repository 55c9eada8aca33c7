//! How a metric of a line is exported: name, type and label.

use orchestrate_metrics::{Metric, ValueKind};

/// Units of what a line counts; their sums over the run are counters.
const COUNTED: [&str; 9] =
    ["groups", "episodes", "attempts", "branches", "requests", "tokens", "bytes", "rows", "pairs"];

/// The type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The sum over all lines.
    Counter,
    /// The newest value.
    Gauge,
}

impl Kind {
    /// Its name in the text format.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// How a metric is exported.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Family {
    /// Name of the family; of an object without a label, the first part of the names.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// What a value is multiplied by to have a base unit.
    pub(super) scale: f64,
    /// Label for the keys of an object.
    pub(super) label: Option<String>,
}

/// Names follow Prometheus's conventions: the prefix `orchestrate_`, base units as a suffix, and
/// `_total` for counters. An object whose unit is `… by KEY` has the label KEY.
pub(super) fn family(metric: &Metric) -> Family {
    let unit = metric.unit.split([' ', ',']).next().unwrap_or_default();
    let label = metric.unit.split_once(" by ").map(|(_, rest)| {
        let key = rest.split(',').next().unwrap_or(rest);
        if key == "τ" { "tau".to_owned() } else { key.to_owned() }
    });
    let is_sum = match metric.kind {
        ValueKind::Count => COUNTED.contains(&unit),
        ValueKind::Number => unit == "seconds",
        ValueKind::Structured => label.is_some() && COUNTED.contains(&unit),
    };
    let (base, scale) = match metric.name {
        name if unit == "seconds" => (with_unit(name, "_s", "_seconds"), 1.0),
        name if unit == "milliseconds" => (with_unit(name, "_ms", "_seconds"), 1e-3),
        name => (with_unit(name, "_per_s", "_per_second"), 1.0),
    };
    let suffix = if is_sum { "_total" } else { "" };
    Family {
        name: format!("orchestrate_{base}{suffix}"),
        kind: if is_sum { Kind::Counter } else { Kind::Gauge },
        scale,
        label: label.filter(|_| metric.kind == ValueKind::Structured),
    }
}

fn with_unit(name: &str, short: &str, long: &str) -> String {
    match name.strip_suffix(short) {
        Some(stem) => format!("{stem}{long}"),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_metrics::catalogue;

    #[test]
    fn counters_units_and_labels_follow_from_the_catalogue() {
        let of = |name: &str| family(catalogue().find(|metric| metric.name == name).unwrap());
        for (name, exported, kind, label) in [
            ("reward_mean", "orchestrate_reward_mean", Kind::Gauge, None),
            ("episodes", "orchestrate_episodes_total", Kind::Counter, None),
            ("time_train_s", "orchestrate_time_train_seconds_total", Kind::Counter, None),
            ("loop_lag_p99_ms", "orchestrate_loop_lag_p99_seconds", Kind::Gauge, None),
            ("tokens_per_s", "orchestrate_tokens_per_second", Kind::Gauge, None),
            ("turns_mean", "orchestrate_turns_mean", Kind::Gauge, None),
            ("staleness_max", "orchestrate_staleness_max", Kind::Gauge, None),
            ("eval_tasks", "orchestrate_eval_tasks", Kind::Gauge, None),
            ("suspicious", "orchestrate_suspicious_total", Kind::Counter, Some("finding")),
            ("forks", "orchestrate_forks_total", Kind::Counter, Some("cause")),
            ("worker_metrics", "orchestrate_worker_metrics", Kind::Gauge, Some("name")),
            (
                "extreme_token_fraction",
                "orchestrate_extreme_token_fraction",
                Kind::Gauge,
                Some("tau"),
            ),
            ("ratio", "orchestrate_ratio", Kind::Gauge, None),
        ] {
            let family = of(name);
            assert_eq!((family.name.as_str(), family.kind), (exported, kind));
            assert_eq!(family.label.as_deref(), label, "{name}");
        }
        assert!((of("loop_lag_max_ms").scale - 1e-3).abs() < 1e-12);
    }
}
