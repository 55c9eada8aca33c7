//! The configuration: which sections there are, how it is loaded, and rules across sections.
//!
//! Each section belongs to the crate that uses it. Files and assignments are read by
//! [`Layers`]: later layers win, tables merge, lists replace. Every problem of every layer is
//! reported at once.

use crate::args::ConfigSource;
use crate::output;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{DiagnosticsSection, RunSection, TasksSection};
use orchestrate_engine::{EngineKind, EngineSection};
use orchestrate_gateway::GatewaySection;
use orchestrate_handoff::protocol::RoutingReplay;
use orchestrate_handoff::{AlgorithmSection, HandoffSection, TrainerSection};
use orchestrate_moe::infer::WeightFormat;
use orchestrate_rollout::{
    AgentSection, RewardSection, RolloutSection, Scaffold, ToolServerSection,
};
use orchestrate_routing::RoutingSection;
use orchestrate_sandbox::{DockerHostSection, SandboxSection};
use orchestrate_settings::{
    Layers, Origins, Problems, Renames, Section, SectionKeys, at_least, documentation, settings,
};
use orchestrate_sinks::SinksSection;
use orchestrate_types::{ConfigProblem, Found, NOT_SHOWN, has_credentials, without_credentials};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Read as _;

/// Errors in the configuration. Exit code 3.
#[derive(Debug)]
pub(crate) enum ConfigError {
    /// A file cannot be read.
    Unreadable { file: Utf8PathBuf, error: std::io::Error },
    /// A file or an argument is refused as a whole.
    Layer { name: String, error: String },
    /// The configuration has these problems.
    Problems(Vec<ConfigProblem>),
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { file, error } => {
                write!(f, "cannot read config file {file}: {error}")
            }
            Self::Layer { name, error } => write!(f, "{name}: {}", error.trim_end()),
            Self::Problems(problems) => {
                let count = problems.len();
                let noun = if count == 1 { "problem" } else { "problems" };
                write!(f, "{count} {noun} in the configuration:")?;
                for problem in problems {
                    write!(f, "\n  {}", problem.to_string().replace('\n', "\n  "))?;
                }
                Ok(())
            }
        }
    }
}

settings! {
    /// The engine and the trainer inside this program, which run where `engine.url` or
    /// `trainer.url` is absent.
    [embedded] pub(crate) EmbeddedSection -> EmbeddedSettings;

    /// Number format of the weights in the embedded engine.
    weight_format: WeightFormat = WeightFormat::default();
    /// Requests that the embedded engine decodes together.
    max_running: usize = 32, at_least(1);
    /// Tokens that its prefix cache holds.
    cache_tokens: usize = 65_536, at_least(1);
}

/// Declares the sections: the configuration as written, checked, and what goes over all of them.
macro_rules! sections {
    ($($name:ident: $section:ty,)*) => {
        /// A configuration as written. Every section and every key may be left out.
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        #[schemars(transform = without_defaults)]
        pub(crate) struct Sections {
            $(pub(crate) $name: $section,)*
            #[serde(skip)]
            origins: Origins,
        }

        /// The checked configuration.
        #[derive(Debug, Clone)]
        pub(crate) struct Settings {
            $(pub(crate) $name: <$section as Section>::Settings,)*
        }

        /// Sections that were checked; `None` if a section has problems.
        struct Checked {
            $($name: Option<<$section as Section>::Settings>,)*
        }

        impl Checked {
            fn complete(self) -> Option<Settings> {
                Some(Settings { $($name: self.$name?,)* })
            }
        }

        impl Sections {
            /// Checks each section by itself. Of those that `misread` names, some keys are known
            /// to be wrong: only the single values of their other keys are checked.
            fn check_each(
                &self,
                misread: &dyn Fn(&str) -> bool,
                problems: &mut Vec<ConfigProblem>,
            ) -> Checked {
                Checked {
                    $(
                        $name: if misread(stringify!($name)) {
                            problems.append(&mut self.$name.value_problems());
                            None
                        } else {
                            let checked = self.$name.check_section();
                            checked.map_err(|mut found| problems.append(&mut found)).ok()
                        },
                    )*
                }
            }

            fn from_settings(settings: &Settings, origins: Origins) -> Self {
                Self { $($name: Section::from_settings(&settings.$name),)* origins }
            }

            /// Removes the value of `key`, e.g. `rollout.history`.
            fn clear(&mut self, key: &str) {
                self.origins.forget(key);
                let Some((section, key)) = key.split_once('.') else { return };
                match section {
                    $(stringify!($name) => self.$name.clear(key),)*
                    _ => {}
                }
            }

            /// The documentation of every section, in Markdown.
            fn section_pages() -> Vec<(&'static str, String)> {
                vec![$((<$section>::NAME, documentation::<$section>())),*]
            }
        }
    };
}

sections! {
    run: RunSection,
    tasks: TasksSection,
    rollout: RolloutSection,
    agent: AgentSection,
    gateway: GatewaySection,
    reward: RewardSection,
    routing: RoutingSection,
    engine: EngineSection,
    trainer: TrainerSection,
    algorithm: AlgorithmSection,
    handoff: HandoffSection,
    sandbox: SandboxSection,
    embedded: EmbeddedSection,
    diagnostics: DiagnosticsSection,
    sinks: SinksSection,
}

