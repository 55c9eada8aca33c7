//! Each scaffold in a real sandbox: a scripted policy repairs a micro task and is graded, and every
//! mistake on the way becomes an observation.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod common;

use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    ChatModel, EpisodeReport, Episodes, GradingRules, RolloutSection, Scaffold, grade_by_summary,
};
use orchestrate_sandbox::{DockerProvider, SandboxProvider as _, SandboxSection};
use orchestrate_tasks::{Task, micro, patch};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{HumanDuration, ModelShape, Outcome};
use serde_json::json;
use std::process::Command;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

const IMAGE: &str = "orchestrate/micro:latest";

/// Whether Docker has the image of the micro tasks.
fn has_image() -> bool {
    let found = Command::new("docker").args(["image", "inspect", IMAGE]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    orchestrate_e2e::skip::skip(
        "docker",
        &format!("image {IMAGE} not found (scripts/test builds it)"),
    );
    false
}

/// A task and its repair: the file, the wrong line and the correct line.
fn repair() -> (Task, String, String, String) {
    let counts = micro::MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
    let mut task = micro::generate(8, counts).remove(0);
    IMAGE.clone_into(&mut task.image);
    let solved = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    let (before, after) =
        task.agent_files.iter().zip(&solved).find(|(a, b)| a.content != b.content).unwrap();
    let lines = before.content.lines().zip(after.content.lines());
    let (old, new) = lines.into_iter().find(|(old, new)| old != new).unwrap();
    let found = (before.path.clone(), old.to_owned(), new.to_owned());
    assert_eq!(before.content.matches(&found.1).count(), 1);
    (task, found.0, found.1, found.2)
}

async fn episode(task: &Task, scaffold: Scaffold, turns: &[String]) -> EpisodeReport {
    let config = SandboxSection { max_containers: Some(2), ..SandboxSection::default() };
    let sandboxes = Arc::new(DockerProvider::connect(config.check().unwrap()).await.unwrap());
    let config = RolloutSection {
        scaffold: Some(scaffold),
        command_timeout: Some(HumanDuration::secs(5)),
        observation_chars: Some(2000),
        ..RolloutSection::default()
    };
    let plan = config.check().unwrap();
    let policy = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../environments/micro/policy");
    let chat = Arc::new(ChatModel::load_for(&policy, plan.chat_options(&[])).unwrap());
    let replies: Vec<Vec<u32>> = turns
        .iter()
        .map(|turn| [chat.encode(turn).unwrap(), vec![chat.end_of_turn()]].concat())
        .collect();
    let shape = ModelShape { context: 1 << 17, ..toy_shape(chat.vocab_size()) };
    let engine = FakeEngine::new(shape, move |_, call| FakeReply::Tokens {
        ids: replies[call].clone(),
        finish: Finish::Stop,
    });
    let runner = common::runner(
        Arc::new(engine),
        Arc::clone(&sandboxes) as _,
        (chat, plan),
        GradingRules::new(grade_by_summary),
    );
    let report = runner.run(common::request(task.clone()), &CancellationToken::new()).await;
    sandboxes.shutdown().await.unwrap();
    report
}

/// Asserts that the episode was solved, and that each observation starts with the expected text or, if
/// the text starts with `…`, contains the rest of it.
fn assert_solved(report: &EpisodeReport, observations: &[&str]) {
    for (number, (turn, expected)) in report.turns.iter().zip(observations).enumerate() {
        let is_expected = match expected.strip_prefix('…') {
            Some(part) => turn.observation.contains(part),
            None => turn.observation.starts_with(expected),
        };
        assert!(is_expected, "turn {number}: expected {expected:?}, got {:?}", turn.observation);
    }
    assert_eq!(report.turns.len(), observations.len() + 1, "{:?}", report.turns.last());
    assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 }, "{:?}", report.verdict);
    assert_eq!(report.turns.last().unwrap().actions.last().unwrap().name, "submit");
    let trajectory = report.trajectory().unwrap();
    assert_eq!(report.routing().unwrap().rows(), trajectory.len() - 1);
}

