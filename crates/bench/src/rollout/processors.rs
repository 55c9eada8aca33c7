//! Who runs where. In a run the engines have machines of their own; here they must not push the
//! coordinator out of its processors' caches.

use anyhow::Context;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

/// Processors of each side, by the kernel's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Processors {
    pub(super) coordinator: Vec<usize>,
    pub(super) engines: Vec<usize>,
}

impl Processors {
    /// Half of what this process may use for each side; a single one is for both.
    pub(super) fn share() -> anyhow::Result<Self> {
        let allowed = sched_getaffinity(None).context("ask for this process's processors")?;
        Ok(Self::of((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()))
    }

    fn of(mut coordinator: Vec<usize>) -> Self {
        let engines = match coordinator.len() {
            0 | 1 => coordinator.clone(),
            count => coordinator.split_off(count.div_ceil(2)),
        };
        Self { coordinator, engines }
    }

    /// One line for people.
    pub(super) fn line(&self) -> String {
        let [coordinator, engines] =
            [&self.coordinator, &self.engines].map(|processors| list(processors));
        format!("coordinator on processors {coordinator}, engines on {engines}")
    }
}

/// The form in which an engine process is told.
pub(super) fn list(processors: &[usize]) -> String {
    processors.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn set_of(processors: &[usize]) -> anyhow::Result<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in processors {
        anyhow::ensure!(cpu < CpuSet::MAX_CPU, "there is no processor {cpu}");
        set.set(cpu);
    }
    Ok(set)
}

/// Keeps the calling thread to some processors.
pub(super) fn keep_thread_to(processors: &[usize]) -> anyhow::Result<()> {
    sched_setaffinity(None, &set_of(processors)?)
        .with_context(|| format!("keep to processors {}", list(processors)))
}

/// Keeps all threads of this process, and those they will start, to some processors.
pub(crate) fn keep_to(processors: &[usize]) -> anyhow::Result<()> {
    let set = set_of(processors)?;
    for thread in fs_err::read_dir("/proc/self/task")? {
        let name = thread?.file_name();
        let thread = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        match sched_setaffinity(thread, &set) {
            // It has ended meanwhile.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => {
                return Err(error).context(format!("keep to processors {}", list(processors)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_has_processors_of_its_own_where_there_are_two() {
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
