//! What an agent asks next: everything is drawn from a seed.

use super::reference::Asked;
use super::wire::{DIALECTS, Dialect, Entry, Request};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

/// Tokens below this are drawn for prompts in tokens.
const DRAWN_TOKENS: u32 = 64;

/// A shorter reply might end before the number that tells it from others.
const FEWEST_TOKENS: usize = 48;

/// A request, in messages or in tokens.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) asked: Asked,
    /// The request of a dialect; `None` for one in tokens.
    pub(super) wire: Option<Request>,
    /// First routing row that a request in tokens asks for.
    pub(super) rows_from: Option<usize>,
    max_tokens: Option<usize>,
}

impl Question {
    /// The question, for replies of at most this many tokens.
    pub(super) fn limited(mut self, tokens: usize) -> Self {
        self.max_tokens = Some(tokens);
        if let Some(request) = &mut self.wire {
            request.max_tokens = Some(tokens);
        }
        self
    }

    pub(super) fn replies(&self) -> usize {
        self.wire.as_ref().map_or(1, |request| request.replies)
    }

    pub(super) fn stops(&self) -> &[String] {
        self.wire.as_ref().map_or(&[], |request| request.stops.as_slice())
    }

    /// Path and body.
    pub(super) fn request(&self) -> (&'static str, Value) {
        match (&self.asked, &self.wire) {
            (Asked::Messages { .. }, Some(request)) => (request.path(), request.body()),
            (Asked::Tokens(tokens), _) => {
                let parameters = json!({
                    "max_tokens": self.max_tokens,
                    "routed_experts_prompt_start": self.rows_from,
                });
                let body = json!({"token_ids": tokens, "sampling_params": parameters});
                ("/inference/v1/generate", body)
            }
            (Asked::Messages { .. }, None) => unreachable!("messages have a dialect"),
        }
    }

    /// Path and body of the request that counts the prompt's tokens, where the dialect has one.
    pub(super) fn count(&self) -> Option<(&'static str, Value)> {
        let request = self.wire.as_ref()?;
        let path = match request.dialect {
            Dialect::Chat => return None,
            Dialect::Responses => "/v1/responses/input_tokens",
            Dialect::Messages => "/v1/messages/count_tokens",
        };
        Some((path, request.body()))
    }
}

/// An agent that does with its history whatever agents do.
pub(super) struct Agent(ChaCha8Rng);

