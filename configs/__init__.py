"""
What a run is: a frozen dataclass, written in a Python file, with overrides from the command line.

    python train.py configs/400m_fullattnres_L32.py --max_steps=10 --lr=1e-3,2e-3

A config file is an ordinary module that defines `config = TrainConfig(...)`. It is imported, not exec'd into somebody's
globals, so an editor can jump from it to the fields below and a misspelt field is a TypeError. Nothing here needs torch
or knows a residual rule: flops.py reads the same files, and residuals.py checks `residual` and its options.
"""

import difflib
import importlib.util
import inspect
import itertools
import math
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path


class Mistake(ValueError):
    """What its maker can mend: the value, the rule that it broke, the way out, in one line."""


@contextmanager
def one_line_mistakes():
    """Inside, a Mistake ends the program with its line and exit status 2, without a traceback; so does `| head`, without a line."""
    try:
        yield
        sys.stdout.flush()
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # nobody reads on
        sys.stdout = None  # not flushed again at exit
        sys.exit(2)


@dataclass(frozen=True)
class ModelConfig:
    """What can be chosen is a field, what follows from it a property: an override leaves nothing stale."""

    residual: str = "preln"  # residual rule and its options, as in hc:m=2:dynamic=off; `help` lists the rules
    n_layer: int = 24  # layers L, each an attention and a feed-forward
    d_model: int = 1024  # width d of the residual stream
    n_head: int = 16  # query heads
    n_kv_head: int = 0  # key-value heads, each shared by n_head / n_kv_head query heads; 0: as many as n_head
    ff_ratio: float = 8 / 3  # width of the feed-forward over d_model; rounded up to a multiple of 16
    vocab_size: int = 50280  # rows of the embedding and of the head
    seq_len: int = 2048  # tokens in a sequence
    rope_base: float = 10000.0  # base of the rotary frequencies
    init_std: float = 0.02  # of all initial weights; normal, cut at three standard deviations

    @property
    def d_head(self):
        return self.d_model // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def d_ff(self):
        return 16 * math.ceil(round(self.ff_ratio * self.d_model / 16, 6))  # rounding: 3.2 * 640 / 16 must be 128

    def __post_init__(self):
        for field in fields(self):
            check_type(field, getattr(self, field.name))
        for key in "n_layer", "d_model", "n_head", "ff_ratio", "vocab_size", "seq_len", "rope_base", "init_std":
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        if self.d_model % (2 * self.n_head):
            near = nearest(self.d_model, lambda d: d % (2 * self.n_head) == 0)
            raise Mistake(f"d_model={self.d_model} does not make n_head={self.n_head} heads of even width; d_model={near} does")
        if self.n_kv_head < 0 or self.n_head % self.kv_heads:
            near = nearest(self.kv_heads, lambda n: self.n_head % n == 0)
            raise Mistake(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}; n_kv_head={near} does")


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """A model and how it is trained: all fields on one level, so that the command line needs no prefixes."""

    name: str = ""  # the run writes to out/<name>; without one it has the name of its config file
    data: str = "data/fineweb-edu"  # stdlib, english, automaton, or a folder that data.py has prepared
    max_steps: int = 7600  # optimizer steps
    batch_size: int = 512  # sequences in one optimizer step, over all ranks
    micro_batch_size: int = 8  # sequences in one forward pass of one rank; configs/ aims at 80 GB a GPU, estimated and not tried
    lr: float = 2e-3  # peak learning rate
    warmup_frac: float = 0.1  # share of the steps in which the learning rate rises from zero
    min_lr_frac: float = 0.1  # share of the peak at which the cosine ends
    weight_decay: float = 0.1  # AdamW's, on everything but what a rule exempts
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the whole gradient
    eval_every: int = 200  # steps between validations
    eval_batches: int = 4  # a validation is of this many times batch_size sequences, the same ones each time
    save_every: int = 500  # steps between checkpoints
    log_every: int = 10  # steps between printed lines
    layer_stats: int = 0  # steps between measurements of the stream and the gradient of each layer, in layers.jsonl; 0: none
    sample: int = 0  # tokens of text that the trained model writes at the end
    seed: int = 0  # of the initial weights and of the order of the data
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    precision: str = "auto"  # fp32, amp (bf16 autocast, float32 weights), bf16 (weights and moments too), auto: amp on cuda
    compile: bool = False  # compile the branches and the functions of the connections
    kernels: str = "reference"  # connections as residuals.py writes them, or triton: those of kernels.py; auto: on a GPU

    CHOICES = {"device": ("auto", "cpu", "cuda"), "precision": ("auto", "fp32", "amp", "bf16"), "kernels": ("reference", "triton", "auto")}

    def __post_init__(self):
        super().__post_init__()
        for key, choices in self.CHOICES.items():
            value = getattr(self, key)
            require(value in choices, f"{key}={value} is not one of {', '.join(choices)}{suggest(value, choices)}")
        for key in "max_steps batch_size micro_batch_size lr grad_clip eval_every eval_batches save_every log_every".split():
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        for key in "warmup_frac", "min_lr_frac":
            require(0 <= getattr(self, key) <= 1, f"{key}={getattr(self, key)} must be between 0 and 1")
        for key in "beta1", "beta2":
            require(0 <= getattr(self, key) < 1, f"{key}={getattr(self, key)} must be at least 0 and below 1")
        for key in "weight_decay", "layer_stats", "sample", "seed":
            require(getattr(self, key) >= 0, f"{key}={getattr(self, key)} must not be negative")
        if self.layer_stats and self.kernels != "reference":
            measured = f"layer_stats={self.layer_stats} reads the depth state, which kernels={self.kernels} may keep in another form"
            raise Mistake(f"{measured}; kernels=reference does not")
        require(self.seed < 2**63, f"seed={self.seed} must be below 2^63")
        require(re.fullmatch(r"(?!\.+$)[\w.=-]*", self.name), f"name={self.name!r} must be of letters, digits and . _ = -: it is a folder")
        self.check_ranks(1)

    def check_ranks(self, ranks):
        """The ranks share one global batch, each in whole micro-batches."""
        if self.batch_size % (self.micro_batch_size * ranks):
            batch, micro = f"batch_size={self.batch_size}", f"micro_batch_size={self.micro_batch_size}"
            if self.batch_size % ranks:
                near = nearest(self.batch_size, lambda n: n % ranks == 0)
                raise Mistake(f"{batch} does not divide into {ranks} ranks; batch_size={near} does")
            near = nearest(self.micro_batch_size, lambda n: self.batch_size // ranks % n == 0)
            across = f" on {ranks} ranks" if ranks > 1 else ""
            raise Mistake(f"{batch}{across} is not a whole number of micro-batches of {micro}; micro_batch_size={near} does")


def runs(argv):
    """['configs/x.py', ..., '--key=value', '--key=value,value', ...] -> one TrainConfig for each file and combination.

    The name of a run carries the options that were given several values. Raises Mistake.
    """
    paths = [Path(word) for word in argv if not word.startswith("-")]
    parsed = [parse(word) for word in argv if word.startswith("-")]
    options = dict(parsed)
    for key, values in parsed:
        require(options[key] is values, f"--{key} is given twice; several values go into one, as in --{key}=A,B")
    if not paths:
        raise Mistake("no config file given, as in `python train.py configs/toy.py`; --list shows those there are")
    configs = [vary(load(path), options, choice) for path in paths for choice in itertools.product(*options.values())]
    names = [config.name for config in configs]
    for name in names:
        require(names.count(name) == 1, f"two runs would write to out/{name}: a value or a file name is given twice")
    return configs


def vary(config, options, choice):
    chosen = dict(zip(options, choice))
    config = replace(config, **chosen)
    varied = [f"{key}-{value}" for key, value in chosen.items() if len(options[key]) > 1 and key != "name"]
    return replace(config, name="-".join([config.name, *varied]).replace(":", "-").replace("=", "-").replace("/", "-"))


def load(path):
    """The TrainConfig that a config file defines, named after the file if it has no name. Raises Mistake."""
    path = Path(path)
    if not path.is_file():
        near = suggest(str(path), map(str, path.parent.glob("*.py")))
        raise Mistake(f"no config file {path}{near}; `python train.py --list` shows those there are")
    require(path.suffix == ".py", f"{path} is not a config file: those end in .py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a misspelt field, a missing comma, a bad value
        raise Mistake(f"{path}: {error}") from None
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise Mistake(f"{path} must define `config = TrainConfig(...)`")
    return config if config.name else replace(config, name=path.stem)


def parse(option):
    """'--key=value,value' -> (key, [value, ...]), the values in the type of the field."""
    key, equals, text = option.lstrip("-").partition("=")
    types = {field.name: field.type for field in fields(TrainConfig)}
    if key not in types:
        raise Mistake(f"unknown option --{key}{suggest('--' + key, ['--' + name for name in (*types, 'jobs')])}")
    if not option.startswith("--") or not equals or not text:
        raise Mistake(f"{option!r} is not of the form --key=value; write --{key}={default(key)}")
    return key, [convert(key, types[key], value) for value in text.split(",")]


def convert(key, kind, text):
    try:
        value = {"true": True, "on": True, "false": False, "off": False}[text.lower()] if kind is bool else kind(text)
        if kind is not float or math.isfinite(value):
            return value
    except (ValueError, KeyError):
        pass
    raise Mistake(f"--{key}={text}: expected {kind.__name__}, as in --{key}={default(key)}")


def split_rule(residual):
    """'hc:m=2' -> ('hc', {'m': '2'}): a rule and the texts of its options. Raises Mistake."""
    rule, *given = residual.split(":")
    texts = {}
    for option, _, text in (word.partition("=") for word in given):
        require(option not in texts, f"{rule}:{option} is given twice in {residual}")
        texts[option] = text
    return rule, texts


def rule_option(option, text, kind, example):
    """What the text of a rule's option stands for, of a type (numbers are positive) or one of several choices. Raises Mistake."""
    choices = {"on": True, "True": True, "off": False, "False": False} if kind is bool else kind
    if isinstance(choices, tuple):
        choices = dict(zip(choices, choices))
    try:
        value = choices[text] if isinstance(choices, dict) else kind(text)
        if kind not in (int, float) or 0 < value < math.inf:
            return value
    except (KeyError, ValueError):
        pass
    expected = " or ".join(choices) if isinstance(choices, dict) else f"a positive {kind.__name__}"
    raise Mistake(f"{option}={text}: expected {expected}, as in {option}={example}")


def check_type(field, value):
    kinds = (int, float) if field.type is float else (field.type,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and field.type is not bool):
        raise Mistake(f"{field.name}={value!r}: expected {field.type.__name__}, as in {field.name}={default(field.name)!r}")


def require(condition, line):
    if not condition:
        raise Mistake(line)


def default(key):
    """An example of a value: the field's own, or what is usual where that says nothing."""
    value = {field.name: field.default for field in fields(TrainConfig)}[key]
    return round(value, 4) if isinstance(value, float) else value or {"name": "my-run", "compile": "True"}.get(key, value)


def nearest(value, good):
    """The positive numbers on either side of value that are good, as text: '992 or 1024'."""
    below = next((n for n in range(value - 1, 0, -1) if good(n)), None)
    above = next((n for n in range(max(1, value + 1), 2 * abs(value) + 1024) if good(n)), None)
    return " or ".join(str(n) for n in (below, above) if n)


def suggest(wrong, right):
    close = difflib.get_close_matches(wrong, list(right), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def describe():
    """Every field with its default and its meaning, which is the comment beside it in this file."""
    lines = []
    for cls in ModelConfig, TrainConfig:
        for name, comment in re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE):
            option = f"--{name}={default_text(name)}"
            lines.append(f"  {option:28} {comment}")
    return "\n".join(lines)


def default_text(name):
    value = {field.name: field.default for field in fields(TrainConfig)}[name]
    return f"{value:.6g}" if isinstance(value, float) else str(value)
