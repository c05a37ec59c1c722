"""
Train a model, or several one after the other or side by side.

    python train.py configs/toy.py                                    one run
    python train.py configs/toy.py --lr=1e-3,2e-3 --seed=0,1          one for each combination
    python train.py configs/toy.py --lr=1e-3,2e-3 --jobs=2            two at a time, each on one thread of the CPU
    torchrun --nproc_per_node=8 train.py configs/400m_hc_L24.py       one on eight GPUs
    python train.py --list                                            the runs that have a config file

What a run leaves is in out/<name>: log.jsonl with one line for each step, config.json, checkpoint.pt, loss.png; with
--layer_stats also layers.jsonl, with --jobs what it printed, stdout.txt. The same command, given again, goes on from the
checkpoint and arrives where it would have arrived without the stop: on a CPU to the bit, on a GPU but for the order in which its
attention adds up gradients.
"""

import contextlib
import ctypes
import errno
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import configs
import data
import flops
import kernels
import residuals
from configs import Mistake, TrainConfig, require
from model import Transformer

try:
    import fcntl
except ImportError:  # not on Windows, where two processes may then get into one folder
    fcntl = None

# may change when a run goes on
FREE = "name data device compile kernels micro_batch_size eval_every save_every log_every layer_stats sample".split()
PEAK = {"A100": flops.A100, "H100": 989e12, "H200": 989e12}  # dense bf16 FLOP/s
PIECE = 4096  # tokens whose logits are in float32 at a time


# ---------------------------------------------------------------------------------------------------------------------
# One step


def lr_at(step, cfg):
    """Linear warm-up from zero, then a cosine down to min_lr_frac of the peak. Steps count from 1."""
    warmup = round(cfg.warmup_frac * cfg.max_steps)
    if step < warmup:
        return cfg.lr * step / warmup
    done = (step - warmup) / max(1, cfg.max_steps - warmup)
    return cfg.lr * (cfg.min_lr_frac + (1 - cfg.min_lr_frac) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model, cfg):
    """AdamW on all parameters, without weight decay for those that their own module exempts in `no_decay`. Raises Mistake."""
    decay, no_decay, seen = [], [], set()
    for module in model.modules():
        exempt = getattr(module, "no_decay", ())
        require(not isinstance(exempt, str), f"{type(module).__name__}.no_decay is the text {exempt!r}; a tuple of names is ({exempt!r},)")
        for name, p in module.named_parameters(recurse=False):
            if p not in seen:
                (no_decay if name in exempt else decay).append(p)
                seen.add(p)
    groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    fused = True if cfg.precision != "bf16" else None  # the authors' rounds after each operation, which in bf16 undoes the decay
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=fused)


