"""A Jinja environment for templates nobody vouches for: no way out of it, and bounded work, text and memory.

Note [Bounded templates]. No thread can interrupt Python in the middle of a loop, so every construct that
repeats, joins or copies is counted as it happens. `Rewrite` changes the parsed template so that loops,
`~`, literals, slices, comparisons and all output go through methods of `Sandbox`; calls, operators and
filters already do. Everything spends from one `Budget`, and no single value grows past `MAX_TEXT`.
This module imports jinja2 and is itself imported when the first template is made.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEXT = 8 * 1024 * 1024  # characters in one value, or in the output
MAX_WORK = 100_000_000  # units: see the next two
STEP_COST = 200  # units of a loop iteration or a call; so half a million of them at most
NODE_COST = 20  # units of an element in a list or dictionary; a character costs one
MAX_BITS = 4096  # of an integer
MAX_PADDING = 1000  # of a width, an indentation or a precision

STR_METHODS = frozenset(
    """capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace isupper join
    lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper""".split()
)
SAFE_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, STR_METHODS),
    (Mapping, frozenset({"get", "items", "keys", "values"})),
    (tuple, frozenset({"count", "index", "grouper", "list"})),
    (list, frozenset({"count", "index"})),
)
SAFE_FILTERS = frozenset(
    """abs capitalize count d default dictsort e escape first float format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string
    title trim truncate unique upper urlencode wordcount""".split()
)


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.left = MAX_WORK

    def spend(self, units: int) -> None:
        """Take `units` away; refuse when there is not enough."""
        self.left -= units
        if self.left < 0:
            raise SecurityError("it loops too long or builds too much text")

    def measure(self, value: Any) -> None:
        """Pay for `value` and refuse it if its text, everything inside included, is too long."""
        if isinstance(value, str):
            fits(len(value))
            return self.spend(len(value))
        text, pending = 0, [value]
        while pending:
            item = pending.pop()
            self.spend(NODE_COST)
            text += len(item) if isinstance(item, str) else 8
            fits(text)
            pending += parts_of(item)


def parts_of(value: Any) -> Iterable[Any]:
    """What a container holds; nothing for any other value."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, range, ItemsView, KeysView, ValuesView)):
        fits(len(value))
        return value
    return ()


def fits(n_chars: int) -> None:
    """Refuse a text of `n_chars` characters if that is more than a value may have."""
    if n_chars > MAX_TEXT:
        raise SecurityError(f"it builds a text of more than {MAX_TEXT} characters")


def padding(width: Any) -> None:
    """Refuse a width, indentation or precision beyond reason."""
    if isinstance(width, (int, float)) and abs(width) > MAX_PADDING:
        raise SecurityError(f"a width of {width} is more than {MAX_PADDING}")


