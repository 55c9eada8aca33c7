//! A model's tokenizer and chat template: prompt, delta, assistant text.
//!
//! The invariant: token in, token out. What the policy sampled is never rendered again; only the
//! *delta* (the environment's new messages and the next assistant header) becomes tokens. It is
//! what a conversation has after a placeholder that stands for the sampled text. Read
//! [`crate::prefix`] next (what templates do with earlier turns), then [`crate::supervised`], which
//! builds training data through the same functions.

use crate::api::{Action, Message};
use crate::codec::Codec;
use crate::prefix::{History, Thinking};
use crate::scaffold::Scaffold;
use crate::template::{ChatTemplate, tools_shown};
use aho_corasick::AhoCorasick;
use camino::{Utf8Path, Utf8PathBuf};
use lru::LruCache;
use orchestrate_types::TokenId;
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use tokenizers::Tokenizer;

/// Stands for the sampled text while a delta is derived; no template changes it.
const MARK: &str = "ORCHESTRATE-SAMPLED-TEXT";

/// Opening prompts whose tokens are kept: those of the groups that begin at about the same time.
const KEPT_PROMPTS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// What is wrong with a model's tokenizer, template or their use.
#[derive(Debug, thiserror::Error)]
pub enum ChatErrorKind {
    /// A file cannot be read or written.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A file does not hold what it must.
    #[error("{file}: {problem}")]
    Invalid {
        /// File name.
        file: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The template failed on a conversation.
    #[error("the chat template failed: {0}")]
    Template(#[from] minijinja::Error),
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The template rewrites or drops earlier turns.
    #[error(
        "the chat template does not keep earlier turns as they were ({0}); training token by token \
         needs a template that appends, and drops nothing but the thinking of earlier turns: remove \
         the part that drops or rewrites other text"
    )]
    NotAppendOnly(String),
    /// Thinking cannot be left out of earlier turns as the template does it.
    #[error(
        "the chat template drops the thinking of earlier turns, and {0} is not one token of the \
         tokenizer, at which it could be cut; use rollout.history = \"sampled\""
    )]
    ThinkingIsNoToken(&'static str),
}

/// A chat error: which model folder, and why.
#[derive(Debug, thiserror::Error)]
#[error("chat model {folder}: {kind}")]
pub struct ChatError {
    /// Folder of the model.
    pub folder: Utf8PathBuf,
    /// What happened.
    pub kind: ChatErrorKind,
}

/// What a chat model is for.
#[derive(Debug, Clone, Default)]
pub struct ChatUse {
    /// JSON schemas of tools that the template shows to the model.
    pub tools: Vec<serde_json::Value>,
    /// Whose observations the template is to render.
    pub scaffold: Scaffold,
    /// What becomes of earlier turns.
    pub history: History,
}

/// A tokenizer with its chat template.
#[derive(Debug)]
pub struct ChatModel {
    folder: Utf8PathBuf,
    /// Tokens by rendered text. All members of a group open with the same one, and to cut it into
    /// tokens takes as long as several turns.
    prompts: Mutex<LruCache<String, Arc<[TokenId]>>>,
    pub(crate) codec: Codec,
    pub(crate) template: ChatTemplate,
    pub(crate) purpose: ChatUse,
    pub(crate) thinking: Thinking,
    end_of_turn: TokenId,
    end_of_turn_text: String,
    stop_token_ids: Vec<TokenId>,
    control_texts: Vec<String>,
    /// All of them at once: nearly no text has any, and observations are long.
    any_control_text: AhoCorasick,
    /// The purpose's tools, as the template sees them.
    tools: minijinja::Value,
}

impl ChatModel {
    /// Loads the model of a folder for the scaffold of native tool calls; as [`Self::load_for`].
    ///
    /// # Errors
    /// As [`Self::load_for`].
    pub fn load(folder: &Utf8Path) -> Result<Self, ChatError> {
        Self::load_for(folder, ChatUse::default())
    }

    /// Loads `tokenizer.json`, the chat template (`chat_template.jinja`, else the field
    /// `chat_template` of `tokenizer_config.json`) and the end tokens (`generation_config.json`,
    /// else `eos_token` of `tokenizer_config.json`) of a Hugging Face folder, and checks that the
    /// template keeps earlier turns: what it renders for two finished turns is the prompt, the first
    /// turn as it was written, the delta, the second turn, the next delta. Only the thinking of
    /// earlier turns may be dropped; `purpose.history` says what becomes of it then.
    ///
    /// # Errors
    /// When a file is absent or malformed, or the template drops or rewrites other text.
    pub fn load_for(folder: &Utf8Path, purpose: ChatUse) -> Result<Self, ChatError> {
        let run = || {
            let mut model = Self::read(folder, purpose)?;
            model.thinking = model.find_thinking()?;
            Ok(model)
        };
        run().map_err(|kind| ChatError { folder: folder.to_owned(), kind })
    }

