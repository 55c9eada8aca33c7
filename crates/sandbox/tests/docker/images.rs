//! Images that are pulled, recorded, kept and removed: a daemon of the test's own, and a registry.

use crate::registry::Registry;
use orchestrate_e2e::Daemon;
use orchestrate_sandbox::{
    DockerProvider, ImageBook, ImageIdentity, ImageNews, Listener, Owner, PullPolicy, Purpose,
    SandboxError, SandboxErrorKind, SandboxProvider as _, SandboxSection, SandboxSpec,
    Surroundings,
};
use orchestrate_types::{ByteSize, RunId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Size of an image of which only some fit.
const LAYER: usize = 3 << 20;

/// A book that can be read.
#[derive(Debug, Default)]
struct Book(Mutex<BTreeMap<String, ImageIdentity>>);

#[async_trait::async_trait]
impl ImageBook for Book {
    async fn recorded(&self, image: &str) -> Result<Option<ImageIdentity>, SandboxError> {
        Ok(self.0.lock().unwrap().get(image).cloned())
    }

    async fn record(
        &self,
        image: &str,
        found: &ImageIdentity,
    ) -> Result<ImageIdentity, SandboxError> {
        let mut book = self.0.lock().unwrap();
        Ok(book.entry(image.to_owned()).or_insert_with(|| found.clone()).clone())
    }
}

#[derive(Debug, Default)]
struct Heard {
    news: Mutex<Vec<ImageNews>>,
    more: Notify,
}

impl Heard {
    fn count(&self, which: impl Fn(&ImageNews) -> bool) -> usize {
        self.news.lock().unwrap().iter().filter(|news| which(news)).count()
    }

    /// Waits for news of this kind.
    async fn until(&self, which: impl Fn(&ImageNews) -> bool) {
        let waited = tokio::time::timeout(Duration::from_mins(5), async {
            loop {
                let more = self.more.notified();
                if self.count(&which) > 0 {
                    return;
                }
                more.await;
            }
        });
        assert!(waited.await.is_ok(), "{:?}", self.news.lock().unwrap());
    }
}

struct World {
    daemon: Daemon,
    registry: Registry,
    book: Arc<Book>,
    heard: Arc<Heard>,
}

impl World {
    async fn new(test: &str) -> Option<Self> {
        if !orchestrate_e2e::docker_or_skip(test).unwrap() {
            return None;
        }
        let Some(daemon) = Daemon::start().unwrap() else {
            orchestrate_e2e::say(&format!("skipped: {test} (no second daemon can be started)"));
            return None;
        };
        let (book, heard) = (Arc::default(), Arc::default());
        Some(Self { daemon, registry: Registry::start().await, book, heard })
    }

    async fn provider(&self, raw: SandboxSection) -> DockerProvider {
        let raw = SandboxSection { docker_host: Some(self.daemon.host()), ..raw };
        let heard = Arc::clone(&self.heard);
        let listener = Listener::new(move |news| {
            heard.news.lock().unwrap().push(news.clone());
            heard.more.notify_waiters();
        });
        let around = Surroundings { book: Some(Arc::clone(&self.book) as _), listener };
        DockerProvider::connect_with(raw.check().unwrap(), around).await.unwrap()
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
    // A container that is being removed still uses its image.
    while provider.stats().removed == before {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn not_pulled(error: &SandboxError, words: &str) {
    let says = matches!(&error.kind, SandboxErrorKind::NotPulled { message, .. } if message.contains(words));
    assert!(says, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_absent_images_are_pulled_once_and_recorded_whatever_the_registry_says_first() {
    let Some(world) = World::new("docker_absent_images_are_pulled").await else { return };
    let pushed = world.registry.push("team/a", "1", 1000);
    let image = world.name("team/a:1");
    let limited = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit."}]}"#;
    // A daemon may ask more than once itself.
    world.registry.fail("/team/a/manifests/", 429, limited, 2);
    world.registry.fail("/team/a/manifests/", 503, "down for a moment", 2);
    let never = SandboxSection { pull: Some(PullPolicy::Never), ..SandboxSection::default() };
    let strict = world.provider(never).await;
    let error = strict.open(&spec(&image, 1, false)).await.unwrap_err();
    assert!(matches!(error.kind, SandboxErrorKind::ImageMissing(_)), "{error}");
    assert_eq!(world.registry.asked("team/a"), 0);
    strict.shutdown().await.unwrap();

    let provider = world.provider(SandboxSection::default()).await;
    let specs = [spec(&image, 1, false), spec(&image, 2, true), spec(&image, 3, false)];
    let opened = futures::future::join_all(specs.iter().map(|spec| provider.open(spec))).await;
    for sandbox in opened {
        sandbox.unwrap().close().await.unwrap();
    }
    assert_eq!(world.heard.count(|n| matches!(n, ImageNews::PullBegun { .. })), 1);
    assert!(world.heard.count(|n| matches!(n, ImageNews::PullDelayed { .. })) >= 1);
    assert_eq!(world.registry.faults_left(), 0);
    assert_eq!(world.heard.count(|n| matches!(n, ImageNews::Pulled { .. })), 1);
    let identity = ImageIdentity { id: pushed.id, digest: Some(pushed.digest) };
    assert_eq!(world.book.0.lock().unwrap().get(&image), Some(&identity));

    // What is not there is said, and the same to all who ask.
    let absent = world.name("team/a:2");
    for _ in 0..2 {
        let error = provider.open(&spec(&absent, 4, false)).await.unwrap_err();
        not_pulled(&error, "its registry has no");
    }
    // Nobody listens there.
    let error = provider.open(&spec("127.0.0.1:1/a:1", 5, false)).await.unwrap_err();
    not_pulled(&error, "connection refused");
    provider.shutdown().await.unwrap();

    // A mirror has it under its own name; the daemon then knows it by the usual one.
    let raw =
        SandboxSection { mirror: Some(world.registry.host.clone()), ..SandboxSection::default() };
    let provider = world.provider(raw).await;
    let official = world.registry.push("library/thing", "latest", 10);
    use_once(&provider, "thing").await;
    assert_eq!(world.docker(&["image", "inspect", "-f", "{{.Id}}", "thing"]).trim(), official.id);
    provider.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_a_run_keeps_the_image_that_it_began_with() {
    let Some(world) = World::new("docker_a_run_keeps_the_image").await else { return };
    let first = world.registry.push("team/b", "1", 10);
    let image = world.name("team/b:1");
    let provider = world.provider(SandboxSection::default()).await;
    use_once(&provider, &image).await;
    let recorded: Vec<(String, ImageIdentity)> =
        world.book.0.lock().unwrap().clone().into_iter().collect();
    provider.check_images(&recorded).await.unwrap();

    // The tag moves at the registry, and the image is lost here: the old one comes back.
    let second = world.registry.push("team/b", "1", 20);
    assert_ne!(first.id, second.id);
    provider.remove_pulled_images(false).await.unwrap();
    assert!(!world.has(&image));
    provider.check_images(&recorded).await.unwrap();
    use_once(&provider, &image).await;
    assert_eq!(world.docker(&["image", "inspect", "-f", "{{.Id}}", &image]).trim(), first.id);
    provider.shutdown().await.unwrap();

    // Somebody pulls the new one by hand: it is not what the run began with.
    world.docker(&["pull", "-q", &image]);
    let provider = world.provider(SandboxSection::default()).await;
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

    // A full disk: nothing is begun.
    let full =
        SandboxSection { min_free_disk: Some(ByteSize(1 << 60)), ..SandboxSection::default() };
    let provider = world.provider(full).await;
    world.registry.push("team/c", "1", 10);
    let error = provider.open(&spec(&world.name("team/c:1"), 1, false)).await.unwrap_err();
    assert!(error.to_string().contains("sandbox.min_free_disk"), "{error}");
    assert_eq!(world.registry.asked("team/c"), 0);
    provider.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_only_images_of_ours_that_nobody_needs_are_removed() {
    let Some(world) = World::new("docker_only_images_of_ours").await else { return };
    let image = |name: &str| world.name(&format!("team/{name}:1"));
    for name in ["used", "idle", "named", "later", "last", "foreign"] {
        world.registry.push(&format!("team/{name}"), "1", LAYER);
    }
    world.docker(&["pull", "-q", &image("foreign")]);
    let raw = SandboxSection {
        image_cache: Some(ByteSize(4 * LAYER as u64 + (1 << 20))),
        ..SandboxSection::default()
    };
    let provider = world.provider(raw).await;
    let sandbox = provider.open(&spec(&image("used"), 1, true)).await.unwrap();
    use_once(&provider, &image("idle")).await;
    use_once(&provider, &image("named")).await;
    world.docker(&["tag", &image("named"), "somebodys:own"]);
    // One that is expected comes by itself.
    let later = image("later");
    provider.expect_images(std::slice::from_ref(&later));
    world.heard.until(|n| matches!(n, ImageNews::Pulled { image, .. } if *image == later)).await;
    assert_eq!(world.heard.count(|n| matches!(n, ImageNews::Removed { .. })), 0);
    // Five are one too many: all but one are needed.
    use_once(&provider, &image("last")).await;
    world.heard.until(|n| matches!(n, ImageNews::Removed { .. })).await;
    for (name, stays) in [
        ("used", true),
        ("idle", false),
        ("named", true),
        ("later", true),
        ("last", true),
        ("foreign", true),
    ] {
        assert_eq!(world.has(&image(name)), stays, "{name}");
    }
    assert_eq!(world.heard.count(|n| matches!(n, ImageNews::Removed { .. })), 1);
    // It is pulled again when it is wanted again.
    use_once(&provider, &image("idle")).await;
    sandbox.close().await.unwrap();
    provider.shutdown().await.unwrap();

    // Another program removes all that nobody needs: no pull, but the supervisor's image goes, too.
    let other = world.provider(SandboxSection::default()).await;
    let before = other.remove_pulled_images(true).await.unwrap();
    assert!(before.iter().any(|image| image.kept.is_none()), "{before:?}");
    let seen = other.remove_pulled_images(false).await.unwrap();
    let kept: Vec<&str> =
        seen.iter().filter(|i| i.kept.is_some()).map(|i| i.names.as_str()).collect();
    assert!(matches!(kept[..], [names] if names.contains("somebodys:own")), "{seen:?}");
    let left = world.docker(&["images", "--format", "{{.Repository}}:{{.Tag}}"]);
    let mut left: Vec<&str> = left.lines().filter(|name| !name.contains("pulled:")).collect();
    left.sort_unstable();
    assert_eq!(left, [image("foreign").as_str(), &image("named"), "somebodys:own"]);
    other.shutdown().await.unwrap();
}
