//! One task before it is written down: two functions, the bug, and the arguments.
//!
//! The invariant: the example and at least one hidden test tell the right expression from the
//! bug, and for every other expression of the family some hidden test tells it from the right one.

use super::draw::Draw;
use super::families::{CATALOG, Choice, Family, fill};
use super::value::Value;
use super::words;
use crate::task::Split;

/// Longest module, in lines.
const MAX_LINES: usize = 9;
/// Hidden tests of the broken function.
const TESTS: std::ops::RangeInclusive<usize> = 3..=6;
/// Attempts to find arguments that tell expressions apart.
const ATTEMPTS: usize = 300;

/// A call and what it must return.
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
    /// Whether a plain function is written with a variable.
    pub(super) variable: bool,
}

impl Function {
    fn draw(d: &mut Draw<'_>, family: &'static Family, held_out: bool) -> Option<Self> {
        let phrased: Vec<_> = family.phrased().collect();
        let choice = phrased.get(d.below(phrased.len())).copied()?;
        let mut params: Vec<&'static str> = Vec::new();
        for pool in family.params {
            let free: Vec<_> = pool.iter().copied().filter(|name| !params.contains(name)).collect();
            params.push(d.one(&free));
        }
        let variable = family.is_plain() && d.chance(50);
        Some(Self { family, name: d.function_name(held_out), params, choice, variable })
    }

    /// Its lines with `choice` in the interesting one, and the position of that one.
    pub(super) fn lines(&self, choice: &Choice) -> (Vec<String>, usize) {
        let mut lines = vec![format!("def {}({}):", self.name, self.params.join(", "))];
        let put = |line: &str| {
            let whole = line.replace("{c}", choice.code);
            format!("    {}", fill(&whole, &self.params))
        };
        lines.extend(self.family.before.iter().map(|line| put(line)));
        let at = lines.len();
        if self.variable {
            lines.extend([put("out = {c}"), put("return out")]);
        } else {
            lines.push(put(self.family.line));
        }
        lines.extend(self.family.after.iter().map(|line| put(line)));
        (lines, at)
    }

    fn case(&self, d: &mut Draw<'_>) -> Option<Case> {
        let args = (self.family.args)(d);
        let want = (self.choice.run)(&args)?;
        Some(Case { args, want })
    }

    /// Hidden tests: new arguments that tell `choice` from every other expression.
    fn hidden(&self, d: &mut Draw<'_>, example: &Case) -> Option<Vec<Case>> {
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
            // Room is kept for the cases that tell the rest apart.
            if left.len() < before || left.is_empty() || cases.len() + 1 < *TESTS.start() {
                cases.push(case);
            }
        }
        (left.is_empty() && cases.len() >= *TESTS.start()).then_some(cases)
    }
}

/// A task in parts.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) file: String,
    /// In the order of the module.
    pub(super) functions: [Function; 2],
    /// Which of them is broken.
    pub(super) broken: usize,
    /// The expression that stands there.
    pub(super) bug: &'static Choice,
    /// What that returns for the example.
    pub(super) got: Value,
    /// One visible case per function.
    pub(super) examples: [Case; 2],
    /// Hidden cases per function.
    pub(super) hidden: [Vec<Case>; 2],
}

impl Instance {
    /// Draws a task of `split`; `None` if the draw did not work out and another one is due.
    pub(super) fn draw(d: &mut Draw<'_>, split: Split) -> Option<Self> {
        let held_out = split != Split::Train;
        let unseen = split == Split::HeldOutFamilies;
        let pick = |d: &mut Draw<'_>, unseen: bool, not: &str| {
            let pool: Vec<&'static Family> = CATALOG
                .iter()
                .filter(|family| family.held_out == unseen && family.name != not)
                .collect();
            pool.get(d.below(pool.len())).copied()
        };
        let family = pick(d, unseen, "")?;
        let faulty = Function::draw(d, family, held_out)?;
        let other = pick(d, false, family.name)?;
        let other = Function::draw(d, other, held_out)?;
        let bugs: Vec<_> =
            family.choices.iter().filter(|bug| bug.code != faulty.choice.code).collect();
        let bug = *bugs.get(d.below(bugs.len()))?;
        let file = format!("{}.py", d.one(words::FILES));
        let broken = d.below(2);

        let lines = |function: &Function| function.lines(function.choice).0.len();
        if lines(&faulty) + lines(&other) + 1 > MAX_LINES || faulty.name == other.name {
            return None;
        }
        let mut example = None;
        for _ in 0..ATTEMPTS {
            let case = faulty.case(d)?;
            let got = (bug.run)(&case.args)?;
            if got != case.want {
                example = Some((case, got));
                break;
            }
        }
        let (example, got) = example?;
        let hidden = faulty.hidden(d, &example)?;
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
            functions: if broken == 0 { [faulty, other] } else { [other, faulty] },
        })
    }

    /// The functions with their example and hidden cases, and whether they are broken.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&Function, &Case, &[Case], bool)> {
        let cases = self.examples.iter().zip(&self.hidden);
        self.functions.iter().zip(cases).enumerate().map(|(n, (function, (example, hidden)))| {
            (function, example, hidden.as_slice(), n == self.broken)
        })
    }

    /// The module, with the bug or repaired.
    pub(super) fn module(&self, repaired: bool) -> String {
        let functions = self.parts().map(|(function, _, _, broken)| {
            let choice = if broken && !repaired { self.bug } else { function.choice };
            function.lines(choice).0.join("\n")
        });
        format!("{}\n", functions.collect::<Vec<_>>().join("\n\n"))
    }
}
