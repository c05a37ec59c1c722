"""A run can be trusted: it can be stopped, resumed, split up and mistyped, and says what went wrong."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import configs
import data
import train
from configs import Mistake, TrainConfig
from model import Transformer

HERE = Path(__file__).parent.parent
TINY = dict(
    name="tiny", data="stdlib", residual="fullattnres", n_layer=2, d_model=16, n_head=2, vocab_size=257, seq_len=16, max_steps=6,
    batch_size=8, micro_batch_size=4, eval_every=3, eval_batches=1, save_every=2, device="cpu", lr=1e-2,
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny(**changes):
    return TrainConfig(**{**TINY, **changes})


def config_file(**changes):
    fields = ", ".join(f"{key}={value!r}" for key, value in {**TINY, **changes}.items() if key != "name")
    Path("tiny.py").write_text(f"from configs import TrainConfig\nconfig = TrainConfig({fields})\n")
    return "tiny.py"


def begin(*words, script=None, **environment):
    """A Python program in the test's folder, train.py unless another is given."""
    command = [sys.executable, *(["-c", script] if script else [str(HERE / "train.py")]), *words]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(*words, **options):
    with begin(*words, **options) as process:
        out, error = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, error)


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def final(name="tiny"):
    return torch.load(f"out/{name}/checkpoint.pt", weights_only=True)


def assert_same_run(a, b):
    """Weights, moments and the log, all to the bit, but for the seconds."""
    x, y = final(a), final(b)
    assert x["step"] == y["step"]
    torch.testing.assert_close(x["model"], y["model"], rtol=0, atol=0)
    torch.testing.assert_close(x["optimizer"]["state"], y["optimizer"]["state"], rtol=0, atol=0)
    logs = [[{k: v for k, v in r.items() if k != "seconds"} for r in train.read_log(Path(f"out/{name}/log.jsonl"))] for name in (a, b)]
    assert logs[0] == logs[1] and [r["step"] for r in logs[0]] == list(range(1, x["step"] + 1))


# ---------------------------------------------------------------------------------------------------------------------
# Stopping and going on


@pytest.mark.parametrize("residual", ["fullattnres", "hc"])
def test_a_run_stopped_twice_arrives_where_a_straight_one_does(monkeypatch, residual):
    train.train(tiny(residual=residual, name="straight"))
    step = train.train_step
    for stop_at in 3, 5:
        def stopping(*args, stop_at=stop_at):
            if args[3] == stop_at:
                raise train.Interrupted(signal.SIGINT)
            return step(*args)

        monkeypatch.setattr(train, "train_step", stopping)
        with pytest.raises(train.Interrupted):
            train.train(tiny(residual=residual))
        assert final()["step"] == stop_at - 1
    monkeypatch.setattr(train, "train_step", step)
    train.train(tiny(residual=residual))
    assert_same_run("straight", "tiny")


INTERRUPTING = """
import os, signal, sys
import {module} as module, train, configs
original, calls = module.{function}, []
def interrupting(*args, **keywords):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.{signal})
    return original(*args, **keywords)
module.{function} = interrupting
with configs.one_line_mistakes():
    try:
        train.main(sys.argv[1:])
    except train.Interrupted as interrupted:
        sys.exit(interrupted.status)
"""


@pytest.mark.parametrize("function, call, name, status", [
    ("token_losses", 8, "SIGINT", 130),  # the second micro-batch of step 4, after the ones of the validation
    ("evaluate", 1, "SIGTERM", 143),
    ("evaluate", 1, "SIGHUP", 129),
    ("evaluate", 2, "SIGINT", 130),  # of the last step
    ("draw", 3, "SIGINT", 130),  # after the last save
    ("save", 2, "SIGINT", 130),
])
def test_an_interrupt_loses_no_whole_step(function, call, name, status):
    train.train(tiny(name="straight"))
    script = INTERRUPTING.format(module="train", function=function, call=call, signal=name)
    stopped = run(config_file(), "--name=tiny", script=script)
    assert stopped.returncode == status, stopped.stderr
    assert "the same command goes on from there" in stopped.stdout and "Traceback" not in stopped.stderr
    train.train(tiny())
    assert_same_run("straight", "tiny")


def test_a_second_interrupt_ends_the_run_at_once():
    script = INTERRUPTING.format(module="train", function="token_losses", call=2, signal="SIGINT")
    script = script.replace("signal.SIGINT)", "signal.SIGINT)\n        os.kill(os.getpid(), signal.SIGINT)")
    stopped = run(config_file(), script=script)
    assert stopped.returncode == 130 and not Path("out/tiny/checkpoint.pt").exists()


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it():
    train.train(tiny(name="straight"))
    script = """
import os, signal, sys, torch, train
whole, calls = torch.save, []
def half(state, file):
    calls.append(1)
    if len(calls) == 2:
        file.write(b"half a checkpoint"); file.flush(); os.kill(os.getpid(), signal.SIGKILL)
    whole(state, file)
torch.save = half
train.main(sys.argv[1:])
"""
    assert run(config_file(), script=script).returncode == -signal.SIGKILL
    assert final()["step"] == 2
    train.train(tiny())
    assert_same_run("straight", "tiny")


