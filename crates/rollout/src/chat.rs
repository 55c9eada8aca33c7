//! A model's tokenizer and chat template: messages become the tokens of prompts.
//!
//! The first prompt of an episode is the rendered opening. Later ones append the *delta*: the
//! tokens of the environment's new messages and the next assistant header. To find the delta, the
//! template renders a conversation in which a placeholder stands for the sampled text; the delta is
//! what follows the placeholder.
//!
//! The invariant: token in, token out. What the policy sampled is never rendered or tokenized
//! again.
//!
//! Read [`crate::prefix`] next (what templates do with earlier turns), then [`crate::expert`],
//! which builds training data with the same functions.

use crate::api::{Action, Message, MessageExtra};
use crate::codec::Codec;
use crate::model_files::{
    TOKENIZER_CONFIG, TemplateSources, end_token_ids, json_file, malformed, special_tokens,
};
use crate::prefix::{History, ProbedThinking};
use crate::scaffold::Scaffold;
use crate::system_messages::SystemMessages;
use crate::template::{ChatTemplate, ShownExtras, TemplateInput, with_strings};
use crate::tool_format::{ToolFormat, probe_tool};
use aho_corasick::AhoCorasick;
use camino::{Utf8Path, Utf8PathBuf};
use jiff::Timestamp;
use lru::LruCache;
use orchestrate_types::TokenId;
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Stands for the sampled text while a delta is derived. Templates render it unchanged.
const PLACEHOLDER: &str = "ORCHESTRATE-SAMPLED-TEXT";
/// How often the placeholder is doubled while a prompt contains it elsewhere: in the end it is longer than any request.
const LONGER_PLACEHOLDERS: usize = 20;

/// Tokens at the end of a prompt in which `<think>` and the line break after it lie.
const THINKING_HEADER_TOKENS: usize = 16;

/// Number of opening prompts whose tokens are cached: enough for the groups that start together.
const CACHED_PROMPTS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// Kinds of errors of a model's tokenizer or chat template.
#[derive(Debug, thiserror::Error)]
pub enum ChatErrorKind {
    /// A file could not be read or written.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// A file has the wrong format.
    #[error("{file}: {source}")]
    Malformed {
        /// Name of the file.
        file: &'static str,
        /// The parser's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file lacks something that is needed.
    #[error("{file}: {problem}")]
    Incomplete {
        /// Name of the file.
        file: &'static str,
        /// The missing part, and what to do about it.
        problem: &'static str,
    },
    /// The template failed on a conversation.
    #[error("the chat template failed: {0}")]
    Template(#[from] minijinja::Error),
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(#[source] tokenizers::Error),
    /// The template rewrites or drops earlier turns.
    #[error(
        "the chat template does not keep earlier turns unchanged ({0}); training on sampled tokens \
         requires a template that only appends and drops at most the thinking of earlier turns: \
         remove the part that drops or rewrites other text"
    )]
    NotAppendOnly(String),
    /// The template drops thinking, but its markup is not a token at which it can be cut.
    #[error(
        "the chat template drops the thinking of earlier turns, but {0} is not a single token of \
         the tokenizer, so the thinking cannot be cut there; set rollout.history = \"sampled\""
    )]
    ThinkingIsNotOneToken(&'static str),
    /// Tool calls rendered by the template cannot be read back unchanged.
    #[error(
        "the chat template shows tool calls in a format that is not known exactly (known: JSON or \
         <function=NAME> between <tool_call> tags), so the policy's calls could not be read; set \
         rollout.scaffold to \"r2e-xml\" or \"mini\", or rollout.show_tools = false with a prompt that \
         describes the tools"
    )]
    UnknownToolFormat,
    /// The template reads a special token that the tokenizer does not declare.
    #[error(
        "the chat template reads {0}, which neither tokenizer_config.json nor special_tokens_map.json \
         declares; add it there (null if the tokenizer has none), or prompts would lack it"
    )]
    UnknownVariable(String),
    /// A setting asks for thinking or for none, and the template cannot be told.
    #[error(
        "rollout.thinking is set, but the chat template has no switch for thinking (enable_thinking or \
         thinking); remove the setting, or use a template with a switch"
    )]
    NoThinkingSwitch,
}

