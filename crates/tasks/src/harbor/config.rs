//! Reads a `task.toml` by the rules of Harbor's data model: formats 1.0 to 1.4, including older
//! keys.

use super::hosts::{NetworkMode, NetworkPolicy, policy};
use super::row::{Artifact, CollectHook, Healthcheck, RewardStrategy, check_min_reward};
use super::value::{HarborProblem, Section, number, python_float};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// Default time limit of a verifier and of a build, in seconds.
const DEFAULT_TIMEOUT_S: f64 = 600.0;
/// The service of the agent's container in a compose file.
const MAIN_SERVICE: &str = "main";

/// The formats that are read.
pub(super) const FORMATS: [&str; 5] = ["1.0", "1.1", "1.2", "1.3", "1.4"];
/// Keys of Harbor's data model, and older ones that it still reads.
const ROOT: &[&str] = &[
    "schema_version",
    "version",
    "task",
    "metadata",
    "verifier",
    "agent",
    "environment",
    "solution",
    "source",
    "multi_step_reward_strategy",
    "steps",
    "artifacts",
];
const PACKAGE: &[&str] = &["name", "version", "description", "authors", "keywords"];
const ENVIRONMENT: &[&str] = &[
    "network_mode",
    "allowed_hosts",
    "build_timeout_sec",
    "docker_image",
    "os",
    "cpus",
    "memory_mb",
    "memory",
    "storage_mb",
    "storage",
    "gpus",
    "gpu_types",
    "tpu",
    "mcp_servers",
    "env",
    "skills_dir",
    "healthcheck",
    "workdir",
    "allow_internet",
];
const AGENT: &[&str] = &["timeout_sec", "user", "network_mode", "allowed_hosts"];
const VERIFIER: &[&str] = &[
    "timeout_sec",
    "env",
    "user",
    "environment_mode",
    "environment",
    "collect",
    "network_mode",
    "allowed_hosts",
];
const COLLECT: &[&str] = &["command", "service", "timeout_sec", "user"];
const STEP: &[&str] = &["name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"];
const HEALTHCHECK: &[&str] = &[
    "command",
    "interval_sec",
    "timeout_sec",
    "start_period_sec",
    "start_interval_sec",
    "retries",
];
const ARTIFACT: &[&str] = &["source", "destination", "exclude", "service"];

/// A checked `task.toml`. Features that cannot run here are listed in [`Config::unsupported`].
#[derive(Debug, Clone, Default)]
pub(super) struct Config {
    pub(super) schema_version: String,
    pub(super) package: Option<String>,
    pub(super) category: Option<String>,
    pub(super) environment: Environment,
    pub(super) agent: Agent,
    pub(super) verifier: Verifier,
    pub(super) solution_env: BTreeMap<String, String>,
    pub(super) artifacts: Vec<Artifact>,
    pub(super) steps: Vec<Step>,
    pub(super) strategy: Option<RewardStrategy>,
    pub(super) unsupported: Vec<String>,
}

