//! A client of each dialect: histories as request bodies, and replies as clients put them together.

use axum::Router;
use orchestrate_gateway::serve_stream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::task::JoinSet;

/// A wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Chat,
    Responses,
    Messages,
}

pub(super) const DIALECTS: [Dialect; 3] = [Dialect::Chat, Dialect::Responses, Dialect::Messages];

/// One entry of an agent's history.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    System(String),
    User(String),
    /// The result of a call.
    Result(String),
    Reply(WireReply),
}

/// A reply as a client has read it. Two are equal whatever their numbers are: not every dialect has them.
#[derive(Debug, Clone, Default)]
pub(super) struct WireReply {
    /// Its number among all replies, which comes and goes with its thinking; `None` if the client does not send
    /// it back.
    pub(super) number: Option<u32>,
    pub(super) thinking: Option<String>,
    pub(super) text: String,
    pub(super) calls: Vec<WireCall>,
}

impl PartialEq for WireReply {
    fn eq(&self, other: &Self) -> bool {
        self.thinking == other.thinking && self.text == other.text && self.calls == other.calls
    }
}

/// The signature of thinking by the number of its reply.
fn signature(number: u32) -> String {
    base64_simd::STANDARD.encode_to_string(format!("orchestrate.{number}"))
}

/// The number in a [`signature`].
fn signed(signature: &Value) -> Option<u32> {
    let text = base64_simd::STANDARD.decode_to_vec(signature.as_str()?).unwrap();
    let text = String::from_utf8(text).unwrap();
    Some(text.strip_prefix("orchestrate.").unwrap().parse().unwrap())
}

/// A tool call. Two are equal whatever their ids are: clients may make their own.
#[derive(Debug, Clone)]
pub(super) struct WireCall {
    /// As the reply had it; `None` if the client forgot it.
    pub(super) id: Option<String>,
    pub(super) name: String,
    /// JSON, as text.
    pub(super) arguments: String,
}

impl PartialEq for WireCall {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.arguments() == other.arguments()
    }
}

impl WireCall {
    pub(super) fn new(name: &Value, arguments: &Value) -> Self {
        Self { id: None, name: text_of(name), arguments: arguments.to_string() }
    }

    pub(super) fn arguments(&self) -> Value {
        serde_json::from_str(&self.arguments).unwrap()
    }
}

/// A request for one or more replies.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) dialect: Dialect,
    pub(super) history: Vec<Entry>,
    /// Number of tools that are offered.
    pub(super) tools: usize,
    pub(super) replies: usize,
    pub(super) max_tokens: Option<usize>,
    pub(super) stops: Vec<String>,
    pub(super) streams: bool,
}

/// What a client got.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) replies: Vec<WireReply>,
    /// Tokens of the prompt, and of all replies.
    pub(super) usage: (u64, u64),
}

