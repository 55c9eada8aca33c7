//! Performs the policy's calls, in its sandbox or by a tool server.
//!
//! The invariant: a mistake of the policy becomes an observation; an error is always a failure of the
//! sandbox or of a tool server.

use crate::editor::{self, Editor};
use crate::scaffold::{
    Call, Change, EditorCommand, Mistake, STDERR_MARKER, Scaffold, ToolLimits, ToolResult,
};
use crate::tool_server::{ToolServerError, ToolSessions};
use orchestrate_sandbox::{Command, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind};
use std::time::Duration;

/// Largest file that is edited or viewed, in bytes.
const MAX_FILE_BYTES: usize = 1 << 20;

/// Prints a regular file's mode, a line end and its content, in one round trip instead of two.
/// Fails for anything else, such as a pipe that would block the reader.
const READ_SCRIPT: &str = r#"[ -f "$1" ] && stat -c %a -- "$1" && exec cat -- "$1""#;

/// Runs command `$2` with bash, with folder `$1` in front of the image's `PATH`.
const BASH_ARGV: [&str; 4] = ["/bin/bash", "-c", r#"PATH=$1:$PATH exec /bin/bash -c "$2""#, "bash"];

/// Runs command `$1` with shell `$2`, with folder `$3`, if any, in front of `PATH`, and prints its
/// stderr after `$4`. The temporary file for stderr is unlinked before the command runs. If it
/// cannot be created, the streams stay merged.
const SEPARATE_STREAMS_SCRIPT: &str = r#"PATH=${3:+$3:}$PATH; export PATH
errors=$(mktemp 2>/dev/null) || exec "$2" -c "$1"
exec 3>"$errors" 4<"$errors"; rm -f "$errors"
"$2" -c "$1" 2>&3 3>&- 4<&-; code=$?
printf %s "$4"; cat <&4; exit $code"#;

/// Lists folders and Python files in folder `$1`, two levels deep and without hidden ones. Exits
/// with 44 if nothing has this name and with 45 if it is not a folder.
const LIST_SCRIPT: &str = r#"[ -e "$1" ] || exit 44; [ -d "$1" ] || exit 45
exec find -L "$1" -maxdepth 2 -not -path '*/.*' '(' -type d -o -name '*.py' ')'"#;

/// Searches `$1` for text `$2`: prints the matching lines of a file, or the number of matching lines
/// in each Python file of a folder, without hidden ones. The first output line says whether `$1` is
/// a file or a folder, and its real path. Exits with 44 if nothing has this name.
const SEARCH_SCRIPT: &str = r#"[ -e "$1" ] || exit 44
at=$(realpath -- "$1" 2>/dev/null) || at=$1
if [ -f "$1" ]; then echo "file $at"; exec grep -n -e "$2" -- "$1"; fi
cd -- "$1" || exit 45
echo "folder $at"
find . -name '.?*' -prune -o -type f -name '*.py' -exec grep -cHF -e "$2" -- {} + | grep -v ':0$'
exit 0"#;

/// Maximum number of files that the search of a folder lists.
const MAX_LISTED_FILES: usize = 100;

/// Timeout of the toolbox's own short commands.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

/// Performs calls in the sandbox of one task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Toolbox<'a> {
    /// The scaffold that the calls belong to.
    pub(crate) scaffold: Scaffold,
    /// The task's working directory.
    pub(crate) workdir: &'a str,
    /// Folder to put first in `PATH`. If there is one, commands run in bash.
    pub(crate) programs: Option<&'a str>,
    /// Variables that the task sets.
    pub(crate) variables: &'a [(&'a str, &'a str)],
    /// Time for one command, and how much of its output is kept.
    pub(crate) limits: ToolLimits,
    /// The attempt's sessions with tool servers.
    pub(crate) servers: &'a ToolSessions,
}

/// A failure of the infrastructure during a call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolFailure {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Server(#[from] ToolServerError),
}

/// The result of reading a file.
enum FileRead {
    Text {
        mode: u32,
        content: String,
    },
    /// The file does not exist or is not a regular file.
    Missing,
    /// The file has no text that can be edited, for this reason.
    Unreadable(&'static str),
}

impl Toolbox<'_> {
    /// Performs one call.
    ///
    /// # Errors
    /// Only for failures of the sandbox or of a tool server.
    pub(crate) async fn perform(
        &self,
        sandbox: &mut dyn Sandbox,
        call: &Call,
        editor: &mut Editor,
    ) -> Result<ToolResult, ToolFailure> {
        Ok(match call {
            Call::Bash { command } => {
                ToolResult::Command(sandbox.exec(&self.command(command)).await?)
            }
            Call::Edit { path, change } => {
                ToolResult::Text(self.edit(sandbox, path, change).await?)
            }
            Call::Editor { path, command: EditorCommand::View { range, concise } } => {
                ToolResult::Text(self.view(sandbox, path, *range, *concise).await?)
            }
            Call::Editor { path, command } => {
                ToolResult::Text(self.edit_with_editor(sandbox, path, command, editor).await?)
            }
            Call::Search { term, path } => {
                ToolResult::Text(self.search(sandbox, term, path).await?)
            }
            Call::Remote { tool, arguments } => {
                let time = self.limits.command_timeout;
                ToolResult::Text(self.servers.call(tool, arguments.clone(), time).await?)
            }
            Call::Submit => ToolResult::Submitted,
        })
    }

