//! Scripted episodes that solve micro tasks, for supervised warm-start.
//!
//! The invariant: every observation equals what the real environment returns for the same calls, so
//! warm-start data needs no container. Only turns of weight 1 are to be imitated.

use crate::micro::families::{Choice, Family, fill};
use crate::micro::value::Value;
use crate::micro::{Draw, RUN_COMMAND};
use crate::patch::{LineKind, parse};
use crate::task::Task;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

/// Percentage of episodes that first try a wrong line.
const RECOVERIES_PERCENT: usize = 12;

/// A tool call of the expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertAction {
    /// `bash`, `edit` or `submit`.
    pub name: String,
    /// The tool's arguments, a JSON object.
    pub arguments: Json,
}

/// One turn of the expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertTurn {
    /// The tool call.
    pub action: ExpertAction,
    /// What the environment returns; empty after `submit`, which ends the episode.
    pub observation: String,
    /// 1.0 if the turn is to be imitated, 0.0 if it is a mistake that a later turn corrects.
    pub weight: f32,
}

/// The one-line change that a gold patch makes.
struct LineChange {
    file: String,
    /// Line number, from 1.
    line: usize,
    old: String,
    new: String,
}

/// An episode that solves `task`: print the file, replace the line, run the visible tests, submit.
/// About one in eight first inserts a wrong line, sees the tests fail, and corrects it. `None` if
/// `task` is not a micro task.
pub fn episode(task: &Task, rng: &mut ChaCha8Rng) -> Option<Vec<ExpertTurn>> {
    let change = LineChange::of_gold_patch(task)?;
    let module = &task.agent_files.iter().find(|file| file.path == change.file)?.content;
    let turn = |name: &str, arguments: Json, observation: String| ExpertTurn {
        action: ExpertAction { name: name.to_owned(), arguments },
        observation,
        weight: 1.0,
    };
    let edit = |new: &str| {
        let arguments = json!({"path": change.file, "line": change.line, "new": new});
        turn("edit", arguments, "ok".to_owned())
    };
    let bash =
        |command: &str, observation: String| turn("bash", json!({"command": command}), observation);

    let mut turns = vec![bash(&format!("cat -n {}", change.file), numbered(module))];
    let mut draw = Draw::new(rng);
    if draw.chance(RECOVERIES_PERCENT)
        && let Some((line, failure)) = draw_mistake(task, &change, &mut draw)
    {
        turns.push(ExpertTurn { weight: 0.0, ..edit(&line) });
        turns.push(bash(RUN_COMMAND, format!("exit 1\n{failure}")));
    }
    turns.push(edit(&change.new));
    turns.push(bash(RUN_COMMAND, "ok".to_owned()));
    turns.push(turn("submit", json!({}), String::new()));
    Some(turns)
}

/// `text` as `cat -n` prints it, without the final line feed.
fn numbered(text: &str) -> String {
    let lines = text.lines().enumerate().map(|(n, line)| format!("{:6}\t{line}", n + 1));
    lines.collect::<Vec<_>>().join("\n")
}

impl LineChange {
    fn of_gold_patch(task: &Task) -> Option<Self> {
        let patches = parse(&task.gold_patch).ok()?;
        let [patch] = patches.as_slice() else { return None };
        let [hunk] = patch.hunks.as_slice() else { return None };
        let mut line = hunk.old_start;
        let (mut old, mut new) = (None, None);
        for part in &hunk.lines {
            let text = part.text.trim_end_matches('\n').to_owned();
            match part.kind {
                LineKind::Context if old.is_none() => line += 1,
                LineKind::Context => {}
                LineKind::Deleted if old.is_none() => old = Some(text),
                LineKind::Added if new.is_none() => new = Some(text),
                LineKind::Deleted | LineKind::Added => return None,
            }
        }
        Some(Self { file: patch.path().to_owned(), line, old: old?, new: new? })
    }
}

/// Draws a wrong line from the same family that the visible tests detect, and the line they print
/// about it. The example call is read back from the issue.
fn draw_mistake(task: &Task, change: &LineChange, draw: &mut Draw<'_>) -> Option<(String, String)> {
    let family = Family::by_name(&task.family)?;
    let issue = &task.problem_statement;
    let (name, _) = issue.split_once(' ')?;
    let module = &task.agent_files.iter().find(|file| file.path == change.file)?.content;
    let head = module.lines().find_map(|line| line.strip_prefix(&format!("def {name}(")))?;
    let params: Vec<&str> = head.strip_suffix("):")?.split(", ").collect();
    let (_, call) = issue.split_once(&format!(" {name}("))?;
    let (args, rest) = call.split_once(") gives ")?;
    let (args, want) =
        (Value::parse_list(args)?, rest.split_once(", expected ")?.1.strip_suffix('.')?);

    // The correct line and the buggy one differ only in their expression.
    let around_expression = |choice: &Choice, line: &str| -> Option<(String, String)> {
        let code = fill(choice.code, &params);
        let (head, tail) = line.split_once(code.as_str())?;
        Some((head.to_owned(), tail.to_owned()))
    };
    let (head, tail) = family.choices.iter().find_map(|correct| {
        let found = around_expression(correct, &change.new)?;
        let is_bug = |bug: &Choice| {
            change.old == format!("{}{}{}", found.0, fill(bug.code, &params), found.1)
        };
        family.choices.iter().any(is_bug).then_some(found)
    })?;
    let wrong: Vec<(String, String)> = family
        .choices
        .iter()
        .filter_map(|choice| {
            let line = format!("{head}{}{tail}", fill(choice.code, &params));
            let got = (choice.run)(&args)?.to_string();
            let differs = got != want && line != change.new && line != change.old;
            differs.then(|| (line, format!("FAILED {name}: got {got}, expected {want}")))
        })
        .collect();
    wrong.get(draw.below(wrong.len())).cloned()
}
