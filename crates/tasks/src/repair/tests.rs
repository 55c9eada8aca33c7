use super::*;
use crate::verify::graded_tree;

const SOURCE: &str = "def double(n):\n    return n * 2\n\n\ndef half(n):\n    return n / 2\n";

fn bench() -> Bench {
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
    Bench::new(repository, "image".into(), vec!["tests".into()])
}

fn log(lines: &[&str]) -> Vec<u8> {
    format!("noise\n=== short test summary info ===\n{}\n2 passed\n", lines.join("\n")).into_bytes()
}

const DOUBLE: &str = "tests/test_double.py::test_double";
const HALF: &str = "tests/test_half.py::test_half[a - b]";
const ODD: &str = "tests/test_half.py::test_odd";

fn learned() -> Bench {
    let mut bench = bench();
    let passed = |tests: &[&str]| tests.iter().map(|t| format!("PASSED {t}")).collect::<Vec<_>>();
    let lines = passed(&[DOUBLE, HALF]);
    let mut first: Vec<&str> = lines.iter().map(String::as_str).collect();
    first
        .extend(["FAILED tests/test_half.py::test_odd - assert 1", "ERROR tests/test_x.py - Boom"]);
    let second = [first.as_slice(), &["PASSED tests/test_half.py::test_now_and_then"]].concat();
    let left_out = bench.learn([&log(&first), &log(&second)], Duration::from_secs(3)).unwrap();
    assert_eq!(left_out, ["tests/test_half.py::test_now_and_then", ODD, "tests/test_x.py"]);
    bench
}

fn mutant(bench: &Bench) -> Mutant {
    let found = bench.mutants(7).into_iter().map(|(_, mutant)| mutant);
    found.into_iter().find(|m| m.fault == Fault::Arithmetic && m.function == "double").unwrap()
}

#[test]
fn what_does_not_pass_each_time_is_not_run_again() {
    let bench = learned();
    let keys: Vec<&str> = bench.expected().keys().map(String::as_str).collect();
    assert_eq!(keys, ["test_double", "test_half[a"]);
    let command = bench.untouched().test_command;
    assert!(command.contains("--deselect 'tests/test_half.py::test_odd'"), "{command}");
    assert!(command.contains("--ignore 'tests/test_x.py'"), "{command}");
    assert!(command.ends_with(" 'tests'"), "{command}");
    assert_eq!(bench.untouched().test_timeout, Duration::from_secs(100));
}

#[test]
fn tests_that_do_not_run_or_never_pass_are_no_bench() {
    let failing = log(&["FAILED tests/test_double.py::test_double"]);
    let none = b"no module named pytest".to_vec();
    assert_eq!(bench().learn([&none, &none], Duration::ZERO), Err(Rejection::NoEnd));
    assert_eq!(bench().learn([&failing, &failing], Duration::ZERO), Err(Rejection::Unseen));
}

#[test]
fn a_fault_that_some_tests_see_becomes_a_row_that_is_a_task() {
    let bench = learned();
    let mutant = mutant(&bench);
    let log = [
        b"\norchestrate-failure: {\"test\": \"tests/test_double.py::test_double\", \
          \"message\": \"assert 1 == 4\"}\n"
            .to_vec(),
        log(&[&format!("FAILED {DOUBLE} - assert 1 == 4"), &format!("PASSED {HALF}")]),
    ]
    .concat();
    let row = bench.judge("calc.py", &mutant, &log).unwrap();
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
fn faults_that_nobody_or_everybody_sees_are_no_tasks() {
    let bench = learned();
    let mutant = mutant(&bench);
    let judge = |lines: &[&str]| bench.judge("calc.py", &mutant, &log(lines)).unwrap_err();
    let (double, half) = (format!("PASSED {DOUBLE}"), format!("PASSED {HALF}"));
    assert_eq!(judge(&[&double, &half]), Rejection::Unseen);
    assert_eq!(judge(&["ERROR tests - ImportError"]), Rejection::TooMuch { broken: 3, total: 2 });
    assert_eq!(bench.judge("calc.py", &mutant, b"Killed").unwrap_err(), Rejection::NoEnd);
}

#[test]
fn the_order_depends_on_the_seed_and_faults_take_turns() {
    let bench = learned();
    let order = |seed| bench.mutants(seed).into_iter().map(|(_, m)| m).collect::<Vec<_>>();
    assert_eq!(order(1), order(1));
    assert!((2..40).any(|seed| order(seed) != order(1)));
    let kinds: Vec<Fault> = order(1).iter().take(3).map(|m| m.fault).collect();
    assert_eq!(kinds, [Fault::Arithmetic, Fault::Constant, Fault::DroppedReturn]);
}

#[test]
fn held_out_functions_are_a_share_of_all() {
    let share = |share| (0..1000).filter(|n| is_held_out(1, "a.py", &n.to_string(), share)).count();
    assert_eq!((share(0.0), share(1.0)), (0, 1000));
    assert!((150..250).contains(&share(0.2)), "{}", share(0.2));
}
