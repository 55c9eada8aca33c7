//! The one place that reads the wall clock.

/// The current time in microseconds since the Unix epoch, UTC. For display and records only;
/// durations are measured with a monotonic clock.
pub fn unix_micros() -> i64 {
    jiff::Timestamp::now().as_microsecond()
}
