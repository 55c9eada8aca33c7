//! The gateway's seam over a [`Conversation`].

use crate::api::{Action, Message, MessageExtra};
use crate::conversation::{
    Answered, Conversation, HistoryMessage, ReplyError, ReplyRequest, RequestPrompt, Unanswered,
    call_id,
};
use crate::template::ShownExtras;
use orchestrate_engine::Finish;
use orchestrate_gateway as gateway;
use orchestrate_gateway::{
    AskedSampling, ErrorCode, Role, RoutedExperts, SampleError, SampleRequest, Sampled,
    SampledTokens, Sampler, TextSink, TokenRequest, ToolChoice,
};
use orchestrate_routing::RoutingMask;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Lets the gateway sample from a conversation.
#[derive(Debug)]
pub(crate) struct ConversationSampler {
    pub(crate) conversation: Arc<Conversation>,
    pub(crate) model: String,
    /// Whether prompts show the tools that the agent sends.
    pub(crate) show_tools: bool,
    /// Whether the agent may send tokenised prompts. An agent in a sandbox may not: commands of the
    /// policy could insert control tokens.
    pub(crate) takes_tokens: bool,
    /// The tools of the latest request, and their schemas.
    pub(crate) schemas: Mutex<Option<KnownTools>>,
    /// Places for requests that are being answered: commands of the policy can send requests, too.
    pub(crate) places: Semaphore,
}

/// Tools as an agent declares them, and in the form that chat templates read.
#[derive(Debug)]
pub(crate) struct KnownTools {
    declared: Vec<gateway::Tool>,
    schemas: Arc<Vec<Value>>,
}

/// Model name under which the policy is served.
pub(crate) const MODEL: &str = "policy";

/// Requests of one episode that are answered at the same time.
pub(crate) const PLACES: usize = 16;

#[async_trait::async_trait]
impl Sampler for ConversationSampler {
    fn model(&self) -> &str {
        &self.model
    }

    fn context(&self) -> usize {
        self.conversation.max_sequence_tokens()
    }

    fn honours_sampling(&self) -> bool {
        self.conversation.honours_sampling()
    }

    fn switches_thinking(&self, wanted: bool) -> bool {
        self.conversation.chat().thinking_for(Some(wanted)) == Some(wanted)
    }

    fn shows_tools(&self) -> bool {
        self.show_tools && self.conversation.chat().shows_tools_of_requests()
    }

    async fn sample(
        &self,
        request: &Arc<SampleRequest>,
        sample: usize,
        text: Option<TextSink>,
    ) -> Result<Sampled, SampleError> {
        let _place = self.place().await?;
        let request_of_reply = self.reply_request(request, sample);
        let answered =
            self.conversation.sample_live(&request_of_reply, text).await.map_err(refused)?;
        Ok(self.sampled(answered, request.logprobs))
    }

    fn unanswered(&self, code: ErrorCode, message: &str) {
        self.conversation.note(Some(Unanswered { code, message: message.to_owned() }));
    }

    async fn count(&self, request: &SampleRequest) -> Result<usize, SampleError> {
        let _place = self.place().await?;
        self.conversation.count(&self.reply_request(request, 0)).await.map_err(refused)
    }

    async fn generate(&self, request: TokenRequest) -> Result<SampledTokens, SampleError> {
        if !self.takes_tokens {
            let problem = "an agent in a sandbox sends messages, not tokens";
            return Err(SampleError::Refused(problem.to_owned()));
        }
        let _place = self.place().await?;
        let TokenRequest { token_ids, max_tokens, rows_from, sampling, repeats, overridden } =
            request;
        let request = Arc::new(ReplyRequest {
            prompt: RequestPrompt::Tokens(token_ids),
            max_tokens,
            stops: Arc::default(),
            sampling: self.honoured(sampling),
            sample: 0,
            repeats,
            overridden: overridden.paths().map(str::to_owned).collect(),
        });
        let Answered { reply, receipt } =
            self.conversation.sample(&request).await.map_err(refused)?;
        Ok(SampledTokens {
            token_ids: reply.token_ids.clone(),
            logprobs: reply.logprobs.clone(),
            finish: match reply.finish {
                Finish::Length | Finish::Abort => gateway::Finish::Length,
                Finish::Stop => gateway::Finish::Stop,
            },
            cached: reply.cached_tokens.min(reply.prompt_tokens),
            rows: reply.rows.as_ref().map(|rows| routed_experts(rows, rows_from)),
            receipt,
        })
    }
}

/// The routing rows from index `start` on, as they are sent.
fn routed_experts(rows: &RoutingMask, start: usize) -> RoutedExperts {
    let shape = rows.shape();
    let start = start.min(rows.rows());
    RoutedExperts {
        start,
        bytes: (start..rows.rows()).filter_map(|row| rows.row(row)).collect::<Vec<_>>().concat(),
        shape: [rows.rows() - start, shape.moe_layers.len(), shape.top_k],
        dtype: if shape.id_bytes() == 1 { "uint8" } else { "uint16" },
    }
}

