//! Unmodified agents with their own loops in real sandboxes without network: each repairs micro tasks
//! through the gateway with a scripted engine. The rows of every branch are those of a prefill of the
//! whole branch, and every sampled token is trained on once.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod common;

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    AGENT_FOLDER, Action, AgentPreset, AgentSection, ChatModel, EpisodeReport, EpisodeRunner,
    Episodes, GradingRules, RolloutSection, Scaffold, grade_by_summary,
};
use orchestrate_sandbox::{
    DockerProvider, ImageHooks, ImageLayer, SandboxProvider as _, SandboxSection,
};
use orchestrate_tasks::{Task, micro, patch};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{ByteSize, ModelShape, Outcome};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio_util::sync::CancellationToken;

const IMAGE: &str = "orchestrate/micro:latest";

/// An agent under test: its settings, and the name and argument of its tool that runs commands.
struct Case {
    name: &'static str,
    agent: AgentSection,
    tool: &'static str,
    argument: &'static str,
    /// The command that ends its work; `None` if it ends with a reply without calls.
    last: Option<&'static str>,
}

fn has_image() -> bool {
    let found = Command::new("docker").args(["image", "inspect", IMAGE]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    orchestrate_e2e::skip::skip("docker", &format!("no image {IMAGE} (scripts/test builds it)"));
    false
}

fn tasks(count: usize) -> Vec<Task> {
    let counts = micro::MicroCounts { train: count, held_out: 0, held_out_families: 0 };
    let mut tasks = micro::generate(8, counts);
    for task in &mut tasks {
        IMAGE.clone_into(&mut task.image);
    }
    tasks
}

/// A command that writes the solved files.
fn repair(task: &Task) -> String {
    let solved = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    let changed = task.agent_files.iter().zip(&solved).filter(|(a, b)| a.content != b.content);
    let files: Vec<_> = changed.map(|(_, file)| (&file.path, &file.content)).collect();
    // In hexadecimal, because agents change quotes and escapes in commands.
    let json = serde_json::to_vec(&files).unwrap();
    let hex: Vec<String> = json.iter().map(|byte| format!("{byte:02x}")).collect();
    let program = "import json; [open(p, 'w').write(t) for p, t in json.loads(bytes.fromhex";
    format!("python3 -c \"{program}('{}'))]\"", hex.concat())
}

/// Replies: a look around, the repair, and the end.
fn script(case: &Case, task: &Task, chat: &ChatModel) -> Vec<Vec<u32>> {
    let call = |command: &str| {
        let mut arguments = json!({ case.argument: command });
        if case.agent.preset.is_some() {
            arguments["description"] = "run a command".into();
        }
        Action { name: case.tool.to_owned(), arguments }
    };
    let mut replies = vec![
        chat.assistant("I look around.", &[call("ls")]).unwrap(),
        chat.assistant("I repair it.", &[call(&repair(task))]).unwrap(),
    ];
    replies.push(match case.last {
        Some(command) => chat.assistant("Done.", &[call(command)]).unwrap(),
        None => chat.assistant("It is done.", &[]).unwrap(),
    });
    // An agent that asks for a call gets one that ends it.
    let submit = Action { name: "submit".to_owned(), arguments: json!({}) };
    replies.push(chat.assistant("", &[submit]).unwrap());
    replies
}

async fn run(case: &Case, task: &Task, layer: ImageLayer) -> (EpisodeReport, usize) {
    let hooks = ImageHooks { agent_layer: Some(layer), ..ImageHooks::default() };
    let config = SandboxSection {
        max_containers: Some(2),
        memory: Some(ByteSize::mib(3072)),
        cpu_millis: Some(2000),
        tmpfs: Some(ByteSize::mib(512)),
        pids: Some(512),
        ..SandboxSection::default()
    };
    let sandboxes =
        Arc::new(DockerProvider::connect_with(config.check().unwrap(), hooks).await.unwrap());
    let config = RolloutSection {
        scaffold: Some(Scaffold::Command),
        max_sequence_tokens: Some(1 << 18),
        episode_timeout: Some("3m".parse().unwrap()),
        ..RolloutSection::default()
    };
    let plan = config.check().unwrap();
    let policy = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../environments/micro/policy");
    let chat = Arc::new(ChatModel::load_for(&policy, plan.chat_options()).unwrap());
    let replies = script(case, task, &chat);
    let end = chat.assistant("It is done.", &[]).unwrap();
    let shape = ModelShape { context: 1 << 19, ..toy_shape(chat.vocab_size()) };
    // Counted over all branches.
    let calls = AtomicUsize::new(0);
    let engine = Arc::new(FakeEngine::new(shape, move |_, _| FakeReply::Tokens {
        ids: replies.get(calls.fetch_add(1, Ordering::Relaxed)).unwrap_or(&end).clone(),
        finish: Finish::Stop,
    }));
    let runner = common::runner(
        Arc::clone(&engine) as _,
        Arc::clone(&sandboxes) as _,
        (chat, plan),
        GradingRules::new(grade_by_summary),
    );
    let agent = Some(Arc::new(case.agent.check().unwrap()));
    let container_limits = sandboxes.config().limits();
    let runner = EpisodeRunner { agent, container_limits, ..runner };
    let report = runner.run(common::request(task.clone()), &CancellationToken::new()).await;
    sandboxes.shutdown().await.unwrap();
    let sampled = report.branches.iter().map(|branch| branch.trajectory.response_tokens()).sum();
    (report, sampled)
}

/// Every row is a function of position, token and version 0 in this engine.
fn check_rows(report: &EpisodeReport) {
    assert_eq!(report.routing_problem, None);
    for branch in &report.branches {
        let tokens = branch.trajectory.token_ids();
        let mask = branch.routing.as_ref().unwrap();
        assert_eq!(mask.rows(), tokens.len() - 1);
        for (position, token) in tokens.iter().enumerate().take(mask.rows()) {
            for layer in [1, 2] {
                let first = position * 7 + *token as usize * 3 + layer * 5;
                let expected: Vec<usize> = (0..2).map(|slot| (first + slot) % 8).collect();
                assert_eq!(mask.experts(position, layer), Some(expected), "row {position}");
            }
        }
    }
}

async fn solves(case: Case, folder: Utf8PathBuf) {
    let layer = ImageLayer::of_folder(&folder, AGENT_FOLDER).unwrap();
    let count = std::env::var("ORCHESTRATE_AGENT_TASKS").ok().and_then(|n| n.parse().ok());
    let mut forks = 0;
    let tasks = tasks(count.unwrap_or(1));
    for task in &tasks {
        let (report, sampled) = run(&case, task, layer.clone()).await;
        let shown: Vec<_> = report.turns.iter().map(|t| (&t.text, &t.observation)).collect();
        assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 }, "{}: {shown:?}", case.name);
        check_rows(&report);
        // Sampled tokens are those of all turns, each once.
        assert!(sampled > 0 && report.turns.len() >= 3);
        forks += report.forks.values().sum::<u64>();
    }
    let (name, count) = (case.name, tasks.len());
    orchestrate_e2e::say(&format!(
        "{name}: {count} of {count} tasks solved, {forks} forks, 0 wrong rows"
    ));
}

