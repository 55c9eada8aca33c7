//! The probe of a chat server: a conversation of two turns, as a run has them.

use super::{COMPLETIONS, ChatClient, ChatServerOptions, REPLY_LIMIT, Wanted, read};
use crate::capability::CapabilityFinding;
use crate::error::EngineErrorKind;
use crate::http::send;
use crate::message::{AssistantMessage, ChatMessage};
use crate::probe::{BusyCalls, is_unreachable};
use crate::reply::truncated;
use crate::request::Sampling;

/// The result of every call: none is performed.
const OBSERVATION: &str = "(no output)";

/// What the probe reports: facts, and problems.
type Probed = (Vec<(&'static str, String)>, Vec<CapabilityFinding>);

impl ChatClient {
    /// Samples a turn, and another one that answers its calls.
    ///
    /// # Errors
    /// If the server is unreachable. What it refuses is a finding.
    pub(super) async fn converse(&self) -> Result<Probed, EngineErrorKind> {
        let mut messages = self.options.prompt.messages.to_vec();
        let mut facts = vec![("use", "evaluation only".to_owned())];
        for turn in 1..=2 {
            let reply = match self.ask_patiently(&messages).await {
                Ok(reply) => reply,
                Err(kind) if is_unreachable(&kind) => return Err(kind),
                Err(kind) => {
                    let remedy = self.remedy(&messages, &kind).await;
                    let problem = format!("{COMPLETIONS}, turn {turn}: {kind}");
                    let finding = CapabilityFinding::refusal("generation", problem, remedy);
                    return Ok((facts, vec![finding]));
                }
            };
            let AssistantMessage { content, thinking, tool_calls } = reply;
            if turn == 1 {
                let calls = if tool_calls.is_empty() { "none in the probe" } else { "separate" };
                facts.push(("tool calls", calls.to_owned()));
            }
            let ids: Vec<String> = tool_calls.iter().map(|call| call.id.clone()).collect();
            messages.push(ChatMessage { tool_calls, thinking, ..message("assistant", &content) });
            messages.extend(ids.iter().map(|id| ChatMessage {
                tool_call_id: Some(id.clone()),
                ..message("tool", OBSERVATION)
            }));
            if ids.is_empty() {
                messages.push(message("user", OBSERVATION));
            }
        }
        let other = self.answered_as.get().map(|other| {
            let (asked, other) = (truncated(&self.model), truncated(other));
            facts.push(("replies name", other.clone()));
            let problem = format!("a request for `{asked}` is answered by `{other}`");
            let remedy = "make sure that it is the same model, or correct engine.served_model";
            CapabilityFinding::warning("model", problem, remedy)
        });
        Ok((facts, other.into_iter().collect()))
    }

    /// Samples one turn with the settings of the run, also from a busy server.
    async fn ask_patiently(
        &self,
        messages: &[ChatMessage],
    ) -> Result<AssistantMessage, EngineErrorKind> {
        let mut busy = BusyCalls::default();
        loop {
            match self.ask(messages, &self.options).await {
                Err(kind) => busy.wait(kind).await?,
                reply @ Ok(_) => return reply,
            }
        }
    }

    /// Samples one turn with the fields and values of a run.
    async fn ask(
        &self,
        messages: &[ChatMessage],
        options: &ChatServerOptions,
    ) -> Result<AssistantMessage, EngineErrorKind> {
        let ChatServerOptions { temperature, top_p, max_tokens, ref prompt, .. } = *options;
        let sampling = Sampling {
            temperature,
            top_p,
            max_new_tokens: max_tokens,
            stop_token_ids: Vec::new(),
            seed: u64::MAX,
        };
        let wanted = Wanted { messages, tools: &prompt.tools, sampling: &sampling, max_tokens };
        let post = self.server.sampling_request(COMPLETIONS, self.body(&wanted, options)?, "probe");
        let body = send(post, options.deadline, REPLY_LIMIT).await?;
        self.note_model(&body);
        read(&body, messages.len()).map(|(_, message, _)| message)
    }

    /// What to do about a refused request. The server's words say it to a person only, so other settings
    /// are tried until one is accepted.
    async fn remedy(&self, messages: &[ChatMessage], kind: &EngineErrorKind) -> String {
        let general = "see engine.served_model, engine.api_key_env and the server's log";
        if !matches!(kind, EngineErrorKind::Refused { status: 400 | 422, .. }) {
            return general.to_owned();
        }
        for (options, settings) in self.options.alternatives() {
            if self.ask(messages, &options).await.is_ok() {
                return format!("set {settings}");
            }
        }
        let smaller = ChatServerOptions { max_tokens: 16, ..self.options.clone() };
        if self.ask(messages, &smaller).await.is_ok() {
            return "lower rollout.max_response_tokens".to_owned();
        }
        general.to_owned()
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content: content.to_owned(), ..ChatMessage::default() }
}