#[tokio::test]
async fn docker_tools_repairs_a_micro_task() {
    if !has_image() {
        return;
    }
    let (task, path, old, new) = repair();
    let call = |name: &str, arguments: serde_json::Value| {
        format!("<tool_call>{}</tool_call>", json!({"name": name, "arguments": arguments}))
    };
    let edit = |path: &str, old: &str, new: &str| {
        call("edit", json!({"path": path, "old_str": old, "new_str": new}))
    };
    let turns = [
        call("bash", json!({"command": format!("cat {path}; mkdir folder; ln -s /etc link")})),
        edit("folder", "", "x"),
        edit("link/x", "", "x"),
        edit(&format!("{path}/x"), "", "x"),
        edit(&path, &old, &new),
        call("bash", json!({"command": micro::RUN_COMMAND})),
        call("submit", json!({})),
    ];
    let report = episode(&task, Scaffold::Tools, &turns).await;
    // Paths that cannot be files are mistakes of the policy, not failures.
    let observations =
        ["…def ", "cannot write folder", "cannot write /", "cannot write /", "ok", "ok"];
    assert_solved(&report, &observations);
}

fn function(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameters: Vec<String> = parameters
        .iter()
        .map(|(name, value)| format!("<parameter={name}>{value}</parameter>\n"))
        .collect();
    format!("I go on.\n<function={name}>\n{}</function>", parameters.concat())
}

#[tokio::test]
async fn docker_r2e_xml_repairs_a_micro_task() {
    if !has_image() {
        return;
    }
    let (task, path, old, new) = repair();
    let full = format!("{}/{path}", task.workdir);
    let editor = |command: &str, path: &str, more: &[(&str, &str)]| {
        function("file_editor", &[&[("command", command), ("path", path)], more].concat())
    };
    let bash = |command: &str| function("execute_bash", &[("cmd", command)]);
    let search =
        |term: &str, path: &str| function("search", &[("search_term", term), ("path", path)]);
    let scratch = format!("{}/scratch.py", task.workdir);
    let turns = [
        editor("view", &task.workdir, &[]),
        editor("view", &full, &[]),
        editor("view", &full, &[("view_range", "[1, 2]")]),
        editor("view", "/nothing", &[]),
        editor("view", "/etc/passwd", &[]),
        search("def ", "."),
        search("def", &full),
        search("no such text", "."),
        search("--version", "-r"),
        editor("str_replace", &full, &[("old_str", &old), ("new_str", "    pass")]),
        editor("undo_edit", &full, &[]),
        editor("str_replace", &full, &[("old_str", &old), ("new_str", &new)]),
        editor("str_replace", &full, &[("old_str", "not there")]),
        editor("create", &scratch, &[("file_text", "import sys\nprint('out')")]),
        editor("create", &scratch, &[("file_text", "x")]),
        editor("create", "/etc/x.py", &[("file_text", "x")]),
        editor("create", &format!("{scratch}/x"), &[("file_text", "x")]),
        editor(
            "insert",
            &scratch,
            &[("insert_line", "1"), ("new_str", "print('wrong', file=sys.stderr)")],
        ),
        bash("python3 scratch.py; exit 3"),
        bash("git log"),
        bash("sleep 30"),
        bash("seq 1 200"),
        bash("rm scratch.py; mkdir folder; ls /tmp"),
        editor("create", "folder", &[("file_text", "x")]),
        "I am done.".to_owned(),
        bash(micro::RUN_COMMAND),
        function("finish", &[("command", "submit")]),
    ];
    let report = episode(&task, Scaffold::R2eXml, &turns).await;
    let edited = |text: &str| format!("Execution output of [file_editor]:\n{text}");
    let ran = "Execution output of [execute_bash]:\n";
    let snippet = format!("The file {full} has been edited. Here's the result of running `cat -n`");
    let observations = [
        edited("Here's the files and directories up to 2 levels deep in /"),
        edited("Here's the result of running `cat -n` on the file: "),
        format!("…file: {full}:\n     1 "),
        edited("ERROR: The path '/nothing' does not exist."),
        edited("ERROR: Only Python files can be viewed"),
        "…Execution output of [search]:\nFound ".to_owned(),
        "…Execution output of [search]:\nMatches for \"def\" in /".to_owned(),
        "…No matches found for \"no such text\" in /".to_owned(),
        "…Directory '-r' not found or not a directory.".to_owned(),
        edited(&snippet),
        edited(&format!("Last edit to {full} undone. ")),
        edited(&snippet),
        edited("ERROR: No occurrences of 'not there' found in "),
        edited(&format!("File created at {scratch}. ")),
        edited("ERROR: File already exists at: "),
        edited("ERROR: The path '/etc/x.py' is outside "),
        edited("ERROR: cannot write /"),
        edited(&format!("The file {scratch} has been edited. ")),
        format!(
            "Exit code: Error: Exit code 3\n{ran}Error executing command:\n\n[STDOUT]\n\nout \n\n\
             [STDERR]\n\nwrong\nSteps Remaining: 21"
        ),
        format!("Exit code: Error: Exit code 1\n{ran}Bash command 'git' is not allowed."),
        format!("Exit code: -1\n{ran}The command took too long to execute (>5s)"),
        "…\n38\n-----".to_owned(),
        format!("Exit code: 0\n{ran}[STDOUT]\n\n \n\n[STDERR]\n\n\nSteps Remaining: 17"),
        edited("ERROR: cannot write folder"),
        "No function call found.".to_owned(),
        format!("Exit code: 0\n{ran}[STDOUT]\n\nok \n\n[STDERR]"),
    ];
    let observations: Vec<&str> = observations.iter().map(String::as_str).collect();
    assert_solved(&report, &observations);
    assert!(!report.patch.contains("scratch"), "{}", report.patch);
}

