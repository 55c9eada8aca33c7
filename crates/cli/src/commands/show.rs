//! `orchestrate show`: a run as tables, or one episode turn by turn.

use super::runs::{self, Kind};
use super::tasks::NAME_CHARS;
use crate::args::ShowArgs;
use crate::error::UsageError;
use crate::run_folder::{TURNS_FOLDER, planned};
use crate::{output, paths, tables};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{EpisodeDetail, EpisodeSummary, RunError};
use orchestrate_metrics::MetricsLine;
use orchestrate_report::{RunReport, metrics_lines};
use orchestrate_rollout::{Action, ChatModel, TurnJournals, TurnLog};
use orchestrate_store::{
    AmendmentRow, AttemptRow, AttemptState, EpisodeRecord, JOURNAL_FILE, NewestRow, Reader,
    StoreError, StoredBranch, StoredEpisode, holder,
};
use orchestrate_tasks::{Finding, Verdict, printable};
use orchestrate_types::{AttemptId, EpisodeId, Outcome, Trajectory, utc};
use serde::Serialize;
use serde_json::Value;
use std::process::ExitCode;

/// Number of characters of a reason that are printed.
const REASON_CHARS: usize = 400;

/// Runs the command.
pub(crate) async fn run(args: ShowArgs) -> anyhow::Result<ExitCode> {
    let folder = paths::absolute(&args.run_dir)?;
    let reader = Reader::open(&folder).await?;
    match &args.episode {
        None => overview(&reader, &folder, &args).await?,
        Some(id) => {
            let unknown =
                || UsageError::UnknownEpisode { id: id.clone(), run_dir: args.run_dir.clone() };
            let loaded = match (id.parse::<EpisodeId>(), id.parse::<AttemptId>()) {
                (Ok(episode), _) => reader.load_episode(episode).await,
                (Err(_), Ok(attempt)) => reader.load_attempt(attempt).await,
                (Err(_), Err(_)) => anyhow::bail!(unknown()),
            };
            let stored = match loaded {
                Err(StoreError::Absent { .. }) => anyhow::bail!(unknown()),
                loaded => loaded?,
            };
            let prompt = prompt(&args.run_dir, &reader, &stored).await;
            let shown = states(&reader, &folder).await?;
            episode(&stored, id, &shown, prompt, args.json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What `show RUN --json` prints.
#[derive(Debug, Serialize)]
struct Overview<'a> {
    /// What the run does; absent if a journal of an older version and its plan do not say it.
    kind: Option<Kind>,
    report: &'a RunReport,
    /// Settings that were changed when the run was resumed; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    changed_settings: Vec<ChangedSetting<'a>>,
    metrics: &'a [MetricsLine],
    episodes: Vec<EpisodeEntry<'a>>,
    /// The newest attempts and open episodes, newest first.
    newest: Vec<AttemptEntry<'a>>,
}

/// An attempt in [`Overview`].
#[derive(Debug, Serialize)]
struct AttemptEntry<'a> {
    id: &'a str,
    task: &'a str,
    /// State of the attempt as [`States`] has it, or of the episode.
    state: &'a str,
    outcome: Option<&'a Outcome>,
    reward: Option<f64>,
    turns: Option<u64>,
    tokens: Option<u64>,
}

/// What is known of the attempts that have no outcome in the journal.
#[derive(Debug)]
struct States {
    is_running: bool,
    /// Lost attempts that are the newest ones of open episodes.
    lost: Vec<AttemptId>,
    /// The turn journals.
    turns: Utf8PathBuf,
}

async fn states(reader: &Reader, folder: &Utf8Path) -> Result<States, StoreError> {
    Ok(States {
        is_running: holder(folder).is_some(),
        lost: reader.lost_attempts().await?,
        turns: folder.join(TURNS_FOLDER),
    })
}

impl States {
    /// The state of an attempt in one word. The journal has one that runs as `intended`, and so it has one
    /// whose process was killed, until the run is started again; that makes it `lost`, and only then
    /// continues it if its turns are recorded.
    fn word<'a>(&self, id: &str, recorded: &'a str) -> &'a str {
        self.word_if(id, recorded, |attempt| TurnJournals::can_continue(&self.turns, attempt))
    }

    fn word_if<'a>(
        &self,
        id: &str,
        recorded: &'a str,
        can_continue: impl FnOnce(AttemptId) -> bool,
    ) -> &'a str {
        let (is_intended, is_lost) =
            (recorded == AttemptState::Intended.name(), recorded == AttemptState::Lost.name());
        let Ok(attempt) = id.parse::<AttemptId>() else { return recorded };
        if is_intended && self.is_running {
            return "running";
        }
        let has_ended = !is_intended && (!is_lost || !self.lost.contains(&attempt));
        match has_ended {
            true => recorded,
            false if can_continue(attempt) => "resumable",
            false => AttemptState::Lost.name(),
        }
    }
}

