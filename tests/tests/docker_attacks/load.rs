//! Many hostile episodes at the same time: the memory of this process stays small, and others are not
//! delayed. Alone in its process, because it measures the process.

use crate::families::{Family, Target};
use crate::play::World;
use futures::future::join_all;
use orchestrate_e2e::{docker_or_skip, pause, say};
use orchestrate_types::Outcome;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Hostile episodes in flight.
const EPISODES: usize = 32;
/// Resident memory of this process, in MiB.
const MOST_MEMORY_MIB: u64 = 1024;
/// What hostile episodes may add to a neighbour's waiting, in milliseconds, at the 99th percentile.
const MOST_DELAY_MS: f64 = 50.0;
/// Time between two measurements of the delay.
const TICK: Duration = Duration::from_millis(10);

/// What hostile agents leave behind for their coordinator to read.
const TREES: &[&str] = &[
    "yes '' | head -c 40000000 > lines; echo",
    "head -c 20000000 /dev/zero > zeros; head -c 20000000 /dev/urandom > random",
    "yes ab | head -c 20000000 > a; yes ba | head -c 20000000 > b; cat a >> @MODULE@",
    "for n in $(seq 400); do mkdir d; cd d; done; yes | head -c 30000000 > deep",
    "python3 -c 'for n in range(40000): open(\"%0200d\" % n, \"x\").close()'",
    "python3 -c 'import random; open(\"@MODULE@\", \"a\").write(\"\\n\".join(random.choice(\"ab\") for _ in range(9000000)))'",
    "printf 'import os\\nwhile True: os.write(1, b\"PASSED x::y\\\\n\" * 4096)\\n' > @MODULE@",
    "yes 'PASSED r2e_tests/test_1.py::test_x' | head -c 900000000; truncate -s 40M sparse",
];

/// A field of `/proc/self/status`, in MiB.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// The 99th percentile and the greatest of some delays, in milliseconds.
fn tail(mut delays: Vec<f64>) -> (f64, f64) {
    delays.sort_by(f64::total_cmp);
    (delays[delays.len() * 99 / 100], *delays.last().unwrap())
}

fn delay_since(began: Instant) -> f64 {
    (began.elapsed().saturating_sub(TICK)).as_secs_f64() * 1000.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_hostile_episodes_neither_exhaust_memory_nor_delay_others() {
    if !docker_or_skip("docker_hostile_episodes").unwrap() {
        return;
    }
    let world = World::with_containers(EPISODES + 6).await;
    let Some(target) = Target::new(Family::Micro, &world).await else { return };
    let honest_task = target.honest();
    let honest = world.episode(&honest_task, &target.solution).await;
    assert_eq!(honest.outcome, Outcome::Scored { reward: 1.0 });
    let done = Arc::new(AtomicBool::new(false));

    // A thread of its own shows how long the machine delays anybody.
    let stop = Arc::clone(&done);
    let machine = std::thread::spawn(move || {
        let mut delays = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            pause(TICK);
            delays.push(delay_since(began));
        }
        delays
    });
    let (stop, most) = (Arc::clone(&done), Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&most);
    let mut event_loop = JoinSet::new();
    event_loop.spawn(async move {
        let mut delays = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            tokio::time::sleep(TICK).await;
            delays.push(delay_since(began));
            if delays.len() % 8 == 0 {
                seen.fetch_max(memory("VmRSS"), Ordering::Relaxed);
            }
        }
        delays
    });

    let commands: Vec<Vec<String>> =
        (0..EPISODES).map(|n| vec![target.fill(TREES[n % TREES.len()])]).collect();
    let hostile = commands.iter().map(|commands| world.episode(&target.task, commands));
    let neighbours = async {
        let mut outcomes = Vec::new();
        for _ in 0..3 {
            outcomes.push(world.episode(&honest_task, &target.solution).await.outcome);
        }
        outcomes
    };
    let (reports, neighbours) = tokio::join!(join_all(hostile), neighbours);
    done.store(true, Ordering::Relaxed);
    let ((near, near_most), (machine, machine_most)) =
        (tail(event_loop.join_next().await.unwrap().unwrap()), tail(machine.join().unwrap()));
    world.shutdown().await;

    let most = most.load(Ordering::Relaxed);
    say(&format!(
        "{EPISODES} hostile episodes: {most} MiB resident at most; delays at the 99th percentile (most): \
         event loop {near:.1} ms ({near_most:.0}), any thread {machine:.1} ms ({machine_most:.0})"
    ));
    for (commands, report) in commands.iter().zip(&reports) {
        let nothing = match report.outcome {
            Outcome::Scored { reward } | Outcome::Truncated { reward, .. } => reward < 1e-9,
            Outcome::Aborted { .. } | Outcome::Broken { .. } => false,
        };
        assert!(nothing, "{commands:?}: {:?}", report.outcome);
    }
    assert_eq!(neighbours, vec![Outcome::Scored { reward: 1.0 }; 3]);
    assert!(most <= MOST_MEMORY_MIB, "{most} MiB are resident");
    assert!(near - machine <= MOST_DELAY_MS, "the event loop is delayed by {near:.1} ms");
}
