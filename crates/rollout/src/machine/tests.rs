use super::*;
use proptest::prelude::*;

const LIMITS: EpisodeLimits =
    EpisodeLimits { max_turns: 2, max_sequence_tokens: 100, max_response_tokens: 20 };

fn generating(turn: u32, sampled: usize, aborts: u32) -> EpisodePhase {
    EpisodePhase::Generating { turn, sampled, aborts }
}

fn generated(finish: Finish, sampled: usize, total_tokens: usize) -> EpisodeEvent {
    EpisodeEvent::Generated { finish, sampled, total_tokens }
}

fn acted(submitted: bool, next_prompt_tokens: usize) -> EpisodeEvent {
    EpisodeEvent::Acted { submitted, next_prompt_tokens }
}

fn truncated_by(limit: Limit) -> EpisodePhase {
    EpisodePhase::Grading { truncated_by: Some(limit) }
}

fn generate(turn: u32, resumed: bool, max_new_tokens: usize) -> EpisodeCommand {
    EpisodeCommand::Generate { turn, resumed, max_new_tokens }
}

fn unsuitable(why: &str) -> (EpisodePhase, EpisodeCommand) {
    ended(unsuitable_prompt(why))
}

fn ended(outcome: Outcome) -> (EpisodePhase, EpisodeCommand) {
    (EpisodePhase::Ended(outcome.clone()), EpisodeCommand::Finish(outcome))
}

