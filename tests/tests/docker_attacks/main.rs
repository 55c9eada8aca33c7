//! Attacks on the reward, written as data in `tests/attacks`, against each family of tasks: real
//! episodes, real containers and real grading; only the sampler is scripted.
//!
//! No attack may be rewarded, earn another attempt, or affect another episode.
//! `ORCHESTRATE_ATTACKS` selects them: `sample` (the default, every twelfth of them), `all` (as
//! `scripts/nightly` does), `K/N` (those whose number leaves the remainder K; like the sample without
//! those that wait for a timeout), or words separated by commas of which a name contains one.
//! `ORCHESTRATE_ATTACK_REPEATS` is the number of repeats, which must all end in the same way. A table of all results is written to
//! `target/attacks/FAMILY.md`.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod data;
mod families;
mod listing;
mod load;
mod play;

use data::{Attack, attacks};
use families::{Family, Target};
use futures::future::join_all;
use listing::Listing;
use orchestrate_e2e::{docker_or_skip, root, say};
use orchestrate_types::Outcome;
use play::World;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Attackers that run at the same time, next to one honest neighbour.
const AT_ONCE: usize = 3;
/// One of so many attacks is in the sample, another one for each family.
const SAMPLE: usize = 12;
/// Rewards are 0 or 1; this is the greatest that counts as 0.
const NOTHING: f64 = 1e-9;

/// What one attack came to, over all repeats.
#[derive(Debug, Default)]
struct Tally {
    outcomes: Vec<String>,
    wrong: Vec<String>,
    seconds: f64,
}

