//! Replies of an engine: sampled tokens with their routing rows, or a message.

use crate::error::EngineErrorKind;
use crate::message::AssistantMessage;
use orchestrate_routing::RoutedRows;
use orchestrate_types::{PolicyVersion, TokenId};

/// Why the engine stopped sampling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was sampled.
    Stop,
    /// `max_new_tokens` or the end of the context was reached.
    Length,
    /// The generation was aborted (by a weight update or an operator); its tokens are valid.
    Abort,
}

/// Output tokens `start..end` of one reply were sampled under `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionSpan {
    /// The policy version.
    pub version: PolicyVersion,
    /// Index of the first output token.
    pub start: usize,
    /// Index after the last output token.
    pub end: usize,
}

/// The answer to a [`GenerateRequest`](crate::GenerateRequest), in the form of its prompt.
#[derive(Debug, Clone)]
pub enum Reply {
    /// Sampled tokens, for a prompt in tokens.
    Tokens(Generation),
    /// A message, for a prompt in messages. It can be evaluated, but not trained on.
    Message(MessageReply),
}

impl Reply {
    /// The sampled tokens; `None` for a message.
    pub fn into_tokens(self) -> Option<Generation> {
        match self {
            Self::Tokens(generation) => Some(generation),
            Self::Message(_) => None,
        }
    }

    /// The message; `None` for sampled tokens.
    pub fn into_message(self) -> Option<MessageReply> {
        match self {
            Self::Tokens(_) => None,
            Self::Message(reply) => Some(reply),
        }
    }

    /// Name of the worker that answered.
    pub fn worker(&self) -> &str {
        match self {
            Self::Tokens(generation) => &generation.worker,
            Self::Message(reply) => &reply.worker,
        }
    }

    /// Changes the name of the worker that answered.
    pub fn set_worker(&mut self, worker: String) {
        match self {
            Self::Tokens(generation) => generation.worker = worker,
            Self::Message(reply) => reply.worker = worker,
        }
    }
}

/// A message of the model, from a server that does not return tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageReply {
    /// The text and the tool calls.
    pub message: AssistantMessage,
    /// Why sampling stopped.
    pub finish: Finish,
    /// Tokens of the prompt as the server counted them; `None` if it does not say.
    pub prompt_tokens: Option<usize>,
    /// Prompt tokens found in the prefix cache, at most
    /// [`MessagePrompt::estimated_tokens`](crate::MessagePrompt::estimated_tokens).
    pub cached_tokens: usize,
    /// Base URL of the server that answered.
    pub worker: String,
}

/// Sampled tokens as an engine reports them, before [`Generation::new`] checks them.
#[derive(Debug, Clone, Default)]
pub struct SampledTokens {
    /// Token ids, `[N]`, each below the vocabulary size.
    pub output_ids: Vec<TokenId>,
    /// Log-probability of each token, `[N]`, in nats, ≤ 0.
    pub logprobs: Vec<f32>,
    /// Which policy version sampled which tokens.
    pub versions: Vec<VersionSpan>,
}

/// Sampled tokens that passed all checks, with their routing rows.
///
/// Proven by its construction: there is one log-probability per token, the policy versions cover all
/// tokens in order, and there are no more tokens than requested.
#[derive(Debug, Clone)]
pub struct Generation {
    sampled: SampledTokens,
    finish: Finish,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Rows of positions `start .. P+N-1`, MoE layers only, narrowed to `u8` or `u16`; absent if
    /// not requested.
    pub routed_experts: Option<RoutedRows>,
    /// How often the engine dropped this request's KV cache and computed it again.
    pub num_retractions: u32,
    /// Size of the routing payload on the wire, in bytes.
    pub routing_wire_bytes: usize,
    /// Base URL of the worker that answered. Its KV cache holds this conversation.
    pub worker: String,
}

impl Generation {
    /// Checks sampled tokens against each other and against the number requested. Everything else
    /// starts empty.
    ///
    /// # Errors
    /// [`EngineErrorKind::InvalidReply`] if there are too many tokens, not one log-probability per
    /// token, or policy versions that leave tokens out or overlap.
    pub fn new(
        sampled: SampledTokens,
        finish: Finish,
        max_new_tokens: usize,
    ) -> Result<Self, EngineErrorKind> {
        let outputs = sampled.output_ids.len();
        if outputs > max_new_tokens {
            let message = format!("{outputs} tokens, but at most {max_new_tokens} were requested");
            return Err(EngineErrorKind::invalid_reply(message));
        }
        if sampled.logprobs.len() != outputs {
            let message = format!("{} log-probs for {outputs} tokens", sampled.logprobs.len());
            return Err(EngineErrorKind::invalid_reply(message));
        }
        let mut covered = 0;
        for span in &sampled.versions {
            if span.start != covered || span.end <= span.start {
                let message = "policy versions with a gap or an overlap";
                return Err(EngineErrorKind::invalid_reply(message));
            }
            covered = span.end;
        }
        if covered != outputs {
            let message = format!("policy versions cover {covered} of {outputs} tokens");
            return Err(EngineErrorKind::invalid_reply(message));
        }
        Ok(Self {
            sampled,
            finish,
            cached_tokens: 0,
            routed_experts: None,
            num_retractions: 0,
            routing_wire_bytes: 0,
            worker: String::new(),
        })
    }

