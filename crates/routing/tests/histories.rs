//! Random histories of an episode and its group, compared with a map from position to row. Every
//! reply is encoded as an engine would send it.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

use orchestrate_routing::{
    CacheOptions, MaskBuilder, Passes, PayloadForm, PrefixCache, PrefixChain, RoutedRows,
    RoutingMask, RowVersion, WireForm, decode, encode_npy, encode_sglang,
};
use orchestrate_types::{ModelShape, PolicyVersion};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

fn shape() -> Arc<ModelShape> {
    Arc::new(ModelShape {
        hidden_layers: 3,
        moe_layers: vec![0, 2],
        experts: 8,
        top_k: 2,
        vocab: 100,
        context: 10_000,
    })
}

/// Four ids of one row; each salt gives different sets.
fn row(position: usize, salt: u64) -> [u8; 4] {
    let mix = (position as u64 * 31 + salt * 7 + 5) % 56;
    let cell = |n: u64| {
        let first = n % 8;
        [first as u8, ((first + 1 + n / 8) % 8) as u8]
    };
    let [a, b] = cell(mix);
    let [c, d] = cell((mix + salt) % 56);
    [a, b, c, d]
}

fn payload(start: usize, end: usize, salt: u64) -> RoutedRows {
    let bytes: Vec<u8> = (start..end).flat_map(|position| row(position, salt)).collect();
    RoutedRows::new(&shape(), start, &bytes).unwrap()
}

/// The rows `start..end` received in one of five ways: as they are, in the text of
/// either engine, and in the two deviations (all rows although a tail was asked for, one too many).
fn received(start: usize, end: usize, salt: u64, way: usize) -> RoutedRows {
    let shape = shape();
    let through = |form: WireForm, from: usize, to: usize| {
        let rows = payload(from, to, salt);
        let text = match form {
            WireForm::SglangI32 => encode_sglang(&rows, &shape),
            WireForm::VllmNpy => encode_npy(&rows, &shape),
        };
        decode(form, text.unwrap().as_bytes(), &shape, start, end + 1).unwrap()
    };
    let rows = match way % 5 {
        1 => through(WireForm::SglangI32, start, end),
        2 => through(WireForm::VllmNpy, start, end),
        3 if start > 1 && end > start => through(WireForm::SglangI32, 0, end),
        4 if start > 1 && end > start => through(WireForm::VllmNpy, start, end + 1),
        _ => payload(start, end, salt),
    };
    let form = match way % 5 {
        3 if start > 1 && end > start => PayloadForm::WholeSequence,
        4 if start > 1 && end > start => PayloadForm::SurplusRow,
        _ => PayloadForm::Exact,
    };
    assert_eq!((rows.form(), rows.start(), rows.rows()), (form, start, end - start));
    rows
}

#[derive(Debug, Clone)]
enum Step {
    /// Environment text and a reply; rows from some way before the last one held.
    Turn {
        observation: usize,
        output: usize,
        overlap: usize,
    },
    /// A reply cut short, its resume, and both payloads once more.
    Abort {
        output: usize,
        resumed: usize,
    },
    /// Another worker prefills everything again, and chooses otherwise in places.
    Failover {
        output: usize,
    },
    /// New weights between turns.
    Update,
    /// New weights while a reply is sampled, its KV kept or computed again.
    UpdateInside {
        before: usize,
        after: usize,
        retracted: bool,
    },
    /// A second branch continues; the first one is finished unchanged.
    Fork {
        at: usize,
    },
    /// Another episode that starts with the same tokens and the cached rows for them.
    Member {
        prompt: usize,
        output: usize,
    },
    Truncate {
        at: usize,
    },
    /// Payloads that must be rejected.
    Wrong {
        by: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0usize..90, 1usize..90, 0usize..200)
            .prop_map(|(observation, output, overlap)| Step::Turn { observation, output, overlap }),
        2 => (1usize..70, 1usize..70).prop_map(|(output, resumed)| Step::Abort { output, resumed }),
        2 => (1usize..40).prop_map(|output| Step::Failover { output }),
        1 => Just(Step::Update),
        2 => (1usize..70, 1usize..70, any::<bool>()).prop_map(|(before, after, retracted)| {
            Step::UpdateInside { before, after, retracted }
        }),
        1 => (0usize..500).prop_map(|at| Step::Fork { at }),
        2 => (1usize..300, 1usize..70)
            .prop_map(|(prompt, output)| Step::Member { prompt, output }),
        1 => (1usize..500).prop_map(|at| Step::Truncate { at }),
        1 => (1usize..100).prop_map(|by| Step::Wrong { by }),
    ];
    proptest::collection::vec(step, 1..14)
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Held {
    row: [u8; 4],
    version: u64,
    mixed: bool,
}