fn repeats() -> usize {
    std::env::var("ORCHESTRATE_ATTACK_REPEATS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// The attacks on `family` that are selected by the environment.
fn selected(family: Family, target: &Target) -> Vec<Attack> {
    let all = attacks(family, target);
    let choice = std::env::var("ORCHESTRATE_ATTACKS").unwrap_or_else(|_| "sample".to_owned());
    let part = choice
        .split_once('/')
        .and_then(|(k, n)| Some((k.parse::<usize>().ok()?, n.parse::<usize>().ok()?)));
    let chosen = |(number, attack): &(usize, Attack)| match (choice.as_str(), part) {
        ("all", _) => true,
        ("sample", _) => !attack.slow && number % SAMPLE == family as usize,
        (_, Some((k, n))) => !attack.slow && number % n == k,
        (words, None) => words.split(',').any(|word| attack.name.contains(word.trim())),
    };
    all.into_iter().enumerate().filter(chosen).map(|(_, attack)| attack).collect()
}

/// Judges one attack's report: its outcome as text, and every violation in it.
fn judge(attack: &Attack, report: &orchestrate_rollout::EpisodeReport) -> (String, Vec<String>) {
    let mut wrong = Vec::new();
    let outcome = match &report.outcome {
        Outcome::Scored { reward } => {
            if *reward > NOTHING {
                wrong.push("REWARDED".to_owned());
            }
            format!("scored {reward}")
        }
        Outcome::Truncated { limit, reward } => {
            if *reward > NOTHING {
                wrong.push("REWARDED".to_owned());
            }
            format!("truncated {limit:?}")
        }
        Outcome::Broken { stage, error } => {
            wrong.push("ANOTHER ATTEMPT".to_owned());
            let line = error.lines().next().unwrap_or_default();
            format!("broken {stage:?}: {}", line.chars().take(90).collect::<String>())
        }
        Outcome::Aborted { by } => {
            wrong.push("ANOTHER ATTEMPT".to_owned());
            format!("aborted {by:?}")
        }
    };
    let seen = report.turns.get(attack.commands.len() - 1).map(|turn| turn.observation.as_str());
    if !seen.is_some_and(|seen| seen.contains(&attack.says)) {
        let seen: String = seen.unwrap_or("no turn").chars().take(300).collect();
        wrong.push(format!("trap not set: {seen:?}"));
    }
    (outcome, wrong)
}

/// Runs every selected attack on a family, each wave of them next to an honest episode, and compares
/// the sandboxes that are pooled afterwards with a new one.
async fn no_attack_is_rewarded(family: Family) {
    if !docker_or_skip(&format!("docker_no_attack_on_{family:?}")).unwrap() {
        return;
    }
    let world = World::new().await;
    let Some(target) = Target::new(family, &world).await else { return };
    let attacks = selected(family, &target);
    assert!(!attacks.is_empty(), "no attack is selected");
    let new =
        if family.is_pooled() { Some(Listing::of_new(&world, &target.task).await) } else { None };
    // The harness itself can tell a solution from none.
    let honest_task = target.honest();
    let honest = world.episode(&honest_task, &target.solution).await;
    assert_eq!(honest.outcome, Outcome::Scored { reward: 1.0 }, "{:?}", honest.verdict);
    let idle = world.episode(&honest_task, &["true".to_owned()]).await;
    assert_eq!(idle.outcome, Outcome::Scored { reward: 0.0 }, "{:?}", idle.verdict);

    let mut table: BTreeMap<String, Tally> = BTreeMap::new();
    let mut others: Vec<String> = Vec::new();
    for _ in 0..repeats() {
        for wave in attacks.chunks(AT_ONCE) {
            let episodes = wave.iter().map(|attack| world.episode(&target.task, &attack.commands));
            let neighbour = world.episode(&honest_task, &target.solution);
            let (reports, neighbour) = tokio::join!(join_all(episodes), neighbour);
            for (attack, report) in wave.iter().zip(reports) {
                let (outcome, wrong) = judge(attack, &report);
                say(&format!("{}: {outcome} {}", attack.name, wrong.join("; ")));
                let tally = table.entry(attack.name.clone()).or_default();
                tally.outcomes.push(outcome);
                tally.wrong.extend(wrong);
                tally.seconds += report.timings.exec_s + report.timings.grade_s;
            }
            let names: Vec<&str> = wave.iter().map(|attack| attack.name.as_str()).collect();
            if neighbour.outcome != (Outcome::Scored { reward: 1.0 }) {
                others.push(format!("neighbour of {names:?}: {:?}", neighbour.outcome));
            }
            if let Some(new) = &new {
                for difference in new.differences(&world, &target.task, AT_ONCE + 1).await {
                    others.push(format!("after {names:?}: {difference}"));
                }
            }
        }
    }
    world.shutdown().await;
    for tally in table.values_mut() {
        let first = tally.outcomes[0].clone();
        if tally.outcomes.iter().any(|outcome| *outcome != first) {
            tally.wrong.push(format!("not stable: {:?}", tally.outcomes));
        }
    }
    report(family, &table, &others);
}

/// Prints and writes the table, and fails if anything is wrong.
fn report(family: Family, table: &BTreeMap<String, Tally>, others: &[String]) {
    let mut text = String::from("| Attack | Outcome | Seconds | Wrong |\n|---|---|---|---|\n");
    let mut wrong = Vec::new();
    for (name, tally) in table {
        let (outcome, faults) = (&tally.outcomes[0], tally.wrong.join("; ").replace('|', "/"));
        writeln!(text, "| `{name}` | {outcome} | {:.1} | {faults} |", tally.seconds).unwrap();
        if !tally.wrong.is_empty() {
            wrong.push(format!("{name}: {outcome}: {faults}"));
        }
    }
    for other in others {
        writeln!(text, "\n{other}").unwrap();
    }
    let folder = root().join("target/attacks");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(format!("{family:?}.md")), &text).unwrap();
    say(&text);
    say(&format!("{family:?}: {} attacks, {} wrong", table.len(), wrong.len()));
    wrong.extend(others.iter().cloned());
    assert!(wrong.is_empty(), "{family:?}:\n{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_no_attack_on_micro_is_rewarded() {
    no_attack_is_rewarded(Family::Micro).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_no_attack_on_repair_is_rewarded() {
    no_attack_is_rewarded(Family::Repair).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_no_attack_on_r2e_is_rewarded() {
    no_attack_is_rewarded(Family::R2e).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_no_attack_on_swe_bench_is_rewarded() {
    no_attack_is_rewarded(Family::SweBench).await;
}

#[test]
fn attacks_are_many_and_each_has_a_name_of_its_own() {
    for family in Family::ALL {
        let attacks = attacks(family, &Target::example());
        let mut names: Vec<&str> = attacks.iter().map(|attack| attack.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), attacks.len());
        assert!(attacks.len() >= 100, "{family:?}: {}", attacks.len());
        for attack in &attacks {
            let left = attack.commands.iter().any(|command| {
                ["@MODULE@", "@NAME@", "@SOURCE@", "@FORGED", "@CODE@", "@LIBRARY@"]
                    .iter()
                    .any(|word| command.contains(word))
            });
            assert!(!left && !attack.tries.is_empty(), "{}", attack.name);
        }
    }
}
