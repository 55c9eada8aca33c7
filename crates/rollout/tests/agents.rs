//! Unmodified agents with their own loops in real sandboxes without network: each repairs micro tasks
//! through the gateway with a scripted engine. The rows of every branch are those of a prefill of the
//! whole branch, and every sampled token is trained on once.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod common;

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    AGENT_FOLDER, Action, Actor, AgentPreset, AgentSection, ChatModel, EpisodeKind, EpisodeReport,
    EpisodeRunner, Episodes, GradingRules, RolloutSection, Sandboxed, Scaffold, grade_by_summary,
};
use orchestrate_sandbox::{
    DockerProvider, ImageHooks, ImageLayer, SandboxProvider as _, SandboxSection,
};
use orchestrate_tasks::{Task, TaskFile, load, micro, patch};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{ByteSize, ModelShape, Outcome};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio_util::sync::CancellationToken;

const IMAGE: &str = "orchestrate/micro:latest";

/// An agent under test.
struct Case {
    name: &'static str,
    agent: AgentSection,
    work: Work,
}

/// How the scripted policy works with an agent.
#[derive(Clone, Copy)]
enum Work {
    /// With a tool that runs the command in one of its arguments.
    Calls {
        tool: &'static str,
        argument: &'static str,
        /// Further arguments that the tool requires.
        further: &'static [(&'static str, &'static str)],
        /// The command that ends the work; `None` if it ends with a reply without calls.
        last: Option<&'static str>,
    },
    /// With aider's edit blocks in text.
    EditBlocks,
    /// With keystrokes for a terminal, in JSON.
    Keystrokes,
}

impl Work {
    const fn calls(tool: &'static str, argument: &'static str) -> Self {
        Self::Calls { tool, argument, further: &[], last: None }
    }

    /// Replies, each a text with at most one call: a look around, the repair, and the end.
    fn replies(self, task: &Task) -> Vec<(String, Option<Action>)> {
        match self {
            Self::Calls { tool, argument, further, last } => {
                let call = |command: &str| {
                    let mut arguments = json!({ argument: command });
                    for (name, value) in further {
                        arguments[*name] = (*value).into();
                    }
                    Some(Action { name: tool.to_owned(), arguments })
                };
                // An agent that asks for a call gets one that ends it.
                let submit = Action { name: "submit".to_owned(), arguments: json!({}) };
                vec![
                    ("I look around.".to_owned(), call("ls")),
                    ("I repair it.".to_owned(), call(&repair(task))),
                    ("It is done.".to_owned(), last.and_then(call)),
                    (String::new(), Some(submit)),
                ]
            }
            Self::EditBlocks => {
                vec![(edit_blocks(task, "not in the file\n"), None), (edit_blocks(task, ""), None)]
            }
            Self::Keystrokes => {
                let typed = |command: &str| {
                    let keys = json!({"keystrokes": format!("{command}\n"), "duration": 0.1});
                    json!({"analysis": "", "commands": [keys]}).to_string()
                };
                let end = json!({"commands": [], "task_complete": true}).to_string();
                [typed("ls"), typed(&repair(task)), end].map(|text| (text, None)).to_vec()
            }
        }
    }
}

