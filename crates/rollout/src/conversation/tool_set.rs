//! What the prompts of requests show besides messages, prepared once: an agent sends the same tools with
//! every request.

use super::tree::IN_TOKENS;
use crate::chat::ChatModel;
use crate::template::TemplateInput;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};

/// Sets of tools that are kept. Agents have few; one that changes them all the time has them prepared
/// each time.
const KEPT: usize = 8;

/// The tools of a request, and whether its prompt asks for thinking.
#[derive(Debug)]
pub(super) struct ToolSet {
    schemas: Arc<Vec<Value>>,
    /// Tells sets apart.
    pub(super) digest: [u8; 32],
    /// As the chat template reads them.
    pub(super) shown: TemplateInput,
    /// Size of the schemas as text.
    pub(super) bytes: usize,
}

/// The sets of a conversation.
#[derive(Debug, Default)]
pub(super) struct ToolSets(Mutex<Vec<Arc<ToolSet>>>);

impl ToolSet {
    fn new(chat: &ChatModel, schemas: &Arc<Vec<Value>>, thinking: Option<bool>) -> Self {
        let text = serde_json::to_vec(&**schemas).unwrap_or_default();
        let mut digest = blake3::Hasher::new();
        digest.update(&text);
        if let Some(thinking) = thinking {
            digest.update(&[0, thinking.into()]);
        }
        Self {
            schemas: Arc::clone(schemas),
            digest: *digest.finalize().as_bytes(),
            shown: chat.input_of(schemas, thinking),
            bytes: text.len(),
        }
    }

    /// Whether prompts show tools.
    pub(super) fn has_any(&self) -> bool {
        !self.schemas.is_empty()
    }

    /// In place of the tools of a request in tokens.
    pub(super) fn of_tokens() -> Arc<Self> {
        let (schemas, shown) = (Arc::default(), TemplateInput::new(&[], None));
        Arc::new(Self { schemas, digest: IN_TOKENS, shown, bytes: 0 })
    }
}

impl ToolSets {
    /// The set of these schemas, if it is kept.
    pub(super) fn known(
        &self,
        schemas: &Arc<Vec<Value>>,
        thinking: Option<bool>,
    ) -> Option<Arc<ToolSet>> {
        let sets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |set: &&Arc<ToolSet>| {
            set.shown.thinking == thinking
                && (Arc::ptr_eq(&set.schemas, schemas) || set.schemas == *schemas)
        };
        sets.iter().find(is_known).cloned()
    }

    /// The set of these schemas, for prompts that ask for `thinking`.
    pub(super) fn of(
        &self,
        chat: &ChatModel,
        schemas: &Arc<Vec<Value>>,
        thinking: Option<bool>,
    ) -> Arc<ToolSet> {
        if let Some(known) = self.known(schemas, thinking) {
            return known;
        }
        let new = Arc::new(ToolSet::new(chat, schemas, thinking));
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
        let chat = super::super::tests::chat();
        let sets = ToolSets::default();
        let schemas = |number: usize| Arc::new(vec![json!({"name": number})]);
        let of = |number: usize, thinking| sets.of(&chat, &schemas(number), thinking);
        let first = of(0, None);
        assert!(Arc::ptr_eq(&first, &of(0, None)));
        assert_ne!(first.digest, of(1, None).digest);
        assert_ne!(first.digest, of(0, Some(false)).digest);
        assert_ne!(of(0, Some(true)).digest, of(0, Some(false)).digest);
        (4..KEPT).for_each(|number| drop(of(number, None)));
        assert!(sets.known(&schemas(0), None).is_some());
        drop(of(KEPT + 1, None));
        assert!(sets.known(&schemas(0), None).is_none());
        assert_eq!(of(0, None).digest, first.digest);
        assert_eq!(sets.0.lock().unwrap().len(), KEPT);
    }

    #[test]
    fn descriptions_of_tools_hold_no_control_tokens() {
        let chat = super::super::tests::chat();
        let schemas = Arc::new(vec![json!({"function": {"name": "a<|im_end|>", "parameters": {
            "properties": {"<|im_start|>": {"enum": ["<tool_call>"]}}}}})]);
        let shown = ToolSets::default().of(&chat, &schemas, None).shown.tools.to_string();
        assert!(shown.contains("a< |im_end|>"), "{shown}");
        for control in crate::vocabulary::CONTROL_TOKENS {
            assert!(!shown.contains(control), "{shown}");
        }
    }
}
