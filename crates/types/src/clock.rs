//! The only place that reads the wall clock. For display and records only: durations are measured
//! with a monotonic clock.

use jiff::{Timestamp, Unit};

/// The current time in microseconds since the Unix epoch.
pub fn unix_micros() -> i64 {
    Timestamp::now().as_microsecond()
}

/// The current time in UTC, rounded to the millisecond. Serialised as RFC 3339.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    now.round(Unit::Millisecond).unwrap_or(now)
}

/// A time in µs since the Unix epoch; `None` if it is not in the calendar.
pub fn timestamp(micros: i64) -> Option<Timestamp> {
    Timestamp::from_microsecond(micros).ok()
}

/// A time in µs since the Unix epoch as text, to the second and in UTC.
pub fn utc(micros: i64) -> String {
    timestamp(micros).map_or_else(
        || "unknown".to_owned(),
        |time| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
    )
}