/// Removes the defaults of whole sections from the schema; those of their keys say it all.
fn without_defaults(schema: &mut Schema) {
    let sections = schema.get_mut("properties").and_then(|sections| sections.as_object_mut());
    for section in sections.into_iter().flat_map(|sections| sections.values_mut()) {
        if let Some(section) = section.as_object_mut() {
            section.remove("default");
        }
    }
}

/// Keys of which a configuration has one: a later layer's replaces those of earlier ones.
const ALTERNATIVES: &[&[&str]] =
    &[&["engine.url", "engine.urls", "engine.discover"], &["sandbox.docker_host", "sandbox.hosts"]];

/// Names that older configurations use.
pub(crate) const RENAMES: Renames = Renames {
    keys: &[("engine.away_timeout", "engine.out_of_service_timeout")],
    choices: &[("rollout.scaffold", "outside", "external")],
};

/// Keys whose values may be secrets: the variables of an agent have keys of other services.
const SECRETS: &[&str] = &["agent.env"];

fn layers() -> Layers {
    let layers = Layers::of::<Sections>().with_alternatives(ALTERNATIVES);
    layers.with_secrets(SECRETS).with_renames(RENAMES)
}

/// Reads and merges all layers of `source`. What a later layer leaves unread of an earlier one is left out,
/// with a warning.
///
/// # Errors
/// If a layer cannot be read, is not TOML, has an unknown key or a value of the wrong type: with
/// these, every other problem of the configuration.
pub(crate) fn load(source: &ConfigSource) -> Result<Sections, ConfigError> {
    let (sections, left_out) = load_layers(&source.files, &[&source.sets])?;
    for notice in sections.origins.renamed() {
        output::say(format!("warning: {}", without_credentials(notice)));
    }
    for problem in left_out {
        output::say(format!("warning: not read: {problem}"));
    }
    Ok(sections)
}

/// As [`load`], of `files` and then of each list of assignments, with what was left out.
pub(crate) fn load_layers(
    files: &[Utf8PathBuf],
    sets: &[&[String]],
) -> Result<(Sections, Vec<ConfigProblem>), ConfigError> {
    let texts: Vec<_> = files.iter().map(|file| (file, read_limited(file))).collect();
    let composed = |count: usize| {
        let mut layers = layers();
        for (file, text) in texts.iter().take(count) {
            match text {
                Ok(text) => layers.add_file(file.as_str(), text),
                Err(error) => layers.add_unreadable(file.as_str(), error),
            }
        }
        for sets in sets.iter().take(count.saturating_sub(texts.len())) {
            layers.add_assignments(sets);
        }
        merged(layers)
    };
    let all = texts.len() + sets.len();
    let mut sections = composed(all)?;
    let mut left_out = sections.unread();
    // A layer that with those before it leaves a key of its own unread has a fault that no later one excuses.
    left_out.retain(|problem| {
        let key = problem.key.as_str();
        let Some(origin) = sections.origins.of(key) else { return false };
        let mut earlier = (1..all).filter_map(|count| composed(count).ok());
        let written = earlier.find(|earlier| earlier.origins.of(key) == Some(origin));
        written.is_some_and(|earlier| earlier.unread().iter().all(|other| other.key != key))
    });
    for problem in &left_out {
        sections.clear(&problem.key);
    }
    Ok((sections, left_out))
}

/// Bytes of a configuration file.
const FILE_LIMIT: u64 = 16 << 20;

fn read_limited(file: &Utf8Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(file)?.take(FILE_LIMIT + 1).read_to_string(&mut text)?;
    if read as u64 > FILE_LIMIT {
        return Err(std::io::Error::other("it has more than 16 MiB, too many for settings"));
    }
    Ok(text)
}

/// Reads the plan that a run of this version or an older one stored; `name` stands for it in messages.
pub(crate) fn parse_layer(name: &str, text: &str) -> Result<Sections, ConfigError> {
    parse_plan(name, text, &[], &[])
}

/// As [`parse_layer`], with assignments that win over the plan: those that the run has recorded, and new ones. What
/// the plan and the recorded ones set and nothing reads any more, because of a later one or in this version, is
/// left out; no assignment could remove it.
pub(crate) fn parse_plan(
    name: &str,
    text: &str,
    recorded: &[String],
    new: &[String],
) -> Result<Sections, ConfigError> {
    let mut layers = layers();
    layers.add_file(name, text);
    for assignment in recorded.iter().chain(new) {
        layers.add_assignment(assignment);
    }
    let mut sections = merged(layers)?;
    for problem in sections.unread() {
        let assigned = problem.origin.as_deref().and_then(|origin| origin.strip_prefix("--set "));
        let is_of = |sets: &[String]| sets.iter().any(|set| Some(set.as_str()) == assigned);
        if assigned.is_none() || (is_of(recorded) && !is_of(new)) {
            sections.clear(&problem.key);
        }
    }
    Ok(sections)
}

fn merged(layers: Layers) -> Result<Sections, ConfigError> {
    let (table, origins, mut problems) = layers.finish();
    let fitting: Result<Sections, _> = table.try_into();
    let sections = fitting.map_err(|error| ConfigError::Layer {
        name: "configuration".to_owned(),
        error: error.to_string(),
    })?;
    let sections = Sections { origins, ..sections };
    if problems.is_empty() {
        return Ok(sections);
    }
    // In a file that cannot be read, every section may have had more keys.
    let unreadable = problems.iter().any(|problem| matches!(problem.found, Found::Unreadable(_)));
    let names: Vec<String> = problems
        .iter()
        .filter_map(|problem| problem.key.split('.').next().map(str::to_owned))
        .collect();
    let misread = |name: &str| unreadable || names.iter().any(|known| known == name);
    problems.append(&mut sections.checked(&misread).1);
    Err(ConfigError::Problems(problems))
}

