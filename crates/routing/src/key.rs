//! Keys of cached blocks.

use std::fmt;

/// Identifies a block by model, policy version, scope, and all tokens up to the block's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey([u8; 32]);

impl BlockKey {
    pub(crate) fn new(hash: [u8; 32]) -> Self {
        Self(hash)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
