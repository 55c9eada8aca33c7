//! Which processors are used by which process. In a run, engines have their own machines; here they
//! must not evict the coordinator's data from its processors' caches.

use anyhow::Context;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// Processor numbers of each side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Processors {
    pub(super) coordinator: Vec<usize>,
    pub(super) engines: Vec<usize>,
}

impl Processors {
    /// Gives each side half of the processors of this process; a single processor is shared.
    pub(super) fn share() -> anyhow::Result<Self> {
        let allowed =
            sched_getaffinity(None).context("failed to read the CPU affinity of this process")?;
        Ok(Self::of((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()))
    }

    fn of(mut coordinator: Vec<usize>) -> Self {
        let engines = match coordinator.len() {
            0 | 1 => coordinator.clone(),
            count => coordinator.split_off(count.div_ceil(2)),
        };
        Self { coordinator, engines }
    }

    /// Both lists on one line.
    pub(super) fn line(&self) -> String {
        let [coordinator, engines] =
            [&self.coordinator, &self.engines].map(|processors| list(processors));
        format!("coordinator on processors {coordinator}, engines on {engines}")
    }
}

/// The list as an argument of an engine process.
pub(super) fn list(processors: &[usize]) -> String {
    processors.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn set_of(processors: &[usize]) -> anyhow::Result<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in processors {
        anyhow::ensure!(cpu < CpuSet::MAX_CPU, "processor number {cpu} is too large");
        set.set(cpu);
    }
    Ok(set)
}

/// Pins the calling thread to some processors.
pub(super) fn keep_thread_to(processors: &[usize]) -> anyhow::Result<()> {
    sched_setaffinity(None, &set_of(processors)?)
        .with_context(|| format!("failed to pin to processors {}", list(processors)))
}

/// Pins all threads of this process, and those they start, to some processors.
pub(crate) fn keep_to(processors: &[usize]) -> anyhow::Result<()> {
    let set = set_of(processors)?;
    for thread in fs_err::read_dir("/proc/self/task")? {
        let name = thread?.file_name();
        let thread = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        match sched_setaffinity(thread, &set) {
            // The thread has ended meanwhile.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => {
                return Err(error)
                    .context(format!("failed to pin to processors {}", list(processors)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_share_a_processor_only_if_there_is_just_one() {
        for (all, coordinator, engines) in [
            (&[5][..], &[5][..], &[5][..]),
            (&[0, 1], &[0], &[1]),
            (&[0, 2, 4], &[0, 2], &[4]),
            (&[0, 1, 2, 3], &[0, 1], &[2, 3]),
        ] {
            let found = Processors::of(all.to_vec());
            assert_eq!(
                (found.coordinator.as_slice(), found.engines.as_slice()),
                (coordinator, engines)
            );
        }
    }
}