impl Sections {
    /// Fills in defaults and checks everything.
    ///
    /// # Errors
    /// All problems at once.
    pub(crate) fn check(&self) -> Result<Settings, ConfigError> {
        let (checked, problems) = self.checked(&|_| false);
        match checked.complete() {
            Some(settings) if problems.is_empty() => Ok(settings),
            Some(_) | None => Err(ConfigError::Problems(problems)),
        }
    }

    fn checked(&self, misread: &dyn Fn(&str) -> bool) -> (Checked, Vec<ConfigProblem>) {
        let mut problems = Vec::new();
        let checked = self.check_each(misread, &mut problems);
        check_across(self, misread, &mut problems);
        check_unread(self, misread, &mut problems);
        check_secrets(self, &mut problems);
        self.origins.locate(&mut problems);
        (checked, problems)
    }

    /// The values that nothing reads with the other settings.
    fn unread(&self) -> Vec<ConfigProblem> {
        let mut problems = self.checked(&|_| false).1;
        problems.retain(|problem| matches!(problem.found, Found::Unread(_)));
        problems
    }

    /// The same configuration with every default written out, as the run folder stores it: a later
    /// version with other defaults resumes the run with those it started with.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn with_defaults(&self) -> Result<Self, ConfigError> {
        Ok(Self::from_settings(&self.check()?, self.origins.clone()))
    }

    /// The same configuration without the values of an agent's variables, and without the secrets of URLs.
    pub(crate) fn without_secrets(&self) -> Self {
        let mut shown = self.clone();
        for variable in shown.agent.env.iter_mut().flatten() {
            *variable = match variable.split_once('=') {
                Some((name, _)) => format!("{name}={NOT_SHOWN}"),
                None => NOT_SHOWN.to_owned(),
            };
        }
        let servers = shown.rollout.tool_servers.iter_mut().flatten();
        for url in servers.filter_map(|server| server.url.as_mut()) {
            *url = without_credentials(url).into_owned();
        }
        shown
    }

    /// The configuration in TOML, without secrets; values that are not defaults have a comment that says
    /// where they were written.
    ///
    /// # Errors
    /// If it cannot be written in TOML.
    pub(crate) fn annotated(&self) -> Result<String, toml::ser::Error> {
        let mut section = String::new();
        let mut text = String::new();
        let mut in_string = false;
        for line in toml::to_string(&self.without_secrets())?.lines() {
            text.push_str(line);
            let delimiters = line.matches("\"\"\"").count() + line.matches("'''").count();
            if in_string || !delimiters.is_multiple_of(2) {
                // Part of a string of several lines, where a comment would be part of the value.
                in_string ^= !delimiters.is_multiple_of(2);
            } else if let Some(name) =
                line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'))
            {
                name.clone_into(&mut section);
            } else if let Some((key, _)) = line.split_once(" = ")
                && let Some(origin) = self.origins.of(&format!("{section}.{key}"))
            {
                text = format!("{text}  # {}", without_credentials(origin));
            }
            text.push('\n');
        }
        Ok(text)
    }

    /// The documentation page of all settings, in Markdown.
    pub(crate) fn page() -> String {
        let mut pages = Self::section_pages();
        // The hosts of a sandbox are a list of tables with keys of their own.
        let hosts = (DockerHostSection::NAME, documentation::<DockerHostSection>());
        let after = pages.iter().position(|(name, _)| *name == SandboxSection::NAME);
        pages.insert(after.map_or(0, |index| index + 1), hosts);
        // So are the tool servers of a scaffold.
        let servers = (ToolServerSection::NAME, documentation::<ToolServerSection>());
        let after = pages.iter().position(|(name, _)| *name == RolloutSection::NAME);
        pages.insert(after.map_or(0, |index| index + 1), servers);
        let pages: Vec<String> = pages.into_iter().map(|(_, page)| page).collect();
        format!("{PAGE_HEAD}\n{}", pages.join("\n"))
    }
}

const PAGE_HEAD: &str = "\
# Settings

<!-- Generated by `orchestrate config docs`; do not edit. -->

Settings are read from TOML files (`--config FILE`, more than once if needed) and from assignments
(`--set rollout.group_size=8`). Later ones win, tables merge, lists replace. Unknown keys are errors,
and so are keys that nothing reads with the other settings, unless they have their default. What a later
layer (a file, the assignments, a variant of `orchestrate compare`) leaves unread of an earlier one is left
out with a warning. A later `engine.url`,
`engine.urls` or `engine.discover` replaces the others, and so do `sandbox.docker_host` and `sandbox.hosts`.
`orchestrate config check` reports every problem, and `orchestrate config show` prints all values
with where they were set.

Durations are written as `\"90s\"`, `\"1h30m\"` or `\"250ms\"`, or as a number of seconds. Sizes are
written as `\"4 GiB\"`, `\"512MiB\"` or `\"4GB\"`, or as a number of bytes.
";

