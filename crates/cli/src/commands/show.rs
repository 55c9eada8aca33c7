//! `orchestrate show`: a run as a table, or one episode turn by turn.

use crate::args::ShowArgs;
use crate::error::UsageError;
use crate::{output, tables, wiring};
use orchestrate_coordinator::{EpisodeDetail, EpisodeSummary};
use orchestrate_report::RunReport;
use orchestrate_rollout::{Action, TurnLog};
use orchestrate_store::{EpisodeRecord, Reader, StoreError, StoredEpisode};
use orchestrate_types::{EpisodeId, Outcome};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: ShowArgs) -> anyhow::Result<ExitCode> {
    let reader = Reader::open(&wiring::absolute(&args.run_dir)?).await?;
    match &args.episode {
        None => overview(&reader, args.json).await?,
        Some(id) => {
            let unknown =
                || UsageError::UnknownEpisode { id: id.clone(), run_dir: args.run_dir.clone() };
            let parsed: EpisodeId = id.parse().map_err(|_| unknown())?;
            let stored = match reader.load_episode(parsed).await {
                Err(StoreError::Absent { .. }) => anyhow::bail!(unknown()),
                loaded => loaded?,
            };
            episode(&stored, args.json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn overview(reader: &Reader, json: bool) -> anyhow::Result<()> {
    let metrics = reader.metrics().await?;
    let episodes = reader.episodes().await?;
    let report = RunReport::from_journal(reader).await?;
    if json {
        let list: Vec<Value> = episodes
            .iter()
            .map(|e| json!({"id": e.id.to_string(), "task": e.task_id, "state": format!("{:?}", e.state).to_lowercase()}))
            .collect();
        return output::json(&json!({"report": report, "metrics": metrics, "episodes": list}));
    }
    let mut steps =
        tables::table(&["step", "version", "reward", "solve rate", "KL", "KL no replay", "Pass@1"]);
    for line in &metrics {
        let cell = |key: &str| match line.get(key).and_then(Value::as_f64) {
            Some(number) if number != 0.0 && number.abs() < 1e-3 => format!("{number:.2e}"),
            Some(number) => {
                format!("{number:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
            }
            None => String::new(),
        };
        steps.add_row([
            cell("global_step"),
            cell("policy_version"),
            cell("reward_mean"),
            cell("solve_rate"),
            cell("kl_train_infer"),
            cell("kl_train_infer_no_replay"),
            cell("eval_pass_at_1"),
        ]);
    }
    output::data(steps);
    output::data(tables::final_table(&report));
    let mut last = tables::table(&["newest episodes", "task", "state", "attempts"]);
    for row in episodes.iter().rev().take(12) {
        let state = format!("{:?}", row.state).to_lowercase();
        last.add_row([row.id.to_string(), row.task_id.clone(), state, row.attempts.to_string()]);
    }
    output::data(last);
    Ok(())
}

fn episode(stored: &StoredEpisode, json: bool) -> anyhow::Result<()> {
    let Some(record) = &stored.record else {
        output::data(format!(
            "{}: {:?}, nothing recorded yet",
            stored.episode.id, stored.episode.state
        ));
        return Ok(());
    };
    let detail: EpisodeDetail = serde_json::from_value(record.detail.clone())?;
    if json {
        let trajectory = serde_json::to_value(&record.trajectory)?;
        return output::json(&json!({
            "attempt": record.attempt.to_string(),
            "outcome": record.outcome,
            "detail": detail,
            "trajectory": trajectory,
            "mask_rows": record.routing.as_ref().map(routing_rows),
        }));
    }
    output::data(format!(
        "episode {} of task {}: {}",
        record.attempt,
        detail.task_id,
        outcome(&record.outcome)
    ));
    output::data(coverage(record, stored)?);
    for (index, turn) in detail.turns.iter().enumerate() {
        output::data(turn_text(index + 1, turn));
    }
    if !detail.patch.is_empty() {
        output::data(format!("\n── patch\n{}", detail.patch.trim_end()));
    }
    if let Some(verdict) = &detail.verdict {
        output::data(format!("\n── verdict: reward {} {:?}", verdict.reward, verdict.statuses));
    }
    Ok(())
}

/// A turn as a person reads it: what the policy wrote, which calls that made (in the same words for
/// every scaffold), what it was told.
fn turn_text(number: usize, turn: &TurnLog) -> String {
    let mut lines = vec![
        format!(
            "\n── turn {number} ({} ms in the engine, {} ms in the sandbox)",
            turn.generate_ms, turn.exec_ms
        ),
        turn.text.trim_end().to_owned(),
        "── calls".to_owned(),
    ];
    if turn.actions.is_empty() {
        lines.push("none".to_owned());
    }
    lines.extend(turn.actions.iter().map(call_text));
    if !turn.observation.is_empty() {
        lines.extend(["── answer".to_owned(), turn.observation.trim_end().to_owned()]);
    }
    if let Some(fork) = turn.fork {
        lines.push(format!(
            "── fork: the next turn leaves {} tokens out, from token {} on",
            fork.left_out, fork.at
        ));
    }
    lines.join("\n")
}

fn call_text(action: &Action) -> String {
    let word = |key: &str| action.arguments.get(key).and_then(Value::as_str).unwrap_or_default();
    match action.name.as_str() {
        "bash" => format!("$ {}", word("command")),
        "search" => format!("search \"{}\" in {}", word("search_term"), word("path")),
        name => format!("{name} {}", word("path")).trim_end().to_owned(),
    }
}

fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Scored { reward } => format!("scored {reward}"),
        Outcome::Truncated { limit, reward } => format!("cut short by {limit:?}, scored {reward}"),
        Outcome::Aborted { by } => format!("aborted: {by:?}"),
        Outcome::Broken { stage, error } => format!("broken in {stage}: {error}"),
    }
}

fn routing_rows(routing: &orchestrate_store::StoredRouting) -> usize {
    routing.data.len() / routing.row_bytes.max(1)
}

/// How much of the trajectory the routing mask covers; all but the last token is complete.
fn coverage(record: &EpisodeRecord, stored: &StoredEpisode) -> anyhow::Result<String> {
    let summary =
        stored.attempts.iter().find(|a| a.id == record.attempt).map(|a| a.summary.clone());
    let summary: Option<EpisodeSummary> =
        summary.filter(|s| !s.is_null()).map(serde_json::from_value).transpose()?;
    let tokens = record.trajectory.as_ref().map_or(0, orchestrate_types::Trajectory::len);
    let written =
        record.trajectory.as_ref().map_or(0, orchestrate_types::Trajectory::response_tokens);
    let mask = match &record.routing {
        Some(routing) => {
            let rows = routing_rows(routing);
            format!("routing mask: {rows} of {} rows", tokens.saturating_sub(1))
        }
        None => "routing mask: not collected".to_owned(),
    };
    let cache = summary.map_or_else(String::new, |s| {
        format!("; prefix cache {} of {} prompt tokens", s.cached_tokens, s.prompt_tokens)
    });
    let turns = record.trajectory.as_ref().map_or(0, |trajectory| trajectory.turns().len());
    let by_whom = if turns > 0 && written == 0 {
        // A chat server gave words: which tokens they were is not known.
        "as counted here".to_owned()
    } else {
        format!("{written} by the policy")
    };
    Ok(format!("{tokens} tokens, {by_whom}; {mask}{cache}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_rollout::{Fork, Scaffold};

    fn shown(scaffold: Scaffold, text: &str) -> String {
        let calls = scaffold.parse(text).into_iter().flatten();
        let turn = TurnLog {
            text: text.to_owned(),
            actions: calls.map(|(action, _)| action).collect(),
            observation: "seen\n".to_owned(),
            generate_ms: 5,
            exec_ms: 7,
            fork: None,
        };
        turn_text(2, &turn)
    }

    #[test]
    fn turns_of_all_scaffolds_are_shown_alike() {
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
            let expected = format!("{head}{text}\n── calls\n{calls}\n── answer\nseen");
            assert_eq!(shown(scaffold, text), expected);
        }
    }

    #[test]
    fn a_fork_is_shown_where_it_happened() {
        let turn = TurnLog {
            text: "hm".to_owned(),
            actions: Vec::new(),
            observation: String::new(),
            generate_ms: 0,
            exec_ms: 0,
            fork: Some(Fork { at: 12, left_out: 3 }),
        };
        let text = turn_text(1, &turn);
        assert!(
            text.ends_with("none\n── fork: the next turn leaves 3 tokens out, from token 12 on")
        );
    }
}
