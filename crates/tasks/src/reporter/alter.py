# Other expected values for tests, drawn at random, so that nothing tells an altered test from an honest
# one. Part of the text of child.py.


def _alteration(ast, urandom):
    """Functions that copy a statement, and that copy it with another expected value."""
    lower, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"

    def below(count):
        return int.from_bytes(urandom(8), "big") % count

    def literal(node):
        """The value of a literal; Old versions have a class for each kind."""
        return getattr(node, "value", getattr(node, "n", getattr(node, "s", None)))

    class Other(ast.NodeTransformer):
        """Replaces literals by ones of the same kind and of a similar size. All numbers move by the
        same distance and all letters by another one, so that sets of them differ as well."""

        def __init__(self, part):
            values = [literal(node) for node in ast.walk(part) if isinstance(node, literals)]
            numbers = [abs(v) for v in values if type(v) in (int, float) and v - v == 0]
            self.distance = 1 + below(9 + int(max(numbers or [0])) // 2)
            letters, figures = 1 + below(25), 1 + below(9)
            turned = lower[letters:] + lower[:letters]
            turned += turned.upper() + digits[figures:] + digits[:figures]
            self.turn = dict(zip(lower + lower.upper() + digits, turned))
            self.count = 0

        def text(self, value):
            turned = "".join(self.turn.get(c, c) for c in value)
            if turned == value:
                # Nothing in it can be turned.
                turned = value + (value[-1:] or lower[below(26)])
            return turned

        def visit_Constant(self, node):
            value = literal(node)
            kind = type(value)
            if kind in (int, float):
                if value - value != 0 or value + self.distance == value:
                    return node  # An infinity, or a number too large to have others near it.
                value = kind(value + self.distance)
            elif kind is str:
                value = self.text(value)
            elif kind is bytes:
                value = self.text(value.decode("latin-1")).encode("latin-1")
            else:
                return node
            self.count += 1
            return ast.copy_location(ast.Constant(value=value), node)

        visit_Num = visit_Str = visit_Bytes = visit_Constant

        def generic_visit(self, node):
            # Only literals: what is computed may not change with its parts.
            known = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
            return super().generic_visit(node) if isinstance(node, known) else node

    literals = tuple(
        vars(ast)[name] for name in ("Constant", "Num", "Str", "Bytes") if name in vars(ast)
    )

    def other(part):
        """A copy of an expected value that differs from it; None if there is none."""
        before = copy_of(part)
        changer = Other(part)
        part = changer.visit(part)
        if not changer.count:
            return None
        try:
            is_same = ast.literal_eval(ast.fix_missing_locations(part)) == ast.literal_eval(before)
        except (ValueError, TypeError, SyntaxError):
            is_same = False
        return None if is_same else part

    def alter(statement):
        """A copy of an assertion that expects something else; None if it has no such form."""
        copied = copy_of(statement)
        if isinstance(copied, ast.Assert) and isinstance(copied.test, ast.Compare):
            test = copied.test
            if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
                return None
            if not isinstance(test.left, literals):
                test.comparators = [other(test.comparators[0])]
                return copied if test.comparators[0] else None
            test.left = other(test.left)
            return copied if test.left else None
        if isinstance(copied, ast.Expr) and isinstance(copied.value, ast.Call):
            name = getattr(copied.value.func, "attr", "")
            arguments = copied.value.args
            if name in ("assertEqual", "assertEquals") and len(arguments) >= 2:
                at = 0 if isinstance(arguments[0], literals) else 1
                arguments[at] = other(arguments[at])
                return copied if arguments[at] else None
        return None

    def copy_of(node):
        if not isinstance(node, ast.AST):
            return [copy_of(item) for item in node] if isinstance(node, list) else node
        new = type(node)(**{name: copy_of(value) for name, value in ast.iter_fields(node)})
        for name in node._attributes:
            if hasattr(node, name):
                setattr(new, name, getattr(node, name))
        return new

    return alter, copy_of