/// Rules over several sections, except those that `misread` names.
fn check_across(
    sections: &Sections,
    misread: &dyn Fn(&str) -> bool,
    problems: &mut Vec<ConfigProblem>,
) {
    let are_read = |names: &[&str]| !names.iter().any(|name| misread(name));
    let (run, tasks, engine) = (sections.run.fill(), sections.tasks.fill(), sections.engine.fill());
    if are_read(&["tasks"]) && !["", "micro"].contains(&tasks.environment.trim()) {
        problems.push(ConfigProblem::new(
            "tasks.environment",
            &tasks.environment,
            "must be \"micro\"; to load tasks from files, set tasks.file and \
             tasks.held_out_file",
        ));
    }
    if are_read(&["rollout", "agent"]) && sections.rollout.fill().scaffold == Scaffold::Command {
        let agent = sections.agent.fill();
        if agent.script().is_none() {
            problems.push(ConfigProblem::new(
                "agent.command",
                "none",
                "rollout.scaffold = \"command\" needs agent.command or agent.preset",
            ));
        }
        if let Some(folder) = agent.folder.as_ref().filter(|folder| !folder.is_dir()) {
            problems.push(ConfigProblem::new("agent.folder", folder, "must be a folder"));
        }
    }
    let scaffold = sections.rollout.fill().scaffold;
    if are_read(&["engine", "rollout"])
        && engine.kind == EngineKind::Openai
        && matches!(scaffold, Scaffold::Command | Scaffold::External)
    {
        problems.push(ConfigProblem::new(
            "rollout.scaffold",
            scaffold.name(),
            "must be \"tools\", \"r2e-xml\" or \"mini\" with engine.kind = \"openai\": replies to agents are \
             sampled from tokens, which its servers do not take",
        ));
    }
    if are_read(&["tasks", "run"])
        && tasks.file.is_some()
        && tasks.held_out_file.is_none()
        && run.eval_every > 0
    {
        problems.push(ConfigProblem::new(
            "run.eval_every",
            run.eval_every,
            "must be 0 without tasks.held_out_file, the rows to evaluate on",
        ));
    }
    if are_read(&["engine", "algorithm"])
        && sections.algorithm.routing_replay == Some(RoutingReplay::Predictive)
        && !engine.is_embedded()
    {
        problems.push(ConfigProblem::new(
            "algorithm.routing_replay",
            RoutingReplay::Predictive.name(),
            "must be \"rollout\" with an inference server: only the embedded engine routes by the \
             trainer's prediction",
        ));
    }
}

/// Refuses keys that nothing reads because of another section, except of those sections that `misread` names.
fn check_unread(
    sections: &Sections,
    misread: &dyn Fn(&str) -> bool,
    problems: &mut Vec<ConfigProblem>,
) {
    let are_read = |names: &[&str]| !names.iter().any(|name| misread(name));
    let (scaffold, engine) = (sections.rollout.fill().scaffold, sections.engine.fill());
    if are_read(&["rollout", "agent"]) && scaffold != Scaffold::Command {
        let why = "only applies with rollout.scaffold = \"command\"";
        refuse_unread(&sections.agent, &sections.agent.given(), why, problems);
    }
    if are_read(&["rollout", "gateway"]) && scaffold != Scaffold::External {
        let why = "only applies with rollout.scaffold = \"external\"";
        refuse_unread(&sections.gateway, &sections.gateway.given(), why, problems);
    }
    let tasks = sections.tasks.fill();
    if are_read(&["tasks", "run"]) && (tasks.file.is_some() || tasks.held_out_file.is_some()) {
        let why = "only applies to generated tasks, not with tasks.file or tasks.held_out_file";
        refuse_unread(&sections.run, &["eval_held_out_families"], why, problems);
    }
    let replay = sections.algorithm.fill().routing_replay;
    if are_read(&["algorithm", "diagnostics", "routing", "handoff"])
        && !replay.replays_rollout()
        && sections.diagnostics.fill().no_replay_every == 0
    {
        let why = "does not apply without routing rows, which only algorithm.routing_replay = \"rollout\" \
                   or \"predictive\" and diagnostics.no_replay_every need";
        refuse_unread(&sections.routing, &sections.routing.given(), why, problems);
        refuse_unread(&sections.handoff, &sections.handoff.given(), why, problems);
    }
    if are_read(&["engine", "embedded"]) && !engine.is_embedded() {
        let why = "only applies to the embedded engine, not with an inference server";
        refuse_unread(&sections.embedded, &sections.embedded.given(), why, problems);
    }
    if are_read(&["trainer", "run"]) && sections.trainer.url.is_some() {
        let why = "only applies to the embedded trainer, not with trainer.url";
        refuse_unread(&sections.run, &["keep_checkpoints"], why, problems);
    }
    if are_read(&["engine", "rollout"]) && engine.kind == EngineKind::Openai {
        let why = "does not apply with engine.kind = \"openai\", whose servers render the prompts";
        refuse_unread(&sections.rollout, &["history", "thinking"], why, problems);
    }
}

fn refuse_unread<S: SectionKeys>(
    section: &S,
    keys: &[&str],
    why: &str,
    problems: &mut Vec<ConfigProblem>,
) {
    let mut found = Problems::new(S::NAME);
    found.refuse_unread(section, keys, why);
    let mut found = found.into_found();
    // One problem with a key is enough.
    found.retain(|new| problems.iter().all(|known| known.key != new.key));
    problems.append(&mut found);
}

