"""What `lint_kernel.py` knows of a kernel: its values, and what their lanes outside the mask hold."""

import ast
import math
import re
from pathlib import Path
from typing import NamedTuple, Optional

# What a lane outside the mask may hold, where it is no number.
UNDEFINED, ANY, UNKNOWN = "undefined", "any", "unknown"  # never written; moved by a map; not known to this program
OTHER = "other"  # of an operand without such lanes: some finite number

NEUTRAL = {
    "sum": 0.0, "max": -math.inf, "min": math.inf, "argmax": -math.inf, "argmin": math.inf, "xor_sum": 0.0,
}  # fmt: skip
LOW = {"float16", "bfloat16", "float8e4nv", "float8e5", "float8e4b8", "float8e5b16", "float8e4b15"}
WIDE = {"float32", "float64"}


class Place(NamedTuple):
    source: object
    line: int


class Lane(NamedTuple):
    """What lanes outside the mask hold along one axis, and where they were filled."""

    value: object
    place: Place  # of the load, or of what moved it
    origin: Place  # of the load
    moved: bool = False


class Value(NamedTuple):
    """What is known of an expression."""

    shape: Optional[tuple] = None  # a symbol, a number or 1 for each axis
    lanes: dict = {}  # axis: Lane
    mask: frozenset = frozenset()  # of a condition: the axes that it bounds
    dtype: str = ""  # "stored" as in memory, "low", "wide"
    offset: str = ""  # of a program id: "pid", "block" of it, "over" 32 bits; or "wide"
    place: Optional[Place] = None  # where the offset was multiplied
    const: Optional[float] = None  # in all lanes
    positive: bool = False  # never below 0
    name: str = ""  # of a constexpr
    factors: frozenset = frozenset()  # what a program id was divided by: times one of these it is in range again
    items: Optional[tuple] = None  # of a tuple
    index: bool = False  # made of tl.arange, not of what was loaded: comparing it makes a mask of bounds


SCALAR = Value(shape=())
NOTHING = Value()


