//! The section `[rollout]`.

use crate::api::Message;
use crate::chat::ChatOptions;
use crate::dialogue::Dialogue;
use crate::machine::EpisodeLimits;
use crate::prefix::History;
use crate::scaffold::{Prompts, Scaffold};
use crate::tool_server::{self, ToolServerSettings};
use orchestrate_engine::MessagePrompt;
use orchestrate_settings::{
    Problems, above, at_least, between, closest, satisfies, setting_types, settings,
};
use orchestrate_tasks::Task;
use orchestrate_tasks::micro::{self, MicroCounts};
use orchestrate_types::HumanDuration;

setting_types!(Scaffold, History);

settings! {
    /// How episodes are rolled out.
    [rollout] pub RolloutSection -> RolloutSettings, check: check_together;

    /// Episodes per task that are compared for the advantage.
    group_size: u16 = 8, at_least(1);
    /// Groups with a gradient per global step.
    groups_per_step: u32 = 16, at_least(1);
    /// Maximum number of groups that are rolled out per global step when dynamic sampling drops some.
    max_groups_per_step: u32 = groups_per_step.saturating_mul(4) => "four times `groups_per_step`";
    /// Episodes that run at the same time.
    max_in_flight: u32 = 32, at_least(1);
    /// Attempts at an episode whose infrastructure fails.
    max_attempts: u16 = 3, at_least(1);
    /// Generations per episode.
    max_turns: u32 = 40, at_least(1);
    /// Tokens of prompt, responses and observations together. The model's context is a limit as
    /// well.
    max_sequence_tokens: usize = 65_536, at_least(1);
    /// Tokens of one response.
    max_response_tokens: usize = 8192, at_least(1);
    /// Time for one command of a built-in scaffold.
    command_timeout: HumanDuration = HumanDuration::secs(90), at_least(SHORTEST);
    /// Time for one reply of the engine.
    generate_timeout: HumanDuration = HumanDuration::secs(600), at_least(SHORTEST);
    /// Time from the opened sandbox to the end of the last turn; grading is not part of it.
    episode_timeout: HumanDuration = HumanDuration::secs(5400), at_least(SHORTEST);
    /// Longest time the members of a group wait for the first reply to the prefill leader, after
    /// which their common prompt is cached. With "0s" all of them send their first request at once.
    follow_wait: HumanDuration = HumanDuration::secs(60);
    /// Sampling temperature of training episodes.
    temperature: f32 = 1.0,
        between(LOWEST_TEMPERATURE, 10.0)
            .hint("engines do not sample at lower ones; 1.0 samples the policy itself");
    /// Nucleus mass that is kept when a token is sampled.
    top_p: f32 = 1.0, above(0.0).at_most(1.0).hint("1.0 keeps every token");
    /// Characters of one observation of a built-in scaffold; longer ones lose their middle.
    observation_chars: usize = 10_000, at_least(100);
    /// How the policy's text becomes tool calls, and results become messages.
    scaffold: Scaffold = Scaffold::default();
    /// Content of earlier turns in a prompt, if the chat template drops their thinking. With
    /// `template`, every turn with thinking forks the conversation, and only what was sampled after
    /// the last fork is trained on.
    history: History = History::default();
    /// Whether the chat template asks the model to think (its variable `enable_thinking` or `thinking`).
    /// Unset, each request of an agent decides, and else the template's default. Set, the requests of
    /// agents do not decide.
    thinking: Option<bool> = None => "each request decides, else the chat template";
    /// Text of the system message of a built-in scaffold, before the task; `{workdir}` stands for the
    /// repository's folder. Other text in braces stays as it is.
    system_prompt: Option<String> = None => "the scaffold's own; `tools` has none";
    /// Text of the task's message, with `{problem_statement}` and `{workdir}`. Other text in braces stays as
    /// it is.
    task_prompt: Option<String> = None
        => "the scaffold's own; for `tools` the problem statement alone",
        satisfies(
            |text: &str| text.contains("{problem_statement}"),
            "text with `{problem_statement}`",
            "must contain {problem_statement}, where the issue is inserted",
        );
    /// Whether the chat template is given the JSON schemas of the tools: those of the scaffold `tools`, or of an
    /// agent's requests. `false` is for models that
    /// were trained on the scaffold and know its tools.
    show_tools: bool = true;
    /// Servers whose tools the policy can call in addition to the built-in ones of the scaffold
    /// `tools`; see `[[rollout.tool_servers]]`.
    tool_servers: Vec<ToolServerSettings> = Vec::new();
    /// Whether the repository in a sandbox has its history removed, which may contain the solution, and
    /// holds one commit with the files as given. External workers have an environment of their own.
    hide_history: bool = true;
}

