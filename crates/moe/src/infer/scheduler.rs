//! Continuous batching on one thread: which requests run, with which slots, in which order.
//!
//! Every step runs one batch: one token of each decoding request and chunks of prompts. Kernels
//! are row-wise, so what a request gets does not depend on its batch. The invariant over slots is
//! that of [`PrefixCache`]; a request gives its own back in [`Scheduler::let_go`].

mod batch;

use super::cache::{Pin, PrefixCache};
use super::loaded::{Loaded, same_form};
use super::matrix::WeightFormat;
use super::model::{KvPool, Scratch};
use super::request::{
    Command, Finish, Finished, Job, PauseMode, Refusal, Span, Status, Update, UpdateResult, Which,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;
use tokio::sync::{mpsc, oneshot};

/// Limits of a scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Requests in a batch.
    pub(crate) max_running: usize,
    /// Requests waiting.
    pub(crate) max_queued: usize,
    /// Prompt tokens per step.
    pub(crate) chunked_prefill: usize,
    /// Slots.
    pub(crate) cache_tokens: u32,
    /// Seed of requests that bring none.
    pub(crate) random_seed: u64,
}

type Answer = Result<Finished, Refusal>;

#[derive(Debug)]
struct Request {
    job: Job,
    /// Order of arrival; also the seed of a request that brings none.
    sequence: u64,
    /// Prompt and output.
    tokens: Vec<u32>,
    slots: Vec<u32>,
    /// Leading slots that are not this request's to give back.
    in_tree: usize,
    /// Slots of tokens that another request had put into the tree first.
    duplicates: Vec<u32>,
    pin: Option<Pin>,
    /// Tokens whose keys, values and rows are in the pool.
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

    /// Slots it will ask for before long.
    fn soon_needed(&self) -> usize {
        let left = self.job.sampling.max_new_tokens.saturating_sub(self.output().len());
        left.min(batch::RESERVED_TOKENS)
    }

    fn prefilling(&self) -> bool {
        self.computed + 1 < self.tokens.len()
    }

    /// Whether the logits that follow token `position` are wanted.
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
    /// Updates that wait for running requests, and requests that wait for those updates.
    updates: VecDeque<Update>,
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
    /// A scheduler with an empty cache.
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

    /// Serves commands until [`Command::Stop`] or until nobody can send any more.
    pub(crate) fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        while !self.stopped {
            if self.idle() {
                match commands.blocking_recv() {
                    Some(command) => self.handle(command),
                    None => break,
                }
            }
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
        self.abort(&Which::All);
        self.publish();
    }

    fn idle(&self) -> bool {
        let work = !self.running.is_empty() || !self.waiting.is_empty();
        (self.paused || !work) && !self.update_due()
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Generate(job) => self.enqueue(*job),
            Command::Abort(which) => self.abort(&which),
            Command::Sweep => {}
            Command::Pause(mode, reply) => {
                self.pause(mode);
                self.publish();
                // A caller that no longer listens needs no answer; so below.
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
                    self.abort(&Which::All);
                }
                // A paused engine is updated at once, whatever it holds.
                if self.paused { self.update(update) } else { self.updates.push_back(update) }
            }
            Command::SetVersion { version, abort_all, reply } => {
                if abort_all {
                    self.abort(&Which::All);
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

    fn abort(&mut self, which: &Which) {
        let hit = |r: &mut Request| match which {
            Which::All => true,
            Which::Prefix(prefix) => r.job.rid.starts_with(prefix.as_str()),
        };
        let running: Vec<_> = self.running.extract_if(.., hit).collect();
        let queued: Vec<_> = self.waiting.extract_if(.., hit).collect();
        let held: Vec<_> = self.held.extract_if(.., hit).collect();
        self.totals.aborted_total += (running.len() + queued.len() + held.len()) as u64;
        for request in running {
            self.finish(request, Finish::Aborted("Aborted"));
        }
        for request in queued.into_iter().chain(held) {
            self.finish(request, Finish::Aborted("Abort in waiting queue"));
        }
    }

    /// Drops requests whose caller is gone.
    fn sweep(&mut self) {
        let gone = |r: &mut Request| r.job.reply.is_closed();
        let running: Vec<_> = self.running.extract_if(.., gone).collect();
        let queued = self.waiting.extract_if(.., gone).count();
        let held = self.held.extract_if(.., gone).count();
        self.totals.aborted_total += (running.len() + queued + held) as u64;
        for request in running {
            self.let_go(request);
        }
    }

    fn pause(&mut self, mode: PauseMode) {
        self.paused = true;
        match mode {
            PauseMode::Abort => self.abort(&Which::All),
            PauseMode::InPlace => {}
            PauseMode::Retract => {
                while let Some(request) = self.running.pop() {
                    self.retract(request);
                }
            }
        }
    }

    /// Refused while requests run, or wait (unless paused: then they hold no KV).
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
            if same_form(old, config) {
                Ok(new)
            } else {
                Err(format!("{model_path} has another architecture than the served model"))
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

    /// Puts a finished prefill into the tree, so that others share it at once.
    fn share_prompt(&mut self, request: &mut Request) {
        let len = request.prompt_len().min(request.slots.len());
        self.give_to_tree(request, len);
    }

    fn give_to_tree(&mut self, request: &mut Request, len: usize) {
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

    /// Takes all slots from a request and puts it back into the queue.
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

    /// Keeps what a request computed in the tree and gives its other slots back.
    fn let_go(&mut self, mut request: Request) {
        if request.pin.is_some() && request.computed > request.in_tree {
            let computed = request.computed;
            self.give_to_tree(&mut request, computed);
        }
        self.release(&mut request);
    }

    fn finish(&mut self, mut request: Request, finish: Finish) {
        let start = request.job.routed_start;
        let end = request.tokens.len() - 1;
        // A request cut before its prompt was computed has no rows to show.
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
        self.let_go(request);
        self.answers.push((reply, Ok(finished)));
    }

    /// Refreshes the public status, then sends the answers: who has one sees it counted.
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