def last_name(node):
    while isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def dotted(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def is_jit(function):
    return any(last_name(d) == "jit" for d in function.decorator_list)


def number(node):
    """The value of a literal, of float("-inf") and of -x; None of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Call) and last_name(node) == "float" and node.args:
        try:
            return float(node.args[0].value)
        except (AttributeError, ValueError):
            return None
    if dotted(node) in ("math.inf", "torch.inf", "np.inf"):
        return math.inf
    return None


class Source:
    """A file, and the functions of its neighbours that it imports by relative import."""

    known: dict = {}

    def __init__(self, path, text=None):
        self.path = path
        self.text = Path(path).read_text(encoding="utf-8") if text is None else text
        self.tree = ast.parse(self.text, filename=str(path))
        self.functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.imports = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (f"{node.module.replace('.', '/')}.py", alias.name)

    @classmethod
    def of(cls, path):
        path = Path(path).resolve()
        if path not in cls.known:
            cls.known[path] = cls(path)
        return cls.known[path]

    def find(self, name):
        """(source, function) of a `@triton.jit` function called `name` here; or None."""
        if name in self.functions:
            return (self, self.functions[name]) if is_jit(self.functions[name]) else None
        if name in self.imports:
            file, original = self.imports[name]
            path = Path(self.path).parent / file
            if path.is_file() and path.resolve() != Path(self.path).resolve():
                return Source.of(path).find(original)
        return None


def configs_of(function):
    """(decorator, configs, key) of an autotuned function; None where it is not."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and last_name(decorator) == "autotune":
            keywords = {k.arg: k.value for k in decorator.keywords}
            configs = keywords.get("configs", decorator.args[0] if decorator.args else None)
            key = keywords.get("key", decorator.args[1] if len(decorator.args) > 1 else None)
            return decorator, configs, key
    return None


def config_names(node, source):
    """Every key of a dictionary in an autotuner's configs, also where a function or a list makes them."""
    if node is None:
        return set()
    seen, nodes = set(), [node]
    for name in [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]:
        nodes += [n for n in source.tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        nodes += [
            n.value for n in source.tree.body
            if isinstance(n, ast.Assign) and any(getattr(t, "id", "") == name for t in n.targets)
        ]  # fmt: skip
    for part in nodes:
        for n in ast.walk(part):
            if isinstance(n, ast.Dict):
                seen |= {k.value for k in n.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
    return seen


# Arithmetic on lanes


def combine(op, a, b):
    """The lane of `a op b`, where a and b are numbers or one of UNDEFINED, ANY, UNKNOWN, OTHER."""
    if UNDEFINED in (a, b):
        return UNDEFINED
    if isinstance(a, float) and isinstance(b, float):
        try:
            return float(OPERATIONS[op](a, b))
        except (KeyError, ZeroDivisionError, OverflowError, ValueError):
            return ANY
    if op in ("Mult", "Div") and a == 0.0 or op == "Mult" and b == 0.0:
        return 0.0
    if UNKNOWN in (a, b) or op.startswith("Bit") or op.endswith("Shift"):
        return UNKNOWN
    if op == "Div" and isinstance(b, float) and math.isinf(b):
        return 0.0
    infinite = [x for x in (a, b) if isinstance(x, float) and math.isinf(x)]
    if infinite and op in ("Add", "Mult"):
        return infinite[0]
    if op in ("Sub", "Div") and isinstance(a, float) and math.isinf(a):
        return a
    if op == "Sub" and isinstance(b, float) and math.isinf(b):
        return -b
    if op == "Max" and math.inf in infinite or op == "Min" and -math.inf in infinite:
        return infinite[0]
    if op in ("Lt", "LtE", "Gt", "GtE", "Eq", "NotEq") and infinite:
        return combine(op, *(0.0 if x in (OTHER, ANY) else x for x in (a, b)))
    return ANY


OPERATIONS = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mult": lambda a, b: a * b, "Div": lambda a, b: a / b,
    "FloorDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b, "Pow": lambda a, b: a**b,
    "Max": max, "Min": min,
    "Lt": lambda a, b: a < b, "LtE": lambda a, b: a <= b, "Gt": lambda a, b: a > b, "GtE": lambda a, b: a >= b,
    "Eq": lambda a, b: a == b, "NotEq": lambda a, b: a != b,
    "BitAnd": lambda a, b: int(a) & int(b), "BitOr": lambda a, b: int(a) | int(b),
}  # fmt: skip

MAPS = {
    "exp": math.exp, "exp2": lambda x: 2.0**x, "log": math.log, "log2": math.log2, "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5, "abs": abs, "sin": math.sin, "cos": math.cos, "erf": math.erf, "floor": math.floor,
    "ceil": math.ceil, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "tanh": math.tanh,
}  # fmt: skip
POSITIVE = {"exp", "exp2", "sqrt", "rsqrt", "abs", "sigmoid"}


def mapped(name, lane):
    """The lane of a unary function."""
    value = lane.value
    if isinstance(value, float):
        try:
            value = float(MAPS[name](value))
        except OverflowError:
            value = math.inf if value > 0 else 0.0
        except (ValueError, ZeroDivisionError):
            value = ANY
    elif value == OTHER:
        value = ANY
    return moved(lane, value)


def moved(lane, value):
    return lane._replace(value=value, moved=lane.moved or value != lane.value)


ORDER = {"": 0, "pid": 1, "block": 2, "wide": 3, "over": 4}


def held(value, axis):
    """What an operand holds in the lanes outside an axis' mask."""
    if axis in value.lanes:
        return value.lanes[axis].value
    if axis in value.mask or value.const is not None:
        return 0.0 if axis in value.mask else value.const
    along = value.shape is None or axis in value.shape  # then it has such lanes, too
    return UNKNOWN if along and not value.index else OTHER


def broadcast(a, b):
    if a is None or b is None:
        return a or b or None
    if len(a) < len(b):
        a, b = b, a
    b = (1,) * (len(a) - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b))


def joined_dtype(a, b):
    if "wide" in (a.dtype, b.dtype):
        return "wide"
    for x, y in ((a, b), (b, a)):
        if x.dtype in ("stored", "low") and (y.dtype == x.dtype or y.shape == () or y.const is not None):
            return x.dtype
    return ""


def binary(op, a, b, place, texts=("", "")):
    shape = broadcast(a.shape, b.shape)
    lanes = {}
    for axis in {**a.lanes, **b.lanes, **dict.fromkeys([*a.mask, *b.mask])}:
        x, y = (v.lanes.get(axis) for v in (a, b))
        result = combine(op, held(a, axis), held(b, axis))
        source = next((n for n in (x, y) if n and n.value == result), x or y or Lane(0.0, place, place))
        if result == source.value:
            lanes[axis] = source._replace(moved=any(n.moved for n in (x, y) if n))
        else:
            lanes[axis] = Lane(result, place, source.origin, True)
    const = None
    if a.const is not None and b.const is not None:
        value = combine(op, a.const, b.const)
        const = value if isinstance(value, float) else None
    compares = op in ("Lt", "LtE", "Gt", "GtE", "Eq", "NotEq")
    if compares:
        bounds = is_index(a, b) and (a.index and op in ("Lt", "LtE") or b.index and op in ("Gt", "GtE"))
        mask = frozenset(s for s in shape or () if s != 1) if bounds else frozenset()
        return Value(shape, {k: v for k, v in lanes.items() if k not in mask}, mask, const=const, positive=True)
    if op in ("BitAnd", "BitOr") and (a.mask or b.mask):
        # Of an `or` this is only what both bound.
        mask = a.mask | b.mask if op == "BitAnd" else a.mask & b.mask
        return Value(shape, {k: v for k, v in lanes.items() if k not in mask}, mask, positive=True)
    first = max((a, b), key=lambda v: ORDER[v.offset])
    offset, where, factors = first.offset, first.place, frozenset()
    if op == "Mult" and first.offset in ("pid", "block"):
        second, text = (b, texts[1]) if first is a else (a, texts[0])
        if second.offset == "wide":
            offset = "wide"
        elif text not in first.factors:
            sized = re.match(r"(?i)(block|group|tile|split|chunk)", text) or second.const is not None
            offset = "block" if sized and second.offset in ("", "pid") else "over"
        where = place
    elif op in ("FloorDiv", "Mod"):
        offset = "pid" if offset in ("block", "over") else offset  # an index again
        factors = frozenset(t.strip() for t in texts[1].strip("()").split("*")) if op == "FloorDiv" else frozenset()
    elif op == "Div":
        offset = ""
    positive = (is_positive(a) and is_positive(b) and op in ("Add", "Mult", "Div", "Max", "Min")) or (
        op == "Max" and (is_positive(a) or is_positive(b))
    )
    return Value(
        shape, lanes, frozenset(), joined_dtype(a, b), offset, where, const, positive, "", factors, None, is_index(a, b)
    )


def is_index(a, b):
    return (a.index or b.index) and all(v.index or v.shape == () for v in (a, b))


def is_positive(value):
    return value.positive or (value.const is not None and value.const >= 0)


def merged(a, b):
    """What is known after a branch that gives a and one that gives b."""
    if a == b:
        return a
    lanes = {}
    for axis in {**a.lanes, **b.lanes}:
        x, y = a.lanes.get(axis), b.lanes.get(axis)
        if x and y and x.value != y.value:
            worse = [n for n in (x, y) if n.value == UNDEFINED or (n.moved and n.value != UNKNOWN)]
            lanes[axis] = worse[0] if worse else x._replace(value=UNKNOWN)
        else:
            lanes[axis] = x or y
    first = max((a, b), key=lambda v: ORDER[v.offset])
    items = None
    if a.items and b.items and len(a.items) == len(b.items):
        items = tuple(merged(x, y) for x, y in zip(a.items, b.items))
    return Value(
        a.shape if a.shape is not None else b.shape, lanes, a.mask | b.mask, a.dtype if a.dtype == b.dtype else "",
        first.offset, first.place, a.const if a.const == b.const else None, is_positive(a) and is_positive(b),
        a.name if a.name == b.name else "", items=items, index=a.index and b.index,
    )  # fmt: skip


class Kernel:
    """One walk through a `@triton.jit` function, and through the helpers that it calls."""

    def __init__(self, linter, source, function, depth=0, top=None):
        self.linter, self.source, self.function, self.depth = linter, source, function, depth
        self.top = top or self
        self.env, self.returned = {}, None
        if top is None:
            self.flat, self.accesses = [], 0
            tuned = configs_of(function)
            self.tuned = config_names(tuned[1], source) if tuned else set()
            self.stepped = self.steps()
            self.dots = []

    def steps(self):
        """Names of blocks by which the kernel steps: then a block need not cover its axis."""
        found = set()
        for node in ast.walk(self.function):
            parts = ()
            if isinstance(node, ast.Call) and last_name(node) in ("range", "cdiv", "static_range"):
                parts = node.args
            elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.FloorDiv)):
                parts = (node.left, node.right)
            elif isinstance(node, ast.AugAssign):
                parts = (node.value,)
            for part in parts:
                found |= {n.id for n in ast.walk(part) if isinstance(n, ast.Name)}
        return found

    def report(self, at, rule, detail=""):
        """at: a node of this function, or the place of a value."""
        place = at if isinstance(at, Place) else self.place(at)
        self.linter.report(place.source, place.line, rule, detail, once=(rule, self.top.place(self.top.function)))

    def place(self, node):
        return Place(self.source, node.lineno)

    def bind(self, values, named):
        """Parameters by position and by name; defaults; and scalars of no known value."""
        arguments = self.function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        constexpr = {
            a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
        }  # fmt: skip
        for name in names:
            # Sizes are written in capitals, and are not negative.
            self.env[name] = Value(shape=(), name=name if name in constexpr else "", positive=name.isupper())
        for name, value in [*zip(names, values), *named.items()]:
            if name in self.env:
                self.env[name] = value
        return self

    def run(self):
        self.block(self.function.body)
        if self.depth == 0 and self.flat and len(self.flat) == self.accesses:
            self.report(self.flat[0], "offset-in-32-bits", "block offsets alone address the tensor")
        return self.returned or NOTHING

    def block(self, statements):
        for node in statements:
            self.statement(node)

    def statement(self, node):
        if isinstance(node, ast.Assign):
            value = self.eval(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.eval(node.value))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            old = self.env.get(node.target.id, NOTHING)
            new = self.binary(type(node.op).__name__, old, self.eval(node.value), node, (node.target, node.value))
            if old.dtype == "low" and old.const is not None and isinstance(node.op, ast.Add):
                self.report(node, "low-precision-sum", f"{node.target.id} is kept in 16 bits")
            self.env[node.target.id] = new
        elif isinstance(node, ast.For):
            iterated = [self.eval(a) for a in getattr(node.iter, "args", ())]
            step = max(iterated, key=lambda v: ORDER[v.offset], default=SCALAR)
            for _ in range(2):
                offset = "pid" if step.offset in ("block", "over") else step.offset
                self.assign(node.target, Value(shape=(), offset=offset))
                before = dict(self.env)
                self.block(node.body)
                self.merge(before, self.env)
        elif isinstance(node, ast.While):
            for _ in range(2):
                before = dict(self.env)
                self.eval(node.test)
                self.block(node.body)
                self.merge(before, self.env)
        elif isinstance(node, ast.If):
            self.eval(node.test)
            before = dict(self.env)
            self.block(node.body)
            first, self.env = self.env, before
            self.block(node.orelse)
            self.merge(first, self.env)
        elif isinstance(node, ast.Return):
            value = self.eval(node.value) if node.value is not None else NOTHING
            self.returned = value if self.returned is None else merged(self.returned, value)
        elif isinstance(node, ast.Expr):
            self.eval(node.value)

    def merge(self, a, b):
        self.env = {
            name: merged(a[name], b[name]) if name in a and name in b else a.get(name, b.get(name))
            for name in {**a, **b}
        }  # fmt: skip

    def assign(self, target, value):
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for i, part in enumerate(target.elts):
                given = value.items[i] if value.items and i < len(value.items) else NOTHING
                if value.items is None and value.offset:
                    given = Value(offset=value.offset, place=value.place)
                self.assign(part, given)

    # expressions

    def eval(self, node):
        method = getattr(self, f"eval_{type(node).__name__}", None)
        if method is None:
            return NOTHING
        return method(node)

    def eval_Constant(self, node):
        value = number(node)
        return SCALAR if value is None else Value(shape=(), const=value)

    def eval_Name(self, node):
        if node.id in self.env:
            return self.env[node.id]
        return Value(shape=(), name=node.id)

    def eval_Tuple(self, node):
        return Value(items=tuple(self.eval(n) for n in node.elts))

    eval_List = eval_Tuple

    def eval_Attribute(self, node):
        value = self.eval(node.value) if not dotted(node).startswith(("tl.", "triton.")) else NOTHING
        if node.attr == "T":
            return value._replace(shape=tuple(reversed(value.shape)) if value.shape else None)
        return SCALAR

    def eval_UnaryOp(self, node):
        value = self.eval(node.operand)
        if number(node) is not None:
            return Value(shape=(), const=number(node))
        if isinstance(node.op, ast.USub):
            return self.binary("Sub", Value(shape=(), const=0.0), value, node)._replace(dtype=value.dtype)
        if isinstance(node.op, (ast.Not, ast.Invert)):
            return Value(value.shape)
        return value

    def eval_BinOp(self, node):
        a, b = self.eval(node.left), self.eval(node.right)
        op = type(node.op).__name__
        result = self.binary(op, a, b, node, (node.left, node.right))
        if op == "Mult" and ast.unparse(node.left) == ast.unparse(node.right):
            result = result._replace(positive=True)
        return result

    def eval_Compare(self, node):
        a, result = self.eval(node.left), None
        for op, right in zip(node.ops, node.comparators):
            b = self.eval(right)
            name = type(op).__name__
            one = self.binary(name, a, b, node) if name in OPERATIONS else SCALAR
            if ast.unparse(node.left) == ast.unparse(right) and name == "NotEq":  # the test for NaN
                fixed = {k: v if v.value == UNDEFINED else moved(v, 0.0) for k, v in one.lanes.items()}
                one = one._replace(lanes=fixed, mask=frozenset())
            result = one if result is None else self.binary("BitAnd", result, one, node)
            a = b
        return result

    def lane(self, value, node):
        return Lane(value, self.place(node), self.place(node))

    def binary(self, op, a, b, node, operands=()):
        texts = tuple(ast.unparse(n) for n in operands) or ("", "")
        return binary(op, a, b, self.place(node), texts)

    def eval_BoolOp(self, node):
        for n in node.values:
            self.eval(n)
        return SCALAR

    def eval_IfExp(self, node):
        self.eval(node.test)
        return merged(self.eval(node.body), self.eval(node.orelse))

    def eval_Subscript(self, node):
        value = self.eval(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if value.items is not None and len(parts) == 1 and number(parts[0]) is not None:
            i = int(number(parts[0]))
            return value.items[i] if -len(value.items) <= i < len(value.items) else NOTHING
        news = [isinstance(p, ast.Constant) and p.value is None for p in parts]
        slices = [isinstance(p, ast.Slice) for p in parts]
        if all(n or s for n, s in zip(news, slices)):
            if value.shape is None:
                return value
            left, shape = list(value.shape), []
            for new in news:
                shape.append(1 if new or not left else left.pop(0))
            return value._replace(shape=(*shape, *left))
        return SCALAR  # of a tuple of strides

    def eval_Call(self, node):
        name = last_name(node.func)
        positional = [a for a in node.args if not isinstance(a, ast.Starred)]
        args = [self.eval(a) for a in positional]
        named = {k.arg: self.eval(k.value) for k in node.keywords if k.arg}
        nodes = {k.arg: k.value for k in node.keywords if k.arg}
        method = isinstance(node.func, ast.Attribute) and dotted(node.func.value) not in (
            "tl", "triton.language", "tl.math", "tl.extra.libdevice", "libdevice", "math", "triton",
        )  # fmt: skip
        if method:
            args, positional = [self.eval(node.func.value), *args], [node.func.value, *positional]
        if isinstance(node.func, ast.Name) and not method:
            found = self.source.find(name)
            if found is not None and self.depth < 8:
                inner = Kernel(self.linter, *found, self.depth + 1, self.top)
                return inner.bind(args, named).run()
        first = args[0] if args else NOTHING

        def argument(position, keyword):
            return nodes.get(keyword, positional[position] if len(positional) > position else None)

        if name in ("to", "cast", "round_to"):
            if "bitcast" in nodes:
                lanes = {k: v._replace(value=UNKNOWN) for k, v in first.lanes.items() if v.value != UNDEFINED}
                first = first._replace(lanes=lanes, const=None)
            return self.converted(first, argument(1, "dtype"))
        if name == "program_id":
            return Value(shape=(), offset="pid")
        if name == "arange":
            end = positional[1] if len(positional) > 1 else None
            return Value(shape=(self.symbol(end),), index=True) if end is not None else NOTHING
        if name in ("zeros", "full"):
            shape = argument(0, "shape")
            symbols = tuple(self.symbol(n) for n in getattr(shape, "elts", [shape] if shape is not None else []))
            value = 0.0 if name == "zeros" else (args[1].const if len(args) > 1 else None)
            dtype = argument(1 if name == "zeros" else 2, "dtype")
            return self.converted(Value(symbols, const=value), dtype)
        if name in ("zeros_like",):
            return Value(first.shape, dtype=first.dtype, const=0.0)
        if name == "load":
            return self.load(node, args, named, nodes)
        if name in ("store", "atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas"):
            self.access(node, first)
            return NOTHING
        if name in ("sum", "max", "min", "argmax", "argmin", "xor_sum", "cumsum", "cumprod", "reduce"):
            return self.reduce(node, name, first, argument(1, "axis"), nodes)
        if name == "dot":
            return self.dot(node, args, named, nodes)
        if name == "where" and len(args) == 3:
            return self.where(node, *args)
        if name in ("maximum", "minimum") and len(args) >= 2:
            return self.binary("Max" if name == "maximum" else "Min", args[0], args[1], node)
        if name == "fma" and len(args) == 3:
            return self.binary("Add", self.binary("Mult", args[0], args[1], node), args[2], node)
        if name == "fdiv" and len(args) >= 2:
            return self.binary("Div", args[0], args[1], node)
        if name in MAPS:
            lanes = {k: mapped(name, v) for k, v in first.lanes.items()}
            return Value(first.shape, lanes, dtype=first.dtype, positive=name in POSITIVE)
        if name in ("cdiv", "min", "max"):
            return max(args, key=lambda v: ORDER[v.offset], default=SCALAR)._replace(name="", const=None)
        if name in ("multiple_of", "max_contiguous", "assume", "expand_dims", "broadcast_to"):
            return first if name != "expand_dims" else first._replace(shape=None)
        if name in ("trans", "permute") and len(args) == 1:
            return first._replace(shape=tuple(reversed(first.shape)) if first.shape else None)
        if name in ("num_programs",):
            return SCALAR
        offsets = max(args, key=lambda v: ORDER[v.offset], default=SCALAR)
        return Value(offset=offsets.offset if name == "swizzle2d" else "", place=self.place(node))

    def symbol(self, node):
        if node is None:
            return "?"
        value = number(node)
        if value is not None:
            return int(value)
        known = self.env.get(node.id) if isinstance(node, ast.Name) else None
        if known is not None and known.name:
            return known.name
        if known is not None and known.const is not None:
            return int(known.const)
        return ast.unparse(node)

    def converted(self, value, dtype):
        if dtype is None:
            return value._replace(name="")
        kind = dotted(dtype).rpartition(".")[2]
        width = "low" if kind in LOW else "wide" if kind in WIDE else ""
        offset = value.offset
        if kind in ("int64", "uint64") and offset != "over":
            offset = "wide"
        return value._replace(dtype=width, offset=offset, name="")

    def access(self, node, pointer):
        self.top.accesses += 1
        if pointer.offset == "over":
            self.report(pointer.place or node, "offset-in-32-bits")
        elif pointer.offset == "block":
            self.top.flat.append(pointer.place or self.place(node))

    def load(self, node, args, named, nodes):
        pointer = args[0] if args else NOTHING
        if isinstance(node.func, ast.Attribute) and dotted(node.func.value) not in ("tl", "triton.language"):
            return Value(dtype="stored")  # of a descriptor, which fills with 0
        self.access(node, pointer)
        mask = named.get("mask", args[1] if len(args) > 1 else NOTHING)
        other = nodes.get("other", node.args[2] if len(node.args) > 2 else None)
        if "boundary_check" in nodes:
            value = 0.0 if "padding_option" in nodes else UNDEFINED
            return Value(pointer.shape, {"*": self.lane(value, node)}, dtype="stored")
        if other is None:
            value = UNDEFINED
        else:
            filled = self.eval(other)
            value = UNKNOWN if filled.const is None else filled.const
        lanes = {axis: self.lane(value, node) for axis in mask.mask}
        return Value(broadcast(pointer.shape, mask.shape), lanes, dtype="stored")

    def where(self, node, condition, a, b):
        shape = broadcast(condition.shape, broadcast(a.shape, b.shape))
        lanes = {}
        for axis in {**a.lanes, **b.lanes, **condition.lanes}:
            values = [held(v, axis) for v in (a, b)]
            source = next(v.lanes[axis] for v in (a, b, condition) if axis in v.lanes)
            chosen = condition.lanes.get(axis)
            if chosen is not None and isinstance(chosen.value, float):
                value = values[0] if chosen.value else values[1]
                value = UNKNOWN if value == OTHER else value
            elif values[0] == values[1]:
                value = values[0]
            else:
                value = UNDEFINED if UNDEFINED in values else UNKNOWN
            lanes[axis] = moved(source, value)
        for axis in condition.mask:
            value = held(b, axis)
            lanes[axis] = b.lanes.get(axis) or self.lane(UNKNOWN if value == OTHER else value, node)
        dtype = a.dtype if a.dtype == b.dtype or b.const is not None else joined_dtype(a, b)
        return Value(shape, lanes, dtype=dtype, positive=is_positive(a) and is_positive(b))

    def reduce(self, node, name, value, axis, nodes):
        if value.shape == () and not value.lanes:  # max(a, b) of two numbers
            return SCALAR
        where = None if axis is None else number(axis)
        shape, reduced = value.shape, None
        if shape is not None:
            if where is None:
                reduced = [s for s in shape if s != 1]
                rest = ()
            elif -len(shape) <= int(where) < len(shape):
                reduced = [shape[int(where)]]
                rest = tuple(s for i, s in enumerate(shape) if i != int(where) % len(shape))
            else:
                reduced, rest = [], None
        else:
            rest = None
        scan = name in ("cumsum", "cumprod")
        symbols = list(value.lanes) if reduced is None else [s for s in reduced if s in value.lanes]
        symbols += [s for s in ("*",) if s in value.lanes and s not in symbols]
        for symbol in symbols:
            lane = value.lanes[symbol]
            if lane.value == UNDEFINED:
                self.fault(lane, node, "masked-load-without-other", name)
            elif name in NEUTRAL and isinstance(lane.value, float):
                far = abs(lane.value) >= 1e9 and (lane.value > 0) == (NEUTRAL[name] > 0)  # as good as infinite
                right = (
                    lane.value == NEUTRAL[name]
                    or (far and name != "sum")
                    or (name == "max" and lane.value == 0.0 and is_positive(value))
                )
                if not right:
                    self.fault(
                        lane, node, "moved-fill" if lane.moved else "wrong-fill", f"{lane.value:g} into a {name}"
                    )
            elif name in NEUTRAL and lane.value == ANY:
                self.fault(lane, node, "moved-fill", f"into a {name}")
        if name in ("sum", "cumsum") and value.dtype in ("stored", "low") and "dtype" not in nodes:
            self.report(node, "low-precision-sum", f"{name} of what was loaded, in its own dtype")
        for symbol in reduced or ():
            if symbol in self.top.tuned and symbol not in self.top.stepped:
                self.report(node, "autotuned-reduction-block", str(symbol))
        if scan:
            return value._replace(lanes={})
        lanes = {k: v for k, v in value.lanes.items() if reduced is not None and k not in reduced and k != "*"}
        lanes = {k: v._replace(value=UNKNOWN) if name != "sum" or v.value != 0.0 else v for k, v in lanes.items()}
        result = Value(rest, lanes, dtype=value.dtype if name in ("sum", "max", "min") else "", positive=value.positive)
        indices = nodes.get("return_indices")
        if indices is not None:
            return Value(items=(result, Value(rest)))
        return result

    def fault(self, lane, node, rule, detail):
        self.linter.report(lane.place.source, lane.place.line, rule, detail, once=("fill", lane.origin))

    def dot(self, node, args, named, nodes):
        a, b = (args + [NOTHING, NOTHING])[:2]
        inner = [a.shape[-1] if a.shape else None, b.shape[-2] if b.shape and len(b.shape) > 1 else None]
        known = next((s for s in inner if s is not None), None)
        values = []
        for operand, symbol in zip((a, b), inner):
            keys = [k for k in (symbol, "*") if k in operand.lanes]
            values.append(operand.lanes[keys[0]] if keys else None)
        undefined = [v for v in values if v and v.value == UNDEFINED]
        if undefined:
            self.fault(undefined[0], node, "masked-load-without-other", "dot")
        elif any(values):
            held = combine("Mult", *(v.value if v else OTHER for v in values))
            if held == ANY or isinstance(held, float) and held != 0.0:
                worst = next(v for v in values if v and v.value != 0.0)
                self.fault(worst, node, "moved-fill" if worst.moved else "wrong-fill", "into a dot")
        out = nodes.get("out_dtype")
        if out is not None and dotted(out).rpartition(".")[2] in LOW:
            self.report(node, "low-precision-sum", "out_dtype of the dot")
        acc = named.get("acc", args[2] if len(args) > 2 else None)
        if acc is not None and acc.dtype == "low":
            self.report(node, "low-precision-sum", "accumulator of the dot")
        rows = a.shape[-2] if a.shape and len(a.shape) > 1 else None
        columns = b.shape[-1] if b.shape and len(b.shape) > 1 else None
        if known is not None:
            if isinstance(known, int) and 1 < known < 16:
                self.report(node, "small-block-k", f"{known}")
            if known in self.top.tuned and known not in self.top.stepped:
                self.report(node, "autotuned-reduction-block", str(known))
            self.top.dots.append((rows, columns, known, self.top))
        return Value((rows, columns) if rows and columns else None, dtype="wide" if out is None else "")
