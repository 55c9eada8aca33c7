//! Requests without what earlier requests of the same attempt had: an agent sends its whole history every
//! time.

use super::record::MalformedRecord;
use crate::conversation::{Ask, Past, Said};
use orchestrate_gateway::AskedSampling;
use orchestrate_types::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// A request. Messages and sets of tools are named by the order in which they first occurred.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AskRecord {
    past: PastRecord,
    max_tokens: Option<usize>,
    stops: Arc<[String]>,
    sampling: AskedSampling,
    sample: usize,
    repeats: bool,
    overridden: Arc<[String]>,
}

#[derive(Debug, Serialize, Deserialize)]
enum PastRecord {
    Messages {
        new: Vec<Arc<Said>>,
        said: Vec<usize>,
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
    said: Table<Said>,
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
    pub(super) fn add(&mut self, ask: &Ask) -> Result<(AskRecord, Vec<TokenId>), MalformedRecord> {
        let mut tail = Vec::new();
        let past = match &ask.past {
            Past::Messages { said, tools, thinking } => {
                let (mut indices, mut new) = (Vec::with_capacity(said.len()), Vec::new());
                for (place, said) in said.iter().enumerate() {
                    let latest = self.latest.get(place).filter(|index| {
                        let known = self.said.values.get(**index);
                        known.is_some_and(|known| known.is_identical(said))
                    });
                    let (index, is_new) = match latest {
                        Some(index) => (*index, false),
                        None => self.said.index(said)?,
                    };
                    indices.push(index);
                    new.extend(is_new.then(|| Arc::clone(said)));
                }
                self.latest.clone_from(&indices);
                let (index, is_new) = self.tools.index(tools)?;
                PastRecord::Messages {
                    new,
                    said: indices,
                    new_tools: is_new.then(|| Arc::clone(tools)),
                    tools: index,
                    thinking: *thinking,
                }
            }
            Past::Tokens(ids) => {
                let common = self.tokens.iter().zip(ids.iter()).take_while(|(a, b)| a == b).count();
                tail = ids.get(common..).unwrap_or_default().to_vec();
                self.tokens = Arc::clone(ids);
                PastRecord::Tokens { common }
            }
        };
        let record = AskRecord {
            past,
            max_tokens: ask.max_tokens,
            stops: Arc::clone(&ask.stops),
            sampling: ask.sampling,
            sample: ask.sample,
            repeats: ask.repeats,
            overridden: Arc::clone(&ask.overridden),
        };
        Ok((record, tail))
    }

    /// The request of a record. `tail` are the tokens that were new.
    pub(super) fn read(
        &mut self,
        record: AskRecord,
        tail: &[TokenId],
    ) -> Result<Ask, MalformedRecord> {
        let AskRecord { past, max_tokens, stops, sampling, sample, repeats, overridden } = record;
        let past = match past {
            PastRecord::Messages { new, said, new_tools, tools, thinking } => {
                for said in &new {
                    self.said.index(said)?;
                }
                if let Some(tools) = &new_tools {
                    self.tools.index(tools)?;
                }
                let said = said.into_iter().map(|index| self.said.get(index));
                let said = said.collect::<Result<_, _>>()?;
                Past::Messages { said, tools: self.tools.get(tools)?, thinking }
            }
            PastRecord::Tokens { common } => {
                let head =
                    self.tokens.get(..common).ok_or("its prompt begins with unknown tokens")?;
                self.tokens = [head, tail].concat().into();
                Past::Tokens(Arc::clone(&self.tokens))
            }
        };
        Ok(Ask { past, max_tokens, stops, sampling, sample, repeats, overridden })
    }
}
