//! Routing rows that can be computed without the engine.

use orchestrate_routing::{RoutedRows, RoutingError};
use orchestrate_types::{ModelShape, PolicyVersion, TokenId};
use std::ops::Range;

/// One step of `SplitMix64`.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The hash of a prefix extended by one token.
pub(crate) fn extend(prefix: u64, token: TokenId) -> u64 {
    mix(prefix ^ u64::from(token))
}

/// The routing rows of `range` in the sequence `tokens` under `version`.
///
/// For each MoE layer a row has `top_k` consecutive experts (modulo their number), the first of
/// which is a hash of the version, the layer and all tokens up to the position. `range` must end
/// within `tokens`.
///
/// # Errors
/// [`RoutingError`] if the shape has no valid rows.
pub fn expected_rows(
    shape: &ModelShape,
    version: PolicyVersion,
    tokens: &[TokenId],
    range: Range<usize>,
) -> Result<RoutedRows, RoutingError> {
    let experts = shape.experts.max(1) as u64;
    let mut ids = Vec::with_capacity(range.len() * shape.ids_per_row());
    let mut prefix = mix(version.0);
    for (position, token) in tokens.iter().enumerate().take(range.end) {
        prefix = extend(prefix, *token);
        if position < range.start {
            continue;
        }
        for layer in &shape.moe_layers {
            let first = mix(prefix ^ (*layer as u64)) % experts;
            let ring = (0..shape.top_k as u64).map(|slot| (first + slot) % experts);
            ids.extend(ring.map(|id| u16::try_from(id).unwrap_or(u16::MAX)));
        }
    }
    RoutedRows::from_ids(shape, range.start, &ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> ModelShape {
        ModelShape {
            hidden_layers: 3,
            moe_layers: vec![1, 2],
            experts: 16,
            top_k: 4,
            vocab: 100,
            context: 4096,
        }
    }

    fn bytes(rows: &RoutedRows) -> Vec<u8> {
        rows.chunks().flatten().copied().collect()
    }

    #[test]
    fn row_depends_on_every_token_before_it_and_on_the_version() {
        let rows = |version, tokens: &[TokenId]| {
            bytes(&expected_rows(&shape(), PolicyVersion(version), tokens, 9..10).unwrap())
        };
        let tokens: Vec<TokenId> = (0..10).collect();
        let row = rows(1, &tokens);
        assert_ne!(row, rows(2, &tokens));
        let changed = (0..10)
            .filter(|at| {
                let mut other = tokens.clone();
                other[*at] += 50;
                rows(1, &other) != row
            })
            .count();
        assert!(changed >= 9, "16 values per layer may collide by chance, but hardly twice");
    }

    proptest! {
        #[test]
        fn prop_rows_of_a_range_equal_that_range_of_all_rows(
            tokens in proptest::collection::vec(0u32..100, 1..200),
            cut in 0usize..200,
        ) {
            let cut = cut.min(tokens.len());
            let all = bytes(&expected_rows(&shape(), PolicyVersion(3), &tokens, 0..tokens.len())?);
            let part = expected_rows(&shape(), PolicyVersion(3), &tokens, cut..tokens.len())?;
            let part = bytes(&part);
            prop_assert_eq!(&all[cut * shape().row_bytes()..], part.as_slice());
        }
    }
}
