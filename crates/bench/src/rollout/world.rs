//! The parts of an episode: a tokenizer, a script in place of a policy, tasks.

use camino::Utf8Path;
use orchestrate_rollout::{
    ChatModel, MICRO_CHAT_TEMPLATE, RolloutSection, RolloutSettings, Scaffold, opening_messages,
    train_tokenizer,
};
use orchestrate_synthetic::{EnginePlan, Latency, Script, task};
use orchestrate_tasks::Task;
use orchestrate_types::{HumanDuration, ModelShape};
use std::sync::Arc;
use std::time::Duration;

/// Layers of the model; masks are small, with 16 bytes per row.
const LAYERS: usize = 4;
const EXPERTS: usize = 64;
const TOP_K: usize = 4;
const CONTEXT: usize = 32_768;
/// Page size of the engines' prefix caches, in tokens.
const PAGE_TOKENS: usize = 16;
/// Number of words in a task's statement; a word has about five tokens.
const PROMPT_WORDS: usize = 160;
const VOCAB: usize = 400;
/// Output of every command.
const OBSERVATION: &str = "total 24\n-rw-r--r-- 1 root root 5 Jan 1 00:00 a.py\n";
const CALL_HEAD: &str = "<tool_call>{\"name\": \"bash\", \"arguments\": {\"command\": \"echo ";
const CALL_TAIL: &str = "\"}}</tool_call>";
const SUBMIT: &str = "<tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call>";
const HEADER: &str = "<|im_start|>assistant\n";

/// Number of random tokens in every turn but the last.
const DRAWN_TOKENS: usize = 64;

/// The parts that all cases share.
#[derive(Debug)]
pub(super) struct World {
    pub(super) chat: Arc<ChatModel>,
    pub(super) shape: ModelShape,
    pub(super) page_tokens: usize,
    pub(super) observation: &'static str,
}

impl World {
    /// Trains a small tokenizer into `folder`.
    pub(super) fn make(folder: &Utf8Path) -> anyhow::Result<Self> {
        let texts = [HEADER, CALL_HEAD, CALL_TAIL, SUBMIT, OBSERVATION].map(ToOwned::to_owned);
        let statements = (0..16).map(|index| task(index, PROMPT_WORDS).problem_statement);
        let corpus = texts.into_iter().cycle().take(20).chain(statements);
        train_tokenizer(corpus, VOCAB, MICRO_CHAT_TEMPLATE, folder)?;
        let chat = ChatModel::load(folder)?;
        let shape = ModelShape {
            hidden_layers: LAYERS,
            moe_layers: (0..LAYERS).collect(),
            experts: EXPERTS,
            top_k: TOP_K,
            vocab: chat.vocab_size(),
            context: CONTEXT,
        };
        let chat = Arc::new(chat);
        Ok(Self { chat, shape, page_tokens: PAGE_TOKENS, observation: OBSERVATION })
    }

    /// The engines' plan for episodes of `turns` turns.
    pub(super) fn engine_plan(&self, turns: usize, latency: Latency) -> anyhow::Result<EnginePlan> {
        let chat = &self.chat;
        let end = chat.end_of_turn();
        let closed = |text: &str| {
            let mut ids = chat.encode(text)?;
            ids.push(end);
            anyhow::Ok(ids)
        };
        let first_prompt = chat.prompt(&opening_messages(None, "x"))?;
        let script = Script {
            end_of_message: end,
            header: chat.encode(HEADER)?,
            ends_before: first_prompt.iter().filter(|token| **token == end).count(),
            ends_per_turn: 2,
            turns,
            call_head: chat.encode(CALL_HEAD)?,
            drawn: (0..10).map(|digit| digit.to_string()).try_fold(
                Vec::new(),
                |mut drawn, digit| {
                    drawn.extend(chat.encode(&digit)?);
                    anyhow::Ok(drawn)
                },
            )?,
            drawn_tokens: DRAWN_TOKENS,
            call_tail: closed(CALL_TAIL)?,
            submit: closed(SUBMIT)?,
        };
        Ok(EnginePlan {
            shape: self.shape.clone(),
            script,
            latency,
            page_tokens: self.page_tokens,
            cache_tokens: 0,
            update_ms: 20,
            tells_time: true,
        })
    }

    pub(super) fn task(index: usize) -> Arc<Task> {
        Arc::new(task(index, PROMPT_WORDS))
    }

    /// Limits that no episode reaches.
    pub(super) fn rollout_plan(
        turns: usize,
        scaffold: Scaffold,
    ) -> anyhow::Result<RolloutSettings> {
        let hours = HumanDuration(Duration::from_hours(2));
        let config = RolloutSection {
            scaffold: Some(scaffold),
            max_turns: Some(u32::try_from(turns)? + 1),
            max_sequence_tokens: Some(CONTEXT),
            max_response_tokens: Some(512),
            generate_timeout: Some(HumanDuration::secs(120)),
            episode_timeout: Some(hours),
            ..RolloutSection::default()
        };
        config.check().map_err(|problems| anyhow::anyhow!("{problems:?}"))
    }
}