def to_bf16(model):
    """The authors' recipe: weights, and with them gradients and moments, in bf16, but for what a rule keeps in float32. Theirs is
    under autocast besides; ours is not, which changes no matrix product, and leaves the routing of HC and mHC in float32."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name not in getattr(module, "keep_float32", ()):
                p.data = p.data.bfloat16()


def token_losses(model, batch, cfg, device):
    """-log p of each next token of batch (B, T + 1), in float32: (B T,)."""
    batch = torch.from_numpy(batch).to(device)
    amp = cfg.precision == "amp" or (cfg.precision == "auto" and device.type == "cuda")
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        logits = model(batch[:, :-1]).flatten(0, 1)
    pieces = zip(logits.split(PIECE), batch[:, 1:].flatten().split(PIECE))  # all at once, float32 logits would be the largest tensor
    return torch.cat([checkpoint(losses, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces])


def losses(logits, targets):
    return cross_entropy(logits.float(), targets, reduction="none")


def train_step(model, optimizer, windows, step, cfg, ranks, stop, log=None):
    """One optimizer step on a global batch, in micro-batches. Returns what the log should say about it.

    A request to stop is heeded between micro-batches, before anything has changed; so is a loss that is not finite.
    Given a log, every cfg.layer_stats-th step leaves a line in layers.jsonl, before its loss is found not to be finite.
    """
    measured = log and log.first and cfg.layer_stats and step % cfg.layer_stats == 0
    depth = watch_depth(model) if measured else None
    lr = lr_at(step, cfg)
    for group in optimizer.param_groups:
        group["lr"] = lr
    mine = ranks.share(cfg.batch_size)
    micro_batches = [mine[i : i + cfg.micro_batch_size] for i in range(0, len(mine), cfg.micro_batch_size)]
    loss = 0.0
    for i, rows in enumerate(micro_batches):
        stop.check()
        last = i + 1 == len(micro_batches)
        with contextlib.nullcontext() if last or ranks.n == 1 else model.no_sync():
            part = token_losses(model, windows.batch(step - 1, cfg.batch_size, rows), cfg, ranks.device).mean() / len(micro_batches)
            part.backward()
        loss += part.detach().double()
    if measured:
        log.write({"step": step, **layer_stats(model, *depth)}, "layers.jsonl")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
    loss, norm = ranks.sum(loss).item() / ranks.n, norm.item()
    if not math.isfinite(loss) or not math.isfinite(norm):
        batches = (windows.batch(step - 1, cfg.batch_size, rows) for rows in micro_batches)
        where = first_not_finite(model, batches, cfg, ranks.device)
        raise NotFinite(f"stopped at step {step}: loss {loss:.4g}, gradient norm {norm:.4g}, learning rate {lr:.3g}; {where}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"step": step, "loss": loss, "lr": lr, "grad_norm": norm}


def watch_depth(model):
    """RMS of the depth states z_0 ... z_L and of the updates z_{l+1} - z_l: two lists for the next forward pass to fill.

    That pass is of the first micro-batch of the first rank. z_l is the vector that the probes compare, all streams of a token.
    """
    model = getattr(model, "module", model)
    readers = {block: block.attn_residual.reader for block in model.blocks} | {model.reader: model.reader}
    stream, update, before = [], [], []

    @torch.no_grad()
    def look(module, args):
        z = residuals.wide(readers[module].vector(*args))
        stream.append(rms(z))
        if before:
            update.append(rms(z - before.pop()))
        before.append(z)
        handles.pop(0).remove()

    handles = [module.register_forward_pre_hook(look) for module in readers]
    return stream, update


def rms(x):
    return x.square().mean().sqrt()


def layer_stats(model, stream, update):
    """What layers.jsonl says of a step: a blow-up of the stream shows there long before the loss is not finite.

    stream: RMS of z_0 ... z_L; and of each layer: update, RMS of z_{l+1} - z_l; gain, RMS of z_{l+1} over that of z_l;
    gradient, the norm of that of its parameters before clipping (those that layers share count in each).
    """
    blocks = getattr(model, "module", model).blocks
    gradients = [[residuals.wide(p.grad) for p in block.parameters() if p.grad is not None] for block in blocks]
    stream, update, gradient = map(torch.stack, (stream, update, [torch.nn.utils.get_total_norm(each) for each in gradients]))
    stats = {"stream": stream, "update": update, "gain": stream[1:] / stream[:-1], "gradient": gradient}
    return {key: values.tolist() for key, values in stats.items()}


class NotFinite(Exception):
    """A loss or a gradient is NaN or infinite."""


@torch.no_grad()
def first_not_finite(model, batches, cfg, device):
    """Which layer the trouble starts in, for the message: the first of this rank's micro-batches that has some tells."""
    model, found = getattr(model, "module", model), []

    def hook(name):
        return lambda module, args, y: found.append(name) if not torch.isfinite(y).all() else None

    names = {model.embed: "the embedding", model.head: "the head"}
    for k, (_, F) in enumerate(model.branches()):
        names[F] = f"the {'feed-forward' if k % 2 else 'attention'} of layer {k // 2 + 1}"
    handles = [module.register_forward_hook(hook(name)) for module, name in names.items()]
    for batch in batches:
        token_losses(model, batch, cfg, device)
        if found:
            break
    for handle in handles:
        handle.remove()
    if found:
        return f"the first output that is not finite is that of {found[0]}"
    return "all activations of the first rank are finite, so it is the gradient" + ", or another rank's" * dist.is_initialized()