/// An error of a model's tokenizer or chat template.
#[derive(Debug, thiserror::Error)]
#[error("chat model {folder}: {kind}")]
pub struct ChatError {
    /// Folder of the model.
    pub folder: Utf8PathBuf,
    /// The kind of error, with its details.
    #[source]
    pub kind: ChatErrorKind,
}

/// How a chat model is used in a run.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// JSON schemas of the tools that the template shows to the model; may be empty.
    pub tools: Vec<serde_json::Value>,
    /// The scaffold, whose observations the template renders.
    pub scaffold: Scaffold,
    /// Content of earlier turns in prompts.
    pub history: History,
    /// Whether the model is asked to think; `None` leaves it to each request of an agent, and else to
    /// the template.
    pub thinking: Option<bool>,
    /// The date that the template can show: when the run began, so that it renders the same prompts when
    /// it is resumed on another day. `None` is the current date.
    pub date: Option<Timestamp>,
}

/// A chat template, and what is known about it from probes.
#[derive(Debug)]
pub(crate) struct ProbedTemplate {
    pub(crate) template: ChatTemplate,
    /// The tools and the switch that it is probed with.
    input: TemplateInput,
    pub(crate) thinking: Vec<ProbedThinking>,
    system_messages: SystemMessages,
    shown_extras: ShownExtras,
}

impl ProbedTemplate {
    fn new(template: ChatTemplate, input: TemplateInput) -> Self {
        let system_messages =
            SystemMessages::of(|messages| template.render_input(messages, &input, true));
        if !system_messages.allows_all() {
            tracing::info!(
                rule = ?system_messages,
                "system messages that the chat template does not allow are merged or \
                become messages of the user"
            );
        }
        let shown_extras = template.shown_extras(&input);
        Self { template, input, thinking: Vec::new(), system_messages, shown_extras }
    }
}

/// A tokenizer with its chat template.
#[derive(Debug)]
pub struct ChatModel {
    folder: Utf8PathBuf,
    /// Tokens by rendered text. All episodes of a group share their opening prompt, and tokenizing
    /// it takes as long as several turns.
    prompts: Mutex<LruCache<String, Arc<[TokenId]>>>,
    pub(crate) codec: Codec,
    pub(crate) options: ChatOptions,
    /// Renders all prompts, or those without tools if there is `tool_use`.
    plain: ProbedTemplate,
    /// Renders the prompts with tools, if the model has a template for them and the prompts of the run may
    /// have tools or none, as those of an agent.
    tool_use: Option<ProbedTemplate>,
    tool_format: Option<ToolFormat>,
    shows_tools_of_requests: OnceLock<bool>,
    end_of_turn: TokenId,
    end_of_turn_text: String,
    stop_token_ids: Vec<TokenId>,
    control_texts: Vec<String>,
    /// Searches for all of them at once: observations are long and nearly none has any.
    any_control_text: AhoCorasick,
    /// The tools and the switch of `options`, as the template reads them.
    pub(crate) input: TemplateInput,
}

impl ChatModel {
    /// Loads a model for the `tools` scaffold, without showing it tools; see [`Self::load_for`].
    ///
    /// # Errors
    /// Same as [`Self::load_for`].
    pub fn load(folder: &Utf8Path) -> Result<Self, ChatError> {
        Self::load_for(folder, ChatOptions::default())
    }

