//! Time limits of test runs, as task rows name them.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::time::Duration;

/// Time limit of a test run, between 1 second and 24 hours. Written as a whole number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TestTimeout(Duration);

/// A time limit that no test run may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{seconds} is not a valid time limit: it must be 1 to 86400 seconds")]
pub struct TimeoutError {
    seconds: u64,
}

impl TestTimeout {
    /// The shortest limit.
    pub const SHORTEST: Duration = Duration::from_secs(1);
    /// The longest limit.
    pub const LONGEST: Duration = Duration::from_hours(24);

    /// A limit of `seconds`.
    ///
    /// # Errors
    /// If it is not between 1 second and 24 hours.
    pub fn from_secs(seconds: u64) -> Result<Self, TimeoutError> {
        let time = Duration::from_secs(seconds);
        let is_valid = (Self::SHORTEST..=Self::LONGEST).contains(&time);
        if is_valid { Ok(Self(time)) } else { Err(TimeoutError { seconds }) }
    }

    /// The valid limit that is nearest to `time`, in whole seconds.
    #[must_use]
    pub fn nearest(time: Duration) -> Self {
        let time = time.clamp(Self::SHORTEST, Self::LONGEST);
        Self(Duration::from_secs(time.as_secs()))
    }

    /// The limit.
    pub fn get(self) -> Duration {
        self.0
    }
}

impl Serialize for TestTimeout {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.0.as_secs())
    }
}

impl<'de> Deserialize<'de> for TestTimeout {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Self::from_secs(u64::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_are_bounded() {
        for seconds in [0, 86_401, i64::MAX.unsigned_abs(), u64::MAX] {
            assert_eq!(TestTimeout::from_secs(seconds), Err(TimeoutError { seconds }));
        }
        assert_eq!(TestTimeout::from_secs(86_400).unwrap().get(), TestTimeout::LONGEST);
        assert_eq!(TestTimeout::nearest(Duration::MAX).get(), TestTimeout::LONGEST);
        assert_eq!(TestTimeout::nearest(Duration::ZERO).get(), TestTimeout::SHORTEST);
    }
}
