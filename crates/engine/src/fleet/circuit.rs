//! Whether a worker gets requests: a pure machine per worker.
//!
//! | state | event | next state |
//! |---|---|---|
//! | `Closed` | `Answered` | `Closed`, nothing against it |
//! | `Closed` | `Seen` | `Closed`, no probe missed |
//! | `Closed` | `Failed`, `Missed`, below [`STRIKES`] | `Closed`, one failure or missed probe more |
//! | `Closed` | `Failed`, `Missed` for the [`STRIKES`]th time in a row | `Open` |
//! | `Closed` | `Gone`, `WeightsUnknown` | `Open` |
//! | `Closed` | `SyncBegan` | `Syncing` |
//! | `Syncing` | `Synced` | `Closed` |
//! | `Syncing` | `SyncFailed` | `Open` |
//! | `Open` | `Returned` | `Waking` |
//! | `Waking` | `Synced` | `Closed` |
//! | `Waking` | `SyncFailed` | `Open` |
//!
//! Everything else leaves the state as it is: answers and failures of requests that were sent
//! before a change arrive after it, and say nothing about the state that is there now.

/// Failures in a row, of requests or of probes, after which a worker gets no more requests.
pub(crate) const STRIKES: u32 = 3;

/// Where one worker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Circuit {
    /// It gets requests.
    Closed {
        /// Requests that failed since its last answer.
        failed: u32,
        /// Probes that had no answer since it was last seen.
        missed: u32,
    },
    /// Its weights are being exchanged; its conversations wait for it.
    Syncing,
    /// It gets no requests, only probes.
    Open,
    /// It answers probes again, and is being given the weights it missed.
    Waking,
}

/// What happened with one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A reply that passed all checks.
    Answered,
    /// A request failed in a way that may be the worker's fault.
    Failed,
    /// A probe of a serving worker was answered.
    Seen,
    /// A probe of a serving worker was not answered.
    Missed,
    /// A request broke off and a probe right after it had no answer either.
    Gone,
    /// It serves weights that nobody here gave it.
    WeightsUnknown,
    /// A probe of a worker that was away was answered.
    Returned,
    /// An exchange of its weights began.
    SyncBegan,
    /// It serves the right weights.
    Synced,
    /// What it serves is not known.
    SyncFailed,
}

impl Circuit {
    /// A worker that is taken to be up.
    pub(crate) const UP: Self = Self::Closed { failed: 0, missed: 0 };

    /// The next state.
    #[must_use]
    pub(crate) fn step(self, event: Event) -> Self {
        match (self, event) {
            (Self::Closed { .. }, Event::Answered)
            | (Self::Syncing | Self::Waking, Event::Synced) => Self::UP,
            (Self::Closed { failed, .. }, Event::Seen) => Self::Closed { failed, missed: 0 },
            (Self::Closed { failed, missed }, Event::Failed) if failed + 1 < STRIKES => {
                Self::Closed { failed: failed + 1, missed }
            }
            (Self::Closed { failed, missed }, Event::Missed) if missed + 1 < STRIKES => {
                Self::Closed { failed, missed: missed + 1 }
            }
            (
                Self::Closed { .. },
                Event::Failed | Event::Missed | Event::Gone | Event::WeightsUnknown,
            )
            | (Self::Syncing | Self::Waking, Event::SyncFailed) => Self::Open,
            (Self::Closed { .. }, Event::SyncBegan) => Self::Syncing,
            (Self::Open, Event::Returned) => Self::Waking,
            (Self::Closed { .. }, Event::Returned | Event::Synced | Event::SyncFailed)
            | (
                Self::Syncing | Self::Waking,
                Event::Answered
                | Event::Failed
                | Event::Seen
                | Event::Missed
                | Event::Gone
                | Event::WeightsUnknown
                | Event::Returned
                | Event::SyncBegan,
            )
            | (
                Self::Open,
                Event::Answered
                | Event::Failed
                | Event::Seen
                | Event::Missed
                | Event::Gone
                | Event::WeightsUnknown
                | Event::SyncBegan
                | Event::Synced
                | Event::SyncFailed,
            ) => self,
        }
    }

    /// Whether conversations are placed on it. While weights are exchanged they are: they wait.
    pub(crate) fn is_member(self) -> bool {
        match self {
            Self::Closed { .. } | Self::Syncing => true,
            Self::Open | Self::Waking => false,
        }
    }

    /// Whether a request may be sent now.
    pub(crate) fn is_closed(self) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Syncing | Self::Open | Self::Waking => false,
        }
    }

    /// One word for people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Closed { .. } => "up",
            Self::Syncing => "syncing",
            Self::Open => "away",
            Self::Waking => "waking",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 10] = [
        Event::Answered,
        Event::Failed,
        Event::Seen,
        Event::Missed,
        Event::Gone,
        Event::WeightsUnknown,
        Event::Returned,
        Event::SyncBegan,
        Event::Synced,
        Event::SyncFailed,
    ];

    #[test]
    fn every_listed_transition_is_taken_and_no_other() {
        let closed = |failed, missed| Circuit::Closed { failed, missed };
        let last = closed(STRIKES - 1, STRIKES - 1);
        let listed = [
            (last, Event::Answered, Circuit::UP),
            (last, Event::Seen, closed(STRIKES - 1, 0)),
            (Circuit::UP, Event::Failed, closed(1, 0)),
            (Circuit::UP, Event::Missed, closed(0, 1)),
            (last, Event::Failed, Circuit::Open),
            (last, Event::Missed, Circuit::Open),
            (Circuit::UP, Event::Gone, Circuit::Open),
            (last, Event::Gone, Circuit::Open),
            (Circuit::UP, Event::WeightsUnknown, Circuit::Open),
            (last, Event::WeightsUnknown, Circuit::Open),
            (Circuit::UP, Event::SyncBegan, Circuit::Syncing),
            (last, Event::SyncBegan, Circuit::Syncing),
            (Circuit::Syncing, Event::Synced, Circuit::UP),
            (Circuit::Syncing, Event::SyncFailed, Circuit::Open),
            (Circuit::Open, Event::Returned, Circuit::Waking),
            (Circuit::Waking, Event::Synced, Circuit::UP),
            (Circuit::Waking, Event::SyncFailed, Circuit::Open),
        ];
        for state in [Circuit::UP, last, Circuit::Syncing, Circuit::Open, Circuit::Waking] {
            for event in EVENTS {
                let found = state.step(event);
                let row = listed.iter().find(|(from, on, _)| (*from, *on) == (state, event));
                let expected = row.map_or(state, |(_, _, to)| *to);
                assert_eq!(found, expected, "{state:?} on {event:?}");
            }
        }
    }

    proptest! {
        /// The promise that matters: after a failed exchange of weights, nothing but a finished
        /// exchange lets a worker serve again.
        #[test]
        fn prop_only_right_weights_lead_back_to_serving(
            events in proptest::collection::vec(0..EVENTS.len(), 0..60),
        ) {
            let mut circuit = Circuit::UP;
            let mut known = true;
            for index in events {
                let (event, before) = (EVENTS[index], circuit);
                circuit = circuit.step(event);
                if !circuit.is_member() {
                    known = false;
                }
                if event == Event::Synced && !before.is_closed() && before != Circuit::Open {
                    known = true;
                }
                prop_assert!(known || !circuit.is_closed(), "{event:?} led to {circuit:?}");
            }
        }
    }
}
