//! The page `docs/src/fields.md`.

use super::tables::{CHAT, MESSAGES, RESPONSES, TOKENS};
use super::{Field, HEADER, Table, Treatment};
use std::fmt::Write as _;

const INTRODUCTION: &str = "# Fields of requests

<!-- Generated from crates/gateway/src/fields/tables.rs; change that, and run:
     ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-gateway -->

What the gateway does with each field of a request, by dialect. A field is *honoured*, *overridden* (it is accepted,
and something else decides) or *refused* with status 400, the field's name and the reason. In a field that is
overridden, a null or empty value is as good as none; in one that is refused, so are false and zero, unless the table
names the values that it may have. The value of a field that is honoured must be valid, which `n: 0`,
`max_tokens: 0` and `stop: \"\"` are not.

";

/// The whole page.
pub(super) fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    // Writing to a string does not fail.
    let _ = write!(
        page,
        "The overridden fields of a request are listed in the header `{HEADER}` of its reply, recorded with its\n\
         turn, and counted in each step's metrics (`overridden_fields`). So are fields that are in no table.\n\
         `thinking` is listed if a request switches thinking and the chat template has no switch, or\n\
         `rollout.thinking` decides.\n"
    );
    for table in [CHAT, RESPONSES, MESSAGES, TOKENS] {
        section(&mut page, &table);
    }
    page
}

fn section(page: &mut String, table: &Table) {
    let _ = write!(page, "\n## {}\n\n| Field | What is done | Why |\n|---|---|---|\n", table.name);
    for Field(path, treatment) in table.fields {
        let values = |values: &[&str]| {
            let quoted: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            quoted.join(", ")
        };
        let (what, why) = match treatment {
            Treatment::Honoured => ("honoured".to_owned(), ""),
            Treatment::HonouredAs(remark) => ("honoured".to_owned(), *remark),
            Treatment::Overridden(why) => ("overridden".to_owned(), *why),
            Treatment::InEvaluations(why) => {
                ("honoured in evaluations, overridden in training".to_owned(), *why)
            }
            Treatment::Partly(known, why) => {
                (format!("{} honoured, others overridden", values(known)), *why)
            }
            Treatment::Words(own, [], why) => {
                (format!("{} honoured, others refused", values(own)), *why)
            }
            Treatment::Words(own, overridden, why) => {
                let (own, overridden) = (values(own), values(overridden));
                (format!("{own} honoured; {overridden} overridden; others refused"), *why)
            }
            Treatment::Types(own, left_out, why) => {
                let (own, left_out) = (values(own), values(left_out));
                (format!("{own} honoured; {left_out} overridden: left out; others refused"), *why)
            }
            Treatment::Refused(why) => ("refused".to_owned(), *why),
            Treatment::TextFormat(why) => ("text honoured, other formats refused".to_owned(), *why),
            Treatment::Only([], why) => ("refused, even if it is empty".to_owned(), *why),
            Treatment::Only(known, why) => {
                (format!("{} honoured, others refused", values(known)), *why)
            }
        };
        let _ = writeln!(page, "| `{path}` | {what} | {why} |");
    }
}