/// Lowest temperature at which samples have usable log-probs: vLLM raises lower ones to it, and `SGLang` samples
/// greedily at the lowest, so that the trainer would compute the log-probs of another distribution.
pub const LOWEST_TEMPERATURE: f32 = 0.01;

/// Shortest time limit.
const SHORTEST: HumanDuration = HumanDuration::millis(100);

fn check_together(written: &RolloutSection, settings: &RolloutSettings, problems: &mut Problems) {
    let groups = settings.groups_per_step;
    problems.require(
        settings.max_groups_per_step >= groups,
        "max_groups_per_step",
        settings.max_groups_per_step,
        format!("must be at least groups_per_step, {groups}"),
    );
    refuse_unread(written, settings.scaffold, problems);
    problems.require(
        !settings.scaffold.performs_calls() || settings.command_timeout <= settings.episode_timeout,
        "command_timeout",
        settings.command_timeout,
        format!("must be at most episode_timeout, \"{}\"", settings.episode_timeout),
    );
    tool_server::check_settings(&settings.tool_servers, problems);
}

/// Refuses keys that the scaffold does not read.
fn refuse_unread(written: &RolloutSection, scaffold: Scaffold, problems: &mut Problems) {
    if scaffold != Scaffold::Tools {
        let why = "only applies with rollout.scaffold = \"tools\"";
        problems.refuse_unread(written, &["tool_servers"], why);
    }
    let (keys, why): (&[&str], _) = match scaffold {
        Scaffold::Tools => return,
        Scaffold::R2eXml | Scaffold::Mini => {
            (&["show_tools"], "whose prompts describe its tools in place of JSON schemas")
        }
        Scaffold::Command => (
            &["command_timeout", "observation_chars", "system_prompt"],
            "which runs its own commands and writes its own messages",
        ),
        Scaffold::External => (
            &["command_timeout", "observation_chars", "system_prompt", "hide_history"],
            "whose workers have an environment and messages of their own",
        ),
    };
    let name = scaffold.name();
    problems.refuse_unread(
        written,
        keys,
        &format!("does not apply with rollout.scaffold = \"{name}\", {why}"),
    );
}

/// Placeholders of the system message and of the task's message.
const PLACEHOLDERS: [&str; 2] = ["workdir", "problem_statement"];

/// The first text in braces that nothing replaces although it is like a placeholder of the task's message, and
/// what it is like. `own` are those that are replaced.
fn mistaken_placeholder<'a>(text: &'a str, own: &[&str]) -> Option<(&'a str, &'static str)> {
    let plain = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
    };
    let spans = text.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0));
    let is_name =
        |name: &&str| name.trim().chars().all(|c| c.is_ascii_alphanumeric() || "_- ".contains(c));
    spans.filter(is_name).filter(|name| !own.contains(name)).find_map(|name| {
        let known = PLACEHOLDERS.map(plain);
        let nearest = closest(&plain(name), known.iter().map(String::as_str))?;
        Some((name, *PLACEHOLDERS.iter().find(|known| plain(known) == nearest)?))
    })
}

impl RolloutSettings {
    /// Records misspelled placeholders in the prompts, which the policy would see as they are written. Not for the
    /// plan of a run that has begun: its prompts stay as they were.
    pub fn check_placeholders(&self, problems: &mut Problems) {
        let prompts: [(_, _, &[&str]); 2] = [
            ("system_prompt", &self.system_prompt, &["workdir"]),
            ("task_prompt", &self.task_prompt, &PLACEHOLDERS),
        ];
        for (key, prompt, own) in prompts {
            let mistaken = prompt.as_deref().and_then(|text| mistaken_placeholder(text, own));
            let Some((written, meant)) = mistaken else { continue };
            let remedy = if own.contains(&meant) {
                format!("is not replaced by anything; did you mean {{{meant}}}?")
            } else {
                format!(
                    "is not replaced in the system message; insert {{{meant}}} by rollout.task_prompt"
                )
            };
            problems.refuse(key, format!("… {{{written}}} …"), remedy);
        }
    }

