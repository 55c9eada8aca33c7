//! `orchestrate doctor`: checks everything that a run needs.

use crate::args::DoctorArgs;
use crate::config::{self, ConfigError, Settings, has_query};
use crate::error::{OutputError, UsageError};
use crate::glob::matches_glob;
use crate::progress::Progress;
use crate::{exit, output, run_folder, tables, task_source, wiring};
use anyhow::Context;
use orchestrate_engine::{
    ClientOptions, EngineError, EngineErrorKind, EngineKind, ProbeReport, Severity,
};
use orchestrate_moe::ModelConfig;
use orchestrate_rollout::{ChatModel, ToolServers};
use orchestrate_sandbox::{
    DockerProvider, Owner, Purpose, SandboxError, SandboxErrorKind, SandboxProvider, SandboxSpec,
    SelfTestResult, SharedLimit, run_self_test, self_test_cases,
};
use orchestrate_settings::SectionKeys as _;
use orchestrate_tasks::Task;
use orchestrate_types::{
    AttemptId, ConfigProblem, EpisodeId, GroupId, NOT_SHOWN, RunId, has_credentials,
    without_credentials,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Results of the self-test by Docker host.
type Saved = BTreeMap<String, Vec<SelfTestResult>>;

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    ok: bool,
    /// Whether the result deserves attention although a run is possible.
    warning: bool,
    detail: String,
    #[serde(skip)]
    error: Option<anyhow::Error>,
}