    /// The sandbox command that runs the policy's command line.
    fn command(&self, line: &str) -> Command {
        let mut run = Command::shell(line, self.limits.command_timeout);
        if self.scaffold == Scaffold::R2eXml {
            let shell = if self.programs.is_some() { "/bin/bash" } else { "/bin/sh" };
            let folder = self.programs.unwrap_or_default();
            let script = SEPARATE_STREAMS_SCRIPT;
            run.argv =
                owned(&["/bin/sh", "-c", script, "split", line, shell, folder, STDERR_MARKER]);
        } else if let Some(folder) = self.programs {
            run.argv = owned(&[&BASH_ARGV[..], &[folder, line]].concat());
        }
        let variable = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        run.env = self.variables.iter().chain(self.scaffold.environment()).map(variable).collect();
        // A character has at most four bytes. The observation truncates the rest.
        run.keep_bytes = self.limits.observation_chars.saturating_mul(4).max(1024);
        run
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
        let (mode, content) = match read(sandbox, &relative).await? {
            FileRead::Text { mode, content } => (mode, Some(content)),
            FileRead::Missing => (0o644, None),
            FileRead::Unreadable(why) => return Ok(format!("file {path} is {why}")),
        };
        match apply_change(content.as_deref(), path, change) {
            Ok(content) => {
                let file = FileEntry { path: relative, mode, content: content.into_bytes() };
                Ok(match write(sandbox, file).await? {
                    Ok(()) => "ok".to_owned(),
                    Err(mistake) => format!("cannot write {mistake}"),
                })
            }
            Err(mistake) => Ok(mistake.text),
        }
    }

    /// Performs an edit with R2E-Gym's editor.
    async fn edit_with_editor(
        &self,
        sandbox: &mut dyn Sandbox,
        path: &str,
        command: &EditorCommand,
        editor: &mut Editor,
    ) -> Result<String, SandboxError> {
        let Some(relative) = self.relative(path) else {
            return Ok(format!("ERROR: The path '{path}' is outside {}.", self.workdir));
        };
        let (mode, content) = match read(sandbox, &relative).await? {
            FileRead::Text { mode, content } => (mode, Some(content)),
            FileRead::Missing => (0o644, None),
            FileRead::Unreadable(why) => return Ok(format!("ERROR: The file {path} is {why}.")),
        };
        match editor.edit(&relative, path, content.as_deref(), command) {
            Ok(edited) => {
                let content = edited.text.into_bytes();
                let file = FileEntry { path: relative, mode, content };
                Ok(match write(sandbox, file).await? {
                    Ok(()) => edited.observation,
                    Err(mistake) => format!("ERROR: cannot write {mistake}"),
                })
            }
            Err(mistake) => Ok(format!("ERROR: {mistake}")),
        }
    }

    /// Shows a file or a folder anywhere in the sandbox.
    async fn view(
        &self,
        sandbox: &mut dyn Sandbox,
        path: &str,
        range: Option<(i64, i64)>,
        concise: bool,
    ) -> Result<String, SandboxError> {
        let Some(argument) = path_argument(path) else {
            return Ok(format!("ERROR: The path '{path}' does not exist."));
        };
        let listed =
            sandbox.exec(&helper(&["/bin/sh", "-c", LIST_SCRIPT, "list", &argument])).await?;
        match listed.exit {
            Exit::Code(45) => {}
            Exit::Code(44) => return Ok(format!("ERROR: The path '{path}' does not exist.")),
            Exit::Code(_) | Exit::Signal(_) | Exit::TimedOut | Exit::NotStarted | Exit::Stopped => {
                let listed = format!(
                    "Here's the files and directories up to 2 levels deep in {path}, excluding \
                     hidden:\n{}",
                    listed.text()
                );
                return Ok(editor::clip(listed));
            }
        }
        if let Err(mistake) = editor::check_viewable(path) {
            return Ok(format!("ERROR: {mistake}"));
        }
        let content = match read(sandbox, &argument).await? {
            FileRead::Text { content, .. } => content,
            FileRead::Missing => {
                return Ok(format!("ERROR: The path '{path}' is not a regular file."));
            }
            FileRead::Unreadable(why) => return Ok(format!("ERROR: The file {path} is {why}.")),
        };
        let path = path.to_owned();
        // Parsing a large file takes milliseconds.
        let viewed =
            tokio::task::spawn_blocking(move || editor::view(&path, &content, range, concise));
        Ok(match viewed.await {
            Ok(Ok(shown)) => shown,
            Ok(Err(mistake)) => format!("ERROR: {mistake}"),
            Err(error) => format!("ERROR: the file cannot be shown: {error}"),
        })
    }

