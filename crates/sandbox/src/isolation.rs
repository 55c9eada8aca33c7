//! What settings ask of a daemon beside what every daemon can do: another runtime, mapped users.

use crate::api::{SandboxError, SandboxErrorKind};
use crate::config::SandboxSettings;
use crate::daemon::Daemon;
use bollard::models::SystemInfo;
use serde::{Deserialize, Serialize};

/// Whether a container's root must be somebody else on the host.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum UserNamespace {
    /// As the daemon does it.
    #[default]
    Optional,
    /// It must: a daemon that does not map users is refused.
    Required,
}

/// Whether the daemon, by its own words, gives containers users of their own.
pub(crate) fn maps_users(security: &[String]) -> bool {
    security.iter().any(|option| option.contains("name=userns") || option.contains("name=rootless"))
}

/// Names of the runtimes that the daemon offers, in order.
pub(crate) fn runtimes(info: &SystemInfo) -> Vec<String> {
    let mut names: Vec<String> =
        info.runtimes.iter().flatten().map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Refuses a daemon that cannot do what the settings ask for, by name and with the remedy.
pub(crate) async fn check(daemon: &Daemon, config: &SandboxSettings) -> Result<(), SandboxError> {
    let asks = config.runtime.is_some() || config.user_namespace == UserNamespace::Required;
    if !asks {
        return Ok(());
    }
    let info =
        daemon.call(daemon.docker.info()).await.map_err(|error| error.at(&daemon.host, "info"))?;
    let security = info.security_options.clone().unwrap_or_default();
    let Some(message) = lacking(&runtimes(&info), &security, config) else { return Ok(()) };
    let kind = SandboxErrorKind::Refused { call: "connect", message };
    Err(SandboxError { sandbox: daemon.host.clone(), kind })
}

fn lacking(offered: &[String], security: &[String], config: &SandboxSettings) -> Option<String> {
    if let Some(wanted) = &config.runtime
        && !offered.contains(wanted)
    {
        return Some(format!(
            "the daemon has no runtime `{wanted}` (sandbox.runtime), only {}; install it and name it \
             under `runtimes` in the daemon's settings, or leave sandbox.runtime out",
            offered.join(", ")
        ));
    }
    let unmapped = config.user_namespace == UserNamespace::Required && !maps_users(security);
    unmapped.then(|| {
        "root in its containers is root of the host, and sandbox.user_namespace is \"required\"; \
         set userns-remap in the daemon's settings, or use \"optional\""
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_and_not_there_is_named() {
        let offered = ["runc".to_owned(), "runsc".to_owned()];
        let mapped = ["name=seccomp,profile=default".to_owned(), "name=userns".to_owned()];
        let config = |runtime: Option<&str>, user_namespace| SandboxSettings {
            runtime: runtime.map(str::to_owned),
            user_namespace,
            ..SandboxSettings::default()
        };
        let (optional, required) = (UserNamespace::Optional, UserNamespace::Required);
        assert_eq!(lacking(&offered, &[], &config(Some("runsc"), optional)), None);
        assert_eq!(lacking(&offered, &mapped, &config(None, required)), None);
        let words = lacking(&offered, &mapped, &config(Some("kata"), required)).unwrap();
        assert!(words.contains("`kata`") && words.contains("runc, runsc"), "{words}");
        let words = lacking(&offered, &mapped[..1], &config(None, required)).unwrap();
        assert!(words.contains("userns-remap"), "{words}");
    }
}