/// Runs the command; the exit code is that of the first failed check.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    let settings = settings(&args)?;
    if let Some(pattern) = &args.self_test {
        check_pattern(pattern)?;
    }
    let (mut findings, tools) = tool_servers(&settings).await;
    findings.insert(0, finding("policy", policy(&settings, &tools)));
    let (hosts, mut saved) = (settings.sandbox.docker_hosts(), BTreeMap::new());
    for host in &hosts {
        let on_host = Settings { sandbox: settings.sandbox.on(host), ..settings.clone() };
        let mut found = docker_host(&on_host, &args, host.title(), &mut saved).await;
        if hosts.len() > 1 {
            for finding in &mut found {
                finding.detail = format!("{}: {}", host.title(), finding.detail);
            }
        }
        findings.extend(found);
    }
    if let Some(path) = args.save.as_ref().filter(|_| !saved.is_empty()) {
        let results = match saved.first_key_value() {
            Some((_, only)) if hosts.len() == 1 => serde_json::to_vec_pretty(only)?,
            Some(_) | None => serde_json::to_vec_pretty(&saved)?,
        };
        fs_err::write(path, results)
            .map_err(|source| OutputError { file: path.clone(), source })?;
    }
    let urls = args.engine.clone().map_or_else(|| settings.engine.servers(), |url| vec![url]);
    for url in urls {
        findings.extend(engine(&settings, url, &tools).await);
    }
    if args.json {
        output::json(&findings)?;
    } else {
        let mut table = tables::table(&["check", "", "detail"]);
        for finding in &findings {
            let state = match (finding.ok, finding.warning) {
                (true, false) => "ok",
                (true, true) => "warning",
                (false, _) => "FAILED",
            };
            table.add_row([finding.what, state, finding.detail.as_str()]);
        }
        output::data(table);
    }
    match findings.into_iter().find_map(|f| f.error) {
        Some(error) => Err(error),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn finding(what: &'static str, result: anyhow::Result<String>) -> Finding {
    match result {
        Ok(detail) => Finding { what, ok: true, warning: false, detail, error: None },
        Err(error) => {
            let detail = exit::with_causes(&error);
            Finding { what, ok: false, warning: false, detail, error: Some(error) }
        }
    }
}

fn policy(settings: &Settings, tools: &[serde_json::Value]) -> anyhow::Result<String> {
    let plan = &settings.engine;
    run_folder::check_model(settings)?;
    let options = settings.rollout.chat_options(tools);
    let chat = ChatModel::load_for(settings.engine.tokenizer_folder(), options)?;
    if plan.kind == EngineKind::Openai {
        return Ok(format!("{}: vocabulary {}", plan.tokenizer_folder(), chat.vocab_size()));
    }
    let config = ModelConfig::load(&plan.model)?;
    Ok(format!(
        "{}: {} layers, {} experts top-{}, vocabulary {}",
        plan.model,
        config.num_hidden_layers,
        config.num_experts,
        config.num_experts_per_tok,
        chat.vocab_size()
    ))
}

/// Checks each tool server. Returns the tools of those that answer.
async fn tool_servers(settings: &Settings) -> (Vec<Finding>, Vec<serde_json::Value>) {
    let (mut findings, mut tools) = (Vec::new(), Vec::new());
    for server in &settings.rollout.tool_servers {
        let listed = ToolServers::connect(std::slice::from_ref(server)).await;
        let result = listed.map(|listed| {
            tools.extend_from_slice(listed.schemas());
            let names: Vec<&str> = listed.names().collect();
            let url = without_credentials(&server.url);
            format!("{} at {url}: {}", server.name, names.join(", "))
        });
        findings.push(finding("tool server", result.map_err(anyhow::Error::from)));
    }
    (findings, tools)
}

/// Checks one Docker host: its daemon, a sandbox, and on request the self-test.
async fn docker_host(
    settings: &Settings,
    args: &DoctorArgs,
    title: &str,
    saved: &mut Saved,
) -> Vec<Finding> {
    let mut findings = docker(settings).await;
    if findings.iter().all(|f| f.ok) {
        findings.extend(sandbox(settings).await);
    }
    if let Some(pattern) = args.self_test.as_deref().filter(|_| findings.iter().all(|f| f.ok)) {
        let results = self_test(settings, pattern).await.and_then(|(image, results)| {
            let summary = summary(image, &results);
            saved.insert(title.to_owned(), results);
            summary
        });
        findings.push(finding("sandbox self-test", results));
    }
    findings
}

/// Checks the daemon, and whether its containers could be isolated better from the host.
async fn docker(settings: &Settings) -> Vec<Finding> {
    let report = async {
        let provider = DockerProvider::connect(settings.sandbox.clone()).await?;
        let report = provider.doctor().await?;
        provider.shutdown().await?;
        anyhow::Ok(report)
    };
    let report = match report.await {
        Ok(report) => report,
        Err(error) => return vec![finding("docker", Err(error))],
    };
    let runtime = settings.sandbox.runtime.as_deref();
    let disk =
        report.free_disk.map_or_else(|| "unknown".to_owned(), |d| format!("{} GiB", d.0 >> 30));
    let mut findings = vec![finding(
        "docker",
        Ok(format!(
            "Docker {} (API {}) at {}, runtime {} of {}, cgroup v{}, {}, {} cores, free disk {disk}",
            report.version,
            report.api,
            report.host,
            runtime.unwrap_or(&report.runtime),
            report.runtimes.join(", "),
            report.cgroup_version,
            report.storage_driver,
            report.cores
        )),
    )];
    if report.root_is_host_root(runtime) {
        let detail = "root in a container is root on the host, and only the kernel separates them; \
                      set userns-remap in the daemon's settings (and sandbox.user_namespace), or \
                      use gVisor (sandbox.runtime)";
        findings.push(Finding { warning: true, ..finding("docker", Ok(detail.to_owned())) });
    }
    findings
}

/// Checks that a sandbox works, and whether one can starve others on its host.
async fn sandbox(settings: &Settings) -> Vec<Finding> {
    match probe_sandbox(settings).await {
        Ok((detail, shared)) => {
            let warnings = shared.into_iter().map(|limit| Finding {
                warning: true,
                ..finding("host limits", Ok(limit.to_string()))
            });
            std::iter::once(finding("sandbox", Ok(detail))).chain(warnings).collect()
        }
        Err(error) => vec![finding("sandbox", Err(error))],
    }
}

async fn probe_sandbox(settings: &Settings) -> anyhow::Result<(String, Vec<SharedLimit>)> {
    let task = first_task(settings)?;
    let reusable = task.brings_all_files();
    let group = GroupId::Eval { round: 0, index: 0 };
    let spec = SandboxSpec {
        image: task.image.clone(),
        purpose: Purpose::Grader,
        owner: Owner {
            run: RunId::generate(),
            epoch: 0,
            attempt: AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 },
        },
        workdir: task.workdir.clone(),
        limits: wiring::limits(settings),
        deadline: Duration::from_mins(2),
        reusable,
    };
    let provider = DockerProvider::connect(settings.sandbox.clone()).await?;
    let probe = provider.probe(&spec).await;
    let shared = provider.shared_limits(&spec).await;
    provider.shutdown().await?;
    let (probe, shared) = (probe?, shared?);
    let closed = if reusable { "reset and verified" } else { "closed" };
    let detail = format!(
        "image {}: open {:.0?}, command {:.1?}, {closed} {:.1?}",
        task.image, probe.open, probe.command, probe.close
    );
    Ok((detail, shared))
}

/// The first task that a run with these settings would open a sandbox for.
fn first_task(settings: &Settings) -> anyhow::Result<Arc<Task>> {
    let set = task_source::task_set(settings)?;
    let parts = [set.train, set.held_out, set.held_out_families];
    parts.into_iter().flatten().next().context("the settings produce no task")
}

/// Runs the self-test: hostile commands and failing containers, case by case. Returns its image, too.
async fn self_test(
    settings: &Settings,
    pattern: &str,
) -> anyhow::Result<(String, Vec<SelfTestResult>)> {
    let chosen = self_test_cases().into_iter().filter(|name| matches_glob(pattern, name)).count();
    let image = first_task(settings)?.image.clone();
    let (progress, mut done) = (Progress::new(chosen as u64), 0);
    let results = run_self_test(
        &settings.sandbox,
        &image,
        |name| matches_glob(pattern, name),
        |result| {
            done += 1;
            progress.update(done, chosen as u64, result.name);
            if let Some(problem) = &result.problem {
                progress.line(&format!("{}: {problem}, got {}", result.name, result.outcome));
            }
        },
    )
    .await?;
    progress.finish();
    Ok((image, results))
}