impl Request {
    pub(super) fn path(&self) -> &'static str {
        match self.dialect {
            Dialect::Chat => "/v1/chat/completions",
            Dialect::Responses => "/v1/responses",
            Dialect::Messages => "/v1/messages",
        }
    }

    pub(super) fn body(&self) -> Value {
        let tools: Vec<Value> = (0..self.tools).map(|n| self.dialect.tool(n)).collect();
        let mut body = json!({"model": "policy", "stream": self.streams, "tools": tools});
        match self.dialect {
            Dialect::Chat => {
                body["messages"] = sent(&self.history).iter().map(chat_message).collect();
                body["stream_options"] = json!({"include_usage": true});
                body["n"] = json!(self.replies);
                body["stop"] = json!(self.stops);
                body["max_completion_tokens"] = json!(self.max_tokens);
            }
            Dialect::Responses => {
                body["input"] = sent(&self.history).iter().flat_map(items).collect();
                body["max_output_tokens"] = json!(self.max_tokens);
                body["include"] = json!(["reasoning.encrypted_content"]);
            }
            Dialect::Messages => {
                let mut history = self.history.as_slice();
                if let Some((Entry::System(text), rest)) = history.split_first() {
                    body["system"] = json!(text);
                    history = rest;
                }
                body["messages"] = turns(history).into();
                body["stop_sequences"] = json!(self.stops);
                body["max_tokens"] = json!(self.max_tokens.unwrap_or(4096));
            }
        }
        body
    }

    /// Reads the reply to this request.
    pub(super) fn read(&self, text: &str) -> Got {
        let document = || serde_json::from_str::<Value>(text).unwrap();
        let events = || -> Vec<Value> {
            let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
            data.filter_map(|data| serde_json::from_str(data).ok()).collect()
        };
        let number = |value: &Value| value.as_u64().unwrap();
        match (self.dialect, self.streams) {
            (Dialect::Chat, streams) => {
                let (messages, usage) = if streams {
                    let chunks = events();
                    let usage = chunks.last().unwrap()["usage"].clone();
                    ((0..self.replies).map(|index| of_chunks(&chunks, index)).collect(), usage)
                } else {
                    let document = document();
                    let choices = document["choices"].as_array().unwrap().iter();
                    let messages: Vec<Value> = choices.map(|c| c["message"].clone()).collect();
                    (messages, document["usage"].clone())
                };
                let usage = (number(&usage["prompt_tokens"]), number(&usage["completion_tokens"]));
                Got { replies: messages.iter().map(of_message).collect(), usage }
            }
            (Dialect::Responses, streams) => {
                let response = if streams {
                    let events = events();
                    let done = events.iter().filter(|e| e["type"] == "response.output_item.done");
                    let items: Vec<Value> = done.map(|event| event["item"].clone()).collect();
                    let response = events.last().unwrap()["response"].clone();
                    assert_eq!(response["output"], json!(items));
                    response
                } else {
                    document()
                };
                let usage = &response["usage"];
                let usage = (number(&usage["input_tokens"]), number(&usage["output_tokens"]));
                Got { replies: vec![of_items(response["output"].as_array().unwrap())], usage }
            }
            (Dialect::Messages, streams) => {
                let message = if streams { of_events(&events()) } else { document() };
                let usage = &message["usage"];
                let cached = number(&usage["cache_read_input_tokens"]);
                let prompt = number(&usage["input_tokens"]) + cached;
                let usage = (prompt, number(&usage["output_tokens"]));
                Got { replies: vec![of_blocks(message["content"].as_array().unwrap())], usage }
            }
        }
    }
}

impl Dialect {
    /// Tool number `n` in this dialect.
    fn tool(self, n: usize) -> Value {
        let (name, schema) = (format!("t{n}"), json!({"type": "object", "properties": {}}));
        match self {
            Self::Chat => {
                json!({"type": "function", "function": {"name": name, "parameters": schema}})
            }
            Self::Responses => json!({"type": "function", "name": name, "parameters": schema}),
            Self::Messages => json!({"name": name, "input_schema": schema}),
        }
    }
}

/// The schemas of tools as chat templates read them.
pub(super) fn tool_schemas(count: usize) -> Vec<Value> {
    (0..count).map(|n| Dialect::Chat.tool(n)).collect()
}

/// An entry as a client sends it, with the ids of its calls, or of the call whose result it is.
struct SentEntry<'a> {
    entry: &'a Entry,
    ids: Vec<String>,
}

/// Entries as a client sends them: results in the order in which they arrived, the last call's first.
fn sent(history: &[Entry]) -> Vec<SentEntry<'_>> {
    let mut sent: Vec<SentEntry<'_>> = Vec::new();
    let mut open = 0;
    for (index, entry) in history.iter().enumerate() {
        let ids = match entry {
            Entry::Reply(reply) => {
                let calls = reply.calls.iter().enumerate();
                let own = |n: usize| format!("c{index}_{n}");
                calls.map(|(n, call)| call.id.clone().unwrap_or_else(|| own(n))).collect()
            }
            Entry::Result(_) => {
                let calls = sent.iter().rev().find(|sent| matches!(sent.entry, Entry::Reply(_)));
                vec![calls.unwrap().ids[open].clone()]
            }
            Entry::System(_) | Entry::User(_) => Vec::new(),
        };
        let is_result = matches!(entry, Entry::Result(_));
        let at = sent.len() - if is_result { open } else { 0 };
        open = if is_result { open + 1 } else { 0 };
        sent.insert(at, SentEntry { entry, ids });
    }
    sent
}

fn chat_message(SentEntry { entry, ids }: &SentEntry<'_>) -> Value {
    match entry {
        Entry::System(text) => json!({"role": "system", "content": text}),
        Entry::User(text) => json!({"role": "user", "content": text}),
        Entry::Result(text) => json!({"role": "tool", "tool_call_id": ids[0], "content": text}),
        Entry::Reply(reply) => {
            let calls = reply.calls.iter().zip(ids).map(|(call, id)| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": id, "type": "function", "function": function})
            });
            let mut message = json!({"role": "assistant", "content": reply.text});
            if let Some(thinking) = &reply.thinking {
                message["reasoning_content"] = json!(thinking);
            }
            if !reply.calls.is_empty() {
                message["tool_calls"] = calls.collect();
            }
            message
        }
    }
}

