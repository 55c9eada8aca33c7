//! Workers that take episodes, die, repeat requests and send garbage.

use crate::scripted::ScriptedSampler;
use orchestrate_gateway::{
    FailureKind, GatewayOptions, LeaseRecord, Offer, OfferEnd, OfferedAttempt, Offers, Registry,
    RestoredLease,
};
use orchestrate_types::AttemptId;
use reqwest::{Client, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

struct World {
    offers: Offers,
    url: String,
    client: Client,
    _tasks: JoinSet<()>,
}

const LONG: Duration = Duration::from_mins(1);

impl World {
    async fn new(lease: Duration) -> Self {
        let options = GatewayOptions { require_key: true, ..GatewayOptions::default() };
        let offers = Offers::new(Registry::new(options), lease);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = offers.router();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { offers, url, client: Client::new(), _tasks: tasks }
    }

    fn offer(&self, attempt: &str, time: Duration) -> Offer {
        self.offers.offer(OfferedAttempt {
            attempt: attempt.parse().unwrap(),
            task: json!({"id": attempt}),
            time,
            begin: Box::new(|_| Some(ScriptedSampler::writing("hello"))),
        })
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        answer(self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap())
            .await
    }

    async fn take(&self, id: &str, wait_s: f64) -> (u16, Value) {
        let body = json!({"worker": "w", "take_id": id, "wait_s": wait_s});
        self.post("/v1/episodes/take", &body).await
    }

    /// Calls a route of a lease.
    async fn lease(&self, taken: &Value, what: &str, body: &Value) -> (u16, Value) {
        let lease = taken["lease"].as_str().unwrap();
        self.post(&format!("/v1/episodes/{lease}/{what}"), body).await
    }

    async fn chat(&self, taken: &Value, key: &str) -> u16 {
        let path = taken["openai_path"].as_str().unwrap();
        let body = json!({"model": "policy", "messages": [{"role": "user", "content": "hi"}]});
        let url = format!("{}{path}/chat/completions", self.url);
        let request = self.client.post(url).bearer_auth(key).json(&body);
        request.send().await.unwrap().status().as_u16()
    }
}

async fn answer(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"]["code"].as_str().unwrap_or(""))
}

#[tokio::test]
async fn an_episode_is_taken_sampled_and_returned_and_the_reply_waits_for_the_journal() {
    let world = World::new(LONG).await;
    assert_eq!(world.take("none", 0.05).await.0, 204);
    // A worker that waits gets the next offer at once.
    let began = Instant::now();
    let waiting = world.take("first", 30.0);
    let offering = async {
        sleep(Duration::from_millis(50)).await;
        world.offer("t000001.00-a01", LONG)
    };
    let ((status, taken), mut offer) = tokio::join!(waiting, offering);
    assert!(began.elapsed() < Duration::from_secs(30), "it waited until the end of its time");
    assert_eq!((status, &taken["task"]["id"]), (200, &json!("t000001.00-a01")));
    assert_eq!(world.chat(&taken, taken["api_key"].as_str().unwrap()).await, 200);
    assert_eq!(world.chat(&taken, "another").await, 401);
    let result = json!({"reward": 0.5, "metrics": {"steps": 3}});
    let returned = world.lease(&taken, "finish", &result);
    let attempt: AttemptId = "t000001.00-a01".parse().unwrap();
    let storing = async {
        let end = offer.ended().await;
        sleep(Duration::from_millis(200)).await;
        world.offers.recorded(attempt, "scored");
        (end, Instant::now())
    };
    let began = Instant::now();
    let (answer, (end, _)) = tokio::join!(returned, storing);
    let metrics = BTreeMap::from([("steps".to_owned(), 3.0)]);
    assert_eq!(end, OfferEnd::Returned { reward: 0.5, metrics });
    assert_eq!(answer, (200, json!({"outcome": "scored"})));
    assert!(began.elapsed() >= Duration::from_millis(200), "acknowledged before it was stored");
    assert_eq!(world.chat(&taken, taken["api_key"].as_str().unwrap()).await, 404);
    // Repeating the same result has no effect; a different one is refused.
    assert_eq!(world.lease(&taken, "finish", &result).await, answer);
    let other = world.lease(&taken, "finish", &json!({"reward": 1.0})).await;
    assert_eq!(code(&other), (409, "other_result"));
    let late = world.lease(&taken, "heartbeat", &json!({})).await;
    assert_eq!(code(&late), (410, "lease_over"));
}

#[tokio::test]
async fn a_worker_without_heartbeats_loses_its_lease_and_its_late_result_is_refused() {
    // Far longer than a busy machine delays a heartbeat.
    let lease = Duration::from_secs(5);
    let world = World::new(lease).await;
    let mut offer = world.offer("t000001.00-a01", LONG);
    let (_, taken) = world.take("a", 0.0).await;
    let began = Instant::now();
    while began.elapsed() < lease + lease / 2 {
        assert_eq!(world.lease(&taken, "heartbeat", &json!({})).await.0, 200);
        sleep(Duration::from_millis(50)).await;
    }
    let lost = OfferEnd::Lost { worker: "w".to_owned(), silent: lease };
    assert_eq!(offer.ended().await, lost);
    let late = world.lease(&taken, "finish", &json!({"reward": 1.0})).await;
    assert_eq!(code(&late), (410, "lease_over"));
    assert!(late.1["error"]["message"].as_str().unwrap().contains("no heartbeat"), "{late:?}");
    assert_eq!(world.chat(&taken, taken["api_key"].as_str().unwrap()).await, 404);
    drop(offer);
    // The next attempt has another lease, which the dead worker's requests do not affect.
    let mut offer = world.offer("t000001.00-a02", LONG);
    let (_, again) = world.take("b", 0.0).await;
    assert_ne!(again["lease"], taken["lease"]);
    assert_eq!(world.lease(&taken, "abandon", &json!({})).await.0, 410);
    let result = json!({"reward": 0.25});
    let finishing = world.lease(&again, "finish", &result);
    let ending = async {
        let end = offer.ended().await;
        world.offers.recorded("t000001.00-a02".parse().unwrap(), "scored");
        end
    };
    let (finished, end) = tokio::join!(finishing, ending);
    assert_eq!(finished.0, 200);
    assert!(matches!(end, OfferEnd::Returned { reward: 0.25, .. }), "{end:?}");
}

#[tokio::test]
async fn an_episode_that_is_not_returned_in_time_loses_its_lease() {
    let world = World::new(LONG).await;
    let mut offer = world.offer("t000001.00-a01", Duration::from_millis(300));
    let (_, taken) = world.take("a", 0.0).await;
    assert_eq!(offer.ended().await, OfferEnd::TimeUp { worker: "w".to_owned() });
    assert_eq!(code(&world.lease(&taken, "heartbeat", &json!({})).await), (410, "lease_over"));
}

#[tokio::test]
async fn repeated_requests_take_no_second_episode_and_two_workers_never_share_one() {
    let world = Arc::new(World::new(LONG).await);
    let begun = Arc::new(AtomicUsize::new(0));
    let _offers: Vec<Offer> = (0..20)
        .map(|n| {
            let begun = Arc::clone(&begun);
            world.offers.offer(OfferedAttempt {
                attempt: format!("t{n:06}.00-a01").parse().unwrap(),
                task: json!({}),
                time: LONG,
                begin: Box::new(move |_| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    Some(ScriptedSampler::writing(""))
                }),
            })
        })
        .collect();
    let mut tasks = JoinSet::new();
    for request in 0..60 {
        let world = Arc::clone(&world);
        // Each id is sent three times, at once.
        tasks.spawn(async move {
            let id = format!("take-{}", request % 20);
            (id.clone(), world.take(&id, 5.0).await.1["attempt"].as_str().unwrap().to_owned())
        });
    }
    let mut by_id: BTreeMap<String, String> = BTreeMap::new();
    for (id, attempt) in tasks.join_all().await {
        assert_eq!(by_id.entry(id).or_insert_with(|| attempt.clone()), &attempt);
    }
    let attempts: std::collections::BTreeSet<&String> = by_id.values().collect();
    assert_eq!((attempts.len(), begun.load(Ordering::SeqCst)), (20, 20));
}

