//! The one place that reads the wall clock. For display and records only: durations are measured with a
//! monotonic clock where they arise.

use jiff::{Timestamp, Unit};

/// Microseconds since the Unix epoch, UTC.
pub fn unix_micros() -> i64 {
    Timestamp::now().as_microsecond()
}

/// The time, UTC, to the millisecond. Serialised as RFC 3339.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    now.round(Unit::Millisecond).unwrap_or(now)
}