    /// Limits of one episode; `context` is the model's longest sequence in tokens.
    pub fn limits(&self, context: usize) -> EpisodeLimits {
        EpisodeLimits {
            max_turns: self.max_turns,
            max_sequence_tokens: self.max_sequence_tokens.min(context),
            max_response_tokens: self.max_response_tokens,
        }
    }

    /// How the chat model of a run renders conversations. `server_tools` are the JSON schemas of the
    /// tools of tool servers.
    pub fn chat_options(&self, server_tools: &[serde_json::Value]) -> ChatOptions {
        let tools = if self.show_tools {
            [self.scaffold.tool_schemas().as_slice(), server_tools].concat()
        } else {
            Vec::new()
        };
        ChatOptions {
            tools,
            scaffold: self.scaffold,
            history: self.history,
            thinking: self.thinking,
            date: None,
        }
    }

    /// The opening prompt of an episode with a chat server, about a small task of our own: the server's probe
    /// sends it, so that it shows what the server says about the prompts and tools of the run.
    pub fn sample_prompt(&self, server_tools: &[serde_json::Value]) -> MessagePrompt {
        let counts = MicroCounts { train: 1, held_out: 0, held_out_families: 0 };
        let tasks = micro::generate(0, counts);
        let messages = tasks.first().map(|task| self.opening(task)).unwrap_or_default();
        Dialogue::open(&messages, &self.chat_options(server_tools).tools).prompt(0)
    }