    /// Searches a file or folder anywhere in the sandbox for a text.
    async fn search(
        &self,
        sandbox: &mut dyn Sandbox,
        term: &str,
        path: &str,
    ) -> Result<String, SandboxError> {
        let argument = path_argument(path).filter(|_| !term.contains('\0'));
        let Some(argument) = argument else {
            return Ok(format!("Directory '{path}' not found or not a directory."));
        };
        let mut search = helper(&["/bin/sh", "-c", SEARCH_SCRIPT, "search", &argument, term]);
        search.timeout = self.limits.command_timeout;
        let result = sandbox.exec(&search).await?;
        Ok(match result.exit {
            Exit::Code(code @ (0..=2)) => search_observation(&result.text(), term, code),
            Exit::TimedOut => "The search took too long. Please narrow it.".to_owned(),
            Exit::Code(_) | Exit::Signal(_) | Exit::NotStarted | Exit::Stopped => {
                format!("Directory '{path}' not found or not a directory.")
            }
        })
    }

    /// `path` relative to the working directory, without `.` parts; `None` if it is outside.
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

fn owned(argv: &[&str]) -> Vec<String> {
    argv.iter().map(|&argument| argument.to_owned()).collect()
}

fn helper(argv: &[&str]) -> Command {
    let (env, keep_bytes) = (Vec::new(), MAX_FILE_BYTES);
    Command { argv: owned(argv), env, timeout: HELPER_TIMEOUT, keep_bytes }
}

/// A path as a program argument that cannot be read as an option; `None` if it is
/// empty or contains a NUL.
fn path_argument(path: &str) -> Option<String> {
    let is_valid = !path.is_empty() && !path.contains('\0');
    // An expression of `find` starts with one of these characters.
    let is_plain = !path.starts_with(['-', '(', ')', ',', '!']);
    is_valid.then(|| if is_plain { path.to_owned() } else { format!("./{path}") })
}

async fn read(sandbox: &mut dyn Sandbox, path: &str) -> Result<FileRead, SandboxError> {
    let read = sandbox.exec(&helper(&["/bin/sh", "-c", READ_SCRIPT, "sh", path])).await?;
    if !read.success() {
        return Ok(FileRead::Missing);
    }
    if read.total_bytes > MAX_FILE_BYTES as u64 {
        return Ok(FileRead::Unreadable("too large to edit"));
    }
    let Ok(text) = String::from_utf8([read.head, read.tail].concat()) else {
        return Ok(FileRead::Unreadable("not UTF-8 text"));
    };
    let (mode, content) = text.split_once('\n').unwrap_or_default();
    let mode = u32::from_str_radix(mode, 8).unwrap_or(0o644);
    Ok(FileRead::Text { mode, content: content.to_owned() })
}

/// Writes a file. The inner error says why its path cannot be written, which is a mistake of the
/// policy or the result of its commands.
async fn write(
    sandbox: &mut dyn Sandbox,
    file: FileEntry,
) -> Result<Result<(), Mistake>, SandboxError> {
    match sandbox.write_files(&[file]).await {
        Ok(()) => Ok(Ok(())),
        Err(SandboxError { kind: SandboxErrorKind::Refused { message, .. }, .. }) => {
            Ok(Err(Mistake::new(message)))
        }
        Err(error) => Err(error),
    }
}

/// The file's text after a change. `content` is `None` if the file does not exist.
fn apply_change(content: Option<&str>, path: &str, change: &Change) -> Result<String, Mistake> {
    let mistake = |text: &str| Err(Mistake::new(text.to_owned()));
    match (content, change) {
        (None, Change::Replace { old, new }) if old.is_empty() => Ok(new.clone()),
        (Some(_), Change::Replace { old, .. }) if old.is_empty() => {
            mistake(&format!("file {path} exists"))
        }
        (None, Change::Replace { .. } | Change::Line { .. }) => mistake(&format!("no file {path}")),
        (Some(content), Change::Replace { old, new }) => match content.matches(old).count() {
            0 => mistake("old_str not found"),
            1 => Ok(content.replacen(old, new, 1)),
            count => mistake(&format!("old_str found {count} times")),
        },
        (Some(content), Change::Line { line, new }) => {
            let mut lines: Vec<&str> = content.split_inclusive('\n').collect();
            let slot = line.checked_sub(1).and_then(|index| lines.get_mut(index));
            let Some(slot) = slot else { return mistake(&format!("no line {line}")) };
            let replaced = if slot.ends_with('\n') { format!("{new}\n") } else { new.clone() };
            *slot = &replaced;
            Ok(lines.concat())
        }
    }
}

/// The observation of a search, from the output of its script.
fn search_observation(output: &str, term: &str, code: i32) -> String {
    let (place, matches) = output.split_once('\n').unwrap_or((output, ""));
    let matches = matches.trim_end();
    if let Some(file) = place.strip_prefix("file ") {
        return match code {
            0 => format!("Matches for \"{term}\" in {file}:\n{matches}"),
            1 => format!("No matches found for \"{term}\" in {file}"),
            _ => format!("Error executing grep:\n{matches}"),
        };
    }
    let folder = place.strip_prefix("folder ").unwrap_or(place);
    let files: Vec<(&str, u64)> = matches
        .lines()
        .filter_map(|line| line.rsplit_once(':'))
        .filter_map(|(file, count)| Some((file, count.parse().ok()?)))
        .collect();
    if files.is_empty() {
        return format!("No matches found for \"{term}\" in {folder}");
    }
    if files.len() > MAX_LISTED_FILES {
        let count = files.len();
        return format!(
            "More than {count} files matched for \"{term}\" in {folder}. Please narrow your search."
        );
    }
    let total: u64 = files.iter().map(|(_, count)| count).sum();
    let lines: Vec<String> =
        files.iter().map(|(file, count)| format!("{file} ({count} matches)\n")).collect();
    format!(
        "Found {total} matches for \"{term}\" in {folder}:\n{}End of matches for \"{term}\" in \
         {folder}",
        lines.concat()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_the_working_directory() {
        let toolbox = Toolbox {
            scaffold: Scaffold::Tools,
            workdir: "/testbed",
            programs: None,
            variables: &[],
            limits: ToolLimits { command_timeout: Duration::from_secs(1), observation_chars: 10 },
            servers: &ToolSessions::default(),
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

    #[test]
    fn edits_have_fixed_observations() {
        let replace = |old: &str| Change::Replace { old: old.to_owned(), new: "Z".to_owned() };
        let line = |line| Change::Line { line, new: "Z".to_owned() };
        let file = Some("a\nb\nb");
        assert_eq!(apply_change(file, "f", &replace("a")).unwrap(), "Z\nb\nb");
        assert_eq!(
            apply_change(file, "f", &replace("b")).unwrap_err().text,
            "old_str found 2 times"
        );
        assert_eq!(apply_change(file, "f", &replace("c")).unwrap_err().text, "old_str not found");
        assert_eq!(apply_change(None, "f", &replace("c")).unwrap_err().text, "no file f");
        assert_eq!(apply_change(None, "f", &replace("")).unwrap(), "Z");
        assert_eq!(apply_change(file, "f", &replace("")).unwrap_err().text, "file f exists");
        assert_eq!(apply_change(file, "f", &line(2)).unwrap(), "a\nZ\nb");
        assert_eq!(apply_change(file, "f", &line(3)).unwrap(), "a\nb\nZ");
        assert_eq!(apply_change(file, "f", &line(4)).unwrap_err().text, "no line 4");
        assert_eq!(apply_change(file, "f", &line(0)).unwrap_err().text, "no line 0");
        assert_eq!(apply_change(None, "f", &line(1)).unwrap_err().text, "no file f");
    }

    #[test]
    fn search_observations_are_formatted_as_by_r2e_gym() {
        let text = |output: &str, code| search_observation(output, "x", code);
        assert_eq!(text("file /t/a.py\n3:x = 1\n", 0), "Matches for \"x\" in /t/a.py:\n3:x = 1");
        assert_eq!(text("file /t/a.py\n", 1), "No matches found for \"x\" in /t/a.py");
        assert_eq!(text("file /t/a.py\ngrep: bad\n", 2), "Error executing grep:\ngrep: bad");
        assert_eq!(text("folder /t\n", 0), "No matches found for \"x\" in /t");
        assert_eq!(
            text("folder /t\n./a.py:2\n./b/c:d.py:1\n", 0),
            "Found 3 matches for \"x\" in /t:\n./a.py (2 matches)\n./b/c:d.py (1 matches)\nEnd of \
             matches for \"x\" in /t"
        );
        let many: Vec<String> = (0..101).map(|n| format!("./{n}.py:1\n")).collect();
        let many = text(&format!("folder /t\n{}", many.concat()), 0);
        assert!(many.starts_with("More than 101 files matched for \"x\" in /t."), "{many}");
    }
}