/// The table in the module's documentation, row by row.
#[expect(clippy::too_many_lines, reason = "one row per transition")]
fn table() -> Vec<(&'static str, EpisodePhase, EpisodeEvent, EpisodePhase, EpisodeCommand)> {
    let failed = EpisodeEvent::Failed { stage: Stage::Exec, error: "gone".to_owned() };
    let (broken, finish_broken) =
        ended(Outcome::Broken { stage: Stage::Exec, error: "gone".to_owned() });
    let (aborted, finish_aborted) = ended(Outcome::Aborted { by: AbortCause::Shutdown });
    let (scored, finish_scored) = ended(Outcome::Scored { reward: 1.0 });
    let too_large = Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 };
    let damaged = Outcome::Truncated { limit: Limit::SandboxDamage, reward: 0.0 };
    let damage = EpisodeEvent::SandboxDamaged { what: "no process can be started".to_owned() };
    let (truncated, finish_truncated) =
        ended(Outcome::Truncated { limit: Limit::Turns, reward: 0.0 });
    let (too_many_aborts, finish_too_many_aborts) = ended(Outcome::Broken {
        stage: Stage::Generate,
        error: "turn 1 was aborted 17 times".to_owned(),
    });
    let ready = EpisodePhase::SandboxReady;
    let acting = EpisodePhase::Acting { turn: 0 };
    let grading = EpisodePhase::Grading { truncated_by: None };
    let mut rows = vec![
        (
            "opened",
            EpisodePhase::Created,
            EpisodeEvent::SandboxOpened,
            ready.clone(),
            EpisodeCommand::RenderPrompt,
        ),
        (
            "opened for an agent",
            EpisodePhase::Created,
            EpisodeEvent::SandboxOpened,
            EpisodePhase::AgentRunning,
            EpisodeCommand::RunAgent,
        ),
        (
            "agent ended",
            EpisodePhase::AgentRunning,
            EpisodeEvent::AgentEnded { truncated_by: None },
            grading.clone(),
            EpisodeCommand::Grade,
        ),
        (
            "agent at its limit",
            EpisodePhase::AgentRunning,
            EpisodeEvent::AgentEnded { truncated_by: Some(Limit::Turns) },
            truncated_by(Limit::Turns),
            EpisodeCommand::Grade,
        ),
        (
            "returned by a worker",
            EpisodePhase::AgentRunning,
            EpisodeEvent::Returned { reward: 1.0, truncated_by: None },
            scored.clone(),
            finish_scored.clone(),
        ),
        (
            "returned by a worker at a limit",
            EpisodePhase::AgentRunning,
            EpisodeEvent::Returned { reward: 0.0, truncated_by: Some(Limit::Turns) },
            truncated.clone(),
            finish_truncated.clone(),
        ),
        (
            "damaged by an agent",
            EpisodePhase::AgentRunning,
            damage.clone(),
            EpisodePhase::Ended(damaged.clone()),
            EpisodeCommand::Finish(damaged.clone()),
        ),
        (
            "first turn",
            ready.clone(),
            EpisodeEvent::PromptRendered { tokens: 10 },
            generating(0, 0, 0),
            generate(0, false, 20),
        ),
        (
            "first turn, limited by the sequence",
            ready.clone(),
            EpisodeEvent::PromptRendered { tokens: 93 },
            generating(0, 0, 0),
            generate(0, false, 7),
        ),
        (
            "prompt too long",
            ready.clone(),
            EpisodeEvent::PromptRendered { tokens: 100 },
            unsuitable("it has 100 tokens, and the limit 100").0,
            unsuitable("it has 100 tokens, and the limit 100").1,
        ),
        (
            "prompt too long for the engine",
            generating(0, 0, 0),
            EpisodeEvent::ContextFull { error: "full".to_owned() },
            unsuitable("full").0,
            unsuitable("full").1,
        ),
        (
            "engine's context full within the first turn",
            generating(0, 5, 1),
            EpisodeEvent::ContextFull { error: "full".to_owned() },
            truncated_by(Limit::SequenceTokens),
            EpisodeCommand::Grade,
        ),
        (
            "engine's context full",
            generating(1, 0, 0),
            EpisodeEvent::ContextFull { error: "full".to_owned() },
            truncated_by(Limit::SequenceTokens),
            EpisodeCommand::Grade,
        ),
        (
            "stop",
            generating(0, 0, 0),
            generated(Finish::Stop, 5, 15),
            acting.clone(),
            EpisodeCommand::Act,
        ),
        (
            "response too long",
            generating(0, 0, 0),
            generated(Finish::Length, 20, 30),
            truncated_by(Limit::ResponseTokens),
            EpisodeCommand::Grade,
        ),
        (
            "sequence too long",
            generating(0, 0, 0),
            generated(Finish::Length, 7, 100),
            truncated_by(Limit::SequenceTokens),
            EpisodeCommand::Grade,
        ),
        (
            "a reply that was cut off before its text",
            generating(1, 0, 0),
            generated(Finish::Length, 0, 40),
            truncated_by(Limit::ResponseTokens),
            EpisodeCommand::Grade,
        ),
        (
            "abort",
            generating(1, 3, 0),
            generated(Finish::Abort, 5, 40),
            generating(1, 8, 1),
            generate(1, true, 12),
        ),
        (
            "abort at the response limit",
            generating(1, 15, 1),
            generated(Finish::Abort, 5, 40),
            truncated_by(Limit::ResponseTokens),
            EpisodeCommand::Grade,
        ),
        (
            "abort at the sequence limit",
            generating(1, 0, 0),
            generated(Finish::Abort, 5, 100),
            truncated_by(Limit::SequenceTokens),
            EpisodeCommand::Grade,
        ),
        (
            "aborted too often",
            generating(1, 0, MAX_ABORTS_PER_TURN),
            generated(Finish::Abort, 0, 40),
            too_many_aborts,
            finish_too_many_aborts,
        ),
        ("submitted", acting.clone(), acted(true, 30), grading.clone(), EpisodeCommand::Grade),
        (
            "next turn",
            acting.clone(),
            acted(false, 90),
            generating(1, 0, 0),
            generate(1, false, 10),
        ),
        (
            "no turns left",
            EpisodePhase::Acting { turn: 1 },
            acted(false, 30),
            truncated_by(Limit::Turns),
            EpisodeCommand::Grade,
        ),
        (
            "no room for another turn",
            acting.clone(),
            acted(false, 101),
            truncated_by(Limit::SequenceTokens),
            EpisodeCommand::Grade,
        ),
        (
            "time up while generating",
            generating(0, 0, 0),
            EpisodeEvent::TimeUp,
            truncated_by(Limit::EpisodeTime),
            EpisodeCommand::Grade,
        ),
        (
            "time up while acting",
            acting.clone(),
            EpisodeEvent::TimeUp,
            truncated_by(Limit::EpisodeTime),
            EpisodeCommand::Grade,
        ),
        ("scored", grading.clone(), EpisodeEvent::Graded { reward: 1.0 }, scored, finish_scored),
        (
            "truncated",
            truncated_by(Limit::Turns),
            EpisodeEvent::Graded { reward: 0.0 },
            truncated,
            finish_truncated,
        ),
        (
            "too large to grade",
            truncated_by(Limit::Turns),
            EpisodeEvent::ChangeTooLarge,
            EpisodePhase::Ended(too_large.clone()),
            EpisodeCommand::Finish(too_large),
        ),
        (
            "damaged while acting",
            acting.clone(),
            damage.clone(),
            EpisodePhase::Ended(damaged.clone()),
            EpisodeCommand::Finish(damaged.clone()),
        ),
        (
            "damaged while grading",
            truncated_by(Limit::Turns),
            damage,
            EpisodePhase::Ended(damaged.clone()),
            EpisodeCommand::Finish(damaged),
        ),
    ];
    let running = EpisodePhase::AgentRunning;
    for phase in [EpisodePhase::Created, ready, generating(0, 0, 0), acting, running] {
        rows.push((
            "stop request",
            phase.clone(),
            EpisodeEvent::StopRequested,
            aborted.clone(),
            finish_aborted.clone(),
        ));
        rows.push(("failure", phase, failed.clone(), broken.clone(), finish_broken.clone()));
    }
    rows.push(("failure", grading, failed, broken, finish_broken));
    rows
}