fn has_image() -> bool {
    let found = Command::new("docker").args(["image", "inspect", IMAGE]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    orchestrate_e2e::skip::skip("docker", &format!("no image {IMAGE} (scripts/test builds it)"));
    false
}

/// Micro tasks, or those of the file that `ORCHESTRATE_AGENT_ROWS` names.
fn tasks() -> Vec<Task> {
    let count = std::env::var("ORCHESTRATE_AGENT_TASKS").ok().and_then(|n| n.parse().ok());
    let count = count.unwrap_or(1);
    if let Ok(file) = std::env::var("ORCHESTRATE_AGENT_ROWS") {
        let rows = load::rows(Utf8Path::new(&file)).unwrap();
        let tasks: Vec<_> = rows.take(count).map(|row| row.unwrap().to_task().unwrap()).collect();
        assert_eq!(tasks.len(), count, "{file}");
        return tasks;
    }
    let counts = micro::MicroCounts { train: count, held_out: 0, held_out_families: 0 };
    let mut tasks = micro::generate(8, counts);
    for task in &mut tasks {
        IMAGE.clone_into(&mut task.image);
    }
    tasks
}

/// A command that repairs the files: it replaces the bytes in which they differ from the solved ones.
fn repair(task: &Task) -> String {
    let solved = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    let replaced = |solved: &TaskFile| {
        let file = task.agent_files.iter().find(|file| file.path == solved.path).unwrap();
        let (old, new) = (file.content.as_bytes(), solved.content.as_bytes());
        let same = |(a, b): &(&u8, &u8)| a == b;
        let head = old.iter().zip(new).take_while(same).count();
        let (old_rest, new_rest) = (&old[head..], &new[head..]);
        let tail = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(same).count();
        let middle = &new_rest[..new_rest.len() - tail];
        (old != new).then(|| (&file.path, head, old.len() - tail, middle.to_vec()))
    };
    let changed: Vec<_> = solved.iter().filter_map(replaced).collect();
    let json = serde_json::to_vec(&changed).unwrap();
    // In hexadecimal, because agents change quotes and escapes in commands.
    let hex: Vec<String> = json.iter().map(|byte| format!("{byte:02x}")).collect();
    let program = "import json; [open(p, 'wb').write(t[:a] + bytes(m) + t[b:]) \
                   for p, a, b, m in json.loads(bytes.fromhex";
    format!("python3 -c \"{program}('{}')) for t in [open(p, 'rb').read()]]\"", hex.concat())
}

/// An edit block for each hunk of the solution. `more` is a line that the old text is said to have in
/// addition.
fn edit_blocks(task: &Task, more: &str) -> String {
    let block = |path: &str, hunk: &str| {
        let side = |sign: char| {
            let lines = hunk.lines().skip(1);
            let lines = lines.filter_map(|line| line.strip_prefix([' ', sign]));
            lines.flat_map(|line| [line, "\n"]).collect::<String>()
        };
        let (old, new) = (side('-'), side('+'));
        format!("{path}\n```\n<<<<<<< SEARCH\n{old}{more}=======\n{new}>>>>>>> REPLACE\n```\n")
    };
    let files = task.gold_patch.split("--- a/").skip(1);
    let blocks = files.flat_map(|file| {
        let path = file.lines().next().unwrap();
        file.split("\n@@ -").skip(1).map(move |hunk| block(path, hunk))
    });
    blocks.collect::<Vec<_>>().concat()
}

/// A report, and the number of tokens that the engine sampled for it.
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
        episode_timeout: Some("10m".parse().unwrap()),
        ..RolloutSection::default()
    };
    let plan = config.check().unwrap();
    let policy = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../environments/micro/policy");
    let chat = Arc::new(ChatModel::load_for(&policy, plan.chat_options(&[])).unwrap());
    let replies = case.work.replies(task).into_iter();
    let replies: Vec<_> =
        replies.map(|(text, call)| chat.assistant(&text, call.as_slice()).unwrap()).collect();
    let end = chat.assistant("It is done.", &[]).unwrap();
    let shape = ModelShape { context: 1 << 19, ..toy_shape(chat.vocab_size()) };
    // Counted over all branches.
    let (calls, sampled) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&sampled);
    let engine = Arc::new(FakeEngine::new(shape, move |_, _| {
        let ids = replies.get(calls.fetch_add(1, Ordering::Relaxed)).unwrap_or(&end).clone();
        count.fetch_add(ids.len(), Ordering::Relaxed);
        FakeReply::Tokens { ids, finish: Finish::Stop }
    }));
    let kind = EpisodeKind::Sandboxed(Sandboxed {
        actor: Actor::Program(Arc::new(case.agent.check().unwrap())),
        provider: Arc::clone(&sandboxes) as _,
        limits: sandboxes.config().limits(),
        rules: GradingRules::new(grade_by_summary),
        logs: None,
    });
    let rules = GradingRules::new(grade_by_summary);
    let provider = Arc::clone(&sandboxes) as _;
    let runner = common::runner(Arc::clone(&engine) as _, provider, (chat, plan), rules);
    let runner = EpisodeRunner { kind, ..runner };
    let report = runner.run(common::request(task.clone()), &CancellationToken::new()).await;
    sandboxes.shutdown().await.unwrap();
    (report, sampled.load(Ordering::Relaxed))
}

