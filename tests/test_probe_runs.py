"""What probe.py makes of runs: results that are kept and gone on with, pictures, tables, and one line for a mistake."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import configs
import data
import flops
import probe
import train
from configs import Mistake, TrainConfig
from residuals import RULES

HERE = Path(__file__).parent.parent
TINY = dict(
    data="stdlib", n_layer=2, d_model=16, n_head=2, vocab_size=257, seq_len=32, max_steps=3, batch_size=4, micro_batch_size=4,
    eval_batches=1, device="cpu", lr=1e-2,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a trained run out/<rule> of each of four rules."""
    folder = tmp_path_factory.mktemp("runs")
    before = os.getcwd()
    os.chdir(folder)
    try:
        for residual in "preln", "hc", "mhc", "blockattnres":
            train.train(TrainConfig(name=residual, residual=residual, **TINY))
    finally:
        os.chdir(before)
    return folder


def call(folder, *words, **kwargs):
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "probe.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120, **kwargs)


def test_a_run_is_probed_drawn_and_not_measured_twice(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    probe.main(["out/mhc", "--windows=3"])
    about = json.loads(Path("out/mhc/probe.json").read_text())
    assert set(about) == {"angular", "causal", "permutation", "paths", "pruning", "lens", "transport", "health"}
    for name in about:
        picture = Path(f"out/mhc/{name}.png").read_bytes()
        assert picture[:4] == b"\x89PNG" and len(picture) > 5000
    said = capsys.readouterr().out
    assert "share        n/a: the rule mixes no sources" in said and "layers       n/a" in said and "effective_rank " in said

    model, cfg = train.load_model("out/mhc/checkpoint.pt")
    tokens = torch.from_numpy(data.open_dataset("stdlib").windows("val", 32, 42).batch(0, 3))
    arrays = probe.Results(Path("out/mhc")).arrays
    np.testing.assert_allclose(arrays["lens"]["kl"], probe.measure("lens", model, tokens)["kl"], rtol=1e-6, atol=1e-12)
    assert about["pruning"]["summary"]["loss_windows"] == pytest.approx(float(probe.measure("pruning", model, tokens)["base"]))

    def fail(*args):
        raise AssertionError("measured again")

    for name in about:
        monkeypatch.setattr(probe.PROBES[name], "measure", fail)
    probe.main(["out/mhc", "--windows=3"])
    with pytest.raises(AssertionError, match="measured again"):
        probe.main(["out/mhc", "--windows=2"])  # other windows, another result


def test_an_interrupted_probe_goes_on(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    whole, swaps = probe.loss, []

    def interrupted(subject, blocks=None):
        if len(swaps) == 2:
            raise KeyboardInterrupt
        swaps.append(blocks)
        return whole(subject, blocks)

    monkeypatch.setattr(probe.Pruning, "number", interrupted)
    with pytest.raises(KeyboardInterrupt):
        probe.main(["out/preln", "--only=pruning", "--windows=2"])  # the loss and that without layer 0 are there
    assert "goes on" in capsys.readouterr().out
    assert not json.loads(Path("out/preln/probe.json").read_text())["pruning"]["done"]

    def counted(subject, blocks=None):
        swaps.append(blocks)
        return whole(subject, blocks)

    monkeypatch.setattr(probe.Pruning, "number", counted)
    probe.main(["out/preln", "--only=pruning", "--windows=2"])
    assert len(swaps) == 3  # layer 1 alone was left
    model, _ = train.load_model("out/preln/checkpoint.pt")
    tokens = torch.from_numpy(data.open_dataset("stdlib").windows("val", 32, 42).batch(0, 2))
    expected = probe.measure("pruning", model, tokens)
    np.testing.assert_allclose(probe.Results(Path("out/preln")).arrays["pruning"]["without"], expected["without"], rtol=1e-6)


def test_damaged_results_are_measured_anew(runs, monkeypatch):
    monkeypatch.chdir(runs)
    probe.main(["out/hc", "--only=lens", "--windows=2"])
    before = probe.Results(Path("out/hc")).arrays["lens"]["kl"]
    for name, content in ("probe.npz", None), ("probe.npz", b"[]"), ("probe.json", b"[1]"):
        path = Path("out/hc", name)
        path.write_bytes(path.read_bytes()[:50] if content is None else content)
        probe.main(["out/hc", "--only=lens", "--windows=2"])
        np.testing.assert_array_equal(probe.Results(Path("out/hc")).arrays["lens"]["kl"], before)


def test_bad_input_gets_one_line(runs, monkeypatch):
    monkeypatch.chdir(runs)
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{")
    good = row("hc", 2, 64, 0, 1.5)
    lines = [",".join(probe.COLUMNS), *(",".join(str(r[key]) for key in probe.COLUMNS) for r in (good, good | {"lr": "abc"}))]
    Path("bad.csv").write_text("\n".join(lines))
    Path("none.csv").write_text(lines[0])
    Path("good.csv").write_text("\n".join(lines[:2]))
    Path("binary.csv").write_bytes(b"name,\xff\xfe\n")
    for words, line in (
        (["out/nope"], "no run in out/nope"),
        (["out/prelm"], "did you mean out/preln?"),
        (["out/preln", "--only=angulr"], "--only=angulr: no such probe; did you mean angular?"),
        (["out/preln", "--only=share"], "nothing was measured of out/preln: "),
        (["out/preln", "--windows=0"], "--windows=0 must be at least 1"),
        (["out/preln", "--length=64"], "--length=64 is more than the 32 tokens"),
        (["--figure=13", "out/preln"], "--figure=13 is not one of"),
        (["--figure=9", "out/preln"], "has been probed for Figure 9"),
        (["out/preln", "--only=nll", "--tasks=gqpa=x.jsonl"], "--tasks=gqpa=x.jsonl: expected TASK=FILE.jsonl; did you mean gpqa?"),
        (["--compare", "out/preln", "empty"], "empty/config.json is damaged"),
        (["--compare", "out/preln"], "--compare takes two runs, not 1"),
        (["--windws=3", "out/preln"], "did you mean --windows?"),
        (["--csv"], "--csv of which runs?"),
        (["--figure=2", "bad.csv"], "bad.csv, line 3: not a table"),
        (["--figure=2", "none.csv"], "none.csv has no runs"),
        (["--figure=2", "binary.csv"], "binary.csv: not a table"),
        (["--figure=2", "good.csv", "--out=x.xyz"], "--out=x.xyz: its name must end in one of"),
        (["--figure=2", "empty"], "empty/config.json is damaged"),
        (["empty"], "no checkpoint.pt in empty"),
        (["--figure=2", "out"], "no run in out"),
    ):
        with pytest.raises(Mistake) as mistake:
            probe.main(words)
        assert line in str(mistake.value) and "\n" not in str(mistake.value)
    done = call(runs, "out/nope")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_two_runs_side_by_side(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    probe.main(["out/hc", "--only=transport,causal", "--windows=2"])
    capsys.readouterr()
    probe.main(["--compare", "out/preln", "out/hc"])
    lines = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    last = {name: train.read_log(Path(f"out/{name}/log.jsonl"))[-1]["val_loss"] for name in ("preln", "hc")}
    assert lines["validation loss"] == [f"{last['preln']:.4f}", f"{last['hc']:.4f}"]
    assert lines["rule"] == ["preln", "hc"] and lines["effective_rank"][0] == "-"
    cfg = TrainConfig(residual="hc", **TINY)
    assert lines["parameters"][1] == f"{flops.params(cfg)['total']:,}" and lines["training FLOPs"][1] == f"{flops.train_flops(cfg):.3e}"


def row(residual, L, d, seed, loss, lr=1e-3, **more):
    name = f"study_{residual}_L{L}-lr-{lr}-seed-{seed}"
    about = dict(name=name, max_steps=10, tokens=100, data="stdlib", backbone=1000, step_seconds=0.1)
    return about | dict(residual=residual, n_layer=L, d_model=d, lr=lr, seed=seed, val_loss=loss) | more


ROWS = [
    row("preln", 2, 64, 0, 1.5), row("preln", 2, 64, 1, 1.6), row("preln", 8, 32, 0, 1.7), row("preln", 8, 32, 1, 1.9),
    row("hc", 2, 64, 0, 1.4), row("hc", 2, 64, 1, 1.5), row("hc", 8, 32, 0, 1.3), row("hc", 8, 32, 1, 1.3),
    row("hc", 8, 32, 0, 1.2, lr=2e-3),  # better, but one seed
]  # fmt: skip


def test_cells_take_the_learning_rate_with_most_seeds_then_the_best():
    assert probe.cells(ROWS)["hc", 8, 32] == {0: 1.3, 1: 1.3}
    assert probe.cells([*ROWS, row("hc", 8, 32, 1, 1.2, lr=2e-3)])["hc", 8, 32] == {0: 1.2, 1: 1.2}
    assert list(probe.cells(ROWS[::-1])) == [("preln", 2, 64), ("preln", 8, 32), ("hc", 2, 64), ("hc", 8, 32)]


def test_effects_are_paired_by_seed():
    """Pre-LN: +0.2 and +0.3; HC: -0.1 and -0.2, so -0.3 and -0.5 against it."""
    head, preln, hc = probe.effects(ROWS).splitlines()
    assert "8 x 32 minus loss at 2 x 64" in head
    assert "+0.2500 (sd 0.0707, n = 2)" in preln and "against" not in preln
    assert "-0.1500 (sd 0.0707, n = 2)" in hc and "against Pre-LN: -0.4000 (sd 0.1414, n = 2)" in hc
    assert probe.effects(ROWS[:2]) == ""  # one shape


def test_levels_are_paired_by_seed_and_shape():
    head, shallow, deep = probe.levels(ROWS).splitlines()
    assert "minus that of Pre-LN" in head
    assert "2 x 64" in shallow and "-0.1000 (sd 0.0000, n = 2)" in shallow
    assert "8 x 32" in deep and "-0.5000 (sd 0.1414, n = 2)" in deep
    assert probe.levels(ROWS[:4]) == ""  # one rule


def lines_of(ax):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()}


def test_figure2_shows_runs_the_paper_and_what_is_missing(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    ax = probe.figure2(ROWS).axes[0]
    x, y = lines_of(ax)["HC"]
    assert x == [4, 32] and y == pytest.approx([1.3, 1.45])
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing: ")]
    assert "missing: python train.py configs/study_fullattnres_L9.py --seed=0,1 --max_steps=10" in missing
    assert len(missing) == len(list(Path("configs").glob("study_*.py"))) and len(ax.get_lines()) == 2 + len(missing)

    paper = lines_of(probe.figure2([]).axes[0])
    ratios = [1216 / 16, 1120 / 20, 1024 / 24, 960 / 28, 896 / 32, 800 / 42, 640 / 70]
    assert paper["Full AttnRes"] == (ratios, list(probe.PUBLISHED["fullattnres"]))
    assert len(paper) == 10
    both = probe.figure2([row("hc", 24, 1024, 0, 2.7, data="data/fineweb-edu")]).axes[0].get_lines()
    assert [(line.get_markerfacecolor(), line.get_label()) for line in both[:2]] == [("#d55e00", "HC"), ("none", "HC (paper)")]
    bytewise = probe.figure2([row("hc", 24, 1024, 0, 1.7)]).axes[0].get_lines()
    assert "HC (paper)" not in [line.get_label() for line in bytewise], "nats of a byte beside nats of a token"


def test_runs_that_a_figure_would_take_for_one_are_named(tmp_path):
    table, rows = tmp_path / "runs.csv", [row("hc", 2, 64, 0, 1.5, name="a"), row("hc", 2, 64, 0, 1.4, name="b")]
    table.write_text("\n".join([",".join(probe.COLUMNS), *(",".join(str(r[key]) for key in probe.COLUMNS) for r in rows)]))
    with pytest.raises(Mistake, match="a and b are of one rule, shape, learning rate and seed"):
        probe.main(["--figure=2", str(table)])


def test_what_was_measured_at_another_step_is_no_result_of_the_run(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    probe.main(["out/mhc", "--only=lens", "--windows=1"])
    assert "kl_middle" in probe.read_run(Path("out/mhc"))
    results = probe.Results(Path("out/mhc"))
    results.about["lens"]["settings"]["step"] = 2
    results.save()
    capsys.readouterr()
    assert "kl_middle" not in probe.read_run(Path("out/mhc")) and "lens was measured at another step" in capsys.readouterr().err
    assert probe.describe_run(Path("out/mhc"))["lens: step"] == "2"


def test_a_probe_that_was_interrupted_before_its_first_number_begins_again(runs, monkeypatch):
    monkeypatch.chdir(runs)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe.Angular, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            probe.main(["out/hc", "--only=angular", "--windows=1"])
    probe.main(["out/hc", "--only=angular", "--windows=1"])
    assert probe.Results(Path("out/hc")).about["angular"]["done"]


def test_of_several_runs_one_without_an_answer_does_not_stop_the_others(runs, monkeypatch):
    monkeypatch.chdir(runs)
    with pytest.raises(Mistake, match="nothing was measured of out/hc: the rule mixes no sources"):
        probe.main(["out/hc", "out/blockattnres", "--only=share", "--windows=1"])
    assert probe.Results(Path("out/blockattnres")).about["share"]["done"]


def test_tasks_that_were_missing_or_interrupted_are_asked_for_again(runs, monkeypatch, tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}))
    there, task = set(), f"gsm8k={tmp_path / 'own.jsonl'}"

    def eval_set(source, whole=data.eval_set):
        if source.partition("=")[0] not in there:
            raise Mistake("not here")
        return whole(source)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.chdir(runs)
    monkeypatch.setattr(data, "eval_set", eval_set)
    with pytest.raises(Mistake, match="nothing was measured of out/preln: none of its tasks could be had"):
        probe.main(["out/preln", "--only=nll", f"--tasks={task}"])
    there.add("gsm8k")
    with monkeypatch.context() as patch:
        patch.setattr(probe, "continuation_nll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            probe.main(["out/preln", "--only=nll", f"--tasks={task}"])
    probe.main(["out/preln", "--only=nll", f"--tasks={task}"])
    first = probe.Results(Path("out/preln")).about["nll"]["summary"]
    assert set(first) == {"nll_gsm8k"}
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "3"}))
    probe.main(["out/preln", "--only=nll", f"--tasks={task}"])
    assert probe.Results(Path("out/preln")).about["nll"]["summary"]["nll_gsm8k"] != first["nll_gsm8k"], "the file has changed"


def test_figures_3_and_12(capsys):
    large = row("hc", 34, 992, 0, 2.6, name="500m_hc_L34", backbone=2)
    panels = probe.figure3([large, row("hc", 24, 672, 0, 2.9, name="200m_hc_L24", backbone=1)]).axes
    assert [ax.get_title() for ax in panels] == ["200m", "500m"]
    panels = probe.figure12(ROWS).axes
    assert lines_of(panels[1])["HC"] == ([1e-3, 2e-3], [1.3, 1.2]) and [ax.get_title()[-18:-12] for ax in panels] == ["2 x 64", "8 x 32"]


def test_a_rate_that_only_another_rule_has_is_a_cross_in_figure_12(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    rows = [row("preln", 9, 64, 0, 1.5, lr=lr, name=f"study_preln_L9-lr-{lr}") for lr in (1e-3, 2e-3, 4e-3)]
    rows += [row("hc:m=2", 9, 64, 0, 1.4, lr=2e-3, name="study_hc_L9-residual-hc-m-2-lr-0.002")]
    (ax,) = probe.figure12(rows).axes
    (cross,) = [line for line in ax.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    assert list(cross.get_xdata()) == [1e-3, 4e-3] and cross.get_color() == probe.style("hc")["color"]
    options = "--residual=hc:m=2 --lr=0.001,0.004 --max_steps=10 --name=study_hc_L9-residual-hc-m-2"
    assert capsys.readouterr().out == f"missing: python train.py configs/study_hc_L9.py {options}\n"


def test_the_command_for_a_missing_run_makes_it_under_a_name_of_its_own(monkeypatch, capsys):
    """At the learning rate of its cell, on the data of the others; the config file has other values."""
    monkeypatch.chdir(HERE)
    runs = ("preln", 0), ("preln", 1), ("hc", 0)
    probe.figure2([row(rule, 2, 136, seed, 1.5, lr=3e-3, name=f"study_{rule}_L2", data="english") for rule, seed in runs])
    line = next(line for line in capsys.readouterr().out.splitlines() if "study_hc_L2" in line)
    (run,) = configs.runs(line.split()[3:])
    assert (run.lr, run.seed, run.data, run.max_steps, run.name) == (3e-3, 1, "english", 10, "study_hc_L2-lr-0.003-seed-1")


def test_a_shape_that_is_missing_is_a_cross_in_figure_3(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    (ax,) = probe.figure3([row("preln", L, d, 0, 1.5, name=f"study_preln_L{L}") for L, d in ((2, 136), (4, 96), (9, 64))]).axes
    crosses = [(line.get_xdata()[0], line.get_color()) for line in ax.get_lines() if line.get_marker() == "x"]
    expected = {(d / L, probe.style(rule)["color"]) for L, d in ((2, 136), (4, 96), (9, 64)) for rule in ("hc", "fullattnres")}
    assert set(crosses) == expected and len(crosses) == 6 == capsys.readouterr().out.count("missing: ")


def test_rules_at_one_shape_are_lines_of_their_own():
    rows = [row(f"mhc{options}", 9, 64, seed, 1.4 + 0.2 * seed + n) for n, options in enumerate(("", ":constraint=row")) for seed in (0, 1)]
    (ax,) = probe.figure2(rows).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["mHC", "mHC constraint=row"] and ax.yaxis_inverted()
    assert [tuple(map(float, line.get_xydata()[0])) for line in ax.get_lines() if line.get_marker() == "d"] == [(1.5, 0), (2.5, 1)]
    low, high = ax.containers[0][1]  # the caps of one standard deviation
    assert high.get_xdata() - low.get_xdata() == pytest.approx(2 * 0.1 * 2**0.5)


def test_runs_become_a_table_that_figures_read(runs, tmp_path):
    assert call(runs, "out/hc", "--only=pruning", "--windows=2").returncode == 0
    done = call(runs, "--csv", "out/preln", "out/hc")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    last = train.read_log(runs / "out/hc/log.jsonl")[-1]["val_loss"]
    assert [r["name"] for r in rows] == ["preln", "hc"] and float(rows[1]["val_loss"]) == round(last, 6) and rows[1]["n_layer"] == "2"
    found = json.loads((runs / "out/hc/probe.json").read_text())["pruning"]["summary"]["pruning_most"]
    assert float(rows[1]["pruning_most"]) == round(found, 6)
    table = tmp_path / "runs.csv"
    table.write_text(done.stdout)
    drawn = call(runs, "--figure=2", str(table), f"--out={tmp_path}/f.png")
    assert drawn.returncode == 0 and (tmp_path / "f.png").stat().st_size > 5000, drawn.stderr
    more = call(runs, "--csv", str(table))
    assert more.stdout == done.stdout, "a table read and printed again has lost something"


def test_an_unfinished_run_is_left_out_and_named(runs, tmp_path, capsys):
    for name in "config.json", "log.jsonl":
        (tmp_path / name).write_text((runs / "out/hc" / name).read_text())
    log = tmp_path / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    assert probe.read_run(tmp_path) is None and "not complete" in capsys.readouterr().err
    with pytest.raises(Mistake, match="none of these runs is complete"):
        probe.read_runs([tmp_path])


def test_probes_of_several_runs_in_one_figure(runs, monkeypatch):
    monkeypatch.chdir(runs)
    for name in "preln", "blockattnres":
        probe.main([f"out/{name}", "--only=angular,share" if name != "preln" else "--only=angular", "--windows=2"])
    figure = probe.side_by_side(["5", "9"], ["out/preln", "out/blockattnres"])
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert texts == ["share: n/a"]


def test_rules_come_in_the_order_of_the_table_and_options_by_number():
    rules = ["hc:m=2", "blockattnres:n_blocks=16", "blockattnres:n_blocks=4", "own", "blockattnres", "preln", "hc"]
    expected = ["preln", "hc", "hc:m=2", "blockattnres", "blockattnres:n_blocks=4", "blockattnres:n_blocks=16", "own"]
    assert sorted(rules, key=probe.order) == expected


def test_every_rule_has_its_own_colour_and_marker():
    looks = [(probe.style(rule)["color"], probe.style(rule)["marker"]) for rule in RULES]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == len(RULES)
    assert probe.style("hc:m=2")["linestyle"] == "--" and probe.style("hc:m=2")["label"] == "HC m=2"


def test_tasks_are_pooled_by_token_and_categories_are_plain_means(runs, tmp_path, monkeypatch):
    """A model that is equally uncertain everywhere has the same loss on any task; one target is too long and left out."""
    model, cfg = train.load_model(runs / "out/preln/checkpoint.pt")
    lines = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "it is 3"}, {"question": "2+2?", "answer": "x" * 40}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(data, "eval_package", lambda: None)
    subject = probe.Subject(model, None, tokenizer=data.load_tokenizer("bytes"), sources={"gsm8k": f"gsm8k={tmp_path / 'own.jsonl'}"})
    out = {}
    with torch.no_grad():
        list(probe.NLL.measure(subject, out))
    pairs = [(f"Question: {line['question']}\nAnswer:", " " + line["answer"]) for line in lines[:2]]
    total = sum(-log_p(model, context.encode(), target.encode()) for context, target in pairs)
    at = probe.NLL.TASKS.index("gsm8k")
    assert out["tokens"][at] == len(" 2") + len(" it is 3") and out["left_out"][at] == 1
    assert out["nll"][at] == pytest.approx(total / out["tokens"][at], rel=1e-5)
    assert set(probe.NLL.summary(out)) == {"nll_gsm8k", "nll_gsm8k_left_out"}  # math needs two tasks
    both = dict(out, nll=np.where(np.arange(6) == probe.NLL.TASKS.index("math-500"), 7.0, out["nll"]))
    assert probe.NLL.summary(both)["nll_math"] == pytest.approx((out["nll"][at] + 7) / 2)


@torch.no_grad()
def log_p(model, context, target):
    ids = torch.tensor([list(context + target)])[:, -(model.seq_len + 1) :]
    logs = model(ids[:, :-1]).log_softmax(-1)[0]
    return sum(logs[at - 1, ids[0, at]].item() for at in range(ids.shape[1] - len(target), ids.shape[1]))


def test_arc_takes_the_likeliest_answer_per_character(runs, tmp_path):
    model, _ = train.load_model(runs / "out/preln/checkpoint.pt")
    choices = {"text": ["a", "bbb bbb", "the cc"], "label": ["A", "B", "C"]}
    lines = [{"question": f"{n}?", "choices": choices, "answerKey": "ABC"[n % 3]} for n in range(7)]
    (tmp_path / "arc.jsonl").write_text("\n".join(map(json.dumps, lines)))
    subject = probe.Subject(model, None, tokenizer=data.load_tokenizer("bytes"), sources={"arc-easy": f"arc-easy={tmp_path / 'arc.jsonl'}"})
    out = {}
    with torch.no_grad():
        list(probe.Arc.measure(subject, out))
    right = 0
    for n, line in enumerate(lines):
        scores = [log_p(model, f"Question: {n}?\nAnswer:".encode(), f" {c}".encode()) / len(c) for c in line["choices"]["text"]]
        right += max(range(3), key=scores.__getitem__) == n % 3
    assert out["base"] == pytest.approx(100 * right / 7) and out["without"].shape == (2,)


def test_layer_stats_are_drawn(runs, monkeypatch):
    monkeypatch.chdir(runs)
    records = [{"step": s, "stream": [1, 2, 4 * s], "update": [1, 2], "gain": [2, 2 * s], "gradient": [0.1, 0.2]} for s in (1, 2, 3)]
    Path("out/preln/layers.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 4, "str')  # a kill cuts a line short
    probe.main(["out/preln", "--only=layers"])
    assert json.loads(Path("out/preln/probe.json").read_text())["layers"]["summary"] == {"largest_gain": 6}
    assert Path("out/preln/layers.png").stat().st_size > 5000
    Path("out/preln/layers.jsonl").unlink()


def test_rounds_count_the_right_answers_of_each_k():
    """A model that is right where k is at most 3 (and at one answer of the others), on documents of 4 answers."""
    k = torch.tensor([1, 3, 3, 5, 6, 2, 4, 5])
    windows = torch.cat([k[:, None] + ord("0"), torch.randint(97, 102, (8, 8)), torch.full((8, 1), 256)], 1)

    def model(tokens):
        targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], 256)], 1)
        wrong = tokens[:, :1] > ord("3")
        wrong = wrong & (torch.arange(tokens.shape[1]) != 5)
        return torch.nn.functional.one_hot(torch.where(wrong, 0, targets), 257).float()

    found = probe.measure("rounds", model, windows, corpus="automaton")
    shares = probe.Rounds.summary(found)
    assert shares == {f"rounds_{n}": 1 if n < 4 else 0.25 for n in range(1, 7)}
    with pytest.raises(NotImplementedError, match="automaton"):
        probe.measure("rounds", model, windows, corpus="stdlib")
    for cut in windows[:, 1:], torch.cat([windows, windows[:, 1:]], 1)[:, :16], torch.cat([windows[:, :-1], windows], 1):
        with pytest.raises(Mistake, match="not one document"):
            probe.measure("rounds", model, cut, corpus="automaton")
    few = probe.measure("rounds", model, windows[:2], corpus="automaton")
    assert np.isnan(probe.Rounds.summary(few)["rounds_2"]) and probe.Rounds.summary(few)["rounds_3"] == 1