    /// Keeps the first `tokens` sampled tokens and their rows, as if the last of them had been a
    /// stop token. Does nothing if there are fewer tokens.
    pub fn stop_after(&mut self, tokens: usize) {
        let Some(dropped) = self.sampled.output_ids.len().checked_sub(tokens) else { return };
        let SampledTokens { output_ids, logprobs, versions } = &mut self.sampled;
        output_ids.truncate(tokens);
        logprobs.truncate(tokens);
        versions.retain_mut(|span| {
            span.end = span.end.min(tokens);
            span.start < span.end
        });
        if let Some(rows) = &mut self.routed_experts {
            rows.drop_last(dropped);
        }
        self.finish = Finish::Stop;
    }

    /// Sampled token ids, `[N]`, each below the vocabulary size.
    pub fn output_ids(&self) -> &[TokenId] {
        &self.sampled.output_ids
    }

    /// Log-probability of each sampled token, `[N]`, in nats, ≤ 0.
    pub fn logprobs(&self) -> &[f32] {
        &self.sampled.logprobs
    }

    /// Which policy version sampled which output tokens; covers `0..N` in order.
    pub fn versions(&self) -> &[VersionSpan] {
        &self.sampled.versions
    }

    /// Why sampling stopped.
    pub fn finish(&self) -> &Finish {
        &self.finish
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_types::ModelShape;

    #[test]
    fn a_stopped_generation_keeps_the_rows_and_versions_of_its_tokens() {
        let shape = ModelShape {
            hidden_layers: 1,
            moe_layers: vec![0],
            experts: 8,
            top_k: 1,
            vocab: 10,
            context: 1000,
        };
        let span =
            |version, start, end| VersionSpan { version: PolicyVersion(version), start, end };
        for kept in 1..=6 {
            let sampled = SampledTokens {
                output_ids: (0..5).collect(),
                logprobs: vec![-0.5; 5],
                versions: vec![span(1, 0, 2), span(2, 2, 5)],
            };
            let mut generation = Generation::new(sampled, Finish::Abort, 5).unwrap();
            // A prompt of 63 tokens, so that the rows cross a block's end; row `t` is `t` mod 8.
            let ids: Vec<u16> = (60..67).map(|t| t % 8).collect();
            generation.routed_experts = Some(RoutedRows::from_ids(&shape, 60, &ids).unwrap());
            generation.stop_after(kept);
            let left = kept.min(5);
            assert_eq!(generation.output_ids(), (0..5).take(left).collect::<Vec<u32>>());
            assert_eq!(generation.logprobs().len(), left);
            assert_eq!(generation.versions().last().unwrap().end, left);
            let rows = generation.routed_experts.as_ref().unwrap();
            assert_eq!(rows.start() + rows.rows(), 63 + left - 1);
            let expected: Vec<u8> =
                (60..63 + left - 1).map(|t| u8::try_from(t % 8).unwrap()).collect();
            assert_eq!(rows.to_vec(), expected);
            // An aborted reply whose last token ends it must not be continued.
            let finish = if kept <= 5 { Finish::Stop } else { Finish::Abort };
            assert_eq!(generation.finish(), &finish);
        }
    }

    #[test]
    fn arrays_of_different_length_are_refused() {
        let span = |start, end| VersionSpan { version: PolicyVersion(1), start, end };
        let sampled = |ids: usize, logprobs: usize, versions: &[VersionSpan]| SampledTokens {
            output_ids: vec![7; ids],
            logprobs: vec![-0.5; logprobs],
            versions: versions.to_vec(),
        };
        let check = |sampled| Generation::new(sampled, Finish::Stop, 3).map(|_| ());
        check(sampled(0, 0, &[])).unwrap();
        check(sampled(3, 3, &[span(0, 1), span(1, 3)])).unwrap();
        for (wrong, message) in [
            (sampled(4, 4, &[span(0, 4)]), "4 tokens, but at most 3"),
            (sampled(2, 1, &[span(0, 2)]), "1 log-probs for 2 tokens"),
            (sampled(2, 3, &[span(0, 2)]), "3 log-probs for 2 tokens"),
            (sampled(2, 2, &[]), "cover 0 of 2"),
            (sampled(2, 2, &[span(0, 1)]), "cover 1 of 2"),
            (sampled(2, 2, &[span(0, 3)]), "cover 3 of 2"),
            (sampled(2, 2, &[span(1, 2)]), "a gap or an overlap"),
            (sampled(2, 2, &[span(0, 2), span(1, 2)]), "a gap or an overlap"),
            (sampled(0, 0, &[span(0, 0)]), "a gap or an overlap"),
        ] {
            let error = check(wrong).unwrap_err();
            assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{error}");
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
