//! Routed experts: decode, validate, narrow, join over turns. No network.
//!
//! Row `t` of a sequence is `[moe layers, top_k]` logical expert ids, chosen when *input* token
//! `t` was processed. The one invariant: no row is ever invented; absence is a bit, not a value.

mod mask;
mod rows;

pub use mask::{RoutingMask, RowVersion};
pub use rows::RoutedRows;
