use super::*;
use crate::Weights;
use crate::checkpoint::{StoredType, save_checkpoint};
use crate::infer::cache::Namespace;
use crate::infer::model::tests::small_config;
use crate::infer::request::Progress;
use crate::infer::sampling::Sampling;
use crate::train::{PackedBatch, Pass, TrainModel};
use camino::{Utf8Path, Utf8PathBuf};
use std::thread::JoinHandle;

const LIMITS: Limits = Limits {
    max_running: 16,
    max_queued: 100,
    chunked_prefill: 64,
    cache_tokens: 4096,
    random_seed: 5,
};

/// A scheduler on a thread, and two folders with different weights of the same architecture.
struct Fixture {
    commands: mpsc::Sender<Command>,
    status: Arc<Mutex<Status>>,
    thread: Option<JoinHandle<()>>,
    folder: tempfile::TempDir,
    /// While this is there, the scheduler takes one turn for each message and then answers it.
    turns: Option<std::sync::mpsc::Sender<oneshot::Sender<()>>>,
}

type Reply = oneshot::Receiver<Result<Finished, Refusal>>;

impl Fixture {
    fn new(limits: Limits, format: WeightFormat) -> Self {
        let mut new = Self::held(limits, format);
        new.release();
        new
    }

    /// A scheduler that takes turns only on request, until [`Self::release`]. So what a command meets does not depend
    /// on how fast either thread is.
    fn held(limits: Limits, format: WeightFormat) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, seed) in [("a", 1), ("b", 2)] {
            let target = Utf8PathBuf::try_from(folder.path().join(name)).unwrap();
            let mut weights = Weights::random(small_config(2), seed);
            sharpen(&mut weights);
            save_checkpoint(&target, &weights, StoredType::F32, None).unwrap();
        }
        let first = Utf8PathBuf::try_from(folder.path().join("a")).unwrap();
        let loaded = Loaded::read(&first, format).unwrap();
        let status = Arc::new(Mutex::new(Status::default()));
        let names = (first.to_string(), "1".into());
        let mut scheduler =
            Scheduler::new(loaded, format, limits, None, names, Arc::clone(&status));
        let (commands, mut inbox) = mpsc::channel(100);
        let (turns, requested) = std::sync::mpsc::channel::<oneshot::Sender<()>>();
        let thread = std::thread::spawn(move || {
            for taken in requested {
                scheduler.turn(&mut inbox);
                taken.send(()).unwrap();
            }
            scheduler.run(inbox);
        });
        Self { commands, status, thread: Some(thread), folder, turns: Some(turns) }
    }

    /// Lets a held scheduler take so many turns.
    fn take_turns(&self, count: usize) {
        for _ in 0..count {
            let (taken, wait) = oneshot::channel();
            self.turns.as_ref().unwrap().send(taken).unwrap();
            wait.blocking_recv().unwrap();
        }
    }

    /// Lets the scheduler run; the commands sent before are its first.
    fn release(&mut self) {
        self.turns = None;
    }

    /// Pauses a held scheduler after so many turns.
    fn pause_after(&mut self, turns: usize, mode: PauseMode) {
        self.take_turns(turns);
        let paused = self.begin(|reply| Command::Pause(mode, reply));
        self.release();
        paused.blocking_recv().unwrap();
    }

    fn path(&self, name: &str) -> Utf8PathBuf {
        Utf8PathBuf::try_from(self.folder.path().join(name)).unwrap()
    }

    fn send(&self, command: Command) {
        self.commands.blocking_send(command).unwrap();
    }

    /// Sends a command, and returns where its answer arrives.
    fn begin<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Command) -> oneshot::Receiver<T> {
        let (reply, answer) = oneshot::channel();
        self.send(make(reply));
        answer
    }

    fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Command) -> T {
        self.begin(make).blocking_recv().unwrap()
    }

    fn submit(&self, ask: TestRequest) -> (Reply, mpsc::Receiver<Progress>) {
        let (reply, answer) = oneshot::channel();
        let (progress, seen) = mpsc::channel(ask.tokens.max(1));
        self.send(Command::Generate(Box::new(Job {
            rid: ask.rid,
            input_ids: ask.prompt,
            sampling: Sampling {
                max_new_tokens: ask.tokens,
                min_new_tokens: 0,
                temperature: ask.temperature,
                top_k: None,
                top_p: 1.0,
                min_p: 0.0,
                seed: Some(ask.seed),
                stream: 0,
                stop_token_ids: Arc::default(),
                stop: Arc::default(),
                ignore_eos: false,
            },
            logprob_start: ask.logprob_start,
            routed_start: Some(ask.start),
            namespace: Namespace { extra_key: ask.extra_key, ..Namespace::default() },
            priority: 0,
            progress: Some(progress),
            reply,
            received: Instant::now(),
        })));
        (answer, seen)
    }

    fn run(&self, ask: TestRequest) -> Finished {
        self.submit(ask).0.blocking_recv().unwrap().unwrap()
    }

    fn status(&self) -> Status {
        self.status.lock().unwrap().clone()
    }

    fn begin_update(
        &self,
        folder: &str,
        version: &str,
        flush: bool,
    ) -> oneshot::Receiver<UpdateResult> {
        let (model_path, version) = (self.path(folder), Some(version.to_owned()));
        self.begin(|reply| {
            Command::Update(Update { model_path, version, abort_all: false, flush, reply })
        })
    }

    fn update(&self, folder: &str, version: &str, flush: bool) -> UpdateResult {
        self.begin_update(folder, version, flush).blocking_recv().unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.release();
        self.commands.blocking_send(Command::Stop).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Enlarges the embeddings, so that tokens differ clearly and routing has no near-ties.
fn sharpen(weights: &mut Weights) {
    let (config, mut tensors) = weights.clone().into_parts();
    for (name, tensor) in &mut tensors {
        if !name.ends_with("norm.weight") {
            tensor.data.iter_mut().for_each(|v| *v *= 5.0);
        }
    }
    *weights = Weights::from_tensors(config, tensors, Utf8Path::new("sharpened")).unwrap();
}

#[derive(Clone)]
struct TestRequest {
    rid: String,
    prompt: Vec<u32>,
    tokens: usize,
    temperature: f32,
    seed: u64,
    start: usize,
    logprob_start: Option<usize>,
    extra_key: String,
}

fn ask(prompt: &[u32], tokens: usize) -> TestRequest {
    TestRequest {
        rid: "r".into(),
        prompt: prompt.to_vec(),
        tokens,
        temperature: 1.0,
        seed: 11,
        start: 0,
        logprob_start: None,
        extra_key: String::new(),
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 311 + i * 37 + i * i) % 1024).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[track_caller]
fn assert_same(a: &Finished, b: &Finished) {
    assert_eq!(a.output_ids, b.output_ids);
    assert_eq!(bits(&a.logprobs), bits(&b.logprobs));
    assert_eq!(a.rows, b.rows);
}

#[test]
fn prefix_hit_equals_cold_result_and_reuses_cached_rows() {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let fixture = Fixture::new(LIMITS, format);
        let prompt = prompt(1, 100);
        let cold = fixture.run(ask(&prompt, 20));
        assert_eq!(cold.cached_tokens, 0);
        assert_eq!(fixture.status().prefilled_tokens_total, 100);
        let hit = fixture.run(ask(&prompt, 20));
        assert_eq!(hit.cached_tokens, 99);
        // Only one token ran through the model; the other 99 rows were cached.
        assert_eq!(fixture.status().prefilled_tokens_total, 101);
        assert_same(&cold, &hit);
    }
}

