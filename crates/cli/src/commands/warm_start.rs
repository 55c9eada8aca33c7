//! `orchestrate warm-start`: trains a starting policy on scripted expert episodes.

use crate::args::WarmStartArgs;
use crate::error::UsageError;
use crate::output;
use crate::progress::Progress;
use anyhow::Context;
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_moe::train::model::TrainModel;
use orchestrate_moe::train::sft::{self, SftOptions, SftSequence};
use orchestrate_moe::{ModelConfig, StoredType, Weights, save_checkpoint};
use orchestrate_rollout::{
    Action, CONTROL_TOKENS, ChatModel, ChatTemplate, ExpertEpisode, ExpertTurn,
    MICRO_CHAT_TEMPLATE, opening_messages, train_tokenizer,
};
use orchestrate_tasks::{Task, expert, micro};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::ControlFlow;
use std::process::ExitCode;

/// Vocabulary size of the trained tokenizer.
const VOCABULARY: usize = 1024;
/// Loss weight of tokens that the policy never writes: enough to learn what tasks look like.
const OTHER_WEIGHT: f32 = 0.25;

/// Length of a copying drill, in tokens.
const DRILL_TOKENS: usize = 72;

/// Runs the command.
pub(crate) async fn run(args: WarmStartArgs) -> anyhow::Result<ExitCode> {
    tokio::task::spawn_blocking(move || train(&args)).await??;
    Ok(ExitCode::SUCCESS)
}

fn train(args: &WarmStartArgs) -> anyhow::Result<()> {
    anyhow::ensure!(!args.out.exists(), UsageError::OutputExists { path: args.out.clone() });
    output::say(format!("writing {} scripted expert episodes", args.tasks));
    let counts = micro::MicroCounts { train: args.tasks, held_out: 0, held_out_families: 0 };
    let tasks = micro::generate(args.seed, counts);
    let episodes = expert_episodes(&tasks, args.seed);
    let temporary = tempfile::tempdir()?;
    let (weights, folder) = if let Some(from) = &args.from {
        (Weights::load(from).with_context(|| format!("--from {from}"))?, from.clone())
    } else {
        let folder = Utf8PathBuf::try_from(temporary.path().to_owned())?;
        let template = ChatTemplate::new(MICRO_CHAT_TEMPLATE)?;
        let corpus = episodes.iter().map(|e| e.text(&template)).collect::<Result<Vec<_>, _>>()?;
        let corpus = corpus.into_iter();
        let entries = train_tokenizer(corpus, VOCABULARY, MICRO_CHAT_TEMPLATE, &folder)?;
        output::say(format!("tokenizer: {entries} entries"));
        (Weights::random_by_width(small_model(entries), args.seed), folder)
    };
    output::say(format!("model: {} parameters", weights.parameters()));
    let chat = ChatModel::load(&folder)?;
    let data = demonstrations(&episodes, &chat)?;
    let tokens: usize = data.iter().map(|d| d.tokens.len()).sum();
    output::say(format!(
        "{}, {:.0} tokens each",
        output::counted(data.len(), "episode"),
        tokens as f64 / data.len() as f64
    ));
    let mut model = TrainModel::<f32>::new(&weights);
    fit(&mut model, data, args)?;
    save(&model, &folder, &args.out)?;
    output::say(format!("wrote {}", args.out));
    Ok(())
}

/// The model that micro tasks are designed for: 1.9 million parameters.
fn small_model(vocabulary: usize) -> ModelConfig {
    ModelConfig {
        architectures: vec!["Qwen3MoeForCausalLM".into()],
        model_type: "qwen3_moe".into(),
        hidden_size: 128,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        moe_intermediate_size: 128,
        intermediate_size: 0,
        num_experts: 8,
        num_experts_per_tok: 2,
        norm_topk_prob: true,
        vocab_size: vocabulary,
        rope_theta: Some(10_000.0),
        rope_parameters: None,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        decoder_sparse_step: 1,
        mlp_only_layers: vec![],
        max_position_embeddings: 1024,
        attention_bias: false,
        use_sliding_window: false,
        rope_scaling: None,
        hidden_act: "silu".into(),
        torch_dtype: "bfloat16".into(),
    }
}

