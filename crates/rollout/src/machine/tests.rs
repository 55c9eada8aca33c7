use super::*;
use proptest::prelude::*;

const LIMITS: EpisodeLimits =
    EpisodeLimits { max_turns: 2, max_sequence_tokens: 100, max_response_tokens: 20 };

fn generating(turn: u32, sampled: usize, aborts: u32) -> State {
    State::Generating { turn, sampled, aborts }
}

fn generated(finish: Finish, sampled: usize, total_tokens: usize) -> Event {
    Event::Generated { finish, sampled, total_tokens }
}

fn acted(submitted: bool, next_prompt_tokens: usize) -> Event {
    Event::Acted { submitted, next_prompt_tokens }
}

fn cut(limit: Limit) -> State {
    State::Grading { cut: Some(limit) }
}

fn go(turn: u32, resumed: bool, max_new_tokens: usize) -> Command {
    Command::Generate { turn, resumed, max_new_tokens }
}

fn ended(outcome: Outcome) -> (State, Command) {
    (State::Ended(outcome.clone()), Command::Finish(outcome))
}

/// The table of the module's documentation, row by row.
#[expect(clippy::too_many_lines, reason = "one row per transition")]
fn table() -> Vec<(&'static str, State, Event, State, Command)> {
    let failed = Event::Failed { stage: Stage::Exec, error: "gone".to_owned() };
    let (broken, finish_broken) =
        ended(Outcome::Broken { stage: Stage::Exec, error: "gone".to_owned() });
    let (aborted, finish_aborted) = ended(Outcome::Aborted { by: AbortCause::Shutdown });
    let (scored, finish_scored) = ended(Outcome::Scored { reward: 1.0 });
    let too_large = Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 };
    let (truncated, finish_truncated) =
        ended(Outcome::Truncated { limit: Limit::Turns, reward: 0.0 });
    let (worn, finish_worn) = ended(Outcome::Broken {
        stage: Stage::Generate,
        error: "turn 1 was aborted 17 times".to_owned(),
    });
    let ready = State::SandboxReady;
    let acting = State::Acting { turn: 0 };
    let grading = State::Grading { cut: None };
    let mut rows = vec![
        ("opened", State::Created, Event::SandboxOpened, ready.clone(), Command::RenderPrompt),
        (
            "first turn",
            ready.clone(),
            Event::PromptRendered { tokens: 10 },
            generating(0, 0, 0),
            go(0, false, 20),
        ),
        (
            "first turn, little room",
            ready.clone(),
            Event::PromptRendered { tokens: 93 },
            generating(0, 0, 0),
            go(0, false, 7),
        ),
        (
            "prompt too long",
            ready.clone(),
            Event::PromptRendered { tokens: 100 },
            cut(Limit::SequenceTokens),
            Command::Grade,
        ),
        ("stop", generating(0, 0, 0), generated(Finish::Stop, 5, 15), acting.clone(), Command::Act),
        (
            "response too long",
            generating(0, 0, 0),
            generated(Finish::Length, 20, 30),
            cut(Limit::ResponseTokens),
            Command::Grade,
        ),
        (
            "sequence too long",
            generating(0, 0, 0),
            generated(Finish::Length, 7, 100),
            cut(Limit::SequenceTokens),
            Command::Grade,
        ),
        (
            "no room for a token at the engine",
            generating(1, 0, 0),
            generated(Finish::Length, 0, 40),
            cut(Limit::SequenceTokens),
            Command::Grade,
        ),
        (
            "abort",
            generating(1, 3, 0),
            generated(Finish::Abort, 5, 40),
            generating(1, 8, 1),
            go(1, true, 12),
        ),
        (
            "abort at the response's end",
            generating(1, 15, 1),
            generated(Finish::Abort, 5, 40),
            cut(Limit::ResponseTokens),
            Command::Grade,
        ),
        (
            "abort at the sequence's end",
            generating(1, 0, 0),
            generated(Finish::Abort, 5, 100),
            cut(Limit::SequenceTokens),
            Command::Grade,
        ),
        (
            "aborted too often",
            generating(1, 0, MAX_ABORTS_PER_TURN),
            generated(Finish::Abort, 0, 40),
            worn,
            finish_worn,
        ),
        ("submitted", acting.clone(), acted(true, 30), grading.clone(), Command::Grade),
        ("next turn", acting.clone(), acted(false, 90), generating(1, 0, 0), go(1, false, 10)),
        (
            "turns used up",
            State::Acting { turn: 1 },
            acted(false, 30),
            cut(Limit::Turns),
            Command::Grade,
        ),
        (
            "no room for a turn",
            acting.clone(),
            acted(false, 101),
            cut(Limit::SequenceTokens),
            Command::Grade,
        ),
        (
            "time, generating",
            generating(0, 0, 0),
            Event::TimeUp,
            cut(Limit::EpisodeTime),
            Command::Grade,
        ),
        ("time, acting", acting.clone(), Event::TimeUp, cut(Limit::EpisodeTime), Command::Grade),
        ("scored", grading.clone(), Event::Graded { reward: 1.0 }, scored, finish_scored),
        (
            "truncated",
            cut(Limit::Turns),
            Event::Graded { reward: 0.0 },
            truncated,
            finish_truncated,
        ),
        (
            "too large to grade",
            cut(Limit::Turns),
            Event::ChangeTooLarge,
            State::Ended(too_large.clone()),
            Command::Finish(too_large),
        ),
    ];
    for state in [State::Created, ready, generating(0, 0, 0), acting] {
        rows.push((
            "stop request",
            state.clone(),
            Event::StopRequested,
            aborted.clone(),
            finish_aborted.clone(),
        ));
        rows.push(("failure", state, failed.clone(), broken.clone(), finish_broken.clone()));
    }
    rows.push(("failure", grading, failed, broken, finish_broken));
    rows
}