fn items(SentEntry { entry, ids }: &SentEntry<'_>) -> Vec<Value> {
    let message = |role: &str, kind: &str, text: &str| {
        let content = json!([{"type": kind, "text": text}]);
        json!({"type": "message", "role": role, "content": content})
    };
    match entry {
        Entry::System(text) => vec![message("developer", "input_text", text)],
        Entry::User(text) => vec![message("user", "input_text", text)],
        Entry::Result(text) => {
            vec![json!({"type": "function_call_output", "call_id": ids[0], "output": text})]
        }
        Entry::Reply(reply) => {
            let thinking = reply.thinking.iter().map(|text| {
                json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]})
            });
            let calls = reply.calls.iter().zip(ids).map(|(call, id)| {
                let WireCall { name, arguments, .. } = call;
                json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
            });
            let text = message("assistant", "output_text", &reply.text);
            thinking.chain([text]).chain(calls).collect()
        }
    }
}

/// Messages of the Messages dialect: results of calls and the text after them are one message.
fn turns(history: &[Entry]) -> Vec<Value> {
    let mut turns: Vec<Value> = Vec::new();
    let mut follows_result = false;
    for SentEntry { entry, ids } in sent(history) {
        let block = |text: &str| json!({"type": "text", "text": text});
        let (role, blocks) = match entry {
            Entry::System(text) => ("system", vec![block(text)]),
            Entry::User(text) => ("user", vec![block(text)]),
            Entry::Result(text) => {
                let content = json!([block(text)]);
                (
                    "user",
                    vec![json!({"type": "tool_result", "tool_use_id": ids[0], "content": content})],
                )
            }
            Entry::Reply(reply) => {
                let thinking = reply.thinking.iter().map(|text| {
                    let mut block = json!({"type": "thinking", "thinking": text});
                    if let Some(number) = reply.number {
                        block["signature"] = json!(signature(number));
                    }
                    block
                });
                let text = (!reply.text.is_empty()).then(|| block(&reply.text));
                let calls = reply.calls.iter().zip(&ids).map(|(call, id)| {
                    let (name, input) = (&call.name, call.arguments());
                    json!({"type": "tool_use", "id": id, "name": name, "input": input})
                });
                ("assistant", thinking.chain(text).chain(calls).collect())
            }
        };
        match turns.last_mut() {
            Some(last) if follows_result && role == "user" => {
                last["content"].as_array_mut().unwrap().extend(blocks);
            }
            _ => turns.push(json!({"role": role, "content": blocks})),
        }
        follows_result = matches!(entry, Entry::Result(_));
    }
    turns
}

fn append(field: &mut Value, text: &Value) {
    *field = json!(field.as_str().unwrap_or_default().to_owned() + text.as_str().unwrap());
}

/// The message of one choice, put together of chunks.
fn of_chunks(chunks: &[Value], choice: usize) -> Value {
    let mut message = json!({"content": ""});
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    for delta in choices.filter(|c| c["index"] == choice).map(|c| &c["delta"]) {
        for field in ["content", "reasoning_content"] {
            if delta[field].is_string() {
                append(&mut message[field], &delta[field]);
            }
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if call["id"].is_string() {
                if message["tool_calls"].is_null() {
                    message["tool_calls"] = json!([]);
                }
                message["tool_calls"].as_array_mut().unwrap().push(call.clone());
            } else {
                let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
                let arguments = &mut message["tool_calls"][index]["function"]["arguments"];
                append(arguments, &call["function"]["arguments"]);
            }
        }
    }
    message
}

/// The message that its events make.
fn of_events(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut blocks: Vec<Value> = Vec::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => blocks.push(event["content_block"].clone()),
            "content_block_delta" => {
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append(&mut block["text"], &delta["text"]),
                    "thinking_delta" => append(&mut block["thinking"], &delta["thinking"]),
                    "signature_delta" => block["signature"] = delta["signature"].clone(),
                    "input_json_delta" => append(&mut block["json"], &delta["partial_json"]),
                    _ => {}
                }
            }
            "content_block_stop" => {
                let block = blocks.last_mut().unwrap();
                if let Some(json) = block["json"].as_str() {
                    block["input"] = serde_json::from_str(json).unwrap();
                }
            }
            "message_delta" => {
                message["usage"]["output_tokens"] = event["usage"]["output_tokens"].clone();
            }
            _ => {}
        }
    }
    message["content"] = json!(blocks);
    message
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn of_message(message: &Value) -> WireReply {
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| WireCall {
        id: Some(text_of(&call["id"])),
        name: text_of(&call["function"]["name"]),
        arguments: text_of(&call["function"]["arguments"]),
    });
    WireReply {
        number: None,
        thinking: message["reasoning_content"].as_str().map(str::to_owned),
        text: text_of(&message["content"]),
        calls: calls.collect(),
    }
}

