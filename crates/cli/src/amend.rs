//! Settings that may change when a run resumes: where its servers are, how much runs at the same time, how
//! long it waits, how long it is, and what it is called. What is sampled and trained stays as it was.

use crate::config::{self, ConfigError, Sections};
use crate::error::UsageError;
use camino::Utf8Path;
use toml::Table;

/// Keys that `--resume --set` accepts, listed in `docs/src/operations.md`.
pub(crate) const AMENDABLE: &[&str] = &[
    "run.name",
    "run.tags",
    "run.steps",
    "run.eval_every",
    "run.keep_checkpoints",
    "run.keep_batches",
    "run.shutdown_grace",
    "run.retry_pause",
    "run.max_broken_share",
    "rollout.max_in_flight",
    "rollout.max_attempts",
    "rollout.follow_wait",
    "gateway.listen",
    "gateway.secret_env",
    "gateway.tls_cert",
    "gateway.tls_key",
    "gateway.tls_client_ca",
    "gateway.allowed_hosts",
    "gateway.max_connections",
    "gateway.lease",
    "routing.cache_bytes",
    "routing.spill_bytes",
    "engine.url",
    "engine.urls",
    "engine.discover",
    "engine.api_key_env",
    "engine.tls_ca",
    "engine.tls_cert",
    "engine.tls_key",
    "engine.request_timeout",
    "engine.sync_timeout",
    "engine.start_timeout",
    "engine.max_in_flight",
    "engine.probe_interval",
    "engine.away_timeout",
    "trainer.url",
    "trainer.token_env",
    "trainer.tls_ca",
    "trainer.tls_cert",
    "trainer.tls_key",
    "trainer.step_timeout",
    "sandbox.docker_host",
    "sandbox.hosts",
    "sandbox.max_containers",
    "sandbox.start_parallelism",
    "sandbox.remove_parallelism",
    "sandbox.call_timeout",
    "sandbox.command_grace",
    "sandbox.reuse",
    "sandbox.reuse_lifetime",
    "sandbox.min_free_disk",
    "sandbox.pull",
    "sandbox.mirror",
    "sandbox.pull_parallelism",
    "sandbox.pull_ahead",
    "sandbox.image_cache",
    "sinks.prometheus",
    "sinks.prometheus_token_env",
    "sinks.tensorboard",
    "sinks.csv",
    "sinks.parquet",
    "sinks.flush_timeout",
    "embedded.max_running",
    "embedded.cache_tokens",
    "diagnostics.no_replay_every",
    "diagnostics.on_collapse",
];

/// Keys of which a plan has at most one: a change to one removes the others.
const EXCLUSIVE: &[&[&str]] =
    &[&["engine.url", "engine.urls", "engine.discover"], &["sandbox.docker_host", "sandbox.hosts"]];

/// The key of an assignment like `run.steps=20`.
fn key(assignment: &str) -> &str {
    assignment.split_once('=').map_or(assignment, |(key, _)| key).trim()
}

/// The keys of which `key` may replace the values, itself included.
fn replaced(key: &str) -> Vec<&str> {
    let group = EXCLUSIVE.iter().find(|group| group.contains(&key));
    group.map_or_else(|| vec![key], |group| group.to_vec())
}

/// The assignments that have an effect: later ones replace earlier ones.
fn effective(assignments: &[String]) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    for assignment in assignments {
        let replaced = replaced(key(assignment));
        kept.retain(|earlier| !replaced.contains(&key(earlier)));
        kept.push(assignment.clone());
    }
    kept
}

/// The plan `text` with changed settings; `name` stands for the plan in messages.
///
/// # Errors
/// All problems of the changed plan.
pub(crate) fn amended(
    name: &Utf8Path,
    text: &str,
    assignments: &[String],
) -> Result<Sections, ConfigError> {
    let assignments = effective(assignments);
    let exclusive: Vec<&str> = assignments
        .iter()
        .map(|assignment| replaced(key(assignment)))
        .filter(|keys| keys.len() > 1)
        .flatten()
        .collect();
    if exclusive.is_empty() {
        return config::parse_plan(name.as_str(), text, &assignments);
    }
    let mut plan: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Layer {
        name: name.to_string(),
        error: error.to_string(),
    })?;
    for (section, key) in exclusive.iter().filter_map(|key| key.split_once('.')) {
        if let Some(section) = plan.get_mut(section).and_then(|value| value.as_table_mut()) {
            section.remove(key);
        }
    }
    config::parse_plan(name.as_str(), &plan.to_string(), &assignments)
}

/// Checks that each new assignment may change a run that has started.
///
/// # Errors
/// [`UsageError::Fixed`] with the first key that may not.
pub(crate) fn check(assignments: &[String]) -> Result<(), UsageError> {
    let keys = assignments.iter().map(|assignment| key(assignment));
    match keys.into_iter().find(|key| !AMENDABLE.contains(key)) {
        Some(key) => Err(UsageError::Fixed { key: key.to_owned() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn later_changes_replace_earlier_ones_and_exclusive_keys_each_other() {
        let all =
            strings(&["run.steps=3", "engine.url=\"http://a\"", "run.steps=5", "engine.urls=[]"]);
        assert_eq!(effective(&all), strings(&["run.steps=5", "engine.urls=[]"]));
    }

    #[test]
    fn an_address_replaces_the_plans_list_of_addresses() {
        let plan = "[engine]\nurls = [\"http://a:1\", \"http://b:1\"]\n";
        let changes = strings(&["engine.url=http://c:1", "run.steps=7"]);
        let settings = amended("plan.toml".into(), plan, &changes).unwrap().check().unwrap();
        assert_eq!(settings.engine.url.as_deref(), Some("http://c:1"));
        assert_eq!((settings.engine.urls.as_deref(), settings.run.steps), (None, 7));
    }

    #[test]
    fn every_amendable_key_exists_and_is_documented() {
        let settings = include_str!("../../../docs/src/settings.md");
        let page = include_str!("../../../docs/src/operations.md");
        for key in AMENDABLE {
            let (section, name) = key.split_once('.').unwrap();
            let (_, rows) = settings.split_once(&format!("## `[{section}]`")).unwrap();
            let rows = rows.split_once("\n## ").map_or(rows, |(rows, _)| rows);
            assert!(rows.contains(&format!("\n| `{name}` |")), "{key} is not a setting");
            assert!(
                page.contains(&format!("`{name}`")),
                "docs/src/operations.md does not list {key}"
            );
        }
    }

    #[test]
    fn what_is_sampled_or_trained_is_fixed() {
        assert!(check(&strings(&["run.steps=3", " engine.url = x"])).is_ok());
        let error = check(&strings(&["run.steps=3", "rollout.group_size=4"])).unwrap_err();
        assert!(error.to_string().starts_with("rollout.group_size "), "{error}");
    }
}