@torch.no_grad()
def evaluate(model, windows, cfg, ranks, stop, progress=None):
    """Mean loss of the tokens of a fixed set of windows, summed in float64: the same for any micro-batch and rank count, up to rounding."""
    model = getattr(model, "module", model)
    n = min(cfg.eval_batches * cfg.batch_size, len(windows))
    mine = ranks.share(n)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for i in range(0, len(mine), cfg.micro_batch_size):
        stop.check()
        rows = mine[i : i + cfg.micro_batch_size]
        total += token_losses(model, windows.batch(0, n, rows), cfg, ranks.device).double().sum()
        if progress:
            progress(i / len(mine))
    return ranks.sum(total).item() / (n * cfg.seq_len)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks, signals, memory


class Ranks:
    """This process among those that torchrun started, or alone. Rank 0 prints and writes."""

    def __init__(self, device):
        self.n, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        kind = kind_of(device)
        if kind == "cuda" and not torch.cuda.is_available():
            raise Mistake("--device=cuda: torch finds no GPU; --device=cpu runs without")
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device(kind, local if kind == "cuda" else None)
        if kind == "cuda":
            here = torch.cuda.device_count()
            require(local < here, f"no GPU for local rank {local}: this node has {here}, so --nproc_per_node={here}")
            torch.cuda.set_device(self.device)
        if self.n > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")

    @property
    def first(self):
        return self.rank == 0

    def share(self, n):
        """This rank's part of n rows."""
        return range(n * self.rank // self.n, n * (self.rank + 1) // self.n)

    def sum(self, x):
        if self.n > 1:
            dist.all_reduce(x)
        return x

    def wrap(self, model):
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True) if self.n > 1 else model


def kind_of(device):
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class Stop:
    """Ctrl-C, SIGTERM and the end of the terminal ask the run to stop where nothing is lost; a second one ends it at once, and its
    children. Not so with several ranks, each of which a scheduler and torchrun may both have asked."""

    def __init__(self, ranks, children=()):
        self.ranks, self.children, self.signal = ranks, children, 0

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.request) for number in numbers}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def request(self, number, frame):
        if self.signal and (self.ranks is None or self.ranks.n == 1):
            for child in self.children:
                child.kill()
            os._exit(128 + number)
        self.signal = number

    def check(self):
        """Ranks must leave together: they wait for each other inside a step, so only between steps can they agree."""
        if self.signal and self.ranks.n == 1:
            raise Interrupted(self.signal)

    def check_together(self):
        if self.ranks.n > 1:
            asked = torch.tensor(self.signal, device=self.ranks.device)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            if asked:
                raise Interrupted(asked.item())
        self.check()


class Interrupted(Exception):
    @property
    def status(self):
        return 128 + self.args[0]