#[tokio::test]
async fn invalid_results_are_refused_and_change_nothing() {
    let world = World::new(LONG).await;
    let mut offer = world.offer("t000001.00-a01", LONG);
    let (_, taken) = world.take("a", 0.0).await;
    let lease = taken["lease"].as_str().unwrap();
    let url = format!("{}/v1/episodes/{lease}/finish", world.url);
    let many: BTreeMap<String, f64> = (0..65).map(|n| (n.to_string(), 0.0)).collect();
    let many = json!({"reward": 1.0, "metrics": many}).to_string();
    let bodies = [
        r#"{"reward": NaN}"#,
        r#"{"reward": Infinity}"#,
        r#"{"reward": 1e999}"#,
        r#"{"reward": 1.001}"#,
        r#"{"reward": -0.1}"#,
        r#"{"reward": "1"}"#,
        r#"{"reward": null}"#,
        r#"{"reward": 1, "failure": {"kind": "agent"}}"#,
        r#"{"failure": {"kind": "mine"}}"#,
        r#"{"reward": 1, "metrics": {"a": NaN}}"#,
        r#"{"reward": 1, "metrics": {"": 1}}"#,
        r#"{"reward": 1, "metrics": {"a": 1, "a": 2}}"#,
        r#"{"reward": 1, "metrics": {"a\u0000": 1}}"#,
        r#"{"reward": 1, "extra": 1}"#,
        r#"{"reward": 1} x"#,
        "{}",
        "[]",
        "[0.5, {}, null]",
        r#"{"failure": ["agent", "x"]}"#,
        "",
        "\u{0}\u{1}",
        many.as_str(),
    ];
    for body in bodies {
        let request = world.client.post(&url).body(body.to_owned());
        let refused = answer(request.send().await.unwrap()).await;
        assert_eq!(code(&refused), (400, "invalid"), "{body}");
    }
    let large = world.client.post(&url).body("x".repeat(300 << 10)).send().await.unwrap();
    assert_eq!(large.status().as_u16(), 413);
    for body in [
        json!({}),
        json!({"worker": "", "take_id": "a"}),
        json!(["w", "a", 0.0]),
        json!({"worker": "a\nb", "take_id": "a"}),
        json!({"worker": "w", "take_id": "x".repeat(200)}),
        json!({"worker": "w", "take_id": "a", "wait_s": "long"}),
    ] {
        let refused = world.post("/v1/episodes/take", &body).await;
        assert_eq!(code(&refused), (400, "invalid"), "{body}");
    }
    let unknown = world.post("/v1/episodes/none/finish", &json!({"reward": 1})).await;
    assert_eq!(code(&unknown), (410, "lease_unknown"));
    assert_eq!(code(&world.post("/v1/other", &json!({})).await), (404, "no_route"));
    let failure = json!({"failure": {"kind": "agent", "message": "é".repeat(5000)}});
    let ending = async {
        let end = offer.ended().await;
        world.offers.recorded("t000001.00-a01".parse().unwrap(), "truncated");
        end
    };
    let (finished, end) = tokio::join!(world.lease(&taken, "finish", &failure), ending);
    assert_eq!(finished, (200, json!({"outcome": "truncated"})));
    let OfferEnd::Failed { kind, message } = end else { panic!("{end:?}") };
    assert_eq!((kind, message.chars().count()), (FailureKind::Agent, 4000));
}

