//! The `mini` scaffold: mini-swe-agent's protocol, with one bash block per turn. A command whose
//! output starts with a fixed line submits.

use super::call::{Call, Mistake, ToolLimits};
use super::truncate::head_and_tail;
use crate::api::Action;
use orchestrate_sandbox::{ExecResult, Exit};

pub(super) const SYSTEM: &str = include_str!("mini_system.txt");
pub(super) const TASK: &str = include_str!("mini_task.txt");

/// First output line of the command that submits.
const SUBMIT_LINE: &str = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT";

/// Stops programs from opening a pager or drawing progress bars.
pub(super) const ENVIRONMENT: [(&str, &str); 5] = [
    ("PAGER", "cat"),
    ("MANPAGER", "cat"),
    ("LESS", "-R"),
    ("PIP_PROGRESS_BAR", "off"),
    ("TQDM_DISABLE", "1"),
];

/// Openings of a command block: mini-swe-agent's own, which leaves `bash` for examples, and the
/// common one, which counts only if there is no block of the first kind.
const FENCES: [&str; 2] = ["```mswea_bash_command", "```bash"];

/// Why a block that another fence follows is not performed.
const FENCE_AFTER: &str = "another line that begins with ``` follows the bash block, so it is not certain \
                           where the command ends";

/// Why no block is performed if one does not end: what looks like a later block may be a part of its command.
const NO_END: &str = "a bash block does not end with a line that is ```";

/// Begins and ends a block, each on a line of its own.
const FENCE: &str = "```";

/// The only command of a turn.
pub(super) fn parse(text: &str) -> Result<(Action, Call), Mistake> {
    let found = FENCES.iter().map(|fence| blocks(text, fence)).find(|found| !found.is_empty());
    let found: Option<Vec<_>> = found.unwrap_or_default().into_iter().collect();
    let Some(found) = found else { return Err(Mistake::unread(format_error(NO_END))) };
    match found.as_slice() {
        // A fence that follows may be the end of the block, and the one before a part of the command.
        [(_, after)] if after.lines().any(|line| line.starts_with(FENCE)) => {
            Err(Mistake::unread(format_error(FENCE_AFTER)))
        }
        [(command, _)] => {
            let call = Call::Bash { command: (*command).to_owned() };
            Ok((call.action(), call))
        }
        [] if !text.contains("```bash") && !text.contains("```mswea") => {
            Err(Mistake::new(format_error(&found_blocks(0))))
        }
        others => Err(Mistake::unread(format_error(&found_blocks(others.len())))),
    }
}

fn found_blocks(number: usize) -> String {
    format!("found {number} bash blocks, expected exactly 1")
}

/// The non-blank blocks that `fence` opens, each with what follows it; the last one is `None` if it does not end.
/// The fence must end its line. Blocks with another fence that names a language are a part of the block, as
/// in a command that writes a Markdown file.
fn blocks<'a>(text: &'a str, fence: &str) -> Vec<Option<(&'a str, &'a str)>> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(fence) {
        rest = after;
        let blank = after.len() - after.trim_start().len();
        let line_end = after.get(..blank).and_then(|blank| blank.rfind('\n'));
        let Some(body) = line_end.and_then(|end| after.get(end + 1..)) else { continue };
        let Some((block, after)) = block(body) else {
            found.push(None);
            return found;
        };
        rest = after;
        if !block.trim().is_empty() {
            found.push(Some((block.trim(), after)));
        }
    }
    found
}

/// The block at the beginning of `body`, without the line break before its end, and what follows it.
fn block(body: &str) -> Option<(&str, &str)> {
    let (mut at, mut inner) = (0, 0_usize);
    for line in body.split_inclusive('\n') {
        match (line.strip_prefix(FENCE).map(str::trim), inner.checked_sub(1)) {
            (Some(""), None) => {
                let (block, after) = body.split_at(at);
                return Some((block, after.strip_prefix(FENCE)?));
            }
            (Some(""), Some(fewer)) => inner = fewer,
            (Some(language), _) if !language.contains('`') => inner += 1,
            (Some(_) | None, _) => {}
        }
        at += line.len();
    }
    None
}

fn format_error(problem: &str) -> String {
    format!(
        "Format error:\n\n<error>\n{problem}\n</error>\n\n\
         Reply with a THOUGHT in plain words and exactly one command in a bash block:\n\n\
         <response_example>\nTHOUGHT: why this command comes next\n\n\
         ```bash\nyour_command_here\n```\n</response_example>\n\n\
         If the work is done, submit it as the first message says."
    )
}

/// The observation of a command; `None` if it submitted.
pub(super) fn observation(result: &ExecResult, limits: ToolLimits) -> Option<String> {
    let output = result.text();
    if result.success()
        && output.trim_start().lines().next().map(str::trim_end) == Some(SUBMIT_LINE)
    {
        return None;
    }
    let (exception, code) = match result.exit {
        Exit::Code(code) => (None, code),
        // A shell reports a killed program with the same code.
        Exit::Signal(signal) => (None, 128 + signal),
        Exit::TimedOut => {
            let time = limits.command_timeout.as_secs_f64();
            (Some(format!("the command timed out after {time} seconds")), -1)
        }
        Exit::NotStarted => (Some("the shell could not be started".to_owned()), -1),
        Exit::Stopped => (Some("the command was stopped".to_owned()), -1),
    };
    let exception = exception.map_or_else(String::new, |e| format!("<exception>{e}</exception>\n"));
    let output = output_section(&output, limits.observation_chars);
    Some(format!("{exception}<returncode>{code}</returncode>\n{output}"))
}

