//! Which parts of messages a chat template shows that most templates leave out.

use super::{ChatTemplate, TemplateInput};
use crate::api::{Action, Message, MessageExtra};
use crate::chat::message;

/// Parts of messages that prompts show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ShownExtras {
    /// Ids of calls.
    pub(crate) ids: bool,
    /// Names of users and of called tools.
    pub(crate) names: bool,
    /// Thinking apart from the text.
    pub(crate) reasoning: bool,
}

impl ChatTemplate {
    /// Which parts of messages the template shows in prompts with this input: found out by changing them
    /// in a conversation.
    pub(crate) fn shown_extras(&self, input: &TemplateInput) -> ShownExtras {
        let call = || Action { name: "probe".to_owned(), arguments: serde_json::json!({}) };
        let shown = |id: &str, user: &str, tool: &str| {
            let named = |name: &str| MessageExtra {
                name: Some(name.to_owned()),
                ..MessageExtra::default()
            };
            let call_ids = vec![id.to_owned()];
            let reply = MessageExtra { call_ids, ..MessageExtra::default() };
            let result = MessageExtra { tool_call_id: Some(id.to_owned()), ..named(tool) };
            let conversation = [
                Message { extra: named(user), ..message("user", "x") },
                Message { tool_calls: vec![call()], extra: reply, ..message("assistant", "") },
                Message { extra: result, ..message("tool", "x") },
            ];
            self.render_input(&conversation, input, true).ok()
        };
        // Many templates show the thinking of the last turns, and some only next to calls.
        let thinking = |text: &str, calls: Vec<Action>| {
            let extra =
                MessageExtra { reasoning: Some(text.to_owned()), ..MessageExtra::default() };
            let turn = Message { tool_calls: calls, extra, ..message("assistant", "y") };
            let conversation = [message("user", "x"), turn, message("tool", "x")];
            self.render_input(&conversation, input, true).ok()
        };
        let shows_thinking = |calls: Vec<Action>| {
            let first = thinking("probe0001", calls.clone());
            first.is_some() && first != thinking("probe0002", calls)
        };
        let plain = shown("probe0001", "ann", "probe");
        let changes = |other: Option<String>| plain.is_some() && plain != other;
        ShownExtras {
            ids: changes(shown("probe0002", "ann", "probe")),
            names: changes(shown("probe0001", "bob", "probe"))
                || changes(shown("probe0001", "ann", "other")),
            reasoning: shows_thinking(Vec::new()) || shows_thinking(vec![call()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_parts_are_found_out_by_rendering() {
        let input = TemplateInput::new(&[], None);
        let shown = |template: &str| ChatTemplate::new(template).unwrap().shown_extras(&input);
        let plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
        assert_eq!(shown(plain), ShownExtras::default());
        let with = |part: &str| shown(&plain.replace("{{ m.role }}", part));
        let ids = ShownExtras { ids: true, ..ShownExtras::default() };
        assert_eq!(with("{{ m.tool_call_id }}"), ids);
        assert_eq!(with("{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"), ids);
        let names = ShownExtras { names: true, ..ShownExtras::default() };
        assert_eq!(with("{{ m.name }}"), names);
        assert_eq!(with("{{ m.name if m.role == 'tool' }}"), names);
        let reasoning = ShownExtras { reasoning: true, ..ShownExtras::default() };
        for name in ["reasoning_content", "thinking", "reasoning"] {
            assert_eq!(with(&format!("{{{{ m.{name} }}}}")), reasoning, "{name}");
        }
        let with_calls = "{{ m.reasoning_content if m.tool_calls }}";
        assert_eq!(with(with_calls), reasoning);
        assert_eq!(with("{# m.reasoning #}{{ m.reasoning_details }}"), ShownExtras::default());
    }
}
