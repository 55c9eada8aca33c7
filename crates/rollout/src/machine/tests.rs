use super::*;
use proptest::prelude::*;

const LIMITS: EpisodeLimits =
    EpisodeLimits { max_turns: 2, max_sequence_tokens: 100, max_response_tokens: 20 };

fn generating(turn: u32, sampled: usize, aborts: u32) -> TurnPhase {
    TurnPhase::Generating { turn, sampled, aborts }
}

fn generated(finish: Finish, sampled: usize, total_tokens: usize) -> TurnEvent {
    TurnEvent::Generated { finish, sampled, total_tokens }
}

fn acted(submitted: bool, next_prompt_tokens: usize) -> TurnEvent {
    TurnEvent::Acted { submitted, next_prompt_tokens }
}

fn generate(turn: u32, resumed: bool, max_new_tokens: usize) -> TurnCommand {
    TurnCommand::Generate { turn, resumed, max_new_tokens }
}

/// The end of the turns by a limit.
fn truncated_by(limit: Limit) -> (TurnPhase, TurnCommand) {
    grade(Some(limit))
}

/// The table in the module's documentation, row by row, without those of the opening prompt.
fn table() -> Vec<(&'static str, TurnPhase, TurnEvent, (TurnPhase, TurnCommand))> {
    let full = || TurnEvent::ContextFull { error: "full".to_owned() };
    let acting = || TurnPhase::Acting { turn: 0 };
    vec![
        (
            "prompt too long for the engine",
            generating(0, 0, 0),
            full(),
            end(unsuitable_prompt("full")),
        ),
        (
            "engine's context full within the first turn",
            generating(0, 5, 1),
            full(),
            truncated_by(Limit::SequenceTokens),
        ),
        ("engine's context full", generating(1, 0, 0), full(), truncated_by(Limit::SequenceTokens)),
        ("stop", generating(0, 0, 0), generated(Finish::Stop, 5, 15), (acting(), TurnCommand::Act)),
        (
            "response too long",
            generating(0, 0, 0),
            generated(Finish::Length, 20, 30),
            truncated_by(Limit::ResponseTokens),
        ),
        (
            "sequence too long",
            generating(0, 0, 0),
            generated(Finish::Length, 7, 100),
            truncated_by(Limit::SequenceTokens),
        ),
        (
            "a reply that was cut off before its text",
            generating(1, 0, 0),
            generated(Finish::Length, 0, 40),
            truncated_by(Limit::ResponseTokens),
        ),
        (
            "abort",
            generating(1, 3, 0),
            generated(Finish::Abort, 5, 40),
            (generating(1, 8, 1), generate(1, true, 12)),
        ),
        (
            "abort at the response limit",
            generating(1, 15, 1),
            generated(Finish::Abort, 5, 40),
            truncated_by(Limit::ResponseTokens),
        ),
        (
            "abort at the sequence limit",
            generating(1, 0, 0),
            generated(Finish::Abort, 5, 100),
            truncated_by(Limit::SequenceTokens),
        ),
        (
            "aborted too often",
            generating(1, 0, MAX_ABORTS_PER_TURN),
            generated(Finish::Abort, 0, 40),
            end(failed(Stage::Generate, "turn 1 was aborted 17 times")),
        ),
        ("submitted", acting(), acted(true, 30), grade(None)),
        ("next turn", acting(), acted(false, 90), (generating(1, 0, 0), generate(1, false, 10))),
        (
            "no turns left",
            TurnPhase::Acting { turn: 1 },
            acted(false, 30),
            truncated_by(Limit::Turns),
        ),
        (
            "no room for another turn",
            acting(),
            acted(false, 101),
            truncated_by(Limit::SequenceTokens),
        ),
        (
            "time up while generating",
            generating(0, 0, 0),
            TurnEvent::TimeUp,
            truncated_by(Limit::EpisodeTime),
        ),
        ("time up while acting", acting(), TurnEvent::TimeUp, truncated_by(Limit::EpisodeTime)),
    ]
}

#[test]
fn every_row_of_the_table_holds() {
    for (name, from, event, (to, command)) in table() {
        let mut machine = TurnMachine { limits: LIMITS, phase: from };
        assert_eq!(machine.step(event), Ok(command), "{name}");
        assert_eq!(machine.phase, to, "{name}");
    }
}

