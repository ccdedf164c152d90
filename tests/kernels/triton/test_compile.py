"""Every kernel compiles for Ampere and for Hopper, without a GPU: the interpreter accepts more than the compiler.

The machine code of the attention's kernel is read as well. Triton's passes decide its speed, and do not report it if
they give up.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from sarathi_pp_kernels.triton.attention_stages import shared_bytes

from sarathi_pp.bench.gpu.tiles import candidates
from tests.kernels.triton.compiler import run_compiler

# This needs a process of its own: in this one kernels belong to the interpreter. A type is a pointer's, a number's, or
# the value of a constant. None means an argument that is not given.
_COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from sarathi_pp_kernels.triton import expand, expand_mxfp4, few_rows, gate, norm, rotary, sampling

def sources(dtype):
    row = "*" + dtype
    yield gate._gate_rows, (row, row, "i32", 1024), {}
    for added in (row, None):
        yield norm._norm_rows, (row, added, row, row, "fp32", 4096, 4096), {"num_warps": 8}
    for gain, pages in ((row, row), (None, row), (row, "*u8")):
        heads = (row, row, row, "*i64", "*i64", pages, pages, gain, gain, "fp32", "i32", "i32", 4, 4, 48, 64)
        yield rotary._rotate_rows, heads, {"num_warps": 1, "enable_fp_fusion": False}
    for scales, needed, e5m2 in (("*fp32", None, False), ("*bf16", "*i32", False), ("*fp16", None, True)):
        sizes = ("i32",) * 8 + ("i64", "i32")
        yield expand._expand_rows, ("*u8", scales, needed, row, *sizes, 32, 128, e5m2), {}
    # A launch makes a constant of a number that is 1: rows, columns, rows and columns of scales, height, and steps.
    number = "i32"
    for needed, sizes in (
        (None, (number, number, number, 1, 1, number, number, number, "i64", 1)),
        ("*i32", (number, number, 1, 1, number, number, number, number, "i64", 1)),
        (None, (1, number, 1, number, 1, number, number, number, "i64", number)),
        ("*i32", (1, 1, 1, 1, 1, 1, number, number, 1, 1)),
    ):
        yield expand._expand_rows, ("*u8", "*fp32", needed, row, *sizes, 16, 256, False), {}
    for needed, sizes in ((None, ("i32", "i32", 1)), ("*i32", ("i32", "i32", "i32")), ("*i32", (1, 1, 1))):
        yield expand_mxfp4._expand_matrix, ("*u8", "*u8", needed, row, *sizes, 4, 64), {}
    for index, slots, scales in ((None, 1, "*fp32"), ("*i64", 8, "*bf16")):
        own = (row, index, "*u8", scales, "*fp32", "i32", 1 if index is None else "i32", *("i32",) * 11)
        yield few_rows._multiply_float8, (*own, 16, slots, 64, 128, False), {}
    own = (row, "*i64", "*u8", "*u8", "*fp32", "i32", "i32", "i32", 0, "i32", "i32", "i32")
    yield few_rows._multiply_mxfp4, (*own, 16, 4, 64, 4), {}
    for index, bias in ((None, None), (None, row), ("*i64", row)):
        yield few_rows._add_parts, ("*fp32", index, bias, row, *("i32",) * 8, 1024), {}
    eight, shape, digits = {"num_warps": 8}, (128256, 4096, 32, 32), {"fp32": 8, "bf16": 4}[dtype]
    given = (row, "*fp32", "*i64", "*fp64")
    search = (*given, "*i32", "*i32", "*fp64")
    yield sampling._find_block_peaks, (row, "*i32", "*fp32", *shape), eight
    yield sampling._find_peaks, ("*i32", "*fp32", "*i64", "*fp32", *shape), {"num_warps": 1}
    for by_count in (True, False):
        yield sampling._narrow, (*search, "i32", by_count, *shape, digits), eight
    yield sampling._weigh_blocks, (*search, "*fp64", "*fp64", *shape, digits), eight
    yield sampling._invert, (*given, "*fp64", "*fp64", *shape), eight

target = GPUTarget("cuda", int(sys.argv[1]), 32)
for kernel, types, options in sources(sys.argv[2]):
    given = dict(zip(kernel.arg_names, types, strict=True))
    constants = {name: kind for name, kind in given.items() if not isinstance(kind, str)}
    signature = {name: "constexpr" if name in constants else kind for name, kind in given.items()}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"], kernel
    if options.get("enable_fp_fusion") is False:
        # Of bfloat16 there are: Ampere multiplies so, and adds a zero.
        fused = [line for line in compiled.asm["ptx"].splitlines() if "fma.rn.f32" in line]
        assert not fused, f"products are not rounded before they are added: {fused[0]}"
    print(kernel.__name__)
"""