#[test]
fn next_turn_reuses_all_but_the_last_token_of_the_previous_turn() {
    let fixture = Fixture::new(LIMITS, WeightFormat::Q8_0);
    let mut tokens = prompt(2, 50);
    let first = fixture.run(ask(&tokens, 17));
    tokens.extend(&first.output_ids);
    let total = tokens.len();
    tokens.extend(prompt(3, 9));
    let second = fixture.run(ask(&tokens, 5));
    assert_eq!(second.cached_tokens, total - 1);
    let rows = first.rows.unwrap();
    assert_eq!(second.rows.unwrap()[..rows.len()], rows);
}

#[test]
fn row_count_is_prompt_plus_output_minus_one_minus_start() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    let prompt = prompt(4, 12);
    let width = 2 * 2;
    for tokens in [0, 1, 6] {
        let all = fixture.run(ask(&prompt, tokens)).rows.unwrap();
        assert_eq!(all.len(), (12 + tokens - 1) * width);
        for start in 0..=12 {
            let rows = fixture.run(TestRequest { start, ..ask(&prompt, tokens) }).rows.unwrap();
            let from = (start * width).min(all.len());
            assert_eq!(rows, all[from..], "start {start}, {tokens} tokens");
        }
    }
}

#[test]
fn result_does_not_depend_on_the_batch() {
    for format in [WeightFormat::F32, WeightFormat::Q8_0] {
        let wanted = ask(&prompt(5, 70), 30);
        let alone = Fixture::new(LIMITS, format).run(wanted.clone());
        let fixture = Fixture::new(LIMITS, format);
        let others: Vec<_> = (6u32..14)
            .map(|i| fixture.submit(TestRequest { seed: i.into(), ..ask(&prompt(i, 40 + i), 60) }))
            .collect();
        let among = fixture.run(wanted);
        assert_same(&alone, &among);
        for (reply, _) in others {
            assert_eq!(reply.blocking_recv().unwrap().unwrap().output_ids.len(), 60);
        }
    }
}