def open_in(out, name):
    """A file to append to in the folder of a run, which is made if need be. Raises Mistake."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return open(out / name, "a")
    except OSError as error:
        raise Mistake(f"cannot write to {out.resolve()} ({error.strerror}); run the command in a folder that is yours") from None


@contextlib.contextmanager
def alone_in(out, ranks):
    """Keep other processes out of the folder of a run, which is made if need be. The lock is on config.json, and the system
    takes it off when this process ends, however it does. Raises Mistake."""
    with open_in(out, "config.json") as file:
        if fcntl and ranks.first:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Mistake(f"another process is at work in {out}; wait until it ends, or give this run its own --name") from None
            except OSError:  # a file system without locks
                pass
        yield


def keep_freed_memory(reserve=2**30):
    """On Linux, let malloc keep what a step frees for the next one, in huge pages: most of what a depth mixture costs on a
    CPU is asking the system for pages and looking them up."""
    with contextlib.suppress(OSError, AttributeError, StopIteration):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, top_pad, mmap_threshold, huge_page = -1, -2, -3, 14
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # its largest value
        libc.mallopt(top_pad, reserve)  # grow the heap by so much at a time; what is not touched takes no memory
        libc.malloc.restype = ctypes.c_void_p
        libc.free(ctypes.c_void_p(libc.malloc(2**24)))
        heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line)
        start, end = (int(x, 16) for x in heap.split()[0].split("-"))
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), huge_page)


def compile_parts(model):
    """Compile the branches and the functions of the connections; the depth state itself, which grows, stays outside."""
    torch._dynamo.reset()
    try:
        torch.compile(torch.sin)(torch.ones(1, device=model.head.weight.device))
    except Exception as error:
        return f"--compile: no working compiler here ({type(error).__name__}), so the run goes on without"
    for _, F in model.branches():
        F.compile()
    for name in residuals.COMPILABLE:
        WRITTEN.setdefault(name, getattr(residuals, name))
        setattr(residuals, name, torch.compile(WRITTEN[name]))
    return None


WRITTEN = {}  # functions of residuals.py that `compile_parts` has put a compiled one in the place of


def undo_compile():
    while WRITTEN:
        setattr(residuals, *WRITTEN.popitem())


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def save(path, model, optimizer, step, cfg, dataset, record, val_loss=None):
    """Write to a neighbour, sync, rename: a kill at any moment leaves the old checkpoint or the new one. Raises Mistake.

    `record` is the log entry of the step if its evaluation is still to be done, val_loss what its evaluation gave if it had one.
    """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "config": asdict(cfg)}
    state |= {"data": dict(dataset.files), "record": record, "val_loss": val_loss}
    neighbour = path.with_name(path.name + ".new")
    try:
        with open(neighbour, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        neighbour.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            neighbour.unlink()
        need = checkpoint_bytes(model)
        kept = "; the checkpoint before it is untouched" if path.exists() else ""
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise Mistake(f"cannot write {path} ({need:,} bytes needed): {reason}{kept}") from None


def checkpoint_bytes(model):
    """Weights and AdamW's two moments, which have the weights' precision."""
    return sum(3 * p.nbytes for p in model.parameters())


def load_checkpoint(path):
    """The state that `save` wrote, on the CPU, the names of weights as the model has them. Raises Mistake."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state["model"] = {strip(name): w for name, w in state["model"].items()}
        return {key: state[key] for key in ("model", "optimizer", "step", "config", "data", "record", "val_loss")}
    except OSError as error:  # which says nothing of what is in it
        raise Mistake(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        what = f"not a checkpoint of this program, or a damaged one ({type(error).__name__})"
        raise Mistake(f"{path} is {what}; if it is that of a run, remove it to start over") from None


def load_model(path):
    """The model of a checkpoint, on the CPU, and the config of its run. Raises Mistake."""
    return model_of(load_checkpoint(path))


def model_of(state):
    name = state["config"]["name"]
    try:
        cfg = TrainConfig(**state["config"])
        model = Transformer(cfg)
        if cfg.precision == "bf16":
            to_bf16(model)
        model.load_state_dict(state["model"])
    except (TypeError, RuntimeError) as error:
        raise Mistake(f"the checkpoint of {name} is of another version of this program: {' '.join(str(error).split())[:300]}") from None
    return model, cfg


def strip(name):
    """A weight's name without what torch.compile or DistributedDataParallel put before it."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.partition(".")[2]
    return name


def changed_files(state, dataset):
    """Names of the shards that are not what they were when the state was saved."""
    return [file for file in state["data"].keys() | dataset.files.keys() if state["data"].get(file) != dataset.files.get(file)]


def resume(path, model, optimizer, cfg, dataset):
    """Load the checkpoint, if there is one. Returns its step, the record that waits for evaluation, and the val_loss if it has one."""
    if not path.exists():
        return 0, None, None
    state = load_checkpoint(path)
    then, now = state["config"], asdict(cfg)
    changed = [f"{key}: {then.get(key)} -> {now[key]}" for key in now if key not in FREE and then.get(key) != now[key]]
    if changed:
        raise Mistake(f"{path} is of another run ({', '.join(changed)}); give this one its own --name, or remove that folder")
    for file in changed_files(state, dataset):
        raise Mistake(f"{path} was trained on other data: {file} in {cfg.data} has changed; restore it, or take another --name")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:  # the second where a rule exempts other parameters from decay than it did
        raise Mistake(f"{path} does not fit the model: {' '.join(str(error).split())[:300]}") from None
    return state["step"], state["record"], state["val_loss"]


# ---------------------------------------------------------------------------------------------------------------------
# What a run shows


class Log:
    """The terminal, where the last line is live, log.jsonl, and layers.jsonl. Silent on all ranks but the first."""

    def __init__(self, out, start, first):
        self.first, self.out = first, out
        for path in (out / "log.jsonl", out / "layers.jsonl") if first else ():
            if path.exists():
                kept = [json.dumps(r) + "\n" for r in read_log(path, ["step"]) if r["step"] <= start]
                neighbour = path.with_name(path.name + ".new")
                neighbour.write_text("".join(kept))  # what came after the checkpoint will come again
                neighbour.replace(path)

    def say(self, text, passing=False):
        if self.first:
            say(text, passing)

    def write(self, record, name="log.jsonl"):
        if self.first:
            with open(self.out / name, "a") as file:
                print(json.dumps(record), file=file)


def say(text, passing=False):
    """Print a line; a passing one is for a terminal alone, and the next line overwrites it. None if the terminal has gone."""
    live = sys.stdout.isatty()
    try:
        if live or not passing:
            print("\r\033[K" + text if live else text, end="" if passing else "\n", flush=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def read_log(path, keys=("step", "loss"), tail=None):
    """The records of log.jsonl, or those in its last `tail` bytes; lines that are none, as one that was cut short, are left out."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        if tail:
            file.seek(max(0, path.stat().st_size - tail))
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and record.keys() >= set(keys)]