#[test]
fn the_opening_prompt_leaves_room_for_a_reply_or_breaks_the_episode() {
    let no_room = |tokens: usize| {
        end(unsuitable_prompt(&format!("it has {tokens} tokens, and the limit 100")))
    };
    for (tokens, (phase, command)) in [
        (10, (generating(0, 0, 0), generate(0, false, 20))),
        (93, (generating(0, 0, 0), generate(0, false, 7))),
        (100, no_room(100)),
        (120, no_room(120)),
    ] {
        let (machine, first) = TurnMachine::start(LIMITS, tokens);
        assert_eq!((machine.phase, first), (phase, command), "{tokens}");
    }
}

fn kind<T: std::fmt::Debug>(value: &T) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

#[test]
fn pairs_outside_the_table_are_refused_and_change_nothing() {
    let rows = table();
    let mut phases: Vec<TurnPhase> = Vec::new();
    let mut events: Vec<TurnEvent> = Vec::new();
    for (_, from, event, (to, _)) in &rows {
        for phase in [from, to] {
            if !phases.iter().any(|p| kind(p) == kind(phase)) {
                phases.push(phase.clone());
            }
        }
        if !events.iter().any(|e| kind(e) == kind(event)) {
            events.push(event.clone());
        }
    }
    assert_eq!((phases.len(), events.len()), (3, 4), "a phase or an event has no row");
    for phase in &phases {
        for event in &events {
            let listed =
                rows.iter().any(|(_, p, e, _)| kind(p) == kind(phase) && kind(e) == kind(event));
            let mut machine = TurnMachine { limits: LIMITS, phase: phase.clone() };
            assert_eq!(machine.step(event.clone()).is_ok(), listed, "{phase:?} {event:?}");
            assert!(listed || machine.phase == *phase);
        }
    }
}

/// Name of the table row that a step took, found by the kinds of its parts.
fn row_name(
    from: &TurnPhase,
    event: &TurnEvent,
    to: &TurnPhase,
    command: &TurnCommand,
) -> Option<&'static str> {
    let same = |(_, f, e, (t, c)): &(&str, TurnPhase, TurnEvent, (TurnPhase, TurnCommand))| {
        let detail = match (c, command) {
            (TurnCommand::Grade { truncated_by: a }, TurnCommand::Grade { truncated_by: b }) => {
                a == b
            }
            (TurnCommand::Finish(a), TurnCommand::Finish(b)) => a.name() == b.name(),
            _ => kind(c) == kind(command),
        };
        let finish = match (e, event) {
            (TurnEvent::Generated { finish: a, .. }, TurnEvent::Generated { finish: b, .. }) => {
                a == b
            }
            _ => kind(e) == kind(event),
        };
        kind(f) == kind(from) && finish && detail && kind(t) == kind(to)
    };
    table().iter().find(|row| same(row)).map(|row| row.0)
}

fn any_event() -> impl Strategy<Value = TurnEvent> {
    let finish = prop_oneof![Just(Finish::Stop), Just(Finish::Length), Just(Finish::Abort)];
    prop_oneof![
        (finish, 0usize..25, 0usize..110).prop_map(|(f, s, t)| generated(f, s, t)),
        Just(TurnEvent::ContextFull { error: "x".to_owned() }),
        (any::<bool>(), 0usize..120).prop_map(|(s, t)| acted(s, t)),
        Just(TurnEvent::TimeUp),
    ]
}

/// Checks that a generation has room, and that its turn is within the limit.
fn check_room(command: &TurnCommand) -> Result<(), TestCaseError> {
    if let TurnCommand::Generate { turn, max_new_tokens, .. } = command {
        prop_assert!(*turn < LIMITS.max_turns);
        prop_assert!((1..=LIMITS.max_response_tokens).contains(max_new_tokens));
    }
    Ok(())
}

proptest! {
    /// Whatever events come: every legal step is a row of the table, a generation always has room,
    /// turns stay below the limit, and `Ended` is final.
    #[test]
    fn prop_random_episodes_follow_the_table(
        prompt in 0usize..120,
        events in prop::collection::vec(any_event(), 0..60),
    ) {
        let (mut machine, first) = TurnMachine::start(LIMITS, prompt);
        check_room(&first)?;
        for event in events {
            let from = machine.phase.clone();
            match machine.step(event.clone()) {
                Err(_) => prop_assert_eq!(&machine.phase, &from),
                Ok(command) => {
                    prop_assert!(from != TurnPhase::Ended);
                    check_room(&command)?;
                    let row = row_name(&from, &event, &machine.phase, &command);
                    prop_assert!(row.is_some(), "{:?} {:?} {:?}", from, event, machine.phase);
                }
            }
        }
    }
}
