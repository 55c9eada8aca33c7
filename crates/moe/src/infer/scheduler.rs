//! Continuous batching on one thread: which requests run, with which slots, in which order.
//!
//! Each step runs one batch: one token of every decoding request and chunks of prompts. Kernels
//! work row by row, so the result of a request does not depend on its batch. The invariant over
//! slots is that of [`PrefixCache`]; a request returns its own slots in [`Scheduler::retire`].

mod batch;

use super::cache::{Pin, PrefixCache};
use super::loaded::{Loaded, shares_kv_layout};
use super::matrix::WeightFormat;
use super::model::{KvPool, Scratch};
use super::request::{
    AbortTarget, Command, Finish, Finished, Job, PauseMode, Refusal, Span, Status, Update,
    UpdateResult,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;
use tokio::sync::{mpsc, oneshot};

/// Limits of a scheduler, from [`EngineOptions`](super::EngineOptions).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum number of requests in a batch.
    pub(crate) max_running: usize,
    /// Maximum number of waiting requests.
    pub(crate) max_queued: usize,
    /// Maximum number of prompt tokens per step.
    pub(crate) chunked_prefill: usize,
    /// Number of slots in the KV pool.
    pub(crate) cache_tokens: u32,
    /// Base seed of requests without a seed.
    pub(crate) random_seed: u64,
}

type Answer = Result<Finished, Refusal>;

#[derive(Debug)]
struct Request {
    job: Job,
    /// Order of arrival; added to the base seed for a request without a seed.
    sequence: u64,
    /// Prompt and output tokens.
    tokens: Vec<u32>,
    slots: Vec<u32>,
    /// Number of leading slots owned by the prefix tree, not by this request.
    in_tree: usize,
    /// Own slots of tokens that another request inserted into the tree first.
    duplicates: Vec<u32>,
    pin: Option<Pin>,
    /// Number of tokens whose keys, values and routing rows are in the pool.
    computed: usize,
    logprobs: Vec<f32>,
    input_logprobs: Vec<Option<f32>>,
    spans: Vec<Span>,
    retractions: u32,
    cached_tokens: Option<usize>,
    queue_seconds: f64,
    first_token_seconds: f64,
}

impl Request {
    fn prompt_len(&self) -> usize {
        self.job.input_ids.len()
    }

    fn output(&self) -> &[u32] {
        self.tokens.get(self.prompt_len()..).unwrap_or(&[])
    }

    /// Slots that the request will need soon.
    fn slots_needed_soon(&self) -> usize {
        let left = self.job.sampling.max_new_tokens.saturating_sub(self.output().len());
        left.min(batch::RESERVED_TOKENS)
    }

    fn prefilling(&self) -> bool {
        self.computed + 1 < self.tokens.len()
    }

    /// First position whose logits are needed.
    fn first_logit(&self) -> usize {
        let last = self.tokens.len() - 1;
        self.job.logprob_start.map_or(last, |start| start.min(last))
    }
}

/// The engine thread's state.
#[derive(Debug)]
pub(crate) struct Scheduler {
    loaded: Loaded,
    format: WeightFormat,
    limits: Limits,
    tokenizer: Option<Arc<Tokenizer>>,
    version: Arc<str>,
    model_path: String,
    pool: KvPool,
    cache: PrefixCache,
    scratch: Scratch,
    running: Vec<Request>,
    waiting: Vec<Request>,
    /// Updates that wait for running requests.
    updates: VecDeque<Update>,
    /// Requests that wait for those updates.
    held: Vec<Request>,
    paused: bool,
    stopped: bool,
    sequence: u64,
    answers: Vec<(oneshot::Sender<Answer>, Answer)>,
    status: Arc<Mutex<Status>>,
    totals: Status,
    window: (Instant, u64),
}

impl Scheduler {
    /// Creates a scheduler with an empty cache.
    pub(crate) fn new(
        loaded: Loaded,
        format: WeightFormat,
        limits: Limits,
        tokenizer: Option<Arc<Tokenizer>>,
        (model_path, version): (String, String),
        status: Arc<Mutex<Status>>,
    ) -> Self {
        let pool = KvPool::new(loaded.model.config(), limits.cache_tokens as usize);
        let mut new = Self {
            loaded,
            format,
            limits,
            tokenizer,
            version: version.into(),
            model_path,
            pool,
            cache: PrefixCache::new(limits.cache_tokens),
            scratch: Scratch::default(),
            running: Vec::new(),
            waiting: Vec::new(),
            updates: VecDeque::new(),
            held: Vec::new(),
            paused: false,
            stopped: false,
            sequence: 0,
            answers: Vec::new(),
            status,
            totals: Status::default(),
            window: (Instant::now(), 0),
        };
        new.publish();
        new
    }