fn attempt_entry<'a>(row: &'a NewestRow, states: &States) -> AttemptEntry<'a> {
    // The numbers of attempts that stored nothing are unknown.
    let stored = Some(row.summary.clone()).filter(|summary| !summary.is_null());
    let summary: Option<EpisodeSummary> =
        stored.map(serde_json::from_value).transpose().unwrap_or_else(|error| {
            let id = tables::cell(&row.id);
            output::say(format!("warning: the summary of attempt {id} cannot be read: {error}"));
            None
        });
    let reward = match row.outcome {
        Some(Outcome::Scored { reward } | Outcome::Truncated { reward, .. }) => Some(reward),
        Some(Outcome::Aborted { .. } | Outcome::Broken { .. }) | None => None,
    };
    AttemptEntry {
        id: &row.id,
        task: &row.task_id,
        state: states.word(&row.id, &row.state),
        outcome: row.outcome.as_ref(),
        reward,
        turns: summary.as_ref().map(|summary| summary.turns),
        tokens: summary.as_ref().map(|summary| summary.tokens),
    }
}

/// A change in [`Overview`].
#[derive(Debug, Serialize)]
struct ChangedSetting<'a> {
    /// As `KEY=VALUE`.
    setting: &'a str,
    /// Epoch of the coordinator that was started with it.
    epoch: i64,
    /// When it was recorded, µs since the Unix epoch.
    recorded_us: i64,
}

fn changed_setting(row: &AmendmentRow) -> ChangedSetting<'_> {
    let AmendmentRow { assignment, epoch, recorded_us } = row;
    ChangedSetting { setting: assignment, epoch: *epoch, recorded_us: *recorded_us }
}

/// An episode in [`Overview`].
#[derive(Debug, Serialize)]
struct EpisodeEntry<'a> {
    id: String,
    task: &'a str,
    state: &'static str,
}

async fn overview(reader: &Reader, folder: &Utf8Path, args: &ShowArgs) -> anyhow::Result<()> {
    let metrics = metrics_lines(reader).await.map_err(RunError::from)?;
    let episodes = reader.episodes().await?;
    let report = RunReport::from_journal(reader).await.map_err(RunError::from)?;
    let changes = reader.amendments().await?;
    let kind = runs::kind(folder, reader).await.ok();
    // Before the rows are read: a process that ends meanwhile may leave them as of a running attempt.
    let states = states(reader, folder).await?;
    let newest = reader.newest(args.step, args.last).await?;
    let newest: Vec<AttemptEntry<'_>> =
        newest.iter().map(|row| attempt_entry(row, &states)).collect();
    if args.json {
        let episodes = episodes
            .iter()
            .map(|row| EpisodeEntry {
                id: row.id.to_string(),
                task: &row.task_id,
                state: row.state.name(),
            })
            .collect();
        let changed_settings = changes.iter().map(changed_setting).collect();
        return output::json(&Overview {
            kind,
            report: &report,
            changed_settings,
            metrics: &metrics,
            episodes,
            newest,
        });
    }
    let mut steps =
        tables::table(&["step", "version", "reward", "solve rate", "KL", "KL no replay", "Pass@1"]);
    for line in &metrics {
        steps.add_row(overview_row(line));
    }
    output::data(steps);
    output::data(tables::final_table(&report, kind != Some(Kind::Evaluation)));
    if !changes.is_empty() {
        let mut table = tables::table(&["changed settings", "at start", "time"]);
        for change in &changes {
            let start = change.epoch.to_string();
            let time = utc(change.recorded_us);
            table.add_row([tables::cell(&change.assignment), start, time]);
        }
        output::data(table);
    }
    let columns = ["newest attempts", "task", "state", "reward", "turns", "tokens"];
    let mut last = tables::table(&columns);
    for entry in newest {
        let number = |value: Option<u64>| value.map(|n| n.to_string()).unwrap_or_default();
        last.add_row([
            entry.id.to_owned(),
            printable(entry.task, NAME_CHARS),
            entry.state.to_owned(),
            cell(entry.reward),
            number(entry.turns),
            number(entry.tokens),
        ]);
    }
    output::data(last);
    Ok(())
}

