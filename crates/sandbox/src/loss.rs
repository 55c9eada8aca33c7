//! Why a container ended while it was in use, as its daemon recorded it.

use crate::daemon::Daemon;
use bollard::models::EventMessage;
use bollard::query_parameters::EventsOptions;
use futures::StreamExt as _;
use std::collections::HashMap;
use std::time::Duration;

/// How long to wait for the daemon to record the end of a container whose stream has ended.
const RECORD_TIMEOUT: Duration = Duration::from_secs(3);
/// Exit code of a process that was killed by SIGKILL.
const KILLED: &str = "137";

/// Why the container ended, if its own commands caused it: its memory ran out, and the kernel
/// killed process 1. `None` if somebody else ended it, or if the daemon does not tell.
pub(crate) async fn cause(daemon: &Daemon, container: &str) -> Option<&'static str> {
    let filters = [
        ("type", vec!["container".to_owned()]),
        ("container", vec![container.to_owned()]),
        ("event", ["oom", "kill", "die"].map(str::to_owned).to_vec()),
    ];
    let options = EventsOptions {
        // All recorded events, and then the coming ones.
        since: Some("0".to_owned()),
        until: None,
        filters: Some(filters.map(|(name, values)| (name.to_owned(), values)).into()),
    };
    let mut events = daemon.docker.events(Some(options));
    let mut end = EndOfContainer::default();
    let recorded = async {
        while let Some(Ok(event)) = events.next().await {
            if end.record(&event) {
                return true;
            }
        }
        false
    };
    let is_recorded = tokio::time::timeout(RECORD_TIMEOUT, recorded).await.unwrap_or(false);
    (is_recorded && end.is_out_of_memory())
        .then_some("the container's memory ran out, and process 1 was killed")
}

/// What the events of a container say about its end.
#[derive(Debug, Default)]
struct EndOfContainer {
    ran_out_of_memory: bool,
    was_killed_by_request: bool,
    exit_code: Option<String>,
}

impl EndOfContainer {
    /// Records an event. Returns whether it is the last one.
    fn record(&mut self, event: &EventMessage) -> bool {
        match event.action.as_deref() {
            Some("oom") => self.ran_out_of_memory = true,
            Some("kill") => self.was_killed_by_request = true,
            Some("die") => {
                let attributes: Option<&HashMap<String, String>> =
                    event.actor.as_ref().and_then(|actor| actor.attributes.as_ref());
                self.exit_code = attributes.and_then(|all| all.get("exitCode")).cloned();
                return true;
            }
            Some(_) | None => {}
        }
        false
    }

    fn is_out_of_memory(&self) -> bool {
        self.ran_out_of_memory
            && !self.was_killed_by_request
            && self.exit_code.as_deref() == Some(KILLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bollard::models::EventActor;

    fn end(events: &[(&str, &str)]) -> (bool, bool) {
        let mut end = EndOfContainer::default();
        let mut is_last = false;
        for (action, code) in events {
            let attributes = HashMap::from([("exitCode".to_owned(), (*code).to_owned())]);
            is_last = end.record(&EventMessage {
                action: Some((*action).to_owned()),
                actor: Some(EventActor { attributes: Some(attributes), ..EventActor::default() }),
                ..EventMessage::default()
            });
        }
        (is_last, end.is_out_of_memory())
    }

    #[test]
    fn only_process_1_killed_for_lack_of_memory_is_the_commands_doing() {
        assert_eq!(end(&[("oom", ""), ("die", "137")]), (true, true));
        // An ordinary command was killed for lack of memory, and later somebody the container.
        assert_eq!(end(&[("oom", ""), ("kill", ""), ("die", "137")]), (true, false));
        assert_eq!(end(&[("die", "137")]), (true, false));
        assert_eq!(end(&[("oom", ""), ("die", "3")]), (true, false));
        assert_eq!(end(&[("oom", "")]), (false, false));
    }
}