/// The builder, and what a map by position says it must hold.
#[derive(Debug, Clone)]
struct Both {
    builder: MaskBuilder,
    naive: BTreeMap<usize, Held>,
    /// The sequence. A token is used once, so it stands for all that is before it, too.
    ids: Vec<u32>,
    next_id: u32,
    version: u64,
    /// Choices of the current worker and weights.
    salt: u64,
    replies: usize,
}

/// State shared by all episodes of a history.
struct Group {
    cache: PrefixCache,
    /// Token, version and row of every row that was chosen in a clean pass.
    chosen: HashSet<(u32, u64, [u8; 4])>,
    finished: Vec<Both>,
}

impl Group {
    fn new() -> Self {
        let options = CacheOptions { bytes: 1 << 20, spill: None };
        let cache = PrefixCache::open(options).unwrap();
        Self { cache, chosen: HashSet::new(), finished: Vec::new() }
    }

    fn chain(ids: &[u32], version: u64) -> PrefixChain {
        let mut chain = PrefixChain::new(&shape(), "run", PolicyVersion(version), "worker");
        chain.extend_to(ids);
        chain
    }

    /// Rows that the cache has for a sequence under a version.
    fn found(&self, ids: &[u32], version: u64) -> Vec<[u8; 4]> {
        let blocks = self.cache.lookup(&Self::chain(ids, version));
        let rows: Vec<[u8; 4]> =
            blocks.iter().flat_map(|block| block.bytes().as_chunks().0).copied().collect();
        for (id, row) in ids.iter().zip(&rows) {
            assert!(self.chosen.contains(&(*id, version, *row)), "no engine chose {row:?}");
        }
        rows
    }

    /// Takes in what an episode holds, which must change nothing for it.
    fn offer(&mut self, both: &mut Both) {
        for (&position, held) in both.naive.iter().filter(|(_, held)| !held.mixed) {
            self.chosen.insert((both.ids[position], held.version, held.row));
        }
        let Some(first) = both.naive.get(&0) else { return };
        let mut chain = Self::chain(&both.ids, first.version);
        self.cache.insert(&mut chain, &mut both.builder);
        both.check();
    }
}

impl Both {
    fn new() -> Self {
        let builder = MaskBuilder::new(shape()).unwrap();
        Self {
            builder,
            naive: BTreeMap::new(),
            ids: vec![0, 1, 2],
            next_id: 3,
            version: 0,
            salt: 1,
            replies: 0,
        }
    }

    fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn grow(&mut self, tokens: usize) {
        for _ in 0..tokens {
            self.ids.push(self.next_id);
            self.next_id += 1;
        }
    }

    fn reply(
        &mut self,
        start: usize,
        version: impl Fn(usize) -> u64,
        mixed: impl Fn(usize) -> bool,
        retracted: bool,
    ) {
        let end = self.tokens() - 1;
        let start = start.min(self.naive.len());
        let mut versions: Vec<RowVersion> = Vec::new();
        for position in start..end.max(start) {
            let v = PolicyVersion(version(position));
            match versions.last_mut() {
                Some(last) if last.version == v => last.end += 1,
                _ => versions.push(RowVersion { start: position, end: position + 1, version: v }),
            }
        }
        self.replies += 1;
        let rows = received(start, end.max(start), self.salt, self.replies);
        let passes = Passes { versions: &versions, retracted };
        let report = self.builder.push_passes(rows, self.tokens(), passes).unwrap();
        let last = versions.last().map_or(0, |range| range.version.0);
        let (mut new, mut overlap, mut drift) = (0, 0, 0);
        for position in start..end.max(start) {
            let offered = row(position, self.salt);
            if let Some(held) = self.naive.get(&position) {
                overlap += 1;
                let sets =
                    |r: [u8; 4]| [r[0].min(r[1]), r[0].max(r[1]), r[2].min(r[3]), r[2].max(r[3])];
                drift += usize::from(sets(held.row) != sets(offered));
            } else {
                new += 1;
                let version = if retracted { last } else { version(position) };
                let mixed = retracted || mixed(position);
                self.naive.insert(position, Held { row: offered, version, mixed });
            }
        }
        assert_eq!(
            (report.new_rows, report.overlap_rows, report.drift_rows),
            (new, overlap, drift)
        );
    }

