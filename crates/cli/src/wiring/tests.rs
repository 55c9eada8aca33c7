use super::*;
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
