//! Finds small faults that can be inserted into Python source, each as a replacement of one span.
//!
//! The invariant: bytes outside the span are unchanged, and the changed source parses. Whether
//! tests detect a mutant is known only after they have run.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use tree_sitter::{InputEdit, Node, Parser, Point};

/// A kind of fault, which is the bug family of the tasks made with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// A comparison replaced by its counterpart: `<` and `>`, `==` and `!=`, `in` and `not in`,
    /// `is` and `is not`.
    Comparison,
    /// A comparison with the equal case added or removed: `<` and `<=`, `>` and `>=`.
    Boundary,
    /// An arithmetic or bitwise operator replaced by another, also in an assignment like `+=`.
    Arithmetic,
    /// `and` replaced by `or`, or `or` by `and`.
    BooleanOperator,
    /// An integer in an index, a slice or the arguments of `range` that is one too high or too low.
    OffByOne,
    /// A number changed by one, or `True` and `False` exchanged.
    Constant,
    /// The first two arguments of a call, swapped.
    SwappedArguments,
    /// The negated condition of an `if`, an `elif` or a conditional expression.
    NegatedCondition,
    /// A removed `if` without alternatives, or a removed `elif` or `else`.
    DroppedBranch,
    /// A parameter or local variable used in place of another.
    WrongVariable,
    /// A removed `return` whose value is still computed.
    DroppedReturn,
    /// A call or an augmented assignment replaced by `pass`.
    DroppedStatement,
    /// `continue` replaced by `break`.
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

    /// The name that [`crate::Task::family`] contains.
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

/// One fault that can be inserted into a source text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mutant {
    /// Kind of the fault.
    pub fault: Fault,
    /// Range of the replaced bytes.
    pub span: Range<usize>,
    /// The text that replaces them.
    pub replacement: String,
    /// Line on which the changed code starts, from 0. The span of a removed `elif` or `else` also
    /// covers the line end before it and so starts earlier.
    pub line: usize,
    /// Qualified name of the innermost function that contains it, such as `Class.method`.
    pub function: String,
}

impl Mutant {
    /// Applies the fault to `source`, the text that it was found in. `None` if the span is not in
    /// `source`.
    pub fn apply(&self, source: &str) -> Option<String> {
        let (before, after) = (source.get(..self.span.start)?, source.get(self.span.end..)?);
        Some([before, &self.replacement, after].concat())
    }

    /// The fault as an edit of the parsed `source`.
    fn edit(&self, source: &str) -> InputEdit {
        let point = |from: Point, text: &str| match text.rsplit_once('\n') {
            Some((lines, last)) => {
                Point::new(from.row + 1 + lines.matches('\n').count(), last.len())
            }
            None => Point::new(from.row, from.column + text.len()),
        };
        let text = |range: Range<usize>| source.get(range).unwrap_or_default();
        let start = point(Point::new(0, 0), text(0..self.span.start));
        InputEdit {
            start_byte: self.span.start,
            old_end_byte: self.span.end,
            new_end_byte: self.span.start + self.replacement.len(),
            start_position: start,
            old_end_position: point(start, text(self.span.clone())),
            new_end_position: point(start, &self.replacement),
        }
    }
}

/// All mutants of `source`, sorted by position. Only code inside functions is changed, because a
/// module that cannot be imported fails every test and shows nothing. Empty if `source` does not
/// parse as Python.
pub fn mutants(source: &str) -> Vec<Mutant> {
    let Some(mut parser) = python_parser() else { return Vec::new() };
    let Some(tree) = parser.parse(source, None).filter(|tree| !tree.root_node().has_error()) else {
        return Vec::new();
    };
    let mut finder = Finder { source, found: Vec::new() };
    let mut open = vec![(tree.root_node(), Rc::new(Scope::default()))];
    while let Some((node, outer)) = open.pop() {
        let scope = finder.enter(node, &outer).map_or(outer, Rc::new);
        if !scope.function.is_empty() {
            finder.visit(node, &scope);
        }
        let mut cursor = node.walk();
        let inner = node.children(&mut cursor).filter(|inner| !is_opaque(*inner));
        open.extend(inner.map(|inner| (inner, Rc::clone(&scope))));
    }
    let mut found = finder.found;
    found.retain(|mutant| {
        // What the edit does not touch is taken from the parsed source: a file has many mutants.
        let mut edited = tree.clone();
        edited.edit(&mutant.edit(source));
        let parses =
            |text: String| parser.parse(text, Some(&edited)).map(|t| !t.root_node().has_error());
        mutant.apply(source).and_then(parses) == Some(true)
    });
    found.sort_by(|a, b| {
        let key = |m: &Mutant| (m.span.start, m.span.end, m.fault);
        key(a).cmp(&key(b)).then_with(|| a.replacement.cmp(&b.replacement))
    });
    found
}

