//! Multiplication and addition with one rounding, the same on every processor.
//!
//! Vector instruction sets since AVX2 and NEON have the operation. Without them, [`fused`] computes it
//! in f64, which vectorises, while the function of the C library would be called for each element.
#![expect(
    clippy::needless_bitwise_bool,
    reason = "a branch would keep the loop from being vectorised"
)]
#![expect(
    clippy::inline_always,
    reason = "a loop is vectorised only where its body is inlined into it"
)]

/// Whether the instruction set for which the program is compiled has the operation.
pub(crate) const BASE_HAS_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// `a · b + c`, rounded once. `HARDWARE` says that the enclosing function is compiled for an
/// instruction set with this operation; the result does not depend on it.
#[inline(always)]
pub(crate) fn fused<const HARDWARE: bool>(a: f32, b: f32, c: f32) -> f32 {
    if HARDWARE { a.mul_add(b, c) } else { in_f64(a, b, c) }
}

/// The product is exact in f64. The sum is rounded to odd, which keeps what decides the second
/// rounding: f64 has more than twice the digits of f32 (Boldo and Melquiond, 2008).
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the second rounding")]
fn in_f64(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let sum = product + c;
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    // An even last digit of an inexact sum becomes the odd one on the side of the exact sum. Not a
    // number is neither above nor below.
    let inexact = (error > 0.0) | (error < 0.0);
    let even = sum.to_bits() & 1 == 0;
    let outwards = (error > 0.0) == (sum > 0.0);
    let bits = sum.to_bits();
    let moved = if outwards { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f64::from_bits(if inexact & even { moved } else { bits }) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(a: f32, b: f32, c: f32) -> bool {
        let (ours, exact) = (in_f64(a, b, c), a.mul_add(b, c));
        ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan()
    }

    #[test]
    fn special_values_and_ties_equal_the_correctly_rounded_operation() {
        let tiny = f32::from_bits(1);
        let values = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            1.5,
            tiny,
            -tiny,
            2.0 * tiny,
            f32::MIN_POSITIVE,
            f32::EPSILON,
            1.0 + f32::EPSILON,
            1.0 - f32::EPSILON / 2.0,
            16_777_215.0,
            16_777_216.0,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            0.1,
            -3.0e-39,
            5.0e-23,
            1.0e19,
        ];
        for a in values {
            for b in values {
                for c in values {
                    assert!(same(a, b, c), "{a:e} · {b:e} + {c:e}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn any_values_equal_the_correctly_rounded_operation(a: u32, b: u32, c: u32, near: bool) {
            let (a, b) = (f32::from_bits(a), f32::from_bits(b));
            // Sums that cancel to a few digits, besides any three numbers.
            let c = if near { -(a * b) * (1.0 + (c % 64) as f32 * f32::EPSILON) } else { f32::from_bits(c) };
            prop_assert!(same(a, b, c), "{a:e} · {b:e} + {c:e}");
        }
    }
}