    /// Processes commands until [`Command::Stop`], or until all senders are dropped.
    pub(crate) fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        while !self.stopped {
            if self.idle() {
                match commands.blocking_recv() {
                    Some(command) => self.handle(command),
                    None => break,
                }
            }
            self.turn(&mut commands);
        }
        self.abort(&AbortTarget::All);
        self.publish();
    }

    /// Processes the commands that have arrived, then runs the model once.
    fn turn(&mut self, commands: &mut mpsc::Receiver<Command>) {
        while let Ok(command) = commands.try_recv() {
            self.handle(command);
        }
        self.sweep();
        self.update_when_due();
        if !self.paused {
            self.admit();
            self.step();
        }
        self.publish();
    }

    fn idle(&self) -> bool {
        let work = !self.running.is_empty() || !self.waiting.is_empty();
        (self.paused || !work) && !self.update_due()
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Generate(job) => self.enqueue(*job),
            Command::Abort(target) => self.abort(&target),
            Command::Sweep => {}
            Command::Pause(mode, reply) => {
                self.pause(mode);
                self.publish();
                // Here and below: a send fails only if the caller no longer waits.
                reply.send(()).ok();
            }
            Command::Continue(reply) => {
                self.paused = false;
                self.publish();
                reply.send(()).ok();
            }
            Command::Flush(reply) => {
                let flushed = self.flush();
                self.publish();
                reply.send(flushed).ok();
            }
            Command::Update(update) => {
                if update.abort_all {
                    self.abort(&AbortTarget::All);
                }
                // A paused engine is updated immediately, even if it holds requests.
                if self.paused { self.update(update) } else { self.updates.push_back(update) }
            }
            Command::SetVersion { version, abort_all, reply } => {
                if abort_all {
                    self.abort(&AbortTarget::All);
                }
                self.version = version.into();
                self.publish();
                reply.send(()).ok();
            }
            Command::Stop => self.stopped = true,
        }
    }

    fn enqueue(&mut self, job: Job) {
        self.totals.requests_total += 1;
        self.totals.prompt_tokens_total += job.input_ids.len() as u64;
        if self.waiting.len() + self.held.len() >= self.limits.max_queued {
            self.answers.push((job.reply, Err(Refusal::QueueFull)));
            return;
        }
        self.sequence += 1;
        let request = Request {
            sequence: self.sequence,
            tokens: job.input_ids.clone(),
            input_logprobs: Vec::new(),
            slots: Vec::new(),
            in_tree: 0,
            duplicates: Vec::new(),
            pin: None,
            computed: 0,
            logprobs: Vec::new(),
            spans: Vec::new(),
            retractions: 0,
            cached_tokens: None,
            queue_seconds: 0.0,
            first_token_seconds: 0.0,
            job,
        };
        if self.updates.is_empty() {
            self.waiting.push(request);
        } else {
            self.held.push(request);
        }
    }

    fn abort(&mut self, target: &AbortTarget) {
        let matches = |r: &mut Request| match target {
            AbortTarget::All => true,
            AbortTarget::Prefix(prefix) => r.job.rid.starts_with(prefix.as_str()),
        };
        let running: Vec<_> = self.running.extract_if(.., matches).collect();
        let queued: Vec<_> = self.waiting.extract_if(.., matches).collect();
        let held: Vec<_> = self.held.extract_if(.., matches).collect();
        self.totals.aborted_total += (running.len() + queued.len() + held.len()) as u64;
        for request in running {
            self.finish(request, Finish::Aborted("Aborted"));
        }
        for request in queued.into_iter().chain(held) {
            self.finish(request, Finish::Aborted("Abort in waiting queue"));
        }
    }

    /// Drops requests whose caller has disconnected.
    fn sweep(&mut self) {
        let disconnected = |r: &mut Request| r.job.reply.is_closed();
        let running: Vec<_> = self.running.extract_if(.., disconnected).collect();
        let queued = self.waiting.extract_if(.., disconnected).count();
        let held = self.held.extract_if(.., disconnected).count();
        self.totals.aborted_total += (running.len() + queued + held) as u64;
        for request in running {
            self.retire(request);
        }
    }

    fn pause(&mut self, mode: PauseMode) {
        self.paused = true;
        match mode {
            PauseMode::Abort => self.abort(&AbortTarget::All),
            PauseMode::InPlace => {}
            PauseMode::Retract => {
                while let Some(request) = self.running.pop() {
                    self.retract(request);
                }
            }
        }
    }

    /// Flushes the cache and returns whether it did. Not possible while requests run, or wait
    /// (unless paused: then waiting requests hold no KV).
    fn flush(&mut self) -> bool {
        let busy = !self.running.is_empty() || (!self.paused && !self.waiting.is_empty());
        if !busy {
            self.cache.flush();
        }
        !busy
    }

    fn update_due(&self) -> bool {
        !self.updates.is_empty() && self.running.is_empty() && self.waiting.is_empty()
    }

    fn update_when_due(&mut self) {
        while self.update_due()
            && let Some(update) = self.updates.pop_front()
        {
            self.update(update);
        }
        if self.updates.is_empty() {
            self.waiting.append(&mut self.held);
        }
    }

    fn update(&mut self, update: Update) {
        let Update { model_path, version, flush, reply, abort_all: _ } = update;
        let loaded = Loaded::read(&model_path, self.format);
        let checked = loaded.map_err(|e| e.to_string()).and_then(|new| {
            let (old, config) = (self.loaded.model.config(), new.model.config());
            if shares_kv_layout(old, config) {
                Ok(new)
            } else {
                Err(format!(
                    "the architecture of {model_path} differs from that of the served model"
                ))
            }
        });
        let result = match checked {
            Err(message) => {
                tracing::warn!(%model_path, message, "weights not updated");
                UpdateResult { success: false, message }
            }
            Ok(new) => {
                self.loaded = new;
                self.model_path = model_path.to_string();
                let mut message = "Succeeded to update model weights.".to_owned();
                if let Some(version) = version {
                    message = format!("{message} Weight version updated to {version}.");
                    self.version = version.into();
                }
                tracing::info!(%model_path, version = %self.version, "weights updated");
                let success = !flush || self.flush();
                if !success {
                    message = "Weights were updated, but the cache was not flushed because \
                               requests are still running or queued. Retract or finish them, \
                               then call /flush_cache."
                        .into();
                }
                UpdateResult { success, message }
            }
        };
        self.publish();
        reply.send(result).ok();
    }

    /// Inserts the prompt of a finished prefill into the tree, so that other requests can share it.
    fn share_prompt(&mut self, request: &mut Request) {
        let len = request.prompt_len().min(request.slots.len());
        self.insert_into_tree(request, len);
    }

    fn insert_into_tree(&mut self, request: &mut Request, len: usize) {
        let tokens = request.tokens.get(..len).unwrap_or(&[]);
        let slots = request.slots.get(..len).unwrap_or(&[]);
        let done = self.cache.insert(&request.job.namespace, tokens, slots);
        let own = request.slots.get(request.in_tree..done.existing).unwrap_or(&[]);
        request.duplicates.extend(own);
        request.in_tree = request.in_tree.max(len);
        if let Some(old) = request.pin.replace(done.pin) {
            self.cache.unpin(old);
        }
    }

    /// Releases all slots of a request and returns it to the queue.
    fn retract(&mut self, mut request: Request) {
        self.release(&mut request);
        request.computed = 0;
        request.retractions += 1;
        self.totals.retracted_total += 1;
        self.waiting.push(request);
    }

    fn release(&mut self, request: &mut Request) {
        self.cache.release(request.duplicates.drain(..));
        self.cache.release(request.slots.drain(..).skip(request.in_tree));
        request.in_tree = 0;
        if let Some(pin) = request.pin.take() {
            self.cache.unpin(pin);
        }
    }

    /// Inserts the computed tokens of a request into the tree and releases its other slots.
    fn retire(&mut self, mut request: Request) {
        if request.pin.is_some() && request.computed > request.in_tree {
            let computed = request.computed;
            self.insert_into_tree(&mut request, computed);
        }
        self.release(&mut request);
    }

    fn finish(&mut self, mut request: Request, finish: Finish) {
        let start = request.job.routed_start;
        let end = request.tokens.len() - 1;
        // A request that was aborted before its prompt was computed has no routing rows.
        let rows =
            start.filter(|_| request.computed >= end && request.pin.is_some()).map(|start| {
                let mut rows =
                    Vec::with_capacity(end.saturating_sub(start) * self.pool.row_width());
                for &slot in request.slots.get(start..end).unwrap_or(&[]) {
                    rows.extend_from_slice(self.pool.route(slot));
                }
                rows
            });
        if request.spans.is_empty() {
            let version = Arc::clone(&self.version);
            request.spans.push(Span { version, start: 0, end: 0 });
        }
        let finished = Finished {
            output_ids: request.output().to_vec(),
            logprobs: std::mem::take(&mut request.logprobs),
            input_logprobs: std::mem::take(&mut request.input_logprobs),
            finish,
            cached_tokens: request.cached_tokens.unwrap_or(0),
            rows,
            spans: std::mem::take(&mut request.spans),
            weight_version: Arc::clone(&self.version),
            retractions: request.retractions,
            queue_seconds: request.queue_seconds,
            first_token_seconds: request.first_token_seconds,
        };
        let (unused, _) = oneshot::channel();
        let reply = std::mem::replace(&mut request.job.reply, unused);
        self.retire(request);
        self.answers.push((reply, Ok(finished)));
    }

    /// Updates the published status, then sends the answers, so that a caller with an answer sees
    /// it counted.
    fn publish(&mut self) {
        let (since, before) = self.window;
        let elapsed = since.elapsed();
        let generated = self.totals.generated_tokens_total;
        if elapsed >= Duration::from_secs(1) {
            self.totals.throughput = (generated - before) as f64 / elapsed.as_secs_f64();
            self.window = (Instant::now(), generated);
        }
        let status = Status {
            model_path: self.model_path.clone(),
            weight_version: self.version.to_string(),
            paused: self.paused,
            running: self.running.len(),
            waiting: self.waiting.len() + self.held.len(),
            active_tokens: self.running.iter().map(|r| r.slots.len()).sum(),
            held_tokens: self.cache.used(),
            ..self.totals.clone()
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
        for (reply, answer) in self.answers.drain(..) {
            reply.send(answer).ok();
        }
    }
}

#[cfg(test)]
mod tests;
