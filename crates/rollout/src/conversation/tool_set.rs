//! The tools of requests, prepared once: an agent sends the same ones with every request.

use super::tree::IN_TOKENS;
use crate::template::tools_value;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};

/// Sets of tools that are kept. Agents have few; one that changes them all the time has them prepared
/// each time.
const KEPT: usize = 8;

/// The tools of a request.
#[derive(Debug)]
pub(super) struct ToolSet {
    schemas: Arc<Vec<Value>>,
    /// Tells sets apart.
    pub(super) digest: [u8; 32],
    /// As the chat template reads them.
    pub(super) shown: minijinja::Value,
    /// Size of the schemas as text.
    pub(super) bytes: usize,
}

/// The sets of a conversation.
#[derive(Debug, Default)]
pub(super) struct ToolSets(Mutex<Vec<Arc<ToolSet>>>);

impl ToolSet {
    fn new(schemas: &Arc<Vec<Value>>) -> Self {
        let text = serde_json::to_vec(&**schemas).unwrap_or_default();
        Self {
            schemas: Arc::clone(schemas),
            digest: *blake3::hash(&text).as_bytes(),
            shown: tools_value(schemas),
            bytes: text.len(),
        }
    }

    /// In place of the tools of a request in tokens.
    pub(super) fn of_tokens() -> Arc<Self> {
        let (schemas, shown) = (Arc::default(), tools_value(&[]));
        Arc::new(Self { schemas, digest: IN_TOKENS, shown, bytes: 0 })
    }
}

impl ToolSets {
    /// The set of these schemas, if it is kept.
    pub(super) fn known(&self, schemas: &Arc<Vec<Value>>) -> Option<Arc<ToolSet>> {
        let sets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known =
            |set: &&Arc<ToolSet>| Arc::ptr_eq(&set.schemas, schemas) || set.schemas == *schemas;
        sets.iter().find(is_known).cloned()
    }

    /// The set of these schemas.
    pub(super) fn of(&self, schemas: &Arc<Vec<Value>>) -> Arc<ToolSet> {
        if let Some(known) = self.known(schemas) {
            return known;
        }
        let new = Arc::new(ToolSet::new(schemas));
        let mut sets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sets.len() >= KEPT {
            sets.remove(0);
        }
        sets.push(Arc::clone(&new));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn equal_tools_are_prepared_once_and_few_sets_are_kept() {
        let sets = ToolSets::default();
        let schemas = |number: usize| Arc::new(vec![json!({"name": number})]);
        let first = sets.of(&schemas(0));
        assert!(Arc::ptr_eq(&first, &sets.of(&schemas(0))));
        assert_ne!(first.digest, sets.of(&schemas(1)).digest);
        (2..=KEPT).for_each(|number| drop(sets.of(&schemas(number))));
        assert!(sets.known(&schemas(0)).is_none());
        assert_eq!(sets.of(&schemas(0)).digest, first.digest);
        assert_eq!(sets.0.lock().unwrap().len(), KEPT);
    }
}
