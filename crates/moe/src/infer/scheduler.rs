//! Continuous batching on one thread: which requests run, with which slots, in which order.
//!
//! Every step runs one batch: one token of each decoding request and chunks of prompts. Kernels
//! are row-wise, so what a request gets does not depend on its batch. The invariant over slots is
//! that of [`PrefixCache`]; a request gives its own back in [`Scheduler::let_go`].

use super::cache::{Pin, PrefixCache};
use super::model::{Chunk, KvPool, Model, Scratch, WeightFormat};
use super::request::{
    Command, Finish, Finished, Job, PauseMode, Progress, Refusal, Span, Status, Update,
    UpdateResult, Which,
};
use crate::{CheckpointError, ModelConfig, Weights};
use camino::Utf8Path;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;
use tokio::sync::{mpsc, oneshot};

/// A request waits for another one's prefill if that saves it at least this many tokens.
const WORTH_WAITING_TOKENS: usize = 32;
/// Slots kept back per request when another one is admitted.
const RESERVED_TOKENS: usize = 32;

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

/// A model folder, loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) model: Model,
    /// Tokens that end a sequence by themselves.
    pub(crate) eos: Vec<u32>,
}

impl Loaded {
    /// Reads weights and the end-of-sequence tokens.
    pub(crate) fn read(folder: &Utf8Path, format: WeightFormat) -> Result<Self, CheckpointError> {
        let model = Model::build(&Weights::load(folder)?, format)?;
        Ok(Self { model, eos: eos_tokens(folder)? })
    }
}

