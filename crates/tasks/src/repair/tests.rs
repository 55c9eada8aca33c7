use super::*;
use crate::verify::graded_tree;

const SOURCE: &str = "def double(n):\n    return n * 2\n\n\ndef half(n):\n    return n / 2\n";

fn new_generator() -> TaskGenerator {
    let file = |path: &str, content: &str| TaskFile { path: path.into(), content: content.into() };
    let repository = Repository {
        name: "calc".into(),
        files: vec![
            file("calc.py", SOURCE),
            file("tests/test_double.py", "from calc import double"),
            file("tests/test_half.py", "from calc import half"),
        ],
        left_out: Vec::new(),
    };
    TaskGenerator::new(repository, "image".into(), vec!["tests".into()])
}

fn log(lines: &[&str]) -> Vec<u8> {
    format!("noise\n=== short test summary info ===\n{}\n2 passed\n", lines.join("\n")).into_bytes()
}

const DOUBLE: &str = "tests/test_double.py::test_double";
const HALF: &str = "tests/test_half.py::test_half[a - b]";
const ODD: &str = "tests/test_half.py::test_odd";

fn with_baseline() -> TaskGenerator {
    let mut generator = new_generator();
    let passed = |tests: &[&str]| tests.iter().map(|t| format!("PASSED {t}")).collect::<Vec<_>>();
    let lines = passed(&[DOUBLE, HALF]);
    let mut first: Vec<&str> = lines.iter().map(String::as_str).collect();
    first
        .extend(["FAILED tests/test_half.py::test_odd - assert 1", "ERROR tests/test_x.py - Boom"]);
    let second = [first.as_slice(), &["PASSED tests/test_half.py::test_now_and_then"]].concat();
    let left_out =
        generator.record_baseline([&log(&first), &log(&second)], Duration::from_secs(3)).unwrap();
    assert_eq!(left_out, ["tests/test_half.py::test_now_and_then", ODD, "tests/test_x.py"]);
    generator
}

fn mutant(generator: &TaskGenerator) -> Mutant {
    let found = generator.mutants(7).into_iter().map(|(_, mutant)| mutant);
    found.into_iter().find(|m| m.fault == Fault::Arithmetic && m.function == "double").unwrap()
}

#[test]
fn tests_that_do_not_pass_each_time_are_left_out() {
    let generator = with_baseline();
    let keys: Vec<&str> = generator.expected().keys().map(String::as_str).collect();
    assert_eq!(keys, ["test_double", "test_half[a"]);
    let command = generator.baseline_task().test_command;
    assert!(command.contains("--deselect 'tests/test_half.py::test_odd'"), "{command}");
    assert!(command.contains("--ignore 'tests/test_x.py'"), "{command}");
    assert!(command.ends_with(" 'tests'"), "{command}");
    assert_eq!(generator.baseline_task().test_timeout, Duration::from_secs(100));
}

#[test]
fn a_baseline_needs_a_summary_and_a_passing_test() {
    let failing = log(&["FAILED tests/test_double.py::test_double"]);
    let none = b"no module named pytest".to_vec();
    assert_eq!(
        new_generator().record_baseline([&none, &none], Duration::ZERO),
        Err(Rejection::NoSummary)
    );
    assert_eq!(
        new_generator().record_baseline([&failing, &failing], Duration::ZERO),
        Err(Rejection::Undetected)
    );
}

#[test]
fn a_fault_that_some_tests_detect_becomes_a_task() {
    let generator = with_baseline();
    let mutant = mutant(&generator);
    let log = [
        b"\norchestrate-failure: {\"test\": \"tests/test_double.py::test_double\", \
          \"message\": \"assert 1 == 4\"}\n"
            .to_vec(),
        log(&[&format!("FAILED {DOUBLE} - assert 1 == 4"), &format!("PASSED {HALF}")]),
    ]
    .concat();
    let row = generator.make_row("calc.py", &mutant, &log).unwrap();
    let line = serde_json::to_string(&row).unwrap();
    assert_eq!(serde_json::from_str::<R2eRow>(&line).unwrap(), row);

    let task = row.to_task().unwrap();
    assert_eq!((task.environment.as_str(), task.family.as_str()), ("repair", "arithmetic"));
    assert!(task.problem_statement.starts_with("calc: double does not work"));
    assert!(task.problem_statement.contains("assert 1 == 4"));
    assert!(!task.problem_statement.contains("n * 2"));
    let given: Vec<&str> = task.agent_files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(given, ["calc.py", "tests/test_half.py"]);
    assert!(task.agent_files[0].content.contains("n // 2\n"));
    let graded = graded_tree(&task, &task.gold_patch).unwrap();
    let solved = graded.iter().find(|file| file.path == "calc.py").unwrap();
    assert_eq!(solved.content, SOURCE);
    assert!(graded.iter().any(|file| file.path == "tests/test_double.py"));
    assert!(graded.iter().any(|file| file.path == RUNNER_PATH));
}

#[test]
fn faults_that_no_test_or_every_test_detects_are_rejected() {
    let generator = with_baseline();
    let mutant = mutant(&generator);
    let rejection =
        |lines: &[&str]| generator.make_row("calc.py", &mutant, &log(lines)).unwrap_err();
    let (double, half) = (format!("PASSED {DOUBLE}"), format!("PASSED {HALF}"));
    assert_eq!(rejection(&[&double, &half]), Rejection::Undetected);
    assert_eq!(
        rejection(&["ERROR tests - ImportError"]),
        Rejection::TooManyFailures { failed: 3, total: 2 }
    );
    assert_eq!(
        generator.make_row("calc.py", &mutant, b"Killed").unwrap_err(),
        Rejection::NoSummary
    );
    let mixed = [
        format!("{FAILURE_PREFIX}{{\"test\": \"{DOUBLE}\", \"message\": \"a\"}}\n").into_bytes(),
        format!("{FAILURE_PREFIX}{{\"test\": printed by the tree\n").into_bytes(),
        log(&[&format!("FAILED {DOUBLE} - assert 1 == 4"), &half]),
    ];
    assert_eq!(
        generator.make_row("calc.py", &mutant, &mixed.concat()).unwrap_err(),
        Rejection::UnreadableFailures { unreadable: 1 }
    );
}

#[test]
fn the_order_depends_on_the_seed_and_kinds_of_faults_alternate() {
    let generator = with_baseline();
    let order = |seed| generator.mutants(seed).into_iter().map(|(_, m)| m).collect::<Vec<_>>();
    assert_eq!(order(1), order(1));
    assert!((2..40).any(|seed| order(seed) != order(1)));
    let kinds: Vec<Fault> = order(1).iter().take(3).map(|m| m.fault).collect();
    assert_eq!(kinds, [Fault::Arithmetic, Fault::Constant, Fault::DroppedReturn]);
}

#[test]
fn the_share_of_held_out_functions_is_as_requested() {
    let share = |share| (0..1000).filter(|n| is_held_out(1, "a.py", &n.to_string(), share)).count();
    assert_eq!((share(0.0), share(1.0)), (0, 1000));
    assert!((150..250).contains(&share(0.2)), "{}", share(0.2));
}