    fn plain(&mut self, start: usize) {
        let version = self.version;
        self.reply(start, |_| version, |_| false, false);
    }

    fn cut(&mut self, tokens: usize) {
        self.ids.truncate(tokens.max(1));
        let last = self.tokens() - 1;
        self.naive.retain(|&position, _| position < last);
    }

    fn check(&self) {
        let mask = self.builder.clone().finish(self.tokens());
        if self.naive.len() + 1 != self.tokens() {
            assert!(mask.is_err());
            return;
        }
        let mask = mask.unwrap();
        assert_eq!(mask.rows(), self.naive.len());
        for (&position, held) in &self.naive {
            assert_eq!(mask.row(position).unwrap(), held.row, "row {position}");
            let range = mask.versions().iter().find(|r| (r.start..r.end).contains(&position));
            assert_eq!(range.unwrap().version.0, held.version, "version of row {position}");
            let mixed = mask.mixed().iter().any(|range| range.contains(&position));
            assert_eq!(mixed, held.mixed, "row {position} mixed");
        }
        let bytes: Vec<u8> = self.naive.values().flat_map(|held| held.row).collect();
        assert_eq!(mask.to_vec(), bytes);
        let held = mask.held();
        assert_eq!(held.own + held.shared, bytes.len());
        assert_eq!(RoutingMask::from_bytes(&mask.to_bytes()).unwrap(), mask);
    }

