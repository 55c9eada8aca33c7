//! The treatment of earlier turns by a chat template, detected by rendering probe conversations.
//!
//! The invariant: a conversation continues from the tokens that it has. The only part of earlier
//! turns that a template may drop is their thinking. [`History`] says whether our prompts drop it
//! too; if they do, the sampled tokens are cut at a [`crate::Fork`] and are never tokenized again.

use crate::chat::{ChatError, ChatErrorKind, ChatModel, message};
use crate::template::TemplateInput;
use orchestrate_types::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Content of earlier turns in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum History {
    /// Everything that was sampled, even parts that the chat template would drop. A conversation is one
    /// sequence, and every turn of it can be trained on.
    #[default]
    Sampled,
    /// The parts that the chat template keeps. If it drops the thinking of an earlier turn, the
    /// conversation forks: the rest of that turn is context and is not trained on.
    Template,
}

/// Treatment of the thinking of turns that already have an observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EarlierThinking {
    /// It is kept, or the template has no thinking.
    Kept,
    /// It is dropped up to token `close` and the line ends after it, together with the last
    /// `header` tokens of the prompt before it, which open the thinking.
    Dropped { close: Option<TokenId>, header: usize },
}

/// Treatment of earlier thinking, or why it is unsupported, by what the prompts ask for.
pub(crate) type ProbedThinking = Vec<(Option<bool>, Result<EarlierThinking, String>)>;

/// The question of every probe.
const QUESTION: &str = "probe question";

/// What a template is probed with.
#[derive(Clone, Copy)]
struct Probing<'a> {
    input: &'a TemplateInput,
    /// The prompt of the first turn.
    prompt: &'a str,
    /// Its end, if it opens the thinking of the reply, or has opened and closed it; else empty.
    header: &'a str,
}

