//! The text of a reply while it is sampled, and how much of it was sent.

use crate::sampler::Sampled;
use tokio::sync::watch;

/// Shows the text of a reply to its client while it is sampled.
#[derive(Debug)]
pub struct TextSink(watch::Sender<SampledText>);

/// What a [`TextSink`] shows.
#[derive(Debug)]
pub struct ShownText(watch::Receiver<SampledText>);

/// The thinking and the text of a reply as far as they are sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampledText {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Number of the reply among all of the episode.
    pub number: u32,
    /// Thinking, without its markers.
    pub reasoning: String,
    /// Text for the user.
    pub content: String,
}

impl ShownText {
    /// Waits for new text; `false` if there will be none. May be dropped and called again.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }

    /// All text so far.
    pub fn now(&mut self) -> watch::Ref<'_, SampledText> {
        self.0.borrow_and_update()
    }
}

impl TextSink {
    /// A sink, and what it shows.
    pub fn new() -> (Self, ShownText) {
        let (sender, receiver) = watch::channel(SampledText::default());
        (Self(sender), ShownText(receiver))
    }

    /// Shows all thinking and text of the reply so far, the number of tokens of its prompt, and the reply's
    /// own number. `false` if no one reads it any more.
    ///
    /// If a later call does not continue what an earlier one showed, the client is sent nothing more
    /// until the reply is complete.
    pub fn show(&self, prompt: usize, number: u32, reasoning: &str, content: &str) -> bool {
        self.0.send_if_modified(|text| {
            (text.prompt, text.number) = (prompt, number);
            let is_new = text.reasoning != reasoning || text.content != content;
            replace(&mut text.reasoning, reasoning);
            replace(&mut text.content, content);
            is_new
        });
        !self.0.is_closed()
    }
}

/// Makes `text` equal to `new`, which usually continues it.
fn replace(text: &mut String, new: &str) {
    if let Some(more) = new.strip_prefix(text.as_str()) {
        text.push_str(more);
    } else {
        new.clone_into(text);
    }
}

/// What a stream has sent of a reply.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Number of events, keep-alives included.
    pub(crate) events: usize,
    pub(crate) reasoning: String,
    pub(crate) content: String,
}

impl Sent {
    /// Whether text was sent, so that the reply has begun.
    pub(crate) fn has_text(&self) -> bool {
        !self.reasoning.is_empty() || !self.content.is_empty()
    }

    /// Whether a reply with this thinking and text goes on where the stream is. Thinking ends when
    /// text begins.
    pub(crate) fn is_continued_by(&self, reasoning: &str, content: &str) -> bool {
        let thinks_on = if self.content.is_empty() {
            reasoning.starts_with(&self.reasoning)
        } else {
            reasoning == self.reasoning
        };
        thinks_on && content.starts_with(&self.content)
    }

    /// Notes that `events` with this text were sent.
    pub(crate) fn add(&mut self, events: usize, text: &SampledText) {
        self.events += events;
        replace(&mut self.reasoning, &text.reasoning);
        replace(&mut self.content, &text.content);
    }

    /// The thinking that was not sent yet.
    pub(crate) fn more_reasoning<'a>(&self, whole: &'a str) -> &'a str {
        whole.strip_prefix(self.reasoning.as_str()).unwrap_or_default()
    }

    /// The text that was not sent yet.
    pub(crate) fn more_content<'a>(&self, whole: &'a str) -> &'a str {
        whole.strip_prefix(self.content.as_str()).unwrap_or_default()
    }

    /// Whether `reply` goes on where the stream is.
    pub(crate) fn is_continued_by_reply(&self, reply: &Sampled) -> bool {
        let reasoning = reply.reasoning.as_deref().unwrap_or_default();
        self.is_continued_by(reasoning, &reply.content)
    }
}