#[tokio::test]
async fn an_attempt_that_ends_withdraws_its_offer_and_ends_its_lease() {
    let world = World::new(LONG).await;
    drop(world.offer("t000001.00-a01", LONG));
    assert_eq!(world.take("a", 0.0).await.0, 204);
    let offer = world.offer("t000001.00-a02", LONG);
    let (_, taken) = world.take("b", 0.0).await;
    drop(offer);
    assert_eq!(code(&world.lease(&taken, "heartbeat", &json!({})).await), (410, "lease_over"));
    let mut offer = world.offer("t000001.00-a03", LONG);
    let (_, taken) = world.take("c", 0.0).await;
    for _ in 0..2 {
        assert_eq!(world.lease(&taken, "abandon", &json!({})).await.0, 200);
    }
    assert_eq!(offer.ended().await, OfferEnd::Abandoned { worker: "w".to_owned() });
    let _unstored = world.offer("t000001.00-a04", LONG);
    let (_, taken) = world.take("d", 0.0).await;
    let result = json!({"reward": 1.0});
    // A worker that waits when the run ends is told so.
    let finishing = world.lease(&taken, "finish", &result);
    let (over, unstored, ()) = tokio::join!(world.take("e", 30.0), finishing, async {
        sleep(Duration::from_millis(200)).await;
        world.offers.close();
    });
    assert_eq!(code(&unstored), (410, "lease_over"));
    assert_eq!(code(&over), (410, "run_over"));
}

