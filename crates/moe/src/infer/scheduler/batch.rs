//! One step of the scheduler: admitting requests, running a batch, and distributing its results.

use super::{Request, Scheduler};
use crate::infer::model::Chunk;
use crate::infer::request::{Finish, Progress, Span};
use std::sync::Arc;

/// A request waits for the prefill of another if that saves it at least this many tokens.
const WORTH_WAITING_TOKENS: usize = 32;

/// Slots reserved per request when another request is admitted.
pub(super) const RESERVED_TOKENS: usize = 32;

impl Scheduler {
    /// Moves waiting requests into the batch, highest priority first, then oldest.
    pub(super) fn admit(&mut self) {
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

    /// Whether a running prefill will soon cache much more of this prompt than is cached now.
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

    /// Assigns slots to a request: those of the cached prefix, and newly allocated ones for the
    /// rest. Returns `false`, with nothing assigned, if there are too few.
    fn place(&mut self, request: &mut Request) -> bool {
        let last = request.tokens.len() - 1;
        let reusable = request.job.logprob_start.map_or(last, |start| start.min(last));
        let prefix = request.tokens.get(..reusable).unwrap_or(&[]);
        let (mut slots, pin) = self.cache.lookup(&request.job.namespace, prefix);
        let cached = slots.len();
        let needed = request.tokens.len() - cached;
        // Keep space for the next tokens of all requests, or this one would soon be retracted.
        let reserve: usize =
            self.running.iter().chain([&*request]).map(Request::slots_needed_soon).sum();
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

    /// Runs one batch and distributes its results.
    pub(super) fn step(&mut self) {
        self.allocate_slots();
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
        let mut continuing = Vec::with_capacity(self.running.len());
        let batch = std::mem::take(&mut self.running);
        for ((mut request, (_, take)), wanted) in batch.into_iter().zip(plan).zip(wanted) {
            let prompt_left = request.prompt_len().saturating_sub(request.computed);
            self.totals.prefilled_tokens_total += take.min(prompt_left) as u64;
            request.computed += take;
            let mine: Vec<&[f32]> = rows.by_ref().take(wanted).collect();
            self.score_prompt(&mut request, &mine);
            let last = mine.last().copied();
            match last.filter(|_| request.computed == request.tokens.len()) {
                None => continuing.push(request),
                Some(logits) => match self.extend(&mut request, logits) {
                    None => continuing.push(request),
                    Some(finish) => self.finish(request, finish),
                },
            }
        }
        self.running = continuing;
        self.scratch.logits = logits;
    }

    /// Ensures that every request has a slot for its newest token. Retracts the youngest requests
    /// while there are too few slots.
    fn allocate_slots(&mut self) {
        let needs_slot = |r: &Request| r.slots.len() < r.tokens.len();
        loop {
            let need = self.running.iter().filter(|r| needs_slot(r)).count();
            if let Some(slots) = self.cache.allocate(need) {
                for (request, slot) in self.running.iter_mut().filter(|r| needs_slot(r)).zip(slots)
                {
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

    /// Computes log-probs of prompt tokens from the logits of the tokens before them.
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

    /// Samples the next token of a request whose tokens are all computed. Returns why the request
    /// ends, if it does.
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
            // The channel has capacity for every token; sending fails only if the caller has
            // disconnected, which `sweep` handles.
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

    /// The stop string that the newest token completed, if any.
    fn stop_text(&self, request: &Request) -> Option<String> {
        let stops = &request.job.sampling.stop;
        let longest = stops.iter().map(String::len).max()?;
        let tokenizer = self.tokenizer.as_ref()?;
        // A token is at least one byte long, so a match that ends in the newest token lies in this
        // tail.
        let output = request.output();
        let tail = output.get(output.len().saturating_sub(longest + 1)..).unwrap_or(&[]);
        let text = tokenizer.decode(tail, false).ok()?;
        stops.iter().find(|s| text.contains(s.as_str())).cloned()
    }
}