impl Agent {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.0.next_u64() % limit as u64).unwrap()
    }

    pub(super) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of these: mostly the latest, else any.
    fn earlier<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        let last = of.len().checked_sub(1)?;
        let index = if self.one_in(3) { self.below(of.len()) } else { last };
        of.get(index).cloned()
    }

    /// The next question, given everything that was said before each reply.
    pub(super) fn question(&mut self, known: &[Asked]) -> Question {
        let max_tokens = self.one_in(8).then(|| FEWEST_TOKENS + self.below(20));
        if self.one_in(5) {
            let tokens = self.tokens(known);
            let rows_from = Some(self.below(tokens.len() + 40));
            return Question { asked: Asked::Tokens(tokens), wire: None, rows_from, max_tokens };
        }
        let dialect = DIALECTS[self.below(3)];
        let (tools, history) = self.messages(known);
        let mut history =
            if dialect == Dialect::Chat { history } else { self.alternating(history) };
        for entry in &mut history {
            // The signature of thinking is the only place for a number.
            if let Entry::Reply(reply) = entry
                && (dialect != Dialect::Messages || reply.thinking.is_none())
            {
                reply.number = None;
            }
        }
        let mut stops = Vec::new();
        if dialect != Dialect::Responses && self.one_in(6) {
            // Behind the number that makes a reply unique.
            let all = ["bash\"", "l>{", "_cal"];
            stops = all[self.below(3)..].iter().map(|&stop| stop.to_owned()).collect();
        }
        let request = Request {
            dialect,
            history: history.clone(),
            tools,
            replies: if dialect == Dialect::Chat && self.one_in(5) { 3 } else { 1 },
            max_tokens,
            stops,
            streams: self.one_in(2),
        };
        let asked = Asked::Messages { tools, history };
        Question { asked, wire: Some(request), rows_from: None, max_tokens }
    }

    /// The next prompt in tokens: it goes on, was cut or was edited, or is a new one.
    fn tokens(&mut self, known: &[Asked]) -> Vec<u32> {
        let known: Vec<&Vec<u32>> = known
            .iter()
            .filter_map(|asked| match asked {
                Asked::Tokens(tokens) => Some(tokens),
                Asked::Messages { .. } => None,
            })
            .collect();
        let mut prompt = self.earlier(&known).cloned().unwrap_or_default();
        match self.below(6) {
            0 => prompt.truncate(self.below(prompt.len() + 1)),
            1 => prompt.clear(),
            2 if !prompt.is_empty() => {
                let at = self.below(prompt.len());
                prompt[at] = (prompt[at] + 1) % DRAWN_TOKENS;
            }
            _ => {}
        }
        let fresh = usize::from(prompt.is_empty()) + self.below(9);
        prompt.extend((0..fresh).map(|_| self.0.next_u32() % DRAWN_TOKENS));
        prompt
    }

    /// The next request in messages: number of tools, and history.
    fn messages(&mut self, known: &[Asked]) -> (usize, Vec<Entry>) {
        let fresh = Entry::User(format!("input {}", self.0.next_u32()));
        let known: Vec<(usize, &Vec<Entry>)> = known
            .iter()
            .filter_map(|asked| match asked {
                Asked::Messages { tools, history } => Some((*tools, history)),
                Asked::Tokens(_) => None,
            })
            .collect();
        let Some((mut tools, history)) = self.earlier(&known) else { return (0, vec![fresh]) };
        let mut history = history.clone();
        let at = self.below(history.len());
        match self.below(16) {
            0 => history = vec![Entry::System("a sub-agent".to_owned()), fresh.clone()],
            1 => tools = (tools + 1) % 3,
            // Compaction: the beginning stays, the rest is summarised.
            2 => {
                history.truncate(at + 1);
                history.push(Entry::User("so far: nothing".to_owned()));
            }
            // Thinking is dropped, as many agents do, or edited.
            3 => {
                for entry in &mut history {
                    if let Entry::Reply(reply) = entry {
                        reply.thinking = None;
                    }
                }
            }
            9 => {
                if let Entry::Reply(reply) = &mut history[at] {
                    reply.thinking = reply.thinking.take().map(|thinking| thinking + " (edited)");
                }
            }
            // The agent makes its own ids.
            10 => {
                let replies = history.iter_mut().filter_map(|entry| match entry {
                    Entry::Reply(reply) => Some(reply),
                    Entry::System(_) | Entry::User(_) | Entry::Result(_) => None,
                });
                replies.flat_map(|reply| &mut reply.calls).for_each(|call| call.id = None);
            }
            4 | 5 => match &mut history[at] {
                Entry::System(text) | Entry::User(text) | Entry::Result(text) => {
                    text.push_str(" (edited)");
                }
                Entry::Reply(reply) => reply.text.push_str(" (edited)"),
            },
            6 => {
                history.remove(at);
            }
            7 => history.insert(at, fresh.clone()),
            // The same request once more.
            8 => {
                history.pop();
                if !history.is_empty() {
                    return (tools, history);
                }
            }
            _ => {}
        }
        for _ in 0..self.below(3) {
            history.push(Entry::Result(format!("result {}", self.0.next_u32() % 100)));
        }
        let mut history = self.answered(history);
        if !matches!(history.last(), Some(Entry::User(_) | Entry::Result(_))) {
            history.push(fresh);
        }
        (tools, history)
    }

    /// The history with one result after the other for the calls of each reply. Other results become
    /// messages of the user.
    fn answered(&mut self, history: Vec<Entry>) -> Vec<Entry> {
        let (mut out, mut open) = (Vec::new(), 0);
        for entry in history {
            match entry {
                Entry::Result(text) if open > 0 => {
                    open -= 1;
                    out.push(Entry::Result(text));
                }
                Entry::Result(text) => out.push(Entry::User(text)),
                entry @ (Entry::System(_) | Entry::User(_) | Entry::Reply(_)) => {
                    self.answer(&mut out, open);
                    open = if let Entry::Reply(reply) = &entry { reply.calls.len() } else { 0 };
                    out.push(entry);
                }
            }
        }
        self.answer(&mut out, open);
        out
    }

    fn answer(&mut self, history: &mut Vec<Entry>, calls: usize) {
        for _ in 0..calls {
            history.push(Entry::Result(format!("result {}", self.0.next_u32() % 100)));
        }
    }

    /// Neighbours of one role would be one message in these dialects.
    fn alternating(&mut self, history: Vec<Entry>) -> Vec<Entry> {
        let mut out: Vec<Entry> = Vec::new();
        for entry in history {
            match (out.last_mut(), entry) {
                (Some(Entry::User(last)), Entry::User(text)) => {
                    last.push('\n');
                    last.push_str(&text);
                }
                (Some(Entry::Reply(_)), entry @ Entry::Reply(_)) => {
                    out.push(Entry::User(format!("go on {}", self.0.next_u32() % 100)));
                    out.push(entry);
                }
                (_, entry) => out.push(entry),
            }
        }
        out
    }
}
