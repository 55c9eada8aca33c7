//! Builds the parts of a run from its settings. The engine and the trainer are always reached over
//! HTTP; the embedded ones are served on the loopback interface by tasks of this process.

use crate::args::ConfigSource;
use crate::config::{self, Settings};
use crate::gateway::{self, Gateway};
use crate::run_folder::TURNS_FOLDER;
use crate::{images, model_files, output, paths, task_source, tool_servers};
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use futures::future::join_all;
use orchestrate_coordinator::{
    Coordinator, Evaluation, EvaluationPlan, HttpTrainer, Plan, Reporter, TaskSet,
};
use orchestrate_engine::{
    ChatServerOptions, ClientOptions, Engine, EngineError, EngineErrorKind, EngineKind,
    EngineSettings, Fleet, FleetOptions, FleetWorker, Worker, discover, unknown_shape,
};
use orchestrate_handoff::TrainerClient;
use orchestrate_http_server::{AllowedFolders, HttpLimits, HttpOptions};
use orchestrate_moe::ModelConfig;
use orchestrate_moe::infer::{EngineOptions, serve_engine};
use orchestrate_moe::train::{TrainerOptions, serve_trainer};
use orchestrate_rollout::{
    AGENT_FOLDER, Actor, ChatModel, ChatOptions, EpisodeKind, EpisodeRunner, GradeLogs, History,
    PrefillLeaders, RowSharing, Sandboxed, Scaffold, TurnJournals,
};
use orchestrate_sandbox::{
    DockerHosts, ImageHooks, ImageLayer, ImageListener, SandboxLimits, SandboxSettings,
};
use orchestrate_store::Store;
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{ModelName, ModelShape, timestamp};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Time that embedded servers get to finish after a run.
const SERVER_GRACE: std::time::Duration = std::time::Duration::from_secs(10);

/// Maximum number of connections of the embedded trainer. The coordinator is its only client.
const TRAINER_CONNECTIONS: usize = 64;

/// The tasks that serve the embedded engine and trainer.
#[derive(Debug)]
pub(crate) struct Servers {
    tasks: JoinSet<anyhow::Result<()>>,
    cancel: CancellationToken,
    _guard: DropGuard,
}

impl Servers {
    fn new() -> Self {
        let cancel = CancellationToken::new();
        Self { tasks: JoinSet::new(), _guard: cancel.clone().drop_guard(), cancel }
    }

    /// Starts another server, which serves until its token is cancelled.
    pub(crate) fn add<F>(&mut self, serve: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let serving = serve(self.cancel.clone());
        self.tasks.spawn(async {
            serving.await;
            Ok(())
        });
    }

    /// Does `work`; fails if an embedded server ends first.
    pub(crate) async fn during<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            biased;
            result = work => result,
            Some(ended) = self.tasks.join_next() => {
                ended.context("an embedded server failed")??;
                anyhow::bail!("an embedded server ended before the run")
            }
        }
    }

    /// Stops all servers.
    pub(crate) async fn shutdown(mut self) {
        self.cancel.cancel();
        let drained = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(SERVER_GRACE, drained).await.is_err() {
            tracing::warn!("an embedded server did not stop in time");
        }
    }
}

async fn loopback() -> anyhow::Result<(TcpListener, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener =
        TcpListener::bind(address).await.context("failed to listen on the loopback interface")?;
    let url = format!("http://{}", listener.local_addr()?);
    Ok((listener, url))
}

/// A key that only this process knows, so that no other user of this machine can use an embedded
/// server. It is never written anywhere.
fn random_key() -> String {
    let bytes: [u8; 32] = rand::random();
    blake3::Hash::from_bytes(bytes).to_hex().to_string()
}

/// How this process reaches an embedded server.
fn embedded(key: String, max_connections: usize) -> HttpOptions {
    let limits = HttpLimits { max_connections, ..HttpLimits::default() };
    HttpOptions { token: Some(key), limits, ..HttpOptions::default() }
}

/// The shape of the served model, which determines the shape of routing rows.
pub(crate) fn shape(plan: &EngineSettings, model: &Utf8Path) -> anyhow::Result<ModelShape> {
    match plan.kind {
        EngineKind::Sglang | EngineKind::Vllm => Ok(ModelConfig::load(model)?.shape()),
        EngineKind::Openai => Ok(unknown_shape()),
    }
}