def test_a_full_disk_is_one_line_and_the_old_checkpoint_still_loads():
    train.train(tiny(max_steps=6))
    before = final()
    os.symlink("/dev/full", "out/tiny/checkpoint.pt.new")
    model = Transformer(tiny())
    with pytest.raises(Mistake, match=r"cannot write out/tiny/checkpoint.pt \([\d,]+ bytes needed\): .*checkpoint before it is untouched"):
        train.save(Path("out/tiny/checkpoint.pt"), model, train.make_optimizer(model, tiny()), 7, tiny(), data.open_dataset("stdlib"), None)
    torch.testing.assert_close(final()["model"], before["model"], rtol=0, atol=0)


def test_an_output_folder_that_cannot_be_made_is_one_line():
    Path("out").write_text("a file where the folder should be")
    done = run(config_file())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot write to" in done.stderr


def test_a_complete_run_is_not_trained_again(capsys):
    loss = train.train(tiny())
    before = Path("out/tiny/log.jsonl").read_text()
    assert train.train(tiny()) == loss
    assert "out/tiny is complete after 6 steps" in capsys.readouterr().out
    assert Path("out/tiny/log.jsonl").read_text() == before


def test_a_checkpoint_of_another_run_is_refused_with_the_differences():
    train.train(tiny())
    train.train(tiny(save_every=1, log_every=2, eval_every=2, micro_batch_size=8))  # these may change
    with pytest.raises(Mistake, match=r"of another run \(max_steps: 6 -> 8, lr: 0.01 -> 0.001\); give this one its own --name"):
        train.train(tiny(max_steps=8, lr=1e-3))


def test_edited_data_are_refused_when_a_run_goes_on(monkeypatch):
    train.train(tiny())
    path = Path("out/tiny/checkpoint.pt")
    state = torch.load(path, weights_only=True)
    file = next(iter(state["data"]))
    state["data"][file] = "another checksum"
    torch.save(state, path)
    with pytest.raises(Mistake, match=f"trained on other data: {re.escape(file)} in stdlib has changed"):
        train.train(tiny())


def test_weights_saved_with_a_wrapper_s_prefix_load():
    train.train(tiny())
    path = Path("out/tiny/checkpoint.pt")
    state = torch.load(path, weights_only=True)
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in state["model"])
    for prefix in "_orig_mod.", "module.", "module._orig_mod.":
        torch.save(state | {"model": {prefix + name: w for name, w in state["model"].items()}}, path)
        torch.testing.assert_close(train.load_checkpoint(path)["model"], state["model"], rtol=0, atol=0)


def test_a_checkpoint_gives_back_the_model_and_its_config():
    train.train(tiny(precision="bf16"))
    model, cfg = train.load_model("out/tiny/checkpoint.pt")
    assert cfg == tiny(precision="bf16")
    torch.testing.assert_close(dict(model.state_dict()), final()["model"], rtol=0, atol=0)