/// Two turns that a template is probed with, and how it renders them if it drops their thinking.
struct TemplateProbe {
    name: &'static str,
    turns: [&'static str; 2],
    without_thinking: [&'static str; 2],
}

const PLAIN: TemplateProbe = TemplateProbe {
    name: "plain turns",
    turns: ["alpha one", "beta two"],
    without_thinking: ["alpha one", "beta two"],
};

const THINKING: TemplateProbe = TemplateProbe {
    name: "turns with thinking",
    turns: ["<think>\nalpha\n</think>\n\none", "<think>\nbeta\n</think>\n\ntwo"],
    without_thinking: ["one", "two"],
};

impl ChatModel {
    /// What prompts ask for, if a request asks for thinking or for none: the run's setting decides, and
    /// a template without a switch cannot be told.
    pub(crate) fn thinking_for(&self, wanted: Option<bool>) -> Option<bool> {
        self.options.thinking.or(wanted).filter(|_| self.switches_thinking())
    }

    /// Treatment of earlier thinking in prompts with this input.
    ///
    /// # Errors
    /// If the template rewrites earlier turns in such prompts.
    pub(crate) fn earlier_thinking(
        &self,
        input: &TemplateInput,
    ) -> Result<EarlierThinking, ChatError> {
        let probed = &self.template_for(input).thinking;
        let known = probed.iter().find(|(known, _)| *known == input.thinking);
        let known = known.map_or_else(|| Ok(EarlierThinking::Kept), |(_, earlier)| earlier.clone());
        known.map_err(|problem| self.error(ChatErrorKind::NotAppendOnly(problem)))
    }

    /// Finds out what the template of this input does with earlier thinking: as the run asks for it, and
    /// if a request switches it on or off.
    ///
    /// # Errors
    /// If the template rewrites earlier turns in the run's own prompts.
    pub(crate) fn probe_thinking(
        &self,
        input: &TemplateInput,
    ) -> Result<ProbedThinking, ChatErrorKind> {
        let mut found = vec![(input.thinking, Ok(self.detect_thinking(input)?))];
        if self.options.thinking.is_none() && self.switches_thinking() {
            for switch in [true, false] {
                let input = TemplateInput { thinking: Some(switch), ..input.clone() };
                let earlier = self.detect_thinking(&input).map_err(|error| error.to_string());
                found.push((Some(switch), earlier));
            }
        }
        Ok(found)
    }

    /// Probes the template with plain turns and, if it mentions thinking, with turns that think.
    fn detect_thinking(&self, input: &TemplateInput) -> Result<EarlierThinking, ChatErrorKind> {
        let opening = [message("system", "probe system"), message("user", QUESTION)];
        let prompt = self.render_with(&opening, input)?;
        // What the prompt writes in place of the model: the start of its thinking, or none.
        let (_, reply) = prompt.rsplit_once(QUESTION).unwrap_or_default();
        let header = reply.find(OPEN).or_else(|| reply.find(CLOSE));
        let header = header.and_then(|at| reply.get(at..)).unwrap_or_default();
        let probe = Probing { input, prompt: &prompt, header };
        let is_closed = header.contains(CLOSE);
        if header.is_empty() || is_closed {
            let kept = self.check_turns(&PLAIN, false, probe);
            if is_closed && kept.is_err() && self.check_turns(&PLAIN, true, probe).is_ok() {
                return self.dropped(header);
            }
            kept?;
        }
        if is_closed || !self.template_for(input).template.source().contains("think") {
            return Ok(EarlierThinking::Kept);
        }
        let kept = self.check_turns(&THINKING, false, probe);
        let Err(ChatErrorKind::NotAppendOnly(_)) = &kept else {
            return kept.map(|()| EarlierThinking::Kept);
        };
        // The turns are not kept as written. Dropping their thinking is the only accepted change.
        if self.check_turns(&THINKING, true, probe).is_err() {
            return kept.map(|()| EarlierThinking::Kept);
        }
        self.dropped(header)
    }

    fn dropped(&self, header: &str) -> Result<EarlierThinking, ChatErrorKind> {
        let token = |text| self.codec.tokenizer().token_to_id(text);
        if self.options.history == History::Template {
            if token(CLOSE).is_none() {
                return Err(ChatErrorKind::ThinkingIsNotOneToken(CLOSE));
            }
            if header.contains(OPEN) && token(OPEN).is_none() {
                return Err(ChatErrorKind::ThinkingIsNotOneToken(OPEN));
            }
        }
        let header = self.encode_inner(header)?.len();
        Ok(EarlierThinking::Dropped { close: token(CLOSE), header })
    }

    /// Checks that the template renders a probe's turns as they are, or without their thinking and the
    /// header of the prompt, while the conversation grows.
    fn check_turns(
        &self,
        probe: &TemplateProbe,
        drops_thinking: bool,
        Probing { input, prompt, header }: Probing<'_>,
    ) -> Result<(), ChatErrorKind> {
        let rendered_turns = if drops_thinking { &probe.without_thinking } else { &probe.turns };
        let role = self.options.scaffold.observation_role();
        let mut messages = vec![message("system", "probe system"), message("user", QUESTION)];
        let mut expected = prompt.to_owned();
        for (index, (turn, shown)) in probe.turns.iter().zip(rendered_turns).enumerate() {
            let observation = message(role, &format!("probe result {index}"));
            if drops_thinking {
                expected.truncate(expected.len() - header.len());
                expected.push_str(shown);
            } else {
                expected.push_str(shown.strip_prefix(header).unwrap_or(shown));
            }
            expected.push_str(&self.text_after_turn(std::slice::from_ref(&observation), input)?);
            messages.extend([message("assistant", turn), observation]);
            let rendered = self.render_with(&messages, input)?;
            if rendered != expected {
                let differs =
                    rendered.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
                return Err(ChatErrorKind::NotAppendOnly(format!(
                    "{}, after turn {}: rendered text differs from byte {differs} of {}",
                    probe.name,
                    index + 1,
                    expected.len()
                )));
            }
        }
        Ok(())
    }

    /// How many tokens the next prompt drops before the first token of the last turn, and how many
    /// from there on. `sampled` are the turn's tokens, and `input` is that of its prompt.
    pub(crate) fn dropped_tokens(
        &self,
        sampled: &[TokenId],
        input: &TemplateInput,
    ) -> (usize, usize) {
        let (Ok(EarlierThinking::Dropped { close, header }), History::Template) =
            (self.earlier_thinking(input), self.options.history)
        else {
            return (0, 0);
        };
        let Some(end) = close.and_then(|close| sampled.iter().rposition(|id| *id == close)) else {
            return (header, 0);
        };
        let (_, answer) = sampled.split_at(end + 1);
        // A token that holds more than line ends is kept whole, because it was sampled as one.
        (header, end + 1 + answer.iter().take_while(|id| self.is_line_ends(**id)).count())
    }

    fn is_line_ends(&self, id: TokenId) -> bool {
        let text = self.codec.decode(&[id]).unwrap_or_default();
        !text.is_empty() && text.bytes().all(|byte| byte == b'\n')
    }
}
