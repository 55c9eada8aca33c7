//! Streamed replies: recorded by SGLang 0.5.23, and made up.

use crate::server::{
    Reply, SGLANG, one_token, options, recording, request, sample, serve, server_info,
};
use orchestrate_engine::{
    Client, Engine as _, EngineErrorKind, Finish, GenerateRequest, Sglang, SglangClient,
    TokenListener,
};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::task::JoinSet;

/// The tokens of every call that was begun.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<Vec<u32>>>);

impl TokenListener for Heard {
    fn begin(&self) {
        self.0.lock().unwrap().push(Vec::new());
    }

    fn sampled(&self, ids: &[u32]) {
        self.0.lock().unwrap().last_mut().unwrap().extend(ids);
    }
}

/// A client of a server that answers generations by `script`. It has asked what the server is.
async fn client(
    tasks: &mut JoinSet<()>,
    info: Value,
    script: impl Fn(&Value) -> Reply + Send + Sync + 'static,
) -> SglangClient {
    let (url, _) = serve(tasks, move |path, sent| match path {
        "/server_info" => Reply::Now(200, info.to_string()),
        "/model_info" => Reply::Now(200, json!({"weight_version": "0"}).to_string()),
        _ => script(sent),
    })
    .await;
    let client: Client<Sglang> = Client::new(options(&url)).unwrap();
    client.info().await.unwrap();
    client
}

fn listened(request: GenerateRequest) -> (GenerateRequest, Arc<Heard>) {
    let heard = Arc::new(Heard::default());
    (GenerateRequest { listener: Some(Arc::clone(&heard) as _), ..request }, heard)
}

#[tokio::test]
async fn a_recorded_stream_is_read_and_checked_like_a_whole_reply() {
    let Some(exchanges) = recording(SGLANG, "stream") else { return };
    let exchange = &exchanges[0];
    let sent: Value =
        serde_json::from_str(exchange["request"]["body_raw"].as_str().unwrap()).unwrap();
    let prompt: Vec<u32> = serde_json::from_value(sent["input_ids"].clone()).unwrap();
    let lines = exchange["response"]["stream_lines"].as_array().unwrap();
    let text: String = lines.iter().map(|line| line[1].as_str().unwrap()).collect();
    let frame = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let frame: Value = serde_json::from_str(frame).unwrap();
    let id = frame["meta_info"]["id"].as_str().unwrap().to_owned();
    let mut tasks = JoinSet::new();
    let client = client(&mut tasks, server_info(), move |sent| {
        assert_eq!(sent["stream"], true);
        Reply::Stream(text.replace(&id, sent["rid"].as_str().unwrap()))
    })
    .await;
    let (request, heard) = listened(request(prompt.clone(), 8, Some(0)));
    let got = sample(&client, request).await.unwrap();
    assert_eq!(got.output_ids(), [193, 761, 823, 761, 690, 542, 46, 761]);
    assert_eq!(*got.finish(), Finish::Length);
    assert_eq!(got.routed_experts.as_ref().unwrap().rows(), prompt.len() + 7);
    assert_eq!(*heard.0.lock().unwrap(), [got.output_ids()]);
}

#[tokio::test]
async fn only_a_listener_makes_a_reply_stream_and_only_where_frames_are_cumulative() {
    for (incremental, listens, streams) in
        [(false, false, false), (false, true, true), (true, true, false)]
    {
        let mut info = server_info();
        info["incremental_streaming_output"] = json!(incremental);
        let mut tasks = JoinSet::new();
        let client = client(&mut tasks, info, move |sent| {
            assert_eq!(sent["stream"], streams);
            let reply = one_token(sent, "0");
            if streams {
                Reply::Stream(format!("data: {reply}\n\ndata: [DONE]\n\n"))
            } else {
                Reply::Now(200, reply)
            }
        })
        .await;
        let (listened, heard) = listened(request(vec![1, 2], 1, None));
        let request = if listens { listened } else { request(vec![1, 2], 1, None) };
        assert_eq!(sample(&client, request).await.unwrap().output_ids(), [5]);
        let expected: Vec<Vec<u32>> = match (listens, streams) {
            (false, _) => Vec::new(),
            (true, true) => vec![vec![5]],
            (true, false) => vec![Vec::new()],
        };
        assert_eq!(*heard.0.lock().unwrap(), expected);
    }
}

#[tokio::test]
async fn a_stream_that_is_not_a_whole_reply_is_an_error() {
    let partial = |sent: &Value| {
        let mut frame: Value = serde_json::from_str(&one_token(sent, "0")).unwrap();
        frame["meta_info"]["finish_reason"] = Value::Null;
        format!("data: {frame}\n\n")
    };
    let error = |status: u16| {
        let error = json!({"error": {"message": "busy", "code": status}});
        format!("data: {error}\n\ndata: [DONE]\n\n")
    };
    for (case, expected) in
        [("cut", None), ("error", Some(503)), ("late error", Some(400)), ("empty", None)]
    {
        let mut tasks = JoinSet::new();
        let client = client(&mut tasks, server_info(), move |sent| {
            Reply::Stream(match case {
                "cut" => partial(sent),
                "error" => error(503),
                "late error" => partial(sent) + &error(400),
                _ => String::new(),
            })
        })
        .await;
        let (request, heard) = listened(request(vec![1, 2], 4, None));
        let error = sample(&client, request).await.unwrap_err();
        match (&error.kind, expected) {
            (EngineErrorKind::Refused { status, .. }, Some(expected)) => {
                assert_eq!(*status, expected);
            }
            (EngineErrorKind::InvalidReply(_), None) => {}
            _ => panic!("{case}: {error}"),
        }
        if case == "cut" {
            assert_eq!(*heard.0.lock().unwrap(), [[5]]);
        }
    }
}

#[tokio::test]
async fn a_server_that_ignores_the_wish_to_stream_is_understood() {
    let mut tasks = JoinSet::new();
    let client =
        client(&mut tasks, server_info(), |sent| Reply::Now(200, one_token(sent, "0"))).await;
    let (request, heard) = listened(request(vec![1, 2], 1, None));
    assert_eq!(sample(&client, request).await.unwrap().output_ids(), [5]);
    assert_eq!(*heard.0.lock().unwrap(), [Vec::<u32>::new()]);
}
