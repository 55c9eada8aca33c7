//! Where a new sandbox goes, and who pulls an image that nobody has. Pure.

/// What one host could give to a request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    /// A clean container of the same kind: nothing has to be started.
    pub(crate) idle: bool,
    /// The image is there, or on its way.
    pub(crate) image: bool,
    /// Containers in use.
    pub(crate) used: usize,
    /// Containers that may be alive.
    pub(crate) capacity: usize,
}

/// Indices of the hosts that offer something, the best first: one with a clean container, then one
/// with the image, then the one with the smallest part of its capacity in use. Hosts that are alike
/// come in the order of the settings.
pub(super) fn order(offers: &[Option<Offer>]) -> Vec<usize> {
    let able = offers.iter().enumerate().filter_map(|(index, offer)| Some((index, (*offer)?)));
    let mut able: Vec<(usize, Offer)> = able.collect();
    able.sort_by(|(_, a), (_, b)| {
        let by_load = (a.used * b.capacity).cmp(&(b.used * a.capacity));
        (b.idle, b.image).cmp(&(a.idle, a.image)).then(by_load)
    });
    able.into_iter().map(|(index, _)| index).collect()
}

/// Which of the hosts, given by name and capacity, pulls this image: always the same one while it
/// is among them, and each as often as its capacity says (weighted rendezvous hashing).
pub(super) fn puller<'a>(
    image: &str,
    hosts: impl Iterator<Item = (usize, &'a str, usize)>,
) -> Option<usize> {
    let score = |title: &str, capacity: usize| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(title.as_bytes()).update(b"\n").update(image.as_bytes());
        let [a, b, c, d, ..] = *hasher.finalize().as_bytes();
        let share = (f64::from(u32::from_le_bytes([a, b, c, d])) + 0.5) / 2_f64.powi(32);
        -(capacity as f64) / share.ln()
    };
    let scored = hosts.map(|(index, title, capacity)| (score(title, capacity), index));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: Offer = Offer { idle: false, image: false, used: 0, capacity: 8 };

    #[test]
    fn a_clean_container_comes_before_the_image_and_the_image_before_the_load() {
        let full = None;
        let busy = Offer { used: 7, ..EMPTY };
        let image = Offer { image: true, ..busy };
        let idle = Offer { idle: true, image: true, ..busy };
        assert_eq!(order(&[Some(EMPTY), Some(busy), full, Some(image), Some(idle)]), [4, 3, 0, 1]);
        assert_eq!(order(&[full, full]), [0_usize; 0]);
    }

    #[test]
    fn load_is_a_part_of_the_capacity() {
        let used = |used, capacity| Some(Offer { used, capacity, ..EMPTY });
        assert_eq!(order(&[used(3, 8), used(8, 32), used(1, 2)]), [1, 0, 2]);
        // Equal parts: as the settings name them.
        assert_eq!(order(&[used(1, 4), used(4, 16), used(0, 2)]), [2, 0, 1]);
    }

    #[test]
    fn sandboxes_of_one_image_spread_by_capacity() {
        let mut hosts =
            [Offer { image: true, ..EMPTY }, Offer { image: true, capacity: 24, ..EMPTY }];
        for _ in 0..16 {
            let offers = hosts.map(Some);
            hosts[order(&offers)[0]].used += 1;
        }
        assert_eq!(hosts.map(|host| host.used), [4, 12]);
    }

    #[test]
    fn images_are_dealt_by_capacity_and_stay_where_they_were_dealt() {
        let hosts = [(0, "a", 10), (1, "b", 20), (2, "c", 10)];
        let images: Vec<String> = (0..2000).map(|number| format!("image:{number}")).collect();
        let mut dealt = [0; 3];
        for image in &images {
            let at = puller(image, hosts.into_iter()).unwrap();
            dealt[at] += 1;
            // Another host leaves: this image does not move.
            let left = hosts.into_iter().filter(|(index, ..)| *index == at || *index == 0);
            assert!(puller(image, left).is_some_and(|chosen| chosen == at));
        }
        assert!((400..600).contains(&dealt[0]) && (900..1100).contains(&dealt[1]), "{dealt:?}");
        assert_eq!(puller("x", std::iter::empty()), None);
    }
}