    /// Loads a model from a Hugging Face folder and checks its chat template.
    ///
    /// Reads `tokenizer.json`, the chat template (`chat_template.jinja` and
    /// `additional_chat_templates/*.jinja`, else the field `chat_template` of `tokenizer_config.json`;
    /// of several, `tool_use` for prompts with tools and else `default`) and the end tokens (`generation_config.json`,
    /// else `eos_token` of `tokenizer_config.json`). The template must keep earlier turns: for two
    /// finished turns it must render the prompt, the first turn as written, the delta, the second
    /// turn and the next delta. It may only drop the thinking of earlier turns; `options.history`
    /// says whether prompts then drop it too.
    ///
    /// If the policy's tool calls are read, calls rendered by the template must be read back
    /// unchanged.
    ///
    /// # Errors
    /// If a file is missing or malformed, or if the template drops or rewrites other text, or shows
    /// calls in a format other than those of [`ToolFormat`].
    pub fn load_for(folder: &Utf8Path, options: ChatOptions) -> Result<Self, ChatError> {
        let run = || {
            let mut model = Self::read(folder, options)?;
            model.plain.thinking = model.probe_thinking(&model.plain.input)?;
            if let Some(input) = model.tool_use.as_ref().map(|tool_use| tool_use.input.clone()) {
                let thinking = model.probe_thinking(&input)?;
                model
                    .tool_use
                    .iter_mut()
                    .for_each(|tool_use| tool_use.thinking.clone_from(&thinking));
            }
            let shown = model.tool_use.as_ref().unwrap_or(&model.plain);
            let format = ToolFormat::of(|calls| model.assistant_text("", calls, &shown.input));
            let reads_calls = match model.options.scaffold {
                Scaffold::Tools => !model.options.tools.is_empty(),
                Scaffold::Command => true,
                // Requests with tools are refused later, one by one.
                Scaffold::External | Scaffold::R2eXml | Scaffold::Mini => false,
            };
            model.tool_format = format.ok().flatten();
            if reads_calls && model.tool_format.is_none() {
                return Err(ChatErrorKind::UnknownToolFormat);
            }
            Ok(model)
        };
        run().map_err(|kind| ChatError { folder: folder.to_owned(), kind })
    }

    fn read(folder: &Utf8Path, mut options: ChatOptions) -> Result<Self, ChatErrorKind> {
        let tokenizer = Codec::read(&fs_err::read(folder.join("tokenizer.json"))?)
            .map_err(|source| ChatErrorKind::Malformed { file: "tokenizer.json", source })?;
        let config = json_file(folder, TOKENIZER_CONFIG)?;
        let special = special_tokens(folder, &config)?;
        let sources = TemplateSources::read(folder, &config)?;
        let date = options.date.unwrap_or_else(Timestamp::now);
        let compile = |source: &str| {
            let template = ChatTemplate::with_variables(source, &special, date)?;
            let is_unknown = |name: &&str| name.ends_with("_token") && !special.contains_key(*name);
            if let Some(name) = template.reads().filter(is_unknown).min() {
                return Err(ChatErrorKind::UnknownVariable(name.to_owned()));
            }
            if options.thinking.is_some() && !template.switches_thinking() {
                return Err(ChatErrorKind::NoThinkingSwitch);
            }
            Ok(template)
        };
        let plain = compile(sources.for_prompts(!options.tools.is_empty())?)?;
        let tool_use = match (options.scaffold, &sources.tool_use) {
            (Scaffold::Command | Scaffold::External, Some(source)) => Some(compile(source)?),
            _ => None,
        };

        let mut stop_token_ids = end_token_ids(folder)?;
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
        let any_control_text =
            AhoCorasick::new(&control_texts).map_err(|e| malformed("tokenizer.json", e))?;
        let broken = |text: &str| broken_control_texts(text, &any_control_text, &control_texts);
        let tools = options.tools.iter().map(|tool| with_strings(tool, &broken)).collect();
        options.tools = tools;
        let input = TemplateInput::new(&options.tools, options.thinking);
        let probe = TemplateInput::new(&[probe_tool()], options.thinking);
        let mut model = Self {
            any_control_text,
            plain: ProbedTemplate::new(plain, input.clone()),
            tool_use: tool_use.map(|template| ProbedTemplate::new(template, probe)),
            input,
            folder: folder.to_owned(),
            prompts: Mutex::new(LruCache::new(CACHED_PROMPTS)),
            codec: Codec::new(tokenizer),
            options,
            tool_format: None,
            shows_tools_of_requests: OnceLock::new(),
            end_of_turn: 0,
            end_of_turn_text: String::new(),
            stop_token_ids,
            control_texts,
        };
        (model.end_of_turn, model.end_of_turn_text) = model.closing_token(&model.plain)?;
        if let Some(tool_use) = &model.tool_use
            && model.closing_token(tool_use)?.0 != model.end_of_turn
        {
            return Err(ChatErrorKind::Incomplete {
                file: TOKENIZER_CONFIG,
                problem: "the chat templates default and tool_use close an assistant turn with \
                          different tokens; change one of them",
            });
        }
        Ok(model)
    }