/// The configured servers as one engine, or an embedded one started on `model`, which loads weights
/// from the run's `folder`.
pub(crate) async fn engine(
    settings: &Settings,
    servers: &mut Servers,
    (model, folder): (&Utf8Path, &Utf8Path),
    server_tools: &[serde_json::Value],
) -> anyhow::Result<Fleet> {
    let plan = &settings.engine;
    let shape = shape(plan, model)?;
    let mut urls = match &plan.discover {
        Some(name) => discover(name).await?,
        None => plan.servers(),
    };
    let mut api_key = plan.api_key().map_err(|p| config::ConfigError::Problems(vec![p]))?;
    if urls.is_empty() {
        let (listener, url) = loopback().await?;
        let key = random_key();
        let around = folders_around(model);
        let options = EngineOptions {
            weight_format: settings.embedded.weight_format,
            weight_version: "0".into(),
            max_running: settings.embedded.max_running,
            cache_tokens: settings.embedded.cache_tokens,
            checkpoint_roots: match &settings.trainer.url {
                None => AllowedFolders::below([vec![folder.join("checkpoints")], around].concat()),
                // Its trainer says where its checkpoints are, and only this process has the key.
                Some(_) => AllowedFolders::any(),
            },
            http: embedded(key.clone(), 4 * plan.max_in_flight + 64),
            ..EngineOptions::new(model)
        };
        let cancel = servers.cancel.clone();
        servers.tasks.spawn(async move { Ok(serve_engine(options, listener, cancel).await?) });
        urls.push(url);
        api_key = Some(key);
    }
    let tls = plan.tls().read("engine").map_err(|p| config::ConfigError::Problems(vec![p]))?;
    let (kind, patience) = (plan.kind, plan.start_timeout.0);
    let connecting = urls.into_iter().map(|url| {
        let options = ClientOptions {
            url: url.clone(),
            api_key: api_key.clone(),
            tls: tls.clone(),
            shape: shape.clone(),
            max_in_flight: plan.max_in_flight,
            require_routed_experts: plan.require_routed_experts,
            sync_timeout: plan.sync_timeout.0,
            served_model: plan.served_model.clone(),
            chat: chat_server_options(settings, server_tools),
        };
        async move { (url, kind.connect(options.clone(), patience).await, options) }
    });
    let connected = async {
        let (mut members, mut absent) = (Vec::new(), Vec::new());
        for (name, connected, options) in join_all(connecting).await {
            match connected {
                Ok((client, info)) => {
                    tracing::info!(
                        engine = info.engine,
                        name,
                        model = info.model_path,
                        "engine is up"
                    );
                    inspect(settings, client.as_ref()).await?;
                    members.push(FleetWorker { name, engine: client, is_up: true });
                }
                // An unsupported server is a mistake in the settings; a late one may still start.
                Err(error) => match error.kind {
                    EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => {
                        absent.push((name, options, error));
                    }
                    EngineErrorKind::Refused { .. }
                    | EngineErrorKind::ContextFull(_)
                    | EngineErrorKind::InvalidReply(_)
                    | EngineErrorKind::GenerationFailed(_)
                    | EngineErrorKind::Unsupported(_) => return Err(error.into()),
                },
            }
        }
        Ok((members, absent))
    };
    let (mut members, absent) = servers.during(Box::pin(connected)).await?;
    let none_answered = members.is_empty();
    for (name, options, error) in absent {
        if none_answered {
            return Err(error.into());
        }
        output::say(format!("note: {error}; the run starts without this server"));
        members.push(FleetWorker { name, engine: kind.client(options)?, is_up: false });
    }
    let options = FleetOptions {
        max_in_flight: plan.max_in_flight,
        probe_interval: plan.probe_interval.0,
        out_of_service_timeout: plan.out_of_service_timeout.0,
    };
    Ok(Fleet::start(members, options)?)
}

/// How requests to a chat server differ from the common form. Chat servers are only evaluated.
/// `server_tools` are the JSON schemas of the tools of tool servers.
pub(crate) fn chat_server_options(
    settings: &Settings,
    server_tools: &[serde_json::Value],
) -> ChatServerOptions {
    let rollout = &settings.rollout;
    settings.engine.chat_server_options(
        (settings.run.eval_temperature, rollout.top_p),
        (rollout.max_response_tokens, rollout.generate_timeout.0),
        rollout.sample_prompt(server_tools),
    )
}

