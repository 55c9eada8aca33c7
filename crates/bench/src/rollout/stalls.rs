//! Why the event loop is late: because of the program, or because the machine was paused.
//!
//! A hypervisor takes a processor away now and then, for some milliseconds to some dozens of them,
//! and nothing runs on it meanwhile. A thread that only sleeps, with the highest real-time priority,
//! wakes up on time whatever else the processor has to do. If it is late, the processor was paused.

use super::observers::Observer;
use super::processors::keep_thread_to;
use anyhow::Context;
use orchestrate_coordinator::LoopLag;
use rustix::process::Pid;
use rustix::thread::sched_getcpu;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thread_priority::unix::{
    RealtimeThreadSchedulePolicy::Fifo, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};

/// Sleep time of the observing threads: this much of a pause can go undetected.
const PERIOD: Duration = Duration::from_millis(2);
/// Shorter delays are normal for timers.
const LEAST: Duration = Duration::from_micros(500);

/// Records the pauses of processors until it is dropped.
#[derive(Debug)]
pub(super) struct Stalls {
    watches: Vec<Watch>,
}

#[derive(Debug)]
struct Watch {
    /// Nothing is sent; dropping it ends the thread.
    alive: Sender<()>,
    thread: Observer<Vec<Late>>,
}

/// From when something was due on a processor to when it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Late {
    processor: usize,
    time: Range<Instant>,
}

/// Delays of the event loop's timer, with the processor on which it finally fired.
#[derive(Debug, Clone, Default)]
pub(super) struct LateTimers(Arc<Mutex<Vec<Late>>>);

/// The longest pause, and the longest delay without pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blame {
    /// The longest pause of a processor.
    pub(super) stall_max: Duration,
    /// The longest delay of the event loop, pauses subtracted.
    pub(super) held_max: Duration,
}

impl LateTimers {
    /// Observes the event loop and records its delays.
    pub(super) fn watch(&self) -> LoopLag {
        let late = Arc::clone(&self.0);
        LoopLag::start_with(move |due, delay| {
            if delay >= LEAST {
                let due = due.into_std();
                let mut late = late.lock().unwrap_or_else(PoisonError::into_inner);
                late.push(Late { processor: sched_getcpu(), time: due..due + delay });
            }
        })
    }
}

impl Stalls {
    /// Starts to observe these processors. Fails without the right to real-time priority.
    pub(super) fn watch(processors: &[usize]) -> anyhow::Result<Self> {
        let begin = |&processor: &usize| Watch::begin(processor);
        Ok(Self { watches: processors.iter().map(begin).collect::<anyhow::Result<_>>()? })
    }

    /// The observing threads.
    pub(super) fn threads(&self) -> impl Iterator<Item = Pid> {
        self.watches.iter().map(|watch| watch.thread.id())
    }

    /// Stops observing, and subtracts the pauses of each processor from the delays of its timers.
    pub(super) fn blame(self, timers: &LateTimers) -> Blame {
        let stalls: Vec<Late> = self.watches.into_iter().flat_map(Watch::end).collect();
        let timers = timers.0.lock().unwrap_or_else(PoisonError::into_inner);
        blame(&stalls, &timers)
    }
}

impl Watch {
    fn begin(processor: usize) -> anyhow::Result<Self> {
        let (alive, end) = mpsc::channel();
        let place = move || take_precedence(processor);
        let thread = Observer::begin(place, move || watch(processor, &end))?;
        Ok(Self { alive, thread })
    }

    fn end(self) -> Vec<Late> {
        drop(self.alive);
        self.thread.end().unwrap_or_default()
    }
}

/// Sleeps repeatedly until `end`, and returns the times at which it woke up late.
fn watch(processor: usize, end: &Receiver<()>) -> Vec<Late> {
    let (mut stalls, mut woke) = (Vec::new(), Instant::now());
    loop {
        // Due since the last wake-up: the machine may be paused before this thread sleeps.
        let due = woke + PERIOD;
        let pause = due.saturating_duration_since(Instant::now());
        let Err(RecvTimeoutError::Timeout) = end.recv_timeout(pause) else { return stalls };
        woke = Instant::now();
        if woke.saturating_duration_since(due) >= LEAST {
            stalls.push(Late { processor, time: due..woke });
        }
    }
}

fn take_precedence(processor: usize) -> anyhow::Result<()> {
    keep_thread_to(&[processor])?;
    set_thread_priority_and_policy(
        thread_native_id(),
        thread_priority::ThreadPriority::Max,
        ThreadSchedulePolicy::Realtime(Fifo),
    )
    .map_err(|error| anyhow::anyhow!("{error:?}"))
    .context("failed to set real-time priority (needs CAP_SYS_NICE)")
}

fn blame(stalls: &[Late], timers: &[Late]) -> Blame {
    let held = |timer: &Late| {
        let own = stalls.iter().filter(|stall| stall.processor == timer.processor);
        timer.length().saturating_sub(own.map(|stall| stall.common(timer)).sum())
    };
    Blame {
        stall_max: stalls.iter().map(Late::length).max().unwrap_or_default(),
        held_max: timers.iter().map(held).max().unwrap_or_default(),
    }
}

impl Late {
    fn length(&self) -> Duration {
        self.time.end.saturating_duration_since(self.time.start)
    }

    /// Length of the overlap of both.
    fn common(&self, other: &Self) -> Duration {
        let start = self.time.start.max(other.time.start);
        self.time.end.min(other.time.end).saturating_duration_since(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_is_reduced_only_by_pauses_of_the_same_processor() {
        let zero = Instant::now();
        let at = |(processor, ms): (usize, Range<u64>)| Late {
            processor,
            time: zero + Duration::from_millis(ms.start)..zero + Duration::from_millis(ms.end),
        };
        let stalls = [(0, 10..40), (0, 90..95), (1, 200..230), (0, 500..505)].map(at);
        for (timers, held) in [
            (vec![], 0),
            // Within a pause, across each end, around it, next to it.
            (vec![(0, 15..35)], 0),
            (vec![(0, 5..20)], 5),
            (vec![(0, 30..47)], 7),
            (vec![(0, 0..100)], 65),
            (vec![(0, 41..60)], 19),
            (vec![(0, 0..5)], 5),
            // Another processor's.
            (vec![(1, 15..35)], 20),
            (vec![(0, 200..230), (1, 200..231)], 30),
        ] {
            let timers: Vec<Late> = timers.into_iter().map(at).collect();
            let found = blame(&stalls, &timers);
            assert_eq!(found.held_max, Duration::from_millis(held), "{timers:?}");
            assert_eq!(found.stall_max, Duration::from_millis(30));
        }
    }

    #[tokio::test]
    async fn busy_event_loop_is_counted_as_held() {
        let here = sched_getcpu();
        keep_thread_to(&[here]).unwrap();
        // Without the right to observe pauses, nothing is subtracted either.
        let stalls = Stalls::watch(&[here]);
        let timers = LateTimers::default();
        let lag = timers.watch();
        tokio::time::sleep(Duration::from_millis(30)).await;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(200) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        let max = lag.take().max;
        let held = stalls.map_or(max, |stalls| stalls.blame(&timers).held_max);
        assert!(max >= Duration::from_millis(180), "{max:?}");
        // The machine may be paused for some of it.
        assert!((Duration::from_millis(80)..=max).contains(&held), "{held:?} of {max:?}");
    }
}
