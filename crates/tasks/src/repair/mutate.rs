//! Small faults put into Python source, each as an edit of one span.
//!
//! The invariant: every byte outside the span is as it was, and the changed text parses. What a
//! mutant does to the tests is unknown before they have run.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use tree_sitter::{Node, Parser};

/// A way to break code, and the bug family of a task made with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// `<` for `>`, `==` for `!=`, `in` for `not in`, `is` for `is not`.
    Comparison,
    /// `<` for `<=`, `>` for `>=`.
    Boundary,
    /// `+` for `-`, `*` for `//` and the like, also in `+=`.
    Arithmetic,
    /// `and` for `or`.
    BooleanOperator,
    /// An index, a slice's end or an argument of `range` that is one too high or too low.
    OffByOne,
    /// Another number, or `True` for `False`.
    Constant,
    /// The first two arguments of a call in each other's place.
    SwappedArguments,
    /// A condition turned round.
    NegatedCondition,
    /// An `if`, `elif` or `else` that is gone.
    DroppedBranch,
    /// A parameter or local variable where another one belongs.
    WrongVariable,
    /// A value that is computed and not returned.
    DroppedReturn,
    /// A call or an addition in place that is not made.
    DroppedStatement,
    /// `break` for `continue`.
    LoopControl,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 13] = [
        Self::Comparison,
        Self::Boundary,
        Self::Arithmetic,
        Self::BooleanOperator,
        Self::OffByOne,
        Self::Constant,
        Self::SwappedArguments,
        Self::NegatedCondition,
        Self::DroppedBranch,
        Self::WrongVariable,
        Self::DroppedReturn,
        Self::DroppedStatement,
        Self::LoopControl,
    ];

    /// Its name, as [`crate::Task::family`] has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Comparison => "comparison",
            Self::Boundary => "boundary",
            Self::Arithmetic => "arithmetic",
            Self::BooleanOperator => "boolean_operator",
            Self::OffByOne => "off_by_one",
            Self::Constant => "constant",
            Self::SwappedArguments => "swapped_arguments",
            Self::NegatedCondition => "negated_condition",
            Self::DroppedBranch => "dropped_branch",
            Self::WrongVariable => "wrong_variable",
            Self::DroppedReturn => "dropped_return",
            Self::DroppedStatement => "dropped_statement",
            Self::LoopControl => "loop_control",
        }
    }
}

/// One possible change of a source text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mutant {
    /// What it does.
    pub fault: Fault,
    /// Bytes that it replaces.
    pub span: Range<usize>,
    /// What stands there instead.
    pub replacement: String,
    /// Line on which the span begins, from 0.
    pub line: usize,
    /// The function it is in, with the names around it: `Class.method`.
    pub function: String,
}

impl Mutant {
    /// `source` with the change made; `None` if that is another text than the one it was found in.
    pub fn apply(&self, source: &str) -> Option<String> {
        let (before, after) = (source.get(..self.span.start)?, source.get(self.span.end..)?);
        Some([before, &self.replacement, after].concat())
    }
}

/// All mutants of `source`, in the order of the text: those inside of functions, as a module that
/// cannot be imported breaks every test and says nothing. Empty where the text is not Python.
pub fn mutants(source: &str) -> Vec<Mutant> {
    let Some(mut parser) = python() else { return Vec::new() };
    let Some(tree) = parser.parse(source, None).filter(|tree| !tree.root_node().has_error()) else {
        return Vec::new();
    };
    let mut finder = Finder { source, found: Vec::new() };
    let mut open = vec![(tree.root_node(), Rc::new(Place::default()))];
    while let Some((node, around)) = open.pop() {
        let place = finder.enter(node, &around).map_or(around, Rc::new);
        if !place.function.is_empty() {
            finder.look(node, &place);
        }
        let mut cursor = node.walk();
        let inner = node.children(&mut cursor).filter(|inner| !is_opaque(*inner));
        open.extend(inner.map(|inner| (inner, Rc::clone(&place))));
    }
    let mut found = finder.found;
    found.retain(|mutant| {
        let parses = |text: String| parser.parse(text, None).map(|t| !t.root_node().has_error());
        mutant.apply(source).and_then(parses) == Some(true)
    });
    found.sort_by(|a, b| {
        let key = |m: &Mutant| (m.span.start, m.span.end, m.fault);
        key(a).cmp(&key(b)).then_with(|| a.replacement.cmp(&b.replacement))
    });
    found
}

