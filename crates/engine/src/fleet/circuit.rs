//! Whether a worker gets requests: a pure state machine, one per worker.
//!
//! | state | event | next state |
//! |---|---|---|
//! | `Closed` | `RequestSucceeded` | `Closed`, all failures forgotten |
//! | `Closed` | `ProbeAnswered` | `Closed`, missed probes forgotten |
//! | `Closed` | `RequestFailed`, `ProbeMissed` | `Closed`, one failure or missed probe more |
//! | `Closed` | the [`MAX_FAILURES`]th `RequestFailed` or `ProbeMissed` in a row | `Open` |
//! | `Closed` | `Unreachable`, `WeightsUnknown` | `Open` |
//! | `Closed` | `SyncStarted` | `Syncing` |
//! | `Syncing` | `SyncSucceeded` | `Closed` |
//! | `Syncing` | `SyncFailed` | `Open` |
//! | `Open` | `Returned` | `Recovering` |
//! | `Recovering` | `SyncSucceeded` | `Closed` |
//! | `Recovering` | `SyncFailed` | `Open` |
//!
//! All other events leave the state unchanged: results of requests that were sent before a change
//! arrive after it, and say nothing about the new state.

/// Number of consecutive failed requests, or of consecutive missed probes, that takes a worker out
/// of service.
pub(super) const MAX_FAILURES: u32 = 3;

/// State of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Circuit {
    /// In service: it gets requests.
    Closed {
        /// Requests that failed since its last reply.
        failed: u32,
        /// Probes missed since it last answered one.
        missed: u32,
    },
    /// Its weights are being updated. Its conversations wait for it.
    Syncing,
    /// Out of service: it gets only probes.
    Open,
    /// It answers probes again, and is being given the weights that it missed.
    Recovering,
}

/// An event of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CircuitEvent {
    /// A reply passed all checks.
    RequestSucceeded,
    /// A request failed in a way that may be the worker's fault.
    RequestFailed,
    /// A worker in service answered a probe.
    ProbeAnswered,
    /// A worker in service did not answer a probe.
    ProbeMissed,
    /// A connection broke, and a probe right afterwards was not answered either.
    Unreachable,
    /// It serves weights that the fleet did not give it.
    WeightsUnknown,
    /// A worker out of service answered a probe.
    Returned,
    /// An update of its weights started.
    SyncStarted,
    /// It serves the current weights.
    SyncSucceeded,
    /// It may serve any weights.
    SyncFailed,
}

impl Circuit {
    /// In service without failures.
    pub(super) const HEALTHY: Self = Self::Closed { failed: 0, missed: 0 };

    /// The next state.
    #[must_use]
    pub(super) fn step(self, event: CircuitEvent) -> Self {
        use CircuitEvent as Event;
        match (self, event) {
            (Self::Closed { .. }, Event::RequestSucceeded)
            | (Self::Syncing | Self::Recovering, Event::SyncSucceeded) => Self::HEALTHY,
            (Self::Closed { failed, .. }, Event::ProbeAnswered) => {
                Self::Closed { failed, missed: 0 }
            }
            (Self::Closed { failed, missed }, Event::RequestFailed)
                if failed + 1 < MAX_FAILURES =>
            {
                Self::Closed { failed: failed + 1, missed }
            }
            (Self::Closed { failed, missed }, Event::ProbeMissed) if missed + 1 < MAX_FAILURES => {
                Self::Closed { failed, missed: missed + 1 }
            }
            (
                Self::Closed { .. },
                Event::RequestFailed
                | Event::ProbeMissed
                | Event::Unreachable
                | Event::WeightsUnknown,
            )
            | (Self::Syncing | Self::Recovering, Event::SyncFailed) => Self::Open,
            (Self::Closed { .. }, Event::SyncStarted) => Self::Syncing,
            (Self::Open, Event::Returned) => Self::Recovering,
            (Self::Closed { .. }, Event::Returned | Event::SyncSucceeded | Event::SyncFailed)
            | (
                Self::Syncing | Self::Recovering,
                Event::RequestSucceeded
                | Event::RequestFailed
                | Event::ProbeAnswered
                | Event::ProbeMissed
                | Event::Unreachable
                | Event::WeightsUnknown
                | Event::Returned
                | Event::SyncStarted,
            )
            | (
                Self::Open,
                Event::RequestSucceeded
                | Event::RequestFailed
                | Event::ProbeAnswered
                | Event::ProbeMissed
                | Event::Unreachable
                | Event::WeightsUnknown
                | Event::SyncStarted
                | Event::SyncSucceeded
                | Event::SyncFailed,
            ) => self,
        }
    }

