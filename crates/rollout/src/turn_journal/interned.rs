//! Requests without what earlier requests of the same attempt had: an agent sends its whole history every
//! time.

use super::record::MalformedRecord;
use crate::conversation::{HistoryMessage, ReplyRequest, RequestPrompt};
use orchestrate_gateway::AskedSampling;
use orchestrate_types::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// A request. Messages and sets of tools are named by the order in which they first occurred.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReplyRequestRecord {
    prompt: PromptRecord,
    max_tokens: Option<usize>,
    stops: Arc<[String]>,
    sampling: AskedSampling,
    sample: usize,
    repeats: bool,
    overridden: Arc<[String]>,
}

#[derive(Debug, Serialize, Deserialize)]
enum PromptRecord {
    Messages {
        new: Vec<Arc<HistoryMessage>>,
        messages: Vec<usize>,
        new_tools: Option<Arc<Vec<Value>>>,
        tools: usize,
        thinking: Option<bool>,
    },
    /// The prompt has this many tokens in common with that of the request in tokens before.
    Tokens { common: usize },
}

/// What the requests so far had.
#[derive(Debug, Default)]
pub(super) struct Interned {
    messages: Table<HistoryMessage>,
    /// The messages of the latest request, most of which the next one repeats.
    latest: Vec<usize>,
    tools: Table<Vec<Value>>,
    tokens: Arc<[TokenId]>,
}

/// Values in the order in which they first occurred.
#[derive(Debug)]
struct Table<T> {
    values: Vec<Arc<T>>,
    by_digest: HashMap<[u8; 32], usize>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { values: Vec::new(), by_digest: HashMap::new() }
    }
}

impl<T: Serialize> Table<T> {
    /// The index of a value, and whether it is new.
    fn index(&mut self, value: &Arc<T>) -> Result<(usize, bool), MalformedRecord> {
        let digest = *blake3::hash(&serde_json::to_vec(&**value)?).as_bytes();
        let next = self.values.len();
        let index = *self.by_digest.entry(digest).or_insert(next);
        if index == next {
            self.values.push(Arc::clone(value));
        }
        Ok((index, index == next))
    }

    fn get(&self, index: usize) -> Result<Arc<T>, MalformedRecord> {
        let value = self.values.get(index).map(Arc::clone);
        value.ok_or_else(|| MalformedRecord::from("it names a part that is not there"))
    }
}

impl Interned {
    /// The record of a request, and the tokens of its prompt that are new.
    pub(super) fn add(
        &mut self,
        request: &ReplyRequest,
    ) -> Result<(ReplyRequestRecord, Vec<TokenId>), MalformedRecord> {
        let mut tail = Vec::new();
        let prompt = match &request.prompt {
            RequestPrompt::Messages { messages, tools, thinking } => {
                let (mut indices, mut new) = (Vec::with_capacity(messages.len()), Vec::new());
                for (place, messages) in messages.iter().enumerate() {
                    let latest = self.latest.get(place).filter(|index| {
                        let known = self.messages.values.get(**index);
                        known.is_some_and(|known| known.is_identical(messages))
                    });
                    let (index, is_new) = match latest {
                        Some(index) => (*index, false),
                        None => self.messages.index(messages)?,
                    };
                    indices.push(index);
                    new.extend(is_new.then(|| Arc::clone(messages)));
                }
                self.latest.clone_from(&indices);
                let (index, is_new) = self.tools.index(tools)?;
                PromptRecord::Messages {
                    new,
                    messages: indices,
                    new_tools: is_new.then(|| Arc::clone(tools)),
                    tools: index,
                    thinking: *thinking,
                }
            }
            RequestPrompt::Tokens(ids) => {
                let common = self.tokens.iter().zip(ids.iter()).take_while(|(a, b)| a == b).count();
                tail = ids.get(common..).unwrap_or_default().to_vec();
                self.tokens = Arc::clone(ids);
                PromptRecord::Tokens { common }
            }
        };
        let record = ReplyRequestRecord {
            prompt,
            max_tokens: request.max_tokens,
            stops: Arc::clone(&request.stops),
            sampling: request.sampling,
            sample: request.sample,
            repeats: request.repeats,
            overridden: Arc::clone(&request.overridden),
        };
        Ok((record, tail))
    }

    /// The request of a record. `tail` are the tokens that were new.
    pub(super) fn read(
        &mut self,
        record: ReplyRequestRecord,
        tail: &[TokenId],
    ) -> Result<ReplyRequest, MalformedRecord> {
        let ReplyRequestRecord { prompt, max_tokens, stops, sampling, sample, repeats, overridden } =
            record;
        let prompt = match prompt {
            PromptRecord::Messages { new, messages, new_tools, tools, thinking } => {
                for messages in &new {
                    self.messages.index(messages)?;
                }
                if let Some(tools) = &new_tools {
                    self.tools.index(tools)?;
                }
                let messages = messages.into_iter().map(|index| self.messages.get(index));
                let messages = messages.collect::<Result<_, _>>()?;
                RequestPrompt::Messages { messages, tools: self.tools.get(tools)?, thinking }
            }
            PromptRecord::Tokens { common } => {
                let head =
                    self.tokens.get(..common).ok_or("its prompt begins with unknown tokens")?;
                self.tokens = [head, tail].concat().into();
                RequestPrompt::Tokens(Arc::clone(&self.tokens))
            }
        };
        Ok(ReplyRequest { prompt, max_tokens, stops, sampling, sample, repeats, overridden })
    }
}
