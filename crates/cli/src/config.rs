//! The configuration: which sections there are, how it is loaded, and rules across sections.
//!
//! Each section belongs to the crate that uses it. Files and assignments are read by
//! [`Layers`]: later layers win, tables merge, lists replace. Every problem of every layer is
//! reported at once.

use crate::args::ConfigSource;
use crate::error::UsageError;
use crate::{output, paths};
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
use orchestrate_tasks::load;
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
                let count = output::counted(problems.len(), "problem");
                write!(f, "{count} in the configuration:")?;
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

            /// Changes every path of a file or folder.
            pub(crate) fn map_paths(&mut self, map: &mut dyn FnMut(&mut String)) {
                $(self.$name.map_paths(map);)*
                // A task file may also be a data set on a hub.
                let files = [&mut self.tasks.file, &mut self.tasks.held_out_file];
                files.into_iter().flatten().filter(|file| !load::is_on_hub(file)).for_each(map);
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
    sections.warn_of_old_names();
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
    let all = texts.len() + sets.len();
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
        merged(layers, if count == all { Rules::OfNew } else { Rules::OfRecorded })
    };
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
    let mut sections = merged(layers, Rules::OfRecorded)?;
    for problem in sections.unread() {
        let assigned = problem.origin.as_deref().and_then(|origin| origin.strip_prefix("--set "));
        let is_of = |sets: &[String]| sets.iter().any(|set| Some(set.as_str()) == assigned);
        if assigned.is_none() || (is_of(recorded) && !is_of(new)) {
            sections.clear(&problem.key);
        }
    }
    Ok(sections)
}

/// Reads one assignment by itself.
///
/// # Errors
/// As [`load`].
pub(crate) fn parse_assignment(assignment: &str) -> Result<Sections, ConfigError> {
    let mut layers = layers();
    layers.add_assignment(assignment);
    merged(layers, Rules::OfRecorded)
}

/// Which rules a configuration must keep besides those of [`Sections::check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// Those of a configuration that is about to be used.
    OfNew,
    /// None: what a run has recorded is read as it was when the run began.
    OfRecorded,
}

fn merged(layers: Layers, rules: Rules) -> Result<Sections, ConfigError> {
    let (table, origins, mut problems) = layers.finish();
    let fitting: Result<Sections, _> = table.try_into();
    let sections = fitting.map_err(|error| ConfigError::Layer {
        name: "configuration".to_owned(),
        error: error.to_string(),
    })?;
    let sections = Sections { origins, ..sections };
    let mut of_new = match rules {
        Rules::OfNew => sections.problems_if_new(),
        Rules::OfRecorded => Vec::new(),
    };
    if problems.is_empty() && of_new.is_empty() {
        return Ok(sections);
    }
    problems.append(&mut of_new);
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

    /// Prints a warning for everything that is written with an old name.
    pub(crate) fn warn_of_old_names(&self) {
        for notice in self.origins.renamed() {
            output::say(format!("warning: {}", without_credentials(notice)));
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

    /// What the sections themselves accept, because runs that have begun may have it.
    fn problems_if_new(&self) -> Vec<ConfigProblem> {
        let mut prompts = Problems::new(RolloutSection::NAME);
        self.rollout.fill().check_placeholders(&mut prompts);
        let mut variables = Problems::new(AgentSection::NAME);
        self.agent.fill().check_repeated_variables(&mut variables);
        let mut problems = [prompts.into_found(), variables.into_found()].concat();
        self.origins.locate(&mut problems);
        problems
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

    /// The same configuration with absolute paths, as the run folder stores it: the same files and folders are
    /// found from any current folder, and are called the same however they were written.
    ///
    /// # Errors
    /// If the current folder is not known.
    pub(crate) fn with_absolute_paths(&self) -> Result<Self, UsageError> {
        let mut sections = self.clone();
        let mut failed = None;
        sections.map_paths(&mut |path| match paths::absolute(Utf8Path::new(path.as_str())) {
            // An empty path is refused where the file is read.
            _ if path.is_empty() => {}
            Ok(absolute) => *path = absolute.into_string(),
            Err(error) => failed = Some(error),
        });
        failed.map_or(Ok(sections), Err)
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

Paths are relative to the current folder. A run records absolute ones, so that it can be resumed from any
folder; links keep their names, and `..` is resolved.

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
mod tests;