def test_a_damaged_checkpoint_is_one_line():
    train.train(tiny())
    Path("out/tiny/checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(Mistake, match="checkpoint.pt is not a checkpoint of this program"):
        train.train(tiny())


HOLDING = """
import sys, time, train
train.train_step = lambda *args: (print("begun", flush=True), time.sleep(300))
train.main(sys.argv[1:])
"""


def test_a_folder_is_one_process_s_until_that_ends_even_when_killed():
    with begin(config_file(), "--name=tiny", script=HOLDING) as holder:
        until(lambda: holder.stdout.readline() == "begun\n")
        with pytest.raises(Mistake, match="another process is at work in out/tiny; wait until it ends, or give this run its own --name"):
            train.train(tiny())
        train.train(tiny(name="other"))
        holder.kill()
    train.train(tiny())
    assert_same_run("other", "tiny")


def test_the_lock_goes_with_the_run_that_fails_and_is_not_needed(monkeypatch):
    monkeypatch.setattr(train, "train_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failure:
        train.train(tiny())
    assert free("tiny") and failure
    with train.alone_in(Path("out/tiny"), train.Ranks("cpu")):
        assert not free("tiny")
        monkeypatch.setattr(train, "fcntl", None)  # as on Windows
        assert free("tiny")


def free(name):
    try:
        with train.alone_in(Path("out") / name, train.Ranks("cpu")):
            return True
    except Mistake:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Several runs side by side


def test_runs_side_by_side_that_are_interrupted_end_as_one_after_the_other(capsys):
    words = config_file(residual="preln", max_steps=120, batch_size=4, micro_batch_size=1, eval_every=120, save_every=120), "--seed=0,1,2"
    train.main([*words, "--name=straight"])
    capsys.readouterr()

    def interrupt():
        until(lambda: any(train.newest(tiny(name=f"tiny-seed-{seed}"))["step"] for seed in (0, 1)))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(train.Interrupted) as interrupted:
        train.main([*words, "--jobs=2"])
    thread.join()
    assert interrupted.value.status == 130 and not Path("out/tiny-seed-2").exists()
    out = capsys.readouterr().out
    assert re.search(r"tiny-seed-.  interrupted; out/tiny-seed-. holds step \d+, and the same command goes on from there", out)
    assert "0 of 3 runs are complete, and the same command goes on from there" in out
    train.main([*words, "--jobs=2"])
    for seed in 0, 1, 2:
        assert_same_run(f"straight-seed-{seed}", f"tiny-seed-{seed}")
    table = [f"tiny-seed-{seed:<30} val_loss {final(f'tiny-seed-{seed}')['val_loss']:.4f}" for seed in (0, 1, 2)]
    assert capsys.readouterr().out.endswith("\n\n" + "\n".join(table) + "\n")


FAKE_RUN = """
import json, os, pathlib, sys
out = pathlib.Path("out", json.loads(input())["name"])
"""


def fake_run(then):
    Path("fake.py").write_text(FAKE_RUN + then)
    return "fake.py"


def test_runs_side_by_side_end_with_their_parent():
    fake = fake_run("print('begun', flush=True); sys.stdin.read(); (out / 'ended').touch()")
    script = f"import sys, train; train.__file__ = {fake!r}; train.main(sys.argv[1:])"
    out = [Path(f"out/tiny-seed-{seed}") for seed in (0, 1)]
    with begin(config_file(), "--seed=0,1", "--jobs=2", script=script) as parent:
        until(lambda: all((path / "stdout.txt").exists() and "begun" in (path / "stdout.txt").read_text() for path in out))
        parent.kill()
    until(lambda: all((path / "ended").exists() for path in out))


def test_a_run_saves_its_last_whole_step_when_its_parent_ends():
    cfg = tiny(max_steps=10**6, save_every=10**6, eval_every=10**6)
    process = train.start_run(cfg)
    until(lambda: train.newest(cfg)["step"])
    process.stdin.close()
    assert process.wait(120) == 143
    assert final()["step"] == train.newest(cfg)["step"] < 10**6


def test_of_runs_side_by_side_those_that_fail_stop_no_other(capsys):
    train.train(tiny(name="tiny-lr-0.02", max_steps=1))
    with pytest.raises(SystemExit, match="stopped at step 2: loss nan"):
        train.main([config_file(residual="preln"), "--lr=1e15,0.02,0.01", "--jobs=2"])
    diverged, other, fine = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"tiny-lr-1000000000000000.0 +stopped at step 2: loss nan, .*", diverged)
    assert re.fullmatch(r"tiny-lr-0.02 +out/tiny-lr-0.02/checkpoint.pt is of another run \(residual: .*", other)
    assert re.fullmatch(r"tiny-lr-0.01 +val_loss \d\.\d+", fine) and final("tiny-lr-0.01")["step"] == 6


def test_each_of_several_runs_has_one_thread_and_says_what_killed_it(monkeypatch):
    monkeypatch.setattr(train, "__file__", fake_run("print(os.environ['OMP_NUM_THREADS'], flush=True); os.kill(os.getpid(), 9)"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert train.side_by_side([tiny()], 2) == {"tiny": "ended by SIGKILL"}
    assert Path("out/tiny/stdout.txt").read_text() == "1\n"


def test_a_second_interrupt_ends_runs_side_by_side_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child, train.Stop(None, [child]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT and child.poll() is None and not ends
        os.kill(os.getpid(), signal.SIGINT)
        assert child.wait(60) == -signal.SIGKILL and ends == [130]


def test_runs_side_by_side_are_for_a_cpu_and_without_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Mistake, match="--jobs=2 is for runs of one process each; under torchrun, leave it out"):
        train.main([config_file(), "--seed=0,1", "--jobs=2"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Mistake, match="--jobs=2 shares out a CPU, and these runs would all be on one GPU; .* or add --device=cpu"):
        train.main([config_file(device="auto"), "--seed=0,1", "--jobs=2"])
    assert not Path("out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# The layers, while they train


def layers(name="tiny"):
    return [json.loads(line) for line in Path(f"out/{name}/layers.jsonl").read_text().splitlines()]


def mixture(reader, v):
    """sum_i p_i v_i,  p = softmax_i(w . LN(v_i))"""
    scores = [(x * x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()) @ (reader.mixture.w * reader.mixture.gain) for x, _ in v]
    return sum(p.unsqueeze(-1) * x for p, (x, _) in zip(torch.stack(scores).softmax(0), v))


DEPTH_STATE = {
    "preln": lambda h, reader: h,
    "hc": lambda H, reader: torch.cat([H[..., i, :] for i in range(4)], -1),
    "moda": lambda state, reader: state[0],
    "fullattnres": lambda v, reader: mixture(reader, v) if len(v) > 1 else v[0][0],
}


@pytest.mark.parametrize("residual", DEPTH_STATE)
def test_layer_stats_are_those_of_a_loop_over_the_layers(residual):
    torch.manual_seed(0)
    cfg = tiny(residual=residual, layer_stats=3, grad_clip=1e-3)
    model, ranks = Transformer(cfg).double(), train.Ranks("cpu")
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    windows = data.open_dataset("stdlib").windows("train", cfg.seq_len, cfg.seed)
    batch = torch.from_numpy(windows.batch(2, 8))

    torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    gradient = [sum(p.grad.square().sum() for p in block.parameters()).sqrt() for block in model.blocks]
    model.zero_grad(set_to_none=True)
    h, z = model.enter(model.embed(batch[:4, :-1])), []  # the first micro-batch
    for block in model.blocks:
        z.append(DEPTH_STATE[residual](h, block.attn_residual.reader))
        h = block(h)
    z.append(DEPTH_STATE[residual](h, model.reader))
    stream = [(x**2).mean() ** 0.5 for x in z]
    update = [((y - x) ** 2).mean() ** 0.5 for x, y in zip(z, z[1:])]
    gain = [y / x for x, y in zip(stream, stream[1:])]

    Path("out/tiny").mkdir(parents=True)
    log, stop, optimizer = train.Log(Path("out/tiny"), 0, True), train.Stop(ranks), torch.optim.SGD(model.parameters())
    for step in 3, 4:
        train.train_step(model, optimizer, windows, step, cfg, ranks, stop, log)
    line, = layers()
    assert line.pop("step") == 3
    for key, by_hand in {"stream": stream, "update": update, "gain": gain, "gradient": gradient}.items():
        torch.testing.assert_close(torch.tensor(line.pop(key), dtype=torch.float64), torch.stack(by_hand).detach(), rtol=1e-5, atol=0)
    assert not line and min(update) > 1e-3


@pytest.mark.parametrize("residual", train.residuals.RULES)
def test_every_rule_shows_its_layers(residual):
    train.train(tiny(residual=residual, layer_stats=1, max_steps=1, precision="bf16"))
    line, = layers()
    assert [len(line[key]) for key in ("stream", "update", "gain", "gradient")] == [3, 2, 2, 2]
    assert all(0 <= x < 100 for key in ("stream", "update", "gain", "gradient") for x in line[key])  # 0 <: not in ReZero's first step


def test_looking_at_the_layers_changes_nothing_and_survives_a_stop(monkeypatch):
    train.train(tiny(name="unseen"))
    assert not Path("out/unseen/layers.jsonl").exists()
    train.train(tiny(name="straight", layer_stats=1))
    assert_same_run("unseen", "straight")
    assert [line["step"] for line in layers("straight")] == [1, 2, 3, 4, 5, 6]
    step = train.train_step

    def stopping(*args):
        if args[3] == 4:
            raise train.NotFinite  # the checkpoint is of step 2
        return step(*args)

    monkeypatch.setattr(train, "train_step", stopping)
    with pytest.raises(train.NotFinite):
        train.train(tiny(layer_stats=1))
    assert len(layers()) == 3
    monkeypatch.setattr(train, "train_step", step)
    train.train(tiny(layer_stats=1))
    assert layers() == layers("straight")


def test_the_layers_are_shown_up_to_the_step_that_is_not_finite(monkeypatch):
    step = train.train_step

    def poisoned(model, *args):
        if args[2] == 4:
            model.blocks[1].mlp.out.weight.data[0, 0] = math.inf
        return step(model, *args)

    monkeypatch.setattr(train, "train_step", poisoned)
    with pytest.raises(train.NotFinite, match="the feed-forward of layer 2"):
        train.train(tiny(residual="preln", layer_stats=2))
    good, bad = layers()
    assert (good["step"], bad["step"]) == (2, 4) and all(map(math.isfinite, good["stream"]))
    assert list(map(math.isfinite, bad["stream"])) == [True, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers, however the work is split


def gradients(cfg, micro_batch_size):
    torch.manual_seed(0)
    model, ranks = Transformer(cfg).double(), train.Ranks("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    cfg = dataclasses.replace(cfg, micro_batch_size=micro_batch_size, grad_clip=1e9, warmup_frac=0.0, lr=1.0)
    windows = data.open_dataset("stdlib").windows("train", cfg.seq_len, cfg.seed)
    record = train.train_step(model, optimizer, windows, 1, cfg, ranks, train.Stop(ranks))
    return record, [a - b for a, b in zip(before, model.parameters())]


def test_accumulated_gradients_are_those_of_the_large_batch():
    whole, large = gradients(tiny(), 8)
    assert max(g.abs().max() for g in large) > 1e-3
    for micro in 4, 2, 1:
        record, parts = gradients(tiny(), micro)
        torch.testing.assert_close(parts, large, rtol=1e-6, atol=1e-9)
        assert abs(record["loss"] - whole["loss"]) < 1e-6 and abs(record["grad_norm"] / whole["grad_norm"] - 1) < 1e-6


def test_two_ranks_train_as_one_does():
    train.train(tiny(name="one", layer_stats=3))
    launch = "from torch.distributed.run import main; main()"
    done = run("--nproc_per_node=2", str(HERE / "train.py"), config_file(layer_stats=3), "--name=two", script=launch)
    assert done.returncode == 0, done.stderr
    logs = [train.read_log(Path(f"out/{name}/log.jsonl")) for name in ("one", "two")]
    one, two = ([(r["loss"], r["grad_norm"], r.get("val_loss", 0)) for r in log] for log in logs)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=0, atol=2e-6)
    one, two = ([[line["step"], *line["stream"], *line["gradient"]] for line in layers(name)] for name in ("one", "two"))
    torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=1e-5, atol=0)
    printed = re.findall(r"loss [\d.]+", done.stdout)
    assert len(printed) >= 4 and done.stdout.count("step 6/6") == 1  # one rank prints


def test_ranks_that_are_asked_twice_save_and_go_on():
    """A scheduler and torchrun each send SIGTERM, and torchrun kills all when one of them has ended."""
    train.train(tiny(name="straight"))
    slow = """
save = train.save
def slowly(*args):
    import time
    time.sleep(3)
    save(*args)
train.save = slowly
with configs"""
    script = INTERRUPTING.format(module="train", function="token_losses", call=3, signal="SIGTERM").replace("\nwith configs", slow)
    Path("asked.py").write_text(script.replace("signal.SIGTERM)", "signal.SIGTERM)\n        os.kill(os.getppid(), signal.SIGTERM)"))
    launch = "from torch.distributed.run import main; main()"
    words = config_file(), "--name=two"
    stopped = run("--nproc_per_node=2", "asked.py", *words, script=launch)
    assert stopped.returncode != 0 and stopped.stdout.count("the same command goes on from there") == 1, stopped.stderr
    assert 0 < final("two")["step"] < 6 and not Path("out/two/checkpoint.pt.new").exists()
    done = run("--nproc_per_node=2", str(HERE / "train.py"), *words, script=launch)
    assert done.returncode == 0 and "going on after step" in done.stdout, done.stderr
    for a, b in zip(*(train.read_log(Path(f"out/{name}/log.jsonl")) for name in ("straight", "two"))):
        assert a["step"] == b["step"] and abs(a["loss"] - b["loss"]) < 2e-6


def test_the_loss_does_not_depend_on_the_pieces_that_logits_are_taken_in(monkeypatch):
    cfg, batch = tiny(), data.open_dataset("stdlib").windows("train", 16, 0).batch(0, 3)
    found = []
    for piece in 7, 4096:
        monkeypatch.setattr(train, "PIECE", piece)
        torch.manual_seed(0)
        model = Transformer(cfg)
        losses = train.token_losses(model, batch, cfg, torch.device("cpu"))
        losses.mean().backward()
        found.append([losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0][0]) == 48
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    target = torch.from_numpy(batch)
    plain = torch.nn.functional.cross_entropy(model(target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found[0][0], plain.detach(), rtol=0, atol=0)


def test_no_logits_are_kept_in_float32(monkeypatch):
    monkeypatch.setattr(train, "PIECE", 8)
    cfg, kept = tiny(precision="amp", vocab_size=1024), []
    batch = data.open_dataset("stdlib").windows("train", 16, 0).batch(0, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        train.token_losses(Transformer(cfg), batch, cfg, torch.device("cpu"))
    wide = [x for x in kept if x.shape[-1:] == (1024,) and x.dtype == torch.float32 and x.numel() >= 8 * 1024]
    assert kept and not wide


def test_validation_is_the_same_for_any_micro_batch_and_leaves_training_alone():
    cfg = tiny()
    torch.manual_seed(0)
    model, ranks = Transformer(cfg), train.Ranks("cpu")
    val = data.open_dataset("stdlib").windows("val", cfg.seq_len, 0)
    losses = []
    for micro in 1, 2, 4, 8:
        losses.append(train.evaluate(model, val, dataclasses.replace(cfg, micro_batch_size=micro), ranks, train.Stop(ranks)))
    assert max(losses) - min(losses) < 1e-6
    batch = torch.from_numpy(val.batch(0, 8))
    by_hand = torch.nn.functional.cross_entropy(model(batch[:, :-1]).double().flatten(0, 1), batch[:, 1:].flatten())
    assert abs(losses[0] - by_hand.item()) < 1e-6

    train.train(tiny(name="often", eval_every=1))
    train.train(tiny(name="once", eval_every=6))
    often, once = ([r["loss"] for r in train.read_log(Path(f"out/{name}/log.jsonl"))] for name in ("often", "once"))
    assert often == once


def test_the_learning_rate_is_the_papers():
    cfg = tiny(max_steps=7600, lr=2e-3)
    assert train.lr_at(1, cfg) == 2e-3 / 760
    assert train.lr_at(760, cfg) == 2e-3 and train.lr_at(759, cfg) < 2e-3
    assert math.isclose(train.lr_at((760 + 7600) // 2, cfg), 2e-3 * 0.55)
    assert math.isclose(train.lr_at(7600, cfg), 2e-4)


def test_a_text_in_place_of_a_tuple_in_no_decay_is_named(monkeypatch):
    monkeypatch.setattr(train.residuals.RMSNorm, "no_decay", ("weight"), raising=False)
    with pytest.raises(Mistake, match=r"RMSNorm.no_decay is the text 'weight'; a tuple of names is \('weight',\)"):
        train.make_optimizer(Transformer(tiny()), tiny())


VARIANTS = [
    *train.residuals.RULES, "layerrope:rotate=off", "hc:m=2", "hc:dynamic=off", "mhc:dynamic=off", "mhc:init=uniform",
    "mhc:constraint=row", "mhc:constraint=identity", "mhc:constraint=free", "blockattnres:n_blocks=2", "moda:post=on",
]  # fmt: skip


@pytest.mark.parametrize("residual", VARIANTS)
def test_every_rule_and_option_takes_a_step(residual):
    cfg = tiny(residual=residual, max_steps=1, eval_every=1)
    assert 5 < train.train(cfg) < 6


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged():
    Path("out/tiny/checkpoint.pt").mkdir(parents=True)
    with pytest.raises(Mistake, match="cannot read out/tiny/checkpoint.pt: Is a directory"):
        train.load_checkpoint(Path("out/tiny/checkpoint.pt"))


def test_weight_decay_is_the_rules_own_business():
    cfg = tiny(residual="hc")
    model = Transformer(cfg)
    decay, no_decay = train.make_optimizer(model, cfg).param_groups
    assert len(decay["params"]) + len(no_decay["params"]) == len(list(model.parameters()))
    assert decay["weight_decay"] == 0.1 and no_decay["weight_decay"] == 0
    assert {p.shape for p in no_decay["params"]} == {(4,), (4, 4)}  # HC's static routing


def test_in_bf16_everything_is_bf16_but_what_the_rule_keeps():
    model = Transformer(tiny(residual="mhc"))
    train.to_bf16(model)
    kept = {name.split(".")[-1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"bias", "s"}
    loss = train.train(tiny(residual="mhc", precision="bf16", name="bf16"))
    assert 0 < loss < 6 and {w.dtype for w in final("bf16")["model"].values()} == {torch.float32, torch.bfloat16}
    assert {s["exp_avg"].dtype for s in final("bf16")["optimizer"]["state"].values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("residual", ["preln", "hc", "moda"])
def test_autocast_trains(residual):
    loss = train.train(tiny(residual=residual, precision="amp"))
    assert 0 < loss < 6 and {w.dtype for w in final()["model"].values()} == {torch.float32}


def test_compiled_parts_are_one_graph_for_all_layers(monkeypatch):
    import torch._dynamo as dynamo

    whole_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: whole_compile(f, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", torch.compile(self._call_impl)))
    reference = train.train(tiny(name="eager", n_layer=3, residual="hc"))
    dynamo.reset()
    dynamo.utils.counters.clear()
    for name in train.residuals.COMPILABLE:
        monkeypatch.setattr(train.residuals, name, getattr(train.residuals, name))  # to be put back
    loss = train.train(tiny(name="compiled", n_layer=3, residual="hc", compile=True))
    assert abs(loss - reference) < 1e-4
    few, many = dynamo.utils.counters["stats"]["unique_graphs"], None
    dynamo.reset()
    dynamo.utils.counters.clear()
    train.train(tiny(name="deeper", n_layer=9, residual="hc", compile=True))
    many = dynamo.utils.counters["stats"]["unique_graphs"]
    assert few == many
    compiled = train.residuals.write
    train.train(tiny(name="plain", residual="hc"))
    assert train.residuals.write is not compiled and not train.WRITTEN, "the next run is one without --compile"


# ---------------------------------------------------------------------------------------------------------------------
# Trouble


@pytest.mark.parametrize("where, layer", [("attn", "attention of layer 2"), ("mlp", "feed-forward of layer 1")])
def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(monkeypatch, where, layer):
    step = train.train_step

    def poisoned(model, *args):
        if args[2] == 4:
            block = model.blocks[1 if where == "attn" else 0]
            getattr(block, where).out.weight.data[0, 0] = math.nan
        return step(model, *args)

    monkeypatch.setattr(train, "train_step", poisoned)
    with pytest.raises(train.NotFinite, match=f"stopped at step 4: loss nan, gradient norm nan, learning rate .*the {layer}"):
        train.train(tiny())
    assert final()["step"] == 2  # the last good checkpoint stays
    assert all(torch.isfinite(w).all() for w in final()["model"].values())


def test_a_gradient_that_is_not_finite_stops_the_run_with_status_1():
    script = """
import sys, torch, runpy
clip = torch.nn.utils.clip_grad_norm_
torch.nn.utils.clip_grad_norm_ = lambda *a: clip(*a) * float("inf")
runpy.run_path(sys.argv[1], run_name="__main__")
""".replace("runpy.run_path(sys.argv[1]", "path = sys.argv.pop(1)\nrunpy.run_path(path")
    done = run(str(HERE / "train.py"), config_file(), script=script)
    assert done.returncode == 1 and "gradient norm inf" in done.stderr and "so it is the gradient" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_spaces_and_no_display_do_not_matter(tmp_path, monkeypatch):
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = run(config_file(), "--max_steps=2", DISPLAY=":99", MPLBACKEND="")
    assert done.returncode == 0, done.stderr
    assert Path("out/tiny/loss.png").stat().st_size > 5000
    assert json.loads(Path("out/tiny/config.json").read_text())["max_steps"] == 2


def test_too_little_data_says_how_much_is_needed():
    with pytest.raises(Mistake, match=r"needs at least [\d,]+ tokens, found [\d,]+ in"):
        train.train(tiny(seq_len=10**8))


def test_data_with_more_ids_than_the_model_are_refused():
    with pytest.raises(Mistake, match="vocab_size=100 is smaller than that of stdlib; --vocab_size=257 is the least"):
        train.train(tiny(vocab_size=100))


def test_data_that_are_missing_are_one_line_with_the_command_that_makes_them():
    done = run(str(HERE / "configs/400m_fullattnres_L32.py"), "--max_steps=1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "python data.py fineweb-edu --out=data/fineweb-edu" in done.stderr and "B" in done.stderr
    assert not Path("out").exists()  # nothing is left of a run that could not begin


# ---------------------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize("words, complaint", [
    (["--max_step=10"], "unknown option --max_step; did you mean --max_steps?"),
    (["--lr=fast"], "--lr=fast: expected float, as in --lr=0.002"),
    (["--lr=nan"], "--lr=nan: expected float, as in --lr=0.002"),
    (["--compile=yes"], "--compile=yes: expected bool, as in --compile=True"),
    (["--max_steps"], "'--max_steps' is not of the form --key=value; write --max_steps=7600"),
    (["--max_steps=0"], "max_steps=0 must be above 0"),
    (["--d_model=1000", "--n_head=16"], "d_model=1000 does not make n_head=16 heads of even width; d_model=992 or 1024 does"),
    (["--n_head=8", "--n_kv_head=3"], "n_kv_head=3 does not divide n_head=8; n_kv_head=2 or 4 does"),
    (["--micro_batch_size=3"], "batch_size=8 is not a whole number of micro-batches of micro_batch_size=3; micro_batch_size=2 or 4 does"),
    (["--residual=hcc"], "no residual rule 'hcc'; did you mean hc?"),
    (["--residual=hc:n=2"], "hc has no option 'n'"),
    (["--residual=hc:m=two"], "hc:m=two: expected a positive int, as in hc:m=4"),
    (["--precision=fp16"], "precision=fp16 is not one of auto, fp32, amp, bf16; did you mean"),
    (["--device=gpu"], "device=gpu is not one of auto, cpu, cuda"),
    (["--name=.."], "name='..' must be of letters"),
    (["--data=stdlb"], "stdlb"),
    (["--name=a/b"], "name='a/b' must be of letters, digits and . _ = -: it is a folder"),
    (["nothing.py"], "no config file nothing.py"),
    (["--lr=1e-3,"], "--lr=: expected float"),
    (["--lr=1e-3", "--lr=2e-3"], "--lr is given twice; several values go into one, as in --lr=A,B"),
    (["--seed=0,0"], "two runs would write to out/tiny-seed-0: a value or a file name is given twice"),
    (["--jobs=0"], "--jobs=0: expected how many runs to train at a time, as in --jobs=2"),
    (["--jobs=x"], "--jobs=x: expected how many runs"),
    (["--jobs"], "--jobs: expected how many runs"),
    (["--jobs=2", "--jobs=2"], "--jobs is given twice"),
    (["--job=2"], "unknown option --job; did you mean --jobs?"),
    (["--layer_stats=-1"], "layer_stats=-1 must not be negative"),
    (["--layer_stats=2", "--kernels=auto"], "which kernels=auto may keep in another form; kernels=reference does not"),
    (["-lr=1e-3"], "'-lr=1e-3' is not of the form --key=value; write --lr=0.002"),
])
def test_a_mistake_is_answered_in_one_line(words, complaint, capsys):
    with pytest.raises(SystemExit) as exit, configs.one_line_mistakes():
        train.main([config_file(), *words])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and complaint in error and error.count("\n") == 1


@pytest.mark.parametrize("text, complaint", [
    ("config = 3", "must define `config = TrainConfig"),
    ("from configs import TrainConfig\nconfig = TrainConfig(leyers=3)", "leyers"),
    ("from configs import TrainConfig\nconfig = TrainConfig(lr='fast')", "lr='fast': expected float, as in lr=0.002"),
    ("from configs import TrainConfig\nconfig = TrainConfig(n_layer=True)", "n_layer=True: expected int"),
    ("config = (", "broken.py"),
    ("from configs import TrainConfig\nconfig = TrainConfig(lr=y)", "broken.py: name 'y' is not defined"),
    ("from configs import TrainConfig\nconfig = TrainConfig(lr=1 / 0)", "broken.py: division by zero"),
])
def test_a_broken_config_file_is_answered_in_one_line(text, complaint):
    Path("broken.py").write_text(text)
    with pytest.raises(Mistake, match=re.escape(complaint)):
        configs.runs(["broken.py"])


def test_ranks_that_do_not_share_a_batch_are_told_what_would():
    with pytest.raises(Mistake, match=r"batch_size=8 does not divide into 3 ranks; batch_size=6 or 9 does"):
        tiny().check_ranks(3)
    with pytest.raises(Mistake, match=r"batch_size=8 on 4 ranks is not .* of micro_batch_size=4; micro_batch_size=2 does"):
        tiny().check_ranks(4)


def test_several_values_make_a_run_for_each_combination_and_name_it():
    runs = configs.runs([config_file(), "--lr=1e-3,2e-3", "--seed=0,1", "--residual=hc:m=2,preln", "--max_steps=2"])
    assert len(runs) == 8 and len({cfg.name for cfg in runs}) == 8
    assert runs[0].name == "tiny-lr-0.001-seed-0-residual-hc-m-2"
    assert (runs[-1].lr, runs[-1].seed, runs[-1].residual, runs[-1].max_steps) == (2e-3, 1, "preln", 2)


def test_a_sweep_skips_what_is_complete_and_finishes_the_rest(capsys):
    train.main([config_file(max_steps=2), "--seed=0"])
    train.main(["tiny.py", "--seed=0,1"])
    out = capsys.readouterr().out
    assert sorted(p.name for p in Path("out").iterdir()) == ["tiny", "tiny-seed-0", "tiny-seed-1"]
    train.main(["tiny.py", "--seed=0,1,2", "--jobs=1"])
    out = capsys.readouterr().out
    assert out.count("is complete") == 2 and "tiny-seed-2" in out


def test_a_sweep_goes_on_after_a_run_that_diverges(monkeypatch, capsys):
    step = train.train_step

    def diverging(model, optimizer, windows, number, cfg, *args):
        if cfg.seed == 0:
            raise train.NotFinite("stopped at step 1")
        return step(model, optimizer, windows, number, cfg, *args)

    monkeypatch.setattr(train, "train_step", diverging)
    with pytest.raises(SystemExit, match="stopped at step 1"):
        train.main([config_file(max_steps=2), "--seed=0,1"])
    assert re.search(r"tiny-seed-0 +stopped at step 1\ntiny-seed-1 +val_loss \d", capsys.readouterr().out)


def test_the_command_line_overrides_the_file_and_what_follows_from_a_field_follows():
    cfg, = configs.runs([config_file(), "--d_model=640", "--n_head=16"])
    assert (cfg.name, cfg.residual, cfg.d_model, cfg.d_ff, cfg.d_head, cfg.kv_heads) == ("tiny", "fullattnres", 640, 1712, 40, 16)


def test_help_says_what_each_field_means(capsys):
    text = configs.describe()
    train.main(["--help"])
    out = capsys.readouterr().out
    assert text in out and re.search(r"--jobs=1 +of several runs, how many", out)
    for field in dataclasses.fields(TrainConfig):
        assert re.search(rf"--{field.name}=\S*\s+\w.{{8,}}", text), field.name


def test_configs_need_no_torch():
    script = "import sys, configs; configs.runs(sys.argv[1:]); assert not {'torch', 'numpy'} & set(sys.modules)"
    assert run(str(HERE / "configs/toy.py"), script=script).returncode == 0


def test_residual_help_lists_the_rules(capsys):
    train.main(["--residual=help"])
    out = capsys.readouterr().out
    assert all(f"`{rule}`" in out for rule in train.residuals.RULES)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def test_generation_is_greedy_seeded_and_leaves_training_alone():
    model = Transformer(tiny()).train()
    state = torch.get_rng_state()
    greedy = model.generate([1, 2, 3], 5, temperature=0)
    ids = [1, 2, 3]
    for _ in range(5):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert greedy == ids[3:]
    assert model.generate([1], 8, seed=3) == model.generate([1], 8, seed=3) != model.generate([1], 8, seed=4)
    assert model.generate([1, 2, 3], 5, temperature=1.0, top_k=1) == greedy
    assert torch.equal(state, torch.get_rng_state()) and model.training


def test_generation_takes_any_prompt_and_keeps_to_the_ids_of_the_data():
    model = Transformer(tiny(vocab_size=300))
    assert len(model.generate([], 4)) == 4
    assert model.generate([], 6, temperature=0, eot=7) == model.generate([7], 6, temperature=0)
    assert len(model.generate(list(range(50)), 4, top_k=10**6)) == 4  # a prompt longer than the context, a top_k larger than the vocabulary
    assert model.generate(list(range(50)), 1, temperature=0) == model.generate(list(range(50))[-16:], 1, temperature=0)
    model.head.weight.data[200:] *= 100
    drawn = model.generate([], 60, temperature=2.0, vocab_size=200)
    assert max(drawn) < 200 and len(set(drawn)) > 20


# ---------------------------------------------------------------------------------------------------------------------
# The README


def test_the_rule_that_the_readme_adds_trains_and_takes_its_option(monkeypatch):
    code = re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.setattr(train.residuals, "RULES", dict(train.residuals.RULES))
    exec(code, vars(train.residuals) | {"RULES": train.residuals.RULES})
    loss = train.train(tiny(residual="highway:bias=1"))
    assert loss < 5.5 and final()["model"]["blocks.0.attn_residual.b"].shape == (16,)
    with pytest.raises(Mistake, match="highway:bias=x: expected a positive float, as in highway:bias=2.0"):
        train.main([config_file(), "--residual=highway:bias=x"])


def test_the_readme_s_table_of_rules_is_the_one_that_residuals_prints():
    columns = [row.rsplit("|", 2)[0] for row in train.residuals.table(measure=False).splitlines()]  # all but what is measured
    readme = [line.rsplit("|", 2)[0] for line in (HERE / "README.md").read_text().splitlines()]
    assert all(row in readme for row in columns) and len(columns) == len(train.residuals.RULES) + 2
