"""Runs compiled PTX without a GPU, for its numbers and not its time: NumPy over all threads of a kernel.

Enough of PTX for the kernels that XLA writes of elementwise work; what is not known is refused. Threads may
part at a branch: those that are furthest behind go first, until all have met again. Approximate instructions
(`ex2.approx`, `div.full`) are computed exactly, so that the last bits of a GPU may differ from what is found.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

_TYPES = {
    **{"f32": np.float32, "f64": np.float64, "s16": np.int16, "u16": np.uint16, "b16": np.uint16},
    **{"s32": np.int32, "u32": np.uint32, "b32": np.uint32, "s8": np.int8, "u8": np.uint8},
    **{"s64": np.int64, "u64": np.uint64, "b64": np.uint64, "b8": np.uint8, "pred": np.bool_},
}
_COMPARE = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "ltu": lambda x, y: ~(x >= y)},
    **{"leu": lambda x, y: ~(x > y), "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y)},
    **{"equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y), "neu": np.not_equal},
    **{
        "nan": lambda x, y: np.isnan(x) | np.isnan(y),
        "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    },
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_BINARY = {
    **{"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or},
    **{"xor": np.bitwise_xor, "min": np.fmin, "max": np.fmax, "div": np.divide, "rem": np.fmod},
}
_UNARY = {
    **{"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "ex2": np.exp2, "lg2": np.log2},
    **{"sin": np.sin, "cos": np.cos, "not": np.invert, "tanh": np.tanh},
    **{"rcp": lambda x: x.dtype.type(1) / x, "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x)},
}
_SKIPPED = ("griddepcontrol", "bar", "membar", "fence")


class Instruction(NamedTuple):
    """One line of PTX."""

    guard: str  # a predicate, or ""
    negated: bool
    parts: list[str]  # of the operation's name
    operands: list[str]  # vectors are still in their braces


class Kernel:
    """One entry of a PTX module."""

    def __init__(self, text: str) -> None:
        head, _, body = text.partition("{")
        self.name = re.search(r"\.entry\s+([\w$]+)", head)[1]
        self.parameters = re.findall(r"([\w$]+_param_\d+)", head)
        self.threads = int(re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)[1])
        self.code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in re.sub(r"//.*", "", body).splitlines():
            self._read(line.strip())

    def _read(self, line: str) -> None:
        if not line or line.startswith((".", "}", "{")):
            return
        if label := re.fullmatch(r"(\$?[\w$]+):", line):
            self._labels[label[1]] = len(self.code)
            return
        guard, name, rest = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*?);?", line).groups()
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
        plain = (guard or "").lstrip("!")
        self.code.append(
            Instruction(plain, (guard or "").startswith("!"), name.split("."), operands)
        )

    def run(self, memory: np.ndarray, addresses: list[int], blocks: int) -> None:
        """Runs all threads.

        Args:
          memory: bytes; changed in place.
          addresses: where in it each parameter points to.
          blocks: of the grid.
        """
        given = dict(zip(self.parameters, addresses, strict=True))
        _Run(memory, given, blocks, self.threads).all(self.code, self._labels)


class _Run:
    """All threads of a launch."""

    def __init__(
        self, memory: np.ndarray, parameters: dict[str, int], blocks: int, threads: int
    ) -> None:
        self.memory, self.parameters = memory, parameters
        self.count = blocks * threads
        number = np.arange(self.count, dtype=np.uint32)
        zero = np.zeros_like(number)
        self.registers: dict[str, np.ndarray] = {
            **{"%tid.x": number % threads, "%ctaid.x": number // threads},
            **{"%ntid.x": zero + np.uint32(threads), "%nctaid.x": zero + np.uint32(blocks)},
            **{f"%{kind}.{axis}": zero for kind in ("tid", "ctaid") for axis in "yz"},
        }

    def all(self, code: list[Instruction], labels: dict[str, int]) -> None:
        """Moves the threads that are furthest behind, until all have returned."""
        at = np.zeros(self.count, np.int64)
        targets = set(labels.values())
        with np.errstate(all="ignore"):
            while (now := int(at.min())) < len(code):
                active = at == now
                while True:
                    one = code[now]
                    now += 1
                    if one.parts[0] in ("bra", "ret"):
                        goes = self._guarded(one, active)
                        there = len(code) if one.parts[0] == "ret" else labels[one.operands[0]]
                        at = np.where(goes, there, np.where(active, now, at))
                        break
                    self._execute(one, self._guarded(one, active))
                    if now in targets or now == len(code):
                        at = np.where(active, now, at)
                        break

    def _guarded(self, one: Instruction, active: np.ndarray) -> np.ndarray:
        if not one.guard:
            return active
        flag = self.registers[one.guard]
        return active & (~flag if one.negated else flag)

    def get(self, name: str, kind: Any) -> np.ndarray:
        """An operand as an array of a type; registers keep bits."""
        kind = np.dtype(kind)
        if name.startswith("%"):
            found = self.registers[name]
            if "b" in (kind.kind, found.dtype.kind):
                return found.astype(kind)
            if found.dtype.itemsize == kind.itemsize:
                return found.view(kind)
            return found.view(f"u{found.dtype.itemsize}").astype(f"u{kind.itemsize}").view(kind)
        if name.startswith(("0f", "0F")):
            return np.array([int(name[2:], 16)], np.uint32).view(kind)
        if name.startswith(("0d", "0D")):
            return np.array([int(name[2:], 16)], np.uint64).view(kind)
        bits = 8 * kind.itemsize
        value = int(name, 0) & ((1 << bits) - 1)
        return np.array([value], f"u{kind.itemsize}").view(kind)

    def put(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        """Writes a register where threads are active."""
        if name == "_":
            return
        value = np.broadcast_to(value, (self.count,))
        old = self.registers.get(name)
        if active.all() or old is None or old.dtype.itemsize != value.dtype.itemsize:
            self.registers[name] = value.copy()
        else:
            self.registers[name] = np.where(active, value, old.view(value.dtype))

    def _where(self, operand: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()
        return self.get(base, np.int64) + int(offset or 0)

    def _execute(self, one: Instruction, active: np.ndarray) -> None:
        name, operands = one.parts[0], one.operands
        if name in _SKIPPED or not active.any():
            return
        if name in ("ld", "st"):
            self._move(one, active)
            return
        kind = _TYPES[one.parts[-1]]
        if name == "mov" and "{" in "".join(operands):
            self._pack(operands, active)
            return
        if name == "cvt":
            self.put(operands[0], self._convert(one), active)
            return
        if name == "setp":
            x, y = self.get(operands[1], kind), self.get(operands[2], kind)
            self.put(operands[0], _COMPARE[one.parts[1]](x, y), active)
            return
        self.put(operands[0], self._compute(one, kind), active)

    def _compute(self, one: Instruction, kind: Any) -> np.ndarray:
        name, operands = one.parts[0], one.operands
        get = lambda i, as_=kind: self.get(operands[i], as_)  # noqa: E731
        if name in _UNARY:
            return _UNARY[name](get(1)).astype(kind)
        if name == "div" and not np.issubdtype(kind, np.floating):
            return get(1) // np.maximum(get(2), 1)  # of addresses: never negative
        if name in _BINARY:
            return _BINARY[name](get(1), get(2)).astype(kind)
        if name in ("mov", "cvta"):
            return get(1)
        if name in ("mul", "mad"):
            return self._multiply(one, kind)
        if name == "fma":
            # A float64 holds the product of two float32 exactly.
            wide = get(1).astype(np.float64) * get(2).astype(np.float64)
            return (wide + get(3).astype(np.float64)).astype(kind)
        if name == "selp":
            return np.where(self.registers[operands[3]], get(1), get(2))
        if name in ("shl", "shr"):
            return _shift(name, get(1), get(2, np.uint32))
        if name == "shf":
            count = get(3, np.uint32) & np.uint32(31)
            pair = (get(2).astype(np.uint64) << np.uint64(32)) | get(1).astype(np.uint64)
            left = one.parts[1] == "l"
            moved = pair << count.astype(np.uint64) if left else pair >> count.astype(np.uint64)
            return ((moved >> np.uint64(32)) if left else moved).astype(np.uint32)
        if name == "bfe":
            mask = (np.uint32(1) << get(3, np.uint32)) - np.uint32(1)
            return (get(1, np.uint32) >> get(2, np.uint32)) & mask
        if name == "copysign":
            return np.copysign(get(2), get(1))
        if name == "lop3":
            return _lop3(*(get(i) for i in (1, 2, 3)), int(operands[4], 0))
        if name == "prmt":
            return _permute(get(1), get(2), int(operands[3], 0))
        raise NotImplementedError(".".join(one.parts))

    def _multiply(self, one: Instruction, kind: Any) -> np.ndarray:
        x, y = (self.get(one.operands[i], kind) for i in (1, 2))
        if np.issubdtype(kind, np.floating):
            return x * y
        wide = (
            np.dtype(f"{np.dtype(kind).kind}{2 * np.dtype(kind).itemsize}")
            if one.parts[1] != "lo"
            else None
        )
        if one.parts[1] == "wide":
            product = x.astype(wide) * y.astype(wide)
            kind = wide
        elif one.parts[1] == "hi":
            product = (
                (x.astype(wide) * y.astype(wide)) >> wide.type(8 * np.dtype(kind).itemsize)
            ).astype(kind)
        else:
            product = x * y
        return product + self.get(one.operands[3], kind) if one.parts[0] == "mad" else product

    def _convert(self, one: Instruction) -> np.ndarray:
        to, source = (_TYPES[part] for part in one.parts[-2:])
        value = self.get(one.operands[1], source)
        rounding = set(one.parts[1:-2])
        if rounding & {"rni", "rmi", "rpi", "rzi"} and np.issubdtype(source, np.floating):
            for part, function in (
                ("rni", np.rint),
                ("rmi", np.floor),
                ("rpi", np.ceil),
                ("rzi", np.trunc),
            ):
                value = function(value) if part in rounding else value
        if np.issubdtype(to, np.integer) and np.issubdtype(source, np.floating):
            limits = np.iinfo(to)
            value = np.nan_to_num(np.clip(value.astype(np.float64), limits.min, limits.max))
        if "sat" in rounding:
            value = np.clip(value, 0, 1)
        return value.astype(to)

    def _pack(self, operands: list[str], active: np.ndarray) -> None:
        target, source = operands
        if source.startswith("{"):
            low, high = (self.get(x.strip(), np.uint32) for x in source.strip("{} ").split(","))
            value = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
            self.put(target, value, active)
            return
        value = self.get(source, np.uint64)
        for i, name in enumerate(target.strip("{} ").split(",")):
            self.put(name.strip(), (value >> np.uint64(32 * i)).astype(np.uint32), active)

    def _move(self, one: Instruction, active: np.ndarray) -> None:
        """Loads and stores, of one value or of two or four behind one another."""
        load, kind = one.parts[0] == "ld", _TYPES[one.parts[-1]]
        value, place = one.operands if load else one.operands[::-1]
        if load and one.parts[1] == "param":
            address = self.parameters[place.strip("[] ")]
            self.put(value, np.array([address], np.uint64), active)
            return
        if one.parts[1] not in ("global", "weak", "relaxed"):
            raise NotImplementedError(".".join(one.parts))
        size = np.dtype(kind).itemsize
        cells, at = self.memory.view(f"u{size}"), np.broadcast_to(self._where(place), (self.count,))
        for i, name in enumerate(value.strip("{} ").split(",")):
            where = at // size + i
            if load:
                found = cells[np.where(active, where, 0)]
                # A register has at least 16 bits.
                self.put(name.strip(), found.astype(np.uint16) if size == 1 else found, active)
            else:
                given = np.broadcast_to(self.get(name.strip(), f"u{size}"), (self.count,))
                cells[where[active]] = given[active]


def _shift(name: str, x: np.ndarray, count: np.ndarray) -> np.ndarray:
    bits = 8 * x.dtype.itemsize
    kept = np.minimum(count, bits - 1).astype(x.dtype)
    moved = x << kept if name == "shl" else x >> kept
    over = (
        (x >> x.dtype.type(bits - 1)) if name == "shr" and x.dtype.kind == "i" else x.dtype.type(0)
    )
    return np.where(count < bits, moved, over).astype(x.dtype)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    found = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if table >> i & 1:
            parts = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            found = found | (parts[0] & parts[1] & parts[2])
    return found


def _permute(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    found = np.zeros(pair.shape, np.uint64)
    for i in range(4):
        byte = (pair >> np.uint64(8 * (selector >> (4 * i) & 7))) & np.uint64(255)
        found = found | (byte << np.uint64(8 * i))
    return found.astype(np.uint32)
