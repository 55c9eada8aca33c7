use super::*;
use crate::reply::ReplyParts;
use orchestrate_sandbox::{ExecResult, Exit};
use std::time::Duration;

/// The result of a command that printed `output`.
pub(super) fn command_result(exit: Exit, output: &str) -> ExecResult {
    ExecResult {
        exit,
        head: output.as_bytes().to_vec(),
        tail: Vec::new(),
        total_bytes: output.len() as u64,
        oom_kills: 0,
        elapsed: Duration::ZERO,
    }
}

fn parse_one(scaffold: Scaffold, text: &str) -> Result<Call, Mistake> {
    let mut calls = scaffold.parse(WrittenTurn::new(ToolFormat::Json, text), &[]);
    assert_eq!(calls.len(), 1, "{text}");
    calls.remove(0).map(|(_, call)| call)
}

#[test]
fn calls_inside_thinking_do_not_count() {
    let calls = [
        (Scaffold::Tools, r#"<tool_call>{"name": "submit", "arguments": {}}</tool_call>"#),
        (Scaffold::R2eXml, "<function=finish>\n<parameter=command>submit</parameter>\n</function>"),
    ];
    for (scaffold, call) in calls {
        assert_eq!(
            parse_one(scaffold, &format!("<think>\nhm\n</think>\n\n{call}")),
            Ok(Call::Submit)
        );
        assert!(parse_one(scaffold, &format!("<think>\n{call}\n</think>\n\ndone")).is_err());
    }
    let block = "```bash\nls\n```";
    assert!(parse_one(Scaffold::Mini, &format!("<think>{block}</think>{block}")).is_ok());
    assert!(parse_one(Scaffold::Mini, &format!("<think>{block}</think>")).is_err());
}

#[test]
fn scaffolds_and_agents_read_the_same_thinking_and_calls() {
    let call = |command: &str| {
        format!(
            r#"<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>"#
        )
    };
    let (grep, sed) = ("grep -n '</think>' parser.py", "sed -i 's|</think>|END|' parser.py");
    let submit = r#"<tool_call>{"name": "submit", "arguments": {}}</tool_call>"#;
    let two = format!("<think>\nEdit, then submit.\n</think>\n\n{}\n{submit}", call(sed));
    let unclosed =
        format!("<think>\nI could call {} but that deletes too much.", call("rm -rf build"));
    let inline =
        format!("<think>\nThe tag </think> ends it. Let me look.\n</think>\n\n{}", call("ls"));
    let content = format!("The parser must strip </think> from the text.\n{}", call("ls"));
    let prefilled = format!("prefilled thinking with a {} inside\n</think>\ndone", call("id"));
    for (opens_thinking, text, thinks, expected) in [
        (false, &call(grep), false, &[grep][..]),
        (false, &two, true, &[sed, "submit"]),
        (false, &unclosed, true, &[]),
        (false, &inline, true, &["ls"]),
        (false, &content, false, &["ls"]),
        (true, &prefilled, true, &[]),
    ] {
        let turn = WrittenTurn { opens_thinking, ..WrittenTurn::new(ToolFormat::Json, text) };
        let calls = Scaffold::Tools.parse(turn, &[]);
        let calls: Vec<Call> = calls.into_iter().filter_map(|call| Some(call.ok()?.1)).collect();
        let performed = expected.iter().map(|command| match *command {
            "submit" => Call::Submit,
            command => Call::Bash { command: command.to_owned() },
        });
        assert_eq!(calls, performed.collect::<Vec<_>>(), "{text}");
        let parts = ReplyParts::parse(ToolFormat::Json, &[], opens_thinking, text);
        assert_eq!(parts.reasoning.is_some(), thinks, "{text}");
        let commands = parts.calls.iter();
        let commands =
            commands.map(|call| call.arguments["command"].as_str().unwrap_or(&call.name));
        assert_eq!(commands.collect::<Vec<_>>(), expected, "{text}");
    }
}

#[test]
fn the_end_of_thinking_is_text_inside_a_call_and_open_thinking_has_no_calls() {
    let grep = r#"grep -n "</think>" parser.py"#;
    let tools = |command: &str| {
        let arguments = serde_json::json!({"command": command});
        format!("<tool_call>{{\"name\": \"bash\", \"arguments\": {arguments}}}</tool_call>")
    };
    let calls = [
        (Scaffold::Tools, tools(grep)),
        (
            Scaffold::R2eXml,
            format!("<function=execute_bash>\n<parameter=cmd>{grep}</parameter>\n</function>"),
        ),
        (Scaffold::Mini, format!("THOUGHT: I look.\n\n```bash\n{grep}\n```")),
    ];
    for (scaffold, call) in &calls {
        let expected = Ok(Call::Bash { command: grep.to_owned() });
        assert_eq!(parse_one(*scaffold, call), expected);
        assert_eq!(parse_one(*scaffold, &format!("<think>hm</think>{call}")), expected);
        assert!(parse_one(*scaffold, &format!("<think>perhaps {call} but no")).is_err());
        let turn = WrittenTurn { opens_thinking: true, ..WrittenTurn::new(ToolFormat::Json, call) };
        assert!(scaffold.parse(turn, &[])[0].is_err(), "thinking that the prompt opened");
    }
    let (edit, submit) = (
        tools("sed -i 's|</think>|END|' x"),
        r#"<tool_call>{"name": "submit", "arguments": {}}</tool_call>"#,
    );
    let text = format!("<think>\nEdit, then submit.\n</think>\n\n{edit}\n{submit}");
    let read = |text: &str| Scaffold::Tools.parse(WrittenTurn::new(ToolFormat::Json, text), &[]);
    let found: Vec<_> = read(&text).into_iter().map(|call| call.unwrap().0.name).collect();
    assert_eq!(found, ["bash", "submit"]);
    // Half of a turn is not performed.
    let broken = read(&format!("<tool_call>{{\"name\": \"bash\"</tool_call>{submit}"));
    assert!(matches!(broken.as_slice(), [Err(_)]), "{broken:?}");
}

#[test]
fn same_command_is_the_same_action_in_every_scaffold() {
    let texts = [
        (
            Scaffold::Tools,
            r#"<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>"#,
        ),
        (
            Scaffold::R2eXml,
            "I look.\n<function=execute_bash>\n<parameter=cmd> ls </parameter>\n</function>",
        ),
        (Scaffold::Mini, "THOUGHT: I look.\n\n```bash\nls\n```"),
    ];
    let action = Call::Bash { command: "ls".to_owned() }.action();
    for (scaffold, text) in texts {
        let call = Call::Bash { command: "ls".to_owned() };
        assert_eq!(
            scaffold.parse(WrittenTurn::new(ToolFormat::Json, text), &[]),
            [Ok((action.clone(), call))],
            "{scaffold:?}"
        );
    }
}

#[test]
fn prompts_have_issue_and_folder_and_replace_nothing_in_the_issue() {
    let task = Task {
        problem_statement: "{workdir} {problem_statement} fails".to_owned(),
        ..orchestrate_testkit::toy_task()
    };
    for scaffold in [Scaffold::Tools, Scaffold::R2eXml, Scaffold::Mini] {
        let messages = scaffold.opening(Prompts::default(), &task, 7);
        let prompt = &messages.last().unwrap().content;
        assert_eq!(prompt.matches("{workdir} {problem_statement} fails").count(), 1, "{prompt}");
        assert_eq!(prompt.matches('{').count(), 2, "{prompt}");
        assert!(messages.iter().all(|m| !m.content.ends_with('\n')));
        let own =
            Prompts { system: Some("be brief in {workdir}"), task: Some("{problem_statement}!") };
        let messages = scaffold.opening(own, &task, 7);
        assert_eq!(messages[0].content, "be brief in /testbed");
        assert!(messages[1].content.starts_with("{workdir} {problem_statement} fails!"));
    }
}
