//! Data sets whose rows have SWE-bench's columns, and their differences.

/// A data set of the SWE-bench family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SweFamily {
    /// SWE-bench: full, Lite and Verified.
    SweBench,
    /// SWE-Gym: other repositories, in the table of its fork of the harness.
    SweGym,
    /// SWE-rebench: each row contains its own commands (`install_config`).
    SweRebench,
    /// SWE-smith: bugs injected into a fixed commit; `patch` is the bug.
    SweSmith,
}

impl SweFamily {
    /// The environment name of the data set's tasks, e.g. `swe-smith`.
    pub fn name(self) -> &'static str {
        match self {
            Self::SweBench => "swe-bench",
            Self::SweGym => "swe-gym",
            Self::SweRebench => "swe-rebench",
            Self::SweSmith => "swe-smith",
        }
    }

    /// Whether the whole log counts where the part between its markers has no result. Only
    /// SWE-bench's own harness has this fallback.
    pub(super) fn reads_whole_log(self) -> bool {
        self == Self::SweBench
    }
}
