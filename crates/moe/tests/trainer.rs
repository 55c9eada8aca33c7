//! Tests of the trainer through its HTTP protocol, as the coordinator uses it.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::protocol::{Hyperparameters, LogprobsRequest, StepRequest};
use orchestrate_handoff::{BatchMeta, BatchSample, TrainerClient, TrainerErrorKind, write_batch};
use orchestrate_http_server::{AllowedFolders, HttpOptions};
use orchestrate_moe::train::{
    PackedBatch, Pass, ServeTrainerError, TrainModel, TrainerOptions, serve_trainer,
};
use orchestrate_moe::{ModelConfig, StoredType, Weights, save_checkpoint};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_settings::TlsClientPem;
use orchestrate_types::{EpisodeId, GroupId, PolicyVersion, Trajectory};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_mins(10);
const LENGTHS: [usize; 4] = [14, 9, 20, 11];

fn config() -> ModelConfig {
    serde_json::from_value(serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 23, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 64, "rope_theta": 1e4
    }))
    .unwrap()
}

fn settings() -> Hyperparameters {
    Hyperparameters {
        dual_clip: None,
        loss_norm_tokens: 32.0,
        mini_steps: 2,
        micro_batch_tokens: 24,
        learning_rate: 1e-3,
        betas: (0.9, 0.95),
        weight_decay: 0.0,
        measure_no_replay: true,
        ..Hyperparameters::default()
    }
}

/// A temporary folder with a starting policy, in which trainers are served.
struct Fixture {
    _guard: tempfile::TempDir,
    root: Utf8PathBuf,
}

struct Server {
    client: TrainerClient,
    url: String,
    stop: CancellationToken,
    tasks: JoinSet<Result<(), ServeTrainerError>>,
}

impl Fixture {
    fn new() -> Self {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(guard.path().canonicalize().unwrap()).unwrap();
        let mut model: TrainModel<f32> = TrainModel::new(&Weights::random(config(), 3));
        for p in model.params_mut() {
            *p *= 8.0;
        }
        let policy = root.join("policy");
        fs_err::write(root.join("tokenizer.json"), "{}").unwrap();
        let weights = model.weights().unwrap();
        save_checkpoint(&policy, &weights, StoredType::F32, Some(&root)).unwrap();
        Self { _guard: guard, root }
    }

    async fn serve(&self, token: Option<&str>) -> Server {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let options = TrainerOptions {
            policy: self.root.join("policy"),
            checkpoints: self.root.join("checkpoints"),
            keep: 2,
            batch_roots: AllowedFolders::below([self.root.clone()]),
            http: HttpOptions { token: token.map(str::to_owned), ..HttpOptions::default() },
        };
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_trainer(options, listener, stop.clone()));
        let client =
            TrainerClient::new(&url, token.map(str::to_owned), &TlsClientPem::default()).unwrap();
        Server { client, url, stop, tasks }
    }

    /// Writes a batch as if `checkpoint` had sampled it, with its own routes, and returns the step
    /// request.
    fn request(&self, step: u64, checkpoint: &Utf8Path, advantage: f32) -> StepRequest {
        let model: TrainModel<f32> = TrainModel::load(checkpoint).unwrap();
        let version = PolicyVersion(step - 1);
        let count: usize = LENGTHS.iter().sum();
        let tokens: Vec<u32> = (0..count).map(|i| u32::try_from(i * 7 % 23).unwrap()).collect();
        let mut offsets = vec![0];
        for length in LENGTHS {
            offsets.push(offsets[offsets.len() - 1] + length);
        }
        let packed = PackedBatch::new(tokens.clone(), offsets, vec![true; count]).unwrap();
        let shape = Arc::new(config().shape());
        let mut samples = Vec::new();
        for output in model.forward(&packed, Pass::new(&[0, 1, 2, 3])) {
            let range = packed.range(output.sequence);
            let length = range.len();
            let ids = &output.routes[..(length - 1) * 4];
            let rows: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap()).collect();
            let versions = vec![RowVersion { start: 0, end: length - 1, version }];
            let routing = RoutingMask::new(Arc::clone(&shape), &rows, versions).unwrap();
            let mask = (0..length).map(|p| u8::from(p >= 3)).collect();
            let trajectory = Trajectory::new(
                tokens[range].to_vec(),
                mask,
                output.logprobs.clone(),
                vec![i64::try_from(version.0).unwrap(); length],
                vec![],
            );
            let member = u16::try_from(output.sequence).unwrap();
            samples.push(BatchSample {
                episode_id: EpisodeId { group: GroupId::Train { seq: 0 }, member },
                group: 0,
                trajectory: trajectory.unwrap(),
                // One sequence has no routing rows.
                routing: (output.sequence != 1).then_some(routing),
                advantage: if output.sequence % 2 == 0 { advantage } else { -advantage },
                reward: 0.0,
            });
        }
        let step_id = format!("step-{step}");
        let folder = self.root.join("batches").join(&step_id);
        let meta = BatchMeta {
            run: "test".into(),
            step_id: step_id.clone(),
            global_step: step,
            base_version: version,
            shape: config().shape(),
            max_shard_bytes: 600,
            share_prefix_rows: false,
        };
        write_batch(&folder, &meta, &samples).unwrap();
        StepRequest {
            step_id,
            base_version: version,
            manifest: folder.join("manifest.json"),
            hyperparameters: settings(),
        }
    }
}