/// A section `[environment]` or `[verifier.environment]`.
#[derive(Debug, Clone, Default)]
pub(super) struct Environment {
    pub(super) build_timeout_s: f64,
    pub(super) docker_image: Option<String>,
    pub(super) cpus: Option<f64>,
    pub(super) memory_mb: Option<i64>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) healthcheck: Option<Healthcheck>,
    pub(super) workdir: Option<String>,
    pub(super) network: NetworkPolicy,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Agent {
    pub(super) timeout_s: Option<f64>,
    pub(super) network: Option<NetworkPolicy>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Verifier {
    pub(super) timeout_s: f64,
    pub(super) env: BTreeMap<String, String>,
    pub(super) is_separate: Option<bool>,
    pub(super) environment: Option<Environment>,
    pub(super) collect: Vec<CollectHook>,
    pub(super) network: Option<NetworkPolicy>,
}

impl Verifier {
    /// Whether the verifier has its own container; `None` if this section does not decide it.
    pub(super) fn mode(&self) -> Option<bool> {
        self.is_separate.or(self.environment.as_ref().map(|_| true))
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) agent: Agent,
    pub(super) verifier: Verifier,
    pub(super) min_reward: BTreeMap<String, f64>,
    pub(super) healthcheck: Option<Healthcheck>,
    pub(super) artifacts: Vec<Artifact>,
}

impl Config {
    pub(super) fn parse(text: &str) -> Result<Self, HarborProblem> {
        let table: Table = text
            .parse()
            .map_err(|error| HarborProblem::invalid(format!("task.toml is not TOML: {error}")))?;
        let root = Section::new(&table, "");
        root.check_keys(ROOT)?;
        let mut reading = Reading::default();
        let version = if root.has("schema_version") { "schema_version" } else { "version" };
        let schema_version = root.text(version)?.unwrap_or("1.4").to_owned();
        if !FORMATS.contains(&schema_version.as_str()) {
            let [known @ .., last] = FORMATS;
            reading.unsupported.push(format!(
                "task.toml: {version} = \"{schema_version}\" (the formats {} and {last} are read)",
                known.join(", ")
            ));
        }
        root.text("source")?;
        let metadata = root.section("metadata")?;
        let category = metadata.and_then(|section| section.get("category")?.as_str());
        let steps = root.list("steps")?.iter().map(|step| match step {
            Value::Table(table) => reading.step(&Section::new(table, "steps")),
            _ => Err(root.wrong("steps", "must be tables")),
        });
        let steps = steps.collect::<Result<Vec<_>, _>>()?;
        unique(&steps)?;
        let strategy = match root.text("multi_step_reward_strategy")? {
            None => None,
            Some("mean") => Some(RewardStrategy::Mean),
            Some("final") => Some(RewardStrategy::Final),
            Some(_) => {
                return Err(
                    root.wrong("multi_step_reward_strategy", "must be \"mean\" or \"final\"")
                );
            }
        };
        let empty = Table::new();
        let or_empty = |name| -> Result<Section<'_>, HarborProblem> {
            Ok(root.section(name)?.unwrap_or_else(|| Section::new(&empty, "")))
        };
        or_empty("solution")?.check_keys(&["env"])?;
        Ok(Self {
            schema_version,
            package: package(root.section("task")?)?,
            category: category.map(ToOwned::to_owned),
            environment: reading.environment(&or_empty("environment")?)?,
            agent: reading.agent(&or_empty("agent")?)?,
            verifier: reading.verifier(&or_empty("verifier")?)?,
            solution_env: resolved(&or_empty("solution")?, "env", &mut reading.unsupported)?,
            artifacts: reading.artifacts(&root)?,
            steps,
            strategy,
            unsupported: reading.unsupported,
        })
    }
}

/// Step names must differ even on file systems that ignore case.
fn unique(steps: &[Step]) -> Result<(), HarborProblem> {
    let mut seen = BTreeSet::new();
    for step in steps {
        if !seen.insert(step.name.to_lowercase()) {
            return Err(HarborProblem::invalid(format!("two steps are named `{}`", step.name)));
        }
    }
    Ok(())
}

/// The name `ORG/NAME` of a `[task]` section.
fn package(section: Option<Section<'_>>) -> Result<Option<String>, HarborProblem> {
    let Some(section) = section else { return Ok(None) };
    section.check_keys(PACKAGE)?;
    let name = section.text("name")?.ok_or_else(|| section.wrong("name", "is missing"))?;
    let part = |text: &str| {
        let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(is_valid)
    };
    let is_valid = name.split_once('/').is_some_and(|(org, name)| part(org) && part(name));
    if !is_valid || name.contains("..") {
        return Err(section.wrong("name", "must have the form ORG/NAME"));
    }
    if section.text("version")? == Some("") {
        return Err(section.wrong("version", "must not be empty"));
    }
    section.text("description")?;
    section.texts("keywords")?;
    for author in section.list("authors")? {
        let author = author.as_table().map(|table| Section::new(table, "authors"));
        let author = author.ok_or_else(|| section.wrong("authors", "must be tables"))?;
        author.text("email")?;
        author.text("name")?.ok_or_else(|| author.wrong("name", "is missing"))?;
    }
    Ok(Some(name.to_owned()))
}

/// Collects features that are valid but cannot run here.
#[derive(Debug, Default)]
struct Reading {
    unsupported: Vec<String>,
}