# The kernel as `paged_attention` launches it for Llama-3-8B, with arguments specialised as at a launch: by alignment,
# and by numbers equal to 1. Arguments of the program: (start, tokens) of a microbatch's sequences, capabilities, the
# type of keys and values, channels of a head, and a tile: the arguments of Blocks after few_rows. None takes the
# kernel's own tile.
_ATTEND = """
import json, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from sarathi_pp_kernels.triton import paged_attention as module
from sarathi_pp_kernels.triton.attention_work import Blocks, Extent, cut_work

nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
cpu = torch.device("cpu")

class Recorder:
    def __getitem__(self, grid):
        self.grid = grid
        return self
    def __call__(self, *args, **options):
        self.args, self.options = args, options

extents, capabilities, stored, head_dim, tile = map(json.loads, sys.argv[1:])
blocks = Blocks.of(4, head_dim, 2)
if tile is not None:
    blocks = Blocks(blocks.group, blocks.few_rows, *tile)

def launched(extents, table, capability):
    module._converts_float8 = lambda device: capability >= 89
    parts, row = [], 0
    for start, tokens in extents:
        parts.append(Extent(row, tokens, start, 0))
        row += tokens
    work = cut_work(parts, blocks, None, 8, 132, cpu)
    qkv = torch.empty(row, 48, head_dim, dtype=torch.bfloat16)
    pool = torch.empty(1, 8, 16, head_dim, dtype=getattr(torch, stored))
    kernels, module._attend, module._merge = (module._attend, module._merge), Recorder(), Recorder()
    module.paged_attention(qkv[:, :32], pool, pool, table, work, scaling=0.1, softcap=None, sinks=None)
    found, module._attend, module._merge = module._attend, *kernels
    return found

def specialised(kernel, found):
    types, constants, even = {}, {}, {}
    args = dict(zip(kernel.arg_names, found.args))
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        value = args[name] if name in args else found.options[name]
        if isinstance(value, torch.Tensor):
            kinds = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
            kinds |= {torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
            types[name], number = kinds[value.dtype], value.data_ptr()
        elif isinstance(value, float):
            types[name], number = "fp32", 1
        elif value is None or name not in args or value == 1:
            types[name], constants[name], number = "constexpr", value, 1
        else:
            types[name], number = "i32", value
        if number % 16 == 0 and not parameter.do_not_specialize_on_alignment:
            even[(place,)] = [["tt.divisibility", 16]]
    return types, constants, even

def code(kernel, capability, found):
    options = {name: value for name, value in found.options.items() if name not in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, *specialised(kernel, found))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {"text": text, "shared": made.metadata.shared}

table = torch.zeros(3, dtype=torch.int64)
assert table.data_ptr() % 16 == 0
found = {capability: launched(extents, table, capability) for capability in capabilities}
other = launched(extents, table[1:], capabilities[0])
assert specialised(module._attend, found[capabilities[0]]) == specialised(module._attend, other)
print(json.dumps({capability: code(module._attend, capability, one) for capability, one in found.items()}))
"""


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (80, "bf16"),
        (90, "fp32"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(80, "fp32"), (90, "bf16")]),
    ],
)
def test_every_kernel_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    """By default each capability and each type is compiled once. FP8 is converted with integers on 8.0."""
    found = {*run_compiler(tmp_path, _COMPILE, str(capability), dtype).split()}
    products = {"_multiply_float8", "_multiply_mxfp4", "_add_parts"}
    drawing = {"_find_block_peaks", "_find_peaks", "_narrow", "_weigh_blocks", "_invert"}
    assert found == {"_gate_rows", "_norm_rows", "_rotate_rows", "_expand_rows", "_expand_matrix", *products, *drawing}


