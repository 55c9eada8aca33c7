//! The treatment of earlier turns by a chat template, detected by rendering probe conversations.
//!
//! The invariant: a conversation continues from the tokens that it has. The only part of earlier
//! turns that a template may drop is their thinking. [`History`] says whether our prompts drop it
//! too; if they do, the sampled tokens are cut at a [`crate::Fork`] and are never tokenized again.

use crate::chat::{ChatError, ChatErrorKind, ChatModel, message};
use crate::scaffold::Scaffold;
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

/// Treatment of earlier thinking before messages of a role, or why it is unsupported.
#[derive(Debug, Clone)]
pub(crate) struct ProbedThinking {
    /// What the prompts ask for.
    thinking: Option<bool>,
    role: &'static str,
    earlier: Result<EarlierThinking, String>,
}

/// Roles of the messages that agents send after a reply. Some templates keep thinking before results of
/// tools, and drop it before a message of the user.
const TOOL: &str = "tool";
const USER: &str = "user";

/// The role that decides about the thinking of the replies before new messages.
pub(crate) fn deciding_role<'a>(mut roles: impl Iterator<Item = &'a str>) -> &'static str {
    if roles.any(|role| role == USER) { USER } else { TOOL }
}

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
    /// Roles of the messages after the two turns.
    roles: [&'static str; 2],
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

    /// Treatment of earlier thinking in prompts with this input, before new messages of a role.
    ///
    /// # Errors
    /// If the template rewrites earlier turns in such prompts.
    pub(crate) fn earlier_thinking(
        &self,
        input: &TemplateInput,
        role: &str,
    ) -> Result<EarlierThinking, ChatError> {
        let mut probed = self.template_for(input).thinking.iter();
        let known = probed.find(|known| known.thinking == input.thinking && known.role == role);
        let known = known.map_or_else(|| Ok(EarlierThinking::Kept), |known| known.earlier.clone());
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
    ) -> Result<Vec<ProbedThinking>, ChatErrorKind> {
        let mut roles = vec![self.options.scaffold.observation_role()];
        let is_agents = matches!(self.options.scaffold, Scaffold::Command | Scaffold::External);
        if is_agents && self.options.history == History::Template {
            roles.push(USER);
        }
        let mut found = Vec::new();
        for role in roles {
            let thinking = input.thinking;
            found.push(ProbedThinking {
                thinking,
                role,
                earlier: Ok(self.detect_thinking(input, role)?),
            });
            if self.options.thinking.is_none() && self.switches_thinking() {
                for thinking in [Some(true), Some(false)] {
                    let input = TemplateInput { thinking, ..input.clone() };
                    let earlier =
                        self.detect_thinking(&input, role).map_err(|error| error.to_string());
                    found.push(ProbedThinking { thinking, role, earlier });
                }
            }
        }
        Ok(found)
    }

    /// Probes the template with plain turns and, if it mentions thinking, with turns that think, each
    /// before a message of `role`.
    fn detect_thinking(
        &self,
        input: &TemplateInput,
        role: &'static str,
    ) -> Result<EarlierThinking, ChatErrorKind> {
        let opening = [message("system", "probe system"), message("user", QUESTION)];
        let prompt = self.render_with(&opening, input)?;
        // What the prompt writes in place of the model: the start of its thinking, or none.
        let (_, reply) = prompt.rsplit_once(QUESTION).unwrap_or_default();
        let header = reply.find(OPEN).or_else(|| reply.find(CLOSE));
        let header = header.and_then(|at| reply.get(at..)).unwrap_or_default();
        let probe = Probing { input, prompt: &prompt, header, roles: [role; 2] };
        let is_closed = header.contains(CLOSE);
        if header.is_empty() || is_closed {
            let kept = self.check_turns(&PLAIN, false, probe);
            if is_closed && kept.is_err() && self.check_turns(&PLAIN, true, probe).is_ok() {
                return self.dropped(&PLAIN, probe);
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
        self.dropped(&THINKING, probe)
    }

    /// What a template does that drops the thinking of the turns of `turns`.
    fn dropped(
        &self,
        turns: &TemplateProbe,
        probe: Probing<'_>,
    ) -> Result<EarlierThinking, ChatErrorKind> {
        let header = probe.header;
        if self.options.scaffold.observation_role() == TOOL && probe.roles == [USER; 2] {
            // A message of the user drops it of all turns before, also of those before results of tools.
            self.check_turns(turns, true, Probing { roles: [TOOL, USER], ..probe })?;
        }
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
    /// header of the prompt, while the conversation grows. If different roles follow the turns, the first may
    /// have been rendered in another way before the second came.
    fn check_turns(
        &self,
        probe: &TemplateProbe,
        drops_thinking: bool,
        Probing { input, prompt, header, roles }: Probing<'_>,
    ) -> Result<(), ChatErrorKind> {
        let rendered_turns = if drops_thinking { &probe.without_thinking } else { &probe.turns };
        let mut messages = vec![message("system", "probe system"), message("user", QUESTION)];
        let mut expected = prompt.to_owned();
        let turns = probe.turns.iter().zip(rendered_turns).zip(roles);
        for (index, ((turn, shown), role)) in turns.enumerate() {
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
            if rendered != expected && (index == 1 || roles == [role; 2]) {
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
    /// from there on. `sampled` are the turn's tokens, `input` is that of its prompt, and `role` that of the
    /// messages after it.
    pub(crate) fn dropped_tokens(
        &self,
        sampled: &[TokenId],
        input: &TemplateInput,
        role: &str,
    ) -> (usize, usize) {
        let (Ok(EarlierThinking::Dropped { close, header }), History::Template) =
            (self.earlier_thinking(input, role), self.options.history)
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
