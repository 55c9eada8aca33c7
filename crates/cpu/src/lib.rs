//! The instruction sets that code may choose at run time.
//!
//! Every such choice asks [`Level::current`], never the processor itself. So one variable,
//! [`VARIABLE`], makes a machine compute as one with fewer instruction sets, and the test suite runs
//! under each of them. All levels give the same bits; they differ in speed only.

#![expect(unsafe_code, reason = "calling code compiled for a wider instruction set than the base")]

use std::sync::OnceLock;

/// Variable of the environment that limits the instruction sets: `native` (the default), `avx2`
/// (no AVX-512) or `base` (none that has to be detected). It is read once.
pub const VARIABLE: &str = "ORCHESTRATE_CPU";

/// Sets of vector instructions, in ascending order of width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// What every processor of the architecture has: SSE2 on x86-64, NEON on 64-bit ARM.
    Base,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW and VL, in addition to AVX2 and FMA.
    Avx512,
}

/// The instruction sets in use. Its fields are private, so a value proves that the processor has
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    set: InstructionSet,
    byte_dots: bool,
    byte_permutations: bool,
}

/// [`VARIABLE`] has a value that names no instruction set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{VARIABLE}=`{0}` is not an instruction set; use `native`, `avx2` or `base`")]
pub struct UnknownLimit(String);

/// A loop that is compiled once per instruction set. Declared by [`kernel!`].
pub trait Kernel<A> {
    /// What it returns.
    type Output;

    /// Runs the loop. Implementations are `#[inline(always)]`: only what is inlined into the caller is
    /// compiled for the caller's instruction sets. A closure cannot promise that.
    fn compute(arguments: A) -> Self::Output;
}

/// Declares a function, possibly generic over one type, whose body is compiled for each instruction set;
/// [`Level::current`] selects one at run time. What the body calls must be `#[inline(always)]`.
#[macro_export]
macro_rules! kernel {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident $(<$generic:ident: $bound:path>)? ($($argument:ident: $type:ty),+ $(,)?) -> $output:ty $body:block) => {
        $(#[$attribute])*
        $visibility fn $name $(<$generic: $bound>)? ($($argument: $type),+) -> $output {
            struct Body;
            impl $(<$generic: $bound>)? $crate::Kernel<($($type,)+)> for Body {
                type Output = $output;

                #[inline(always)]
                fn compute(($($argument,)+): ($($type,)+)) -> $output $body
            }
            $crate::Level::current().compute::<Body, _>(($($argument,)+))
        }
    };
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident $(<$generic:ident: $bound:path>)? ($($argument:ident: $type:ty),+ $(,)?) $body:block) => {
        $crate::kernel! {
            $(#[$attribute])* $visibility fn $name $(<$generic: $bound>)? ($($argument: $type),+) -> () $body
        }
    };
}