#[test]
fn small_pool_retracts_requests_without_changing_results() {
    let asks: Vec<TestRequest> =
        (0u32..6).map(|i| TestRequest { seed: i.into(), ..ask(&prompt(i, 60), 150) }).collect();
    let roomy = Fixture::new(LIMITS, WeightFormat::F32);
    let tight = Fixture::new(Limits { cache_tokens: 600, ..LIMITS }, WeightFormat::F32);
    let [expected, got] = [&roomy, &tight].map(|fixture| {
        let replies: Vec<_> = asks.iter().map(|a| fixture.submit(a.clone())).collect();
        let done = |(reply, _): (Reply, _)| reply.blocking_recv().unwrap().unwrap();
        replies.into_iter().map(done).collect::<Vec<_>>()
    });
    for (expected, got) in expected.iter().zip(&got) {
        assert_same(expected, got);
    }
    assert!(tight.status().retracted_total > 0);
    assert_eq!(roomy.status().retracted_total, 0);
}

#[test]
fn group_members_share_one_prefill() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    let shared = prompt(7, 300);
    fixture.ask(|reply| Command::Pause(PauseMode::InPlace, reply));
    let replies: Vec<_> =
        (0..8).map(|seed| fixture.submit(TestRequest { seed, ..ask(&shared, 4) })).collect();
    fixture.ask(Command::Continue);
    let done = |(reply, _): (Reply, _)| reply.blocking_recv().unwrap().unwrap();
    let cached: Vec<usize> = replies.into_iter().map(done).map(|f| f.cached_tokens).collect();
    assert_eq!(cached.iter().filter(|&&c| c == 299).count(), 7);
    assert_eq!(fixture.status().prefilled_tokens_total, 307);
}

#[test]
fn namespaces_do_not_share_prefixes() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    fixture.run(ask(&prompt(8, 40), 2));
    let other = TestRequest { extra_key: "2".into(), ..ask(&prompt(8, 40), 2) };
    assert_eq!(fixture.run(other).cached_tokens, 0);
}

