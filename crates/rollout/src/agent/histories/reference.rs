//! The naive reference: it keeps every reply with all that was said before it, finds the beginning of a
//! request by comparing it with all of them, and knows which worker computed each row under which
//! weights.

use super::model::chat;
use super::wire::{Entry, WireCall, WireReply, tool_schemas};
use super::workers::{Call, ROW_SHIFT};
use crate::api::Message;
use crate::conversation::{FinishedConversation, ForkCause};
use crate::template::TemplateInput;
use orchestrate_routing::RoutingMask;
use orchestrate_types::Trajectory;
use std::collections::{BTreeMap, HashMap};

/// Experts per row, layers and experts of the workers' model.
const EXPERTS: usize = 8;
const LAYERS: [usize; 2] = [1, 2];
const TOP_K: usize = 2;

/// Who may have computed a row: a set of pairs of worker and policy version, as bits.
type Sources = u64;

fn source(worker: usize, version: u64) -> Sources {
    1 << (usize::try_from(version).unwrap() * 8 + worker)
}

/// What a request continues.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Asked {
    Messages { tools: usize, history: Vec<Entry> },
    Tokens(Vec<u32>),
}

/// A request's place: the replies that end its longest known beginning (several if they are equal), and
/// its prompt.
#[derive(Debug, Clone)]
pub(super) struct Place {
    from: Vec<usize>,
    /// Whether the request goes on where no other one did.
    is_tip: bool,
    pub(super) prompt: Vec<u32>,
}

/// What was said.
#[derive(Debug, Clone)]
struct Past {
    asked: Asked,
    /// Which messages were sampled, and not only sent by the agent.
    sampled: Vec<bool>,
}

/// A reply and everything before it.
#[derive(Debug, Clone)]
struct Known {
    /// With the reply at its end.
    past: Past,
    /// Prompt and reply.
    tokens: Vec<u32>,
    prompt: usize,
    /// Sources of the row of each token but the last.
    rows: Vec<Sources>,
    /// Policy versions of the reply's tokens.
    versions: Vec<i64>,
    /// Whether a request went on after it.
    is_continued: bool,
}

/// Everything that was said in one conversation.
#[derive(Debug, Default)]
pub(super) struct Reference {
    known: Vec<Known>,
    /// The requests so far.
    asked: Vec<Past>,
    /// Sources that computed the row of a token after these tokens, by a hash of both.
    computed: HashMap<u64, Sources>,
    pub(super) forks: BTreeMap<ForkCause, u64>,
}

/// Whether an agent that sends `b` repeats `a`. Of a reply that was sampled, thinking, number and ids that the
/// agent left out do not count.
fn is_same(a: &Entry, b: &Entry, is_sampled: bool) -> bool {
    match (a, b) {
        (Entry::Reply(a), Entry::Reply(b)) if is_sampled => {
            let mut ids = a.calls.iter().zip(&b.calls).map(|(a, b)| (&a.id, &b.id));
            a.text.trim() == b.text.trim()
                && a.calls == b.calls
                && ids.all(|(a, b)| b.is_none() || a == b)
                && (b.number.is_none() || a.number == b.number)
                && (b.thinking.is_none() || a.thinking == b.thinking)
        }
        (a, b) => a == b,
    }
}

impl Past {
    /// Number of messages or tokens, if a request begins with them.
    fn begins(&self, asked: &Asked) -> Option<usize> {
        match (&self.asked, asked) {
            (
                Asked::Messages { tools: a, history: start },
                Asked::Messages { tools: b, history: whole },
            ) => {
                let mut pairs = start.iter().zip(whole).zip(&self.sampled);
                let fits = a == b && start.len() <= whole.len();
                let same = pairs.all(|((a, b), is_sampled)| is_same(a, b, *is_sampled));
                (fits && same).then_some(start.len())
            }
            (Asked::Tokens(start), Asked::Tokens(whole)) => {
                whole.starts_with(start).then_some(start.len())
            }
            (Asked::Messages { .. }, Asked::Tokens(_))
            | (Asked::Tokens(_), Asked::Messages { .. }) => None,
        }
    }

    fn is_repeated_by(&self, asked: &Asked) -> bool {
        self.begins(asked) == Some(asked.len())
    }
}