/// Runs the capability probe, which samples a few tokens. An unsupported engine fails here, with the
/// remedy, and not in the middle of the first step.
async fn inspect(settings: &Settings, engine: &dyn Worker) -> anyhow::Result<()> {
    let report = engine.probe().await?;
    let unsupported: Vec<String> = report.refusals().map(ToString::to_string).collect();
    for warning in report.warnings() {
        output::say(format!("warning: engine: {warning}"));
    }
    if unsupported.is_empty() {
        return Ok(());
    }
    // An evaluation of a chat server needs no routed experts, but every request of it.
    if !settings.engine.require_routed_experts && settings.engine.kind != EngineKind::Openai {
        let reasons = unsupported.join("; ");
        output::say(format!("warning: engine: not supported for training: {reasons}"));
        return Ok(());
    }
    let kind = EngineErrorKind::unsupported(unsupported.join("; "));
    Err(EngineError { engine: report.info.engine, call: "probe", kind }.into())
}

/// A client of the configured trainer, or of an embedded one with checkpoints in the run folder.
pub(crate) async fn trainer(
    settings: &Settings,
    folder: &Utf8Path,
    servers: &mut Servers,
) -> anyhow::Result<HttpTrainer> {
    let plan = &settings.trainer;
    let (url, token) = if let Some(url) = &plan.url {
        let token = plan.token().map_err(|p| config::ConfigError::Problems(vec![p]))?;
        (url.clone(), token)
    } else {
        let (listener, url) = loopback().await?;
        let key = random_key();
        let options = TrainerOptions {
            policy: settings.engine.model.clone(),
            checkpoints: folder.join("checkpoints"),
            keep: settings.run.keep_checkpoints as usize,
            batch_roots: AllowedFolders::below([folder.to_owned()]),
            http: embedded(key.clone(), TRAINER_CONNECTIONS),
        };
        let cancel = servers.cancel.clone();
        servers.tasks.spawn(async move { Ok(serve_trainer(options, listener, cancel).await?) });
        (url, Some(key))
    };
    let tls = plan.tls().read("trainer").map_err(|p| config::ConfigError::Problems(vec![p]))?;
    let client = TrainerClient::new(&url, token, &tls)?;
    Ok(HttpTrainer { client, step_timeout: plan.step_timeout.0 })
}

/// All tasks of the configured environment, including those that `tasks.skip` leaves out.
pub(crate) fn all_tasks(settings: &Settings) -> Vec<Task> {
    task_source::generated(settings)
}

/// Resource limits of each container.
pub(crate) fn limits(settings: &Settings) -> SandboxLimits {
    let sandbox = &settings.sandbox;
    SandboxLimits {
        memory: sandbox.memory,
        cpu_millis: sandbox.cpu_millis,
        pids: sandbox.pids,
        tmpfs: sandbox.tmpfs,
    }
}

/// Settings of a sandbox that `orchestrate-bench` opens.
#[derive(Debug)]
pub struct SandboxUnderTest {
    /// `[sandbox]`, of one Docker host.
    pub config: SandboxSettings,
    /// Resource limits of each container.
    pub limits: SandboxLimits,
    /// Image of the first task of the settings.
    pub image: String,
    /// Working directory of that task.
    pub workdir: String,
}

/// Reads the sandbox settings as a run does.
///
/// # Errors
/// Invalid settings, or settings without a task.
pub fn sandbox_under_test(source: &ConfigSource) -> anyhow::Result<SandboxUnderTest> {
    let settings = config::load(source)?.check()?;
    let task = all_tasks(&settings).into_iter().next().context("the settings produce no task")?;
    let config = match settings.sandbox.docker_hosts().as_slice() {
        // The host's own capacity does not apply to a benchmark.
        [only] => settings.sandbox.on(only),
        // Connecting refuses several hosts, with the remedy.
        _ => settings.sandbox.clone(),
    };
    Ok(SandboxUnderTest {
        limits: limits(&settings),
        config,
        image: task.image,
        workdir: task.workdir,
    })
}

/// Name of the model in predictions.
fn model_name(settings: &Settings) -> ModelName {
    let EngineSettings { served_model, model, .. } = &settings.engine;
    let folder = model.file_name().unwrap_or("policy");
    ModelName::made_of(served_model.as_deref().unwrap_or(folder))
}

/// The plan of the run loop.
fn plan(settings: &Settings) -> Plan {
    Plan {
        run: settings.run.clone(),
        sampling: (&settings.rollout).into(),
        algorithm: settings.algorithm.clone(),
        handoff: settings.handoff,
        diagnostics: settings.diagnostics.clone(),
        model_name: model_name(settings),
    }
}

