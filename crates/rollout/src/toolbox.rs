//! Performs the policy's calls in its sandbox.

use crate::editor::{self, Editor};
use crate::scaffold::{Call, Change, EditorCommand, Scaffold, Terms};
use orchestrate_sandbox::{
    Command, ExecResult, Exit, FileEntry, Sandbox, SandboxError, SandboxErrorKind,
};
use std::time::Duration;

/// Largest file that is edited or viewed, in bytes.
const MAX_FILE_BYTES: usize = 1 << 20;

/// Prints a regular file's mode, a line end, and its content: one round trip instead of two.
/// Anything else fails, and so cannot keep the reader waiting.
const READ_SCRIPT: &str = r#"[ -f "$1" ] && stat -c %a -- "$1" && exec cat -- "$1""#;

/// Runs a command by bash, with one more folder in front of the image's `PATH`.
const IN_BASH: [&str; 4] = ["/bin/bash", "-c", r#"PATH=$1:$PATH exec /bin/bash -c "$2""#, "bash"];

/// Runs a command by shell `$2`, with folder `$3`, if any, in front of `PATH`; what it wrote to
/// stderr comes after `$4`. The file for that has no name any more while the command runs. Where none
/// can be made, the streams stay merged.
const SPLIT: &str = r#"PATH=${3:+$3:}$PATH; export PATH
errors=$(mktemp 2>/dev/null) || exec "$2" -c "$1"
exec 3>"$errors" 4<"$errors"; rm -f "$errors"
"$2" -c "$1" 2>&3 3>&- 4<&-; code=$?
printf %s "$4"; cat <&4; exit $code"#;

/// Begin of what a command wrote to stderr, where the streams are told apart.
pub(crate) const ERRORS_BEGIN: &str = "\n[orchestrate: stderr]\n";

/// Lists folder `$1` two levels deep: folders and Python files, nothing hidden. Ends with 44 if there
/// is nothing of this name and with 45 if it is no folder.
const LIST_SCRIPT: &str = r#"[ -e "$1" ] || exit 44; [ -d "$1" ] || exit 45
exec find -L "$1" -maxdepth 2 -not -path '*/.*' '(' -type d -o -name '*.py' ')'"#;

/// Looks for text `$2` in `$1`: the lines of a file, or how many lines each Python file of a folder
/// has with it, hidden ones left out. Ends with 44 if there is nothing of this name; the first line
/// says what was found to be there, and where.
const SEARCH_SCRIPT: &str = r#"[ -e "$1" ] || exit 44
at=$(realpath -- "$1" 2>/dev/null) || at=$1
if [ -f "$1" ]; then echo "file $at"; exec grep -n -e "$2" -- "$1"; fi
cd -- "$1" || exit 45
echo "folder $at"
find . -name '.?*' -prune -o -type f -name '*.py' -exec grep -cHF -e "$2" -- {} + | grep -v ':0$'
exit 0"#;

/// Files that a search of a folder names.
const MAX_FOUND: usize = 100;

/// Time for the short helper commands.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

/// How calls are performed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Toolbox<'a> {
    /// Whose calls they are.
    pub(crate) scaffold: Scaffold,
    /// Working directory of the task.
    pub(crate) workdir: &'a str,
    /// Folder that comes first in `PATH`; where there is one, commands are run by bash.
    pub(crate) programs: Option<&'a str>,
    /// Time for one command, and how much of its output is kept.
    pub(crate) terms: Terms,
}

/// What came of a call.
#[derive(Debug)]
pub(crate) enum Done {
    /// A command of the policy ended.
    Ran(ExecResult),
    /// One of our tools answers.
    Said(String),
    /// The policy ended the episode.
    Submitted,
}

