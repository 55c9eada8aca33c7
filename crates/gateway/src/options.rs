//! Settings of the gateway.

use std::time::Duration;

/// Settings of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayOptions {
    /// Largest request body, in bytes.
    pub body_limit: usize,
    /// How long a stream is silent while the model samples. A reply that takes longer than this
    /// begins with keep-alives, and its errors are events instead of statuses.
    pub keep_alive: Duration,
    /// Whether clients must send the episode's secret as their key, too.
    pub require_key: bool,
}

impl Default for GatewayOptions {
    /// 32 MiB, 10 seconds, and any key.
    fn default() -> Self {
        Self { body_limit: 32 << 20, keep_alive: Duration::from_secs(10), require_key: false }
    }
}