impl Level {
    /// The level that this process uses: the highest one that the processor has and [`VARIABLE`]
    /// permits.
    ///
    /// # Panics
    /// If [`VARIABLE`] has an invalid value. Programs call [`check`] first.
    pub fn current() -> Self {
        static CURRENT: OnceLock<Level> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let limit = limit(std::env::var_os(VARIABLE).as_deref());
            #[expect(clippy::panic, reason = "a test under a mistyped limit would test nothing")]
            limit.map_or_else(|error| panic!("{error}"), Self::up_to)
        })
    }

    /// Every level that this processor has, ascending and regardless of [`VARIABLE`], for tests that
    /// compare levels with each other.
    pub fn supported() -> Vec<Self> {
        let highest = Self::up_to(InstructionSet::Avx512);
        let mut levels: Vec<Self> = [InstructionSet::Base, InstructionSet::Avx2]
            .into_iter()
            .filter(|set| *set < highest.set)
            .map(|set| Self { set, byte_dots: false, byte_permutations: false })
            .collect();
        if highest.byte_dots || highest.byte_permutations {
            levels.push(Self { byte_dots: false, byte_permutations: false, ..highest });
        }
        levels.push(highest);
        levels
    }

    /// Runs a [`Kernel`], compiled for the instruction sets of this level. The result is the same on every
    /// level: the compiler neither reorders sums nor fuses operations by itself.
    #[inline]
    pub fn compute<K: Kernel<A>, A>(self, arguments: A) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        fn on_avx512<K: Kernel<A>, A>(arguments: A) -> K::Output {
            K::compute(arguments)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn on_avx2<K: Kernel<A>, A>(arguments: A) -> K::Output {
            K::compute(arguments)
        }
        match self.set {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a value of this type exists only if the processor has the instruction sets.
            InstructionSet::Avx512 => unsafe { on_avx512::<K, A>(arguments) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            InstructionSet::Avx2 => unsafe { on_avx2::<K, A>(arguments) },
            _ => K::compute(arguments),
        }
    }

    /// The widest set of vector instructions.
    pub fn set(self) -> InstructionSet {
        self.set
    }

    /// Whether bytes can be multiplied and summed on 512-bit registers (AVX-512 VNNI).
    pub fn byte_dots(self) -> bool {
        self.byte_dots
    }

    /// Whether bytes can be permuted across a 512-bit register (AVX-512 VBMI).
    pub fn byte_permutations(self) -> bool {
        self.byte_permutations
    }

    #[cfg(target_arch = "x86_64")]
    fn up_to(limit: InstructionSet) -> Self {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        let set = match limit {
            InstructionSet::Avx512 if avx512 => InstructionSet::Avx512,
            InstructionSet::Avx512 | InstructionSet::Avx2 if avx2 => InstructionSet::Avx2,
            InstructionSet::Avx512 | InstructionSet::Avx2 | InstructionSet::Base => {
                InstructionSet::Base
            }
        };
        let wide = set == InstructionSet::Avx512;
        Self {
            set,
            byte_dots: wide && is_x86_feature_detected!("avx512vnni"),
            byte_permutations: wide && is_x86_feature_detected!("avx512vbmi"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn up_to(_: InstructionSet) -> Self {
        Self { set: InstructionSet::Base, byte_dots: false, byte_permutations: false }
    }
}

/// The instruction sets in use, e.g. `avx2` or `avx512 vnni vbmi`.
impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.set {
            InstructionSet::Base => "base",
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Avx512 => "avx512",
        })?;
        for (has, name) in [(self.byte_dots, " vnni"), (self.byte_permutations, " vbmi")] {
            if has {
                f.write_str(name)?;
            }
        }
        Ok(())
    }
}

/// Checks the value of [`VARIABLE`].
///
/// # Errors
/// If it names no instruction set.
pub fn check() -> Result<(), UnknownLimit> {
    limit(std::env::var_os(VARIABLE).as_deref()).map(drop)
}

fn limit(value: Option<&std::ffi::OsStr>) -> Result<InstructionSet, UnknownLimit> {
    let Some(value) = value else { return Ok(InstructionSet::Avx512) };
    match value.to_str() {
        Some("" | "native") => Ok(InstructionSet::Avx512),
        Some("avx2") => Ok(InstructionSet::Avx2),
        Some("base") => Ok(InstructionSet::Base),
        _ => Err(UnknownLimit(value.to_string_lossy().into_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed_and_mistakes_are_named() {
        let parsed = |text: &str| limit(Some(text.as_ref()));
        assert_eq!(limit(None), Ok(InstructionSet::Avx512));
        assert_eq!(parsed("native"), Ok(InstructionSet::Avx512));
        assert_eq!(parsed("avx2"), Ok(InstructionSet::Avx2));
        assert_eq!(parsed("base"), Ok(InstructionSet::Base));
        let error = parsed("avx").unwrap_err().to_string();
        assert!(error.contains("ORCHESTRATE_CPU=`avx`") && error.contains("`base`"), "{error}");
    }

    #[test]
    fn a_limit_is_never_exceeded() {
        for set in [InstructionSet::Base, InstructionSet::Avx2, InstructionSet::Avx512] {
            let level = Level::up_to(set);
            assert!(level.set() <= set);
            assert!(level.set() == InstructionSet::Avx512 || !level.byte_dots());
        }
        let wanted = limit(std::env::var_os(VARIABLE).as_deref()).unwrap();
        assert_eq!(Level::current(), Level::up_to(wanted));
    }

    #[test]
    fn supported_levels_ascend_to_the_highest() {
        let levels = Level::supported();
        assert_eq!(levels.last(), Some(&Level::up_to(InstructionSet::Avx512)));
        assert!(levels.is_sorted_by_key(|level| level.set()));
        assert!(levels.iter().any(|level| level.set() == InstructionSet::Base));
    }
}
