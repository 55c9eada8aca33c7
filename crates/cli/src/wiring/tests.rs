use super::*;
use orchestrate_moe::{StoredType, Weights, save_checkpoint};
use orchestrate_rollout::{MICRO_CHAT_TEMPLATE, opening_messages};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Status of the reply to another user of this machine, who has no key.
async fn stranger(url: &str, line: &str) -> String {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let text = format!("{line} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply.split(' ').nth(1).unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_servers_require_a_key_that_is_written_nowhere() {
    let guard = tempfile::tempdir().unwrap();
    let folder = Utf8Path::from_path(guard.path()).unwrap();
    let model = orchestrate_e2e::root().join("environments/micro/policy");
    let sets = vec![format!("engine.model={:?}", model.display().to_string())];
    let source = ConfigSource { sets, ..ConfigSource::default() };
    let settings = config::load(&source).unwrap().check().unwrap();
    let mut servers = servers();
    let model = settings.engine.model.clone();
    let fleet = Box::pin(engine(&settings, &mut servers, (&model, folder), &[])).await.unwrap();
    let trainer = trainer(&settings, folder, &mut servers).await.unwrap();
    trainer.client.info().await.unwrap();
    let engine_url = fleet.status().remove(0).name;
    for line in ["POST /update_weights_from_disk", "POST /generate", "GET /server_info"] {
        assert_eq!(stranger(&engine_url, line).await, "401", "{line}");
    }
    for line in ["POST /v1/steps", "GET /v1/info"] {
        assert_eq!(stranger(trainer.client.url(), line).await, "401", "{line}");
    }
    assert_ne!(random_key(), random_key());
    for text in [format!("{fleet:?}"), format!("{:?}", trainer.client)] {
        let longest = text.split(|c: char| !c.is_ascii_hexdigit()).map(str::len).max();
        assert!(longest < Some(64), "{text}");
    }
    drop((fleet, trainer));
    servers.shutdown().await;
}

#[test]
fn a_checkpoint_renders_prompts_with_the_templates_and_special_tokens_of_its_model() {
    let guard = tempfile::tempdir().unwrap();
    let root = Utf8Path::from_path(guard.path()).unwrap();
    let bundled = orchestrate_e2e::root().join("environments/micro/policy");
    let model = root.join("model");
    fs_err::create_dir_all(model.join("additional_chat_templates")).unwrap();
    for entry in fs_err::read_dir(bundled).unwrap() {
        let entry = entry.unwrap();
        fs_err::copy(entry.path(), model.as_std_path().join(entry.file_name())).unwrap();
    }
    // What a model may have in files of its own: a token that only the older file names, a template, and
    // another one for prompts with tools.
    let special = r#"{"sep_token": "<|endoftext|>"}"#;
    let plain = format!("{{{{- sep_token -}}}}{MICRO_CHAT_TEMPLATE}");
    let with_tools = format!("{{{{- tools | tojson -}}}}{plain}");
    for (name, text) in [
        ("special_tokens_map.json", special),
        ("chat_template.jinja", &plain),
        ("additional_chat_templates/tool_use.jinja", &with_tools),
    ] {
        fs_err::write(model.join(name), text).unwrap();
    }
    let weights = Weights::load(&model).unwrap();
    let prompts = |folder: &Utf8Path| {
        let tool = serde_json::json!({"function": {"name": "look", "parameters": {}}});
        [Vec::new(), vec![tool]].map(|tools| {
            let options = ChatOptions { tools, ..ChatOptions::default() };
            let chat = ChatModel::load_for(folder, options).unwrap();
            let prompt = chat.prompt(&opening_messages(None, "mend it")).unwrap();
            chat.decode(&prompt).unwrap()
        })
    };
    let expected = prompts(&model);
    assert!(expected[0].starts_with("<|endoftext|><|im_start|>user"), "{expected:?}");
    assert!(expected[1].contains("look"), "{expected:?}");
    // Each checkpoint is written from the one before it.
    for (from, to) in [("model", "v000000"), ("v000000", "v000001")] {
        let (from, to) = (root.join(from), root.join(to));
        save_checkpoint(&to, &weights, StoredType::F32, Some(&from)).unwrap();
        assert_eq!(prompts(&to), expected);
    }
}