async fn preset(
    preset: AgentPreset,
    name: &'static str,
    tool: &'static str,
    argument: &'static str,
) {
    if !has_image() {
        return;
    }
    let folder = std::env::var("ORCHESTRATE_AGENTS").map(|root| Utf8PathBuf::from(root).join(name));
    let Some(folder) = folder.ok().filter(|folder| folder.is_dir()) else {
        let why = format!("set ORCHESTRATE_AGENTS to a folder that has {name}");
        orchestrate_e2e::skip::skip("agents", &why);
        return;
    };
    let agent = AgentSection { preset: Some(preset), ..AgentSection::default() };
    let last = (preset == AgentPreset::MiniSweAgent)
        .then_some("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT");
    solves(Case { name, agent, tool, argument, last }, folder).await;
}

#[tokio::test]
async fn docker_a_minimal_agent_repairs_micro_tasks() {
    if !has_image() {
        return;
    }
    let folder = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/minimal-agent");
    let command = "exec python3 \"$AGENT_DIR/agent.py\"".to_owned();
    let agent = AgentSection { command: Some(command), ..AgentSection::default() };
    let name = "minimal agent";
    solves(Case { name, agent, tool: "bash", argument: "command", last: None }, folder).await;
}

/// Opens a tunnel to the listed address, tries another address, then runs the minimal agent.
const THROUGH_THE_PROXY: &str = r#"python3 - <<'END' || exit 3
import http.client, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
def tunnel(port):
    client = http.client.HTTPConnection(proxy.hostname, proxy.port, timeout=20)
    client.set_tunnel("127.0.0.1", port)
    client.request("GET", "/")
    return client.getresponse().read()
port = int(os.environ["LISTED"])
assert tunnel(port) == b"outside"
try:
    raise SystemExit(f"not refused: {tunnel(port + 1)}")
except OSError as error:
    assert "403" in str(error), error
END
exec python3 "$AGENT_DIR/agent.py"
"#;

#[tokio::test]
async fn docker_an_agent_reaches_the_listed_address_and_no_other() {
    if !has_image() {
        return;
    }
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = outside.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = outside.accept().unwrap();
        assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\noutside").unwrap();
    });
    let folder = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/minimal-agent");
    let agent = AgentSection {
        command: Some(THROUGH_THE_PROXY.to_owned()),
        env: Some(vec![format!("LISTED={port}")]),
        egress: Some(vec![format!("127.0.0.1:{port}")]),
        ..AgentSection::default()
    };
    let name = "agent with a proxy";
    solves(Case { name, agent, tool: "bash", argument: "command", last: None }, folder).await;
    server.join().unwrap();
}

#[tokio::test]
async fn docker_mini_swe_agent_repairs_micro_tasks() {
    preset(AgentPreset::MiniSweAgent, "mini-swe-agent", "bash", "command").await;
}

#[tokio::test]
async fn docker_codex_repairs_micro_tasks() {
    preset(AgentPreset::Codex, "codex", "exec_command", "cmd").await;
}

#[tokio::test]
async fn docker_claude_code_repairs_micro_tasks() {
    preset(AgentPreset::ClaudeCode, "claude-code", "Bash", "command").await;
}

#[tokio::test]
async fn docker_qwen_code_repairs_micro_tasks() {
    preset(AgentPreset::QwenCode, "qwen-code", "run_shell_command", "command").await;
}

#[tokio::test]
async fn docker_opencode_repairs_micro_tasks() {
    preset(AgentPreset::Opencode, "opencode", "bash", "command").await;
}
