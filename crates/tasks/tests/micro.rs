//! Properties of the micro generator that need no Python to check.

#![expect(clippy::indexing_slicing, reason = "a failed step fails the test")]

use orchestrate_tasks::load::{self, Row};
use orchestrate_tasks::micro::{self, FAMILIES, IMAGE, MicroCounts};
use orchestrate_tasks::{Split, expert, grade, patch, r2e};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet, HashSet};

const SMALL: MicroCounts = MicroCounts { train: 300, held_out: 100, held_out_families: 100 };

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let tasks = micro::generate(1, MicroCounts::default());
    assert_eq!(tasks, micro::generate(1, MicroCounts::default()));
    let bytes = serde_json::to_vec(&tasks).unwrap();
    assert_eq!(
        blake3::hash(&bytes).to_hex().as_str(),
        "998d210f793fb7679a649f0a7b240b1626d410204626c9ac4a46cc4b74ab246b"
    );
}

#[test]
fn more_tasks_do_not_change_earlier_ones() {
    let few = micro::generate(1, MicroCounts { train: 20, held_out: 20, held_out_families: 0 });
    let many = micro::generate(1, SMALL);
    for task in few {
        assert!(many.contains(&task), "{}", task.id);
    }
    assert_ne!(micro::generate(2, SMALL)[0].problem_statement, many[0].problem_statement);
}

#[test]
fn ids_of_generated_tasks_are_recognised() {
    assert!(micro::generate(1, SMALL).iter().all(|task| micro::is_id(&task.id)));
    assert!(micro::is_id("micro__held_out_families_1000000"));
    for other in ["micro__train_1", "micro__train_", "micro__test_000001", "train_000001", ""] {
        assert!(!micro::is_id(other), "{other}");
    }
}

#[test]
fn rows_convert_to_the_generated_tasks() {
    let rows = micro::rows(4, SMALL);
    let tasks: Vec<_> = rows.iter().map(|row| row.to_task().unwrap()).collect();
    assert_eq!(tasks, micro::generate(4, SMALL));
    let folder = tempfile::tempdir().unwrap();
    let path = camino::Utf8PathBuf::from_path_buf(folder.path().join("rows.jsonl")).unwrap();
    r2e::write_rows(&path, &rows).unwrap();
    let loaded: Vec<_> = load::rows(&path).unwrap().map(Result::unwrap).collect();
    let written: Vec<_> = rows.iter().cloned().map(|row| Row::R2e(Box::new(row))).collect();
    assert_eq!(loaded, written);
    let hashes: HashSet<_> = rows.iter().map(|row| &row.commit_hash).collect();
    assert_eq!(hashes.len(), rows.len());
}

#[test]
fn recorded_logs_score_one_and_zero() {
    for row in micro::rows(4, SMALL) {
        let result = &row.execution_result_content;
        let (new, old) = (&result.new_commit_res_stdout, &result.old_commit_res_stdout);
        assert!(grade(new, &row.expected_output_json).reward > 0.5);
        let old = grade(old, &row.expected_output_json);
        assert!(old.reward < 0.5 && old.official_reward < 0.5 && !old.differing.is_empty());
    }
}

fn function_names(task: &orchestrate_tasks::Task) -> Vec<String> {
    let lines = task.agent_files[0].content.lines();
    lines
        .filter_map(|line| {
            line.strip_prefix("def ")?.split_once('(').map(|(name, _)| name.to_owned())
        })
        .collect()
}

#[test]
fn held_out_names_are_unseen_and_their_words_are_not() {
    let tasks = micro::generate(1, MicroCounts { train: 4000, ..MicroCounts::default() });
    let mut names: BTreeMap<bool, BTreeSet<String>> = BTreeMap::new();
    for task in &tasks {
        names.entry(task.split == Split::Train).or_default().extend(function_names(task));
    }
    assert!(names[&true].is_disjoint(&names[&false]));
    let words = |train| -> BTreeSet<String> {
        names[&train].iter().flat_map(|name| name.split('_')).map(str::to_owned).collect()
    };
    assert!(words(false).is_subset(&words(true)));
    let known: BTreeSet<_> = micro::words().into_iter().map(str::to_owned).collect();
    assert!(words(true).is_subset(&known));
}

#[test]
fn every_split_has_all_of_its_families_and_no_others() {
    let tasks = micro::generate(1, MicroCounts::default());
    for split in [Split::Train, Split::HeldOut, Split::HeldOutFamilies] {
        let found: BTreeSet<_> = tasks
            .iter()
            .filter(|task| task.split == split)
            .map(|task| task.family.as_str())
            .collect();
        let unseen = split == Split::HeldOutFamilies;
        let want: BTreeSet<_> = FAMILIES
            .iter()
            .filter(|family| family.held_out == unseen)
            .map(|family| family.name)
            .collect();
        assert_eq!(found, want);
    }
    let count = |held_out| FAMILIES.iter().filter(|family| family.held_out == held_out).count();
    assert!(count(false) >= 17 && count(true) >= 5);
    assert!(FAMILIES.iter().all(|family| family.variants >= 4));
}

#[test]
fn one_line_differs_and_modules_are_short() {
    for task in micro::generate(1, MicroCounts { train: 2000, ..SMALL }) {
        let files = patch::parse(&task.gold_patch).unwrap();
        assert_eq!(files.len(), 1);
        let changed = files[0].hunks.iter().flat_map(|hunk| &hunk.lines);
        assert_eq!(changed.filter(|line| line.kind != patch::LineKind::Context).count(), 2);
        let lines = task.agent_files[0].content.lines();
        assert!((5..=9).contains(&lines.clone().count()));
        assert!(lines.clone().all(|line| line.len() <= 48 && !line.contains(['"', '\\'])));
        assert!(task.problem_statement.len() < 200, "{}", task.problem_statement);
        assert!((4..=8).contains(&task.expected.len()), "{}", task.expected.len());
        assert_eq!(task.image, IMAGE);
    }
}

#[test]
fn hidden_tests_are_not_among_the_agents_files() {
    for task in micro::generate(1, SMALL) {
        for file in &task.agent_files {
            assert!(!file.path.starts_with("r2e_tests"));
            assert!(task.expected.keys().all(|test| !file.content.contains(test.as_str())));
        }
    }
}

#[test]
fn experts_end_with_submit_and_recover_in_about_one_of_eight() {
    let tasks = micro::generate(1, MicroCounts { train: 2000, held_out: 0, held_out_families: 0 });
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let (mut recoveries, mut bytes) = (0, 0);
    for task in &tasks {
        let turns = expert::episode(task, &mut rng).unwrap();
        assert_eq!(turns.last().unwrap().action.name, "submit");
        assert!(matches!(turns.len(), 4 | 6));
        recoveries += usize::from(turns.len() == 6);
        bytes += task.problem_statement.len();
        for turn in &turns {
            bytes += turn.action.arguments.to_string().len() + turn.observation.len();
        }
    }
    assert!((160..=320).contains(&recoveries), "{recoveries}");
    assert!(bytes / tasks.len() < 600, "{}", bytes / tasks.len());
}

#[test]
fn the_readme_lists_every_family() {
    let readme = include_str!("../../../environments/micro/README.md");
    for family in FAMILIES.iter() {
        let row = readme.lines().find(|line| line.starts_with(&format!("| `{}` |", family.name)));
        let phrases = row.map(|row| row.split("; ").filter(|part| !part.contains("only as a bug")));
        assert_eq!(phrases.map(Iterator::count), Some(family.variants), "{}", family.name);
    }
}
