//! A journaled metrics line, as sinks see it.

use jiff::Timestamp;
use orchestrate_metrics::{EvalLine, LineError, Metric, MetricsLine, StepLine};
use serde_json::Value;

/// A line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    value: Value,
    step: u32,
    time: Option<Timestamp>,
    is_evaluation: bool,
}

impl Line {
    /// The line as the journal stores it.
    ///
    /// # Errors
    /// If it is not a metrics line that this version can read.
    pub fn new(value: Value) -> Result<Self, LineError> {
        let typed = MetricsLine::try_from(value.clone())?;
        let step = match &typed {
            MetricsLine::Step(line) => line.global_step,
            MetricsLine::Evaluation(line) => line.global_step,
        };
        let is_evaluation = typed.evaluation().is_some();
        Ok(Self { step, time: typed.time(), is_evaluation, value })
    }

    /// Global step of the line.
    pub fn step(&self) -> u32 {
        self.step
    }

    /// Whether it is the line of an evaluation; otherwise it is that of a step.
    pub fn is_evaluation(&self) -> bool {
        self.is_evaluation
    }

    /// When it was written; `None` in lines of versions that did not record it.
    pub fn time(&self) -> Option<Timestamp> {
        self.time
    }

    /// When it was written, in seconds since the Unix epoch; 0 where it was not recorded.
    pub fn unix_seconds(&self) -> f64 {
        self.time.map_or(0.0, |time| time.as_microsecond() as f64 / 1e6)
    }

    /// The metrics that lines of this kind have.
    pub fn metrics(&self) -> &'static [Metric] {
        if self.is_evaluation { EvalLine::METRICS } else { StepLine::METRICS }
    }

    /// The value of a key; `None` if it is missing or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key as a number, if it is one.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(Value::as_f64)
    }

    /// Every number of the line by its name, for sinks that hold one number per name and step: a
    /// metric that is a number has its own name, and each number of an object has the name
    /// `METRIC/KEY`. The state of a Docker host is `sandbox_hosts/HOST/KEY`. Distributions and lists
    /// are left out.
    pub fn numbers(&self) -> Vec<(String, f64)> {
        let mut numbers = Vec::new();
        for metric in self.metrics() {
            match self.get(metric.name) {
                Some(Value::Object(members)) => {
                    for (key, member) in members {
                        numbers.extend(
                            as_number(member).map(|n| (format!("{}/{key}", metric.name), n)),
                        );
                    }
                }
                Some(Value::Array(_)) if metric.name == HOSTS => {
                    numbers.extend(self.host_numbers());
                }
                Some(value) => {
                    numbers.extend(as_number(value).map(|n| (metric.name.to_owned(), n)));
                }
                None => {}
            }
        }
        numbers
    }

    /// Docker hosts and the numbers of each, by key.
    pub(crate) fn hosts(&self) -> Vec<(&str, Vec<(&str, f64)>)> {
        let hosts = self.get(HOSTS).and_then(Value::as_array).into_iter().flatten();
        hosts.filter_map(|host| Some((host.get("host")?.as_str()?, numbers_of(host)))).collect()
    }

    fn host_numbers(&self) -> Vec<(String, f64)> {
        let named = |(host, numbers): (&str, Vec<(&str, f64)>)| -> Vec<(String, f64)> {
            numbers.into_iter().map(|(key, n)| (format!("{HOSTS}/{host}/{key}"), n)).collect()
        };
        self.hosts().into_iter().flat_map(named).collect()
    }
}

/// Key of the Docker hosts: the only list whose entries are objects.
const HOSTS: &str = "sandbox_hosts";

/// The numbers of an object, by key.
pub(crate) fn numbers_of(value: &Value) -> Vec<(&str, f64)> {
    let members = value.as_object().into_iter().flatten();
    members.filter_map(|(key, member)| Some((key.as_str(), as_number(member)?))).collect()
}

/// A number, or a truth value as 0 or 1.
fn as_number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_bool().map(|is_true| f64::from(u8::from(is_true))))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// Lines as a run journals them: the evaluation before training, and `steps` steps.
    pub(crate) fn run_of(steps: u32) -> Vec<Line> {
        let mut lines = vec![
            Line::new(json!({
                "schema_version": 1, "time": "2026-01-02T03:04:05.5Z", "global_step": 0,
                "policy_version": 0, "eval_tasks": 4, "eval_pass_at_1": 0.25, "eval_broken": 1,
                "time_eval_s": 2.5,
            }))
            .unwrap(),
        ];
        for step in 1..=steps {
            let line = json!({
                "schema_version": 1, "time": format!("2026-01-02T03:05:{step:02}Z"),
                "global_step": step, "policy_version": step, "episodes": 8, "loss": null,
                "reward_mean": 0.1 + f64::from(step) / 3.0,
                "broken_attempts_by_stage": {
                    "setup": 1, "generate": 0, "exec": 0, "collect": 0, "grade": 0, "record": 0,
                },
                "extreme_token_fraction": {"2": 0.01},
                "suspicious": {"tampered \"x\"": 2},
                "ratio": {"mean": 1.5, "max": 2.0, "clipped_high": 0.1, "clipped_low": 0.0},
                "time_rollout_s": 1.5, "loop_lag_p99_ms": 3.0,
                "logprob_diff_histogram": [1, 2, 3],
                "sandbox_hosts": [{"host": "a", "in_service": true, "taken_out": 1, "capacity": 4,
                                   "open": 2, "idle": 0, "started": 9}],
            });
            lines.push(Line::new(line).unwrap());
        }
        lines
    }

    #[test]
    fn numbers_have_flat_names_and_distributions_are_left_out() {
        let lines = run_of(1);
        let names: Vec<String> = lines[1].numbers().into_iter().map(|(name, _)| name).collect();
        assert!(
            !names.iter().any(|name| name.contains("histogram") || name == "loss"),
            "{names:?}"
        );
        for name in
            ["episodes", "ratio/max", "suspicious/tampered \"x\"", "sandbox_hosts/a/in_service"]
        {
            assert!(names.iter().any(|found| found == name), "no {name} in {names:?}");
        }
        assert_eq!(lines[0].number("eval_pass_at_1"), Some(0.25));
        assert_eq!((lines[0].is_evaluation(), lines[1].step()), (true, 1));
        assert!(lines[0].unix_seconds() > 1.7e9);
    }
}
