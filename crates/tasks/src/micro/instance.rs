//! The parts of a task before they are rendered: two functions, the bug, and the arguments.
//!
//! The invariant: the example distinguishes the correct expression from the bug, and the hidden
//! tests distinguish it from every other expression of the family.

use super::draw::Draw;
use super::families::{CATALOG, Choice, Family, fill};
use super::value::Value;
use super::words;
use crate::task::Split;

/// Maximum number of lines of a module.
const MAX_LINES: usize = 9;
/// Number of hidden tests of the broken function.
const TESTS: std::ops::RangeInclusive<usize> = 3..=6;
/// Maximum number of draws of arguments that distinguish expressions.
const ATTEMPTS: usize = 300;

/// The arguments of a call and the value that it must return.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Case {
    pub(super) args: Vec<Value>,
    pub(super) want: Value,
}

/// A function of the module.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) family: &'static Family,
    pub(super) name: String,
    pub(super) params: Vec<&'static str>,
    pub(super) choice: &'static Choice,
    /// Whether the result is assigned to a variable before it is returned.
    pub(super) variable: bool,
}

impl Function {
    fn draw(d: &mut Draw<'_>, family: &'static Family, held_out: bool) -> Option<Self> {
        let phrased: Vec<_> = family.phrased().collect();
        let choice = phrased.get(d.below(phrased.len())).copied()?;
        let mut params: Vec<&'static str> = Vec::new();
        for pool in family.params {
            let free: Vec<_> = pool.iter().copied().filter(|name| !params.contains(name)).collect();
            params.push(d.choose(&free));
        }
        let variable = family.is_plain() && d.chance(50);
        Some(Self { family, name: d.function_name(held_out), params, choice, variable })
    }

    /// The function's lines with the expression of `choice` in the target line, and the index of
    /// that line.
    pub(super) fn lines(&self, choice: &Choice) -> (Vec<String>, usize) {
        let mut lines = vec![format!("def {}({}):", self.name, self.params.join(", "))];
        let render = |line: &str| {
            let whole = line.replace("{c}", choice.code);
            format!("    {}", fill(&whole, &self.params))
        };
        lines.extend(self.family.before.iter().map(|line| render(line)));
        let at = lines.len();
        if self.variable {
            lines.extend([render("out = {c}"), render("return out")]);
        } else {
            lines.push(render(self.family.line));
        }
        lines.extend(self.family.after.iter().map(|line| render(line)));
        (lines, at)
    }

    fn case(&self, d: &mut Draw<'_>) -> Option<Case> {
        let args = (self.family.args)(d);
        let want = (self.choice.run)(&args)?;
        Some(Case { args, want })
    }

    /// Draws hidden tests that distinguish the function's expression from every other one of its
    /// family; `None` if too few were found.
    fn draw_hidden(&self, d: &mut Draw<'_>, example: &Case) -> Option<Vec<Case>> {
        let mut left: Vec<&Choice> =
            self.family.choices.iter().filter(|other| other.code != self.choice.code).collect();
        let mut cases: Vec<Case> = Vec::new();
        for _ in 0..ATTEMPTS {
            if left.is_empty() && cases.len() >= *TESTS.start() || cases.len() == *TESTS.end() {
                break;
            }
            let case = self.case(d)?;
            if case.args == example.args || cases.contains(&case) {
                continue;
            }
            let before = left.len();
            left.retain(|other| (other.run)(&case.args).as_ref() == Some(&case.want));
            // A case that distinguishes nothing more is added only up to the minimum, so that there
            // is space for those that do.
            if left.len() < before || left.is_empty() || cases.len() + 1 < *TESTS.start() {
                cases.push(case);
            }
        }
        (left.is_empty() && cases.len() >= *TESTS.start()).then_some(cases)
    }
}

/// The parts of one task.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) file: String,
    /// The functions, in the order of the module.
    pub(super) functions: [Function; 2],
    /// Index of the broken function.
    pub(super) broken: usize,
    /// The wrong expression in the broken function.
    pub(super) bug: &'static Choice,
    /// What the broken function returns for its example.
    pub(super) got: Value,
    /// One visible case per function.
    pub(super) examples: [Case; 2],
    /// Hidden cases per function.
    pub(super) hidden: [Vec<Case>; 2],
}

impl Instance {
    /// Draws a task of `split`; `None` if the parts do not fit together, after which the caller
    /// draws again.
    pub(super) fn draw(d: &mut Draw<'_>, split: Split) -> Option<Self> {
        let held_out = split != Split::Train;
        let unseen = split == Split::HeldOutFamilies;
        let draw_family = |d: &mut Draw<'_>, unseen: bool, except: &str| {
            let pool: Vec<&'static Family> = CATALOG
                .iter()
                .filter(|family| family.held_out == unseen && family.name != except)
                .collect();
            pool.get(d.below(pool.len())).copied()
        };
        let family = draw_family(d, unseen, "")?;
        let broken_function = Function::draw(d, family, held_out)?;
        let other = draw_family(d, false, family.name)?;
        let other = Function::draw(d, other, held_out)?;
        let bugs: Vec<_> =
            family.choices.iter().filter(|bug| bug.code != broken_function.choice.code).collect();
        let bug = *bugs.get(d.below(bugs.len()))?;
        let file = format!("{}.py", d.choose(words::FILES));
        let broken = d.below(2);

        let lines = |function: &Function| function.lines(function.choice).0.len();
        if lines(&broken_function) + lines(&other) + 1 > MAX_LINES
            || broken_function.name == other.name
        {
            return None;
        }
        let mut example = None;
        for _ in 0..ATTEMPTS {
            let case = broken_function.case(d)?;
            let got = (bug.run)(&case.args)?;
            if got != case.want {
                example = Some((case, got));
                break;
            }
        }
        let (example, got) = example?;
        let hidden = broken_function.draw_hidden(d, &example)?;
        let other_example = other.case(d)?;
        let other_hidden = vec![other.case(d)?, other.case(d)?];
        let ordered = |first, second| if broken == 0 { [first, second] } else { [second, first] };
        Some(Self {
            file,
            broken,
            bug,
            got,
            examples: ordered(example, other_example),
            hidden: if broken == 0 { [hidden, other_hidden] } else { [other_hidden, hidden] },
            functions: if broken == 0 {
                [broken_function, other]
            } else {
                [other, broken_function]
            },
        })
    }

    /// Each function with its example, its hidden cases and whether it is the broken one.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&Function, &Case, &[Case], bool)> {
        let cases = self.examples.iter().zip(&self.hidden);
        self.functions.iter().zip(cases).enumerate().map(|(n, (function, (example, hidden)))| {
            (function, example, hidden.as_slice(), n == self.broken)
        })
    }

    /// The module's source, with the bug unless `repaired`.
    pub(super) fn module(&self, repaired: bool) -> String {
        let functions = self.parts().map(|(function, _, _, broken)| {
            let choice = if broken && !repaired { self.bug } else { function.choice };
            function.lines(choice).0.join("\n")
        });
        format!("{}\n", functions.collect::<Vec<_>>().join("\n\n"))
    }
}