fn python() -> Option<Parser> {
    let mut parser = Parser::new();
    parser.set_language(&tree_sitter_python::LANGUAGE.into()).ok()?;
    Some(parser)
}

/// What no mutant is looked for in: annotations do not run, decorators make what a function is, and
/// quotes inside an f-string have rules of their own.
fn is_opaque(node: Node<'_>) -> bool {
    matches!(node.kind(), "type" | "decorator" | "string" | "comment" | "type_parameter")
}

/// Where in a text a node stands.
#[derive(Debug, Clone, Default)]
struct Place {
    scope: String,
    /// Empty outside of functions.
    function: String,
    /// Parameters and local variables of the function, with where each first has a value.
    names: BTreeSet<(String, usize)>,
}

struct Finder<'a> {
    source: &'a str,
    found: Vec<Mutant>,
}

impl<'a> Finder<'a> {
    fn text(&self, node: Node<'_>) -> &'a str {
        self.source.get(node.byte_range()).unwrap_or_default()
    }

    fn field(&self, node: Node<'_>, field: &str) -> &'a str {
        node.child_by_field_name(field).map_or("", |child| self.text(child))
    }

    /// The place inside of `node`, if that is another one.
    fn enter(&self, node: Node<'_>, around: &Place) -> Option<Place> {
        let is_function = node.kind() == "function_definition";
        if !is_function && node.kind() != "class_definition" {
            return None;
        }
        let mut place = around.clone();
        if !place.scope.is_empty() {
            place.scope.push('.');
        }
        place.scope.push_str(self.field(node, "name"));
        if is_function {
            place.function.clone_from(&place.scope);
            place.names = self.names(node);
        }
        Some(place)
    }

    /// Names that have a value in `function`, each with the byte from which on it has one.
    fn names(&self, function: Node<'_>) -> BTreeSet<(String, usize)> {
        let mut names = BTreeSet::new();
        if let Some(parameters) = function.child_by_field_name("parameters") {
            let mut cursor = parameters.walk();
            for parameter in parameters.named_children(&mut cursor) {
                let name = match parameter.kind() {
                    "identifier" => self.text(parameter),
                    "default_parameter" | "typed_default_parameter" => {
                        self.field(parameter, "name")
                    }
                    "typed_parameter" => {
                        parameter.named_child(0).map_or("", |name| self.text(name))
                    }
                    _ => "",
                };
                if !matches!(name, "" | "self" | "cls") && !name.starts_with('*') {
                    names.insert((name.to_owned(), parameter.end_byte()));
                }
            }
        }
        let mut open: Vec<Node<'_>> = function.child_by_field_name("body").into_iter().collect();
        while let Some(node) = open.pop() {
            if matches!(node.kind(), "function_definition" | "class_definition" | "lambda") {
                continue;
            }
            if node.kind() == "assignment"
                && let Some(left) = node.child_by_field_name("left")
                && left.kind() == "identifier"
            {
                names.insert((self.text(left).to_owned(), node.end_byte()));
            }
            let mut cursor = node.walk();
            open.extend(node.named_children(&mut cursor));
        }
        names
    }

    fn put(
        &mut self,
        fault: Fault,
        span: Range<usize>,
        text: impl Into<String>,
        at: (&Place, Node<'_>),
    ) {
        let (place, node) = at;
        self.found.push(Mutant {
            fault,
            span,
            replacement: text.into(),
            line: node.start_position().row,
            function: place.function.clone(),
        });
    }

    fn look(&mut self, node: Node<'_>, place: &Place) {
        let at = (place, node);
        match node.kind() {
            "comparison_operator" => self.comparison(node, place),
            "binary_operator" | "augmented_assignment" | "boolean_operator" => {
                self.operator(node, place);
            }
            "integer" | "float" | "true" | "false" => self.constant(node, place),
            "argument_list" => self.arguments(node, place),
            "if_statement" | "elif_clause" | "conditional_expression" => {
                self.condition(node, place);
                self.branch(node, place);
            }
            "else_clause" => self.branch(node, place),
            "identifier" => self.variable(node, place),
            "return_statement" => {
                if let Some(value) = node.named_child(0) {
                    self.put(Fault::DroppedReturn, node.start_byte()..value.start_byte(), "", at);
                }
            }
            "expression_statement" => {
                let kind = node.named_child(0).map_or("", |inner| inner.kind());
                if matches!(kind, "call" | "augmented_assignment") {
                    self.put(Fault::DroppedStatement, node.byte_range(), "pass", at);
                }
            }
            "continue_statement" => self.put(Fault::LoopControl, node.byte_range(), "break", at),
            _ => {}
        }
    }

    fn comparison(&mut self, node: Node<'_>, place: &Place) {
        let mut cursor = node.walk();
        let operators: Vec<Node<'_>> =
            node.children_by_field_name("operators", &mut cursor).collect();
        for operator in operators {
            let text = self.text(operator);
            let words: Vec<&str> = text.split_whitespace().collect();
            let (other, neighbour) = match words.as_slice() {
                ["<"] => (">", Some("<=")),
                [">"] => ("<", Some(">=")),
                ["<="] => (">=", Some("<")),
                [">="] => ("<=", Some(">")),
                ["=="] => ("!=", None),
                ["!="] => ("==", None),
                ["in"] => ("not in", None),
                ["not", "in"] => ("in", None),
                ["is"] => ("is not", None),
                ["is", "not"] => ("is", None),
                _ => continue,
            };
            self.put(Fault::Comparison, operator.byte_range(), other, (place, operator));
            if let Some(neighbour) = neighbour {
                self.put(Fault::Boundary, operator.byte_range(), neighbour, (place, operator));
            }
        }
    }

    fn operator(&mut self, node: Node<'_>, place: &Place) {
        let Some(operator) = node.child_by_field_name("operator") else { return };
        let text = self.text(operator);
        let is_format = node
            .child_by_field_name("left")
            .is_some_and(|left| matches!(left.kind(), "string" | "concatenated_string"));
        let (fault, other) = match text.trim_end_matches('=') {
            "and" => (Fault::BooleanOperator, "or"),
            "or" => (Fault::BooleanOperator, "and"),
            "+" => (Fault::Arithmetic, "-"),
            "-" => (Fault::Arithmetic, "+"),
            "*" => (Fault::Arithmetic, "//"),
            "/" | "**" => (Fault::Arithmetic, "*"),
            "//" => (Fault::Arithmetic, "%"),
            // Of a text it makes a text: no arithmetic.
            "%" if !is_format => (Fault::Arithmetic, "//"),
            "&" => (Fault::Arithmetic, "|"),
            "|" | "^" => (Fault::Arithmetic, "&"),
            "<<" => (Fault::Arithmetic, ">>"),
            ">>" => (Fault::Arithmetic, "<<"),
            _ => return,
        };
        let other = if text.ends_with('=') { format!("{other}=") } else { other.to_owned() };
        self.put(fault, operator.byte_range(), other, (place, operator));
    }

    fn constant(&mut self, node: Node<'_>, place: &Place) {
        let (text, at) = (self.text(node), (place, node));
        let fault =
            if counts_places(node, self.source) { Fault::OffByOne } else { Fault::Constant };
        match node.kind() {
            "true" => self.put(fault, node.byte_range(), "False", at),
            "false" => self.put(fault, node.byte_range(), "True", at),
            "float" => self.put(fault, node.byte_range(), format!("({text} + 1)"), at),
            _ => match text.parse::<i64>() {
                Ok(number) => {
                    self.put(fault, node.byte_range(), number.saturating_add(1).to_string(), at);
                    // Never negative: in front of it may stand an operator.
                    if number > 0 {
                        self.put(fault, node.byte_range(), (number - 1).to_string(), at);
                    }
                }
                Err(_) => self.put(fault, node.byte_range(), format!("({text} + 1)"), at),
            },
        }
    }

    fn arguments(&mut self, node: Node<'_>, place: &Place) {
        let mut cursor = node.walk();
        let arguments: Vec<Node<'_>> = node.named_children(&mut cursor).take(2).collect();
        let [first, second] = arguments.as_slice() else { return };
        let is_plain = |argument: &Node<'_>| {
            !matches!(
                argument.kind(),
                "keyword_argument" | "list_splat" | "dictionary_splat" | "comment"
            )
        };
        let (a, b) = (self.text(*first), self.text(*second));
        if is_plain(first) && is_plain(second) && a != b {
            let between =
                self.source.get(first.end_byte()..second.start_byte()).unwrap_or_default();
            let span = first.start_byte()..second.end_byte();
            self.put(Fault::SwappedArguments, span, format!("{b}{between}{a}"), (place, *first));
        }
    }

    fn condition(&mut self, node: Node<'_>, place: &Place) {
        let condition = match node.kind() {
            // `VALUE if CONDITION else VALUE`, without names for its parts.
            "conditional_expression" => node.named_child(1),
            _ => node.child_by_field_name("condition"),
        };
        let Some(condition) = condition else { return };
        let turned = match condition.kind() {
            "not_operator" => self.field(condition, "argument").to_owned(),
            _ => format!("not ({})", self.text(condition)),
        };
        self.put(Fault::NegatedCondition, condition.byte_range(), turned, (place, condition));
    }

    fn branch(&mut self, node: Node<'_>, place: &Place) {
        let at = (place, node);
        match node.kind() {
            "if_statement" if node.child_by_field_name("alternative").is_none() => {
                self.put(Fault::DroppedBranch, node.byte_range(), "pass", at);
            }
            "elif_clause" | "else_clause" => {
                let is_if = node.parent().is_some_and(|parent| parent.kind() == "if_statement");
                if is_if && let Some(before) = node.prev_sibling() {
                    self.put(Fault::DroppedBranch, before.end_byte()..node.end_byte(), "", at);
                }
            }
            _ => {}
        }
    }

    fn variable(&mut self, node: Node<'_>, place: &Place) {
        let name = self.text(node);
        if !place.names.iter().any(|(known, _)| known == name) || !is_read(node) {
            return;
        }
        let has_value = |from: &usize| *from < node.start_byte();
        let others: BTreeSet<&String> = place
            .names
            .iter()
            .filter(|(other, from)| other != name && has_value(from))
            .map(|(other, _)| other)
            .collect();
        for other in others {
            self.put(Fault::WrongVariable, node.byte_range(), other.as_str(), (place, node));
        }
    }
}

/// Whether a number says which or how many: in a subscript, a slice or the arguments of `range`.
fn counts_places(node: Node<'_>, source: &str) -> bool {
    let mut at = node.parent();
    while let Some(outer) = at {
        match outer.kind() {
            "unary_operator" | "binary_operator" | "slice" => at = outer.parent(),
            "subscript" => {
                let value = outer.child_by_field_name("value");
                return value.is_none_or(|value| value.end_byte() <= node.start_byte());
            }
            "argument_list" => {
                let function = outer.parent().and_then(|call| call.child_by_field_name("function"));
                return function.and_then(|f| source.get(f.byte_range())) == Some("range");
            }
            _ => return false,
        }
    }
    false
}

/// Whether the value of this name is used here, and nothing else is meant by it.
fn is_read(node: Node<'_>) -> bool {
    let Some(parent) = node.parent() else { return false };
    let is = |field: &str| parent.child_by_field_name(field) == Some(node);
    match parent.kind() {
        "attribute" => is("object"),
        "keyword_argument" | "default_parameter" | "typed_default_parameter" => is("value"),
        "assignment" | "augmented_assignment" | "for_statement" | "for_in_clause" => is("right"),
        "comparison_operator"
        | "binary_operator"
        | "boolean_operator"
        | "not_operator"
        | "unary_operator"
        | "argument_list"
        | "subscript"
        | "slice"
        | "return_statement"
        | "conditional_expression"
        | "if_statement"
        | "elif_clause"
        | "list"
        | "tuple"
        | "expression_list"
        | "parenthesized_expression"
        | "yield"
        | "pair"
        | "list_splat"
        | "list_comprehension"
        | "generator_expression" => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