/// Checks all rows, and returns their number. Every row is a function of position, token and version 0
/// in this engine.
fn check_rows(report: &EpisodeReport) -> usize {
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
    report.branches.iter().filter_map(|branch| Some(branch.routing.as_ref()?.rows())).sum()
}

async fn solves(case: Case, folder: Utf8PathBuf) {
    let layer = ImageLayer::of_folder(&folder, AGENT_FOLDER).unwrap();
    let (mut forks, mut rows) = (BTreeMap::new(), 0);
    let tasks = tasks();
    for task in &tasks {
        let (report, sampled) = run(&case, task, layer.clone()).await;
        let shown: Vec<_> = report.turns.iter().map(|t| (&t.text, &t.observation)).collect();
        assert_eq!(report.outcome, Outcome::Scored { reward: 1.0 }, "{}: {shown:?}", case.name);
        rows += check_rows(&report);
        // Every sampled token carries loss once.
        let trained = report.branches.iter().map(|branch| branch.trajectory.response_tokens());
        assert_eq!(trained.sum::<usize>(), sampled, "{}", case.name);
        assert!(report.turns.len() >= 2, "{}: {shown:?}", case.name);
        for (cause, count) in report.forks {
            *forks.entry(cause).or_insert(0) += count;
        }
    }
    let (name, count) = (case.name, tasks.len());
    orchestrate_e2e::say(&format!(
        "{name}: {count} of {count} tasks solved, forks {forks:?}, {rows} rows, 0 wrong"
    ));
}

/// Runs an agent that is installed in the folder `name` of `ORCHESTRATE_AGENTS`.
async fn installed(name: &'static str, agent: AgentSection, work: Work) {
    if !has_image() {
        return;
    }
    let folder = std::env::var("ORCHESTRATE_AGENTS").map(|root| Utf8PathBuf::from(root).join(name));
    let Some(folder) = folder.ok().filter(|folder| folder.is_dir()) else {
        let why = format!("set ORCHESTRATE_AGENTS to a folder of scripts/agents that has {name}");
        orchestrate_e2e::skip::skip("agents", &why);
        return;
    };
    solves(Case { name, agent, work }, folder).await;
}

async fn preset(preset: AgentPreset, name: &'static str, work: Work) {
    installed(name, AgentSection { preset: Some(preset), ..AgentSection::default() }, work).await;
}

fn command(command: &str) -> AgentSection {
    AgentSection { command: Some(command.to_owned()), ..AgentSection::default() }
}

fn example(name: &str) -> Utf8PathBuf {
    Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)
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
    let agent = AgentSection {
        command: Some(THROUGH_THE_PROXY.to_owned()),
        env: Some(vec![format!("LISTED={port}")]),
        egress: Some(vec![format!("127.0.0.1:{port}")]),
        ..AgentSection::default()
    };
    let case = Case { name: "agent with a proxy", agent, work: Work::calls("bash", "command") };
    solves(case, example("minimal-agent")).await;
    server.join().unwrap();
}

/// Sends one request that is refused or has no room for a reply, and exits as if it had succeeded.
const GIVES_UP: &str = r#"exec python3 - <<'END'
import json, os, urllib.error, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": eval(os.environ["CONTENT"])}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
except urllib.error.HTTPError as error:
    print(error.read())