impl ConversationSampler {
    async fn place(&self) -> Result<SemaphorePermit<'_>, SampleError> {
        self.places.acquire().await.map_err(|error| SampleError::Failed(error.to_string()))
    }

    /// What decides of how a client asks for its reply to be sampled.
    fn honoured(&self, asked: AskedSampling) -> AskedSampling {
        if self.honours_sampling() { asked } else { AskedSampling::default() }
    }

    /// A request in the form that the conversation compares and renders.
    fn reply_request(&self, request: &SampleRequest, sample: usize) -> Arc<ReplyRequest> {
        let offered = match &request.tool_choice {
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) if self.show_tools => {
                request.tools.as_slice()
            }
            _ => &[],
        };
        let extras = self.conversation.chat().shown_extras(!offered.is_empty());
        Arc::new(ReplyRequest {
            prompt: RequestPrompt::Messages {
                messages: history(&request.messages, extras),
                tools: self.schemas(offered),
                thinking: self.conversation.chat().thinking_for(request.thinking),
            },
            max_tokens: request.max_tokens,
            stops: request.stop.clone().into(),
            sampling: self.honoured(request.sampling),
            sample,
            repeats: request.repeats,
            overridden: request.overridden.paths().map(str::to_owned).collect(),
        })
    }

    /// The schemas of tools. An agent declares the same ones in every request.
    fn schemas(&self, declared: &[gateway::Tool]) -> Arc<Vec<Value>> {
        if declared.is_empty() {
            return Arc::default();
        }
        let mut latest = self.schemas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = latest.as_ref().filter(|known| known.declared == declared) {
            return Arc::clone(&known.schemas);
        }
        let schemas: Arc<Vec<Value>> = Arc::new(declared.iter().map(schema).collect());
        *latest = Some(KnownTools { declared: declared.to_vec(), schemas: Arc::clone(&schemas) });
        schemas
    }

    fn sampled(&self, answered: Answered, lists_tokens: bool) -> Sampled {
        let Answered { reply, receipt } = answered;
        let calls = reply.message.tool_calls.iter().enumerate();
        let tool_calls: Vec<gateway::ToolCall> = calls
            .map(|(index, action)| gateway::ToolCall {
                id: call_id(reply.number, index),
                name: action.name.clone(),
                arguments: action.arguments.to_string(),
            })
            .collect();
        let chat = self.conversation.chat();
        let pairs = reply.token_ids.iter().zip(&reply.logprobs);
        let tokens = pairs.filter(|_| lists_tokens).map(|(&id, &logprob)| {
            let bytes = chat.token_bytes(id);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            gateway::SampledToken { id, text, bytes, logprob }
        });
        let finish = match reply.finish {
            Finish::Length | Finish::Abort => gateway::Finish::Length,
            Finish::Stop if reply.stop_string.is_some() && tool_calls.is_empty() => {
                gateway::Finish::StopString(reply.stop_string.clone().unwrap_or_default())
            }
            Finish::Stop if tool_calls.is_empty() => gateway::Finish::Stop,
            Finish::Stop => gateway::Finish::ToolCalls,
        };
        Sampled {
            number: reply.number,
            reasoning: reply.reasoning.clone(),
            content: reply.message.content.clone(),
            tool_calls,
            finish,
            usage: gateway::Usage {
                prompt: reply.prompt_tokens,
                cached: reply.cached_tokens.min(reply.prompt_tokens),
                completion: reply.token_ids.len(),
                reasoning: 0,
            },
            tokens: tokens.collect(),
            receipt,
        }
    }
}

fn refused(error: ReplyError) -> SampleError {
    match error {
        ReplyError::Refused(problem) => SampleError::Refused(problem),
        ReplyError::TooLong { prompt, limit } => SampleError::TooLong { prompt, context: limit },
        ReplyError::Ended(reason) => SampleError::Ended(reason),
        ReplyError::Failed(error) => SampleError::Failed(error),
    }
}

/// A tool in the form that chat templates read, with its keys in the usual order: many templates write it as JSON.
fn schema(tool: &gateway::Tool) -> Value {
    let function = match &tool.description {
        Some(text) => {
            json!({"name": tool.name, "description": text, "parameters": tool.parameters})
        }
        None => json!({"name": tool.name, "parameters": tool.parameters}),
    };
    json!({"type": "function", "function": function})
}

/// The messages, with what prompts show of ids and names.
fn history(messages: &[gateway::Message], shown: ShownExtras) -> Vec<Arc<HistoryMessage>> {
    let mut names = HashMap::new();
    let each = messages.iter().map(|message| {
        for call in &message.tool_calls {
            names.insert(call.id.as_str(), call.name.as_str());
        }
        let called = message.tool_call_id.as_deref().and_then(|id| names.get(id).copied());
        let mut entry = entry(message);
        if shown.ids {
            entry.message.extra.call_ids.clone_from(&entry.call_ids);
            entry.message.extra.tool_call_id.clone_from(&message.tool_call_id);
        }
        if shown.names {
            entry.message.extra.name = message.name.as_deref().or(called).map(str::to_owned);
        }
        Arc::new(entry)
    });
    each.collect()
}

fn entry(message: &gateway::Message) -> HistoryMessage {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let calls = message.tool_calls.iter().map(|call| {
        let arguments = call.parsed().unwrap_or_else(|| Value::from(call.arguments.as_str()));
        Action { name: call.name.clone(), arguments }
    });
    let reasoning = message.reasoning.clone();
    let reply = message.reply;
    let call_ids = message.tool_calls.iter().map(|call| call.id.clone()).collect();
    let message = Message {
        role: role.to_owned(),
        content: message.content.clone(),
        tool_calls: calls.collect(),
        extra: MessageExtra::default(),
    };
    HistoryMessage { message, reasoning, reply, call_ids }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_have_their_keys_in_the_order_of_requests() {
        let tool = |description: Option<&str>| gateway::Tool {
            name: "ls".to_owned(),
            description: description.map(str::to_owned),
            parameters: json!({"type": "object"}),
        };
        for (description, expected) in [
            (
                Some("lists"),
                r#"{"type":"function","function":{"name":"ls","description":"lists","parameters":{"type":"object"}}}"#,
            ),
            (
                None,
                r#"{"type":"function","function":{"name":"ls","parameters":{"type":"object"}}}"#,
            ),
        ] {
            assert_eq!(schema(&tool(description)).to_string(), expected);
        }
    }
}
