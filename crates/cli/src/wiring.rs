//! Builds the parts of a run from its settings. Engine and trainer are always reached over HTTP;
//! the embedded ones are served on loopback by tasks of this process.

use crate::config::Settings;
use crate::{images, output, task_source};
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use futures::future::join_all;
use orchestrate_coordinator::{Coordinator, HttpTrainer, Plan, Reporter, TrainerSink};
use orchestrate_engine::{
    ClientOptions, Engine, EngineError, EngineErrorKind, EngineKind, EngineSettings, Fleet,
    FleetMember, FleetOptions, Worker, discover, unknown_shape,
};
use orchestrate_handoff::TrainerClient;
use orchestrate_moe::ModelConfig;
use orchestrate_moe::infer::{EngineOptions, serve_engine};
use orchestrate_moe::train::{TrainerOptions, serve_trainer};
use orchestrate_rollout::{ChatModel, EpisodeRunner, GradeLogs, History, Leads, RowSharing};
use orchestrate_sandbox::{DockerHosts, Limits, Listener, SandboxProvider, Surroundings};
use orchestrate_store::Store;
use orchestrate_tasks::Task;
use orchestrate_types::ModelShape;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Time for embedded servers to end their work after a run.
const SERVER_GRACE: std::time::Duration = std::time::Duration::from_secs(10);

/// Tasks that serve the embedded engine and trainer.
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

    /// Runs `work`, unless a server ends first: that is a failure of the server.
    pub(crate) async fn during<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            biased;
            result = work => result,
            Some(ended) = self.tasks.join_next() => {
                ended.context("embedded server")??;
                anyhow::bail!("an embedded server ended by itself")
            }
        }
    }

    /// Ends all servers.
    pub(crate) async fn shutdown(mut self) {
        self.cancel.cancel();
        let drained = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(SERVER_GRACE, drained).await.is_err() {
            tracing::warn!("an embedded server did not end in time");
        }
    }
}

async fn loopback() -> anyhow::Result<(TcpListener, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = TcpListener::bind(address).await.context("listen on loopback")?;
    let url = format!("http://{}", listener.local_addr()?);
    Ok((listener, url))
}

/// The shape of the served model, as far as it matters for what its engine returns.
pub(crate) fn shape(plan: &EngineSettings, model: &Utf8Path) -> anyhow::Result<ModelShape> {
    match plan.kind {
        EngineKind::Sglang | EngineKind::Vllm => Ok(ModelConfig::load(model)?.shape()),
        EngineKind::Openai => Ok(unknown_shape()),
    }
}

