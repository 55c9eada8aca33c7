//! What the system allows this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process open as many files as the system allows it: every generation under way is a
/// connection, and the usual limit is 1,024.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}
