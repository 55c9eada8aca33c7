//! What a chat template does with earlier turns, found by trying it.
//!
//! The invariant: a conversation goes on from the tokens that it has. A template may leave nothing
//! out of earlier turns but their thinking; whether ours do so as well is a [`History`], and where
//! they do it is a [`crate::Fork`] at the sampled tokens, never their text made into tokens again.

use crate::chat::{ChatErrorKind, ChatModel, message};
use orchestrate_types::TokenId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// What a prompt has of earlier turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum History {
    /// All that was sampled, whatever the chat template would leave out. A conversation is one
    /// sequence, and every turn of it can be trained on.
    #[default]
    Sampled,
    /// What the chat template leaves of it. Where the thinking of an earlier turn is dropped the
    /// conversation forks: what stays of that turn is context, and is not trained on.
    Template,
}

/// What a template does with the thinking of turns that observations have answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thinking {
    /// It stays, or there is none.
    Kept,
    /// It is dropped up to token `close` and the line ends after it, and so are the last `header`
    /// tokens of a prompt, which open it.
    Dropped { close: Option<TokenId>, header: usize },
}

/// Two turns to try a template with, and how it shows them when it drops their thinking.
struct Probe {
    what: &'static str,
    turns: [&'static str; 2],
    dropped: [&'static str; 2],
}

const PLAIN: Probe = Probe {
    what: "plain turns",
    turns: ["alpha one", "beta two"],
    dropped: ["alpha one", "beta two"],
};

const THOUGHTFUL: Probe = Probe {
    what: "turns with thinking",
    turns: ["<think>\nalpha\n</think>\n\none", "<think>\nbeta\n</think>\n\ntwo"],
    dropped: ["one", "two"],
};

impl ChatModel {
    /// Tries the template with turns, plain ones and, where it knows them, thinking ones.
    pub(crate) fn find_thinking(&self) -> Result<Thinking, ChatErrorKind> {
        let header = format!("{OPEN}\n");
        let opening = [message("system", "probe system"), message("user", "probe question")];
        let prompt = self.render(&opening)?;
        let thinks_first = prompt.ends_with(&header);
        if !thinks_first {
            self.try_turns(&PLAIN, &PLAIN.turns, &prompt, "")?;
        }
        if !self.template.source().contains("think") {
            return Ok(Thinking::Kept);
        }
        let header = if thinks_first { header.as_str() } else { "" };
        let kept = self.try_turns(&THOUGHTFUL, &THOUGHTFUL.turns, &prompt, header);
        let Err(ChatErrorKind::NotAppendOnly(_)) = &kept else {
            return kept.map(|()| Thinking::Kept);
        };
        // Not as written: without the thinking, then, or the template is none for us.
        if self.try_turns(&THOUGHTFUL, &THOUGHTFUL.dropped, &prompt, header).is_err() {
            return kept.map(|()| Thinking::Kept);
        }
        let token = |text| self.codec.tokenizer().token_to_id(text);
        if self.purpose.history == History::Template {
            if token(CLOSE).is_none() {
                return Err(ChatErrorKind::ThinkingIsNoToken(CLOSE));
            }
            if thinks_first && token(OPEN).is_none() {
                return Err(ChatErrorKind::ThinkingIsNoToken(OPEN));
            }
        }
        let header = self.encode_inner(header)?.len();
        Ok(Thinking::Dropped { close: token(CLOSE), header })
    }

    /// Checks what the template renders of a probe's turns while the conversation grows. `header` is
    /// what a prompt ends with that opens the thinking.
    fn try_turns(
        &self,
        probe: &Probe,
        shown: &[&str; 2],
        prompt: &str,
        header: &str,
    ) -> Result<(), ChatErrorKind> {
        let drops = *shown != probe.turns;
        let role = self.purpose.scaffold.observation_role();
        let mut messages =
            vec![message("system", "probe system"), message("user", "probe question")];
        let mut expected = prompt.to_owned();
        for (index, (turn, shown)) in probe.turns.iter().zip(shown).enumerate() {
            let observation = message(role, &format!("probe result {index}"));
            if drops {
                expected.truncate(expected.len() - header.len());
                expected.push_str(shown);
            } else {
                expected.push_str(shown.strip_prefix(header).unwrap_or(shown));
            }
            expected.push_str(&self.after_mark(std::slice::from_ref(&observation))?);
            messages.extend([message("assistant", turn), observation]);
            let rendered = self.render(&messages)?;
            if rendered != expected {
                let differs =
                    rendered.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
                return Err(ChatErrorKind::NotAppendOnly(format!(
                    "{}, after turn {}: rendered text differs from byte {differs} of {}",
                    probe.what,
                    index + 1,
                    expected.len()
                )));
            }
        }
        Ok(())
    }

    /// Tokens that the next prompt leaves out of the last turn: before its first sampled one, and from
    /// there on.
    pub(crate) fn left_out(&self, sampled: &[TokenId]) -> (usize, usize) {
        let (Thinking::Dropped { close, header }, History::Template) =
            (self.thinking, self.purpose.history)
        else {
            return (0, 0);
        };
        let Some(end) = close.and_then(|close| sampled.iter().rposition(|id| *id == close)) else {
            return (header, 0);
        };
        let (_, answer) = sampled.split_at(end + 1);
        // A token of line ends and more is kept whole: nothing smaller was sampled.
        (header, end + 1 + answer.iter().take_while(|id| self.is_line_ends(**id)).count())
    }

    fn is_line_ends(&self, id: TokenId) -> bool {
        let text = self.codec.decode(&[id]).unwrap_or_default();
        !text.is_empty() && text.bytes().all(|byte| byte == b'\n')
    }
}