def introduce(log, cfg, model, dataset, ranks, out):
    given = [f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in asdict(cfg).items() if key != "name"]
    size = {part: f"{n:,}" for part, n in count(model).items()}
    log.say(f"{cfg.name}: {' '.join(given)}")
    log.say(f"parameters {size['total']} (backbone {size['backbone']}, of these the rule's {size['rule']})")
    tokens = cfg.max_steps * cfg.batch_size * cfg.seq_len
    planned = f"{tokens * per_token(cfg):.3g} FLOPs" if per_token(cfg) else "FLOPs n/a"
    where = f"{ranks.n} x {ranks.device.type}" if ranks.n > 1 else ranks.device.type
    megabytes = checkpoint_bytes(model) / 1e6
    log.say(f"{tokens:,} tokens of {dataset.name} ({dataset.tokenizer}) and {planned} planned, on {where}")
    log.say(f"a checkpoint takes {megabytes:,.0f} MB in {out}")


def count(model):
    """Parameters of the model, those without embedding and head, and those that the rule adds to Pre-LN's two gains a layer."""
    total = sum(p.numel() for p in model.parameters())
    branches = sum(p.numel() for _, F in model.branches() for p in F.parameters())
    ends = model.embed.weight.numel() + model.head.weight.numel()
    gains = (2 * len(model.blocks) + 1) * model.embed.embedding_dim
    return {"total": total, "backbone": total - ends, "rule": total - ends - branches - gains}


def per_token(cfg):
    """FLOPs of training on one token; 0 for a rule that flops.py has no formula for."""
    try:
        return flops.train_flops_per_token(cfg)
    except Mistake:
        return 0


def progress_line(record, cfg, ranks, seconds, left):
    """`seconds`: those of the latest steps, for a speed that does not jump about."""
    speed = cfg.batch_size * cfg.seq_len / statistics.median(seconds)
    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else ""
    peak = next((peak for gpu, peak in PEAK.items() if gpu in name), None)
    mfu = f"{speed * per_token(cfg) / peak / ranks.n:.1%}" if peak and per_token(cfg) else "n/a"
    val = f"  val_loss {record['val_loss']:.4f}" if "val_loss" in record else ""
    loss = f"loss {record['loss']:.4f}{val}  lr {record['lr']:.2e}  grad_norm {record['grad_norm']:.2f}"
    return f"step {record['step']}/{cfg.max_steps}  {loss}  {speed:,.0f} tokens/s  MFU {mfu}  {duration(left)} left"


def duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def draw(out, cfg):
    """loss.png: the training loss of each step, a running mean of it, and the validations."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    records = read_log(out / "log.jsonl")
    steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
    vals = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    n = max(1, len(losses) // 50)
    means = [sum(losses[max(0, i - n + 1) : i + 1]) / min(n, i + 1) for i in range(len(losses))]
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    ax.plot(steps, means, color="tab:blue", label=f"training (mean of {n} steps)")
    if vals:
        ax.plot(*zip(*vals), "o-", color="tab:orange", label=f"validation, {vals[-1][1]:.3f} at the end")
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=cfg.name)
    ax.grid(alpha=0.3)
    ax.legend()
    fig.savefig(out / "loss.png", dpi=120)
    plt.close(fig)


# ---------------------------------------------------------------------------------------------------------------------
# A run


def train(cfg):
    """Train from the last checkpoint, or from scratch, to cfg.max_steps. Returns the last validation loss.

    Raises Mistake, NotFinite, and Interrupted after the last whole step has been saved.
    """
    ranks = Ranks(cfg.device)
    dataset = data.open_dataset(cfg.data)
    if dataset.vocab_size > cfg.vocab_size:
        raise Mistake(f"vocab_size={cfg.vocab_size} is smaller than that of {cfg.data}; --vocab_size={dataset.vocab_size} is the least")
    windows, val = dataset.windows("train", cfg.seq_len, cfg.seed), dataset.windows("val", cfg.seq_len, 0)
    out = Path("out") / cfg.name
    with alone_in(out, ranks):
        return train_in(out, cfg, ranks, dataset, windows, val)


def train_in(out, cfg, ranks, dataset, windows, val):
    """`train` in a folder that no other process is in."""
    torch.manual_seed(cfg.seed)
    model = Transformer(cfg)
    if cfg.precision == "bf16":
        to_bf16(model)
    model.to(ranks.device)
    optimizer = make_optimizer(model, cfg)
    start, waiting, loss = resume(out / "checkpoint.pt", model, optimizer, cfg, dataset)
    log = Log(out, start, ranks.first)
    if start == cfg.max_steps and not waiting:
        log.say(f"{out} is complete after {start} steps: val_loss {loss:.4f} (another --name= trains anew)")
        return loss
    if ranks.first:
        (out / "config.json").write_text(json.dumps(asdict(cfg), indent=1) + "\n")
    introduce(log, cfg, model, dataset, ranks, out)
    if start:
        log.say(f"going on after step {start}")
    if problem := kernels.accelerate(model, cfg.kernels):
        log.say(problem)
    undo_compile()  # of the run before
    if cfg.compile and (problem := compile_parts(model)):
        log.say(problem)

    def show_share(done):
        log.say(f"validating {done:.0%}", passing=True)

    def keep():
        if ranks.first:
            save(out / "checkpoint.pt", model, optimizer, step, cfg, dataset, record, loss)
            try:
                draw(out, cfg)
            except Exception as error:  # a picture is not worth a run
                log.say(f"no {out}/loss.png: {error}")

    wrapped, step, record = ranks.wrap(model), start, waiting  # record: of a step whose evaluation is not done yet
    seconds, began = deque(maxlen=20), time.perf_counter()
    with Stop(ranks) as stop:
        try:
            while step < cfg.max_steps or record:
                if record is None:
                    stop.check_together()
                    t = time.perf_counter()
                    record = train_step(wrapped, optimizer, windows, step + 1, cfg, ranks, stop, log)
                    step += 1
                    record["seconds"] = time.perf_counter() - t
                    if step == start + 1:
                        began = time.perf_counter()  # whatever was compiled is compiled
                if step % cfg.eval_every == 0 or step == cfg.max_steps:
                    record["val_loss"] = evaluate(model, val, cfg, ranks, stop, show_share)
                seconds.append(record["seconds"])
                each = (time.perf_counter() - began) / (step - start - 1) if step > start + 1 else record["seconds"]
                shown = step % cfg.log_every == 0 or "val_loss" in record or step == 1
                log.say(progress_line(record, cfg, ranks, seconds, each * (cfg.max_steps - step)), passing=not shown)
                log.write(record)
                loss, record = record.get("val_loss"), None
                if step % cfg.save_every == 0 or step == cfg.max_steps:
                    keep()
            stop.check_together()  # a request that came during the last save is one to end a sweep, too
        except Interrupted:
            optimizer.zero_grad(set_to_none=True)
            if step > start or waiting:
                keep()
            if ranks.n > 1:
                dist.barrier()  # torchrun would kill the first rank while it saves, if another had ended
            log.say(f"interrupted; {out} holds step {step}, and the same command goes on from there")
            raise
    log.say(f"val_loss {loss:.4f}; the curve is {out}/loss.png")
    if ranks.first and cfg.sample:
        show_sample(log, model, dataset, cfg.sample)
    return loss


def show_sample(log, model, dataset, n):
    try:
        tokenizer = dataset.load_tokenizer()
    except Mistake as mistake:
        return log.say(f"no sample of text: {mistake}")
    with torch.compiler.set_stance("force_eager"):  # each length of the text would be compiled anew
        ids = model.generate([], n, temperature=0.8, top_k=50, vocab_size=dataset.vocab_size, eot=dataset.eot)
    text = tokenizer.decode([i for i in ids if i != dataset.eot])
    text = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)  # a terminal obeys control characters
    log.say("A sample of what it has learnt to write:\n" + "\n".join("    " + line for line in text.splitlines()))


# ---------------------------------------------------------------------------------------------------------------------
# Several runs


def one_after_the_other(runs):
    """Train each run. Returns name -> 'val_loss 1.2345', or why there is none; after a run that diverges the others go on."""
    results = {}
    for cfg in runs:
        try:
            results[cfg.name] = f"val_loss {train(cfg):.4f}"
        except NotFinite as problem:
            results[cfg.name] = str(problem)
    return results


def side_by_side(runs, jobs):
    """The same, `jobs` runs at a time, each in a process of its own on one thread; no failure of a run stops the others.

    Raises Interrupted after the runs under way have saved their last whole step.
    """
    waiting, running, results = deque(runs), {}, {}
    work = {cfg.name: flops.train_flops(replace(cfg, residual="preln")) for cfg in runs}  # a rule of the reader's has no formula

    def share():
        parts = (work[cfg.name] * (cfg.name in results or min(1, newest(cfg)["step"] / cfg.max_steps)) for cfg in runs)
        return sum(parts) / sum(work.values())

    def show():
        done = share()
        left = f", {duration((1 - done) / (done - before) * (time.perf_counter() - began))} left" if done > before else ""
        now = [(cfg, newest(cfg)) for cfg, _ in running.values()]
        each = "".join(f"; {cfg.name} {record['step']}/{cfg.max_steps} loss {record['loss']:.4f}" for cfg, record in now if record["step"])
        say(f"{len(results)} of {len(runs)} done{left}{each}"[: get_terminal_size().columns - 1], passing=True)

    def collect():
        time.sleep(0.5)
        for process in [process for process in running if process.poll() is not None]:
            cfg, started = running.pop(process)
            results[cfg.name] = outcome(process, cfg)
            say(f"{cfg.name}  {results[cfg.name]}  {duration(time.perf_counter() - started)}")

    say(f"{len(runs)} runs, {jobs} at a time; what each prints is in out/<name>/stdout.txt")
    before, began = share(), time.perf_counter()
    with Stop(None, running) as stop:
        while (waiting or running) and not stop.signal:
            while waiting and len(running) < jobs:
                cfg = waiting.popleft()
                running[start_run(cfg)] = cfg, time.perf_counter()
            show()
            collect()
        if stop.signal:
            say("interrupted; the runs under way save their last whole step")
            for process in running:
                process.stdin.close()
            while running:
                collect()
            complete = sum(result.startswith("val_loss") for result in results.values())
            say(f"{complete} of {len(runs)} runs are complete, and the same command goes on from there")
            raise Interrupted(stop.signal)
    return {cfg.name: results[cfg.name] for cfg in runs}


def newest(cfg):
    """The last record in the log of a run, or of a step 0."""
    return [{"step": 0}, *read_log(Path("out") / cfg.name / "log.jsonl", tail=2000)][-1]


def start_run(cfg):
    """A process that trains one run, on one thread, apart from the terminal, whose Ctrl-C is for this one.

    Its standard input brings the config; when that ends, because this process closes it or dies, the run saves and stops.
    """
    with open_in(Path("out") / cfg.name, "stdout.txt") as printed:
        process = subprocess.Popen(
            [sys.executable, __file__, "-"], stdin=subprocess.PIPE, stdout=printed, stderr=printed, bufsize=0,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    process.stdin.write(json.dumps(asdict(cfg)).encode() + b"\n")
    return process


def run_of_parent():
    """The other end of `start_run`, `python train.py -`: the config that it sent."""
    cfg = TrainConfig(**json.loads(sys.stdin.readline()))

    def follow():
        os.read(0, 1)  # until it ends; sys.stdin.read would hold a lock that the interpreter wants when it ends first
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()
    return cfg


def outcome(process, cfg):
    """What a process of `start_run` that has ended says of its run: its last line, unless a signal left it none."""
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    printed = (Path("out") / cfg.name / "stdout.txt").read_text(errors="replace")
    return [f"ended with status {process.returncode}", *printed.splitlines()][-1]


def jobs_of(argv):
    """(N, the words without --jobs=N), N = 1 if it is not there. Raises Mistake."""
    given = [word for word in argv if word.partition("=")[0] == "--jobs"]
    if not given:
        return 1, argv
    require(len(given) == 1, "--jobs is given twice")
    number = given[0].partition("=")[2]
    require(number.isdecimal() and int(number) > 0, f"{given[0]}: expected how many runs to train at a time, as in --jobs=2")
    return int(number), [word for word in argv if word not in given]


def main(argv):
    if not argv or "--help" in argv or "-h" in argv:
        print(f"{__doc__}\nOptions, as --key=value, several values separated by commas:\n{configs.describe()}\n\nOf the command:")
        print(f"  {'--jobs=1':28} of several runs, how many to train at a time on a CPU, each on one thread if there are more")
        return
    if "--list" in argv:
        print(flops.list_runs())
        return
    if "--residual=help" in argv:
        print(residuals.table(measure=False))
        return
    keep_freed_memory()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    jobs, words = jobs_of(argv)
    runs = [run_of_parent()] if argv == ["-"] else configs.runs(words)
    for cfg in runs:
        residuals.rule_of(cfg.residual)
        cfg.check_ranks(ranks)
    if jobs > 1:
        require(ranks == 1, f"--jobs={jobs} is for runs of one process each; under torchrun, leave it out")
        on_cpu = all(kind_of(cfg.device) == "cpu" for cfg in runs)
        require(on_cpu, f"--jobs={jobs} shares out a CPU, and these runs would all be on one GPU; leave it out, or add --device=cpu")
    results = side_by_side(runs, jobs) if jobs > 1 else one_after_the_other(runs)
    first = os.environ.get("RANK", "0") == "0"
    if len(runs) > 1 and first:
        print("\n" + "\n".join(f"{name:40} {result}" for name, result in results.items()))
    failed = [result for result in results.values() if not result.startswith("val_loss")]
    if failed:
        sys.exit(failed[0] if first else 1)
    if argv == ["-"]:
        print(results[cfg.name])  # for `outcome`
    elif len(runs) == 1 and cfg.name == "toy" and first:
        print("\nNext:\n  python train.py configs/toy.py --residual=preln --name=toy-preln   # the same with plain residuals")
        print("  python residuals.py                                                # all rules, one line each")


if __name__ == "__main__":
    with configs.one_line_mistakes():
        try:
            main(sys.argv[1:])
        except Interrupted as interrupted:
            sys.exit(interrupted.status)
        except KeyboardInterrupt:  # outside the loop, where there is nothing to save
            sys.exit(130)
        except BrokenPipeError:  # whoever read our lines has gone
            os._exit(1)
        except OSError as error:
            raise Mistake(f"{error.filename or 'a file'}: {error.strerror or error}") from None
        except torch.OutOfMemoryError:
            raise Mistake("out of GPU memory; a smaller --micro_batch_size computes the same with less") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