/// Refuses passwords in addresses: addresses are part of the plan, of messages, of metrics and of logs.
/// Other problems with such an address are dropped, because they may repeat it.
fn check_secrets(sections: &Sections, problems: &mut Vec<ConfigProblem>) {
    const ENGINE: &str = "must not contain a user name, a password or a token: name the environment \
                          variable that holds the API key in engine.api_key_env";
    const TRAINER: &str = "must not contain a user name, a password or a token: name the \
                           environment variable that holds the token in trainer.token_env";
    const DOCKER: &str = "must not contain a password: ssh uses keys (ssh_config), tcp and https use \
                          certificates";
    const MIRROR: &str = "must not contain a user name or a password: log in on the Docker host \
                          (docker login)";
    let Sections { engine, trainer, sandbox, .. } = sections;
    let mut addresses = vec![
        ("engine.url".to_owned(), engine.url.as_ref(), ENGINE),
        ("engine.discover".to_owned(), engine.discover.as_ref(), ENGINE),
        ("trainer.url".to_owned(), trainer.url.as_ref(), TRAINER),
        ("sandbox.docker_host".to_owned(), sandbox.docker_host.as_ref(), DOCKER),
    ];
    let urls = engine.urls.iter().flatten();
    addresses.extend(urls.map(|url| ("engine.urls".to_owned(), Some(url), ENGINE)));
    for (index, host) in sandbox.hosts.iter().flatten().enumerate() {
        addresses.push((format!("sandbox.hosts[{index}].url"), host.url.as_ref(), DOCKER));
    }
    let mut refuse = |key: &str, remedy: &str| {
        problems.retain(|problem| problem.key != key);
        problems.push(ConfigProblem::new(key, NOT_SHOWN, remedy));
    };
    for (key, address, remedy) in &addresses {
        if address.is_some_and(|address| has_credentials(address) || has_query(address)) {
            refuse(key, remedy);
        }
    }
    if sandbox.mirror.as_ref().is_some_and(|mirror| mirror.contains('@')) {
        refuse("sandbox.mirror", MIRROR);
    }
}

/// Whether an address has a query, in which some servers expect a key.
pub(crate) fn has_query(address: &str) -> bool {
    address.contains("://") && address.contains('?')
}

impl Settings {
    /// Checks that a run can train with these settings.
    ///
    /// # Errors
    /// For engines that do not return what training needs, and for sampling whose probabilities the
    /// trainer cannot compute again.
    pub(crate) fn check_training(&self) -> Result<(), ConfigError> {
        let mut problems: Vec<ConfigProblem> =
            self.engine.check_training().err().into_iter().collect();
        let top_p = self.rollout.top_p;
        if top_p < 1.0 {
            let remedy = "must be 1.0 for a run: the engine renormalises over the tokens that are \
                          kept, the trainer does not, so every importance ratio would be biased \
                          (orchestrate eval may use a lower value)";
            problems.push(ConfigProblem::new("rollout.top_p", top_p, remedy));
        }
        let group_size = self.rollout.group_size;
        if group_size < 2 {
            let remedy = "must be at least 2 for a run: an episode is trained on only if its reward differs \
                          from another one of its group (orchestrate eval uses run.eval_samples instead)";
            problems.push(ConfigProblem::new("rollout.group_size", group_size, remedy));
        }
        if self.tasks.file.is_none() && self.tasks.held_out_file.is_some() {
            let remedy = "must name the rows to train on for a run: tasks.held_out_file replaces the \
                          generated tasks (orchestrate eval needs no tasks.file)";
            problems.push(ConfigProblem::missing("tasks.file", remedy));
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Problems(problems)) }
    }
}

