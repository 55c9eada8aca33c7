//! Tool calls in the text of a policy, of every scaffold: each is a call or a mistake, and a call reads
//! the same after another pass through the shared form. Replies whose structure is known by construction,
//! with tags in every place, are read as what they were made of, or refused.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change, draws};
use orchestrate_rollout::{Scaffold, ToolFormat, WrittenTurn, check_reply, check_turn};

const PIECES: [&str; 40] = [
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}",
    "{\"name\": \"edit\", \"arguments\": {\"path\": \"a\", \"old_str\": \"b\", \"new_str\": \"c\"}}",
    "{\"name\": \"submit\", \"arguments\": {}}",
    "{\"name\": \"edit\", \"arguments\": {\"line\": 0}}",
    "<function=file_editor>",
    "<function=execute_bash>",
    "<function=search>",
    "<function=finish>",
    "</function>",
    "<parameter=command>view</parameter>",
    "<parameter=path>/testbed/a.py</parameter>",
    "<parameter=view_range>[1, -1]</parameter>",
    "<parameter=old_str>",
    "<parameter=new_str>",
    "</parameter>",
    "<parameter=insert_line>9223372036854775808</parameter>",
    "<parameter=concise>True",
    "<parameter=search_term>x",
    "<parameter=cmd>ls",
    "create",
    "insert",
    "undo_edit",
    "str_replace",
    "<think>",
    "</think>",
    "```bash\n",
    "```mswea_bash_command\n",
    "\n```",
    "```",
    "ls -la",
    "\n",
    " ",
    "é\u{1f600}",
    "&lt;",
    "\\",
    "\"",
    "<|im_end|>",
    "\u{85}\u{a0}",
];

#[derive(Debug, Arbitrary)]
struct Input {
    pieces: Vec<u8>,
    changes: Vec<Change>,
    choices: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let pieces = input.pieces.iter().map(|&piece| PIECES[usize::from(piece) % PIECES.len()]);
    let mut bytes = pieces.collect::<String>().into_bytes();
    input::change(&mut bytes, &input.changes);
    let text = String::from_utf8_lossy(&bytes);
    let readers = [
        (Scaffold::Tools, ToolFormat::Json),
        (Scaffold::Tools, ToolFormat::Xml),
        (Scaffold::R2eXml, ToolFormat::default()),
        (Scaffold::Mini, ToolFormat::default()),
    ];
    for (scaffold, format) in readers {
        let turn = WrittenTurn::new(format, &text);
        let calls = bounded((1 << 20) + 64 * text.len(), || scaffold.parse(turn, &[]));
        assert!(!calls.is_empty(), "a text without a call is a mistake");
        assert!(calls.len() == 1 || matches!(scaffold, Scaffold::Tools));
        for call in &calls {
            match call {
                Ok((action, _)) => {
                    assert!(action.arguments.is_object(), "{action:?}");
                    let known = ["bash", "view", "edit", "search", "submit"];
                    assert!(known.contains(&action.name.as_str()), "{action:?}");
                }
                Err(mistake) => assert!(!mistake.text.is_empty()),
            }
        }
        assert_eq!(calls, scaffold.parse(turn, &[]));
    }
    check_reply(&mut draws(&input.choices));
    check_turn(&mut draws(&input.choices));
});
