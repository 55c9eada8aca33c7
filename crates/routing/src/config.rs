//! The `[routing]` section.

use crate::{CacheOptions, PrefixCache};
use orchestrate_types::{ByteSize, ConfigProblem};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Among which episodes rows of a common prefix are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SharingScope {
    /// Episodes on one worker, whose prefix cache the rows describe.
    #[default]
    Worker,
    /// All episodes: workers compute equal rows for equal tokens, up to rounding.
    Fleet,
}

/// What is done with mixed rows: those that may not be the choices behind the log-probabilities
/// of their tokens, because weights changed inside a turn or the engine dropped its KV and
/// computed it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MixedRows {
    /// Tokens whose row is mixed carry no loss; the rows are replayed as context.
    #[default]
    Mask,
    /// They are used like any others.
    Keep,
    /// An episode with mixed rows is not trained on with replay.
    Drop,
}

/// How routing rows are kept and shared. Every field may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RoutingSection {
    /// Memory for rows of common prefixes. Default "512 MiB"; "0 B" shares nothing.
    pub cache_bytes: Option<ByteSize>,
    /// Files in the run folder for shared rows that memory has no room for. Default "2 GiB";
    /// "0 B" writes none.
    pub spill_bytes: Option<ByteSize>,
    /// Among which episodes rows are shared: `worker` (default) or `fleet`.
    pub scope: Option<SharingScope>,
    /// What is done with rows of turns during which weights or KV changed: `mask` (default),
    /// `keep` or `drop`.
    pub mixed: Option<MixedRows>,
}

/// The checked section, with defaults filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingPlan {
    /// Bytes of shared rows in memory; 0 = none are shared.
    pub cache_bytes: ByteSize,
    /// Bytes of files; 0 = none.
    pub spill_bytes: ByteSize,
    /// Among which episodes rows are shared.
    pub scope: SharingScope,
    /// What is done with mixed rows.
    pub mixed: MixedRows,
}

impl RoutingSection {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// All problems of the section at once.
    pub fn check(&self) -> Result<RoutingPlan, Vec<ConfigProblem>> {
        let cache_bytes = self.cache_bytes.unwrap_or(ByteSize::mib(512));
        let spill_default = ByteSize(if cache_bytes.0 == 0 { 0 } else { 2 << 30 });
        let plan = RoutingPlan {
            cache_bytes,
            spill_bytes: self.spill_bytes.unwrap_or(spill_default),
            scope: self.scope.unwrap_or_default(),
            mixed: self.mixed.unwrap_or_default(),
        };
        if plan.cache_bytes.0 == 0 && plan.spill_bytes.0 > 0 {
            let remedy = "set routing.cache_bytes as well: only what was in memory is written";
            return Err(vec![ConfigProblem::new("routing.spill_bytes", plan.spill_bytes, remedy)]);
        }
        Ok(plan)
    }
}

impl RoutingPlan {
    /// The cache of a run whose spilled blocks lie in `folder`; `None` where nothing is shared.
    ///
    /// # Errors
    /// When the folder cannot be made or emptied.
    pub fn open_cache(&self, folder: &Path) -> std::io::Result<Option<PrefixCache>> {
        if self.cache_bytes.0 == 0 {
            return Ok(None);
        }
        let spill = (self.spill_bytes.0 > 0).then(|| (folder.to_owned(), self.spill_bytes.0));
        PrefixCache::open(CacheOptions { bytes: self.cache_bytes.0, spill }).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_share_on_one_worker_and_mask_mixed_rows() {
        let plan = RoutingSection::default().check().unwrap();
        assert_eq!((plan.scope, plan.mixed), (SharingScope::Worker, MixedRows::Mask));
        assert_eq!(plan.cache_bytes, ByteSize::mib(512));
        let off = RoutingSection { cache_bytes: Some(ByteSize(0)), ..Default::default() };
        assert!(off.check().unwrap().open_cache(Path::new("/nowhere")).unwrap().is_none());
    }

    #[test]
    fn files_without_memory_are_a_mistake() {
        let section = RoutingSection {
            cache_bytes: Some(ByteSize(0)),
            spill_bytes: Some(ByteSize::mib(1)),
            ..Default::default()
        };
        assert_eq!(section.check().unwrap_err()[0].key, "routing.spill_bytes");
    }
}