@pytest.fixture(scope="module")
def attend(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Code]:
    """Compile the kernel by the microbatch's shape and the capability of the device."""
    shapes: dict[str, list[tuple[int, int]]] = {"decodes": [(1024, 1)] * 64, "chunk": [(4096, 512)]}
    found = {}
    for name, extents in shapes.items():
        made = _compile(tmp_path_factory.mktemp(name), extents, [80, 90])
        found |= {(name, capability): code for capability, code in made.items()}
    return found


def _compile(
    folder: Path,
    extents: list[tuple[int, int]],
    capabilities: list[int],
    stored: str = "bfloat16",
    head_dim: int = 128,
    tile: tuple[int, int, int | None, bool] | None = None,
) -> dict[int, Code]:
    """Return the kernel's machine code for a microbatch, by capability. See _ATTEND."""
    made = run_compiler(folder, _ATTEND, *map(json.dumps, (extents, capabilities, stored, head_dim, tile)))
    return {int(number): Code.of(code["text"], code["shared"]) for number, code in json.loads(made).items()}


# Loops over the keys of few rows, and of many rows after them if there are chunks.
_KINDS = [("decodes", 80), ("chunk", 80), ("decodes", 90), ("chunk", 90)]


@pytest.mark.parametrize("kind", _KINDS)
def test_registers_are_not_spilled_in_loops(attend: dict[tuple[str, int], Code], kind: tuple[str, int]) -> None:
    """On Hopper there are no spills at all: its products run asynchronously only if they have enough registers."""
    code = attend[kind]
    assert not any(_named(part, "STL", "LDL") for part in code.loops + [code.instructions] * (kind[1] == 90))


@pytest.mark.parametrize("kind", _KINDS)
def test_keys_and_values_are_under_way_while_a_block_is_multiplied(
    attend: dict[tuple[str, int], Code], kind: tuple[str, int]
) -> None:
    """They are copied to shared memory asynchronously, 16 bytes per thread.

    A block's first data waits for no later copy.
    """
    loops = attend[kind].loops
    assert len(loops) == (1 if kind[0] == "decodes" else 2)
    for loop in loops:
        copies = _named(loop, "LDGSTS")
        assert len(copies) == (16 if kind[0] == "decodes" else 8) and all(".128" in copy for copy in copies)
        first_wait, *_ = _named(loop, "DEPBAR")
        assert int(first_wait.split(",")[1], 16) >= 3, "keys and values of the next block, and values of this one"
        # All other reads are page ids, and nothing waits for those of this block.
        assert len(_named(loop, "LDG")) == len(copies) // 2
        assert not any("64" in load.split(" ")[0] or "128" in load.split(" ")[0] for load in _named(loop, "LDG"))


def test_chunks_are_multiplied_by_warp_groups_on_hopper(attend: dict[tuple[str, int], Code]) -> None:
    """Two products, each of some instructions that run as one. If registers are short, ptxas waits for each."""
    few, many = attend["chunk", 90].loops
    products = _named(many, "HGMMA")
    assert {product.split(" ")[0] for product in products} == {"HGMMA.64x64x16.F32.BF16", "HGMMA.64x128x16.F32.BF16"}
    assert sum("gsb0" in product for product in products) == 2
    assert not _named(many, "HMMA") and len(_named(few, "HMMA")) == 16


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_a_gpu_compares_run_on_warp_groups_without_spills_in_loops(head_dim: int, tmp_path: Path) -> None:
    """`bench gpu` times them. Two programs of a small one share the memory of a processor, which is 228 KiB."""
    for index, blocks in enumerate(candidates(4, head_dim, 2).values()):
        (folder := tmp_path / str(index)).mkdir()
        tile = blocks.many_rows, blocks.keys, blocks.registers, blocks.ahead
        (code,) = _compile(folder, [(0, 512)], [90], head_dim=head_dim, tile=tile).values()
        loop = code.loops[-1]
        assert not _named(loop, "STL", "LDL", "HMMA"), blocks
        assert sum("gsb0" in product for product in _named(loop, "HGMMA")) == 2, blocks
        registers = max(int(name) for line in code.instructions for name in re.findall(r"\bR(\d+)\b", line)) + 1
        assert blocks.registers is None or registers <= blocks.registers, blocks
        assert blocks.many_programs == 1 or 2 * (code.shared + 1024) <= 228 << 10, blocks
        assert code.shared <= shared_bytes(blocks, head_dim, 2, has_many=True, stages=3, generation=9), blocks
        first, last = (next(at for at, line in enumerate(loop) if sign in line) for sign in ("HGMMA", "gsb0"))
        assert bool(_named(loop[first:last], "MUFU")) == blocks.ahead, "the softmax runs during the scores' products"


