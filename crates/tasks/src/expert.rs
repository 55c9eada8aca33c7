//! Scripted episodes that solve micro tasks, for supervised warm-start.
//!
//! The invariant: every observation is what the real environment answers to the same calls, so
//! that warm-start data needs no container. Only turns of weight 1 are to be imitated.

use crate::micro::families::{Choice, Family, fill};
use crate::micro::value::Value;
use crate::micro::{Draw, RUN_COMMAND};
use crate::patch::{LineKind, parse};
use crate::task::Task;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

/// Episodes of 100 that try a wrong line first.
const RECOVERIES_PERCENT: usize = 12;

/// A tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertAction {
    /// `bash`, `edit` or `submit`.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: Json,
}

/// One turn of the expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertTurn {
    /// What it does.
    pub action: ExpertAction,
    /// What the environment answers; empty after `submit`, which ends the episode.
    pub observation: String,
    /// 1.0 if the turn is to be imitated, 0.0 if it is a mistake that a later turn repairs.
    pub weight: f32,
}

/// The one line that a gold patch changes.
struct Repair {
    file: String,
    /// From 1.
    line: usize,
    old: String,
    new: String,
}

/// An episode that solves `task`: list the file, replace the line, run the visible tests, submit.
/// About one in eight first puts a wrong line in, sees the tests fail, and repairs it.
/// `None` if `task` is not a micro task.
pub fn episode(task: &Task, rng: &mut ChaCha8Rng) -> Option<Vec<ExpertTurn>> {
    let repair = Repair::of(task)?;
    let module = &task.agent_files.iter().find(|file| file.path == repair.file)?.content;
    let turn = |name: &str, arguments: Json, observation: String| ExpertTurn {
        action: ExpertAction { name: name.to_owned(), arguments },
        observation,
        weight: 1.0,
    };
    let edit = |new: &str| {
        let arguments = json!({"path": repair.file, "line": repair.line, "new": new});
        turn("edit", arguments, "ok".to_owned())
    };
    let bash =
        |command: &str, observation: String| turn("bash", json!({"command": command}), observation);

    let mut turns = vec![bash(&format!("cat -n {}", repair.file), numbered(module))];
    let mut draw = Draw::new(rng);
    if draw.chance(RECOVERIES_PERCENT)
        && let Some((line, failure)) = mistake(task, &repair, &mut draw)
    {
        turns.push(ExpertTurn { weight: 0.0, ..edit(&line) });
        turns.push(bash(RUN_COMMAND, format!("exit 1\n{failure}")));
    }
    turns.push(edit(&repair.new));
    turns.push(bash(RUN_COMMAND, "ok".to_owned()));
    turns.push(turn("submit", json!({}), String::new()));
    Some(turns)
}

/// `text` as `cat -n` shows it, without the last line's end.
fn numbered(text: &str) -> String {
    let lines = text.lines().enumerate().map(|(n, line)| format!("{:6}\t{line}", n + 1));
    lines.collect::<Vec<_>>().join("\n")
}

impl Repair {
    fn of(task: &Task) -> Option<Self> {
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

/// A wrong line of the same family that the visible tests catch, and what they say about it.
fn mistake(task: &Task, repair: &Repair, draw: &mut Draw<'_>) -> Option<(String, String)> {
    let family = Family::named(&task.family)?;
    let issue = &task.problem_statement;
    let (name, _) = issue.split_once(' ')?;
    let module = &task.agent_files.iter().find(|file| file.path == repair.file)?.content;
    let head = module.lines().find_map(|line| line.strip_prefix(&format!("def {name}(")))?;
    let params: Vec<&str> = head.strip_suffix("):")?.split(", ").collect();
    let (_, call) = issue.split_once(&format!(" {name}("))?;
    let (args, rest) = call.split_once(") gives ")?;
    let (args, want) =
        (Value::parse_list(args)?, rest.split_once(", expected ")?.1.strip_suffix('.')?);

    // The right and the buggy line are equal around the expression that stands in them.
    let written = |choice: &Choice, line: &str| -> Option<(String, String)> {
        let code = fill(choice.code, &params);
        let (head, tail) = line.split_once(code.as_str())?;
        Some((head.to_owned(), tail.to_owned()))
    };
    let (head, tail) = family.choices.iter().find_map(|right| {
        let found = written(right, &repair.new)?;
        let fits = |bug: &Choice| {
            repair.old == format!("{}{}{}", found.0, fill(bug.code, &params), found.1)
        };
        family.choices.iter().any(fits).then_some(found)
    })?;
    let wrong: Vec<(String, String)> = family
        .choices
        .iter()
        .filter_map(|choice| {
            let line = format!("{head}{}{tail}", fill(choice.code, &params));
            let got = (choice.run)(&args)?.to_string();
            let differs = got != want && line != repair.new && line != repair.old;
            differs.then(|| (line, format!("FAILED {name}: got {got}, expected {want}")))
        })
        .collect();
    wrong.get(draw.below(wrong.len())).cloned()
}