END
"#;

#[tokio::test]
async fn docker_an_agent_that_exits_with_0_before_the_first_reply_has_no_result() {
    if !has_image() {
        return;
    }
    let task = &tasks()[0];
    let image = r#"[{"type": "image_url", "image_url": {"url": "data:,"}}]"#;
    for (content, expected) in [(image, "refused"), (r#""x " * 300000"#, "leaves no room")] {
        let agent =
            AgentSection { env: Some(vec![format!("CONTENT={content}")]), ..command(GIVES_UP) };
        let case = Case { name: "gives up", agent, work: Work::calls("bash", "command") };
        let layer = ImageLayer::of_folder(&example("minimal-agent"), AGENT_FOLDER).unwrap();
        let (report, sampled) = run(&case, task, layer).await;
        let Outcome::Broken { error, .. } = &report.outcome else {
            unreachable!("not broken: {:?}", report.outcome);
        };
        assert!(error.contains(expected), "{error}");
        assert_eq!(sampled, 0);
    }
}

#[tokio::test]
async fn docker_a_terminal_agent_repairs_micro_tasks() {
    if has_image() {
        let agent = command(r#"exec python3 "$AGENT_DIR/agent.py""#);
        let case = Case { name: "terminal-agent", agent, work: Work::Keystrokes };
        solves(case, example("terminal-agent")).await;
    }
}

#[tokio::test]
async fn docker_mini_swe_agent_repairs_micro_tasks() {
    let last = Some("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT");
    let work = Work::Calls { tool: "bash", argument: "command", further: &[], last };
    preset(AgentPreset::MiniSweAgent, "mini-swe-agent", work).await;
}

#[tokio::test]
async fn docker_codex_repairs_micro_tasks() {
    preset(AgentPreset::Codex, "codex", Work::calls("exec_command", "cmd")).await;
}

#[tokio::test]
async fn docker_claude_code_repairs_micro_tasks() {
    preset(AgentPreset::ClaudeCode, "claude-code", Work::calls("Bash", "command")).await;
}

#[tokio::test]
async fn docker_qwen_code_repairs_micro_tasks() {
    let further = &[("description", "run a command")];
    let work = Work::Calls { tool: "run_shell_command", argument: "command", further, last: None };
    preset(AgentPreset::QwenCode, "qwen-code", work).await;
}

#[tokio::test]
async fn docker_opencode_repairs_micro_tasks() {
    let further = &[("description", "run a command")];
    let work = Work::Calls { tool: "bash", argument: "command", further, last: None };
    preset(AgentPreset::Opencode, "opencode", work).await;
}

#[tokio::test]
async fn docker_aider_repairs_micro_tasks() {
    preset(AgentPreset::Aider, "aider", Work::EditBlocks).await;
}

#[tokio::test]
async fn docker_openhands_repairs_micro_tasks() {
    let further = &[("summary", "run a command"), ("security_risk", "LOW")];
    let work = Work::Calls { tool: "terminal", argument: "command", further, last: None };
    preset(AgentPreset::Openhands, "openhands", work).await;
}

#[tokio::test]
async fn docker_the_openai_agents_sdk_repairs_micro_tasks_through_chat_completions() {
    let agent = command(r#"exec python3 "$AGENT_DIR/agent.py" chat"#);
    installed("openai-agents", agent, Work::calls("bash", "command")).await;
}

#[tokio::test]
async fn docker_the_openai_agents_sdk_repairs_micro_tasks_through_responses() {
    let agent = command(r#"exec python3 "$AGENT_DIR/agent.py" responses"#);
    installed("openai-agents", agent, Work::calls("bash", "command")).await;
}

#[tokio::test]
async fn docker_the_tool_runner_of_anthropic_repairs_micro_tasks() {
    let agent = command(r#"exec python3 "$AGENT_DIR/agent.py""#);
    installed("anthropic-tool-runner", agent, Work::calls("bash", "command")).await;
}
