//! Who makes the event loop late: the program, or a machine that stands still.
//!
//! A hypervisor takes a processor away now and then, for some milliseconds or some dozens of them,
//! and nothing on it runs meanwhile. A thread that only sleeps, of the highest priority there is,
//! wakes on time whatever else the processor has to do: where it is late, the machine stood still.

use super::processors::keep_thread_to;
use anyhow::Context;
use orchestrate_coordinator::LoopLag;
use rustix::process::Pid;
use rustix::thread::{gettid, sched_getcpu};
use std::ops::Range;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thread_priority::unix::{
    RealtimeThreadSchedulePolicy::Fifo, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};

/// Time between two looks: so much of a standstill may not be seen.
const PERIOD: Duration = Duration::from_millis(2);
/// Shorter delays are those of any timer.
const LEAST: Duration = Duration::from_micros(500);

/// Times at which processors stood still, while it lives.
#[derive(Debug)]
pub(super) struct Stalls {
    watches: Vec<Watch>,
}

#[derive(Debug)]
struct Watch {
    processor: usize,
    id: Pid,
    /// Nothing is sent: its end is waited for.
    alive: Sender<()>,
    thread: JoinHandle<Vec<Range<Instant>>>,
}

/// Times at which the timer of the event loop was due and did not fire, with the processor on which
/// it then fired.
#[derive(Debug, Clone, Default)]
pub(super) struct LateTimers(Arc<Mutex<Vec<(usize, Range<Instant>)>>>);

/// What became of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blame {
    /// The longest time a processor stood still.
    pub(super) stall_max: Duration,
    /// The longest delay of the event loop, standstills left out.
    pub(super) held_max: Duration,
}

impl LateTimers {
    /// Looks at the event loop; they are its delays.
    pub(super) fn watch(&self) -> LoopLag {
        let late = Arc::clone(&self.0);
        LoopLag::begin_with(move |due, delay| {
            if delay >= LEAST {
                let due = due.into_std();
                let mut late = late.lock().unwrap_or_else(PoisonError::into_inner);
                late.push((sched_getcpu(), due..due + delay));
            }
        })
    }
}

impl Stalls {
    /// Begins to look at these processors; an error where a thread may not have such a priority.
    pub(super) fn watch(processors: &[usize]) -> anyhow::Result<Self> {
        let begin = |&processor: &usize| Watch::begin(processor);
        Ok(Self { watches: processors.iter().map(begin).collect::<anyhow::Result<_>>()? })
    }

    /// The threads that look.
    pub(super) fn threads(&self) -> impl Iterator<Item = Pid> {
        self.watches.iter().map(|watch| watch.id)
    }

    /// Ends, and takes the times at which a processor stood still from its timers' delays.
    pub(super) fn blame(self, timers: &LateTimers) -> Blame {
        let stalls: Vec<(usize, Vec<Range<Instant>>)> =
            self.watches.into_iter().map(Watch::end).collect();
        let timers = timers.0.lock().unwrap_or_else(PoisonError::into_inner);
        blame(&stalls, &timers)
    }
}

impl Watch {
    fn begin(processor: usize) -> anyhow::Result<Self> {
        let (alive, end) = mpsc::channel();
        let (ready, begun) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let placed = take_precedence(processor);
            let is_placed = placed.is_ok();
            // Who began waits for this.
            let _ = ready.send(placed.map(|()| gettid()));
            let (mut stalls, mut woke) = (Vec::new(), Instant::now());
            while is_placed {
                // From the last waking on: the machine may stand still before this thread sleeps.
                let due = woke + PERIOD;
                let pause = due.saturating_duration_since(Instant::now());
                let Err(RecvTimeoutError::Timeout) = end.recv_timeout(pause) else { break };
                woke = Instant::now();
                if woke.saturating_duration_since(due) >= LEAST {
                    stalls.push(due..woke);
                }
            }
            stalls
        });
        let id = begun.recv().context("a thread ended at once")??;
        Ok(Self { processor, id, alive, thread })
    }

    fn end(self) -> (usize, Vec<Range<Instant>>) {
        drop(self.alive);
        (self.processor, self.thread.join().unwrap_or_default())
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
    .context("take real-time priority")
}

fn blame(stalls: &[(usize, Vec<Range<Instant>>)], timers: &[(usize, Range<Instant>)]) -> Blame {
    let length = |range: &Range<Instant>| range.end.saturating_duration_since(range.start);
    let held = |(processor, late): &(usize, Range<Instant>)| {
        let own = stalls.iter().filter(|(of, _)| of == processor).flat_map(|(_, stalls)| stalls);
        let common = own.map(|stall| {
            length(&(stall.start.max(late.start)..stall.end.min(late.end).max(late.start)))
        });
        length(late).saturating_sub(common.sum())
    };
    Blame {
        stall_max: stalls.iter().flat_map(|(_, all)| all).map(length).max().unwrap_or_default(),
        held_max: timers.iter().map(held).max().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_standstill_of_a_timers_own_processor_excuses_it() {
        let zero = Instant::now();
        let at = |ms: Range<u64>| {
            zero + Duration::from_millis(ms.start)..zero + Duration::from_millis(ms.end)
        };
        let stalls = [(0, vec![at(10..40), at(90..95), at(500..505)]), (1, vec![at(200..230)])];
        for (timers, held) in [
            (vec![], 0),
            // Within, across each end, around, beside.
            (vec![(0, at(15..35))], 0),
            (vec![(0, at(5..20))], 5),
            (vec![(0, at(30..47))], 7),
            (vec![(0, at(0..100))], 65),
            (vec![(0, at(41..60))], 19),
            (vec![(0, at(0..5))], 5),
            // Another processor's.
            (vec![(1, at(15..35))], 20),
            (vec![(0, at(200..230)), (1, at(200..231))], 30),
        ] {
            let found = blame(&stalls, &timers);
            assert_eq!(found.held_max, Duration::from_millis(held), "{timers:?}");
            assert_eq!(found.stall_max, Duration::from_millis(30));
        }
    }

    #[tokio::test]
    async fn a_loop_that_works_is_not_excused() {
        let allowed = super::super::processors::Processors::share().unwrap();
        let Ok(stalls) = Stalls::watch(&allowed.all()) else {
            eprintln!("skipped: this user may not take real-time priority");
            return;
        };
        let timers = LateTimers::default();
        let lag = timers.watch();
        tokio::time::sleep(Duration::from_millis(30)).await;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(200) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        let blame = stalls.blame(&timers);
        assert!(lag.take().max >= Duration::from_millis(180));
        // The machine may stand still for some of it.
        assert!(blame.held_max >= Duration::from_millis(80), "{blame:?}");
    }
}
