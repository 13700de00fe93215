"""A small calculator: source text for the carried model, which was trained on Python.

    >>> evaluate("2 * (3 + 4)")
    14.0
    >>> evaluate("x ^ 2 - 1", {"x": 3})
    8.0
"""

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass, field


class CalculatorError(ValueError):
    """An expression that cannot be read or computed."""

    def __init__(self, message, position=None):
        super().__init__(message)
        self.message = message
        self.position = position

    def __str__(self):
        if self.position is None:
            return self.message
        return "%s at column %d" % (self.message, self.position + 1)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    position: int


OPERATORS = "+-*/^(),="


def tokenize(line):
    """Split a line into tokens, the last of which has the kind 'end'."""
    tokens = []
    position = 0
    while position < len(line):
        char = line[position]
        if char.isspace():
            position += 1
            continue
        start = position
        if char.isdigit() or char == ".":
            while position < len(line) and (line[position].isdigit() or line[position] == "."):
                position += 1
            tokens.append(Token("number", line[start:position], start))
        elif char.isalpha() or char == "_":
            while position < len(line) and (line[position].isalnum() or line[position] == "_"):
                position += 1
            tokens.append(Token("name", line[start:position], start))
        elif char in OPERATORS:
            position += 1
            tokens.append(Token(char, char, start))
        else:
            raise CalculatorError("unexpected character %r" % char, start)
    tokens.append(Token("end", "", len(line)))
    return tokens


class Node:
    """One node of the syntax tree."""

    def value(self, scope):
        raise NotImplementedError

    def names(self):
        return set()


@dataclass
class Number(Node):
    number: float

    def value(self, scope):
        return self.number


@dataclass
class Name(Node):
    name: str
    position: int

    def value(self, scope):
        try:
            return scope[self.name]
        except KeyError:
            raise CalculatorError("unknown name %s" % self.name, self.position) from None

    def names(self):
        return {self.name}


@dataclass
class Unary(Node):
    operator: str
    operand: Node

    def value(self, scope):
        result = self.operand.value(scope)
        return -result if self.operator == "-" else result

    def names(self):
        return self.operand.names()


@dataclass
class Binary(Node):
    operator: str
    left: Node
    right: Node
    position: int

    def value(self, scope):
        left = self.left.value(scope)
        right = self.right.value(scope)
        if self.operator == "+":
            return left + right
        if self.operator == "-":
            return left - right
        if self.operator == "*":
            return left * right
        if self.operator == "/":
            if right == 0:
                raise CalculatorError("division by zero", self.position)
            return left / right
        return left**right

    def names(self):
        return self.left.names() | self.right.names()


@dataclass
class Call(Node):
    name: str
    arguments: list
    position: int

    def value(self, scope):
        function = FUNCTIONS.get(self.name)
        if function is None:
            raise CalculatorError("unknown function %s" % self.name, self.position)
        values = [argument.value(scope) for argument in self.arguments]
        try:
            return float(function(*values))
        except (TypeError, ValueError, OverflowError) as error:
            raise CalculatorError("%s: %s" % (self.name, error), self.position) from error

    def names(self):
        return set().union(*(argument.names() for argument in self.arguments))


FUNCTIONS = {
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
    "exp": math.exp,
    "log": math.log,
    "max": max,
    "min": min,
    "abs": abs,
}


class Parser:
    """Recursive descent: sum, product, power, atom."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.index = 0

    @property
    def current(self):
        return self.tokens[self.index]

    def advance(self):
        token = self.current
        self.index += 1
        return token

    def expect(self, kind):
        if self.current.kind != kind:
            raise CalculatorError("expected %s" % kind, self.current.position)
        return self.advance()

    def parse(self):
        node = self.sum()
        self.expect("end")
        return node

    def sum(self):
        node = self.product()
        while self.current.kind in ("+", "-"):
            token = self.advance()
            node = Binary(token.kind, node, self.product(), token.position)
        return node

    def product(self):
        node = self.unary()
        while self.current.kind in ("*", "/"):
            token = self.advance()
            node = Binary(token.kind, node, self.unary(), token.position)
        return node

    def unary(self):
        if self.current.kind in ("+", "-"):
            return Unary(self.advance().kind, self.unary())
        return self.power()

    def power(self):
        base = self.atom()
        if self.current.kind == "^":
            token = self.advance()
            return Binary("^", base, self.unary(), token.position)
        return base

    def atom(self):
        token = self.advance()
        if token.kind == "number":
            try:
                return Number(float(token.text))
            except ValueError:
                raise CalculatorError("bad number %s" % token.text, token.position) from None
        if token.kind == "(":
            node = self.sum()
            self.expect(")")
            return node
        if token.kind == "name" and self.current.kind == "(":
            self.advance()
            arguments = [self.sum()]
            while self.current.kind == ",":
                self.advance()
                arguments.append(self.sum())
            self.expect(")")
            return Call(token.text, arguments, token.position)
        if token.kind == "name":
            return Name(token.text, token.position)
        raise CalculatorError("unexpected %s" % (token.text or "end"), token.position)


class Cache:
    """The most recently used trees, up to a size."""

    def __init__(self, size=128):
        self.size = size
        self.trees = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, line):
        if line in self.trees:
            self.hits += 1
            self.trees.move_to_end(line)
            return self.trees[line]
        self.misses += 1
        tree = Parser(tokenize(line)).parse()
        self.trees[line] = tree
        if len(self.trees) > self.size:
            self.trees.popitem(last=False)
        return tree


@dataclass
class Session:
    """Variables and history of one user."""

    scope: dict = field(default_factory=lambda: {"pi": math.pi, "e": math.e})
    history: list = field(default_factory=list)
    cache: Cache = field(default_factory=Cache)

    def run(self, line):
        name, equals, rest = line.partition("=")
        if equals:
            name = name.strip()
            if not name.isidentifier():
                raise CalculatorError("cannot assign to %r" % name, 0)
            result = self.cache.get(rest).value(self.scope)
            self.scope[name] = result
        else:
            result = self.cache.get(line).value(self.scope)
        self.history.append((line.strip(), result))
        return result

    def free_names(self, line):
        return sorted(self.cache.get(line).names() - set(self.scope))


def evaluate(line, scope=None):
    session = Session()
    session.scope.update(scope or {})
    return session.run(line)


def main(argv=None):
    session = Session()
    lines = argv if argv is not None else sys.argv[1:]
    status = 0
    for line in lines or sys.stdin:
        if not line.strip() or line.startswith("#"):
            continue
        try:
            print("%.12g" % session.run(line))
        except CalculatorError as error:
            print("error: %s" % error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