/// A weight format by its name on the command line.
pub(crate) fn weight_format(name: &str) -> Option<WeightFormat> {
    serde_json::from_value(name.into()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(sets: &[&str]) -> Result<Sections, ConfigError> {
        let sets = sets.iter().map(|set| (*set).to_owned()).collect();
        load(&ConfigSource { files: vec![], sets })
    }

    #[test]
    fn all_kinds_of_problems_are_reported_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            Utf8PathBuf::from_path_buf(path).unwrap()
        };
        let one = file("one.toml", "[rollout]\ngroup_sise = 4\ngroup_size = 0\n");
        let two = file("two.toml", "[run]\nsteps = \"many\"\neval_samples = 0\n");
        let source = ConfigSource {
            files: vec![one.clone(), two.clone()],
            sets: ["sandbox.memory=4 elephants", "algorithm.gae_lambda=0.9"].map(Into::into).into(),
        };
        let error = load(&source).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "6 problems in the configuration:\n  \
                 {one}:2:1: unknown key rollout.group_sise; did you mean `group_size`?\n  \
                 {two}:2:9: run.steps = \"many\": must be a whole number\n  \
                 --set sandbox.memory=4 elephants: must be a size like \"4 GiB\", \
                 \"512MiB\" or \"4GB\", or a number of bytes\n  \
                 {two}:3:1: run.eval_samples = 0: must be at least 1\n  \
                 {one}:3:1: rollout.group_size = 0: must be at least 1\n  \
                 --set algorithm.gae_lambda=0.9: only applies with policy_loss = \"ppo\"; remove it, or \
                 set its default, 1.0"
            )
        );
    }

    #[test]
    fn rules_across_sections_name_where_the_value_was_written() {
        let sections = sets(&["algorithm.routing_replay=predictive", "engine.url=http://a:1"]);
        let text = sections.unwrap().check().unwrap_err().to_string();
        // Although the section has a problem of its own.
        assert!(text.contains("algorithm.mini_steps = 1: must be at least 2"), "{text}");
        assert!(
            text.contains("--set algorithm.routing_replay=predictive: must be \"rollout\""),
            "{text}"
        );
    }

    /// The keys that are refused because nothing reads them.
    fn unread(assignments: &[&str]) -> Vec<String> {
        let Err(ConfigError::Problems(problems)) = sets(assignments).unwrap().check() else {
            return Vec::new();
        };
        let unread = problems.iter().filter(|problem| matches!(problem.found, Found::Unread(_)));
        let texts = unread.map(|problem| (problem.key.clone(), problem.to_string()));
        texts
            .map(|(key, text)| {
                assert!(text.starts_with("--set ") && text.contains("remove it"), "{text}");
                key
            })
            .collect()
    }

    #[test]
    fn agents_need_an_engine_that_samples_from_tokens() {
        let chat = [
            "engine.kind=openai",
            "engine.served_model=m",
            "engine.tokenizer=m",
            "engine.url=http://a:1",
        ];
        for scaffold in ["command", "external"] {
            let scaffold = format!("rollout.scaffold={scaffold}");
            let with = [&chat[..], &[&scaffold]].concat();
            let Err(ConfigError::Problems(problems)) = sets(&with).unwrap().check() else {
                panic!("{scaffold} is accepted")
            };
            assert!(
                problems.iter().any(|problem| problem.key == "rollout.scaffold"),
                "{problems:?}"
            );
        }
    }

    #[test]
    fn old_names_are_read_as_the_new_ones() {
        let sections = sets(&["rollout.scaffold=outside", "engine.away_timeout=5m"]).unwrap();
        assert_eq!(sections.origins.renamed().len(), 2);
        let settings = sections.check().unwrap();
        assert_eq!(settings.rollout.scaffold, Scaffold::External);
        assert_eq!(
            settings.engine.out_of_service_timeout,
            orchestrate_types::HumanDuration::secs(300)
        );
    }

    #[test]
    fn keys_that_nothing_reads_because_of_another_section_are_refused_by_name() {
        let server = "engine.url=http://a:1";
        let chat = ["engine.kind=openai", "engine.served_model=m", "engine.tokenizer=m", server];
        let agent = ["rollout.scaffold=command", "agent.command=run"];
        let no_rows = ["algorithm.routing_replay=none", "diagnostics.no_replay_every=0"];
        // Each key by itself: what makes it unread, and what makes it read.
        let cases: [(&str, &[&str], &[&str]); 12] = [
            ("agent.port=99", &[], &agent),
            ("gateway.lease=5s", &agent, &["rollout.scaffold=external"]),
            ("embedded.max_running=3", &[server], &[]),
            ("run.keep_checkpoints=9", &["trainer.url=http://a:1"], &[server]),
            ("rollout.thinking=true", &chat, &[server]),
            ("rollout.history=template", &chat, &[server]),
            ("engine.require_routed_experts=false", &[], &[server]),
            ("engine.api_key_env=KEY", &[], &[server]),
            ("engine.tls_ca=ca.pem", &[], &["engine.url=https://a:1"]),
            ("run.eval_held_out_families=3", &["tasks.held_out_file=rows"], &[]),
            ("routing.mixed=drop", &no_rows, &no_rows[..1]),
            ("handoff.share_prefix_rows=true", &no_rows, &no_rows[1..]),
        ];
        assert_eq!(unread(&["engine.request_timeout=5s", server]), ["engine.request_timeout"]);
        for (set, unread_with, read_with) in cases {
            let key = set.split_once('=').unwrap().0;
            assert_eq!(unread(&[unread_with, &[set]].concat()), [key], "{set}");
            assert_eq!(unread(&[read_with, &[set]].concat()), [""; 0], "{set}");
        }
        // A default, as a plan has it written out, is accepted.
        assert_eq!(unread(&["agent.port=4180", "gateway.lease=60s"]), [""; 0]);
    }

    #[test]
    fn what_a_later_layer_leaves_unread_is_left_out_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = Utf8PathBuf::try_from(folder.path().join(name)).unwrap();
            fs_err::write(&path, text).unwrap();
            path
        };
        let base = file("base.toml", "[rollout]\ncommand_timeout = \"10s\"\n");
        let agent = file("agent.toml", "[rollout]\nscaffold = \"command\"\n");
        let late = file("late.toml", "[rollout]\ncommand_timeout = \"20s\"\n");
        let composed = |files: &[&Utf8PathBuf], sets: &[&str]| {
            let files: Vec<Utf8PathBuf> = files.iter().map(|&file| file.clone()).collect();
            let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
            let (sections, left_out) = load_layers(&files, &[&sets]).unwrap();
            let left_out: Vec<String> = left_out.iter().map(ToString::to_string).collect();
            (left_out, sections.rollout.command_timeout, sections.unread().len())
        };
        let (left_out, timeout, refused) = composed(&[&base, &agent], &[]);
        assert_eq!((left_out.len(), timeout, refused), (1, None, 0));
        let start = format!("{base}:2:1: rollout.command_timeout = \"10s\": does not apply");
        assert!(left_out[0].starts_with(&start), "{left_out:?}");
        assert_eq!(composed(&[&base], &["rollout.scaffold=external"]).0.len(), 1);
        // With what is before it, each of these is unread where it stands.
        for (files, sets) in [
            (&[&agent, &late][..], &[][..]),
            (&[&base, &agent, &late], &["run.steps=3"]),
            (&[&agent], &["rollout.command_timeout=20s"]),
        ] {
            let (left_out, timeout, refused) = composed(files, sets);
            assert_eq!((left_out.len(), refused), (0, 1), "{files:?}");
            assert!(timeout.is_some());
        }
        // The value in force is the default, which was written nowhere.
        let command = ["agent.command=run".to_owned()];
        let (sections, _) = load_layers(&[base.clone(), agent.clone()], &[&command]).unwrap();
        let shown = sections.with_defaults().unwrap().annotated().unwrap();
        assert!(shown.contains("\ncommand_timeout = \"90s\"\n"), "{shown}");
        // A later layer may make read again what an earlier one left unread.
        let again = composed(&[&base, &agent], &["rollout.scaffold=tools"]);
        assert_eq!((again.0.len(), again.2), (0, 0));
    }

    #[test]
    fn assignments_of_an_earlier_layer_are_left_out_and_those_of_the_same_one_are_refused() {
        let strings =
            |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let earlier = strings(&[
            "algorithm.clip_low=0.3",
            "algorithm.dual_clip=4",
            "algorithm.router_shift=before_clip",
            "algorithm.router_shift_floor=0.9",
            "rollout.tool_servers=[{ name = \"docs\", url = \"http://127.0.0.1:1/mcp\" }]",
        ]);
        let later = strings(&["algorithm.policy_loss=sapo", "rollout.scaffold=mini"]);
        let (sections, left_out) = load_layers(&[], &[&earlier, &later]).unwrap();
        let keys: Vec<&str> = left_out.iter().map(|problem| problem.key.as_str()).collect();
        let expected = earlier.iter().map(|set| set.split_once('=').unwrap().0);
        let mut expected: Vec<&str> = expected.collect();
        expected.sort_unstable_by_key(|key| keys.iter().position(|known| known == key));
        assert_eq!(keys, expected);
        let settings = sections.check().unwrap();
        assert_eq!(settings.algorithm.policy_loss().name(), "sapo");
        assert!(settings.rollout.tool_servers.is_empty());
        let together = [earlier.as_slice(), &later].concat();
        let (sections, left_out) = load_layers(&[], &[&together]).unwrap();
        assert_eq!((left_out.len(), sections.unread().len()), (0, earlier.len()));
    }

    #[test]
    fn recorded_changes_are_left_out_where_a_new_one_leaves_them_unread() {
        let changed = |recorded: &str, new: &str| {
            let (recorded, new) = ([recorded.to_owned()], [new.to_owned()]);
            parse_plan("plan.toml", "", &recorded, &new).unwrap().check()
        };
        assert_eq!(
            changed("sandbox.pull_ahead=3", "sandbox.pull=never").unwrap().sandbox.pull_ahead,
            4
        );
        assert!(changed("sandbox.pull=never", "sandbox.pull_ahead=3").is_err());
        changed("engine.request_timeout=5s", "run.steps=3").unwrap();
    }

    #[test]
    fn secrets_of_the_configuration_are_shown_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let file = Utf8PathBuf::try_from(folder.path().join("a.toml")).unwrap();
        let env = "[\"KEY=canary\", \"canary\"]";
        let server = "[{ name = \"docs\", url = \"http://127.0.0.1:1/mcp?token=canary\" }]";
        fs_err::write(&file, format!("[agent]\nenv = {env}\n[rollout]\ntool_servers = {server}\n"))
            .unwrap();
        let sets = [format!("agent.env={env}"), format!("rollout.tool_servers={server}")];
        for (files, sets) in [(&[file][..], &[][..]), (&[], &sets)] {
            let (sections, _) = load_layers(files, &[sets]).unwrap();
            let shown = sections.annotated().unwrap();
            assert!(
                shown.contains("KEY=(not shown)") && shown.contains("/mcp?(not shown)"),
                "{shown}"
            );
            let error = sections.check().unwrap_err().to_string();
            assert!(error.contains("agent.env[1] = \"(not shown)\""), "{error}");
            assert!(!format!("{shown}{error}").contains("canary"), "{shown}{error}");
        }
        // Nor where the value has the wrong type, or is inside of a table.
        for set in ["agent.env=canary", "agent.env=[1, \"canary\"]", "agent={ env = \"canary\" }"] {
            let error = load_layers(&[], &[&[set.to_owned()]]).unwrap_err().to_string();
            assert!(error.contains("agent.env") && !error.contains("canary"), "{error}");
        }
    }

    #[test]
    fn addresses_of_one_layer_do_not_replace_each_other() {
        let sets = ["engine.url=http://a:1", "engine.discover=http://b:1"];
        let source = ConfigSource { files: Vec::new(), sets: sets.map(str::to_owned).to_vec() };
        let error = load(&source).unwrap().check().unwrap_err().to_string();
        assert!(error.contains("must be the only one"), "{error}");
        let root = Utf8PathBuf::try_from(orchestrate_e2e::root()).unwrap();
        let config = root.join("configs/r3-qwen3-30b-a3b-r2e.toml");
        let source = ConfigSource {
            files: vec![config],
            sets: sets[..1].iter().map(|&set| set.to_owned()).collect(),
        };
        assert_eq!(load(&source).unwrap().check().unwrap().engine.discover, None);
    }

    #[test]
    fn an_address_of_a_later_layer_replaces_those_of_earlier_ones() {
        let plan = "[engine]\nurls = [\"http://a:1\", \"http://b:1\"]\n[run]\nsteps = 3\n";
        for (sets, expected) in [
            (&["engine.url=http://c:1", "run.steps=7"][..], [Some("http://c:1"), None]),
            (&["engine.discover=http://d:1"], [None, Some("http://d:1")]),
            (&["engine.url=http://c:1", "engine.discover=http://d:1"], [None, Some("http://d:1")]),
        ] {
            let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
            let sections = parse_plan("plan.toml", plan, &[], &sets).unwrap();
            let engine = &sections.engine;
            assert_eq!([engine.url.as_deref(), engine.discover.as_deref()], expected);
            assert_eq!(engine.urls, None);
            assert_eq!(sections.origins.of("engine.urls"), None);
        }
        let both = "[engine]\nurl = \"http://a:1\"\ndiscover = \"http://b:1\"\n";
        let error = parse_layer("plan.toml", both).unwrap().check().unwrap_err().to_string();
        assert!(error.contains("must be the only one"), "{error}");
    }

    #[test]
    fn a_plan_loses_what_an_assignment_leaves_unread_and_an_assignment_does_not() {
        let plan = "[sandbox]\nmirror = \"m.local:5000\"\n[embedded]\nweight_format = \"f32\"\n";
        let resumed = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
            parse_plan("plan.toml", plan, &[], &sets).unwrap().check()
        };
        assert_eq!(resumed(&[]).unwrap().sandbox.mirror.as_deref(), Some("m.local:5000"));
        let without = resumed(&["sandbox.pull=never", "engine.url=http://a:1"]).unwrap();
        assert_eq!(without.sandbox.mirror, None);
        assert_eq!(without.embedded.weight_format, WeightFormat::default());
        let error = resumed(&["sandbox.pull=never", "sandbox.pull_ahead=3"]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("--set sandbox.pull_ahead=3: only applies with"), "{text}");
        assert!(!text.contains("mirror"), "{text}");
    }

    #[test]
    fn defaults_written_out_check_to_the_same_settings() {
        let source = [
            "engine.model=\"m\"",
            "routing.cache_bytes=\"0 B\"",
            "algorithm.policy_loss=gspo",
            "tasks.file=\"rows\"",
            "run.eval_every=0",
            "sandbox.hosts=[{ url = \"ssh://a\" }]",
        ];
        let whole = sets(&source).unwrap().with_defaults().unwrap();
        let text = toml::to_string(&whole).unwrap();
        let again = parse_layer("plan.toml", &text).unwrap();
        assert_eq!(again, whole);
        assert_eq!(again.with_defaults().unwrap(), whole);
    }

    #[test]
    fn what_cannot_train_is_refused_for_a_run_alone() {
        for (assignments, key) in [
            (&["rollout.group_size=1"][..], "rollout.group_size"),
            (&["rollout.group_size=1", "algorithm.policy_loss=ppo"], "rollout.group_size"),
            (&["rollout.top_p=0.9"], "rollout.top_p"),
            (&["tasks.held_out_file=rows"], "tasks.file"),
            (&["tasks.held_out_file=rows", "rollout.scaffold=external"], "tasks.file"),
        ] {
            // An evaluation can do with it.
            let settings = sets(assignments).unwrap().check().unwrap();
            let Err(ConfigError::Problems(problems)) = settings.check_training() else {
                panic!("{assignments:?}")
            };
            let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
            assert_eq!(keys, [key]);
        }
        for assignments in
            [&["rollout.group_size=2"][..], &["tasks.held_out_file=r", "tasks.file=r"]]
        {
            sets(assignments).unwrap().check().unwrap().check_training().unwrap();
        }
    }

    #[test]
    fn shown_values_say_where_they_were_written() {
        let shown = sets(&["run.steps=7"]).unwrap().with_defaults().unwrap().annotated().unwrap();
        assert!(shown.contains("\nsteps = 7  # --set run.steps=7\n"), "{shown}");
        assert!(shown.contains("\ngroup_size = 8\n"), "{shown}");
    }

    #[test]
    fn plans_of_older_versions_are_read() {
        for plan in [
            include_str!("../tests/plans/default.toml"),
            include_str!("../tests/plans/options.toml"),
        ] {
            let sections = parse_layer("plan.toml", plan).unwrap();
            let whole = sections.with_defaults().unwrap();
            // Everything that the plan says and something reads is kept.
            let (old, new) = (plan.parse::<toml::Table>(), toml::Table::try_from(&whole));
            let (old, mut new) = (old.unwrap(), new.unwrap());
            new.get_mut("algorithm").unwrap().as_table_mut().unwrap().extend(unused(&old));
            for (name, section) in &old {
                for (key, value) in section.as_table().unwrap() {
                    // An older version accepted this key with an inference server.
                    let is_read = value.as_str() != Some("q4_0");
                    assert_eq!(new[name].get(key) == Some(value), is_read, "{name}.{key}");
                }
            }
        }
    }

    /// Keys of `[algorithm]` that older versions wrote although they have no effect.
    fn unused(plan: &toml::Table) -> toml::Table {
        let keys = ["loss_norm_tokens", "dual_clip", "router_shift", "importance_level"];
        let algorithm = plan["algorithm"].as_table().unwrap();
        let given = keys
            .into_iter()
            .filter_map(|key| algorithm.get(key).map(|value| (key.to_owned(), value.clone())));
        given.collect()
    }
}