impl Reading {
    fn environment(&mut self, section: &Section<'_>) -> Result<Environment, HarborProblem> {
        section.check_keys(ENVIRONMENT)?;
        section.check_limit("build_timeout_sec")?;
        match section.text("os")?.map(str::to_lowercase).as_deref() {
            None | Some("linux") => {}
            Some("windows") => self.unsupported.push("Windows containers".to_owned()),
            Some(_) => return Err(section.wrong("os", "must be \"linux\" or \"windows\"")),
        }
        let cpus = section.number("cpus")?;
        if cpus.is_some_and(|cpus| !cpus.is_finite()) {
            return Err(section.wrong("cpus", "must be finite"));
        }
        if section.whole("gpus")?.is_some_and(|gpus| gpus > 0) {
            self.unsupported.push("GPUs".to_owned());
        }
        section.texts("gpu_types")?;
        if section.section("tpu")?.is_some() {
            self.unsupported.push("TPUs".to_owned());
        }
        if !section.list("mcp_servers")?.is_empty() {
            self.unsupported.push("MCP servers".to_owned());
        }
        section.text("skills_dir")?;
        size(section, "storage", "storage_mb")?;
        let allow_internet = section.flag("allow_internet")?;
        let default = match allow_internet {
            Some(false) if !section.has("allowed_hosts") => NetworkMode::NoNetwork,
            Some(_) | None => NetworkMode::Public,
        };
        let build_timeout_s = section.number("build_timeout_sec")?.unwrap_or(DEFAULT_TIMEOUT_S);
        Ok(Environment {
            build_timeout_s: self.time(build_timeout_s, "the time limit of the build"),
            docker_image: section.text("docker_image")?.filter(|s| !s.is_empty()).map(Into::into),
            cpus,
            memory_mb: size(section, "memory", "memory_mb")?,
            env: resolved(section, "env", &mut self.unsupported)?,
            healthcheck: self.healthcheck(section)?,
            workdir: section.text("workdir")?.filter(|s| !s.is_empty()).map(Into::into),
            network: policy(section, Some(default))?.unwrap_or_default(),
        })
    }

    fn agent(&mut self, section: &Section<'_>) -> Result<Agent, HarborProblem> {
        section.check_keys(AGENT)?;
        section.check_limit("timeout_sec")?;
        self.user(section, "agent")?;
        let timeout_s = section.number("timeout_sec")?;
        Ok(Agent {
            timeout_s: timeout_s.map(|time| self.time(time, "the time limit of the agent")),
            network: policy(section, None)?,
        })
    }

    fn verifier(&mut self, section: &Section<'_>) -> Result<Verifier, HarborProblem> {
        section.check_keys(VERIFIER)?;
        section.check_limit("timeout_sec")?;
        self.user(section, "verifier")?;
        let is_separate = match section.text("environment_mode")? {
            None => None,
            Some("shared") => Some(false),
            Some("separate") => Some(true),
            Some(_) => {
                return Err(section.wrong("environment_mode", "must be \"shared\" or \"separate\""));
            }
        };
        let environment = section.section("environment")?;
        if is_separate == Some(false) && environment.is_some() {
            return Err(section.wrong("environment", "contradicts environment_mode = \"shared\""));
        }
        let collect = section.list("collect")?.iter().map(|hook| match hook {
            Value::Table(table) => self.collect_hook(&Section::new(table, "verifier.collect")),
            _ => Err(section.wrong("collect", "must be tables")),
        });
        let collect = collect.collect::<Result<Vec<_>, _>>()?;
        let timeout_s = section.number("timeout_sec")?.unwrap_or(DEFAULT_TIMEOUT_S);
        Ok(Verifier {
            timeout_s: self.time(timeout_s, "the time limit of the verifier"),
            env: resolved(section, "env", &mut self.unsupported)?,
            is_separate,
            environment: environment.map(|section| self.environment(&section)).transpose()?,
            collect: collect.into_iter().flatten().collect(),
            network: policy(section, None)?,
        })
    }

    fn collect_hook(&mut self, hook: &Section<'_>) -> Result<Option<CollectHook>, HarborProblem> {
        hook.check_keys(COLLECT)?;
        hook.check_limit("timeout_sec")?;
        let command = hook.text("command")?.ok_or_else(|| hook.wrong("command", "is missing"))?;
        self.user(hook, "collect hook")?;
        let timeout_s = hook.number("timeout_sec")?.unwrap_or(60.0);
        if let Some(service) = service(hook)?.filter(|service| service != MAIN_SERVICE) {
            self.unsupported.push(format!("the compose service `{service}`"));
            return Ok(None);
        }
        let timeout_s = self.time(timeout_s, "the time limit of a collect hook");
        Ok(Some(CollectHook { command: command.to_owned(), timeout_s }))
    }