#[tokio::test]
async fn docker_mini_repairs_a_micro_task() {
    if !has_image() {
        return;
    }
    let (task, path, old, new) = repair();
    let bash = |command: &str| format!("THOUGHT: I go on.\n\n```bash\n{command}\n```");
    let turns = [
        bash(&format!("cat {path}")),
        bash("cd / && export NAME=x"),
        bash("pwd; echo \"$NAME $PAGER\" >&2"),
        bash("sleep 30"),
        bash("false && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        "no command".to_owned(),
        bash("seq 1 2000"),
        bash(&format!(
            "cat <<'EOT' > /tmp/edit.py\nimport pathlib\nfile = pathlib.Path({path:?})\n\
             file.write_text(file.read_text().replace({old:?}, {new:?}))\nEOT\npython3 /tmp/edit.py"
        )),
        bash(micro::RUN_COMMAND),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ];
    let report = episode(&task, Scaffold::Mini, &turns).await;
    let folder = format!("<returncode>0</returncode>\n<output>\n{}\n cat\n</output>", task.workdir);
    let observations = [
        "<returncode>0</returncode>\n<output>\n",
        "<returncode>0</returncode>\n<output>\n</output>",
        folder.as_str(),
        "<exception>the command timed out after 5 seconds</exception>\n<returncode>-1</returncode>",
        "<returncode>1</returncode>\n<output>\n</output>",
        "Format error:\n\n<error>\nfound 0 bash blocks",
        "…</warning><output_head>\n1\n2\n3\n",
        "<returncode>0</returncode>\n<output>\n</output>",
        "<returncode>0</returncode>\n<output>\nok\n</output>",
    ];
    assert_solved(&report, &observations);
    assert!(report.turns[6].observation.ends_with("1999\n2000\n\n</output_tail>"));
}