/// `eos_token_id` of `generation_config.json`, or else of `config.json`; one number or a list.
fn eos_tokens(folder: &Utf8Path) -> Result<Vec<u32>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Config {
        eos_token_id: Option<serde_json::Value>,
    }
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let text = fs_err::read(&path).map_err(|e| CheckpointError::new(&path, e))?;
        let config: Config =
            serde_json::from_slice(&text).map_err(|e| CheckpointError::new(&path, e))?;
        let list = match config.eos_token_id {
            None | Some(serde_json::Value::Null) => continue,
            Some(list @ serde_json::Value::Array(_)) => list,
            Some(one) => serde_json::Value::Array(vec![one]),
        };
        return serde_json::from_value(list).map_err(|e| CheckpointError::new(&path, e));
    }
    Ok(Vec::new())
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
        left.min(RESERVED_TOKENS)
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

    /// Moves waiting requests into the batch, highest priority first, then oldest.
    fn admit(&mut self) {
        self.waiting.sort_by_key(|r| (std::cmp::Reverse(r.job.priority), r.sequence));
        let mut index = 0;
        while self.running.len() < self.limits.max_running && index < self.waiting.len() {
            let Some(request) = self.waiting.get(index) else { break };
            if self.prefill_soon_shared(request) {
                index += 1;
                continue;
            }
            let mut request = self.waiting.remove(index);
            if !self.place(&mut request) {
                self.waiting.insert(index, request);
                break;
            }
            self.running.push(request);
        }
    }

    /// Whether a running prefill is about to cache more of this prompt than the cache has.
    fn prefill_soon_shared(&self, request: &Request) -> bool {
        let mut cached = None;
        self.running
            .iter()
            .filter(|r| r.prefilling() && r.job.namespace == request.job.namespace)
            .any(|r| {
                let pairs = r.job.input_ids.iter().zip(&request.tokens);
                let common = pairs.take_while(|(a, b)| a == b).count();
                let cached = *cached.get_or_insert_with(|| {
                    self.cache.cached_len(&request.job.namespace, &request.tokens)
                });
                common >= cached + WORTH_WAITING_TOKENS
            })
    }

    /// Gives a request its slots: those of the cached prefix, and own ones for the rest.
    fn place(&mut self, request: &mut Request) -> bool {
        let last = request.tokens.len() - 1;
        let reusable = request.job.logprob_start.map_or(last, |start| start.min(last));
        let prefix = request.tokens.get(..reusable).unwrap_or(&[]);
        let (mut slots, pin) = self.cache.lookup(&request.job.namespace, prefix);
        let cached = slots.len();
        let needed = request.tokens.len() - cached;
        // Room for the next tokens of all, or the newcomer would be sent back in a moment.
        let reserve: usize = self.running.iter().chain([&*request]).map(Request::soon_needed).sum();
        let fits = self.running.is_empty() || self.cache.available() >= needed + reserve;
        let Some(own) = fits.then(|| self.cache.allocate(needed)).flatten() else {
            self.cache.unpin(pin);
            return false;
        };
        slots.extend(own);
        request.slots = slots;
        request.pin = Some(pin);
        request.in_tree = cached;
        request.computed = cached;
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(cached);
            request.queue_seconds = request.job.received.elapsed().as_secs_f64();
            self.totals.cached_tokens_total += cached as u64;
        }
        true
    }

    /// Runs one batch and deals out its results.
    fn step(&mut self) {
        self.make_room();
        let mut budget = self.limits.chunked_prefill;
        let mut plan = Vec::with_capacity(self.running.len());
        for request in &self.running {
            let left = request.tokens.len() - request.computed;
            let take = if left == 1 { 1 } else { left.min(budget) };
            budget -= if left == 1 { 0 } else { take };
            plan.push((request.computed, take));
        }
        let mut chunks = Vec::with_capacity(plan.len());
        for (request, &(computed, take)) in self.running.iter().zip(&plan) {
            let end = computed + take;
            let tokens = request.tokens.get(computed..end).unwrap_or(&[]);
            let slots = request.slots.get(..end).unwrap_or(&[]);
            let logits_from = request.first_logit().saturating_sub(computed).min(tokens.len());
            chunks.push(Chunk { tokens, slots, logits_from });
        }
        if chunks.iter().all(|c| c.tokens.is_empty()) {
            return;
        }
        self.loaded.model.forward(&mut self.pool, &chunks, &mut self.scratch);

        let vocab = self.loaded.model.config().vocab_size;
        let logits = std::mem::take(&mut self.scratch.logits);
        let mut rows = logits.chunks_exact(vocab);
        let wanted: Vec<usize> = chunks.iter().map(|c| c.tokens.len() - c.logits_from).collect();
        let mut going = Vec::with_capacity(self.running.len());
        let batch = std::mem::take(&mut self.running);
        for ((mut request, (_, take)), wanted) in batch.into_iter().zip(plan).zip(wanted) {
            let prompt_left = request.prompt_len().saturating_sub(request.computed);
            self.totals.prefilled_tokens_total += take.min(prompt_left) as u64;
            request.computed += take;
            let mine: Vec<&[f32]> = rows.by_ref().take(wanted).collect();
            self.score_prompt(&mut request, &mine);
            let last = mine.last().copied();
            match last.filter(|_| request.computed == request.tokens.len()) {
                None => going.push(request),
                Some(logits) => match self.extend(&mut request, logits) {
                    None => going.push(request),
                    Some(finish) => self.finish(request, finish),
                },
            }
        }
        self.running = going;
        self.scratch.logits = logits;
    }

    /// Makes sure every request has a slot for its newest token, sending the youngest back to the
    /// queue while there are too few.
    fn make_room(&mut self) {
        let lacking = |r: &Request| r.slots.len() < r.tokens.len();
        loop {
            let need = self.running.iter().filter(|r| lacking(r)).count();
            if let Some(slots) = self.cache.allocate(need) {
                for (request, slot) in self.running.iter_mut().filter(|r| lacking(r)).zip(slots) {
                    request.slots.push(slot);
                }
                return;
            }
            match self.running.pop() {
                Some(youngest) => self.retract(youngest),
                None => return,
            }
        }
    }

    /// Log-probs of prompt tokens, from the logits of the tokens before them.
    fn score_prompt(&mut self, request: &mut Request, logits: &[&[f32]]) {
        let Some(start) = request.job.logprob_start else { return };
        let first = request.computed - logits.len();
        request.input_logprobs.resize(request.prompt_len().saturating_sub(start), None);
        for (position, logits) in (first..).zip(logits) {
            let Some(&token) = request.job.input_ids.get(position + 1) else { break };
            let mut p = logits.to_vec();
            let normaliser = self.loaded.model.probabilities(&mut p, 1.0);
            let logit = logits.get(token as usize).copied();
            if let Some(place) = request.input_logprobs.get_mut(position + 1 - start) {
                *place = logit.map(|l| l - normaliser);
            }
        }
    }

    /// Samples the next token of a request whose tokens are all computed.
    fn extend(&mut self, request: &mut Request, logits: &[f32]) -> Option<Finish> {
        if request.output().is_empty() {
            self.share_prompt(request);
        }
        let sampling = &request.job.sampling;
        if request.output().len() >= sampling.max_new_tokens {
            return Some(Finish::Length(request.output().len()));
        }
        let position = request.output().len();
        let stops = || sampling.stop_token_ids.iter().chain(&self.loaded.eos);
        let masked: Option<Vec<f32>> = (position < sampling.min_new_tokens).then(|| {
            let mut masked = logits.to_vec();
            for &stop in stops() {
                if let Some(logit) = masked.get_mut(stop as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            masked
        });
        let logits = masked.as_deref().unwrap_or(logits);
        let seed = self.limits.random_seed.wrapping_add(request.sequence);
        let Some(drawn) = sampling.draw(&self.loaded.model, logits, seed, position) else {
            return Some(Finish::NotANumber);
        };
        let stopped = !sampling.ignore_eos && stops().any(|&s| s == drawn.token);
        request.tokens.push(drawn.token);
        request.logprobs.push(drawn.logprob);
        self.totals.generated_tokens_total += 1;
        match request.spans.last_mut() {
            Some(span) if span.version == self.version => span.end += 1,
            _ => request.spans.push(Span {
                version: Arc::clone(&self.version),
                start: position,
                end: position + 1,
            }),
        }
        if position == 0 {
            request.first_token_seconds = request.job.received.elapsed().as_secs_f64();
        }
        if let Some(progress) = &request.job.progress {
            let cached_tokens = request.cached_tokens.unwrap_or(0);
            let event = Progress { token: drawn.token, logprob: drawn.logprob, cached_tokens };
            // Has room for every token; fails only if the caller is gone, which `sweep` handles.
            progress.try_send(event).ok();
        }
        if stopped {
            return Some(Finish::Token(drawn.token));
        }
        if let Some(text) = self.stop_text(request) {
            return Some(Finish::Text(text));
        }
        let budget = request.job.sampling.max_new_tokens;
        (position + 1 >= budget).then_some(Finish::Length(position + 1))
    }

    /// The stop string that the newest token completed.
    fn stop_text(&self, request: &Request) -> Option<String> {
        let stops = &request.job.sampling.stop;
        let longest = stops.iter().map(String::len).max()?;
        let tokenizer = self.tokenizer.as_ref()?;
        // A token is at least one byte, so a match that ends in the newest token starts here.
        let output = request.output();
        let tail = output.get(output.len().saturating_sub(longest + 1)..).unwrap_or(&[]);
        let text = tokenizer.decode(tail, false).ok()?;
        stops.iter().find(|s| text.contains(s.as_str())).cloned()
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

/// Whether weights of one can take the place of the other's without touching the KV pool.
fn same_form(a: &ModelConfig, b: &ModelConfig) -> bool {
    let heads = |c: &ModelConfig| (c.num_key_value_heads, c.head_dim);
    a.shape() == b.shape() && heads(a) == heads(b)
}

#[cfg(test)]
mod tests;