#[test]
fn abort_by_prefix_returns_partial_output_and_spares_other_requests() {
    let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
    let (cut, _) = fixture.submit(TestRequest { rid: "job-1".into(), ..ask(&prompt(9, 30), 900) });
    let (other, _) = fixture.submit(TestRequest { rid: "keep".into(), ..ask(&prompt(10, 30), 40) });
    fixture.take_turns(7);
    fixture.send(Command::Abort(AbortTarget::Prefix("job".into())));
    fixture.release();
    let cut = cut.blocking_recv().unwrap().unwrap();
    assert_eq!(cut.finish, Finish::Aborted("Aborted"));
    let outputs = cut.output_ids.len();
    assert!((5..=7).contains(&outputs));
    assert_eq!(cut.rows.unwrap().len(), (30 + outputs - 1) * 4);
    assert_eq!(other.blocking_recv().unwrap().unwrap().finish, Finish::Length(40));
}

#[test]
fn disconnected_caller_frees_its_slots() {
    let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
    let (reply, mut seen) = fixture.submit(ask(&prompt(9, 30), 900));
    fixture.take_turns(2);
    drop(reply);
    fixture.release();
    // The channel closes when the engine drops the request.
    while seen.blocking_recv().is_some() {}
    assert!(fixture.ask(Command::Flush));
    assert_eq!((fixture.status().held_tokens, fixture.status().aborted_total), (0, 1));
}

#[test]
fn pausing_and_continuing_does_not_change_the_result() {
    let wanted = ask(&prompt(12, 64), 100);
    let undisturbed = Fixture::new(LIMITS, WeightFormat::F32).run(wanted.clone());
    for (mode, retractions) in [(PauseMode::InPlace, 0), (PauseMode::Retract, 1)] {
        let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
        let (reply, _) = fixture.submit(wanted.clone());
        fixture.pause_after(3, mode);
        let generated = fixture.status().generated_tokens_total;
        let (late, _) = fixture.submit(ask(&prompt(13, 20), 3));
        // Retracted requests hold no KV, so a flush is allowed; running requests prevent it.
        assert_eq!(fixture.ask(Command::Flush), mode == PauseMode::Retract);
        assert_eq!(fixture.status().generated_tokens_total, generated);
        fixture.ask(Command::Continue);
        let got = reply.blocking_recv().unwrap().unwrap();
        assert_same(&undisturbed, &got);
        assert_eq!(got.retractions, retractions);
        assert_eq!(late.blocking_recv().unwrap().unwrap().output_ids.len(), 3);
    }
}

#[test]
fn pause_with_abort_ends_running_requests() {
    let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
    let (reply, _) = fixture.submit(ask(&prompt(14, 20), 900));
    fixture.pause_after(2, PauseMode::Abort);
    assert_eq!(reply.blocking_recv().unwrap().unwrap().finish, Finish::Aborted("Aborted"));
}

#[test]
fn update_waits_for_running_requests_then_flushes_and_changes_version() {
    let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
    let wanted = ask(&prompt(15, 40), 60);
    let (reply, _) = fixture.submit(wanted.clone());
    fixture.take_turns(2);
    let update = fixture.begin_update("b", "2", true);
    fixture.release();
    let result = update.blocking_recv().unwrap();
    assert!(result.success);
    assert_eq!(result.message, "Succeeded to update model weights. Weight version updated to 2.");
    let old = reply.blocking_recv().unwrap().unwrap();
    assert_eq!(old.finish, Finish::Length(60));
    assert!(old.spans.iter().all(|s| &*s.version == "1"));
    assert_eq!(fixture.status().weight_version, "2");
    let new = fixture.run(wanted);
    assert_eq!((new.cached_tokens, &*new.weight_version), (0, "2"));
    assert_ne!(new.rows, old.rows);
}

