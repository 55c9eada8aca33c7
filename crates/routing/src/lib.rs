//! Routed experts: decode, validate, narrow, and join over turns. Does no network I/O.
//!
//! Row `t` of a sequence holds `[moe layers, top_k]` logical expert ids, chosen when *input* token
//! `t` was processed. The invariant: no row is ever invented. A missing row is marked by a bit, never
//! by a special value.
//!
//! [`split_body`] finds the payload in a reply, [`decode`] turns it into [`RoutedRows`];
//! [`MaskBuilder`] places the rows of all replies of an episode by absolute position and
//! finishes as a [`RoutingMask`].

mod base64;
mod blocks;
mod body;
mod builder;
mod cache;
mod check;
mod codec;
mod config;
mod encode;
mod error;
mod format;
mod kernels;
mod key;
mod mask;
mod npy;
mod recent;
mod rows;
mod spill;
mod wire;

pub use blocks::{Block, HeldBytes};
pub use body::{SplitBody, split_body};
pub use builder::{MaskBuilder, Passes, PushReport};
pub use cache::{CacheMetrics, CacheOptions, Evicted, Inserted, PrefixCache, PrefixChain};
pub use config::{MixedRows, RoutingSection, RoutingSettings, SharingScope};
pub use encode::{encode_npy, encode_sglang};
pub use error::RoutingError;
pub use mask::{RoutingMask, RowVersion};
pub use rows::{BLOCK_ROWS, PayloadForm, RoutedRows};
pub use wire::{WireForm, decode};