    /// The opening messages of a task.
    pub fn opening(&self, task: &Task) -> Vec<Message> {
        let prompts =
            Prompts { system: self.system_prompt.as_deref(), task: self.task_prompt.as_deref() };
        self.scaffold.opening(prompts, task, self.max_turns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolServerSection;
    use orchestrate_settings::SectionKeys as _;

    #[test]
    fn an_empty_section_has_every_default() {
        let plan = RolloutSection::default().check().unwrap();
        assert_eq!((plan.group_size, plan.max_groups_per_step), (8, 64));
        assert_eq!(plan.limits(4096).max_sequence_tokens, 4096);
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let config = RolloutSection {
            group_size: Some(0),
            groups_per_step: Some(4),
            max_groups_per_step: Some(3),
            temperature: Some(0.0),
            top_p: Some(f32::NAN),
            task_prompt: Some("fix it".to_owned()),
            command_timeout: Some(HumanDuration::secs(20)),
            episode_timeout: Some(HumanDuration::secs(10)),
            ..RolloutSection::default()
        };
        let problems = config.check().unwrap_err();
        let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
        let expected = [
            "group_size",
            "temperature",
            "top_p",
            "task_prompt",
            "max_groups_per_step",
            "command_timeout",
        ];
        assert_eq!(keys, expected.map(|key| format!("rollout.{key}")));
        assert_eq!(problems[0].to_string(), "rollout.group_size = 0: must be at least 1");
    }

    #[test]
    fn misspelled_placeholders_are_refused_with_the_nearest_one() {
        let problems = |system: &str, task: &str| -> Vec<String> {
            let settings = RolloutSettings {
                system_prompt: Some(system.to_owned()),
                task_prompt: Some(task.to_owned()),
                ..RolloutSettings::default()
            };
            let mut problems = Problems::new("rollout");
            settings.check_placeholders(&mut problems);
            problems.into_found().iter().map(ToString::to_string).collect()
        };
        let whole = "mend {problem_statement} in {workdir}";
        assert_eq!(problems("in {workdir}", whole), [""; 0]);
        for written in ["work_dir", "WORKDIR", " workdir ", "working_dir", "workdirs"] {
            let found = problems("", &format!("{whole}, {{{written}}}"));
            let expected = format!(
                "rollout.task_prompt = … {{{written}}} …: is not replaced by anything; did you mean \
                 {{workdir}}?"
            );
            assert_eq!(found, [expected]);
        }
        assert!(
            problems("", "{problem-statement}")[0].ends_with("did you mean {problem_statement}?")
        );
        let found = problems("solve {problem_statement}", whole);
        assert!(
            found[0].contains("insert {problem_statement} by rollout.task_prompt"),
            "{found:?}"
        );
        // Text of other programs.
        for literal in
            ["\\boxed{answer}", "{\"workdir\": 1}", "${HOME}", "f'{value}'", "{}", "{", "{file}"]
        {
            assert_eq!(problems(literal, &format!("{whole} {literal}")), [""; 0], "{literal}");
        }
    }

    #[test]
    fn keys_that_the_scaffold_does_not_read_are_refused_by_name() {
        let all = |scaffold| RolloutSection {
            scaffold: Some(scaffold),
            command_timeout: Some(HumanDuration::secs(5)),
            observation_chars: Some(500),
            system_prompt: Some("be brief".to_owned()),
            show_tools: Some(false),
            hide_history: Some(false),
            tool_servers: Some(vec![ToolServerSection {
                name: Some("docs".to_owned()),
                url: Some("http://127.0.0.1:8000/mcp".to_owned()),
                ..ToolServerSection::default()
            }]),
            ..RolloutSection::default()
        };
        let refused = |section: RolloutSection| -> Vec<String> {
            let mut problems = section.check().err().unwrap_or_default();
            let name = section.scaffold.unwrap().name();
            if name != "tools" {
                let servers = problems.remove(0).to_string();
                let text =
                    "rollout.tool_servers = […]: only applies with rollout.scaffold = \"tools\"";
                assert!(servers.starts_with(text), "{servers}");
            }
            let why = format!("does not apply with rollout.scaffold = \"{name}\", wh");
            assert!(
                problems.iter().all(|problem| problem.remedy.starts_with(&why)),
                "{problems:?}"
            );
            problems.into_iter().map(|problem| problem.key.replace("rollout.", "")).collect()
        };
        let own = ["command_timeout", "observation_chars", "system_prompt"];
        assert_eq!(refused(all(Scaffold::Tools)), [""; 0]);
        assert_eq!(refused(all(Scaffold::R2eXml)), ["show_tools"]);
        assert_eq!(refused(all(Scaffold::Mini)), ["show_tools"]);
        assert_eq!(refused(all(Scaffold::Command)), own);
        assert_eq!(refused(all(Scaffold::External)), [&own[..], &["hide_history"]].concat());
        for scaffold in ["tools", "r2e-xml", "mini", "command", "external"] {
            let parsed: Scaffold = serde_json::from_value(scaffold.into()).unwrap();
            assert_eq!(parsed.name(), scaffold);
            // As a resumed run has it: every key is written out.
            let section = RolloutSection { scaffold: Some(parsed), ..RolloutSection::default() };
            let plan = section.check().unwrap();
            assert_eq!(RolloutSection::from_values(&plan).check(), Ok(plan));
        }
        // A default that nothing reads limits nothing.
        let short = RolloutSection {
            scaffold: Some(Scaffold::Command),
            episode_timeout: Some(HumanDuration::secs(60)),
            ..RolloutSection::default()
        };
        short.check().unwrap();
        assert!(RolloutSection { scaffold: None, ..short }.check().is_err());
    }

    #[test]
    fn the_sample_prompt_has_the_messages_and_tools_of_each_scaffold() {
        let server_tool = serde_json::json!({"function": {"name": "search"}});
        let sample = |scaffold, show_tools| {
            let section = RolloutSection {
                scaffold: Some(scaffold),
                show_tools: (scaffold == Scaffold::Tools).then_some(show_tools),
                system_prompt: Some("be brief".to_owned()),
                task_prompt: Some("mend: {problem_statement}".to_owned()),
                ..RolloutSection::default()
            };
            section.check().unwrap().sample_prompt(std::slice::from_ref(&server_tool))
        };
        let prompt = sample(Scaffold::Tools, true);
        let schemas = Scaffold::Tools.tool_schemas();
        assert_eq!(prompt.tools.len(), schemas.len() + 1);
        assert_eq!(prompt.tools.last(), Some(&server_tool));
        assert_eq!(*sample(Scaffold::Mini, true).tools, std::slice::from_ref(&server_tool));
        assert!(sample(Scaffold::Tools, false).tools.is_empty());
        let [system, task] = prompt.messages.as_slice() else { panic!("{prompt:?}") };
        assert_eq!((system.role.as_str(), system.content.as_str()), ("system", "be brief"));
        assert!(task.role == "user" && task.content.starts_with("mend: "), "{task:?}");
        assert!(task.content.len() > 50, "{task:?}");
    }

    #[test]
    fn unknown_keys_are_errors() {
        let json = serde_json::json!({"group_sise": 4});
        let error = serde_json::from_value::<RolloutSection>(json).unwrap_err();
        assert!(error.to_string().contains("group_sise"));
    }
}