    fn step(&mut self, step: &Step, group: &mut Group) {
        match *step {
            Step::Turn { observation, output, overlap } => {
                self.grow(observation + output);
                self.plain(self.builder.next_start().saturating_sub(overlap));
            }
            Step::Abort { output, resumed } => {
                self.grow(output);
                self.plain(self.builder.next_start());
                self.grow(resumed);
                self.plain(0);
                self.plain(0);
            }
            Step::Failover { output } => {
                self.grow(output);
                self.salt += 1;
                self.plain(0);
            }
            Step::Update => {
                self.version += 1;
                self.salt += 1;
            }
            Step::UpdateInside { before, after, retracted } => {
                let start = self.builder.next_start();
                let change = self.tokens() + before - 1;
                self.grow(before + after);
                let (old, new) = (self.version, self.version + 1);
                self.version = new;
                let version = |position| if position < change { old } else { new };
                self.reply(start, version, |position| position >= change, retracted);
            }
            Step::Fork { at } => {
                let mut branch = self.clone();
                branch.builder = self.builder.fork(at);
                branch.cut(at);
                group.finished.push(std::mem::replace(self, branch));
            }
            Step::Member { prompt, output } => {
                let mut member = self.clone();
                member.cut(prompt);
                member.builder = MaskBuilder::new(shape()).unwrap();
                let version = self.version;
                let blocks = group.cache.lookup(&Group::chain(&member.ids, version));
                member.builder.seed(blocks, PolicyVersion(version));
                let held = |row: &[u8; 4]| Held { row: *row, version, mixed: false };
                let found = group.found(&member.ids, version);
                member.naive = found.iter().map(held).enumerate().collect();
                member.grow(output);
                member.plain(member.builder.next_start());
                group.finished.push(std::mem::replace(self, member));
            }
            Step::Truncate { at } => {
                self.builder.truncate(at);
                self.cut(at);
            }
            Step::Wrong { by } => {
                let before = format!("{:?}", self.builder);
                let have = self.builder.rows();
                let gap = payload(have + by, have + by + 1, self.salt);
                let v = PolicyVersion(self.version);
                assert!(self.builder.push(gap, have + by + 10, v).is_err());
                let long = payload(have, have + by, self.salt);
                assert!(self.builder.push(long, have + by, v).is_err());
                let unversioned = payload(have, have + by, self.salt);
                let passes = Passes { versions: &[], retracted: false };
                assert!(self.builder.push_passes(unversioned, have + by + 1, passes).is_err());
                assert_eq!(
                    format!("{:?}", self.builder),
                    before,
                    "a rejected payload changes nothing"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn prop_random_histories_match_a_map_of_rows(steps in steps()) {
        let mut both = Both::new();
        let mut group = Group::new();
        for step in &steps {
            both.step(step, &mut group);
            both.check();
            group.offer(&mut both);
        }
        group.finished.push(both);
        for branch in &group.finished {
            branch.check();
            for version in 0..=branch.version {
                group.found(&branch.ids, version);
            }
        }
    }
}

#[test]
fn two_aborts_and_a_resume_keep_every_row_exactly_once() {
    let mut both = Both::new();
    for output in [20, 13, 7] {
        both.grow(output);
        both.plain(0);
    }
    assert_eq!(both.builder.clone().finish(43).unwrap().rows(), 42);
    both.check();
}

#[test]
fn boundary_rows_of_twenty_turns_come_from_the_next_turn_and_are_never_copied() {
    let mut both = Both::new();
    for turn in 0..20 {
        both.grow(5 + turn);
        let before = both.builder.rows();
        both.plain(both.builder.next_start());
        // The row of the turn before's last token came with this one.
        assert_eq!(both.builder.rows(), both.tokens() - 1);
        assert_eq!(both.naive[&before].row, row(before, both.salt));
        both.check();
        both.grow(3); // the observation
    }
    both.cut(both.tokens() - 3);
    both.check();
}

#[test]
fn held_rows_are_kept_when_an_engine_dies_between_turns_and_differences_are_counted() {
    let mut both = Both::new();
    both.grow(97);
    both.plain(0);
    both.salt += 1; // another worker, whose near ties resolve differently
    both.grow(30);
    let report = both.builder.clone().push(payload(0, 129, both.salt), 130, PolicyVersion(0));
    let report = report.unwrap();
    assert_eq!((report.new_rows, report.overlap_rows), (30, 99));
    assert!(report.drift_rows > 90);
    both.plain(0);
    both.check();
}

#[test]
fn a_weight_update_between_turns_starts_a_version_at_the_boundary_row_without_mixed_rows() {
    let mut both = Both::new();
    both.grow(47);
    both.plain(0);
    both.version = 1;
    both.salt = 2;
    both.grow(30);
    both.plain(48);
    both.check();
    let mask = both.builder.finish(80).unwrap();
    let range = |start, end, version| RowVersion { start, end, version: PolicyVersion(version) };
    assert_eq!(mask.versions(), [range(0, 49, 0), range(49, 79, 1)]);
    assert_eq!(mask.mixed(), []);
}

#[test]
fn a_weight_change_within_a_turn_mixes_the_rows_after_it_and_a_retraction_mixes_them_all() {
    let built = |retracted| {
        let mut builder = MaskBuilder::new(shape()).unwrap();
        builder.push(payload(0, 9, 1), 10, PolicyVersion(1)).unwrap();
        let range = |start, end, v| RowVersion { start, end, version: PolicyVersion(v) };
        let versions = [range(8, 20, 1), range(20, 29, 2)];
        let passes = Passes { versions: &versions, retracted };
        let report = builder.push_passes(payload(8, 29, 1), 30, passes).unwrap();
        (builder.finish(30).unwrap(), report.mixed_rows)
    };
    let (kept, mixed) = built(false);
    assert_eq!((kept.mixed().to_vec(), mixed), (Vec::from_iter(Some(20..29)), 9));
    assert_eq!(kept.versions().iter().map(|r| r.end).collect::<Vec<_>>(), [20, 29]);
    let (again, mixed) = built(true);
    assert_eq!((again.mixed().to_vec(), mixed), (Vec::from_iter(Some(9..29)), 20));
    assert_eq!(
        again.versions().iter().map(|r| (r.end, r.version.0)).collect::<Vec<_>>(),
        [(9, 1), (29, 2)]
    );
}