/// A file as it was read.
enum Found {
    Text {
        mode: u32,
        content: String,
    },
    /// No such file, or no regular one.
    None,
    /// Why its text cannot be had.
    Unfit(&'static str),
}

impl Toolbox<'_> {
    /// Performs one call. Only failures of the sandbox itself are errors.
    pub(crate) async fn perform(
        &self,
        sandbox: &mut dyn Sandbox,
        call: &Call,
        editor: &mut Editor,
    ) -> Result<Done, SandboxError> {
        Ok(match call {
            Call::Bash { command } => Done::Ran(sandbox.exec(&self.command(command)).await?),
            Call::Edit { path, change } => Done::Said(self.edit(sandbox, path, change).await?),
            Call::Editor { path, command: EditorCommand::View { range, concise } } => {
                Done::Said(self.view(sandbox, path, *range, *concise).await?)
            }
            Call::Editor { path, command } => {
                Done::Said(self.edit_by(sandbox, path, command, editor).await?)
            }
            Call::Search { term, path } => Done::Said(self.search(sandbox, term, path).await?),
            Call::Submit => Done::Submitted,
        })
    }

    /// A command line of the policy.
    fn command(&self, line: &str) -> Command {
        let mut run = Command::shell(line, self.terms.command_timeout);
        if self.scaffold == Scaffold::R2eXml {
            let shell = if self.programs.is_some() { "/bin/bash" } else { "/bin/sh" };
            let folder = self.programs.unwrap_or_default();
            run.argv = owned(&["/bin/sh", "-c", SPLIT, "split", line, shell, folder, ERRORS_BEGIN]);
        } else if let Some(folder) = self.programs {
            run.argv = owned(&[&IN_BASH[..], &[folder, line]].concat());
        }
        let variable = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        run.env = self.scaffold.environment().iter().map(variable).collect();
        // Characters are at most four bytes; more than this is cut again in the observation.
        run.keep_bytes = self.terms.observation_chars.saturating_mul(4).max(1024);
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
            Found::Text { mode, content } => (mode, Some(content)),
            Found::None => (0o644, None),
            Found::Unfit(why) => return Ok(format!("file {path} is {why}")),
        };
        match changed(content.as_deref(), path, change) {
            Ok(content) => {
                let file = FileEntry { path: relative, mode, content: content.into_bytes() };
                let written = write(sandbox, file).await?;
                Ok(written.map_or_else(|why| format!("cannot write {why}"), |()| "ok".to_owned()))
            }
            Err(observation) => Ok(observation),
        }
    }

    /// An edit by R2E-Gym's editor.
    async fn edit_by(
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
            Found::Text { mode, content } => (mode, Some(content)),
            Found::None => (0o644, None),
            Found::Unfit(why) => return Ok(format!("ERROR: The file {path} is {why}.")),
        };
        match editor.edit(&relative, path, content.as_deref(), command) {
            Ok(edited) => {
                let content = edited.text.into_bytes();
                let written = write(sandbox, FileEntry { path: relative, mode, content }).await?;
                Ok(written
                    .map_or_else(|why| format!("ERROR: cannot write {why}"), |()| edited.said))
            }
            Err(error) => Ok(format!("ERROR: {error}")),
        }
    }

    /// Shows a file or a folder, wherever it is in the sandbox.
    async fn view(
        &self,
        sandbox: &mut dyn Sandbox,
        path: &str,
        range: Option<(i64, i64)>,
        concise: bool,
    ) -> Result<String, SandboxError> {
        let Some(place) = named(path) else {
            return Ok(format!("ERROR: The path '{path}' does not exist."));
        };
        let listed = sandbox.exec(&helper(&["/bin/sh", "-c", LIST_SCRIPT, "list", &place])).await?;
        match listed.exit {
            Exit::Code(45) => {}
            Exit::Code(44) => return Ok(format!("ERROR: The path '{path}' does not exist.")),
            Exit::Code(_) | Exit::Signal(_) | Exit::TimedOut | Exit::NotStarted => {
                let listed = format!(
                    "Here's the files and directories up to 2 levels deep in {path}, excluding \
                     hidden:\n{}",
                    listed.text()
                );
                return Ok(editor::clipped(listed));
            }
        }
        if let Some(why) = editor::not_viewable(path) {
            return Ok(format!("ERROR: {why}"));
        }
        let content = match read(sandbox, &place).await? {
            Found::Text { content, .. } => content,
            Found::None => return Ok(format!("ERROR: The path '{path}' is not a regular file.")),
            Found::Unfit(why) => return Ok(format!("ERROR: The file {path} is {why}.")),
        };
        let path = path.to_owned();
        // A large file takes long to parse.
        let viewed =
            tokio::task::spawn_blocking(move || editor::view(&path, &content, range, concise));
        Ok(match viewed.await {
            Ok(Ok(shown)) => shown,
            Ok(Err(error)) => format!("ERROR: {error}"),
            Err(error) => format!("ERROR: the file cannot be shown: {error}"),
        })
    }

    /// Looks for a text, wherever in the sandbox.
    async fn search(
        &self,
        sandbox: &mut dyn Sandbox,
        term: &str,
        path: &str,
    ) -> Result<String, SandboxError> {
        let place = named(path).filter(|_| !term.contains('\0'));
        let Some(place) = place else {
            return Ok(format!("Directory '{path}' not found or not a directory."));
        };
        let mut search = helper(&["/bin/sh", "-c", SEARCH_SCRIPT, "search", &place, term]);
        search.timeout = self.terms.command_timeout;
        let result = sandbox.exec(&search).await?;
        Ok(match result.exit {
            Exit::Code(code @ (0..=2)) => found(&result.text(), term, code),
            Exit::TimedOut => "The search took too long. Please narrow it.".to_owned(),
            Exit::Code(_) | Exit::Signal(_) | Exit::NotStarted => {
                format!("Directory '{path}' not found or not a directory.")
            }
        })
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

fn owned(argv: &[&str]) -> Vec<String> {
    argv.iter().map(|&argument| argument.to_owned()).collect()
}

fn helper(argv: &[&str]) -> Command {
    let (env, keep_bytes) = (Vec::new(), MAX_FILE_BYTES);
    Command { argv: owned(argv), env, timeout: HELPER_TIMEOUT, keep_bytes }
}

/// A path as programs take it: never an option, never one that no argument can hold.
fn named(path: &str) -> Option<String> {
    let fits = !path.is_empty() && !path.contains('\0');
    // With these `find` begins an expression.
    let reads_as_path = !path.starts_with(['-', '(', ')', ',', '!']);
    fits.then(|| if reads_as_path { path.to_owned() } else { format!("./{path}") })
}

async fn read(sandbox: &mut dyn Sandbox, path: &str) -> Result<Found, SandboxError> {
    let read = sandbox.exec(&helper(&["/bin/sh", "-c", READ_SCRIPT, "sh", path])).await?;
    if !read.success() {
        return Ok(Found::None);
    }
    if read.total_bytes > MAX_FILE_BYTES as u64 {
        return Ok(Found::Unfit("too large to edit"));
    }
    let Ok(text) = String::from_utf8([read.head, read.tail].concat()) else {
        return Ok(Found::Unfit("not UTF-8 text"));
    };
    let (mode, content) = text.split_once('\n').unwrap_or_default();
    let mode = u32::from_str_radix(mode, 8).unwrap_or(0o644);
    Ok(Found::Text { mode, content: content.to_owned() })
}

/// Writes a file; the inner error says why its path cannot be one. That is the policy's doing, or its
/// commands'.
async fn write(
    sandbox: &mut dyn Sandbox,
    file: FileEntry,
) -> Result<Result<(), String>, SandboxError> {
    match sandbox.write_files(&[file]).await {
        Ok(()) => Ok(Ok(())),
        Err(SandboxError { kind: SandboxErrorKind::Refused { message, .. }, .. }) => {
            Ok(Err(message))
        }
        Err(error) => Err(error),
    }
}

/// The file's text after a change, or the observation that tells why there is none. `content` is
/// `None` if there is no such file.
fn changed(content: Option<&str>, path: &str, change: &Change) -> Result<String, String> {
    match (content, change) {
        (None, Change::Replace { old, new }) if old.is_empty() => Ok(new.clone()),
        (Some(_), Change::Replace { old, .. }) if old.is_empty() => {
            Err(format!("file {path} exists"))
        }
        (None, Change::Replace { .. } | Change::Line { .. }) => Err(format!("no file {path}")),
        (Some(content), Change::Replace { old, new }) => match content.matches(old).count() {
            0 => Err("old_str not found".to_owned()),
            1 => Ok(content.replacen(old, new, 1)),
            count => Err(format!("old_str found {count} times")),
        },
        (Some(content), Change::Line { line, new }) => {
            let mut lines: Vec<&str> = content.split_inclusive('\n').collect();
            let slot = line.checked_sub(1).and_then(|index| lines.get_mut(index));
            let Some(slot) = slot else { return Err(format!("no line {line}")) };
            let replaced = if slot.ends_with('\n') { format!("{new}\n") } else { new.clone() };
            *slot = &replaced;
            Ok(lines.concat())
        }
    }
}

/// The answer of a search, from what its script printed.
fn found(printed: &str, term: &str, code: i32) -> String {
    let (place, found) = printed.split_once('\n').unwrap_or((printed, ""));
    let found = found.trim_end();
    if let Some(file) = place.strip_prefix("file ") {
        return match code {
            0 => format!("Matches for \"{term}\" in {file}:\n{found}"),
            1 => format!("No matches found for \"{term}\" in {file}"),
            _ => format!("Error executing grep:\n{found}"),
        };
    }
    let folder = place.strip_prefix("folder ").unwrap_or(place);
    let files: Vec<(&str, u64)> = found
        .lines()
        .filter_map(|line| line.rsplit_once(':'))
        .filter_map(|(file, count)| Some((file, count.parse().ok()?)))
        .collect();
    if files.is_empty() {
        return format!("No matches found for \"{term}\" in {folder}");
    }
    if files.len() > MAX_FOUND {
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
            terms: Terms { command_timeout: Duration::from_secs(1), observation_chars: 10 },
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
    fn edits_answer_with_the_agreed_words() {
        let replace = |old: &str| Change::Replace { old: old.to_owned(), new: "Z".to_owned() };
        let line = |line| Change::Line { line, new: "Z".to_owned() };
        let file = Some("a\nb\nb");
        assert_eq!(changed(file, "f", &replace("a")).unwrap(), "Z\nb\nb");
        assert_eq!(changed(file, "f", &replace("b")).unwrap_err(), "old_str found 2 times");
        assert_eq!(changed(file, "f", &replace("c")).unwrap_err(), "old_str not found");
        assert_eq!(changed(None, "f", &replace("c")).unwrap_err(), "no file f");
        assert_eq!(changed(None, "f", &replace("")).unwrap(), "Z");
        assert_eq!(changed(file, "f", &replace("")).unwrap_err(), "file f exists");
        assert_eq!(changed(file, "f", &line(2)).unwrap(), "a\nZ\nb");
        assert_eq!(changed(file, "f", &line(3)).unwrap(), "a\nb\nZ");
        assert_eq!(changed(file, "f", &line(4)).unwrap_err(), "no line 4");
        assert_eq!(changed(file, "f", &line(0)).unwrap_err(), "no line 0");
        assert_eq!(changed(None, "f", &line(1)).unwrap_err(), "no file f");
    }

    #[test]
    fn searches_are_told_as_r2e_gym_tells_them() {
        let text = |printed: &str, code| found(printed, "x", code);
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