/// The whole output, or its head and tail with a warning.
fn output_section(output: &str, max_chars: usize) -> String {
    let count = output.chars().count();
    if count < max_chars {
        return format!("<output>\n{output}</output>");
    }
    let (head, tail) = head_and_tail(output, count, max_chars);
    format!(
        "<warning>\nThe command printed too much; its output is shown in part.\nUse a command that \
         prints less: head, tail or sed for some lines of a file, a narrower pattern for grep or \
         find.\nIf all of it is needed, write it to a file and search there.\n</warning>\
         <output_head>\n{head}\n</output_head>\n<elided_chars>\n{} characters elided\n\
         </elided_chars>\n<output_tail>\n{tail}\n</output_tail>",
        count - max_chars
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::command_result;
    use super::*;
    use std::time::Duration;

    const LIMITS: ToolLimits =
        ToolLimits { command_timeout: Duration::from_secs(5), observation_chars: 100 };

    fn observed(exit: Exit, output: &str) -> Option<String> {
        observation(&command_result(exit, output), LIMITS)
    }

    #[test]
    fn exactly_one_block_is_a_command() {
        let command = |text: &str| match parse(text) {
            Ok((_, Call::Bash { command })) => Ok(command),
            Ok(other) => unreachable!("{other:?}"),
            Err(mistake) => Err(mistake.text),
        };
        for (text, expected) in [
            ("THOUGHT: x\n\n```bash\nls -l\n```\n", "ls -l"),
            ("```mswea_bash_command  \n\n  ls\npwd\n```", "ls\npwd"),
            ("```bash\ncat <<'E'\n``\nE\n```", "cat <<'E'\n``\nE"),
            ("like\n```bash\nshown\n```\nso\n```mswea_bash_command\nls\n```", "ls"),
            ("```python\nx\n```\n```bash\nls\n```", "ls"),
            (
                "```bash\ncat > a.md <<'E'\n```python\nx\n```\nE\n```\n",
                "cat > a.md <<'E'\n```python\nx\n```\nE",
            ),
            ("```bash\necho '```' ```x```\n```", "echo '```' ```x```"),
        ] {
            assert_eq!(command(text).as_deref(), Ok(expected), "{text}");
        }
        for (text, found) in [
            ("ls", 0),
            ("", 0),
            ("```bash ls\n```", 0),
            ("```bash\n\n```", 0),
            ("```\nls\n```", 0),
            ("```bash\na\n```\n```bash\nb\n```", 2),
        ] {
            let error = command(text).unwrap_err();
            assert!(error.contains(&format!("found {found} bash blocks")), "{text}: {error}");
        }
    }

    #[test]
    fn a_command_that_may_have_ended_early_is_refused() {
        for text in [
            "```bash\ncat > a.md <<'E'\n```\nx\n```\nE\n```",
            "```bash\ncat > a.md <<'E'\n```\nE\n```",
            "```bash\nls\n```\nIt prints:\n```\na\n```",
            "```bash\ncat > a.md <<'E'\n```python\nE\n```",
            "```bash\nls",
            "```mswea_bash_command\ncat > README.md <<'E'\n```bash\nrm -rf build\n```\nE\n",
            "```bash\nls\n```\n```bash\npwd",
        ] {
            let mistake = parse(text).unwrap_err();
            assert!(mistake.is_unread, "{text}: {mistake}");
        }
        assert!(!parse("I am done.").unwrap_err().is_unread);
    }

    #[test]
    fn observations_are_formatted_as_by_mini_swe_agent() {
        let text = |exit, output| observed(exit, output).unwrap();
        assert_eq!(
            text(Exit::Code(0), "a\n"),
            "<returncode>0</returncode>\n<output>\na\n</output>"
        );
        assert_eq!(text(Exit::Code(2), ""), "<returncode>2</returncode>\n<output>\n</output>");
        assert_eq!(
            text(Exit::TimedOut, "x"),
            "<exception>the command timed out after 5 seconds</exception>\n\
             <returncode>-1</returncode>\n<output>\nx</output>"
        );
        assert!(text(Exit::Signal(9), "").starts_with("<returncode>137</returncode>"));
        let long = text(Exit::Code(0), &format!("{}{}", "é".repeat(75), "z".repeat(75)));
        assert!(long.contains("</warning><output_head>\n"), "{long}");
        assert!(long.contains(&format!("\n{}\n</output_head>", "é".repeat(50))), "{long}");
        assert!(long.contains("\n50 characters elided\n"), "{long}");
        assert!(long.ends_with(&format!("\n{}\n</output_tail>", "z".repeat(50))), "{long}");
    }

    #[test]
    fn submit_line_counts_only_first_and_with_exit_code_zero() {
        assert_eq!(
            observed(Exit::Code(0), "\n COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT \npatch"),
            None
        );
        for (exit, output) in [
            (Exit::Code(1), "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"),
            (Exit::Code(0), "x\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"),
            (Exit::Code(0), "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT!\n"),
        ] {
            assert!(observed(exit, output).is_some(), "{output}");
        }
    }
}
