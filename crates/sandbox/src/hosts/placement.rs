//! Which host opens a sandbox, and which one pulls an image that no host has. Pure functions.

/// What one host could provide for a request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostOffer {
    /// Whether an idle sandbox can be reused, so that nothing has to be started.
    pub(super) idle: bool,
    /// Whether the host has the image or is pulling it.
    pub(super) image: bool,
    /// Containers in use.
    pub(super) used: usize,
    /// Largest number of containers that may exist at once.
    pub(super) capacity: usize,
}

/// Indices of the hosts with an offer, the best first: hosts with an idle sandbox, then hosts with
/// the image, then those that use the smallest part of their capacity. Ties keep the order of the
/// settings.
pub(super) fn rank_hosts(offers: &[Option<HostOffer>]) -> Vec<usize> {
    let ranked = offers.iter().enumerate().filter_map(|(index, offer)| Some((index, (*offer)?)));
    let mut ranked: Vec<(usize, HostOffer)> = ranked.collect();
    ranked.sort_by(|(_, a), (_, b)| {
        let by_load = (a.used * b.capacity).cmp(&(b.used * a.capacity));
        (b.idle, b.image).cmp(&(a.idle, a.image)).then(by_load)
    });
    ranked.into_iter().map(|(index, _)| index).collect()
}

/// Chooses the host that pulls an image, among hosts given as index, name and capacity.
///
/// By weighted rendezvous hashing, the same host is chosen as long as it is among them, and each
/// host in proportion to its capacity. `None` without hosts.
pub(super) fn choose_puller<'a>(
    image: &str,
    hosts: impl Iterator<Item = (usize, &'a str, usize)>,
) -> Option<usize> {
    let score = |title: &str, capacity: usize| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(title.as_bytes()).update(b"\n").update(image.as_bytes());
        let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
        let share = (f64::from(u32::from_le_bytes([a, b, c, d])) + 0.5) / 2_f64.powi(32);
        #[expect(clippy::disallowed_methods, reason = "a host is chosen; no result depends on it")]
        let weight = -(capacity as f64) / share.ln();
        weight
    };
    let scored = hosts.map(|(index, title, capacity)| (score(title, capacity), index));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: HostOffer = HostOffer { idle: false, image: false, used: 0, capacity: 8 };

    #[test]
    fn idle_sandbox_ranks_before_image_and_image_before_load() {
        let full = None;
        let busy = HostOffer { used: 7, ..EMPTY };
        let image = HostOffer { image: true, ..busy };
        let idle = HostOffer { idle: true, image: true, ..busy };
        let offers = [Some(EMPTY), Some(busy), full, Some(image), Some(idle)];
        assert_eq!(rank_hosts(&offers), [4, 3, 0, 1]);
        assert_eq!(rank_hosts(&[full, full]), [0_usize; 0]);
    }

    #[test]
    fn load_is_relative_to_capacity() {
        let used = |used, capacity| Some(HostOffer { used, capacity, ..EMPTY });
        assert_eq!(rank_hosts(&[used(3, 8), used(8, 32), used(1, 2)]), [1, 0, 2]);
        // Equal load: the order of the settings.
        assert_eq!(rank_hosts(&[used(1, 4), used(4, 16), used(0, 2)]), [2, 0, 1]);
    }

    #[test]
    fn sandboxes_of_one_image_are_spread_by_capacity() {
        let mut hosts =
            [HostOffer { image: true, ..EMPTY }, HostOffer { image: true, capacity: 24, ..EMPTY }];
        for _ in 0..16 {
            let offers = hosts.map(Some);
            hosts[rank_hosts(&offers)[0]].used += 1;
        }
        assert_eq!(hosts.map(|host| host.used), [4, 12]);
    }

    #[test]
    fn pullers_are_chosen_by_capacity_and_do_not_change_when_another_host_leaves() {
        let hosts = [(0, "a", 10), (1, "b", 20), (2, "c", 10)];
        let images: Vec<String> = (0..2000).map(|number| format!("image:{number}")).collect();
        let mut counts = [0; 3];
        for image in &images {
            let chosen = choose_puller(image, hosts.into_iter()).unwrap();
            counts[chosen] += 1;
            let remaining = hosts.into_iter().filter(|(index, ..)| *index == chosen || *index == 0);
            assert_eq!(choose_puller(image, remaining), Some(chosen));
        }
        assert!((400..600).contains(&counts[0]) && (900..1100).contains(&counts[1]), "{counts:?}");
        assert_eq!(choose_puller("x", std::iter::empty()), None);
    }
}