/// A number in a table; empty if there is none.
fn cell(value: Option<f64>) -> String {
    match value {
        Some(number) if number != 0.0 && number.abs() < 1e-3 => format!("{number:.2e}"),
        Some(number) => {
            format!("{number:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        None => String::new(),
    }
}

/// A metrics line in the columns of the overview; empty where it has no value.
fn overview_row(line: &MetricsLine) -> [String; 7] {
    let (step, version) = match line {
        MetricsLine::Step(line) => (line.global_step, line.policy_version),
        MetricsLine::Evaluation(line) => (line.global_step, line.policy_version),
    };
    let trained = line.step();
    [
        step.to_string(),
        version.to_string(),
        cell(trained.and_then(|line| line.reward_mean)),
        cell(trained.and_then(|line| line.solve_rate)),
        cell(trained.and_then(|line| line.kl_train_infer)),
        cell(trained.and_then(|line| line.kl_train_infer_no_replay)),
        cell(line.evaluation().and_then(|line| line.eval_pass_at_1)),
    ]
}

/// What `show RUN EPISODE --json` prints.
#[derive(Debug, Serialize)]
struct EpisodeView<'a> {
    attempt: String,
    outcome: &'a Outcome,
    /// The opening prompt as text, if the run's tokenizer can be read here.
    prompt: Option<&'a str>,
    detail: &'a EpisodeDetail,
    /// The first branch of the conversation.
    trajectory: Option<&'a Trajectory>,
    mask_rows: Option<usize>,
    /// The other branches; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    branches: Vec<BranchView<'a>>,
}

/// What `show RUN EPISODE --json` prints if nothing was recorded.
#[derive(Debug, Serialize)]
struct Unrecorded<'a> {
    /// The episode or the attempt, and its state.
    id: &'a str,
    state: &'a str,
}

/// A branch in [`EpisodeView`].
#[derive(Debug, Serialize)]
struct BranchView<'a> {
    trajectory: &'a Trajectory,
    mask_rows: Option<usize>,
}

fn branch_view(branch: &StoredBranch) -> BranchView<'_> {
    let mask_rows = branch.routing.as_ref().map(routing_rows);
    BranchView { trajectory: &branch.trajectory, mask_rows }
}

/// The opening prompt as text: the tokens before the first sampled one. `None` if nothing was recorded, or the
/// tokenizer of the run cannot be read here.
async fn prompt(run_dir: &Utf8Path, reader: &Reader, stored: &StoredEpisode) -> Option<String> {
    let trajectory = &stored.record.as_ref()?.branches.first()?.trajectory;
    let first = trajectory.turns().first()?.prompt_end;
    let ids = trajectory.token_ids().get(..first)?;
    let settings = planned(run_dir, reader, &[]).await.ok()?.check().ok()?;
    let options = settings.rollout.chat_options(&[]);
    let chat = ChatModel::load_for(settings.engine.tokenizer_folder(), options).ok()?;
    chat.decode(ids).ok()
}

