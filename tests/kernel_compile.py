"""
Compile the kernels for A100 (sm_80) and H100 (sm_90) without a GPU, and print what ptxas made of them.

    python tests/kernel_compile.py [width ...]         a table; with --json one line for test_kernels.py
                                                       --once: hyper-connections for sm_80 alone

What is compiled is what kernels.py and kernels_hc.py launch: they run here with each kernel replaced by a recorder. That
needs a process of its own, as a kernel that was imported under TRITON_INTERPRET=1 is no kernel for a GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
import kernels_hc

WIDTHS = 544, 608, 640, 672, 768, 800, 896, 960, 992, 1024, 1056, 1120, 1216, 1248, 1344, 1504, 1728, 2048  # of configs/
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Recorder:
    """Stands for a kernel: kernel[grid](...) notes what would be compiled."""

    def __init__(self, fn, launches):
        self.fn, self.launches = fn, launches

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, maxnreg=None, **constants):
        types, attrs = {}, {}
        for i, (name, x) in enumerate(zip(self.fn.arg_names, args)):
            types[name] = TYPES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"
            if isinstance(x, torch.Tensor):
                attrs[(i,)] = [["tt.divisibility", 16]]
            assert isinstance(x, torch.Tensor) or self.fn.params[i].do_not_specialize, f"another {name} would be another program"
        assert len(types) + len(constants) == len(self.fn.arg_names), self.fn.arg_names
        key = self.fn.__name__, tuple(types.items()), tuple(sorted((k, str(v)) for k, v in constants.items())), num_warps
        self.launches[key] = self.fn, types, attrs, constants, dict(num_warps=num_warps, maxnreg=maxnreg)


def record(run):
    """{key: what to compile} of all kernels that `run` launches."""
    launches = {}
    real = [(file, name, fn) for file in (kernels, kernels_hc) for name, fn in vars(file).items() if isinstance(fn, triton.JITFunction)]
    for file, name, fn in real:
        setattr(file, name, Recorder(fn, launches))
    try:
        run()
    finally:
        for file, name, fn in real:
            setattr(file, name, fn)
    return launches


def build(fn, types, attrs, constants, options, arch):
    """One compilation: registers, bytes of spills (stack) and of shared memory, and the loads of 128 bits among all of vectors."""
    signature = types | {name: "constexpr" for name in constants}
    signature = {name: signature[name] for name in fn.arg_names}
    where = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=where, attrs=attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | dict(num_stages=3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    registers, stack, shared = (int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("REG", "STACK", "SHARED"))
    count = lambda *names: sum(len(re.findall(rf"\b{re.escape(name)}\b", sass)) for name in names)  # noqa: E731
    return dict(
        registers=registers, spills=stack, shared=max(shared, binary.metadata.shared), warps=options["num_warps"],
        wide_loads=len(re.findall(r"LDG\.E\.128|LDGSTS\.E\.(?:BYPASS\.)?(?:LTC128B\.)?128", sass)),
        loads=len(re.findall(r"\bLDG\.|\bLDGSTS\.", sass)), local=count("LDL", "STL") + len(re.findall(r"\b(?:LDL|STL)\.", sass)),
        barriers=len(re.findall(r"\bBAR\.", sass)), shuffles=len(re.findall(r"\bSHFL\.", sass)),
        tensor_cores=len(re.findall(r"\bHMMA|\bHGMMA", sass)), instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.M)),
    )  # fmt: skip


def depth_mixing(D, M, b):
    def run():
        x = torch.zeros(1, 2, D, dtype=torch.bfloat16, requires_grad=True)
        w = torch.zeros(D, requires_grad=True)
        bank = kernels.Bank(x, torch.zeros(M, D, requires_grad=True), 1e-6, b)
        for _ in range(M):
            y = bank.read(w, 1e-5)
            bank = bank.add(y * 2)
        y.backward(y)

    return run


def hyper_connections(D):
    def run():
        x = torch.zeros(1, 2, D, dtype=torch.bfloat16, requires_grad=True)
        w = torch.zeros(D, requires_grad=True)
        streams = kernels_hc.Streams.enter(x)
        for _ in range(2):
            streams, x, P, q = streams.connect(torch.zeros(4, D, 24, requires_grad=True), torch.zeros(10), w, 1e-6, 1e-6, True)
            A = kernels.sinkhorn(P[..., :16].contiguous(), 20, 1e-6).unflatten(-1, (4, 4))
            streams = streams.then(x * 2, A, q)
        streams.finish().sum().backward()

    return run


RUNS = {
    "full": lambda D: depth_mixing(D, 141, 1),
    "block": lambda D: depth_mixing(D, 141, 18),
    "mhc": hyper_connections,
}


def main(argv):
    widths = [int(a) for a in argv if a.isdigit()] or WIDTHS
    rows, seen = [], set()
    for D in widths:
        for rule, run in RUNS.items():
            launches = record(run(D))
            for key, what in launches.items():
                if key in seen:  # two rules share it
                    continue
                seen.add(key)
                for arch in (80,) if "--once" in argv and rule != "full" else (80, 90):
                    rows.append(dict(rule=rule, kernel=key[0], d=D, arch=arch, compilations=len(launches), **build(*what, arch)))
                    if "--json" not in argv:
                        print(" ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    if "--json" in argv:
        print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
