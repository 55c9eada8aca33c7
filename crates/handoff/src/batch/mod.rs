//! Batch folders, format version 1.
//!
//! A folder holds `manifest.json` ([`Manifest`]) and packed shards `NNNN.safetensors`. Nothing is
//! padded. A shard of `S` sequences with `N` tokens in total has, in file order:
//!
//! | tensor | dtype and shape | meaning |
//! |---|---|---|
//! | `cu_seqlens` | i64 `[S + 1]` | offsets of the sequences, from 0 to `N` |
//! | `group_ids` | i64 `[S]` | equal for members of one group |
//! | `policy_versions` | i64 `[N]` | version of the weights that first processed the token |
//! | `advantages`, `rewards` | f32 `[S]` | |
//! | `rollout_logprobs` | f32 `[N]` | nats; read only where the mask is 1 |
//! | `token_ids` | u32 `[N]` | |
//! | `routed_row` | u32 `[N]` | only with shared rows: the row of each token |
//! | `loss_mask` | u8 `[N]` | 1 = the policy wrote the token |
//! | `routing_valid` | u8 `[N]` | 0 = placeholder row with ids `0..K` |
//! | `routed_experts` | u8 or u16 `[N, L, K]` | by the model's expert count; `[M, L, K]` with shared rows |
//!
//! All numbers are little-endian, and every tensor is aligned to its element in the file. The
//! header metadata holds `format_version`, `episode_ids` and `moe_layers` (both JSON lists; `L`
//! counts the *global* layer numbers of `moe_layers`). The row of each sequence's last token is
//! never valid, because that token was not an input.
//!
//! # Shared rows
//!
//! Members of a group start with the same prompt and, under one policy, with the same rows. With
//! [`BatchMeta::share_prefix_rows`] a member's leading rows that are equal to those of the group's
//! first member in the shard, byte for byte and under the same tokens, are not written again:
//! `routed_experts` has `M ≤ N` rows, `routed_row` gives the row of each token, and the manifest
//! names it in [`RecordEntry::row_index`]. The price is 4 bytes per token and that a sequence is
//! two pieces of the file instead of one, so that plain slicing by `cu_seqlens` no longer does.
//! For a 48-layer top-8 model (384 bytes a row) a group of 16 with 8,192 prompt tokens of 32,768
//! takes 156 MB instead of 201 MB; with 1,024 prompt tokens it is 198 MB, and models with rows of a
//! few bytes gain nothing. It is off by default.
//!
//! # Publishing
//!
//! Shards are written and digested under a temporary name, synced and renamed; the manifest is written
//! last. A folder without a manifest is not a batch.

mod digest;
mod error;
mod manifest;
mod mapped;
mod meta;
mod read;
mod shard;
mod write;

pub use error::{BatchError, BatchErrorKind};
pub use manifest::{Manifest, RecordEntry, ShardEntry};
pub use mapped::{Rows, Sequence};
pub use meta::{BatchMeta, BatchSample, FORMAT_VERSION, MANIFEST_FILE};
pub use read::Batch;
pub use write::{Planned, stream_batch, write_batch};