fn of_items(items: &[Value]) -> WireReply {
    let mut reply = WireReply::default();
    for item in items {
        match item["type"].as_str().unwrap() {
            "reasoning" => reply.thinking = Some(text_of(&item["summary"][0]["text"])),
            "message" => reply.text.push_str(&text_of(&item["content"][0]["text"])),
            "function_call" => reply.calls.push(WireCall {
                id: Some(text_of(&item["call_id"])),
                name: text_of(&item["name"]),
                arguments: text_of(&item["arguments"]),
            }),
            kind => panic!("an item of type {kind}"),
        }
    }
    reply
}

fn of_blocks(blocks: &[Value]) -> WireReply {
    let mut reply = WireReply::default();
    for block in blocks {
        match block["type"].as_str().unwrap() {
            "thinking" => {
                reply.thinking = Some(text_of(&block["thinking"]));
                reply.number = signed(&block["signature"]);
            }
            "text" => reply.text.push_str(&text_of(&block["text"])),
            "tool_use" => reply.calls.push(WireCall {
                id: Some(text_of(&block["id"])),
                name: text_of(&block["name"]),
                arguments: block["input"].to_string(),
            }),
            kind => panic!("a block of type {kind}"),
        }
    }
    reply
}

/// Sends requests to a gateway over byte streams, each over a connection of its own.
#[derive(Debug, Clone)]
pub(super) struct Client(pub(super) Router);

impl Client {
    async fn send(&self, path: &str, body: &Value, is_retry: bool) -> (DuplexStream, JoinSet<()>) {
        // Without chunks: the end of the connection ends the reply.
        self.send_as("HTTP/1.0", path, body, is_retry).await
    }

    async fn send_as(
        &self,
        version: &str,
        path: &str,
        body: &Value,
        is_retry: bool,
    ) -> (DuplexStream, JoinSet<()>) {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let mut serving = JoinSet::new();
        serving.spawn(serve_stream(server, self.0.clone()));
        let body = body.to_string();
        let retries = u8::from(is_retry);
        let head = format!(
            "POST {path} {version}\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             x-stainless-retry-count: {retries}\r\n\r\n",
            body.len()
        );
        client.write_all(head.as_bytes()).await.unwrap();
        client.write_all(body.as_bytes()).await.unwrap();
        (client, serving)
    }

    /// Sends a request, and reads the body of its reply.
    pub(super) async fn post(&self, path: &str, body: &Value, is_retry: bool) -> String {
        let (mut client, mut serving) = self.send(path, body, is_retry).await;
        let mut reply = String::new();
        client.read_to_string(&mut reply).await.unwrap();
        drop(client);
        serving.join_next().await;
        let (head, text) = reply.split_once("\r\n\r\n").unwrap();
        assert_eq!(head.split(' ').nth(1), Some("200"), "{reply}");
        text.to_owned()
    }

    /// Sends a request, and closes the connection in the middle of its reply.
    pub(super) async fn post_and_close(&self, path: &str, body: &Value) {
        let (mut client, mut serving) = self.send_as("HTTP/1.1", path, body, false).await;
        // All of it was written: it fits into the stream's buffer.
        client.read_exact(&mut [0; 20]).await.unwrap();
        drop(client);
        serving.join_next().await;
    }

    /// Sends a request, and leaves before its reply, once `has_come` says that it was received.
    pub(super) async fn post_and_leave(
        &self,
        path: &str,
        body: &Value,
        has_come: impl Fn() -> bool,
    ) {
        let (client, mut serving) = self.send(path, body, false).await;
        until(has_come).await;
        drop(client);
        serving.join_next().await;
    }
}

/// Waits until `is_true`.
pub(super) async fn until(is_true: impl Fn() -> bool) {
    let waiting = async {
        while !is_true() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(2), waiting).await.unwrap();
}
