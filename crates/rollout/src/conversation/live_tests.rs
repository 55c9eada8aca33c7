//! Replies that are read while they are sampled.

use super::tests::{chat, conversation, deliver, request, sent};
use super::*;
use orchestrate_engine::{EngineErrorKind, Finish};
use orchestrate_gateway::ShownText;
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{ModelShape, TokenId};

fn ids(text: &str) -> Vec<TokenId> {
    chat().encode(text).unwrap()
}

fn closed(text: &str) -> FakeReply {
    let mut ids = ids(text);
    ids.push(chat().end_of_turn());
    FakeReply::Tokens { ids, finish: Finish::Stop }
}

/// An engine whose replies depend on the number of the call.
fn engine(script: impl Fn(usize) -> FakeReply + Send + Sync + 'static) -> Arc<FakeEngine> {
    let shape = ModelShape { context: 1 << 16, ..toy_shape(chat().vocab_size()) };
    Arc::new(FakeEngine::new(shape, move |_, call| script(call)))
}

/// Waits until this is shown.
async fn until(shown: &mut ShownText, reasoning: &str, content: &str) {
    loop {
        {
            let now = shown.now();
            if now.reasoning == reasoning && now.content == content {
                return;
            }
        }
        assert!(shown.changed().await, "not shown: {content}");
    }
}

/// Aborts the engine's latest request, as a weight update does.
fn abort(engine: &FakeEngine) {
    engine.abort(&engine.requests().last().unwrap().request_id);
}

#[tokio::test]
async fn text_is_shown_while_the_engine_samples_and_after_an_abort() {
    let engine = engine(|call| match call {
        0 => FakeReply::UntilAborted { ids: ids("<think>\nhm, yes\n</think>\n\nLook at") },
        1 => FakeReply::UntilAborted { ids: ids(" this.\n\n<tool_") },
        _ => closed("call>\n{\"name\": \"bash\", \"arguments\": {}}\n</tool_call>"),
    });
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    let (sink, mut shown) = TextSink::new();
    let sampling = conversation.sample_live(&request, Some(sink));
    let watching = async {
        until(&mut shown, "hm, yes", "Look at").await;
        abort(&engine);
        until(&mut shown, "hm, yes", "Look at this.").await;
        abort(&engine);
    };
    let (reply, ()) = tokio::join!(sampling, watching);
    let reply = reply.unwrap().reply;
    assert_eq!(reply.reasoning.as_deref(), Some("hm, yes"));
    assert_eq!(reply.message.content, "Look at this.");
    assert_eq!(reply.message.tool_calls.len(), 1);
    let prompt = engine.requests()[0].token_ids.len();
    assert_eq!(shown.now().prompt, prompt);
    let finished = conversation.finish();
    assert_eq!(finished.branches[0].trajectory.response_tokens(), reply.token_ids.len());
}

#[tokio::test]
async fn a_call_that_fails_is_shown_and_replaced_by_the_next_one() {
    let engine = engine(|call| match call {
        0 => FakeReply::Break {
            ids: ids("Hello, wor"),
            kind: EngineErrorKind::invalid_reply("cut off"),
        },
        _ => closed("Other words"),
    });
    let conversation = conversation(&engine, 10);
    let (sink, mut shown) = TextSink::new();
    let request = request(&[sent("user", "a")]);
    let Answered { reply, receipt } = conversation.sample_live(&request, Some(sink)).await.unwrap();
    assert_eq!(reply.message.content, "Other words");
    assert_eq!(shown.now().content, "Other words");
    assert_eq!(engine.requests().len(), 2);
    // The agent saw an error. Unless it gets the reply after all, what it does is not its result.
    drop(receipt);
    let failure = conversation.finish().failure;
    assert!(failure.unwrap().contains("cut off"));
}

#[tokio::test]
async fn an_agent_that_gets_a_reply_after_an_error_has_lost_nothing() {
    let engine = engine(|call| match call {
        0 => FakeReply::Break {
            ids: ids("Hello, wor"),
            kind: EngineErrorKind::invalid_reply("cut off"),
        },
        _ => closed("Other words"),
    });
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "a")]);
    let (sink, _shown) = TextSink::new();
    let reply = conversation.sample_live(&request, Some(sink)).await.unwrap().reply;
    for is_delivered in [false, true] {
        let again = conversation.sample_live(&request, None).await.unwrap();
        assert!(Arc::ptr_eq(&reply, &again.reply));
        if is_delivered {
            deliver(again);
        }
    }
    assert_eq!(conversation.finish().failure, None);
}

#[tokio::test]
async fn a_client_that_asks_again_is_shown_the_text_from_its_beginning() {
    let engine = engine(|call| match call {
        0 => FakeReply::UntilAborted { ids: ids("Hello, wor") },
        _ => closed("ld"),
    });
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "a")]);
    {
        let (sink, mut shown) = TextSink::new();
        let lost = conversation.sample_live(&request, Some(sink));
        tokio::select! {
            _ = lost => panic!("the engine waits"),
            () = until(&mut shown, "", "Hello, wor") => {}
        }
    }
    let (sink, mut shown) = TextSink::new();
    let watching = async {
        until(&mut shown, "", "Hello, wor").await;
        abort(&engine);
    };
    let (reply, ()) = tokio::join!(conversation.sample_live(&request, Some(sink)), watching);
    let reply = deliver(reply.unwrap());
    assert_eq!(reply.message.content, "Hello, world");
    assert_eq!(engine.requests().len(), 2);
}

#[tokio::test]
async fn nothing_is_shown_from_a_stop_string_on() {
    let engine = engine(|_| closed("one two STOP three"));
    let conversation = conversation(&engine, 10);
    let mut request = ReplyRequest::clone(&request(&[sent("user", "a")]));
    request.stops = ["STOP".to_owned()].into();
    let (sink, mut shown) = TextSink::new();
    let reply = conversation.sample_live(&Arc::new(request), Some(sink)).await.unwrap().reply;
    assert_eq!(reply.message.content, "one two ");
    // The space would have been the end of the text before a call.
    assert_eq!(shown.now().content, "one two");
}
