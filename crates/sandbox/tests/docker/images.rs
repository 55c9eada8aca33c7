//! Pulling, locking, keeping and evicting images, with a separate daemon and a test registry.

use crate::registry::Registry;
use orchestrate_e2e::Daemon;
use orchestrate_sandbox::{
    DockerProvider, ImageEvent, ImageHooks, ImageIdentity, ImageListener, ImageLock, Owner,
    PullPolicy, Purpose, SandboxError, SandboxErrorKind, SandboxProvider as _, SandboxSection,
    SandboxSpec,
};
use orchestrate_types::{ByteSize, RunId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Size of one image, of which only some fit into the cache.
const LAYER: usize = 3 << 20;

/// An image lock that the test can read.
#[derive(Debug, Default)]
struct TestLock(Mutex<BTreeMap<String, ImageIdentity>>);

#[async_trait::async_trait]
impl ImageLock for TestLock {
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError> {
        Ok(self.0.lock().unwrap().get(image).cloned())
    }

    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError> {
        let mut recorded = self.0.lock().unwrap();
        Ok(recorded.entry(image.to_owned()).or_insert_with(|| found.clone()).clone())
    }
}

#[derive(Debug, Default)]
struct RecordedEvents {
    events: Mutex<Vec<ImageEvent>>,
    added: Notify,
}

impl RecordedEvents {
    fn count(&self, matches: impl Fn(&ImageEvent) -> bool) -> usize {
        self.events.lock().unwrap().iter().filter(|event| matches(event)).count()
    }

    /// Waits for a matching event.
    async fn wait_for(&self, matches: impl Fn(&ImageEvent) -> bool) {
        let waited = tokio::time::timeout(Duration::from_mins(5), async {
            loop {
                let added = self.added.notified();
                if self.count(&matches) > 0 {
                    return;
                }
                added.await;
            }
        });
        assert!(waited.await.is_ok(), "{:?}", self.events.lock().unwrap());
    }
}

struct Fixture {
    daemon: Daemon,
    registry: Registry,
    lock: Arc<TestLock>,
    events: Arc<RecordedEvents>,
}

impl Fixture {
    fn new(test: &str) -> Option<Self> {
        if !orchestrate_e2e::docker_or_skip(test).unwrap() {
            return None;
        }
        let Some(daemon) = Daemon::start().unwrap() else {
            orchestrate_e2e::skip::skip_test(test, "daemons", "no second daemon can be started");
            return None;
        };
        let (lock, events) = (Arc::default(), Arc::default());
        let registry = Registry::start(&[&daemon]);
        Some(Self { daemon, registry, lock, events })
    }

    async fn provider(&self, raw: SandboxSection) -> DockerProvider {
        let raw = SandboxSection { docker_host: Some(self.daemon.host()), ..raw };
        let events = Arc::clone(&self.events);
        let listener = ImageListener::new(move |event| {
            events.events.lock().unwrap().push(event.clone());
            events.added.notify_waiters();
        });
        let hooks = ImageHooks {
            lock: Some(Arc::clone(&self.lock) as _),
            listener,
            ..ImageHooks::default()
        };
        DockerProvider::connect_with(raw.check().unwrap(), hooks).await.unwrap()
    }

    fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.registry.host)
    }

    fn docker(&self, args: &[&str]) -> String {
        let output = self.daemon.docker(args).unwrap();
        assert!(output.status.success(), "{args:?}: {}", orchestrate_e2e::stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn has(&self, image: &str) -> bool {
        self.daemon.docker(&["image", "inspect", image]).unwrap().status.success()
    }
}

fn spec(image: &str, attempt: u32, reusable: bool) -> SandboxSpec {
    SandboxSpec {
        image: image.to_owned(),
        purpose: Purpose::Agent,
        owner: Owner {
            run: RunId::generate(),
            epoch: 1,
            attempt: format!("t{attempt:06}.00-a01").parse().unwrap(),
        },
        workdir: "/testbed".into(),
        limits: SandboxSection::default().check().unwrap().limits(),
        deadline: Duration::from_mins(10),
        reusable,
    }
}

async fn use_once(provider: &DockerProvider, image: &str) {
    let before = provider.stats().removed;
    provider.open(&spec(image, 1, false)).await.unwrap().close().await.unwrap();
    // The image is in use until the container is removed.
    while provider.stats().removed == before {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn assert_not_pulled(error: &SandboxError, message: &str) {
    let has_message = matches!(
        &error.kind,
        SandboxErrorKind::NotPulled { source, .. } if source.to_string().contains(message)
    );
    assert!(has_message, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_missing_images_are_pulled_once_and_locked_despite_temporary_registry_errors() {
    let Some(fixture) = Fixture::new("docker_missing_images_are_pulled") else { return };
    let pushed = fixture.registry.push("team/a", "1", 1000);
    let image = fixture.name("team/a:1");
    let limited = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit."}]}"#;
    // The daemon may retry by itself.
    fixture.registry.fail("/team/a/manifests/", 429, limited, 2);
    fixture.registry.fail("/team/a/manifests/", 503, "down for a moment", 2);
    let never = SandboxSection { pull: Some(PullPolicy::Never), ..SandboxSection::default() };
    let strict = fixture.provider(never).await;
    let error = strict.open(&spec(&image, 1, false)).await.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::ImageMissing(_)), "{error}");
    assert_eq!(fixture.registry.requests("team/a"), 0);
    strict.shutdown().await.unwrap();

    let provider = fixture.provider(SandboxSection::default()).await;
    let specs = [spec(&image, 1, false), spec(&image, 2, true), spec(&image, 3, false)];
    let opened = futures::future::join_all(specs.iter().map(|spec| provider.open(spec))).await;
    for sandbox in opened {
        sandbox.unwrap().close().await.unwrap();
    }
    assert_eq!(fixture.events.count(|e| matches!(e, ImageEvent::PullStarted { .. })), 1);
    assert!(fixture.events.count(|e| matches!(e, ImageEvent::PullRetried { .. })) >= 1);
    assert_eq!(fixture.registry.faults_left(), 0);
    assert_eq!(fixture.events.count(|e| matches!(e, ImageEvent::Pulled { .. })), 1);
    let identity = ImageIdentity { id: pushed.id, digest: Some(pushed.digest) };
    assert_eq!(fixture.lock.0.lock().unwrap().get(&image), Some(&identity));

    // A missing image is reported, and every request gets the same error.
    let absent = fixture.name("team/a:2");
    for _ in 0..2 {
        let error = provider.open(&spec(&absent, 4, false)).await.unwrap_err();
        assert_not_pulled(&error, "the registry does not have");
    }
    // No registry listens at this address.
    let error = provider.open(&spec("127.0.0.1:1/a:1", 5, false)).await.unwrap_err();
    assert_not_pulled(&error, "connection refused");
    provider.shutdown().await.unwrap();

    // Pulled from a mirror, an image gets its usual name on the daemon.
    let raw =
        SandboxSection { mirror: Some(fixture.registry.host.clone()), ..SandboxSection::default() };
    let provider = fixture.provider(raw).await;
    let official = fixture.registry.push("library/thing", "latest", 10);
    use_once(&provider, "thing").await;
    assert_eq!(fixture.docker(&["image", "inspect", "-f", "{{.Id}}", "thing"]).trim(), official.id);
    provider.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_run_keeps_the_image_that_it_first_used() {
    let Some(fixture) = Fixture::new("docker_run_keeps_the_image") else { return };
    let first = fixture.registry.push("team/b", "1", 10);
    let image = fixture.name("team/b:1");
    let provider = fixture.provider(SandboxSection::default()).await;
    use_once(&provider, &image).await;
    let recorded: Vec<(String, ImageIdentity)> =
        fixture.lock.0.lock().unwrap().clone().into_iter().collect();
    provider.check_images(&recorded).await.unwrap();

    // The tag moves at the registry and the image is removed here: the locked image is pulled
    // again.
    let second = fixture.registry.push("team/b", "1", 20);
    assert_ne!(first.id, second.id);
    provider.remove_pulled_images(false).await.unwrap();
    assert!(!fixture.has(&image));
    provider.check_images(&recorded).await.unwrap();
    use_once(&provider, &image).await;
    assert_eq!(fixture.docker(&["image", "inspect", "-f", "{{.Id}}", &image]).trim(), first.id);
    provider.shutdown().await.unwrap();

    // The new image, pulled by hand, is not the one in the image lock.
    fixture.docker(&["pull", "-q", &image]);
    let provider = fixture.provider(SandboxSection::default()).await;
    let checked = provider.check_images(&recorded).await.unwrap_err();
    let opened = provider.open(&spec(&image, 1, false)).await.unwrap_err();
    for error in [checked, opened] {
        let SandboxErrorKind::ImageChanged { image: name, recorded, found } = &error.kind else {
            panic!("{error}");
        };
        assert_eq!(name, &image);
        assert!(recorded.contains(&first.digest) && found.contains(&second.id), "{error}");
    }
    provider.shutdown().await.unwrap();

    // With a full disk, no pull is started.
    let full =
        SandboxSection { min_free_disk: Some(ByteSize(1 << 60)), ..SandboxSection::default() };
    let provider = fixture.provider(full).await;
    fixture.registry.push("team/c", "1", 10);
    let error = provider.open(&spec(&fixture.name("team/c:1"), 1, false)).await.unwrap_err();
    assert!(error.to_string().contains("sandbox.min_free_disk"), "{error}");
    assert_eq!(fixture.registry.requests("team/c"), 0);
    provider.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_only_unused_images_of_this_program_are_evicted() {
    let Some(fixture) = Fixture::new("docker_only_unused_images") else { return };
    let image = |name: &str| fixture.name(&format!("team/{name}:1"));
    for name in ["used", "idle", "named", "later", "last", "foreign"] {
        fixture.registry.push(&format!("team/{name}"), "1", LAYER);
    }
    fixture.docker(&["pull", "-q", &image("foreign")]);
    let raw = SandboxSection {
        image_cache: Some(ByteSize(4 * LAYER as u64 + (1 << 20))),
        ..SandboxSection::default()
    };
    let provider = fixture.provider(raw).await;
    let sandbox = provider.open(&spec(&image("used"), 1, true)).await.unwrap();
    use_once(&provider, &image("idle")).await;
    use_once(&provider, &image("named")).await;
    fixture.docker(&["tag", &image("named"), "somebodys:own"]);
    // An expected image is pulled ahead.
    let later = image("later");
    provider.expect_images(std::slice::from_ref(&later));
    fixture
        .events
        .wait_for(|e| matches!(e, ImageEvent::Pulled { image, .. } if *image == later))
        .await;
    assert_eq!(fixture.events.count(|e| matches!(e, ImageEvent::Evicted { .. })), 0);
    // Five images exceed the cache by one, and all but one are in use.
    use_once(&provider, &image("last")).await;
    fixture.events.wait_for(|e| matches!(e, ImageEvent::Evicted { .. })).await;
    for (name, is_kept) in [
        ("used", true),
        ("idle", false),
        ("named", true),
        ("later", true),
        ("last", true),
        ("foreign", true),
    ] {
        assert_eq!(fixture.has(&image(name)), is_kept, "{name}");
    }
    assert_eq!(fixture.events.count(|e| matches!(e, ImageEvent::Evicted { .. })), 1);
    // An evicted image is pulled again when it is needed.
    use_once(&provider, &image("idle")).await;
    sandbox.close().await.unwrap();
    provider.shutdown().await.unwrap();

    // Another provider removes everything that is unused, including the derived image.
    let other = fixture.provider(SandboxSection::default()).await;
    let before = other.remove_pulled_images(true).await.unwrap();
    assert!(before.iter().any(|image| image.kept.is_none()), "{before:?}");
    let seen = other.remove_pulled_images(false).await.unwrap();
    let kept: Vec<&str> =
        seen.iter().filter(|i| i.kept.is_some()).map(|i| i.names.as_str()).collect();
    assert!(matches!(kept[..], [names] if names.contains("somebodys:own")), "{seen:?}");
    let left = fixture.docker(&["images", "--format", "{{.Repository}}:{{.Tag}}"]);
    let mut left: Vec<&str> = left.lines().filter(|name| !name.contains("pulled:")).collect();
    left.sort_unstable();
    assert_eq!(left, [image("foreign").as_str(), &image("named"), "somebodys:own"]);
    other.shutdown().await.unwrap();
}
