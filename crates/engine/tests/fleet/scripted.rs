//! Workers in memory, whose behaviour a test changes while they serve.

use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, Fleet, FleetMember, FleetOptions,
    GenerateRequest, Generation, Sampling, VersionSpan,
};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, RunId};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// What a worker does with requests and probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    /// Answers probes; requests wait until the mood changes.
    Slow,
    /// Neither answers nor breaks connections, like a stopped process.
    Stopped,
    /// Nobody listens.
    Gone,
    /// Breaks requests off, answers probes.
    BreaksOff,
    /// Answers what cannot be used.
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
    mood: watch::Sender<Mood>,
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
            mood: watch::Sender::new(Mood::Well),
            notes: Mutex::new(notes),
        })
    }

    pub(crate) fn is(&self, mood: Mood) {
        self.mood.send_replace(mood);
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
        let mut mood = self.mood.subscribe();
        let now = *mood.wait_for(|mood| *mood != Mood::Stopped).await.unwrap();
        match now {
            Mood::Gone => Err(self.error(EngineErrorKind::Unreachable("refused".to_owned()))),
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

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Generation, EngineError> {
        {
            let mut notes = self.notes();
            notes.requests.push((request.clone(), rank));
            notes.running += 1;
            notes.most_running = notes.most_running.max(notes.running);
        }
        let _running = Running(self);
        tokio::task::yield_now().await;
        let mut mood = self.mood.subscribe();
        mood.wait_for(|mood| *mood != Mood::Slow).await.unwrap();
        self.answers().await?;
        let mood = *self.mood.borrow();
        match mood {
            Mood::BreaksOff => {
                return Err(self.error(EngineErrorKind::Unreachable("reset".to_owned())));
            }
            Mood::Invalid => {
                return Err(self.error(EngineErrorKind::InvalidReply("zeros".to_owned())));
            }
            Mood::Well | Mood::Slow | Mood::Stopped | Mood::Gone => {}
        }
        let version = self.notes().version;
        Ok(Generation {
            output_ids: vec![5],
            logprobs: vec![-0.5],
            finish: Finish::Stop,
            cached_tokens: 0,
            routed_experts: None,
            versions: vec![VersionSpan { version, start: 0, end: 1 }],
            num_retractions: 0,
            routing_wire_bytes: 0,
            worker: self.name.clone(),
            turn: None,
        })
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
            // Half done: what it has now is neither.
            notes.version = PolicyVersion(999);
            drop(notes);
            return Err(self.error(EngineErrorKind::InvalidReply("half done".to_owned())));
        }
        notes.version = version;
        Ok(())
    }

    async fn abort(&self, _request_id: &RequestId) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A fleet of scripted workers `w0`, `w1` …, and the workers.
pub(crate) fn fleet(workers: usize, max_in_flight: usize) -> (Arc<Fleet>, Vec<Arc<Scripted>>) {
    let workers: Vec<_> = (0..workers).map(|i| Scripted::new(&format!("w{i}"), 1)).collect();
    (fleet_of(&workers, max_in_flight), workers)
}

pub(crate) fn fleet_of(workers: &[Arc<Scripted>], max_in_flight: usize) -> Arc<Fleet> {
    let member = |worker: &Arc<Scripted>| FleetMember {
        name: worker.name.clone(),
        engine: Arc::clone(worker) as _,
        is_up: true,
    };
    let options = FleetOptions {
        max_in_flight,
        probe_interval: Duration::from_secs(10),
        away_timeout: Duration::from_mins(5),
    };
    Arc::new(Fleet::start(workers.iter().map(member).collect(), options).unwrap())
}

/// All workers do the same.
pub(crate) fn all_are(workers: &[Arc<Scripted>], mood: Mood) {
    for worker in workers {
        worker.is(mood);
    }
}

/// A request of `tokens` tokens.
pub(crate) fn request(session: &str, tokens: usize) -> GenerateRequest {
    let attempt = "t000001.02-a01".parse().unwrap();
    GenerateRequest {
        request_id: RequestId::new(RunId::generate(), attempt, 0, 0),
        session: session.to_owned(),
        token_ids: vec![7; tokens].into(),
        conversation: None,
        sampling: Sampling {
            temperature: 1.0,
            top_p: 1.0,
            max_new_tokens: 64,
            stop_token_ids: vec![2],
            seed: 3,
        },
        routed_experts_start: None,
        cache_namespace: PolicyVersion(0),
        priority: 0,
        deadline: Duration::from_mins(2),
    }
}

/// Lets everything run that can run now.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// States of all workers.
pub(crate) fn states(fleet: &Fleet) -> Vec<&'static str> {
    fleet.status().iter().map(|worker| worker.state).collect()
}
