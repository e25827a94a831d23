"""Runs a whole program that XLA has compiled for a GPU, in NumPy: launches in order, on simulated memory.

What is launched, on which buffers, is read from what `--xla_dump_to` writes; `ptx` runs the kernels.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ptx

_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_THUNK = re.compile(r"^\s*(\d+): k(\w+)\s+\[.*?\]\s*(\S*)(?: grid: \[(\d+), (\d+), (\d+)\])?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.M)
_OPERAND = re.compile(r"%([\w.\-]+)")
_DTYPES = {"f32": np.float32, "s32": np.int32, "u32": np.uint32, "pred": np.bool_}


class Slice(NamedTuple):
    """A place in memory."""

    start: int
    size: int


class Launch(NamedTuple):
    """Something that a program does."""

    kind: str  # Copy, CustomKernel or While
    instruction: str
    kernel: str
    blocks: int
    body: list[Launch]


class Module:
    """A compiled program.

    Args:
      directory: what XLA wrote.
      name: of the module, such as "jit_run".
    """

    def __init__(self, directory: Path, name: str) -> None:
        def read(ending: str) -> str:
            return next(directory.glob(f"*.{name}.{ending}")).read_text()

        text = read("*gpu_after_optimizations.txt")
        self._instructions = {
            match[2]: (match[3], match[4], match[5]) for match in _INSTRUCTION.finditer(text)
        }
        entry = text[text.index("\nENTRY ") :]
        self._parameters = {
            int(match[5].partition(")")[0]): match[2]
            for match in _INSTRUCTION.finditer(entry)
            if match[4] == "parameter"
        }
        self._results = next(
            _operands(match[5]) for match in _INSTRUCTION.finditer(entry) if match[1]
        )
        self._places, self._size = _memory(read("*gpu_after_optimizations-buffer-assignment.txt"))
        self._trips = {
            match[1]: int(match[2])
            for match in re.finditer(
                r'%([\w.\-]+) = .* while\(.*known_trip_count":\{"n":"(\d+)"', text
            )
        }
        heads = dict(re.findall(r"^%([\w.\-]+) \(([\w.\-]+): \(", text, re.M))
        self._loops = {  # what a loop's body is given → what the loop is given
            heads[body]: given
            for given, body in re.findall(r" while\(%([\w.\-]+)\).*? body=%([\w.\-]+)", text)
        }
        annotated = re.findall(
            r'profile_annotation: "([^"]*)"\n\s*thunk_id: (\d+)', read("thunk_metadata.txt")
        )
        names = {int(number): what for what, number in annotated}
        self._launches = _launches(read("thunk_sequence_after_thunk_passes.txt"), names)
        texts = (path.read_text() for path in directory.glob(f"*.{name}.*.ptx"))
        kernels = (ptx.Kernel(text) for text in texts if ".entry" in text)  # else constants
        self._kernels = {kernel.name: kernel for kernel in kernels}
        self.kernel_runs = 0

    def run(self, arguments: list[np.ndarray]) -> list[np.ndarray]:
        """The results, in order."""
        memory = np.zeros(self._size, np.uint8)
        for number, name in self._parameters.items():
            self._write(memory, name, arguments[number])
        for name, (_, operation, rest) in self._instructions.items():
            if operation == "constant" and (name, "") in self._places:
                self._write(memory, name, self._constant(name, rest))
        for launch in self._launches:
            self._launch(memory, launch)
        return [self._read(memory, name) for name in self._results]

    def _launch(self, memory: np.ndarray, launch: Launch) -> None:
        if launch.kind == "While":
            for _ in range(self._trips[launch.instruction]):
                for inner in launch.body:
                    self._launch(memory, inner)
            return
        shape, _, rest = self._instructions[launch.instruction]
        read = [self._place(name) for name in _operands(rest)]
        wrote = self._outputs(launch.instruction, shape)
        if launch.kind == "Copy":
            source, target = read[0], wrote[0]
            memory[target.start : target.start + target.size] = memory[
                source.start : source.start + source.size
            ]
            return
        places = [*read, *wrote]
        addresses = [place.start for place in places]
        self._kernels[launch.kernel].run(memory, addresses, launch.blocks)
        self.kernel_runs += 1

    def _outputs(self, name: str, shape: str) -> list[Slice]:
        if not shape.startswith("("):
            return [self._places[name, ""]]
        count = len(re.findall(r"\b[a-z]\w*\[", shape))
        return [self._places[name, str(i)] for i in range(count)]

    def _place(self, name: str) -> Slice:
        """Where an operand is, behind bitcasts and elements of tuples."""
        _, operation, rest = self._instructions[name]
        if operation == "bitcast":
            return self._place(_operands(rest)[0])
        if operation == "get-tuple-element":
            of, index = _operands(rest)[0], re.search(r"index=(\d+)", rest)[1]
            return self._element(of, index)
        return self._places[name, ""]

    def _element(self, of: str, index: str) -> Slice:
        if (of, index) in self._places:
            return self._places[of, index]
        # A loop hands on what it does not change.
        if of in self._loops:
            return self._element(self._loops[of], index)
        _, operation, rest = self._instructions[of]
        inner = _operands(rest)
        if operation == "while":
            return self._element(inner[0], index)
        assert operation == "tuple", operation
        return self._place(inner[int(index)])

    def _write(self, memory: np.ndarray, name: str, value: np.ndarray) -> None:
        place = self._places[name, ""]
        bits = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        assert len(bits) == place.size, (name, len(bits), place)
        memory[place.start : place.start + place.size] = bits

    def _read(self, memory: np.ndarray, name: str) -> np.ndarray:
        kind, dims = re.match(r"(\w+)\[([\d,]*)\]", self._instructions[name][0]).groups()
        place = self._place(name)
        bits = memory[place.start : place.start + place.size]
        return bits.view(_DTYPES[kind]).reshape([int(n) for n in dims.split(",") if n]).copy()

    def _constant(self, name: str, rest: str) -> np.ndarray:
        kind, dims = re.match(r"(\w+)\[([\d,]*)\]", self._instructions[name][0]).groups()
        text = rest[: rest.index(")")]
        numbers = [
            n == "true" if n in ("true", "false") else float(n)
            for n in re.findall(r"[\w.+\-]+", text)
        ]
        shape = [int(n) for n in dims.split(",") if n]
        assert len(numbers) == math.prod(shape), name
        return np.asarray(numbers).astype(_DTYPES[kind]).reshape(shape)


def _operands(rest: str) -> list[str]:
    return _OPERAND.findall(rest.partition("), ")[0] if "), " in rest else rest)


def _memory(text: str) -> tuple[dict[tuple[str, str], Slice], int]:
    """Where every value is, and how much memory there is; allocations lie behind one another."""
    places: dict[tuple[str, str], Slice] = {}
    base = end = 256
    for line in text.splitlines():
        if match := re.match(r"allocation \d+: size (\d+)", line):
            base, end = end, end + -(-int(match[1]) // 256) * 256
        elif match := _VALUE.match(line):
            places[match[1], match[2] or ""] = Slice(base + int(match[4]), int(match[3]))
    return places, end


def _launches(text: str, names: dict[int, str]) -> list[Launch]:
    """The launches in order; those of a loop's body within the loop."""
    found: list[Launch] = []
    now, skipped = found, False
    for line in text.splitlines():
        if line.strip() in ("condition:", "body:"):
            skipped = line.strip() == "condition:"
            continue
        match = _THUNK.match(line)
        if match and not line.startswith((" ", "\t")):
            now = found
        if match is None or match[2] in ("CommandBuffer", "Sequential") or skipped:
            continue
        blocks = math.prod(int(n) for n in match.groups()[3:]) if match[4] else 0
        launch = Launch(match[2], names[int(match[1])], match[3], blocks, [])
        now.append(launch)
        if launch.kind == "While":
            now = launch.body
    return found
