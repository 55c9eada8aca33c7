//! Performs the policy's calls in its sandbox.

use crate::actions::{Call, Change, bash_observation, capped, changed};
use orchestrate_sandbox::{Command, FileEntry, Sandbox, SandboxError};
use std::time::Duration;

/// Largest file that `edit` changes, in bytes.
const MAX_EDIT_BYTES: usize = 1 << 20;

/// Prints a file's mode, a line end, and its content: one round trip instead of two. A folder or
/// an absent file fails.
const READ_SCRIPT: &str = r#"stat -c %a -- "$1" && exec cat -- "$1""#;

/// Runs a command by bash, with one more folder in front of the image's `PATH`.
const IN_BASH: [&str; 4] = ["/bin/bash", "-c", r#"PATH=$1:$PATH exec /bin/bash -c "$2""#, "bash"];

/// Time for the short helper commands.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

/// How calls are performed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Toolbox<'a> {
    /// Working directory of the task.
    pub(crate) workdir: &'a str,
    /// Folder that comes first in `PATH`; where there is one, commands are run by bash.
    pub(crate) programs: Option<&'a str>,
    /// Time for one command.
    pub(crate) command_timeout: Duration,
    /// Characters of one observation.
    pub(crate) observation_chars: usize,
}

impl Toolbox<'_> {
    /// Performs one call; `None` for `submit`. Only failures of the sandbox itself are errors.
    pub(crate) async fn perform(
        &self,
        sandbox: &mut dyn Sandbox,
        call: &Call,
    ) -> Result<Option<String>, SandboxError> {
        let observation = match call {
            Call::Bash { command } => {
                let mut run = Command::shell(command.as_str(), self.command_timeout);
                if let Some(folder) = self.programs {
                    run.argv =
                        IN_BASH.iter().chain(&[folder, command]).map(|&a| a.into()).collect();
                }
                // Characters are at most four bytes; more than this is cut again below.
                run.keep_bytes = self.observation_chars.saturating_mul(4).max(1024);
                bash_observation(&sandbox.exec(&run).await?, self.command_timeout)
            }
            Call::Edit { path, change } => self.edit(sandbox, path, change).await?,
            Call::Submit => return Ok(None),
        };
        Ok(Some(capped(observation, self.observation_chars)))
    }

    async fn edit(
        &self,
        sandbox: &mut dyn Sandbox,
        path: &str,
        change: &Change,
    ) -> Result<String, SandboxError> {
        let Some(relative) = self.relative(path) else {
            return Ok(format!("path {path} is outside {}", self.workdir));
        };
        let argv = ["/bin/sh", "-c", READ_SCRIPT, "sh", &relative];
        let read = Command {
            argv: argv.map(ToOwned::to_owned).to_vec(),
            env: Vec::new(),
            timeout: HELPER_TIMEOUT,
            keep_bytes: MAX_EDIT_BYTES,
        };
        let read = sandbox.exec(&read).await?;
        if read.success() && read.total_bytes > MAX_EDIT_BYTES as u64 {
            return Ok(format!("file {path} is too large to edit"));
        }
        let text = if read.success() {
            match String::from_utf8([read.head, read.tail].concat()) {
                Ok(text) => Some(text),
                Err(_) => return Ok(format!("file {path} is not UTF-8 text")),
            }
        } else {
            None
        };
        let (mode, content) = match text.as_deref().and_then(|text| text.split_once('\n')) {
            Some((mode, content)) => (u32::from_str_radix(mode, 8).unwrap_or(0o644), Some(content)),
            None => (0o644, None),
        };
        match changed(content, path, change) {
            Ok(content) => {
                let file = FileEntry { path: relative, mode, content: content.into_bytes() };
                sandbox.write_files(&[file]).await?;
                Ok("ok".to_owned())
            }
            Err(observation) => Ok(observation),
        }
    }

    /// `path` relative to the working directory, without `.` parts; `None` if it leads outside.
    fn relative(&self, path: &str) -> Option<String> {
        let inside = match path.strip_prefix(self.workdir.trim_end_matches('/')) {
            Some(rest) if rest.starts_with('/') => rest.trim_start_matches('/'),
            Some(_) | None => path,
        };
        let parts: Vec<&str> = inside.split('/').filter(|part| *part != ".").collect();
        let outside =
            parts.iter().any(|part| part.is_empty() || *part == ".." || part.contains('\0'));
        (!outside && !parts.is_empty()).then(|| parts.join("/"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_the_working_directory() {
        let toolbox = Toolbox {
            workdir: "/testbed",
            programs: None,
            command_timeout: Duration::from_secs(1),
            observation_chars: 10,
        };
        for (path, expected) in [
            ("a.py", Some("a.py")),
            ("./src/a.py", Some("src/a.py")),
            ("/testbed/src/a.py", Some("src/a.py")),
            ("/testbed", None),
            ("/testbed2/a.py", None),
            ("/etc/passwd", None),
            ("../a.py", None),
            ("src/../../a.py", None),
            ("src//a.py", None),
            ("", None),
        ] {
            assert_eq!(toolbox.relative(path).as_deref(), expected, "{path}");
        }
    }
}