impl Asked {
    fn len(&self) -> usize {
        match self {
            Self::Messages { history, .. } => history.len(),
            Self::Tokens(tokens) => tokens.len(),
        }
    }
}

/// A message as the chat template shows it.
fn rendered(entry: &Entry) -> Message {
    let message = |role: &str, content: String| Message {
        role: role.to_owned(),
        content,
        ..Message::default()
    };
    match entry {
        Entry::System(text) => message("system", text.clone()),
        Entry::User(text) => message("user", text.clone()),
        Entry::Result(text) => message("tool", text.clone()),
        Entry::Reply(reply) => {
            let text = chat().break_control_texts(&reply.text);
            let text = match &reply.thinking {
                Some(thinking) => {
                    let thinking = chat().break_control_texts(thinking);
                    format!("<think>\n{thinking}\n</think>\n\n{text}")
                }
                None => text,
            };
            let action = |call: &WireCall| crate::api::Action {
                name: call.name.clone(),
                arguments: call.arguments(),
            };
            let tool_calls = reply.calls.iter().map(action).collect();
            Message { tool_calls, ..message("assistant", text) }
        }
    }
}

/// Hashes of every beginning of a sequence: the first token, the first two, and so on.
fn beginnings(tokens: &[u32]) -> Vec<u64> {
    let mix = |hash: &mut u64, token: &u32| {
        *hash = (*hash ^ u64::from(*token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        Some(*hash)
    };
    tokens.iter().scan(1, mix).collect()
}

/// Tokens up to and including the one that completes a stop string.
fn stopped(ids: &[u32], stops: &[String]) -> usize {
    if stops.is_empty() {
        return ids.len();
    }
    let ends = |length: &usize| {
        let text = chat().decode(&ids[..*length]).unwrap();
        stops.iter().any(|stop| text.contains(stop.as_str()))
    };
    (1..=ids.len()).find(ends).unwrap_or(ids.len())
}

impl Reference {
    /// The replies that end the longest known beginning of a request.
    fn longest(&self, asked: &Asked) -> Vec<usize> {
        let lengths: Vec<Option<usize>> =
            self.known.iter().map(|known| known.past.begins(asked)).collect();
        let longest = lengths.iter().flatten().max().copied();
        let fits = |index: &usize| lengths[*index].is_some() && lengths[*index] == longest;
        (0..lengths.len()).filter(fits).collect()
    }

    /// Whether a request may continue several replies with other tokens.
    pub(super) fn is_ambiguous(&self, asked: &Asked) -> bool {
        let longest = self.longest(asked);
        let mut tokens = longest.iter().map(|index| &self.known[*index].tokens);
        let first = tokens.next();
        tokens.any(|tokens| Some(tokens) != first)
    }

    /// The prompt of a request, if it were made now.
    pub(super) fn prompt_of(&self, asked: &Asked) -> Vec<u32> {
        self.prompt(asked, self.longest(asked).first().copied())
    }

    /// Finds the place of a request for `samples` replies, and counts the branches that it begins.
    pub(super) fn place(&mut self, asked: &Asked, samples: u64) -> Place {
        let from = self.longest(asked);
        let tip = from.iter().copied().find(|index| !self.known[*index].is_continued);
        let cause = match tip {
            Some(tip) => {
                self.known[tip].is_continued = true;
                None
            }
            None => self.cause(asked, from.is_empty()),
        };
        let causes = cause.into_iter().chain((1..samples).map(|_| ForkCause::Repeated));
        for cause in causes {
            *self.forks.entry(cause).or_insert(0) += 1;
        }
        let prompt = self.prompt(asked, from.first().copied());
        let past = self.past(asked, &from);
        self.asked.push(past);
        Place { from, is_tip: tip.is_some(), prompt }
    }

    /// A request with the replies that it continues as they were sampled.
    fn past(&self, asked: &Asked, from: &[usize]) -> Past {
        let mut past = Past { asked: asked.clone(), sampled: Vec::new() };
        if let Some(known) = from.first().map(|from| &self.known[*from].past) {
            past.sampled.clone_from(&known.sampled);
            if let (Asked::Messages { history, .. }, Asked::Messages { history: known, .. }) =
                (&mut past.asked, &known.asked)
            {
                history[..known.len()].clone_from_slice(known);
            }
        }
        past.sampled.resize(asked.len(), false);
        past
    }

    /// Why a request begins a branch.
    fn cause(&self, asked: &Asked, is_root: bool) -> Option<ForkCause> {
        if self.asked.iter().any(|other| other.is_repeated_by(asked)) {
            return Some(ForkCause::Repeated);
        }
        if !is_root {
            return Some(ForkCause::History);
        }
        let mut others = self.asked.iter().map(|past| &past.asked);
        let Asked::Messages { tools, history } = asked else {
            let in_tokens = |other: &Asked| matches!(other, Asked::Tokens(_));
            return others.any(in_tokens).then_some(ForkCause::Opening);
        };
        let others: Vec<(usize, &Entry)> = others
            .filter_map(|other| match other {
                Asked::Messages { tools, history } => Some((*tools, &history[0])),
                Asked::Tokens(_) => None,
            })
            .collect();
        let mut alike = others.iter().filter(|(others, _)| others == tools).peekable();
        if others.is_empty() {
            None
        } else if alike.peek().is_none() {
            Some(ForkCause::Tools)
        } else if alike.any(|(_, first)| **first == history[0]) {
            Some(ForkCause::History)
        } else {
            Some(ForkCause::Opening)
        }
    }

    fn prompt(&self, asked: &Asked, from: Option<usize>) -> Vec<u32> {
        let (tools, history) = match asked {
            Asked::Tokens(tokens) => return tokens.clone(),
            Asked::Messages { tools, history } => {
                (TemplateInput::new(&tool_schemas(*tools), None), history)
            }
        };
        let messages = |from: usize| history[from..].iter().map(rendered).collect::<Vec<_>>();
        let Some(known) = from.map(|from| &self.known[from]) else {
            return chat().prompt_with(&messages(0), &tools).unwrap().to_vec();
        };
        let last = known.tokens.last().copied();
        let new = messages(known.past.asked.len());
        let new = chat().delta_with(&new, last, &tools).unwrap();
        [known.tokens.as_slice(), &new].concat()
    }

    /// Notes which rows were computed by calls, before any of their replies is learned.
    pub(super) fn note(&mut self, calls: &[Call]) {
        for call in calls.iter().filter(|call| !call.ids.is_empty()) {
            let tokens = [call.prompt.as_slice(), &call.ids].concat();
            let beginnings = beginnings(&tokens);
            for beginning in &beginnings[call.start..tokens.len() - 1] {
                *self.computed.entry(*beginning).or_insert(0) |=
                    source(call.worker, call.version.0);
            }
        }
    }

    /// Learns a reply from the calls that sampled it; returns it, and its tokens.
    pub(super) fn learn(
        &mut self,
        asked: &Asked,
        place: &Place,
        calls: &[Call],
        stops: &[String],
    ) -> (WireReply, Vec<u32>) {
        let mut rows: Vec<Sources> = Vec::new();
        for from in &place.from {
            let known = &self.known[*from].rows;
            rows.resize(known.len(), 0);
            rows.iter_mut().zip(known).for_each(|(row, known)| *row |= known);
        }
        if !place.is_tip {
            // A branch has its rows from any other one that begins with the same tokens.
            let known = beginnings(&place.prompt).into_iter().take(rows.len());
            rows = known.map(|beginning| self.computed[&beginning]).collect();
        }
        let mut tokens = place.prompt.clone();
        let mut versions = Vec::new();
        for call in calls {
            assert_eq!(*call.prompt, tokens, "prompt of reply {}", call.ordinal);
            if call.ids.is_empty() {
                continue;
            }
            tokens.extend(&call.ids);
            let has_begun = !versions.is_empty();
            if rows.is_empty() || !has_begun && call.start == 0 {
                // A new conversation has rows of tokens that it has in common with others, or none: a
                // branch that begins under other weights than those of its rows requests all of them.
                let shared = beginnings(&tokens[..=call.start]);
                rows.clear();
                rows.extend(shared.iter().map(|beginning| self.computed[beginning]));
            }
            assert_eq!(call.start, rows.len() - 1, "the first row of reply {}", call.ordinal);
            rows.resize(tokens.len() - 1, source(call.worker, call.version.0));
            let version = i64::try_from(call.version.0).unwrap();
            versions.resize(tokens.len() - place.prompt.len(), version);
        }
        let prompt = place.prompt.len();
        let length = stopped(&tokens[prompt..], stops);
        tokens.truncate(prompt + length);
        rows.truncate(tokens.len() - 1);
        versions.truncate(length);
        let ids = tokens[prompt..].to_vec();
        let mut reply = said(asked, &ids, stops);
        reply.number = Some(calls[0].ordinal);
        for (index, call) in reply.calls.iter_mut().enumerate() {
            call.id = Some(format!("call_{:05}{index:03}", calls[0].ordinal));
        }
        let mut past = self.past(asked, &place.from);
        match &mut past.asked {
            Asked::Messages { history, .. } => {
                history.push(Entry::Reply(reply.clone()));
                past.sampled.push(true);
            }
            Asked::Tokens(all) => all.clone_from(&tokens),
        }
        self.known.push(Known { past, tokens, prompt, rows, versions, is_continued: false });
        (reply, ids)
    }

    /// Everything that was said up to each reply, in order.
    pub(super) fn known(&self) -> impl Iterator<Item = &Asked> {
        self.known.iter().map(|known| &known.past.asked)
    }

    /// Whether a row of the reply with these tokens is one that was computed for them.
    fn check_row(known: &[&Known], position: usize, row: &[u8], version: Option<u64>) {
        let token = known[0].tokens[position] as usize;
        let sources = known.iter().fold(0, |all, known| all | known.rows[position]);
        let is_of = |worker: usize, from: u64| {
            let shift = worker * ROW_SHIFT + usize::try_from(from).unwrap();
            let experts = LAYERS.iter().flat_map(|layer| {
                let first = position * 7 + token * 3 + layer * 5 + shift;
                (0..TOP_K).map(move |slot| (first + slot) % EXPERTS)
            });
            experts.eq(row.iter().map(|id| usize::from(*id)))
        };
        let sources = (0..64).filter(|bit| sources & (1 << bit) != 0);
        let mut sources = sources.map(|bit| (bit % 8, (bit / 8) as u64));
        let fits = |(worker, from): (usize, u64)| {
            is_of(worker, from) && version.is_none_or(|version| version == from)
        };
        assert!(sources.any(fits), "row {position} of {}: {row:?}", known[0].tokens.len());
    }

    fn with_tokens(&self, tokens: &[u32]) -> Vec<&Known> {
        self.known.iter().filter(|known| known.tokens == tokens).collect()
    }

    /// Checks the rows that a client got with a reply in tokens: those from `start` on.
    pub(super) fn check_sent_rows(&self, tokens: &[u32], start: usize, rows: &[u8]) {
        let known = self.with_tokens(tokens);
        let width = LAYERS.len() * TOP_K;
        assert_eq!(rows.len(), (tokens.len() - 1 - start) * width);
        for (index, row) in rows.chunks(width).enumerate() {
            Self::check_row(&known, start + index, row, None);
        }
    }

    fn check_mask(&self, tokens: &[u32], mask: &RoutingMask) {
        let known = self.with_tokens(tokens);
        assert!(!known.is_empty(), "a branch that ends with no known reply");
        assert_eq!(mask.rows(), tokens.len() - 1);
        for position in 0..mask.rows() {
            let within = |range: &&orchestrate_routing::RowVersion| {
                (range.start..range.end).contains(&position)
            };
            let version = mask.versions().iter().find(within).unwrap().version.0;
            Self::check_row(&known, position, mask.row(position).unwrap(), Some(version));
        }
    }

    /// What a branch has before the first reply that it trains on has rows of the weights that sampled this
    /// reply, as if it had been prefilled for it.
    fn check_context(trajectory: &Trajectory, mask: &RoutingMask) {
        let own = trajectory.turns().iter().map(|turn| turn.prompt_end);
        let own = own.filter(|first| trajectory.loss_mask()[*first] == 1).min().unwrap();
        let version = trajectory.policy_versions()[own];
        for rows in mask.versions().iter().filter(|rows| rows.start < own) {
            let found = i64::try_from(rows.version.0).unwrap();
            assert_eq!(found, version, "rows {}..{} of {own}", rows.start, rows.end);
        }
    }

    /// Checks a finished conversation: all rows, and every reply trained on once, right after its
    /// prompt, with its log-probabilities and policy versions. Returns the number of rows and of
    /// sampled tokens.
    pub(super) fn check(&self, finished: &FinishedConversation) -> (usize, usize) {
        assert_eq!((&finished.routing_problem, &finished.failure), (&None, &None));
        assert_eq!(finished.forks, self.forks);
        assert_eq!(finished.turns.len(), self.known.len());
        let mut rows = 0;
        for branch in &finished.branches {
            let mask = branch.routing.as_ref().unwrap();
            self.check_mask(branch.trajectory.token_ids(), mask);
            Self::check_context(&branch.trajectory, mask);
            rows += mask.rows();
        }
        let mut sampled = 0;
        for known in &self.known {
            let Known { tokens, prompt, .. } = known;
            let (own, equal) = (*prompt..tokens.len(), |other: &&Known| {
                other.tokens == *tokens && other.prompt == *prompt
            });
            let equal: Vec<&Known> = self.known.iter().filter(equal).collect();
            let owners: Vec<_> = finished
                .branches
                .iter()
                .map(|branch| &branch.trajectory)
                .filter(|branch| {
                    let turns = branch.turns().iter();
                    let ends = (*prompt, tokens.len());
                    turns.map(|turn| (turn.prompt_end, turn.output_end)).any(|turn| turn == ends)
                        && branch.token_ids().starts_with(tokens)
                        && branch.loss_mask()[own.clone()].iter().all(|mask| *mask == 1)
                })
                .collect();
            // Short replies to the same prompt may be equal.
            assert_eq!(owners.len(), equal.len(), "owners of a reply of {} tokens", own.len());
            for owner in owners {
                let versions = &owner.policy_versions()[own.clone()];
                assert!(equal.iter().any(|known| known.versions == versions), "{versions:?}");
                let logprobs = &owner.rollout_logprobs()[own.clone()];
                let expected =
                    tokens[own.clone()].iter().map(|id| -0.1 - f32::from((*id % 64) as u8) / 64.0);
                assert!(expected.eq(logprobs.iter().copied()));
            }
            sampled += own.len();
        }
        let losses = finished.branches.iter().map(|branch| branch.trajectory.response_tokens());
        assert_eq!(losses.sum::<usize>(), sampled, "tokens with loss");
        (rows, sampled)
    }
}

/// A reply as its client is to get it.
fn said(asked: &Asked, ids: &[u32], stops: &[String]) -> WireReply {
    let Asked::Messages { .. } = asked else { return WireReply::default() };
    let text = chat().decode(ids).unwrap();
    let stop = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
    let text = &text[..stop.unwrap_or(text.len())];
    let (thinking, text) = match text.trim_start().strip_prefix("<think>") {
        Some(rest) => {
            let (thinking, rest) = rest.split_once("</think>").unwrap_or((rest, ""));
            (Some(thinking.trim().to_owned()), rest.trim_start_matches('\n'))
        }
        None => (None, text),
    };
    let thinking = thinking.filter(|thinking| !thinking.is_empty());
    match split(text) {
        Some((before, calls)) if !calls.is_empty() => {
            WireReply { number: None, thinking, text: before.trim_end().to_owned(), calls }
        }
        // A call that was cut off stays text, together with all others.
        Some(_) | None => {
            WireReply { number: None, thinking, text: text.to_owned(), calls: Vec::new() }
        }
    }
}

/// The text around the calls, and the calls; `None` if one of them is not complete.
fn split(text: &str) -> Option<(String, Vec<WireCall>)> {
    let (mut around, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, after)) = rest.split_once("<tool_call>") {
        let (json, behind) = after.split_once("</tool_call>")?;
        let call: serde_json::Value = serde_json::from_str(json).ok()?;
        calls.push(WireCall::new(&call["name"], &call["arguments"]));
        around.push_str(before);
        rest = behind;
    }
    around.push_str(rest);
    Some((around, calls))
}
