use super::*;
use proptest::prelude::*;

/// The body of a function as each mutant of `fault` changes it.
fn changed(fault: Fault, parameters: &str, body: &str) -> Vec<String> {
    let body = body.replace('\n', "\n    ");
    let source = format!("def f({parameters}):\n    {body}\n");
    let body_start = source.find(":\n    ").unwrap() + ":\n    ".len();
    let of_fault = mutants(&source).into_iter().filter(|mutant| mutant.fault == fault);
    of_fault
        .map(|mutant| {
            let text = mutant.apply(&source).unwrap();
            assert_eq!(text[..mutant.span.start], source[..mutant.span.start]);
            assert!(text.ends_with(&source[mutant.span.end..]));
            text[body_start..].trim_end().replace("\n    ", "\n")
        })
        .collect()
}

#[test]
fn comparisons_are_inverted() {
    let found = changed(Fault::Comparison, "", "return g() < 1 or h() == 2 in k()");
    assert_eq!(
        found,
        [
            "return g() > 1 or h() == 2 in k()",
            "return g() < 1 or h() != 2 in k()",
            "return g() < 1 or h() == 2 not in k()",
        ]
    );
    assert_eq!(changed(Fault::Comparison, "", "return g() is not None"), ["return g() is None"]);
}

#[test]
fn boundaries_gain_or_lose_the_equal_case() {
    assert_eq!(
        changed(Fault::Boundary, "", "return 0 < g() <= 9"),
        ["return 0 <= g() <= 9", "return 0 < g() < 9"]
    );
    assert!(changed(Fault::Boundary, "", "return g() == 1").is_empty());
}

#[test]
fn arithmetic_operators_are_replaced_but_not_string_formatting() {
    assert_eq!(
        changed(Fault::Arithmetic, "", "return g() + h() * 2"),
        ["return g() - h() * 2", "return g() + h() // 2"]
    );
    assert_eq!(changed(Fault::Arithmetic, "n", "n += 1"), ["n -= 1"]);
    assert_eq!(changed(Fault::Arithmetic, "n", "n //= 2"), ["n %= 2"]);
    assert!(changed(Fault::Arithmetic, "", "return '%s' % g()").is_empty());
}

#[test]
fn boolean_operators_are_exchanged() {
    assert_eq!(
        changed(Fault::BooleanOperator, "", "return g() and h() or k()"),
        ["return g() or h() or k()", "return g() and h() and k()"]
    );
}

#[test]
fn positions_are_off_by_one_and_other_numbers_are_constants() {
    let body = "return [g[1:-2], range(3), 4.5, True]";
    assert_eq!(
        changed(Fault::OffByOne, "g", body),
        [
            "return [g[0:-2], range(3), 4.5, True]",
            "return [g[2:-2], range(3), 4.5, True]",
            "return [g[1:-1], range(3), 4.5, True]",
            "return [g[1:-3], range(3), 4.5, True]",
            "return [g[1:-2], range(2), 4.5, True]",
            "return [g[1:-2], range(4), 4.5, True]",
        ]
    );
    assert_eq!(
        changed(Fault::Constant, "g", body),
        ["return [g[1:-2], range(3), (4.5 + 1), True]", "return [g[1:-2], range(3), 4.5, False]",]
    );
    assert_eq!(changed(Fault::Constant, "", "return 0x1F"), ["return (0x1F + 1)"]);
}

#[test]
fn the_first_two_arguments_are_swapped() {
    assert_eq!(changed(Fault::SwappedArguments, "", "g(h(1),  k, 3)"), ["g(k,  h(1), 3)"]);
    for body in ["g(a, *b)", "g(1, key=2)", "g(a, a)", "g(a)"] {
        assert!(changed(Fault::SwappedArguments, "", body).is_empty(), "{body}");
    }
}

#[test]
fn conditions_are_negated() {
    assert_eq!(
        changed(Fault::NegatedCondition, "", "if g():\n    return 1\nelif not h():\n    return 2"),
        [
            "if not (g()):\n    return 1\nelif not h():\n    return 2",
            "if g():\n    return 1\nelif h():\n    return 2",
        ]
    );
    assert_eq!(
        changed(Fault::NegatedCondition, "", "return 1 if g() else 2"),
        ["return 1 if not (g()) else 2"]
    );
    assert!(changed(Fault::NegatedCondition, "", "while g():\n    h()").is_empty());
}

