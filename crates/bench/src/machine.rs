//! The machine that numbers were measured on, without which they cannot be compared.

use serde::Serialize;

/// Properties of the machine and of this build that numbers depend on.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    /// Model name of the processor, as reported by the kernel.
    cpu: String,
    /// Number of processors that this process may use.
    cores: usize,
    /// Load averages over 1, 5 and 15 minutes at the start of the measurement.
    load: [f64; 3],
    /// Total memory in bytes.
    memory_bytes: u64,
    /// Kernel release.
    kernel: String,
    /// Version of this program.
    version: &'static str,
    /// `release`, or `debug`, whose numbers say nothing about a release.
    profile: &'static str,
    /// Instruction sets in use, e.g. `avx512 vnni vbmi`.
    instruction_sets: String,
}

impl Machine {
    /// Inspects this machine; a property that cannot be read is empty or 0.
    pub(crate) fn inspect() -> Self {
        let read = |path: &str| fs_err::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'))
                .map(|value| value.trim().to_owned())
                .unwrap_or_default()
        };
        let mut load = [0.0; 3];
        for (place, word) in load.iter_mut().zip(read("/proc/loadavg").split_whitespace()) {
            *place = word.parse().unwrap_or(0.0);
        }
        let memory = value(&read("/proc/meminfo"), "MemTotal");
        let kilobytes: u64 =
            memory.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Self {
            cpu: value(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            load,
            memory_bytes: kilobytes << 10,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            version: env!("CARGO_PKG_VERSION"),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            instruction_sets: orchestrate_cpu::Level::current().to_string(),
        }
    }

    /// The properties on one line.
    pub(crate) fn line(&self) -> String {
        let [one, five, fifteen] = self.load;
        format!(
            "{}, {} cores ({}), load {one:.2} {five:.2} {fifteen:.2}, {:.1} GiB, Linux {}, \
             orchestrate {} ({})",
            self.cpu,
            self.cores,
            self.instruction_sets,
            self.memory_bytes as f64 / f64::from(1 << 30),
            self.kernel,
            self.version,
            self.profile,
        )
    }
}
