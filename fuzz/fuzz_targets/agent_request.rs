//! Requests of agents in all three dialects: text that is not Unicode changes nothing else in a history
//! whose content is known by construction, and a changed body is read or refused with a reason.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, draws};
use orchestrate_gateway::{check_body, check_request};

#[derive(Debug, Arbitrary)]
struct Input {
    choices: Vec<u8>,
    dialect: u8,
    changes: Vec<Change>,
}

fuzz_target!(|input: Input| {
    let mut body = check_request(&mut draws(&input.choices));
    input::change(&mut body, &input.changes);
    bounded((1 << 20) + 64 * body.len(), || check_body(usize::from(input.dialect), &body));
});