#[test]
fn every_row_of_the_table_holds() {
    for (name, from, event, to, command) in table() {
        let has_agent = command == EpisodeCommand::RunAgent;
        let mut machine = EpisodeMachine { limits: LIMITS, has_agent, phase: from };
        assert_eq!(machine.step(event), Ok(command), "{name}");
        assert_eq!(machine.phase(), &to, "{name}");
    }
}

fn kind<T: std::fmt::Debug>(value: &T) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

#[test]
fn pairs_outside_the_table_are_refused_and_change_nothing() {
    let rows = table();
    let mut phases: Vec<EpisodePhase> = Vec::new();
    let mut events: Vec<EpisodeEvent> = Vec::new();
    for (_, from, event, to, _) in &rows {
        for phase in [from, to] {
            if !phases.iter().any(|p| kind(p) == kind(phase)) {
                phases.push(phase.clone());
            }
        }
        if !events.iter().any(|e| kind(e) == kind(event)) {
            events.push(event.clone());
        }
    }
    assert_eq!((phases.len(), events.len()), (7, 13), "a phase or an event has no row");
    for phase in &phases {
        for event in &events {
            let listed =
                rows.iter().any(|(_, p, e, _, _)| kind(p) == kind(phase) && kind(e) == kind(event));
            let mut machine =
                EpisodeMachine { limits: LIMITS, has_agent: false, phase: phase.clone() };
            assert_eq!(machine.step(event.clone()).is_ok(), listed, "{phase:?} {event:?}");
            assert!(listed || machine.phase() == phase);
        }
    }
}

/// Name of the table row that a step took, found by the kinds of its parts.
fn row_name(
    from: &EpisodePhase,
    event: &EpisodeEvent,
    to: &EpisodePhase,
    command: &EpisodeCommand,
) -> Option<&'static str> {
    let same =
        |(_, f, e, t, c): &(&str, EpisodePhase, EpisodeEvent, EpisodePhase, EpisodeCommand)| {
            let detail = match (t, to) {
                (
                    EpisodePhase::Grading { truncated_by: a },
                    EpisodePhase::Grading { truncated_by: b },
                ) => a == b,
                (EpisodePhase::Ended(a), EpisodePhase::Ended(b)) => a.name() == b.name(),
                _ => kind(t) == kind(to),
            };
            let finish = match (e, event) {
                (
                    EpisodeEvent::Generated { finish: a, .. },
                    EpisodeEvent::Generated { finish: b, .. },
                ) => a == b,
                _ => kind(e) == kind(event),
            };
            kind(f) == kind(from) && finish && detail && kind(c) == kind(command)
        };
    table().iter().find(|row| same(row)).map(|row| row.0)
}