fn expert_episodes(tasks: &[Task], seed: u64) -> Vec<ExpertEpisode> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x0e11_e47e);
    tasks
        .iter()
        .filter_map(|task| {
            let turns = expert::episode(task, &mut rng)?;
            let turns = turns
                .into_iter()
                .map(|turn| ExpertTurn {
                    content: String::new(),
                    calls: vec![Action {
                        name: turn.action.name,
                        arguments: turn.action.arguments,
                    }],
                    observations: vec![turn.observation],
                    weight: turn.weight,
                })
                .collect();
            Some(ExpertEpisode { prompt: opening_messages(None, &task.problem_statement), turns })
        })
        .collect()
}

fn demonstrations(
    episodes: &[ExpertEpisode],
    chat: &ChatModel,
) -> anyhow::Result<Vec<SftSequence>> {
    episodes
        .iter()
        .map(|episode| {
            let data = episode.supervised_example(chat, OTHER_WEIGHT)?;
            Ok(SftSequence { tokens: data.token_ids, weights: data.weights })
        })
        .collect()
}

/// Sequences that repeat a few random tokens; all but the first repetition count for the loss. Repairs
/// are mostly copying (a file name from the issue, a parameter from the listing). A small model learns
/// to copy much sooner from sequences without anything else to learn, and soonest from short
/// repetitions.
fn copying_drills(count: usize, vocabulary: usize, seed: u64) -> Vec<SftSequence> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x0000_c0b7);
    let last = u32::try_from(vocabulary).unwrap_or(u32::MAX);
    let first = u32::try_from(CONTROL_TOKENS.len()).unwrap_or(0);
    let drill = || {
        let length = rng.random_range(4..24);
        let round: Vec<u32> = (0..length).map(|_| rng.random_range(first..last)).collect();
        let tokens: Vec<u32> = round.into_iter().cycle().take(DRILL_TOKENS).collect();
        // The first repeated token cannot be predicted.
        let scored = |i: usize| if i > length { 1.0 } else { 0.0 };
        SftSequence { tokens, weights: (0..DRILL_TOKENS).map(scored).collect() }
    };
    std::iter::repeat_with(drill).take(count).collect()
}

fn fit(
    model: &mut TrainModel<f32>,
    data: Vec<SftSequence>,
    args: &WarmStartArgs,
) -> anyhow::Result<()> {
    let options = SftOptions {
        token_budget: args.tokens as u64,
        learning_rate: args.learning_rate,
        ..SftOptions::default()
    };
    let stop_after = args.stop_after as u64;
    let length = options.token_budget.min(stop_after);
    let progress = Progress::new(length);
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let drills = if args.from.is_some() { 0 } else { args.drills };
    let drills = copying_drills(drills, model.config().vocab_size, args.seed);
    // Every pass over the data has a different order.
    let passes = std::iter::repeat_with(move || {
        let mut pass = data.clone();
        pass.shuffle(&mut rng);
        pass
    })
    .flatten();
    let sequences = drills.into_iter().chain(passes);
    let last = sft::train(model, sequences, &options, |now, _| {
        let message = format!(
            "loss {:.4}  {:.0} tokens/s  lr {:.1e}",
            now.loss, now.tokens_per_second, now.learning_rate
        );
        if now.step % 100 == 0 {
            progress.line(&format!("{} tokens: {message}", now.tokens));
        }
        progress.update(now.tokens, length, &message);
        if now.tokens >= stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .context("supervised training failed")?;
    progress.finish();
    if let Some(last) = last {
        output::say(format!("loss {:.4} after {} tokens", last.loss, last.tokens));
    }
    Ok(())
}

fn save(model: &TrainModel<f32>, tokenizer: &Utf8Path, out: &Utf8Path) -> anyhow::Result<()> {
    save_checkpoint(out, &model.weights()?, StoredType::Bf16, Some(tokenizer))?;
    Ok(())
}
