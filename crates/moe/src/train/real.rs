//! The two float types of the trainer: f32 for training, f64 for precise tests.
//!
//! Elementary functions are those of this file and of the crate `libm`, not those of the C library,
//! whose results depend on its version and on the processor.
#![expect(
    clippy::inline_always,
    reason = "a loop is vectorised only where its body is inlined into it"
)]

use crate::fused::fused;
use std::cell::RefCell;
use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

mod sealed {
    /// Restricts [`super::Real`] to the types that the kernel of matrix products supports.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Either f32 or f64; unsafe code relies on there being no other implementations.
pub trait Real:
    sealed::Sealed
    + Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Sum
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The lowest finite value.
    const LOWEST: Self;
    /// Converts from f64, rounding to nearest.
    fn from_f64(value: f64) -> Self;
    /// Converts to f64 exactly.
    fn to_f64(self) -> f64;
    /// `e^self`. In f32 this is a polynomial that the compiler can vectorise, accurate to 2 units
    /// in the last place and saturating outside `[-87, 88]`.
    #[must_use]
    fn exp(self) -> Self;
    /// Natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// `self · factor + addend`, rounded once. `HARDWARE` says that the enclosing function is compiled
    /// for an instruction set with this operation.
    #[must_use]
    fn fused<const HARDWARE: bool>(self, factor: Self, addend: Self) -> Self;
    /// Lends the two buffers of this thread's matrix products to `work`.
    fn with_scratch<R>(work: impl FnOnce(&mut [Vec<Self>; 2]) -> R) -> R;
    /// The larger of the two values.
    #[must_use]
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::MIN;
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn exp(self) -> Self {
        libm::exp(self)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        libm::log(self)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }
    #[inline(always)]
    fn fused<const HARDWARE: bool>(self, factor: Self, addend: Self) -> Self {
        if HARDWARE { self.mul_add(factor, addend) } else { libm::fma(self, factor, addend) }
    }
    fn with_scratch<R>(work: impl FnOnce(&mut [Vec<Self>; 2]) -> R) -> R {
        thread_local! {
            static BUFFERS: RefCell<[Vec<f64>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
        }
        BUFFERS.with_borrow_mut(work)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::MIN;
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rounding is the purpose")]
    fn from_f64(value: f64) -> Self {
        value as Self
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn exp(self) -> Self {
        // Adding 1.5 × 2^23 leaves the rounded integer in the low bits of the mantissa.
        const MAGIC: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        // Comparisons instead of `clamp`: NaN stays NaN, and the loop vectorises.
        let x = if self > 88.0 { 88.0 } else { self };
        let x = if x < -87.0 { -87.0 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + MAGIC;
        let n = shifted - MAGIC;
        let r = x - n * LN2_HIGH - n * LN2_LOW;
        let p = 1.987_569_1e-4;
        let p = p * r + 1.398_199_9e-3;
        let p = p * r + 8.333_452e-3;
        let p = p * r + 4.166_579_6e-2;
        let p = p * r + 1.666_666_5e-1;
        let p = p * r + 0.5;
        let value = p * r * r + r + 1.0;
        value * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        libm::logf(self)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }
    #[inline(always)]
    fn fused<const HARDWARE: bool>(self, factor: Self, addend: Self) -> Self {
        fused::<HARDWARE>(self, factor, addend)
    }
    fn with_scratch<R>(work: impl FnOnce(&mut [Vec<Self>; 2]) -> R) -> R {
        thread_local! {
            static BUFFERS: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
        }
        BUFFERS.with_borrow_mut(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_exponential_is_accurate_and_keeps_nan() {
        let mut x = -86.9_f32;
        while x < 87.9 {
            let (ours, exact) = (Real::exp(x), libm::expf(x));
            assert!((ours - exact).abs() <= 3e-7 * exact, "{x}: {ours} {exact}");
            x += 0.0137;
        }
        assert!(Real::exp(-1e30_f32) < 1e-37);
        assert!(Real::exp(f32::NAN).is_nan());
        assert!((Real::exp(0.0_f32) - 1.0).abs() < f32::EPSILON);
    }
}