fn episode(
    stored: &StoredEpisode,
    id: &str,
    states: &States,
    prompt: Option<String>,
    json: bool,
) -> anyhow::Result<()> {
    let Some(record) = &stored.record else {
        let attempt = id.parse().ok().and_then(|id| stored.attempts.iter().find(|a| a.id == id));
        let (id, state) = match attempt {
            Some(AttemptRow { id, state, .. }) => {
                let id = id.to_string();
                let state = states.word(&id, state.name());
                (id, state)
            }
            None => (stored.episode.id.to_string(), stored.episode.state.name()),
        };
        if json {
            return output::json(&Unrecorded { id: &id, state });
        }
        output::data(format!("{id}: {state}, nothing recorded"));
        return Ok(());
    };
    let detail: EpisodeDetail = serde_json::from_value(record.detail.clone())?;
    if json {
        return output::json(&EpisodeView {
            attempt: record.attempt.to_string(),
            outcome: &record.outcome,
            prompt: prompt.as_deref(),
            detail: &detail,
            trajectory: record.branches.first().map(|branch| &branch.trajectory),
            mask_rows: record.branches.first().and_then(|b| b.routing.as_ref()).map(routing_rows),
            branches: record
                .branches
                .get(1..)
                .unwrap_or_default()
                .iter()
                .map(branch_view)
                .collect(),
        });
    }
    output::data(format!(
        "episode {} of task {}: {}",
        record.attempt,
        detail.task_id,
        outcome(&record.outcome)
    ));
    output::data(coverage(record, stored)?);
    if let Some(prompt) = prompt {
        output::data(format!("\n── prompt\n{}", prompt.trim_end()));
    }
    for (index, turn) in detail.turns.iter().enumerate() {
        output::data(turn_text(index + 1, turn));
    }
    if !detail.patch.is_empty() {
        output::data(format!("\n── patch\n{}", detail.patch.trim_end()));
    }
    if let Some(verdict) = &detail.verdict {
        output::data(verdict_text(verdict));
        if !verdict.suspicious.is_empty() {
            let names: Vec<&str> = verdict.suspicious.iter().map(|f| f.name()).collect();
            output::data(format!("── noticed: {}", names.join(", ")));
        }
        if let Some(reason) = no_reward(verdict) {
            output::data(format!("── no reward: {}", printable(reason, REASON_CHARS)));
        }
    }
    Ok(())
}

/// A verdict as text, with the status of each test.
fn verdict_text(verdict: &Verdict) -> String {
    let tests = verdict.statuses.iter();
    let tests = tests
        .map(|(test, status)| format!("\n{}: {}", printable(test, REASON_CHARS), status.name()));
    format!("\n── verdict: reward {}{}", verdict.reward, tests.collect::<String>())
}

/// Why the tests gave no reward, so that it is 0.
fn no_reward(verdict: &Verdict) -> Option<&str> {
    let is_missing = verdict.suspicious.contains(&Finding::NoReward);
    verdict.differing.first().filter(|_| is_missing).map(String::as_str)
}

/// A turn as text: what the policy wrote, the calls in it (in the same form for every scaffold), and the
/// observation.
fn turn_text(number: usize, turn: &TurnLog) -> String {
    let mut lines = vec![
        format!(
            "\n── turn {number} ({} ms in the engine, {} ms in the sandbox)",
            turn.generate_ms, turn.exec_ms
        ),
        turn.text.trim_end().to_owned(),
        "── calls".to_owned(),
    ];
    match &turn.unread {
        Some(reason) => lines.push(format!("not read: {reason}")),
        None if turn.actions.is_empty() => lines.push("none".to_owned()),
        None => {}
    }
    lines.extend(turn.actions.iter().map(call_text));
    if !turn.observation.is_empty() {
        lines.extend(["── observation".to_owned(), turn.observation.trim_end().to_owned()]);
    }
    if let Some(fork) = turn.fork {
        lines.push(format!(
            "── fork: the next turn leaves out {}, from token {}",
            output::counted(fork.left_out, "token"),
            fork.at
        ));
    }
    lines.join("\n")
}

fn call_text(action: &Action) -> String {
    let argument =
        |key: &str| action.arguments.get(key).and_then(Value::as_str).unwrap_or_default();
    match action.name.as_str() {
        "bash" => format!("$ {}", argument("command")),
        "search" => format!("search \"{}\" in {}", argument("search_term"), argument("path")),
        name @ ("view" | "edit" | "submit") => {
            format!("{name} {}", argument("path")).trim_end().to_owned()
        }
        name => format!("{name} {}", action.arguments),
    }
}

fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Scored { reward } => format!("scored {reward}"),
        Outcome::Truncated { limit, reward } => {
            format!("truncated by {}, scored {reward}", word(limit))
        }
        Outcome::Aborted { by } => format!("aborted: {}", word(by)),
        Outcome::Broken { stage, error } => format!("broken in {stage}: {error}"),
    }
}

/// The name of a variant in files of the run.
fn word(variant: &impl Serialize) -> String {
    let name = serde_json::to_value(variant).ok();
    name.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn routing_rows(routing: &orchestrate_store::StoredRouting) -> usize {
    routing.data.len() / routing.row_bytes.max(1)
}

/// How much of the trajectory the routing mask covers. A complete mask has a row for every token but the
/// last.
fn coverage(record: &EpisodeRecord, stored: &StoredEpisode) -> anyhow::Result<String> {
    let summary =
        stored.attempts.iter().find(|a| a.id == record.attempt).map(|a| a.summary.clone());
    let summary: Option<EpisodeSummary> =
        summary.filter(|s| !s.is_null()).map(serde_json::from_value).transpose().map_err(
            |error| StoreError::Unreadable {
                journal: JOURNAL_FILE.into(),
                detail: format!("summary of attempt {}: {error}", record.attempt),
            },
        )?;
    let branches = &record.branches;
    let sum = |count: fn(&Trajectory) -> usize| -> usize {
        branches.iter().map(|branch| count(&branch.trajectory)).sum()
    };
    let (tokens, written) = (sum(Trajectory::len), sum(Trajectory::response_tokens));
    let rows: Option<usize> =
        branches.iter().map(|branch| branch.routing.as_ref().map(routing_rows)).sum();
    let mask = match rows.filter(|_| !branches.is_empty()) {
        Some(rows) => {
            format!("routing mask: {rows} of {} rows", tokens.saturating_sub(branches.len()))
        }
        None => "routing mask: not collected".to_owned(),
    };
    let forks = match branches.len() {
        0 | 1 => String::new(),
        count => format!(" in {count} branches"),
    };
    let returned = summary.as_ref().map(returned_metrics).unwrap_or_default();
    let cache = summary.map_or_else(String::new, |s| {
        format!("; prefix cache {} of {} prompt tokens", s.cached_tokens, s.prompt_tokens)
    });
    let turns = sum(|trajectory| trajectory.turns().len());
    let origin = if turns > 0 && written == 0 {
        // A chat server returns text: which tokens it sampled is unknown.
        "by the local tokenizer".to_owned()
    } else {
        format!("{written} by the policy")
    };
    Ok(format!("{}{forks}, {origin}; {mask}{cache}{returned}", output::counted(tokens, "token")))
}

/// The metrics that an external worker returned with its reward, as the end of a line.
fn returned_metrics(summary: &EpisodeSummary) -> String {
    let metrics = summary.metrics.iter().map(|(name, value)| format!("{name} = {value}"));
    let metrics = metrics.collect::<Vec<_>>().join(", ");
    if metrics.is_empty() { metrics } else { format!("; metrics of its worker: {metrics}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_rollout::{Fork, Scaffold, ToolFormat, WrittenTurn};
    use orchestrate_tasks::TestStatus;
    use orchestrate_types::{AbortCause, Limit};

    fn shown(scaffold: Scaffold, text: &str) -> String {
        let calls =
            scaffold.parse(WrittenTurn::new(ToolFormat::Json, text), &[]).into_iter().flatten();
        let turn = TurnLog {
            text: text.to_owned(),
            actions: calls.map(|(action, _)| action).collect(),
            unread: None,
            observation: "seen\n".to_owned(),
            generate_ms: 5,
            exec_ms: 7,
            fork: None,
            overridden: Vec::new(),
        };
        turn_text(2, &turn)
    }

    #[test]
    fn outcomes_are_named_as_in_files() {
        let truncated = Outcome::Truncated { limit: Limit::SequenceTokens, reward: 0.5 };
        assert_eq!(outcome(&truncated), "truncated by sequence_tokens, scored 0.5");
        let aborted = Outcome::Aborted { by: AbortCause::Shutdown };
        assert_eq!(outcome(&aborted), "aborted: shutdown");
    }

    #[test]
    fn a_verdict_lists_the_tests_with_their_statuses() {
        let statuses = [("t::b", TestStatus::Error), ("t::a\u{1b}", TestStatus::Passed)];
        let verdict = Verdict {
            reward: 0.0,
            official_reward: 0.0,
            statuses: statuses.map(|(test, status)| (test.to_owned(), status)).into(),
            differing: Vec::new(),
            report: None,
            suspicious: Vec::new(),
        };
        let text = verdict_text(&verdict);
        assert!(
            text.starts_with("\n── verdict: reward 0\nt::a")
                && text.ends_with(": passed\nt::b: error"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn an_attempt_without_an_outcome_is_running_resumable_or_lost() {
        let newest = "t000001.02-a01";
        let states = |is_running| States {
            is_running,
            lost: vec![newest.parse().unwrap()],
            turns: Utf8PathBuf::new(),
        };
        let older = "t000001.03-a01";
        for (id, recorded, is_running, has_turns, expected) in [
            (newest, "intended", true, true, "running"),
            (newest, "intended", true, false, "running"),
            (newest, "intended", false, true, "resumable"),
            (newest, "intended", false, false, "lost"),
            // The run was started again, and has not continued it yet, or was killed before.
            (newest, "lost", true, true, "resumable"),
            (newest, "lost", false, true, "resumable"),
            (newest, "lost", false, false, "lost"),
            // Another attempt of the episode followed.
            (older, "lost", false, true, "lost"),
            (older, "sealed", false, true, "sealed"),
            (older, "broken", true, true, "broken"),
            ("t000001.03", "open", false, true, "open"),
        ] {
            let word = states(is_running).word_if(id, recorded, |_| has_turns);
            assert_eq!(word, expected, "{id} {recorded} {is_running} {has_turns}");
        }
    }

    #[test]
    fn turns_of_all_scaffolds_look_the_same() {
        let head = "\n── turn 2 (5 ms in the engine, 7 ms in the sandbox)\n";
        for (scaffold, text, calls) in [
            (
                Scaffold::Tools,
                r#"<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>"#,
                "$ ls",
            ),
            (
                Scaffold::R2eXml,
                "<function=execute_bash><parameter=cmd>ls</parameter></function>",
                "$ ls",
            ),
            (Scaffold::Mini, "look\n```bash\nls\n```", "$ ls"),
            (Scaffold::Mini, "look", "none"),
            (
                Scaffold::Tools,
                r#"<tool_call>{"name": "edit", "arguments": {"path": "a.py", "line": 1, "new": ""}}</tool_call><tool_call>{"name": "submit", "arguments": {}}</tool_call>"#,
                "edit a.py\nsubmit",
            ),
            (
                Scaffold::R2eXml,
                "<function=file_editor><parameter=command>str_replace</parameter>\
                 <parameter=path>a.py</parameter><parameter=old_str>x</parameter></function>",
                "edit a.py",
            ),
            (
                Scaffold::R2eXml,
                "<function=search><parameter=search_term>x y</parameter></function>",
                "search \"x y\" in .",
            ),
            (Scaffold::R2eXml, "<function=finish></function>", "submit"),
        ] {
            let expected = format!("{head}{text}\n── calls\n{calls}\n── observation\nseen");
            assert_eq!(shown(scaffold, text), expected);
        }
    }

    #[test]
    fn fork_is_shown_after_its_turn() {
        let turn = TurnLog {
            text: "hm".to_owned(),
            actions: Vec::new(),
            unread: None,
            observation: String::new(),
            generate_ms: 0,
            exec_ms: 0,
            fork: Some(Fork { at: 12, left_out: 3 }),
            overridden: Vec::new(),
        };
        let text = turn_text(1, &turn);
        assert!(text.ends_with("none\n── fork: the next turn leaves out 3 tokens, from token 12"));
    }
}
