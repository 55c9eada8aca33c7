//! The section `[routing]`.

use crate::{CacheOptions, PrefixCache};
use orchestrate_settings::{Problems, setting_types, settings};
use orchestrate_types::ByteSize;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Among which episodes rows of a common prefix are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SharingScope {
    /// Episodes on one worker, because the rows describe its KV cache.
    #[default]
    Worker,
    /// All episodes; workers compute equal rows for equal tokens, up to rounding.
    Fleet,
}

/// What happens with mixed rows.
///
/// Mixed rows may differ from the choices behind the log-probabilities of their tokens, because the
/// weights changed within a turn, or the engine evicted its KV cache and computed it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MixedRows {
    /// Tokens whose row is mixed carry no loss; the rows are replayed as context.
    #[default]
    Mask,
    /// Mixed rows are used like any others.
    Keep,
    /// An episode with mixed rows is not trained on with replay.
    Drop,
}

setting_types!(SharingScope, MixedRows);

settings! {
    /// How routing rows are kept and shared.
    #[derive(Copy, Eq)]
    [routing] pub RoutingSection -> RoutingSettings, check: check_together;

    /// Memory for the routing rows of common prefixes; "0 B" shares none.
    cache_bytes: ByteSize = ByteSize::mib(512);
    /// Size of the files in the run folder that hold shared rows when memory is full; "0 B" writes
    /// none.
    spill_bytes: ByteSize = if cache_bytes.0 == 0 { ByteSize(0) } else { ByteSize::mib(2048) }
        => "`\"2 GiB\"`; `\"0 B\"` without `cache_bytes`";
    /// Among which episodes rows are shared.
    scope: SharingScope = SharingScope::default();
    /// What happens with the rows of turns during which the weights or the KV cache changed.
    mixed: MixedRows = MixedRows::default();
}

fn check_together(written: &RoutingSection, settings: &RoutingSettings, problems: &mut Problems) {
    problems.require(
        settings.cache_bytes.0 > 0 || settings.spill_bytes.0 == 0,
        "spill_bytes",
        settings.spill_bytes,
        "must be \"0 B\" without cache_bytes: only rows that were in memory are written to files",
    );
    if settings.cache_bytes.0 == 0 {
        problems.refuse_unread(written, &["scope"], "only applies with routing.cache_bytes");
    }
}

impl RoutingSettings {
    /// The cache of a run that spills to `folder`; `None` if nothing is shared.
    ///
    /// # Errors
    /// Fails if the folder cannot be created or emptied.
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
    fn spill_files_without_cache_are_refused() {
        let section = RoutingSection {
            cache_bytes: Some(ByteSize(0)),
            spill_bytes: Some(ByteSize::mib(1)),
            ..Default::default()
        };
        assert_eq!(section.check().unwrap_err()[0].key, "routing.spill_bytes");
    }

    #[test]
    fn a_scope_without_sharing_is_refused() {
        let section = RoutingSection {
            cache_bytes: Some(ByteSize(0)),
            scope: Some(SharingScope::Fleet),
            ..Default::default()
        };
        let problem = section.check().unwrap_err().remove(0);
        let text = "routing.scope = \"fleet\": only applies with routing.cache_bytes";
        assert!(problem.to_string().starts_with(text), "{problem}");
    }
}