fn python_parser() -> Option<Parser> {
    let mut parser = Parser::new();
    parser.set_language(&tree_sitter_python::LANGUAGE.into()).ok()?;
    Some(parser)
}

/// Whether no mutant is sought inside `node`: annotations usually have no effect, decorators run
/// when the module is imported, and an edit inside an f-string could conflict with its quotes.
fn is_opaque(node: Node<'_>) -> bool {
    matches!(node.kind(), "type" | "decorator" | "string" | "comment" | "type_parameter")
}

/// The classes and functions that contain a node.
#[derive(Debug, Clone, Default)]
struct Scope {
    /// Qualified name of the innermost class or function; empty at module level.
    qualified_name: String,
    /// Qualified name of the innermost function; empty outside functions.
    function: String,
    /// Parameters and local variables of the function, each with the byte offset from which it has
    /// a value.
    variables: BTreeSet<(String, usize)>,
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

    /// The scope inside `node`, if `node` defines a class or function.
    fn enter(&self, node: Node<'_>, outer: &Scope) -> Option<Scope> {
        let is_function = node.kind() == "function_definition";
        if !is_function && node.kind() != "class_definition" {
            return None;
        }
        let mut scope = outer.clone();
        if !scope.qualified_name.is_empty() {
            scope.qualified_name.push('.');
        }
        scope.qualified_name.push_str(self.field(node, "name"));
        if is_function {
            scope.function.clone_from(&scope.qualified_name);
            scope.variables = self.variables(node);
        }
        Some(scope)
    }