    fn read(folder: &Utf8Path, purpose: ChatUse) -> Result<Self, ChatErrorKind> {
        let tokenizer = Tokenizer::from_bytes(fs_err::read(folder.join("tokenizer.json"))?)
            .map_err(|e| invalid("tokenizer.json", e.to_string()))?;
        let config = json_file(folder, "tokenizer_config.json")?;
        let template = ChatTemplate::new(&template_source(folder, &config)?)?;

        let mut stop_token_ids = Vec::new();
        if folder.join("generation_config.json").is_file() {
            let generation = json_file(folder, "generation_config.json")?;
            let eos = generation.get("eos_token_id").cloned().unwrap_or_default();
            let ids = eos.as_array().cloned().unwrap_or_else(|| vec![eos]);
            stop_token_ids.extend(
                ids.iter().filter_map(|id| id.as_u64().and_then(|i| u32::try_from(i).ok())),
            );
        }
        let eos = config.get("eos_token");
        let eos = eos.and_then(|eos| eos.as_str().or_else(|| eos.get("content")?.as_str()));
        if let Some(id) = eos.and_then(|text| tokenizer.token_to_id(text))
            && !stop_token_ids.contains(&id)
        {
            stop_token_ids.push(id);
        }

        let control_texts: Vec<String> = tokenizer
            .get_added_tokens_decoder()
            .values()
            .filter(|token| token.special || is_tag(&token.content))
            .map(|token| token.content.clone())
            .filter(|text| text.chars().count() > 1)
            .collect();
        let any_control_text = AhoCorasick::new(&control_texts)
            .map_err(|e| invalid("tokenizer.json", e.to_string()))?;
        let mut model = Self {
            any_control_text,
            tools: tools_shown(&purpose.tools),
            folder: folder.to_owned(),
            prompts: Mutex::new(LruCache::new(KEPT_PROMPTS)),
            codec: Codec::new(tokenizer),
            template,
            purpose,
            thinking: Thinking::Kept,
            end_of_turn: 0,
            end_of_turn_text: String::new(),
            stop_token_ids,
            control_texts,
        };
        let role = model.purpose.scaffold.observation_role();
        let closing = model.after_mark(&[message(role, "x")])?;
        let found = model.stop_token_ids.iter().find_map(|&id| {
            let text = model.codec.tokenizer().id_to_token(id)?;
            closing.starts_with(&text).then_some((id, text))
        });
        (model.end_of_turn, model.end_of_turn_text) = found.ok_or_else(|| {
            invalid(
                "generation_config.json",
                "no eos token closes an assistant turn in the chat template; name the token that \
                 does as eos_token_id"
                    .to_owned(),
            )
        })?;
        Ok(model)
    }

    /// Token that closes an assistant turn in the template.
    pub fn end_of_turn(&self) -> TokenId {
        self.end_of_turn
    }

