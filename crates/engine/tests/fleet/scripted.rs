//! In-memory workers, whose behaviour a test changes while they serve.

use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, Fleet, FleetOptions, FleetWorker,
    GenerateRequest, Generation, Prompt, Reply, SampledTokens, Sampling, TokenPrompt, VersionSpan,
};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, RunId};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// How a worker reacts to requests and probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behaviour {
    /// Answers requests and probes.
    Healthy,
    /// Answers probes, but requests wait until the behaviour changes.
    Slow,
    /// Neither answers nor closes connections, like a stopped process.
    Stopped,
    /// Refuses connections.
    Gone,
    /// Answers probes, but breaks the connections of requests.
    BreaksConnections,
    /// Sends invalid replies.
    Invalid,
}

#[derive(Debug)]
pub(crate) struct Notes {
    pub(crate) version: PolicyVersion,
    pub(crate) requests: Vec<(GenerateRequest, Option<usize>)>,
    pub(crate) syncs: Vec<PolicyVersion>,
    pub(crate) failing_syncs: u32,
    running: usize,
    pub(crate) most_running: usize,
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Scripted {
    pub(crate) name: String,
    shape: ModelShape,
    ranks: usize,
    behaviour: watch::Sender<Behaviour>,
    notes: Mutex<Notes>,
}

impl Scripted {
    pub(crate) fn new(name: &str, ranks: usize) -> Arc<Self> {
        let notes = Notes {
            version: PolicyVersion(0),
            requests: Vec::new(),
            syncs: Vec::new(),
            failing_syncs: 0,
            running: 0,
            most_running: 0,
        };
        Arc::new(Self {
            name: name.to_owned(),
            shape: shape(),
            ranks,
            behaviour: watch::Sender::new(Behaviour::Healthy),
            notes: Mutex::new(notes),
        })
    }

    pub(crate) fn set(&self, behaviour: Behaviour) {
        self.behaviour.send_replace(behaviour);
    }

    pub(crate) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap()
    }

    /// Sessions of the requests so far.
    pub(crate) fn sessions(&self) -> Vec<String> {
        self.notes().requests.iter().map(|(request, _)| request.session.clone()).collect()
    }

    pub(crate) fn error(&self, kind: EngineErrorKind) -> EngineError {
        EngineError { engine: self.name.clone(), call: "/scripted", kind }
    }

    async fn answers(&self) -> Result<(), EngineError> {
        let mut behaviour = self.behaviour.subscribe();
        let now = *behaviour.wait_for(|behaviour| *behaviour != Behaviour::Stopped).await.unwrap();
        match now {
            Behaviour::Gone => Err(self.error(EngineErrorKind::unreachable("refused"))),
            _ => Ok(()),
        }
    }
}

pub(crate) fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 2,
        moe_layers: vec![0, 1],
        experts: 8,
        top_k: 2,
        vocab: 1000,
        context: 4096,
    }
}

struct Running<'a>(&'a Scripted);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.notes().running -= 1;
    }
}

#[async_trait::async_trait]
impl Engine for Scripted {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        self.answers().await?;
        Ok(EngineInfo {
            engine: "scripted".to_owned(),
            model_path: "m".to_owned(),
            routed_experts: true,
            policy_version: Some(self.notes().version),
            context: Some(4096),
            page_size: 1,
        })
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn data_parallel_ranks(&self) -> usize {
        self.ranks
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Reply, EngineError> {
        {
            let mut notes = self.notes();
            notes.requests.push((request.clone(), rank));
            notes.running += 1;
            notes.most_running = notes.most_running.max(notes.running);
        }
        let _running = Running(self);
        tokio::task::yield_now().await;
        let mut behaviour = self.behaviour.subscribe();
        behaviour.wait_for(|behaviour| *behaviour != Behaviour::Slow).await.unwrap();
        self.answers().await?;
        let behaviour = *self.behaviour.borrow();
        match behaviour {
            Behaviour::BreaksConnections => {
                return Err(self.error(EngineErrorKind::unreachable("reset")));
            }
            Behaviour::Invalid => {
                return Err(self.error(EngineErrorKind::invalid_reply("zeros")));
            }
            Behaviour::Healthy | Behaviour::Slow | Behaviour::Stopped | Behaviour::Gone => {}
        }
        let version = self.notes().version;
        let sampled = SampledTokens {
            output_ids: vec![5],
            logprobs: vec![-0.5],
            versions: vec![VersionSpan { version, start: 0, end: 1 }],
        };
        let generation = Generation::new(sampled, Finish::Stop, 64);
        let mut generation = generation.map_err(|kind| self.error(kind))?;
        self.name.clone_into(&mut generation.worker);
        Ok(Reply::Tokens(generation))
    }

    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        self.answers().await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut notes = self.notes();
        notes.syncs.push(version);
        if notes.failing_syncs > 0 {
            notes.failing_syncs -= 1;
            // It failed halfway: the weights are neither the old nor the new ones.
            notes.version = PolicyVersion(999);
            drop(notes);
            return Err(self.error(EngineErrorKind::invalid_reply("half done")));
        }
        notes.version = version;
        Ok(())
    }
}

/// A fleet of scripted workers `w0`, `w1` …, and the workers.
pub(crate) fn fleet(workers: usize, max_in_flight: usize) -> (Arc<Fleet>, Vec<Arc<Scripted>>) {
    let workers: Vec<_> = (0..workers).map(|i| Scripted::new(&format!("w{i}"), 1)).collect();
    (fleet_of(&workers, max_in_flight), workers)
}

pub(crate) fn fleet_of(workers: &[Arc<Scripted>], max_in_flight: usize) -> Arc<Fleet> {
    let entry = |worker: &Arc<Scripted>| FleetWorker {
        name: worker.name.clone(),
        engine: Arc::clone(worker) as _,
        is_up: true,
    };
    let options = FleetOptions {
        max_in_flight,
        probe_interval: Duration::from_secs(10),
        out_of_service_timeout: Duration::from_mins(5),
    };
    Arc::new(Fleet::start(workers.iter().map(entry).collect(), options).unwrap())
}

/// Sets the behaviour of all workers.
pub(crate) fn set_all(workers: &[Arc<Scripted>], behaviour: Behaviour) {
    for worker in workers {
        worker.set(behaviour);
    }
}

/// A request of `tokens` tokens.
pub(crate) fn request(session: &str, tokens: usize) -> GenerateRequest {
    let attempt = "t000001.02-a01".parse().unwrap();
    GenerateRequest {
        request_id: RequestId::new(RunId::generate(), attempt, 0, 0),
        session: session.to_owned(),
        prompt: Prompt::Tokens(TokenPrompt {
            ids: Arc::new(vec![7; tokens]),
            routed_experts_start: None,
            cache_namespace: PolicyVersion(0),
        }),
        sampling: Sampling {
            temperature: 1.0,
            top_p: 1.0,
            max_new_tokens: 64,
            stop_token_ids: vec![2],
            seed: 3,
        },
        priority: 0,
        deadline: Duration::from_mins(2),
        listener: None,
    }
}

/// Samples one turn in tokens.
pub(crate) async fn sample(
    engine: &dyn Engine,
    request: GenerateRequest,
) -> Result<Generation, EngineError> {
    engine.generate(request).await.map(|reply| reply.into_tokens().unwrap())
}

/// Runs everything that is ready.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// States of all workers.
pub(crate) fn states(fleet: &Fleet) -> Vec<&'static str> {
    fleet.status().iter().map(|worker| worker.state).collect()
}