/// Packs the files of an agent.
async fn agent_layer(folder: Utf8PathBuf) -> anyhow::Result<ImageLayer> {
    output::say(format!("packing the agent's files in {folder}"));
    let name = folder.clone();
    tokio::task::spawn_blocking(move || ImageLayer::of_folder(&folder, AGENT_FOLDER))
        .await?
        .with_context(|| format!("agent.folder {name} cannot be packed"))
}

/// The parts that a run and an evaluation have in common.
pub(crate) struct Parts {
    episodes: EpisodeRunner,
    tasks: TaskSet,
}

/// Connects sandboxes and engine, and reads the tasks.
pub(crate) async fn parts(
    settings: &Settings,
    folder: &Utf8Path,
    store: &Store,
    servers: &mut Servers,
    image_listener: ImageListener,
) -> anyhow::Result<Parts> {
    let program = match settings.rollout.scaffold {
        Scaffold::External => return external_parts(settings, folder, store, servers).await,
        Scaffold::Command => Some(Arc::new(settings.agent.clone())),
        Scaffold::Tools | Scaffold::R2eXml | Scaffold::Mini => None,
    };
    let (containers, episodes) = (settings.sandbox.capacity(), settings.rollout.max_in_flight);
    if settings.sandbox.reuse && containers < 2 * episodes as usize {
        output::say(format!(
            "note: {containers} containers for {episodes} episodes in flight: idle containers are \
             restarted as agents and graders alternate; {} containers in total avoid that \
             (sandbox.max_containers applies to each Docker host)",
            2 * episodes
        ));
    }
    let agent_layer = match program.as_ref().and_then(|program| program.folder.clone()) {
        Some(folder) => Some(agent_layer(folder).await?),
        None => None,
    };
    let around = ImageHooks {
        agent_layer,
        lock: Some(Arc::new(images::Journal(store.image_records()))),
        listener: image_listener,
    };
    let provider = DockerHosts::connect(&settings.sandbox, around).await?;
    let known = store.reader().images().await?.into_iter();
    let known: Vec<_> = known.map(|row| (row.name.clone(), images::identity(row))).collect();
    provider.check_images(&known).await?;
    let tasks = task_source::task_set_of_run(settings, folder)?;
    let mut all = tasks.train.iter().chain(&tasks.held_out);
    if all.any(|task| matches!(task.origin, Origin::External(_))) {
        let problem = gateway::needs_workers(&settings.rollout);
        anyhow::bail!(config::ConfigError::Problems(vec![problem]));
    }
    check_model(settings, folder).await?;
    let (actor, model) = if let Some(program) = program {
        (Actor::Program(program), Model::load(settings, folder, store, servers, &[]).await?)
    } else {
        let tools = tool_servers::connect(settings, folder).await?;
        let model = Model::load(settings, folder, store, servers, tools.schemas()).await?;
        (Actor::Scaffold(tools), model)
    };
    let kind = EpisodeKind::Sandboxed(Sandboxed {
        actor,
        provider: Arc::new(provider),
        limits: limits(settings),
        rules: settings.reward.rules(),
        logs: Some(GradeLogs { root: folder.to_owned(), model: model_name(settings) }),
    });
    Ok(Parts { episodes: model.runner(settings, kind), tasks })
}

/// The parts of a run whose episodes are run by external workers.
async fn external_parts(
    settings: &Settings,
    folder: &Utf8Path,
    store: &Store,
    servers: &mut Servers,
) -> anyhow::Result<Parts> {
    let tasks = task_source::task_set_of_run(settings, folder)?;
    check_model(settings, folder).await?;
    let model = Model::load(settings, folder, store, servers, &[]).await?;
    let lost = store.reader().lost_attempts().await?;
    let journals = TurnJournals::open(&folder.join(TURNS_FOLDER), &lost)?;
    // Last: from now on workers can take episodes.
    let gateway = Gateway::listen(&settings.gateway).await?;
    let kind = EpisodeKind::External(gateway.external(journals));
    servers.add(|stop| gateway.serve(stop));
    Ok(Parts { episodes: model.runner(settings, kind), tasks })
}

/// Checks that the model's files are those that the run began with.
async fn check_model(settings: &Settings, folder: &Utf8Path) -> anyhow::Result<()> {
    let (of_engine, of_run) = (settings.engine.clone(), folder.to_owned());
    tokio::task::spawn_blocking(move || model_files::check(&of_engine, &of_run)).await?
}

/// What samples the policy, and how its conversations are rendered.
struct Model {
    engine: Arc<dyn Engine>,
    chat: ChatModel,
    rows: RowSharing,
}