    fn step(&mut self, section: &Section<'_>) -> Result<Step, HarborProblem> {
        section.check_keys(STEP)?;
        let name = section.text("name")?.ok_or_else(|| section.wrong("name", "is missing"))?;
        check_step_name(name)?;
        let empty = Table::new();
        let or_empty = |name| -> Result<Section<'_>, HarborProblem> {
            Ok(section.section(name)?.unwrap_or_else(|| Section::new(&empty, "")))
        };
        let min_reward = match section.get("min_reward") {
            None => BTreeMap::new(),
            Some(Value::Table(table)) => table
                .iter()
                .map(|(key, value)| Some((key.clone(), number(value)?)))
                .collect::<Option<_>>()
                .ok_or_else(|| section.wrong("min_reward", "must be numbers"))?,
            Some(value) => {
                let least = number(value)
                    .ok_or_else(|| section.wrong("min_reward", "must be a number or a table"))?;
                BTreeMap::from([("reward".to_owned(), least)])
            }
        };
        if let Err(what) = check_min_reward(&min_reward) {
            let problem = section.wrong("min_reward", what);
            return Err(HarborProblem::Mistake(problem.to_string()));
        }
        Ok(Step {
            name: name.to_owned(),
            agent: self.agent(&or_empty("agent")?)?,
            verifier: self.verifier(&or_empty("verifier")?)?,
            min_reward,
            healthcheck: self.healthcheck(section)?,
            artifacts: self.artifacts(section)?,
        })
    }

    fn healthcheck(&mut self, section: &Section<'_>) -> Result<Option<Healthcheck>, HarborProblem> {
        let Some(check) = section.section("healthcheck")? else { return Ok(None) };
        check.check_keys(HEALTHCHECK)?;
        check.check_limit("timeout_sec")?;
        let command = check.text("command")?.ok_or_else(|| check.wrong("command", "is missing"))?;
        let retries = check.whole("retries")?.unwrap_or(3);
        // The first failure ends a check with a number below 1, as in Harbor.
        let retries = u32::try_from(retries.max(0)).unwrap_or(u32::MAX);
        let mut seconds = |key, default| -> Result<f64, HarborProblem> {
            let seconds = check.number(key)?.unwrap_or(default);
            Ok(self.time(seconds, "a time of the health check"))
        };
        Ok(Some(Healthcheck {
            command: command.to_owned(),
            interval_s: seconds("interval_sec", 5.0)?,
            timeout_s: seconds("timeout_sec", 30.0)?,
            start_period_s: seconds("start_period_sec", 0.0)?,
            start_interval_s: seconds("start_interval_sec", 5.0)?,
            retries,
        }))
    }

    fn artifacts(&mut self, section: &Section<'_>) -> Result<Vec<Artifact>, HarborProblem> {
        let mut artifacts = Vec::new();
        for entry in section.list("artifacts")? {
            let artifact = match entry {
                Value::String(source) => {
                    Some(Artifact { source: source.clone(), ..Artifact::default() })
                }
                Value::Table(table) => self.artifact(&Section::new(table, "artifacts"))?,
                _ => return Err(section.wrong("artifacts", "must be strings or tables")),
            };
            if let Some(artifact) = artifact {
                if artifact.source.split('/').any(|part| part == "..") {
                    return Err(section.wrong("artifacts", "must not contain `..`"));
                }
                artifacts.push(artifact);
            }
        }
        Ok(artifacts)
    }

    fn artifact(&mut self, entry: &Section<'_>) -> Result<Option<Artifact>, HarborProblem> {
        entry.check_keys(ARTIFACT)?;
        let source = entry.text("source")?.ok_or_else(|| entry.wrong("source", "is missing"))?;
        if source.split('/').any(|part| part == "..") {
            return Err(entry.wrong("source", "must not contain `..`"));
        }
        let destination = entry.text("destination")?.filter(|text| !text.is_empty());
        if let Some(destination) = destination {
            let is_plain = !destination.contains('\\')
                && !destination.starts_with('/')
                && !destination.split('/').any(|part| part == "..")
                && destination.split('/').any(|part| !matches!(part, "" | "."));
            if !is_plain || destination.trim_end_matches('/') == "manifest.json" {
                return Err(entry.wrong("destination", "must be a plain relative path"));
            }
        }
        let exclude = entry.texts("exclude")?.unwrap_or_default();
        if let Some(service) = service(entry)?.filter(|service| service != MAIN_SERVICE) {
            if !source.starts_with('/') {
                return Err(entry.wrong("source", "must be absolute"));
            }
            self.unsupported.push(format!("the compose service `{service}`"));
            return Ok(None);
        }
        Ok(Some(Artifact { source: source.to_owned(), exclude }))
    }

    /// Checks a `user` key: commands can only run as root here.
    fn user(&mut self, section: &Section<'_>, what: &str) -> Result<(), HarborProblem> {
        let user = match section.get("user") {
            None => return Ok(()),
            Some(Value::String(user)) => user.clone(),
            Some(Value::Integer(id)) => id.to_string(),
            Some(_) => return Err(section.wrong("user", "must be a name or a number")),
        };
        if !matches!(user.as_str(), "root" | "0" | "0:0" | "root:root") {
            self.unsupported.push(format!("{what} as the user `{user}`"));
        }
        Ok(())
    }

    /// A time in seconds. More than a day is unsupported.
    fn time(&mut self, seconds: f64, what: &str) -> f64 {
        if seconds.is_nan() || seconds < 0.0 {
            self.unsupported.push(format!("{what}, {seconds} seconds"));
        }
        seconds.clamp(0.0, 86_400.0)
    }
}