impl Server {
    async fn stop(mut self) {
        self.stop.cancel();
        self.tasks.join_next().await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn step_is_applied_once_even_across_a_restart() {
    let fixture = Fixture::new();
    let server = fixture.serve(None).await;
    let info = server.client.info().await.unwrap();
    assert_eq!((info.policy_version, info.lineage), (PolicyVersion(0), 0));
    assert!(info.checkpoint.join("tokenizer.json").exists());

    let request = fixture.request(1, &info.checkpoint, 1.0);
    let result = server.client.apply_step(&request, DEADLINE, |_| {}).await.unwrap();
    assert_eq!(result.policy_version, PolicyVersion(1));
    for file in ["model.safetensors", "optimizer.state", "trainer.json", "tokenizer.json"] {
        assert!(result.checkpoint.join(file).exists(), "{file}");
    }
    // An inference server loads every file with this extension.
    let files = result.checkpoint.read_dir_utf8().unwrap().map(|entry| entry.unwrap());
    let weights = files.filter(|file| file.path().extension() == Some("safetensors"));
    assert_eq!(weights.count(), 1);
    let metrics = &result.metrics;
    // Sampler and trainer are the same code, so they differ by rounding only.
    assert!(metrics.mismatch.kl_k3.abs() < 1e-9, "{metrics:?}");
    assert!(metrics.disagreement.as_ref().is_some_and(|d| d.token.abs() < 1e-9), "{metrics:?}");
    assert!(metrics.grad_norm > 0.0 && metrics.entropy > 0.0);
    assert_eq!((metrics.tokens, metrics.loss_tokens), (54, 42));
    // The sequence without rows has 8 inputs and 2 layers.
    assert_eq!(metrics.routing_missing, 16);

    let again = server.client.apply_step(&request, DEADLINE, |_| {}).await.unwrap();
    assert_eq!(again, result);
    let after = fs_err::read(result.checkpoint.join("model.safetensors")).unwrap();
    server.stop().await;

    let server = fixture.serve(None).await;
    let info = server.client.info().await.unwrap();
    assert_eq!((info.policy_version, info.lineage), (PolicyVersion(1), 0));
    assert_eq!(info.last_step_id.as_deref(), Some("step-1"));
    assert_eq!(server.client.apply_step(&request, DEADLINE, |_| {}).await.unwrap(), result);
    assert_eq!(fs_err::read(info.checkpoint.join("model.safetensors")).unwrap(), after);
    let next = fixture.request(2, &info.checkpoint, 1.0);
    let result = server.client.apply_step(&next, DEADLINE, |_| {}).await.unwrap();
    assert_eq!(result.policy_version, PolicyVersion(2));
    let reply = server.client.checkpoint(DEADLINE).await.unwrap();
    assert_eq!((reply.checkpoint, reply.policy_version.0), (result.checkpoint, 2));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_checkpoints_are_deleted_and_restoring_one_starts_a_lineage() {
    let fixture = Fixture::new();
    let server = fixture.serve(None).await;
    let mut checkpoint = server.client.info().await.unwrap().checkpoint;
    for step in 1..=4 {
        let request = fixture.request(step, &checkpoint, 1.0);
        checkpoint = server.client.apply_step(&request, DEADLINE, |_| {}).await.unwrap().checkpoint;
    }
    server.stop().await;
    let folder = fixture.root.join("checkpoints");
    let kept: Vec<bool> = (0..=4).map(|v| folder.join(format!("v{v:06}")).exists()).collect();
    assert_eq!(kept, [true, false, false, true, true]);

    fs_err::remove_dir_all(folder.join("v000004")).unwrap();
    let server = fixture.serve(None).await;
    let info = server.client.info().await.unwrap();
    assert_eq!((info.policy_version, info.lineage), (PolicyVersion(3), 1));
    let request = fixture.request(4, &info.checkpoint, 1.0);
    server.client.apply_step(&request, DEADLINE, |_| {}).await.unwrap();
    assert_eq!(server.client.info().await.unwrap().lineage, 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_step_keeps_weights_and_can_be_retried() {
    let fixture = Fixture::new();
    let server = fixture.serve(None).await;
    let start = server.client.info().await.unwrap().checkpoint;
    let broken = fixture.request(1, &start, f32::MAX);
    let error = server.client.apply_step(&broken, DEADLINE, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("is not finite"), "{error}");
    assert_eq!(server.client.info().await.unwrap().policy_version, PolicyVersion(0));

    fs_err::remove_dir_all(fixture.root.join("batches")).unwrap();
    let good = fixture.request(1, &start, 1.0);
    let result = server.client.apply_step(&good, DEADLINE, |_| {}).await.unwrap();
    assert_eq!(result.policy_version, PolicyVersion(1));

    let mut stale = fixture.request(2, &start, 1.0);
    stale.base_version = PolicyVersion(7);
    let error = server.client.apply_step(&stale, DEADLINE, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("version 7, but this trainer is at version 1"), "{error}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn measuring_logprobs_changes_nothing() {
    let fixture = Fixture::new();
    let server = fixture.serve(None).await;
    let start = server.client.info().await.unwrap().checkpoint;
    let manifest = fixture.request(1, &start, 1.0).manifest;
    let mut request = LogprobsRequest { manifest, replay: false, temperature: 1.0 };
    let own = server.client.logprobs(&request, DEADLINE).await.unwrap();
    assert!(own.mismatch.kl_k3.abs() < 1e-9 && own.disagreement.is_some());
    assert_eq!(own.logprobs.iter().map(Vec::len).collect::<Vec<_>>(), LENGTHS);
    request.replay = true;
    let replayed = server.client.logprobs(&request, DEADLINE).await.unwrap();
    assert_eq!(replayed.logprobs, own.logprobs);
    assert_eq!(replayed.disagreement, None);
    request.temperature = 0.0;
    assert!(server.client.logprobs(&request, DEADLINE).await.is_err());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected_with_the_reason() {
    let fixture = Fixture::new();
    let server = fixture.serve(Some("secret")).await;
    let start = server.client.info().await.unwrap().checkpoint;
    let good = fixture.request(1, &start, 1.0);
    let outside = tempfile::tempdir().unwrap();
    let outside = Utf8PathBuf::from_path_buf(outside.path().join("manifest.json")).unwrap();
    fs_err::write(&outside, "{}").unwrap();
    let garbage = fixture.root.join("garbage").join("manifest.json");
    fs_err::create_dir_all(garbage.parent().unwrap()).unwrap();
    fs_err::write(&garbage, "{").unwrap();
    let cases = [
        (fixture.root.join("batches/../batches/step-1/manifest.json"), 400, "bad_manifest_path"),
        (fixture.root.join("policy/config.json"), 400, "bad_manifest_path"),
        (fixture.root.join("nowhere/manifest.json"), 400, "bad_manifest_path"),
        (outside, 400, "bad_manifest_path"),
        (garbage, 400, "bad_batch"),
    ];
    for (manifest, status, code) in cases {
        let request = StepRequest { manifest: manifest.clone(), ..good.clone() };
        let error = server.client.submit_step(&request).await.unwrap_err();
        match error.kind {
            TrainerErrorKind::Refused { status: s, code: c, message } => {
                assert_eq!((s, c.as_str()), (status, code), "{manifest}: {message}");
                assert!(message.contains(manifest.as_str()), "{message}");
            }
            other => panic!("{manifest}: {other}"),
        }
    }
    let refused = async |request: StepRequest| match server
        .client
        .submit_step(&request)
        .await
        .unwrap_err()
        .kind
    {
        TrainerErrorKind::Refused { status, code, .. } => (status, code),
        other => panic!("{other}"),
    };
    let mut wrong = good.clone();
    wrong.hyperparameters.temperature = 0.0;
    assert_eq!(refused(wrong).await, (422, "does_not_fit".to_owned()));
    let other = StepRequest { step_id: "step-9".into(), ..good.clone() };
    assert_eq!(refused(other).await, (409, "other_step".to_owned()));
    let odd = StepRequest { step_id: "../x".into(), ..good.clone() };
    assert_eq!(refused(odd).await, (400, "bad_step_id".to_owned()));

    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let plain = http.get(format!("{}/v1/info", server.url)).send().await.unwrap();
    assert_eq!(plain.status(), 401);
    assert!(plain.text().await.unwrap().contains("\"unauthorized\""));
    let authorised = |r: reqwest::RequestBuilder| r.bearer_auth("secret").send();
    let unknown = authorised(http.get(format!("{}/v1/steps/none", server.url))).await.unwrap();
    assert_eq!(unknown.status(), 404);
    let large = http
        .post(format!("{}/v1/steps", server.url))
        .header("content-type", "application/json")
        .body(vec![b' '; 2 << 20]);
    assert_eq!(authorised(large).await.unwrap().status(), 413);
    let nothing = authorised(http.get(format!("{}/nothing", server.url))).await.unwrap();
    assert_eq!(nothing.status(), 404);
    assert!(nothing.text().await.unwrap().contains("\"error\""));
    drop(http);
    server.stop().await;
}
