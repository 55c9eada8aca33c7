//! The text of a scrape, from all lines.

use super::family::{Family, Kind, family};
use crate::line::{Line, numbers_of};
use orchestrate_metrics::Metric;
use orchestrate_types::RunId;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The samples of one name.
struct Samples {
    help: String,
    kind: Kind,
    /// Values by their labels in the text format.
    values: BTreeMap<String, f64>,
}

/// All families, by name.
#[derive(Default)]
struct Families(BTreeMap<String, Samples>);

/// The values of a run's lines, in version 0.0.4 of the text format. `start` is when this process
/// began to export them, in seconds since the Unix epoch.
pub(super) fn render(run: RunId, start: f64, lines: &[Line]) -> String {
    let mut families = Families::default();
    families.add_run(run, start, lines);
    for line in lines {
        for metric in line.metrics() {
            if let Some(value) = line.get(metric.name) {
                families.add_metric(metric, value);
            }
        }
        families.add_hosts(line);
    }
    families.text()
}

impl Families {
    fn add_run(&mut self, run: RunId, start: f64, lines: &[Line]) {
        let run = format!("{{{}}}", label("run", &run.to_string()));
        self.set("orchestrate_run_info", "The run whose metrics these are.", run, 1.0);
        let mut gauge = |name: &str, help: &str, value: Option<f64>| {
            if let Some(value) = value {
                self.set(&format!("orchestrate_{name}"), help, String::new(), value);
            }
        };
        let steps = || lines.iter().filter(|line| !line.is_evaluation());
        let last = steps().next_back();
        gauge("start_timestamp_seconds", "When this process began to export metrics.", Some(start));
        gauge("global_step", "Last closed global step.", last.map(|line| line.step().into()));
        gauge(
            "policy_version",
            "Version of the weights that engines serve after the last closed global step.",
            last.and_then(|line| line.number("policy_version")),
        );
        gauge(
            "last_line_timestamp_seconds",
            "When the last step or evaluation ended.",
            lines.last().and_then(Line::time).map(|time| time.as_microsecond() as f64 / 1e6),
        );
        self.sum(
            "orchestrate_steps_total",
            "Closed global steps.",
            String::new(),
            steps().count() as f64,
        );
    }

    fn add_metric(&mut self, metric: &Metric, value: &Value) {
        let Family { name, kind, scale, label: key } = family(metric);
        let help = metric.meaning.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(number) = value.as_f64() {
            self.add(&name, kind, &help, String::new(), number * scale);
            return;
        }
        let members = numbers_of(value);
        match key {
            Some(key) => {
                if kind == Kind::Gauge {
                    // The newest line says which keys there are.
                    self.0.remove(&name);
                }
                for (member, number) in members {
                    let labels = format!("{{{}}}", label(&key, member));
                    self.add(&name, kind, &help, labels, number * scale);
                }
            }
            None => {
                for (member, number) in members {
                    let help = format!("{help} Here: {member}.");
                    self.add(
                        &format!("{name}_{member}"),
                        kind,
                        &help,
                        String::new(),
                        number * scale,
                    );
                }
            }
        }
    }

    fn add_hosts(&mut self, line: &Line) {
        let hosts = line.hosts();
        if !hosts.is_empty() {
            // Hosts may have been taken from the settings since the line before.
            self.0.retain(|name, _| !name.starts_with("orchestrate_sandbox_host_"));
        }
        for (host, numbers) in &hosts {
            for (key, number) in numbers {
                let help = format!("State of a Docker host at the end of the last step: {key}.");
                let labels = format!("{{{}}}", label("host", host));
                self.set(&format!("orchestrate_sandbox_host_{key}"), &help, labels, *number);
            }
        }
    }

    fn add(&mut self, name: &str, kind: Kind, help: &str, labels: String, value: f64) {
        match kind {
            Kind::Counter => self.sum(name, help, labels, value),
            Kind::Gauge => self.set(name, help, labels, value),
        }
    }

    fn sum(&mut self, name: &str, help: &str, labels: String, value: f64) {
        *self.samples(name, Kind::Counter, help).values.entry(labels).or_default() += value;
    }

    fn set(&mut self, name: &str, help: &str, labels: String, value: f64) {
        self.samples(name, Kind::Gauge, help).values.insert(labels, value);
    }

    fn samples(&mut self, name: &str, kind: Kind, help: &str) -> &mut Samples {
        self.0.entry(name.to_owned()).or_insert_with(|| Samples {
            help: help.to_owned(),
            kind,
            values: BTreeMap::new(),
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, Samples { help, kind, values }) in &self.0 {
            let help = help.replace('\\', "\\\\").replace('\n', "\\n");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
            for (labels, value) in values {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        }
        text
    }
}

/// A label with its escaped value.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::tests::run_of;

    #[test]
    fn counters_are_sums_and_gauges_the_newest_values() {
        let text = render(RunId::generate(), 5.0, &run_of(3));
        for line in [
            "orchestrate_episodes_total 24",
            "orchestrate_broken_attempts_by_stage_total{stage=\"setup\"} 3",
            "orchestrate_suspicious_total{finding=\"tampered \\\"x\\\"\"} 6",
            "orchestrate_extreme_token_fraction{tau=\"2\"} 0.01",
            "orchestrate_ratio_max 2",
            "orchestrate_reward_mean 1.1",
            "orchestrate_time_rollout_seconds_total 4.5",
            "orchestrate_loop_lag_p99_seconds 0.003",
            "orchestrate_eval_pass_at_1 0.25",
            "orchestrate_sandbox_host_in_service{host=\"a\"} 1",
            "orchestrate_global_step 3",
            "orchestrate_steps_total 3",
            "orchestrate_start_timestamp_seconds 5",
            "# TYPE orchestrate_episodes_total counter",
            "# TYPE orchestrate_reward_mean gauge",
        ] {
            assert!(text.lines().any(|found| found == line), "no `{line}` in:\n{text}");
        }
        assert!(
            !text.contains("orchestrate_logprob") && !text.contains("orchestrate_loss"),
            "{text}"
        );
        let empty = render(RunId::generate(), 5.0, &[]);
        assert!(!empty.contains("global_step") && empty.contains("orchestrate_steps_total 0"));
    }
}