/// The configured servers as one engine, or an embedded one started on `model`.
pub(crate) async fn engine(
    settings: &Settings,
    servers: &mut Servers,
    model: &Utf8Path,
) -> anyhow::Result<Fleet> {
    let plan = &settings.engine;
    let shape = shape(plan, model)?;
    let mut urls = match &plan.discover {
        Some(name) => discover(name).await?,
        None => plan.servers(),
    };
    if urls.is_empty() {
        let (listener, url) = loopback().await?;
        let options = EngineOptions {
            weight_format: settings.embedded.weight_format,
            weight_version: "0".into(),
            max_running: settings.embedded.max_running,
            cache_tokens: settings.embedded.cache_tokens,
            ..EngineOptions::new(model)
        };
        let cancel = servers.cancel.clone();
        servers.tasks.spawn(async move { Ok(serve_engine(options, listener, cancel).await?) });
        urls.push(url);
    }
    let api_key = plan.api_key().map_err(|p| crate::config::ConfigError::Problems(vec![p]))?;
    let (kind, patience) = (plan.kind, plan.start_timeout.0);
    let connecting = urls.into_iter().map(|url| {
        let options = ClientOptions {
            url: url.clone(),
            api_key: api_key.clone(),
            shape: shape.clone(),
            max_in_flight: plan.max_in_flight,
            require_routed_experts: plan.require_routed_experts,
            sync_timeout: plan.sync_timeout.0,
            served_model: plan.served_model.clone(),
        };
        async move { (url, kind.connect(options.clone(), patience).await, options) }
    });
    let looked_at = async {
        let (mut members, mut absent) = (Vec::new(), Vec::new());
        for (name, connected, options) in join_all(connecting).await {
            match connected {
                Ok((client, info)) => {
                    tracing::info!(engine = info.engine, name, model = info.model_path, "is up");
                    inspect(settings, client.as_ref()).await?;
                    members.push(FleetMember { name, engine: client, is_up: true });
                }
                // A server that cannot be used is a mistake; one that is late may still come.
                Err(error) => match error.kind {
                    EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => {
                        absent.push((name, options, error));
                    }
                    EngineErrorKind::Refused { .. }
                    | EngineErrorKind::InvalidReply(_)
                    | EngineErrorKind::Unfit(_) => return Err(error.into()),
                },
            }
        }
        Ok((members, absent))
    };
    let (mut members, absent) = servers.during(Box::pin(looked_at)).await?;
    let nobody_came = members.is_empty();
    for (name, options, error) in absent {
        if nobody_came {
            return Err(error.into());
        }
        output::say(format!("note: {error}; the run begins without it"));
        members.push(FleetMember { name, engine: kind.client(options)?, is_up: false });
    }
    let options = FleetOptions {
        max_in_flight: plan.max_in_flight,
        probe_interval: plan.probe_interval.0,
        away_timeout: plan.away_timeout.0,
    };
    Ok(Fleet::start(members, options)?)
}

/// Samples a few tokens before a run trusts the engine: what is unfit ends it here, with the
/// remedy, and not in the middle of the first step.
async fn inspect(settings: &Settings, engine: &dyn Worker) -> anyhow::Result<()> {
    let report = engine.probe().await?;
    let unfit: Vec<String> = report.refusals().map(ToString::to_string).collect();
    for warning in report.warnings() {
        output::say(format!("warning: engine: {warning}"));
    }
    if unfit.is_empty() {
        return Ok(());
    }
    if !settings.engine.require_routed_experts {
        output::say(format!("warning: engine: unfit for training: {}", unfit.join("; ")));
        return Ok(());
    }
    let kind = EngineErrorKind::Unfit(unfit.join("; "));
    Err(EngineError { engine: report.info.engine, call: "probe", kind }.into())
}

/// The configured trainer, or an embedded one with its checkpoints in the run folder.
async fn trainer(
    settings: &Settings,
    servers: &mut Servers,
    folder: &Utf8Path,
) -> anyhow::Result<HttpTrainer> {
    let plan = &settings.trainer;
    let url = if let Some(url) = &plan.url {
        url.clone()
    } else {
        let (listener, url) = loopback().await?;
        let options = TrainerOptions {
            policy: settings.engine.model.clone(),
            checkpoints: folder.join("checkpoints"),
            keep: settings.run.keep_checkpoints as usize,
            batch_root: Some(folder.to_owned()),
            token: None,
        };
        let cancel = servers.cancel.clone();
        servers.tasks.spawn(async move { Ok(serve_trainer(options, listener, cancel).await?) });
        url
    };
    let token = plan.token().map_err(|p| crate::config::ConfigError::Problems(vec![p]))?;
    let client = TrainerClient::new(&url, token)?;
    Ok(HttpTrainer { client, step_timeout: plan.step_timeout.0 })
}

/// Every task of the configured environment.
pub(crate) fn all_tasks(settings: &Settings) -> Vec<Task> {
    task_source::generated(settings)
}

/// The container limits of the settings, as sandboxes are opened with them.
pub(crate) fn limits(settings: &Settings) -> Limits {
    let sandbox = &settings.sandbox;
    Limits {
        memory: sandbox.memory,
        cpu_millis: sandbox.cpu_millis,
        pids: sandbox.pids,
        tmpfs: sandbox.tmpfs,
    }
}

