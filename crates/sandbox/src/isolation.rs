//! Isolation features that not every daemon has: other runtimes, and user namespaces.

use crate::config::UserNamespace;
use crate::daemon::Daemon;
use crate::error::{SandboxError, SandboxErrorKind};
use bollard::models::SystemInfo;

/// Whether the daemon's security options say that it maps the users of containers.
pub(crate) fn maps_users(security: &[String]) -> bool {
    security.iter().any(|option| option.contains("name=userns") || option.contains("name=rootless"))
}

/// Names of the runtimes that the daemon offers, sorted.
pub(crate) fn runtimes(info: &SystemInfo) -> Vec<String> {
    let mut names: Vec<String> =
        info.runtimes.iter().flatten().map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Refuses a daemon that lacks the required runtime or user namespaces.
pub(crate) async fn check(
    daemon: &Daemon,
    runtime: Option<&str>,
    user_namespace: UserNamespace,
) -> Result<(), SandboxError> {
    if runtime.is_none() && user_namespace == UserNamespace::Optional {
        return Ok(());
    }
    let info =
        daemon.call(daemon.docker.info()).await.map_err(|error| error.at(&daemon.host, "info"))?;
    let security = info.security_options.clone().unwrap_or_default();
    match missing_feature(&runtimes(&info), &security, runtime, user_namespace) {
        Some(message) => Err(daemon.error(SandboxErrorKind::Refused { call: "connect", message })),
        None => Ok(()),
    }
}

/// What is missing and what to do about it; `None` if nothing is.
fn missing_feature(
    offered: &[String],
    security: &[String],
    runtime: Option<&str>,
    user_namespace: UserNamespace,
) -> Option<String> {
    if let Some(wanted) = runtime
        && !offered.iter().any(|name| name == wanted)
    {
        return Some(format!(
            "the daemon does not offer the runtime `{wanted}` (sandbox.runtime), only {}; install it \
             and add it to `runtimes` in the daemon's settings, or remove sandbox.runtime",
            offered.join(", ")
        ));
    }
    let unmapped = user_namespace == UserNamespace::Required && !maps_users(security);
    unmapped.then(|| {
        "sandbox.user_namespace is \"required\", but root in a container is root of the host; set \
         userns-remap in the daemon's settings, or use \"optional\""
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_runtime_or_user_namespace_is_named() {
        let offered = ["runc".to_owned(), "runsc".to_owned()];
        let mapped = ["name=seccomp,profile=default".to_owned(), "name=userns".to_owned()];
        let (optional, required) = (UserNamespace::Optional, UserNamespace::Required);
        assert_eq!(missing_feature(&offered, &[], Some("runsc"), optional), None);
        assert_eq!(missing_feature(&offered, &mapped, None, required), None);
        let message = missing_feature(&offered, &mapped, Some("kata"), required).unwrap();
        assert!(message.contains("`kata`") && message.contains("runc, runsc"), "{message}");
        let message = missing_feature(&offered, &mapped[..1], None, required).unwrap();
        assert!(message.contains("userns-remap"), "{message}");
    }
}