class QuietNamespace(Namespace):
    """`namespace()` of templates; its text tells nothing, as namespaces may hold each other."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationTag(Extension):
    """`{% generation %}` marks the answer's text in some templates; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Rewrite(NodeTransformer):
    """Sends what repeats, joins or copies through the environment. See Note [Bounded templates]."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("recursive loops are not supported")
        self.generic_visit(node)
        node.iter = through("counted", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [through("emit", child) for child in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return through("joined", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return through("measured", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return through("measured", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return through("measured", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return through("measured", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = through("measured", node.expr)
        for operand in node.ops:
            operand.expr = through("measured", operand.expr)
        return node


def through(method: str, *arguments: Any) -> nodes.Call:
    """A call of the environment's `method`."""
    function = nodes.EnvironmentAttribute(method, lineno=arguments[0].lineno if arguments else 0)
    return nodes.Call(function, list(arguments), [], None, None, lineno=function.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. `budget` is replaced before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, GenerationTag]
        )
        self.budget = Budget()
        safe = {"range": self.globals["range"], "dict": dict, "namespace": QuietNamespace}
        self.globals = {**safe, "raise_exception": raise_exception, "strftime_now": strftime_now}
        self.filters = {name: self._bounded(FILTERS[name], CHECKS.get(name)) for name in SAFE_FILTERS}
        self.filters["tojson"] = self._bounded(tojson, None)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Rewrite().visit(source), *args, **kwargs)

    def _bounded(self, function: Callable[..., Any], check: Callable[..., Any] | None) -> Callable[..., Any]:
        """A filter that pays for its input and its result. `wraps` keeps the marks jinja2 puts on filters."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(STEP_COST + sum(len(a) for a in args if hasattr(a, "__len__")))
            if check is not None:
                args = (*args[:skip], check(*args[skip:], **kwargs), *args[skip + 1 :])
            return self.measured(function(*args, **kwargs))

        return bounded

    def wrap_str_format(self, value: Any) -> None:
        """Without a wrapper, `str.format` is refused like any method not listed: its widths have no limit."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what is listed: a method not thought of may build any amount of text."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, (LoopContext, Macro, QuietNamespace, Undefined)):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in SAFE_ATTRIBUTES)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if owner is self:
            return obj(*args)
        self.budget.spend(STEP_COST)
        if isinstance(owner, str) and name == "replace":
            check_replace(owner, *args)
        if isinstance(owner, str) and name == "join" and args:
            args = (check_join(args[0], owner),)
        return self.measured(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, refused when the result would be too large."""
        check_operands(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each paid for."""
        for value in values:
            self.budget.spend(STEP_COST)
            yield value

    def emit(self, value: Any) -> str:
        """The text of a value that is about to be written."""
        if not isinstance(value, str):
            self.budget.measure(value)
        text = str(value)
        self.budget.measure(text)
        return text

    def joined(self, *values: Any) -> str:
        """The `~` operator."""
        texts = [self.emit(value) for value in values]
        fits(sum(map(len, texts)))
        return "".join(texts)

    def measured(self, value: Any) -> Any:
        """`value`, paid for."""
        self.budget.measure(value)
        return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` before it is computed, if the result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
        if bits.get(operator, 0) > MAX_BITS:
            raise SecurityError(f"a number of {bits[operator]} bits is more than {MAX_BITS}")
    elif operator == "*":
        text, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and hasattr(text, "__len__"):
            fits(len(text) * times)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        fits(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_format(left, right)


def check_format(form: str, values: Any) -> None:
    """Refuse `form % values` if it has named or wide fields, or would repeat long values."""
    if re.search(r"%\(|%[^%a-zA-Z]*(\*|\d{4})", form):
        raise SecurityError(f"a format has a named field, or one wider than {MAX_PADDING}")
    fits(len(form) + form.count("%") * MAX_PADDING)
    for value in values if isinstance(values, tuple) else (values,):
        Budget().measure(value)
    if isinstance(values, tuple):
        fits(sum(len(str(value)) for value in values))


def check_format_filter(form: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what `check_format` refuses."""
    check_format(str(form), args)
    return form


def check_replace(text: Any, old: Any = "", new: Any = "", *rest: Any, **kwargs: Any) -> Any:
    """Refuse a replacement whose result would be too long."""
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        fits(len(text) + text.count(old) * len(new))
    return text


def check_join(values: Any, d: Any = "", *rest: Any, **kwargs: Any) -> Any:
    """Refuse to join what would be too long; a generator becomes a list."""
    items = list(values)
    Budget().measure(items)
    fits(len(items) * len(str(d)))
    return items


def check_indent(text: Any, width: Any = 4, *rest: Any, **kwargs: Any) -> Any:
    """Refuse a wide indentation, or one that makes the text too long."""
    size = len(width) if isinstance(width, str) else width
    padding(size)
    if isinstance(text, str):
        fits(len(text) + (text.count("\n") + 1) * int(size))
    return text


def check_round(value: Any, precision: Any = 0, *rest: Any, **kwargs: Any) -> Any:
    """Refuse a precision beyond reason: it is an exponent of ten."""
    padding(precision)
    return value


CHECKS: dict[str, Callable[..., Any]] = {
    "format": check_format_filter,
    "indent": check_indent,
    "join": check_join,
    "replace": check_replace,
    "round": check_round,
}


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """JSON without HTML escapes: what goes into a prompt is not a web page."""
    padding(len(indent) if isinstance(indent, str) else indent)
    padding(sum(map(len, separators or ())))
    Budget().measure(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks, size = [], 0
    for chunk in encoder.iterencode(value):
        size += len(chunk)
        fits(size)
        chunks.append(chunk)
    return "".join(chunks)


def raise_exception(message: Any = "") -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(str(message))


def strftime_now(form: str) -> str:
    """Date and time, now."""
    if len(form) > MAX_PADDING or re.search(r"%[^a-zA-Z%]*\d", form):
        raise SecurityError("a date format is too long or has widths")
    return datetime.now().strftime(form)