/// A taken episode as its worker knows it, and what the run kept of its lease.
async fn taken_before() -> (Value, LeaseRecord) {
    let world = World::new(LONG).await;
    let (keep, kept) = std::sync::mpsc::channel();
    let _offer = world.offers.offer(OfferedAttempt {
        attempt: "t000001.00-a01".parse().unwrap(),
        task: json!({}),
        time: LONG,
        begin: Box::new(move |lease| {
            keep.send(lease.clone()).unwrap();
            Some(ScriptedSampler::writing("hello"))
        }),
    });
    let (_, taken) = world.take("a", 0.0).await;
    let text = serde_json::to_string(&kept.recv().unwrap()).unwrap();
    for secret in ["lease", "api_key"] {
        assert!(!text.contains(taken[secret].as_str().unwrap()), "the secret {secret} is kept");
    }
    (taken, serde_json::from_str(&text).unwrap())
}

fn restored(record: &LeaseRecord, left: Duration) -> RestoredLease {
    RestoredLease {
        attempt: "t000001.00-a01".parse().unwrap(),
        record: record.clone(),
        time: LONG,
        left,
        sampler: ScriptedSampler::writing("hello"),
    }
}

#[tokio::test]
async fn requests_wait_until_the_lease_of_an_earlier_process_is_restored() {
    let (taken, record) = taken_before().await;
    let key = taken["api_key"].as_str().unwrap();
    let world = World::new(LONG).await;
    world.offers.expect([&record]);
    let nothing = json!({});
    let (heartbeat, chat) = (world.lease(&taken, "heartbeat", &nothing), world.chat(&taken, key));
    tokio::pin!(heartbeat, chat);
    tokio::select! {
        answer = &mut heartbeat => panic!("{answer:?}"),
        status = &mut chat => panic!("{status}"),
        () = sleep(Duration::from_millis(200)) => {}
    }
    let mut offer = world.offers.restore(restored(&record, LONG));
    assert_eq!((heartbeat.await.0, chat.await), (200, 200));
    assert_eq!(world.chat(&taken, "another").await, 401);
    // It is held, and not offered.
    assert_eq!(world.take("b", 0.0).await.0, 204);
    let result = json!({"reward": 0.5});
    let storing = async {
        let end = offer.ended().await;
        world.offers.recorded("t000001.00-a01".parse().unwrap(), "scored");
        end
    };
    let (answer, end) = tokio::join!(world.lease(&taken, "finish", &result), storing);
    assert_eq!(answer, (200, json!({"outcome": "scored"})));
    assert_eq!(end, OfferEnd::Returned { reward: 0.5, metrics: BTreeMap::new() });
    assert_eq!(world.chat(&taken, key).await, 404);
}

#[tokio::test]
async fn a_restored_lease_ends_like_any_other_and_a_forgotten_one_is_unknown() {
    let (taken, record) = taken_before().await;
    let world = World::new(Duration::from_millis(100)).await;
    let silent = world.offers.restore(restored(&record, LONG)).ended().await;
    assert!(matches!(&silent, OfferEnd::Lost { worker, .. } if worker == "w"), "{silent:?}");
    let late = world.lease(&taken, "heartbeat", &json!({})).await;
    assert_eq!(code(&late), (410, "lease_over"));
    let world = World::new(LONG).await;
    let late = world.offers.restore(restored(&record, Duration::ZERO)).ended().await;
    assert_eq!(late, OfferEnd::TimeUp { worker: "w".to_owned() });
    let world = World::new(LONG).await;
    world.offers.expect([&record]);
    world.offers.forget(&record);
    let unknown = world.lease(&taken, "heartbeat", &json!({})).await;
    assert_eq!(code(&unknown), (410, "lease_unknown"));
    assert_eq!(world.chat(&taken, taken["api_key"].as_str().unwrap()).await, 404);
}