#[test]
fn whole_branches_are_dropped() {
    let body = "if g():\n    return 1\nelif h():\n    return 2\nelse:\n    return 3";
    assert_eq!(
        changed(Fault::DroppedBranch, "", body),
        [
            "if g():\n    return 1\nelse:\n    return 3",
            "if g():\n    return 1\nelif h():\n    return 2",
        ]
    );
    assert_eq!(changed(Fault::DroppedBranch, "", "if g():\n    h()\nk()"), ["pass\nk()"]);
    assert!(changed(Fault::DroppedBranch, "", "for a in b:\n    c()\nelse:\n    d()").is_empty());
}

#[test]
fn a_variable_is_replaced_by_another_that_has_a_value() {
    assert_eq!(
        changed(Fault::WrongVariable, "self, a, b=1", "c = a + 1\nreturn self.a(c)"),
        [
            "c = b + 1\nreturn self.a(c)",
            "c = a + 1\nreturn self.a(a)",
            "c = a + 1\nreturn self.a(b)"
        ]
    );
    // Assigned names and the names of keywords, attributes and functions are not replaced.
    assert!(changed(Fault::WrongVariable, "a, b", "a = 1\ng(a=1)\nx.a\na()").is_empty());
}

#[test]
fn a_return_is_dropped_and_its_value_still_computed() {
    assert_eq!(changed(Fault::DroppedReturn, "", "return g(\n  1)"), ["g(\n  1)"]);
    assert!(changed(Fault::DroppedReturn, "", "return").is_empty());
}

#[test]
fn statements_that_change_something_are_dropped() {
    assert_eq!(
        changed(Fault::DroppedStatement, "n", "n += 1\ng(n)\nx = 1"),
        ["pass\ng(n)\nx = 1", "n += 1\npass\nx = 1"]
    );
    assert!(changed(Fault::DroppedStatement, "", "'''what it does'''").is_empty());
}

#[test]
fn continue_becomes_break() {
    assert_eq!(
        changed(Fault::LoopControl, "", "for a in b:\n    continue"),
        ["for a in b:\n    break"]
    );
}

#[test]
fn fault_names_are_distinct() {
    let names: BTreeSet<&str> = Fault::ALL.iter().map(|fault| fault.name()).collect();
    assert_eq!(names.len(), Fault::ALL.len());
}

#[test]
fn module_level_code_annotations_decorators_and_strings_are_unchanged() {
    let source = "LIMIT = 1 + 2\nclass A:\n    n = 3\n\n    @mark(1 < 2)\n    def f(self, a: x[1]) -> y[2]:\n        return f'{1 + 2}'\n";
    let found = mutants(source);
    assert!(found.iter().all(|mutant| mutant.fault == Fault::DroppedReturn), "{found:?}");
    assert_eq!(found[0].function, "A.f");
    assert_eq!(found[0].line, 6);
}

#[test]
fn invalid_python_has_no_mutants() {
    assert!(mutants("def f(:\n  return 1 +").is_empty());
    assert!(mutants("\u{0}\u{feff}}{").is_empty());
}

proptest! {
    #[test]
    fn prop_mutants_of_any_text_change_only_their_span(
        pieces in proptest::collection::vec(
            prop_oneof![
                "[ -~\n]{0,12}",
                Just("def f(a, b):\n    ".to_owned()),
                Just("if a < b:\n        return 1\n    else:\n        g(a, b)\n    ".to_owned()),
                Just("é += a[1:]\n".to_owned()),
            ],
            0..8,
        )
    ) {
        let source = pieces.concat();
        for mutant in mutants(&source) {
            let changed = mutant.apply(&source).unwrap();
            prop_assert_ne!(&changed, &source);
            prop_assert_eq!(&changed[..mutant.span.start], &source[..mutant.span.start]);
            prop_assert!(changed.ends_with(&source[mutant.span.end..]));
        }
    }
}

#[test]
fn mutants_of_a_long_file_are_those_that_parse_on_their_own() {
    let body = "def f(a, b):\n    if a < b and b:\n        return a + 1\n    elif a:\n        return \
                \"\"\"x\n\"\"\"\n    else:\n        for i in range(b):\n            a -= i\n            \
                break\n    return g(a, b)\n\n\n";
    let source = body.repeat(40);
    let found = mutants(&source);
    let alone = mutants(body);
    assert_eq!(found.len(), 40 * alone.len());
    let mut parser = python_parser().unwrap();
    for mutant in found.iter().step_by(7) {
        let text = mutant.apply(&source).unwrap();
        assert!(!parser.parse(&text, None).unwrap().root_node().has_error(), "{mutant:?}");
    }
}