@pytest.mark.parametrize("capability", [80, 90])
def test_weights_of_a_chunk_stay_in_registers(attend: dict[tuple[str, int], Code], capability: int) -> None:
    """They stay from product to product: each warp has whole rows. Maxima and sums need no shared memory either."""
    many = attend["chunk", capability].loops[1]
    assert not _named(many, "STS", "STSM") and len(_named(many, "BAR")) <= 6


def test_loops_are_short(attend: dict[tuple[str, int], Code]) -> None:
    """Addresses and masks take instructions that are not products.

    About a hundred of a chunk's instructions are the masks'. Most blocks of keys jump over them.
    """
    most = {("decodes", 80): 460, ("chunk", 80): 720, ("decodes", 90): 460, ("chunk", 90): 530}
    lengths = {kind: len(code.loops[-1]) for kind, code in attend.items()}
    assert all(lengths[kind] <= length for kind, length in most.items()), lengths
    assert all(len(_named(loop, "BRA")) >= 2 for code in attend.values() for loop in code.loops)


@pytest.mark.parametrize(
    ("extents", "most"), [([(1024, 1)] * 64, {80: 1400, 90: 900}), ([(4096, 512)], {90: 600})], ids=["decodes", "chunk"]
)
def test_keys_and_values_in_float8_are_converted_in_registers(
    extents: list[tuple[int, int]], most: dict[int, int], tmp_path: Path
) -> None:
    """They are under way as codes, 8 or 16 bytes per thread. Hopper has an instruction that converts two of them."""
    found = _compile(tmp_path, extents, [*most], "float8_e4m3fn")
    for capability, code in found.items():
        loop = code.loops[-1]
        assert not _named(loop, "STL", "LDL") and len(loop) <= most[capability], (capability, len(loop))
        copies = _named(loop, "LDGSTS")
        assert copies and all(".128" in copy or ".64" in copy for copy in copies), copies
        assert (len(_named(loop, "FMUL")) < 100) == (capability == 90)


@pytest.mark.full
@pytest.mark.parametrize(
    ("head_dim", "most"),
    [(128, {80: (4300, 0), 89: (2300, 0)}), (256, {80: (2350, 55), 89: (1850, 30), 90: (750, 0)})],
    ids=["128", "256"],
)
def test_chunks_in_float8_spill_registers_only_in_wide_heads_before_hopper(
    head_dim: int, most: dict[int, tuple[int, int]], tmp_path: Path
) -> None:
    """A case limits the instructions of the loop over keys, and how many of these spill registers, by capability."""
    found = _compile(tmp_path, [(4096, 512)], [*most], "float8_e4m3fn", head_dim)
    for capability, code in found.items():
        few, many = code.loops
        length, spills = len(many), len(_named(many, "STL", "LDL"))
        most_length, most_spills = most[capability]
        assert length <= most_length and spills <= most_spills, (capability, length, spills)
        assert not _named(few, "STL", "LDL")
        assert all(".128" in copy or ".64" in copy for copy in _named(many, "LDGSTS"))


@dataclass(frozen=True)
class Code:
    """Machine code. loops: the innermost ones that read keys. shared: bytes of shared memory."""

    instructions: list[str]
    loops: list[list[str]]
    shared: int

    @classmethod
    def of(cls, text: str, shared: int) -> Code:
        instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L_\w+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
                instructions.append(instruction[1])
        jumps = [(re.search(r"BRA.*?(\.L_\w+)", line), end) for end, line in enumerate(instructions)]
        spans = [(labels[jump[1]], end + 1) for jump, end in jumps if jump and labels.get(jump[1], end) < end]
        inner = [
            (begin, end)
            for begin, end in spans
            if not any(begin <= other and last <= end for other, last in spans if (other, last) != (begin, end))
        ]
        loops = [instructions[begin:end] for begin, end in inner]
        return cls(instructions, [loop for loop in loops if _named(loop, "LDGSTS")], shared)


def _named(instructions: list[str], *names: str) -> list[str]:
    return [line for line in instructions if line.split(" ")[0].split(".")[0] in names]
