//! Settings that may change when a run resumes: where its servers are, how much runs at the same time, how
//! long it waits, how long it is, and what it is called. What is sampled and trained stays as it was.

use crate::config::{self, RENAMES};
use crate::error::UsageError;

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
    "engine.sync_timeout",
    "engine.start_timeout",
    "engine.max_in_flight",
    "engine.probe_interval",
    "engine.out_of_service_timeout",
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

/// The key of an assignment like `run.steps=20`, by its present name.
fn key(assignment: &str) -> &str {
    let written = assignment.split_once('=').map_or(assignment, |(key, _)| key).trim();
    let renamed = RENAMES.keys.iter().find(|(old, _)| *old == written);
    renamed.map_or(written, |(_, new)| new)
}

/// An assignment as it is recorded: with the key's present name, and with absolute paths.
///
/// # Errors
/// If it cannot be read, or the current folder is not known.
pub(crate) fn recorded(assignment: &str) -> anyhow::Result<String> {
    let key = key(assignment);
    let written = config::parse_assignment(assignment)?;
    let absolute = written.with_absolute_paths()?;
    let value = if absolute == written {
        assignment.split_once('=').map(|(_, value)| value.trim().to_owned())
    } else {
        let whole = toml::Value::try_from(&absolute)?;
        let value = key.split('.').try_fold(&whole, |table, name| table.get(name));
        value.map(ToString::to_string)
    };
    Ok(format!("{key}={}", value.unwrap_or_default()))
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
    fn changes_are_recorded_by_their_present_names() {
        let recorded = |assignment| recorded(assignment).unwrap();
        assert_eq!(recorded("engine.away_timeout=3m"), "engine.out_of_service_timeout=3m");
        assert_eq!(recorded("run.name=\"a=b\""), "run.name=\"a=b\"");
    }

    #[test]
    fn paths_are_recorded_as_absolute_ones() {
        let current = std::env::current_dir().unwrap();
        let expected = format!("engine.tls_ca=\"{}/ca.pem\"", current.display());
        for written in ["ca.pem", "\"./ca.pem\"", "none/../ca.pem"] {
            assert_eq!(recorded(&format!("engine.tls_ca = {written}")).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_sampled_or_trained_is_fixed() {
        assert!(
            check(&strings(&["run.steps=3", " engine.url = x", "engine.away_timeout=5m"])).is_ok()
        );
        let error = check(&strings(&["run.steps=3", "rollout.group_size=4"])).unwrap_err();
        assert!(error.to_string().starts_with("rollout.group_size "), "{error}");
    }
}