/// The name of a compose service.
fn service(section: &Section<'_>) -> Result<Option<String>, HarborProblem> {
    let Some(name) = section.text("service")? else { return Ok(None) };
    let name = name.trim();
    let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(is_valid) {
        return Err(section.wrong("service", "must be the name of a compose service"));
    }
    Ok(Some(name.to_owned()))
}

/// A size in MiB: a number, or the older form with a unit (`2G`, `512M`).
fn size(section: &Section<'_>, old: &str, key: &str) -> Result<Option<i64>, HarborProblem> {
    let new = section.whole(key)?;
    let Some(text) = section.get(old).and_then(Value::as_str) else { return Ok(new) };
    let text = text.trim().to_uppercase();
    let wrong = || section.wrong(old, "must be a size like \"2G\" or \"512M\"");
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'G')) => (text.get(..at), 1024.0),
        Some((at, 'M')) => (text.get(..at), 1.0),
        Some((at, 'K')) => (text.get(..at), 1.0 / 1024.0),
        _ => return Err(wrong()),
    };
    let mib = digits.and_then(python_float).ok_or_else(wrong)? * factor;
    if !mib.is_finite() {
        return Err(wrong());
    }
    let mib: i64 = format!("{:.0}", mib.trunc()).parse().map_err(|_| wrong())?;
    match new {
        Some(other) if other != mib => Err(section.wrong(old, "contradicts the newer key")),
        Some(_) | None => Ok(Some(mib)),
    }
}

/// Variables with `${NAME:-default}` replaced by the default. Containers never get variables from
/// the environment of this program.
fn resolved<'a>(
    section: &Section<'a>,
    key: &'a str,
    unsupported: &mut Vec<String>,
) -> Result<BTreeMap<String, String>, HarborProblem> {
    let mut variables = section.text_map(key)?;
    for value in variables.values_mut() {
        let template = value.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
        let Some(template) = template.filter(|text| !text.is_empty()) else { continue };
        let (name, default) = match template.split_once(':') {
            None => (template, None),
            Some((name, rest)) if !name.is_empty() && rest.starts_with('-') => {
                (name, rest.strip_prefix('-'))
            }
            Some(_) => continue,
        };
        if name.contains('}') {
            continue;
        }
        match default {
            Some(default) => *value = default.to_owned(),
            None => unsupported.push(format!("the host's variable `{name}`")),
        }
    }
    Ok(variables)
}

/// Step names are portable folder names.
fn check_step_name(name: &str) -> Result<(), HarborProblem> {
    let reserved = |stem: &str| {
        let stem = stem.trim_end_matches(' ').to_uppercase();
        let numbered = stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT"));
        let is_number = |rest: &str| {
            let mut characters = rest.chars();
            let first = characters.next();
            first.is_some_and(|c| ('1'..='9').contains(&c) || "¹²³".contains(c))
                && characters.next().is_none()
        };
        matches!(stem.as_str(), "CON" | "PRN" | "AUX" | "NUL" | "CONIN$" | "CONOUT$")
            || numbered.is_some_and(is_number)
    };
    let is_bad = |c: char| "<>:\"/\\|?*".contains(c) || c.is_ascii_control();
    let is_valid = !name.trim().is_empty()
        && !matches!(name, "." | "..")
        && !name.ends_with(['.', ' '])
        && !name.contains(is_bad)
        && !reserved(name.split('.').next().unwrap_or_default())
        && name.len() <= 255;
    if is_valid {
        return Ok(());
    }
    Err(HarborProblem::invalid(format!("`{name}` is not a portable step name")))
}
