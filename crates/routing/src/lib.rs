//! Routed experts: decode, validate, narrow, join over turns. No network.
//!
//! Row `t` of a sequence is `[moe layers, top_k]` logical expert ids, chosen when *input* token
//! `t` was processed. The one invariant: no row is ever invented; absence is a bit, not a value.
//!
//! [`decode_sglang`] turns one engine reply into [`RoutedRows`]; [`MaskBuilder`] places the rows
//! of all replies of an episode by absolute position and ends in a [`RoutingMask`].

mod blocks;
mod builder;
mod cache;
mod check;
mod codec;
mod config;
mod error;
mod format;
mod mask;
mod rows;
mod sglang;
mod spill;

pub use blocks::{Block, HeldBytes};
pub use builder::{MaskBuilder, Passes, PushReport};
pub use cache::{CacheMetrics, CacheOptions, Inserted, PrefixCache, PrefixChain};
pub use config::{MixedRows, RoutingPlan, RoutingSection, SharingScope};
pub use error::RoutingError;
pub use mask::{RoutingMask, RowVersion};
pub use rows::{BLOCK_ROWS, PayloadForm, RoutedRows};
pub use sglang::{decode_sglang, encode_sglang};
