//! The task of a group and the seed of an episode. The only source of randomness is the run's seed.

use orchestrate_types::{EpisodeId, GroupId};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Purpose of a random stream: streams of different purposes are independent.
#[derive(Clone, Copy)]
enum Purpose {
    TaskOrder = 1,
    TrainEpisode = 2,
    EvalEpisode = 3,
    Retry = 4,
}

fn stream(run_seed: u64, purpose: Purpose, first: u64, second: u64) -> ChaCha8Rng {
    let mut seed = [0; 32];
    let parts = [run_seed, purpose as u64, first, second];
    for (chunk, part) in seed.chunks_exact_mut(8).zip(parts) {
        chunk.copy_from_slice(&part.to_le_bytes());
    }
    ChaCha8Rng::from_seed(seed)
}

/// Index of the training task of group `seq`, from 0 to `tasks − 1`. Every pass over the tasks visits
/// each once, in a different random order. `tasks` is the number of tasks and must not be 0.
pub fn task_index(run_seed: u64, seq: u32, tasks: usize) -> usize {
    let (pass, place) = (seq as usize / tasks, seq as usize % tasks);
    let mut order: Vec<usize> = (0..tasks).collect();
    order.shuffle(&mut stream(run_seed, Purpose::TaskOrder, pass as u64, 0));
    order.get(place).copied().unwrap_or(0)
}

/// Seed of an attempt of an episode, of which `broken` attempts broke before: the episode's own for
/// the first, and another for each retry, because a deterministic engine would otherwise repeat what
/// broke it. Attempts that the coordinator itself lost do not count, so that a resumed run samples the
/// same.
pub fn attempt_seed(run_seed: u64, episode: EpisodeId, broken: u32) -> u64 {
    let first = episode_seed(run_seed, episode);
    if broken == 0 {
        return first;
    }
    stream(run_seed, Purpose::Retry, first, u64::from(broken)).next_u64()
}

/// Seed of an episode's first attempt. The seed of an evaluation episode depends on task and
/// sample but not on the round, so that rounds are compared under the same random numbers.
pub fn episode_seed(run_seed: u64, episode: EpisodeId) -> u64 {
    let member = u64::from(episode.member);
    let mut stream = match episode.group {
        GroupId::Train { seq } => stream(run_seed, Purpose::TrainEpisode, u64::from(seq), member),
        GroupId::Eval { round: _, index } => {
            stream(run_seed, Purpose::EvalEpisode, u64::from(index), member)
        }
    };
    stream.next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_pass_visits_every_task_once_in_another_order() {
        let pass = |n: u32| -> Vec<usize> { (0..7).map(|i| task_index(5, n * 7 + i, 7)).collect() };
        let (first, second) = (pass(0), pass(1));
        assert_ne!(first, second);
        for order in [first, second] {
            assert_eq!(order.into_iter().collect::<BTreeSet<_>>().len(), 7);
        }
    }

    #[test]
    fn each_retry_has_a_seed_of_its_own() {
        let id: EpisodeId = "t000012.03".parse().unwrap();
        let seeds: BTreeSet<u64> = (0..5).map(|broken| attempt_seed(1, id, broken)).collect();
        assert_eq!(seeds.len(), 5);
        assert_eq!(attempt_seed(1, id, 0), episode_seed(1, id));
    }

    #[test]
    fn evaluation_seeds_do_not_depend_on_the_round() {
        let id = |round, index, member| EpisodeId { group: GroupId::Eval { round, index }, member };
        assert_eq!(episode_seed(1, id(0, 4, 0)), episode_seed(1, id(50, 4, 0)));
        assert_ne!(episode_seed(1, id(0, 4, 0)), episode_seed(1, id(0, 4, 1)));
        assert_ne!(episode_seed(1, id(0, 4, 0)), episode_seed(2, id(0, 4, 0)));
        let train = EpisodeId { group: GroupId::Train { seq: 4 }, member: 0 };
        assert_ne!(episode_seed(1, id(0, 4, 0)), episode_seed(1, train));
    }
}