#[test]
fn failed_update_keeps_weights_version_and_cache() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    let before = fixture.run(ask(&prompt(16, 40), 10));
    let result = fixture.update("absent", "2", true);
    assert!(!result.success && result.message.contains("absent"));
    let after = fixture.run(ask(&prompt(16, 40), 10));
    assert_same(&before, &after);
    assert_eq!((after.cached_tokens, &*after.weight_version), (39, "1"));
}

#[test]
fn update_during_pause_splits_version_spans() {
    for (mode, flush, success) in [
        (PauseMode::InPlace, false, true),
        (PauseMode::InPlace, true, false),
        (PauseMode::Retract, true, true),
    ] {
        let mut fixture = Fixture::held(LIMITS, WeightFormat::F32);
        let (reply, _) = fixture.submit(ask(&prompt(17, 40), 200));
        fixture.pause_after(3, mode);
        assert_eq!(fixture.update("b", "2", flush).success, success);
        fixture.ask(Command::Continue);
        let done = reply.blocking_recv().unwrap().unwrap();
        let versions: Vec<&str> = done.spans.iter().map(|s| &*s.version).collect();
        assert_eq!(versions, ["1", "2"]);
        assert_eq!((done.spans[0].start, done.spans[1].end), (0, 200));
        assert_eq!(done.spans[0].end, done.spans[1].start);
        assert_eq!(done.rows.unwrap().len(), 239 * 4);
    }
}

#[test]
fn prompt_log_probs_equal_sampled_log_probs() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    let start = prompt(18, 30);
    let sampled = fixture.run(ask(&start, 10));
    let mut whole = start.clone();
    whole.extend(&sampled.output_ids);
    let scored = fixture.run(TestRequest { logprob_start: Some(29), ..ask(&whole, 0) });
    assert_eq!(scored.cached_tokens, 29);
    assert_eq!(scored.input_logprobs.len(), 11);
    assert_eq!(scored.input_logprobs[0], None);
    for (a, b) in scored.input_logprobs[1..].iter().zip(&sampled.logprobs) {
        assert!((a.unwrap() - b).abs() < 1e-6);
    }
}

#[test]
fn higher_priority_runs_first_and_full_queue_rejects() {
    let limits = Limits { max_running: 1, max_queued: 2, ..LIMITS };
    let fixture = Fixture::new(limits, WeightFormat::F32);
    fixture.ask(|reply| Command::Pause(PauseMode::InPlace, reply));
    let (first, _) = fixture.submit(ask(&prompt(19, 10), 5));
    let (second, _) = fixture.submit(ask(&prompt(20, 10), 5));
    let (third, _) = fixture.submit(ask(&prompt(21, 10), 5));
    assert_eq!(third.blocking_recv().unwrap().unwrap_err(), Refusal::QueueFull);
    fixture.ask(Command::Continue);
    let a = first.blocking_recv().unwrap().unwrap();
    let b = second.blocking_recv().unwrap().unwrap();
    assert!(a.queue_seconds <= b.queue_seconds);
}

#[test]
fn trainer_reproduces_log_probs_and_routes_of_f32_engine() {
    let fixture = Fixture::new(LIMITS, WeightFormat::F32);
    let start = prompt(22, 90);
    let got = fixture.run(TestRequest { temperature: 0.7, ..ask(&start, 120) });
    let trainer = TrainModel::<f32>::load(&fixture.path("a")).unwrap();
    let tokens = [start.clone(), got.output_ids].concat();
    let scored = (0..tokens.len()).map(|i| i >= start.len()).collect();
    let end = tokens.len();
    let batch = PackedBatch::new(tokens, vec![0, end], scored).unwrap();
    let pass = Pass { temperature: 0.7, ..Pass::new(&[0]) };
    let seen = trainer.forward(&batch, pass).remove(0);
    let pairs = seen.logprobs[start.len()..].iter().zip(&got.logprobs);
    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{worst}");
    let rows = got.rows.unwrap();
    assert_eq!(seen.routes[..rows.len()], rows);
}