/// The model's name in predictions.
fn model_name(settings: &Settings) -> String {
    let EngineSettings { served_model, model, .. } = &settings.engine;
    served_model.clone().unwrap_or_else(|| model.file_name().unwrap_or("policy").to_owned())
}

/// What the run loop decides by.
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

/// Who makes new weights.
pub(crate) enum Training {
    /// The configured trainer.
    Trainer,
    /// Nobody: the run only evaluates this.
    Fixed(Arc<dyn TrainerSink>),
}

/// Builds a coordinator around an open journal.
pub(crate) async fn coordinator(
    settings: &Settings,
    folder: &Utf8Path,
    store: Store,
    training: Training,
    servers: &mut Servers,
    (reporter, image_listener): (Arc<dyn Reporter>, Listener),
) -> anyhow::Result<Coordinator> {
    let (containers, episodes) = (settings.sandbox.capacity(), settings.rollout.max_in_flight);
    if settings.sandbox.reuse && containers < 2 * episodes as usize {
        output::say(format!(
            "note: {containers} containers for {episodes} episodes in flight: idle ones are \
             restarted as agents and graders take turns (room for {} in all avoids it: \
             sandbox.max_containers is that of each Docker host)",
            2 * episodes
        ));
    }
    if matches!(training, Training::Trainer) {
        settings.check_training()?;
    }
    let around = Surroundings {
        book: Some(Arc::new(images::Journal(store.image_records()))),
        listener: image_listener,
    };
    let provider = DockerHosts::connect(&settings.sandbox, around).await?;
    let known = store.reader().images().await?.into_iter();
    let known: Vec<_> = known.map(|row| (row.name.clone(), images::identity(row))).collect();
    provider.check_images(&known).await?;
    let sandboxes: Arc<dyn SandboxProvider> = Arc::new(provider);
    let engine: Arc<dyn Engine> =
        Arc::new(engine(settings, servers, &settings.engine.model).await?);
    if settings.rollout.history == History::Template && matches!(training, Training::Trainer) {
        output::say(
            "warning: rollout.history = \"template\": episodes are trained on behind their last fork \
             only, which may be their last turn",
        );
    }
    let trainer: Arc<dyn TrainerSink> = match training {
        Training::Trainer => Arc::new(trainer(settings, servers, folder).await?),
        Training::Fixed(sink) => sink,
    };
    let chat =
        ChatModel::load_for(settings.engine.tokenizer_folder(), settings.rollout.chat_use())?;
    let chat = Arc::new(chat);
    let episodes = Arc::new(EpisodeRunner {
        engine: engine.clone(),
        sandboxes: sandboxes.clone(),
        chat,
        plan: settings.rollout.clone(),
        container_limits: limits(settings),
        rules: settings.reward.rules(),
        logs: Some(GradeLogs { root: folder.to_owned(), model: model_name(settings) }),
        rows: RowSharing {
            cache: settings.routing.open_cache(folder.join("routing").as_std_path())?.map(Arc::new),
            scope: settings.routing.scope,
            mixed: settings.routing.mixed,
        },
        leads: Leads::default(),
    });
    Ok(Coordinator {
        folder: folder.to_owned(),
        store,
        episodes,
        engine,
        trainer,
        sandboxes,
        tasks: task_source::task_set(settings)?,
        plan: plan(settings),
        reporter,
    })
}

/// Starts the place where embedded servers live.
pub(crate) fn servers() -> Servers {
    Servers::new()
}

/// A folder's absolute path: engine and trainer may run elsewhere in the file system.
pub(crate) fn absolute(folder: &Utf8Path) -> anyhow::Result<Utf8PathBuf> {
    let path = std::path::absolute(folder).with_context(|| format!("find folder {folder}"))?;
    Utf8PathBuf::from_path_buf(path)
        .map_err(|path| anyhow::anyhow!("{} is not a UTF-8 path", path.display()))
}