#[test]
fn the_transition_table_holds() {
    for (name, from, event, to, command) in table() {
        let mut machine = EpisodeMachine { limits: LIMITS, state: from };
        assert_eq!(machine.step(event), Ok(command), "{name}");
        assert_eq!(machine.state(), &to, "{name}");
    }
}

fn kind<T: std::fmt::Debug>(value: &T) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

#[test]
fn every_pair_outside_the_table_is_refused_and_changes_nothing() {
    let rows = table();
    let mut states: Vec<State> = Vec::new();
    let mut events: Vec<Event> = Vec::new();
    for (_, from, event, to, _) in &rows {
        for state in [from, to] {
            if !states.iter().any(|s| kind(s) == kind(state)) {
                states.push(state.clone());
            }
        }
        if !events.iter().any(|e| kind(e) == kind(event)) {
            events.push(event.clone());
        }
    }
    assert_eq!((states.len(), events.len()), (6, 9), "a state or event has no row");
    for state in &states {
        for event in &events {
            let listed =
                rows.iter().any(|(_, s, e, _, _)| kind(s) == kind(state) && kind(e) == kind(event));
            let mut machine = EpisodeMachine { limits: LIMITS, state: state.clone() };
            assert_eq!(machine.step(event.clone()).is_ok(), listed, "{state:?} {event:?}");
            assert!(listed || machine.state() == state);
        }
    }
}

/// Which row of the table a step took, by the shapes of its parts.
fn row_name(from: &State, event: &Event, to: &State, command: &Command) -> Option<&'static str> {
    let same = |(_, f, e, t, c): &(&str, State, Event, State, Command)| {
        let detail = match (t, to) {
            (State::Grading { cut: a }, State::Grading { cut: b }) => a == b,
            (State::Ended(a), State::Ended(b)) => a.name() == b.name(),
            _ => kind(t) == kind(to),
        };
        let finish = match (e, event) {
            (Event::Generated { finish: a, .. }, Event::Generated { finish: b, .. }) => a == b,
            _ => kind(e) == kind(event),
        };
        kind(f) == kind(from) && finish && detail && kind(c) == kind(command)
    };
    table().iter().find(|row| same(row)).map(|row| row.0)
}

fn any_event() -> impl Strategy<Value = Event> {
    let finish = prop_oneof![Just(Finish::Stop), Just(Finish::Length), Just(Finish::Abort)];
    prop_oneof![
        Just(Event::SandboxOpened),
        (0usize..120).prop_map(|tokens| Event::PromptRendered { tokens }),
        (finish, 0usize..25, 0usize..110).prop_map(|(f, s, t)| generated(f, s, t)),
        (any::<bool>(), 0usize..120).prop_map(|(s, t)| acted(s, t)),
        Just(Event::Graded { reward: 1.0 }),
        Just(Event::ChangeTooLarge),
        Just(Event::TimeUp),
        Just(Event::StopRequested),
        Just(Event::Failed { stage: Stage::Grade, error: "x".to_owned() }),
    ]
}

proptest! {
    /// From any start, whatever happens: every legal step is a row of the table, a generation
    /// always has room, turns never exceed the limit, and the end is final.
    #[test]
    fn prop_random_lives_follow_the_table(events in prop::collection::vec(any_event(), 0..60)) {
        let (mut machine, first) = EpisodeMachine::new(LIMITS);
        prop_assert_eq!(first, Command::OpenSandbox);
        for event in events {
            let from = machine.state().clone();
            match machine.step(event.clone()) {
                Err(_) => prop_assert_eq!(machine.state(), &from),
                Ok(command) => {
                    prop_assert!(!matches!(from, State::Ended(_)));
                    if let Command::Generate { turn, max_new_tokens, .. } = command {
                        prop_assert!(turn < LIMITS.max_turns);
                        prop_assert!((1..=LIMITS.max_response_tokens).contains(&max_new_tokens));
                    }
                    let row = row_name(&from, &event, machine.state(), &command);
                    prop_assert!(row.is_some(), "{:?} {:?} {:?}", from, event, machine.state());
                }
            }
        }
    }
}