/// Fails if the pattern matches no case of the self-test.
fn check_pattern(pattern: &str) -> Result<(), UsageError> {
    if self_test_cases().iter().any(|name| matches_glob(pattern, name)) {
        return Ok(());
    }
    Err(UsageError::NoCase { pattern: pattern.to_owned(), known: self_test_cases().join(", ") })
}

/// One line about the results; fails if one differs from what is expected.
fn summary(image: String, results: &[SelfTestResult]) -> anyhow::Result<String> {
    let wrong: Vec<&str> = results.iter().filter(|r| !r.ok).map(|r| r.name).collect();
    if let [_, ..] = wrong.as_slice() {
        let kind = SandboxErrorKind::SelfTestFailed(wrong.join(", "));
        return Err(SandboxError { sandbox: image, kind }.into());
    }
    let (chosen, slowest) =
        (results.len(), results.iter().map(|r| r.elapsed_ms).max().unwrap_or(0));
    Ok(format!("{chosen} of {chosen} cases as expected, the slowest in {slowest} ms"))
}

/// The settings, of which those of an inference server are read if one is probed.
fn settings(args: &DoctorArgs) -> Result<Settings, ConfigError> {
    if args.engine.as_deref().is_some_and(|url| has_credentials(url) || has_query(url)) {
        let remedy = "must not contain a user name, a password or a token: name the environment variable \
                      that holds the API key in engine.api_key_env";
        let problem = ConfigProblem::new("--engine", NOT_SHOWN, remedy);
        return Err(ConfigError::Problems(vec![problem]));
    }
    let sections = config::load(&args.source)?;
    match &args.engine {
        Some(url) if sections.engine.fill().is_embedded() => {
            let address = [format!("engine.url={url}")];
            let (files, sets) = (&args.source.files, args.source.sets.as_slice());
            let mut settings = config::load_layers(files, &[sets, &address])?.0.check()?;
            settings.engine.url = None;
            Ok(settings)
        }
        Some(_) | None => sections.check(),
    }
}

/// Probes an inference server: what it is, and each problem that a run would have with it.
async fn engine(settings: &Settings, url: String, tools: &[serde_json::Value]) -> Vec<Finding> {
    let report = match probe(settings, &url, tools).await {
        Ok(report) => report,
        Err(error) => return vec![finding("engine", Err(error))],
    };
    let info = &report.info;
    let version = info.policy_version.map_or_else(|| "unnumbered".to_owned(), |v| v.to_string());
    let context = info.context.map_or_else(|| "unknown".to_owned(), |tokens| tokens.to_string());
    let facts: Vec<String> =
        report.facts.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let detail = format!(
        "{} at {url}: model {}, weights {version}, context {context}, routed experts {}, {}",
        info.engine,
        info.model_path,
        if info.routed_experts { "on" } else { "off" },
        facts.join(", ")
    );
    let mut findings = vec![finding("engine", Ok(detail))];
    for found in &report.findings {
        let is_needed =
            settings.engine.require_routed_experts || settings.engine.kind == EngineKind::Openai;
        let fatal = found.severity == Severity::Refusal && is_needed;
        let error = fatal.then(|| {
            let kind = EngineErrorKind::unsupported(found.to_string());
            EngineError { engine: url.clone(), call: "probe", kind }.into()
        });
        findings.push(Finding {
            what: "engine",
            ok: !fatal,
            warning: !fatal,
            detail: found.to_string(),
            error,
        });
    }
    findings
}

/// Probes a server of any kind; one that the settings name must be of the configured kind.
async fn probe(
    settings: &Settings,
    url: &str,
    tools: &[serde_json::Value],
) -> anyhow::Result<ProbeReport> {
    let plan = &settings.engine;
    let api_key = plan.api_key().map_err(|p| config::ConfigError::Problems(vec![p]))?;
    let tls = plan.tls().read("engine").map_err(|p| config::ConfigError::Problems(vec![p]))?;
    let kind = match plan.kind {
        // Servers of the other kinds have the same routes, so it cannot be detected.
        EngineKind::Openai => EngineKind::Openai,
        EngineKind::Sglang | EngineKind::Vllm => {
            EngineKind::detect(url, api_key.as_deref(), &tls).await?
        }
    };
    let options = ClientOptions {
        url: url.to_owned(),
        api_key,
        tls,
        shape: wiring::shape(plan, &plan.model)?,
        max_in_flight: 1,
        require_routed_experts: plan.require_routed_experts,
        sync_timeout: plan.sync_timeout.0,
        served_model: plan.served_model.clone(),
        chat: wiring::chat_server_options(settings, tools),
    };
    if plan.servers().iter().any(|own| own == url.trim_end_matches('/')) && plan.kind != kind {
        anyhow::bail!(EngineError {
            engine: url.to_owned(),
            call: "probe",
            kind: EngineErrorKind::unsupported(format!("set engine.kind = \"{kind}\"")),
        });
    }
    Ok(kind.client(options)?.probe().await?)
}
