//! Turn journals of external agents: whatever is done to the bytes, only records that were written are read,
//! and all before a cut are. A changed record with its checksum is read or refused.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, draws};
use orchestrate_rollout::DrawnJournal;

#[derive(Debug, Arbitrary)]
struct Input {
    choices: Vec<u8>,
    changes: Vec<Change>,
    /// The record that is changed, with its checksum, instead of the file.
    record: Option<u8>,
}

fuzz_target!(|input: Input| {
    let journal = DrawnJournal::draw(&mut draws(&input.choices));
    let mut bytes = journal.bytes().to_vec();
    let cap = (1 << 20) + 64 * bytes.len();
    match input.record {
        Some(record) => bounded(cap, || {
            journal.check_record(record.into(), |payload| input::change(payload, &input.changes));
        }),
        None => {
            input::change(&mut bytes, &input.changes);
            bounded(cap, || journal.check(&bytes));
        }
    }
});
