//! Why a chat server ended a reply, and who caused it. Servers have names of their own for it.

use orchestrate_types::Attribution;

/// What a `finish_reason` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// A token limit cut the reply off.
    Length,
    /// The model wrote a call that cannot be read, or it or the server's filter declined to answer. That is
    /// the policy's turn, without calls: what there is of one may be cut off.
    Declined,
    /// The server failed while it sampled. Nothing of the reply is used.
    Failed,
}

/// Every known name, in lower case.
const NAMES: &[(&str, FinishReason)] = &[
    ("stop", FinishReason::Stop),
    ("tool_calls", FinishReason::Stop),
    ("tool_call", FinishReason::Stop),
    ("tool_use", FinishReason::Stop),
    ("function_call", FinishReason::Stop),
    ("end_turn", FinishReason::Stop),
    ("stop_sequence", FinishReason::Stop),
    ("eos", FinishReason::Stop),
    ("eos_token", FinishReason::Stop),
    ("complete", FinishReason::Stop),
    ("completed", FinishReason::Stop),
    ("length", FinishReason::Length),
    ("max_tokens", FinishReason::Length),
    ("max_output_tokens", FinishReason::Length),
    ("model_length", FinishReason::Length),
    ("model_context_window_exceeded", FinishReason::Length),
    ("malformed_function_call", FinishReason::Declined),
    ("malformed_tool_call", FinishReason::Declined),
    ("malformed_response", FinishReason::Declined),
    ("unexpected_tool_call", FinishReason::Declined),
    ("too_many_tool_calls", FinishReason::Declined),
    ("function_call_filter", FinishReason::Declined),
    ("content_filter", FinishReason::Declined),
    ("content_filtered", FinishReason::Declined),
    ("safety", FinishReason::Declined),
    ("recitation", FinishReason::Declined),
    ("language", FinishReason::Declined),
    ("blocklist", FinishReason::Declined),
    ("prohibited_content", FinishReason::Declined),
    ("spii", FinishReason::Declined),
    ("refusal", FinishReason::Declined),
    ("sensitive", FinishReason::Declined),
    ("guardrail_intervened", FinishReason::Declined),
    ("error", FinishReason::Failed),
    ("error_finish", FinishReason::Failed),
    ("network_error", FinishReason::Failed),
    ("insufficient_system_resource", FinishReason::Failed),
    ("abort", FinishReason::Failed),
    ("cancelled", FinishReason::Failed),
];

impl FinishReason {
    /// The meaning of a name; `None` if it is unknown. Some servers put a class before it:
    /// `function_call_filter: MALFORMED_FUNCTION_CALL`.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let name = name.rsplit(':').next().unwrap_or(name).trim().to_ascii_lowercase();
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, reason)| *reason)
    }

    /// Who caused the end of the reply.
    pub(crate) const fn attribution(self) -> Attribution {
        match self {
            Self::Stop | Self::Length | Self::Declined => Attribution::Policy,
            Self::Failed => Attribution::Infrastructure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_in_any_case_and_with_their_class() {
        for (name, reason) in NAMES {
            for written in [
                (*name).to_owned(),
                name.to_uppercase(),
                format!("a_class: {name}"),
                format!("FinishReason.X:{}", name.to_uppercase()),
            ] {
                assert_eq!(FinishReason::of(&written), Some(*reason), "{written}");
            }
        }
        for unknown in ["", "other", "stopped early", ":", "stop,"] {
            assert_eq!(FinishReason::of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn every_name_is_documented_with_whose_doing_it_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/outcomes.md");
        let page = std::fs::read_to_string(path).unwrap();
        for (name, reason) in NAMES {
            let row = page.lines().find(|line| line.contains(&format!("`{name}`")));
            let row = row.unwrap_or_else(|| panic!("docs/src/outcomes.md lacks `{name}`"));
            let whose = format!("| {} |", reason.attribution().name());
            assert!(row.contains(&whose), "{row}");
        }
    }
}