    /// Parameters and local variables of `function`, each with the byte offset from which it has a
    /// value. A variable that is assigned several times has several entries.
    fn variables(&self, function: Node<'_>) -> BTreeSet<(String, usize)> {
        let mut variables = BTreeSet::new();
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
                    variables.insert((name.to_owned(), parameter.end_byte()));
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
                variables.insert((self.text(left).to_owned(), node.end_byte()));
            }
            let mut cursor = node.walk();
            open.extend(node.named_children(&mut cursor));
        }
        variables
    }

    fn add(
        &mut self,
        fault: Fault,
        span: Range<usize>,
        text: impl Into<String>,
        at: (&Scope, Node<'_>),
    ) {
        let (scope, node) = at;
        self.found.push(Mutant {
            fault,
            span,
            replacement: text.into(),
            line: node.start_position().row,
            function: scope.function.clone(),
        });
    }

    fn visit(&mut self, node: Node<'_>, scope: &Scope) {
        let at = (scope, node);
        match node.kind() {
            "comparison_operator" => self.comparison(node, scope),
            "binary_operator" | "augmented_assignment" | "boolean_operator" => {
                self.operator(node, scope);
            }
            "integer" | "float" | "true" | "false" => self.constant(node, scope),
            "argument_list" => self.arguments(node, scope),
            "if_statement" | "elif_clause" | "conditional_expression" => {
                self.condition(node, scope);
                self.branch(node, scope);
            }
            "else_clause" => self.branch(node, scope),
            "identifier" => self.variable(node, scope),
            "return_statement" => {
                if let Some(value) = node.named_child(0) {
                    self.add(Fault::DroppedReturn, node.start_byte()..value.start_byte(), "", at);
                }
            }
            "expression_statement" => {
                let kind = node.named_child(0).map_or("", |inner| inner.kind());
                if matches!(kind, "call" | "augmented_assignment") {
                    self.add(Fault::DroppedStatement, node.byte_range(), "pass", at);
                }
            }
            "continue_statement" => self.add(Fault::LoopControl, node.byte_range(), "break", at),
            _ => {}
        }
    }

    fn comparison(&mut self, node: Node<'_>, scope: &Scope) {
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
            self.add(Fault::Comparison, operator.byte_range(), other, (scope, operator));
            if let Some(neighbour) = neighbour {
                self.add(Fault::Boundary, operator.byte_range(), neighbour, (scope, operator));
            }
        }
    }

    fn operator(&mut self, node: Node<'_>, scope: &Scope) {
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
            // With a string on the left, `%` formats the string.
            "%" if !is_format => (Fault::Arithmetic, "//"),
            "&" => (Fault::Arithmetic, "|"),
            "|" | "^" => (Fault::Arithmetic, "&"),
            "<<" => (Fault::Arithmetic, ">>"),
            ">>" => (Fault::Arithmetic, "<<"),
            _ => return,
        };
        let other = if text.ends_with('=') { format!("{other}=") } else { other.to_owned() };
        self.add(fault, operator.byte_range(), other, (scope, operator));
    }

    fn constant(&mut self, node: Node<'_>, scope: &Scope) {
        let (text, at) = (self.text(node), (scope, node));
        let fault = if is_position(node, self.source) { Fault::OffByOne } else { Fault::Constant };
        match node.kind() {
            "true" => self.add(fault, node.byte_range(), "False", at),
            "false" => self.add(fault, node.byte_range(), "True", at),
            "float" => self.add(fault, node.byte_range(), format!("({text} + 1)"), at),
            _ => match text.parse::<i64>() {
                Ok(number) => {
                    self.add(fault, node.byte_range(), number.saturating_add(1).to_string(), at);
                    // A negative number could combine with an operator before it, so none is made.
                    if number > 0 {
                        self.add(fault, node.byte_range(), (number - 1).to_string(), at);
                    }
                }
                Err(_) => self.add(fault, node.byte_range(), format!("({text} + 1)"), at),
            },
        }
    }

    fn arguments(&mut self, node: Node<'_>, scope: &Scope) {
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
            self.add(Fault::SwappedArguments, span, format!("{b}{between}{a}"), (scope, *first));
        }
    }

    fn condition(&mut self, node: Node<'_>, scope: &Scope) {
        let condition = match node.kind() {
            // The parts of `VALUE if CONDITION else VALUE` have no field names.
            "conditional_expression" => node.named_child(1),
            _ => node.child_by_field_name("condition"),
        };
        let Some(condition) = condition else { return };
        let negated = match condition.kind() {
            "not_operator" => self.field(condition, "argument").to_owned(),
            _ => format!("not ({})", self.text(condition)),
        };
        self.add(Fault::NegatedCondition, condition.byte_range(), negated, (scope, condition));
    }

    fn branch(&mut self, node: Node<'_>, scope: &Scope) {
        let at = (scope, node);
        match node.kind() {
            "if_statement" if node.child_by_field_name("alternative").is_none() => {
                self.add(Fault::DroppedBranch, node.byte_range(), "pass", at);
            }
            "elif_clause" | "else_clause" => {
                let is_if = node.parent().is_some_and(|parent| parent.kind() == "if_statement");
                if is_if && let Some(before) = node.prev_sibling() {
                    self.add(Fault::DroppedBranch, before.end_byte()..node.end_byte(), "", at);
                }
            }
            _ => {}
        }
    }

    fn variable(&mut self, node: Node<'_>, scope: &Scope) {
        let name = self.text(node);
        if !scope.variables.iter().any(|(known, _)| known == name) || !is_read(node) {
            return;
        }
        let has_value = |from: &usize| *from < node.start_byte();
        let others: BTreeSet<&String> = scope
            .variables
            .iter()
            .filter(|(other, from)| other != name && has_value(from))
            .map(|(other, _)| other)
            .collect();
        for other in others {
            self.add(Fault::WrongVariable, node.byte_range(), other.as_str(), (scope, node));
        }
    }
}

/// Whether a number is a position or a count: in a subscript, a slice or the arguments of `range`.
fn is_position(node: Node<'_>, source: &str) -> bool {
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

/// Whether an identifier reads a variable here, as opposed to assigning it or naming an attribute,
/// a keyword or a function.
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