    /// The end token, and its text, that closes an assistant turn in a template.
    fn closing_token(&self, template: &ProbedTemplate) -> Result<(TokenId, String), ChatErrorKind> {
        let role = self.options.scaffold.observation_role();
        let closing = self.text_after_turn(&[message(role, "x")], &template.input)?;
        let found = self.stop_token_ids.iter().find_map(|&id| {
            let text = self.codec.tokenizer().id_to_token(id)?;
            closing.starts_with(&text).then_some((id, text))
        });
        found.ok_or(ChatErrorKind::Incomplete {
            file: "generation_config.json",
            problem: "no eos token closes an assistant turn of the chat template; set eos_token_id \
                      to the token that does",
        })
    }

    /// The template that renders prompts with this input.
    pub(crate) fn template_for(&self, input: &TemplateInput) -> &ProbedTemplate {
        self.template_with(!input.tools.is_none())
    }

    /// The template of prompts with tools, or of those without.
    fn template_with(&self, has_tools: bool) -> &ProbedTemplate {
        self.tool_use.as_ref().filter(|_| has_tools).unwrap_or(&self.plain)
    }

    /// Whether every template of the run can switch thinking on and off.
    pub(crate) fn switches_thinking(&self) -> bool {
        let mut all = std::iter::once(&self.plain).chain(&self.tool_use);
        all.all(|each| each.template.switches_thinking())
    }

    /// The format in which the template shows tool calls; the default format if it is not a known
    /// one.
    pub fn tool_format(&self) -> ToolFormat {
        self.tool_format.unwrap_or_default()
    }

    /// Whether the template shows tool calls in a known format.
    pub(crate) fn reads_tool_calls(&self) -> bool {
        self.tool_format.is_some()
    }

    /// Whether the template shows the tools that it is given.
    pub fn shows_tools(&self) -> bool {
        let opening = [message("user", "x")];
        let template = &self.template_for(&self.input).template;
        let shown = |input| template.render_input(&opening, input, true).ok();
        shown(&self.input) != shown(&TemplateInput::new(&[], self.input.thinking))
    }

    /// Whether prompts of requests with tools show these, as far as a probe tells.
    pub fn shows_tools_of_requests(&self) -> bool {
        *self.shows_tools_of_requests.get_or_init(|| {
            let opening = [message("user", "x")];
            let template = &self.template_with(true).template;
            let shown = |tools: &[serde_json::Value]| {
                let input = TemplateInput::new(tools, self.options.thinking);
                template.render_input(&opening, &input, true).ok()
            };
            let without = shown(&[]);
            without.is_none() || shown(&[probe_tool()]) != without
        })
    }

    /// Parts of messages that prompts with tools, or those without, show.
    pub(crate) fn shown_extras(&self, has_tools: bool) -> ShownExtras {
        self.template_with(has_tools).shown_extras
    }

    /// The token that closes an assistant turn in the template.
    pub fn end_of_turn(&self) -> TokenId {
        self.end_of_turn
    }

