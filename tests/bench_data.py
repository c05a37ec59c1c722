"""
Throughput of `neox` beside tiktoken's own encode_ordinary: same vocabulary, same documents, one thread, turn by turn.

    python tests/bench_data.py [rounds]

tiktoken's side knows neither NFC nor runs of spaces: it is what the same library does with GPT-2's pattern. `encode`
gives a list as encode_ordinary does; preparing a corpus takes the array of `encode_piece`.
"""

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data  # noqa: E402


def documents_of(source, characters=2_000_000):
    dataset = data.open_dataset(source)
    tokens = np.concatenate(list(dataset.shards("train").values()))
    texts = dataset.load_tokenizer().decode(tokens[:characters]).split("<|endoftext|>")
    return texts[: 1 + int(np.searchsorted(np.cumsum([len(text) for text in texts]), characters))]


def seconds(function, texts):
    """Of this process, so that others on the machine do not count."""
    start = time.process_time()
    for text in texts:
        function(text)
    return time.process_time() - start


def main(rounds):
    neox = data.load_tokenizer("neox")
    ranks = {piece: i for i, piece in sorted(neox.pieces.items()) if 1 < i < 50254}
    plain = tiktoken.Encoding("plain", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    print(f"{'':14} {'encode_ordinary':>16} {'neox.encode':>12} {'ratio':>22} {'encode_piece':>13} {'ratio':>22}")
    for name, source in ("English prose", "english"), ("source code", "stdlib"):
        texts = documents_of(source)
        sides = plain.encode_ordinary, neox.encode, neox.encode_piece
        times = [[seconds(side, texts) for side in sides] for _ in range(rounds + 1)][1:]
        size = sum(len(text.encode()) for text in texts)
        speed = [size / 1e6 / median(side) for side in zip(*times)]
        cells = []
        for side in 1, 2:
            ratios = sorted(row[0] / row[side] for row in times)
            cells.append(
                f"{speed[side]:6.1f} MB/s {median(ratios):6.2f} ({ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f})"
            )
        print(f"{name:14} {speed[0]:11.1f} MB/s  {'   '.join(cells)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