    /// Whether conversations are assigned to it. During a weight sync they are, and wait.
    pub(super) fn is_in_service(self) -> bool {
        match self {
            Self::Closed { .. } | Self::Syncing => true,
            Self::Open | Self::Recovering => false,
        }
    }

    /// Whether a request may be sent now.
    pub(super) fn accepts_requests(self) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Syncing | Self::Open | Self::Recovering => false,
        }
    }

    /// The state's name for display.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Closed { .. } => "up",
            Self::Syncing => "syncing",
            Self::Open => "out of service",
            Self::Recovering => "recovering",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [CircuitEvent; 10] = [
        CircuitEvent::RequestSucceeded,
        CircuitEvent::RequestFailed,
        CircuitEvent::ProbeAnswered,
        CircuitEvent::ProbeMissed,
        CircuitEvent::Unreachable,
        CircuitEvent::WeightsUnknown,
        CircuitEvent::Returned,
        CircuitEvent::SyncStarted,
        CircuitEvent::SyncSucceeded,
        CircuitEvent::SyncFailed,
    ];

    #[test]
    fn every_listed_transition_happens_and_no_other() {
        use CircuitEvent as Event;
        let closed = |failed, missed| Circuit::Closed { failed, missed };
        let last = closed(MAX_FAILURES - 1, MAX_FAILURES - 1);
        let listed = [
            (last, Event::RequestSucceeded, Circuit::HEALTHY),
            (last, Event::ProbeAnswered, closed(MAX_FAILURES - 1, 0)),
            (Circuit::HEALTHY, Event::RequestFailed, closed(1, 0)),
            (Circuit::HEALTHY, Event::ProbeMissed, closed(0, 1)),
            (last, Event::RequestFailed, Circuit::Open),
            (last, Event::ProbeMissed, Circuit::Open),
            (Circuit::HEALTHY, Event::Unreachable, Circuit::Open),
            (last, Event::Unreachable, Circuit::Open),
            (Circuit::HEALTHY, Event::WeightsUnknown, Circuit::Open),
            (last, Event::WeightsUnknown, Circuit::Open),
            (Circuit::HEALTHY, Event::SyncStarted, Circuit::Syncing),
            (last, Event::SyncStarted, Circuit::Syncing),
            (Circuit::Syncing, Event::SyncSucceeded, Circuit::HEALTHY),
            (Circuit::Syncing, Event::SyncFailed, Circuit::Open),
            (Circuit::Open, Event::Returned, Circuit::Recovering),
            (Circuit::Recovering, Event::SyncSucceeded, Circuit::HEALTHY),
            (Circuit::Recovering, Event::SyncFailed, Circuit::Open),
        ];
        for state in [Circuit::HEALTHY, last, Circuit::Syncing, Circuit::Open, Circuit::Recovering]
        {
            for event in EVENTS {
                let found = state.step(event);
                let row = listed.iter().find(|(from, on, _)| (*from, *on) == (state, event));
                let expected = row.map_or(state, |(_, _, to)| *to);
                assert_eq!(found, expected, "{state:?} on {event:?}");
            }
        }
    }

    proptest! {
        /// The invariant of the fleet: after a failed update only a successful one lets a worker
        /// serve again.
        #[test]
        fn prop_only_a_successful_sync_returns_a_worker_to_service(
            events in proptest::collection::vec(0..EVENTS.len(), 0..60),
        ) {
            let mut circuit = Circuit::HEALTHY;
            let mut known = true;
            for index in events {
                let (event, before) = (EVENTS[index], circuit);
                circuit = circuit.step(event);
                if !circuit.is_in_service() {
                    known = false;
                }
                if event == CircuitEvent::SyncSucceeded
                    && !before.accepts_requests()
                    && before != Circuit::Open
                {
                    known = true;
                }
                prop_assert!(known || !circuit.accepts_requests(), "{event:?} led to {circuit:?}");
            }
        }
    }
}