    /// Tokens at which sampling stops; [`Self::end_of_turn`] is one of them.
    pub fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop_token_ids
    }

    /// Number of vocabulary entries, including added tokens.
    pub fn vocab_size(&self) -> usize {
        self.codec.tokenizer().get_vocab_size(true)
    }

    /// Token ids of `text`, without any token added around them.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.encode_inner(text).map_err(|kind| self.error(kind))
    }

    /// Token ids of the opening messages and the header of the first assistant turn.
    ///
    /// # Errors
    /// If the template or the tokenizer fails.
    pub fn prompt(&self, messages: &[Message]) -> Result<Arc<[TokenId]>, ChatError> {
        self.prompt_with(messages, &self.input)
    }

    /// Like [`Self::prompt`], with this input instead of the model's.
    pub(crate) fn prompt_with(
        &self,
        messages: &[Message],
        input: &TemplateInput,
    ) -> Result<Arc<[TokenId]>, ChatError> {
        let run = || {
            let text = self.render_with(messages, input)?;
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

    /// Token ids to append after a sampled turn: the environment's new messages and the header of
    /// the next assistant turn.
    ///
    /// `last_sampled` is the last token of the reply. Unless it is [`Self::end_of_turn`], the
    /// policy did not close its turn, and the delta starts with the closing token.
    ///
    /// # Errors
    /// If the template or the tokenizer fails.
    pub fn delta(
        &self,
        new_messages: &[Message],
        last_sampled: Option<TokenId>,
    ) -> Result<Vec<TokenId>, ChatError> {
        self.delta_with(new_messages, last_sampled, &self.input)
    }

    /// Like [`Self::delta`], with this input instead of the model's.
    pub(crate) fn delta_with(
        &self,
        new_messages: &[Message],
        last_sampled: Option<TokenId>,
        input: &TemplateInput,
    ) -> Result<Vec<TokenId>, ChatError> {
        let run = || {
            let text = self.text_after_turn(new_messages, input)?;
            let is_closed = last_sampled == Some(self.end_of_turn);
            let rest = if is_closed { text.strip_prefix(&self.end_of_turn_text) } else { None };
            self.encode_inner(rest.unwrap_or(&text))
        };
        run().map_err(|kind| self.error(kind))
    }

    /// Text of sampled ids, without a closing end token. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, ChatError> {
        let ids = match ids.split_last() {
            Some((last, rest)) if self.stop_token_ids.contains(last) => rest,
            Some(_) | None => ids,
        };
        self.codec.decode(ids).map_err(|error| self.error(ChatErrorKind::Tokenizer(error)))
    }

    /// Whether text can be read off tokens before all of them are there.
    pub(crate) fn decodes_in_parts(&self) -> bool {
        self.codec.is_byte_level()
    }

    /// The bytes of one token, if [`Self::decodes_in_parts`].
    pub(crate) fn known_bytes(&self, id: TokenId) -> &[u8] {
        self.codec.known_bytes(id)
    }

    /// Whether a prompt opens the thinking of its reply.
    pub(crate) fn opens_thinking(&self, prompt: &[TokenId]) -> bool {
        let (_, end) = prompt.split_at(prompt.len().saturating_sub(THINKING_HEADER_TOKENS));
        self.decode(end).is_ok_and(|text| text.trim_end().ends_with("<think>"))
    }

    /// The bytes of one token.
    pub(crate) fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.codec.token_bytes(id)
    }

    /// Token ids of an assistant turn in the model's own format, including the closing token.
    ///
    /// For supervised data only; a sampled turn is never built this way.
    ///
    /// # Errors
    /// If the template or the tokenizer fails, or the template does not show the turn.
    pub fn assistant(&self, content: &str, calls: &[Action]) -> Result<Vec<TokenId>, ChatError> {
        let run = || {
            let mut ids =
                self.encode_inner(&self.assistant_text(content, calls, &self.input)?)?;
            ids.push(self.end_of_turn);
            Ok(ids)
        };
        run().map_err(|kind| self.error(kind))
    }

    /// The text that the template renders after an assistant turn when `new_messages` follow it.
    pub(crate) fn text_after_turn(
        &self,
        new_messages: &[Message],
        input: &TemplateInput,
    ) -> Result<String, ChatErrorKind> {
        let shown = |placeholder: &str| {
            let mut messages = vec![message("user", "x"), message("assistant", placeholder)];
            messages.extend_from_slice(new_messages);
            self.render_with(&messages, input)
        };
        let mut placeholder = PLACEHOLDER.to_owned();
        for _ in 0..LONGER_PLACEHOLDERS {
            let text = shown(&placeholder)?;
            let mut places = text.match_indices(&placeholder);
            match (places.next(), places.next()) {
                (Some((at, turn)), None) => {
                    return Ok(text.get(at + turn.len()..).unwrap_or_default().to_owned());
                }
                (None, _) => {
                    let problem = "an assistant turn is not shown".to_owned();
                    return Err(ChatErrorKind::NotAppendOnly(problem));
                }
                // A tool or a message may have the same text, of any length.
                (Some(_), Some(_)) => placeholder.push_str(&"-".repeat(placeholder.len())),
            }
        }
        Err(ChatErrorKind::NotAppendOnly("an assistant turn is shown twice".to_owned()))
    }

    /// Rendered text of an assistant turn. A tool message follows it in the rendering, because some
    /// templates treat the last message of a conversation differently.
    fn assistant_text(
        &self,
        content: &str,
        calls: &[Action],
        input: &TemplateInput,
    ) -> Result<String, ChatErrorKind> {
        let opening = message("user", "x");
        let before = self.render_with(std::slice::from_ref(&opening), input)?;
        let turn = Message {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            tool_calls: calls.to_vec(),
            ..Message::default()
        };
        let text = self.render_with(&[opening, turn, message("tool", "x")], input)?;
        let shown = text.strip_prefix(&before).and_then(|t| t.split_once(&self.end_of_turn_text));
        match shown {
            Some((turn, _)) => Ok(turn.to_owned()),
            None => Err(ChatErrorKind::NotAppendOnly("an assistant turn is not shown".to_owned())),
        }
    }

    pub(crate) fn render_with(
        &self,
        messages: &[Message],
        input: &TemplateInput,
    ) -> Result<String, ChatErrorKind> {
        let safe = self.without_control_tokens(messages);
        let ProbedTemplate { template, system_messages, .. } = self.template_for(input);
        Ok(template.render_input(&system_messages.arrange(safe), input, true)?)
    }

    /// The input for an agent's tools, and for what its prompts ask for. Control tokens in tools are
    /// broken: a description could otherwise inject turns, like a message.
    pub(crate) fn input_of(
        &self,
        tools: &[serde_json::Value],
        thinking: Option<bool>,
    ) -> TemplateInput {
        let safe = |tool| with_strings(tool, &|text| self.break_control_texts(text));
        TemplateInput::new(&tools.iter().map(safe).collect::<Vec<_>>(), thinking)
    }

    /// The message without control tokens, except in the text of an assistant message, whose caller knows
    /// whether the policy wrote it. A file with the model's end-of-turn text in it could otherwise inject
    /// turns. The calls of such a message are always text for the model: where the policy wrote a control
    /// token, there is no call.
    fn without_control_texts<'a>(&self, message: &'a Message) -> Cow<'a, Message> {
        let breaks_content =
            message.role != "assistant" && self.any_control_text.is_match(&message.content);
        let has_more = !message.tool_calls.is_empty() || message.extra != MessageExtra::default();
        if !breaks_content && !has_more {
            return Cow::Borrowed(message);
        }
        let text = |text: &String| self.break_control_texts(text);
        let call = |call: &Action| Action {
            name: text(&call.name),
            arguments: with_strings(&call.arguments, &|text| self.break_control_texts(text)),
        };
        let MessageExtra { reasoning, call_ids, tool_call_id, name } = &message.extra;
        Cow::Owned(Message {
            role: message.role.clone(),
            content: if breaks_content { text(&message.content) } else { message.content.clone() },
            tool_calls: message.tool_calls.iter().map(call).collect(),
            extra: MessageExtra {
                reasoning: reasoning.as_ref().map(text),
                call_ids: call_ids.iter().map(text).collect(),
                tool_call_id: tool_call_id.as_ref().map(text),
                name: name.as_ref().map(text),
            },
        })
    }

    /// The text with a space after the first character of each control token.
    pub(crate) fn break_control_texts(&self, text: &str) -> String {
        broken_control_texts(text, &self.any_control_text, &self.control_texts)
    }

    /// The messages as [`ChatModel::prompt`] shows them: without control tokens of this model, except
    /// in what the policy wrote.
    pub(crate) fn without_control_tokens(&self, messages: &[Message]) -> Vec<Message> {
        messages.iter().map(|message| self.without_control_texts(message).into_owned()).collect()
    }

    pub(crate) fn encode_inner(&self, text: &str) -> Result<Vec<TokenId>, ChatErrorKind> {
        self.codec.encode(text).map_err(ChatErrorKind::Tokenizer)
    }

    pub(crate) fn error(&self, kind: ChatErrorKind) -> ChatError {
        ChatError { folder: self.folder.clone(), kind }
    }
}

/// `text` with a space after the first character of each of the control tokens `all`, for which `any`
/// searches.
fn broken_control_texts(text: &str, any: &AhoCorasick, all: &[String]) -> String {
    let mut out = text.to_owned();
    if !any.is_match(text) {
        return out;
    }
    for control in all {
        if out.contains(control.as_str()) {
            let mut broken = control.clone();
            broken.insert(control.chars().next().map_or(0, char::len_utf8), ' ');
            out = out.replace(control.as_str(), &broken);
        }
    }
    out
}

/// Whether an added token is markup like `<think>`, and not a word or a run of spaces.
fn is_tag(token: &str) -> bool {
    token.starts_with('<') && token.ends_with('>')
}

pub(crate) fn message(role: &str, content: &str) -> Message {
    Message { role: role.to_owned(), content: content.to_owned(), ..Message::default() }
}