impl Model {
    /// Connects the engine and loads the chat model. `server_tools` are the JSON schemas of the tools of
    /// tool servers.
    async fn load(
        settings: &Settings,
        folder: &Utf8Path,
        store: &Store,
        servers: &mut Servers,
        server_tools: &[serde_json::Value],
    ) -> anyhow::Result<Self> {
        let model = (settings.engine.model.as_path(), folder);
        let engine = Arc::new(engine(settings, servers, model, server_tools).await?);
        let date = timestamp(store.reader().run().await?.created_us);
        let options = ChatOptions { date, ..settings.rollout.chat_options(server_tools) };
        let chat = ChatModel::load_for(settings.engine.tokenizer_folder(), options)?;
        if !server_tools.is_empty() && !engine.takes_messages() && !chat.shows_tools() {
            output::say(
                "warning: the chat template shows no tools, so the policy does not see those of the tool \
                 servers: describe them in rollout.system_prompt",
            );
        }
        let rows = RowSharing {
            cache: settings.routing.open_cache(folder.join("routing").as_std_path())?.map(Arc::new),
            scope: settings.routing.scope,
            mixed: settings.routing.mixed,
        };
        Ok(Self { engine, chat, rows })
    }

    fn runner(self, settings: &Settings, kind: EpisodeKind) -> EpisodeRunner {
        EpisodeRunner {
            engine: self.engine,
            chat: Arc::new(self.chat),
            settings: Arc::new(settings.rollout.clone()),
            rows: self.rows,
            prefill_leaders: PrefillLeaders::default(),
            kind,
        }
    }
}

impl Parts {
    /// A training run over an open journal.
    pub(crate) fn coordinator(
        self,
        settings: &Settings,
        folder: &Utf8Path,
        store: Store,
        trainer: HttpTrainer,
        reporter: Arc<dyn Reporter>,
    ) -> Coordinator {
        if settings.rollout.history == History::Template {
            output::say(
                "warning: rollout.history = \"template\": episodes are trained on after their last \
                 fork only, which may be their last turn",
            );
        }
        Coordinator {
            folder: folder.to_owned(),
            store,
            engine: self.episodes.engine.clone(),
            trainer: Arc::new(trainer),
            sandboxes: self.episodes.kind.sandboxes().cloned(),
            episodes: Arc::new(self.episodes),
            tasks: self.tasks,
            plan: plan(settings),
            reporter,
        }
    }

    /// An evaluation of `engine.model` over an open journal.
    pub(crate) fn evaluation(
        self,
        settings: &Settings,
        folder: &Utf8Path,
        store: Store,
        reporter: Arc<dyn Reporter>,
    ) -> anyhow::Result<Evaluation> {
        let policy = policy(settings);
        Ok(Evaluation {
            folder: folder.to_owned(),
            store,
            engine: self.episodes.engine.clone(),
            checkpoint: match settings.engine.served_model {
                Some(_) => policy.to_owned(),
                None => paths::absolute(policy)?,
            },
            sandboxes: self.episodes.kind.sandboxes().cloned(),
            episodes: Arc::new(self.episodes),
            tasks: self.tasks,
            plan: EvaluationPlan {
                run: settings.run.clone(),
                sampling: (&settings.rollout).into(),
                model_name: model_name(settings),
            },
            reporter,
        })
    }
}

/// The policy that the plan names, and an evaluation serves: the name of a server's model, or a folder.
pub(crate) fn policy(settings: &Settings) -> &Utf8Path {
    let EngineSettings { served_model, model, .. } = &settings.engine;
    served_model.as_deref().map_or(model, Utf8Path::new)
}

/// An empty set of embedded servers.
pub(crate) fn servers() -> Servers {
    Servers::new()
}

/// The folders in which the files of a model are: the one around it and, where it or its files are links, as
/// in caches of hubs, those that these lead to.
fn folders_around(model: &Utf8Path) -> Vec<Utf8PathBuf> {
    let files = model.read_dir_utf8().into_iter().flatten().flatten();
    let paths = std::iter::once(model.to_owned()).chain(files.map(|file| file.path().to_owned()));
    let real = paths.filter_map(|path| path.canonicalize_utf8().ok());
    let mut around: Vec<Utf8PathBuf> = std::iter::once(model.to_owned())
        .chain(real)
        .filter_map(|path| path.parent().map(Utf8Path::to_owned))
        .collect();
    around.sort_unstable();
    around.dedup();
    around
}

#[cfg(test)]
mod tests;