    /// Tokens at which sampling stops; [`Self::end_of_turn`] is one of them.
    pub fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop_token_ids
    }

    /// Number of entries of the tokenizer, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.codec.tokenizer().get_vocab_size(true)
    }

    /// Tokens of `text`, nothing added.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.encode_inner(text).map_err(|kind| self.error(kind))
    }

    /// Tokens of the opening messages and the header of the first assistant turn.
    ///
    /// # Errors
    /// When the template or the tokenizer fails.
    pub fn prompt(&self, messages: &[Message]) -> Result<Arc<[TokenId]>, ChatError> {
        let run = || {
            let text = self.render(messages)?;
            let prompts = || self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = prompts().get(&text) {
                return Ok(Arc::clone(known));
            }
            let ids: Arc<[TokenId]> = self.encode_inner(&text)?.into();
            prompts().put(text, Arc::clone(&ids));
            Ok(ids)
        };
        run().map_err(|kind| self.error(kind))
    }

    /// Tokens to append after a sampled turn: the environment's new messages and the header of
    /// the next assistant turn. `last_sampled` is the last token of the reply: unless it is
    /// [`Self::end_of_turn`], the closing token is part of the delta (which nobody sampled).
    ///
    /// # Errors
    /// When the template or the tokenizer fails.
    pub fn delta(
        &self,
        new_messages: &[Message],
        last_sampled: Option<TokenId>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let run = || {
            let text = self.after_mark(new_messages)?;
            let closed = last_sampled == Some(self.end_of_turn);
            let rest = if closed { text.strip_prefix(&self.end_of_turn_text) } else { None };
            self.encode_inner(rest.unwrap_or(&text))
        };
        run().map_err(|kind| self.error(kind))
    }

    /// Text of sampled ids, a closing end token left out. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, ChatError> {
        let ids = match ids.split_last() {
            Some((last, rest)) if self.stop_token_ids.contains(last) => rest,
            Some(_) | None => ids,
        };
        self.codec.decode(ids).map_err(|e| self.error(ChatErrorKind::Tokenizer(e.to_string())))
    }

    /// Tokens of an assistant turn as the model's own format writes it, closing token included.
    /// For supervised data; a sampled turn is never built this way.
    ///
    /// # Errors
    /// When the template or the tokenizer fails, or the template does not show the turn.
    pub fn assistant(&self, content: &str, calls: &[Action]) -> Result<Vec<TokenId>, ChatError> {
        let run = || {
            let mut ids = self.encode_inner(&self.assistant_text(content, calls)?)?;
            ids.push(self.end_of_turn);
            Ok(ids)
        };
        run().map_err(|kind| self.error(kind))
    }

    /// What the template writes after an assistant turn when `new_messages` follow it.
    pub(crate) fn after_mark(&self, new_messages: &[Message]) -> Result<String, ChatErrorKind> {
        let mut messages = vec![message("user", "x"), message("assistant", MARK)];
        messages.extend_from_slice(new_messages);
        let text = self.render(&messages)?;
        match text.split_once(MARK) {
            Some((_, after)) => Ok(after.to_owned()),
            None => Err(ChatErrorKind::NotAppendOnly("an assistant turn is not shown".to_owned())),
        }
    }

    /// An assistant turn's text. A tool message follows it, because some templates treat the last
    /// message of a conversation differently.
    fn assistant_text(&self, content: &str, calls: &[Action]) -> Result<String, ChatErrorKind> {
        let opening = message("user", "x");
        let before = self.render(std::slice::from_ref(&opening))?;
        let turn = Message {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            tool_calls: calls.to_vec(),
        };
        let text = self.render(&[opening, turn, message("tool", "x")])?;
        let shown = text.strip_prefix(&before).and_then(|t| t.split_once(&self.end_of_turn_text));
        match shown {
            Some((turn, _)) => Ok(turn.to_owned()),
            None => Err(ChatErrorKind::NotAppendOnly("an assistant turn is not shown".to_owned())),
        }
    }

    pub(crate) fn render(&self, messages: &[Message]) -> Result<String, ChatErrorKind> {
        let safe: Vec<_> = messages.iter().map(|m| self.without_control_texts(m)).collect();
        let safe = safe.iter().map(AsRef::as_ref);
        Ok(self.template.render_shown(safe, self.tools.clone(), true)?)
    }

    /// Text from outside must not become control tokens: a file that holds the model's
    /// end-of-turn text would otherwise write turns of its own. Such text gets a space after its
    /// first character.
    fn without_control_texts<'a>(&self, message: &'a Message) -> Cow<'a, Message> {
        if message.role == "assistant" || !self.any_control_text.is_match(&message.content) {
            return Cow::Borrowed(message);
        }
        let mut message = message.clone();
        for text in &self.control_texts {
            if message.content.contains(text.as_str()) {
                let mut broken = text.clone();
                broken.insert(text.chars().next().map_or(0, char::len_utf8), ' ');
                message.content = message.content.replace(text.as_str(), &broken);
            }
        }
        Cow::Owned(message)
    }

    pub(crate) fn encode_inner(&self, text: &str) -> Result<Vec<TokenId>, ChatErrorKind> {
        self.codec.encode(text).map_err(|e| ChatErrorKind::Tokenizer(e.to_string()))
    }

    fn error(&self, kind: ChatErrorKind) -> ChatError {
        ChatError { folder: self.folder.clone(), kind }
    }
}

/// Whether an added token is markup, like `<think>`, and no word or run of blanks.
fn is_tag(token: &str) -> bool {
    token.starts_with('<') && token.ends_with('>')
}

pub(crate) fn message(role: &str, content: &str) -> Message {
    Message { role: role.to_owned(), content: content.to_owned(), tool_calls: Vec::new() }
}

fn invalid(file: &'static str, problem: String) -> ChatErrorKind {
    ChatErrorKind::Invalid { file, problem }
}

fn json_file(folder: &Utf8Path, name: &'static str) -> Result<serde_json::Value, ChatErrorKind> {
    let text = fs_err::read_to_string(folder.join(name))?;
    serde_json::from_str(&text).map_err(|e| invalid(name, e.to_string()))
}

fn template_source(folder: &Utf8Path, config: &serde_json::Value) -> Result<String, ChatErrorKind> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        return Ok(fs_err::read_to_string(file)?);
    }
    let template = config.get("chat_template");
    let named = || {
        let list = template?.as_array()?;
        let default =
            |entry: &&serde_json::Value| entry.get("name").is_some_and(|name| name == "default");
        list.iter().find(default)?.get("template")?.as_str()
    };
    template.and_then(|t| t.as_str()).or_else(named).map(ToOwned::to_owned).ok_or_else(|| {
        invalid(
            "tokenizer_config.json",
            "has no chat_template, and there is no chat_template.jinja".to_owned(),
        )
    })
}