fn any_event() -> impl Strategy<Value = EpisodeEvent> {
    let finish = prop_oneof![Just(Finish::Stop), Just(Finish::Length), Just(Finish::Abort)];
    prop_oneof![
        Just(EpisodeEvent::SandboxOpened),
        (0usize..120).prop_map(|tokens| EpisodeEvent::PromptRendered { tokens }),
        (finish, 0usize..25, 0usize..110).prop_map(|(f, s, t)| generated(f, s, t)),
        Just(EpisodeEvent::ContextFull { error: "x".to_owned() }),
        (any::<bool>(), 0usize..120).prop_map(|(s, t)| acted(s, t)),
        Just(EpisodeEvent::AgentEnded { truncated_by: None }),
        Just(EpisodeEvent::Returned { reward: 1.0, truncated_by: None }),
        Just(EpisodeEvent::Graded { reward: 1.0 }),
        Just(EpisodeEvent::ChangeTooLarge),
        Just(EpisodeEvent::SandboxDamaged { what: "x".to_owned() }),
        Just(EpisodeEvent::TimeUp),
        Just(EpisodeEvent::StopRequested),
        Just(EpisodeEvent::Failed { stage: Stage::Grade, error: "x".to_owned() }),
    ]
}

proptest! {
    /// Whatever events come: every legal step is a row of the table, a generation always has room,
    /// turns stay below the limit, and `Ended` is final.
    #[test]
    fn prop_random_episodes_follow_the_table(
        kind in 0..3,
        events in prop::collection::vec(any_event(), 0..60),
    ) {
        let (mut machine, first) = match kind {
            0 => EpisodeMachine::new(LIMITS),
            1 => EpisodeMachine::with_agent(LIMITS),
            _ => EpisodeMachine::external(LIMITS),
        };
        let is_external = first == EpisodeCommand::Offer;
        prop_assert_eq!(is_external, kind == 2);
        prop_assert!(is_external || first == EpisodeCommand::OpenSandbox);
        for event in events {
            let from = machine.phase().clone();
            match machine.step(event.clone()) {
                Err(_) => prop_assert_eq!(machine.phase(), &from),
                Ok(command) => {
                    prop_assert!(!matches!(from, EpisodePhase::Ended(_)));
                    if let EpisodeCommand::Generate { turn, max_new_tokens, .. } = command {
                        prop_assert!(turn < LIMITS.max_turns);
                        prop_assert!((1..=LIMITS.max_response_tokens).contains(&max_new_tokens));
                    }
                    let row = row_name(&from, &event, machine.phase(), &command);
                    prop_assert!(row.is_some(), "{:?} {:?} {:?}", from, event, machine.phase());
                }
            }
        }
    }
}

#[test]
fn a_reward_out_of_range_breaks_the_episode_that_it_is_given_for() {
    for reward in [37.0, -1.0, 1.000_000_1, f64::NAN, f64::INFINITY] {
        for (phase, event) in [
            (EpisodePhase::Grading { truncated_by: None }, EpisodeEvent::Graded { reward }),
            (truncated_by(Limit::Turns), EpisodeEvent::Graded { reward }),
            (
                EpisodePhase::AgentRunning,
                EpisodeEvent::Returned { reward, truncated_by: Some(Limit::Turns) },
            ),
        ] {
            let mut machine = EpisodeMachine { limits: LIMITS, has_agent: false, phase };
            let EpisodeCommand::Finish(Outcome::Broken { stage, error }) =
                machine.step(event).unwrap()
            else {
                panic!("{reward}");
            };
            assert_eq!(stage, Stage::Grade);
            assert!(error.contains("not from 0 to 1"), "{error}");
        }
    }
}
