"""`ejkernel serve`: its output, files and measurements, and one line for wrong arguments."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ejkernel.__main__ import main
from ejkernel.callib import Ceilings
from ejkernel.cli import _served, serve
from ejkernel.cli._model import Model, initialise, logits
from ejkernel.cli._replay import Replay, StepRecord, arrivals, bytes_moved_by, lengths, replay, summary
from ejkernel.serving import Decoder, Done, Engine, Limits, joined, logits_of_text, random_weights
from ejkernel.serving.drafts import Drafts
from ejkernel.serving.scheduler import Chunk

SMALL = _served.Served(
    Decoder(128, 32, 4, 2, 8, 64, (6, None)), Limits(64, sequences=4, length=128, buckets=(8, 32)), (4, 12), (4, 12)
)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """The demo's model, smaller and compiled on demand, with files in a temporary directory."""
    monkeypatch.setattr(Engine, "compile", lambda self: None)
    monkeypatch.setitem(_served.MODELS, "demo", SMALL)
    monkeypatch.setattr(serve, "known_ceilings", lambda kind: Ceilings(kind, 1e9, {}, ""))
    monkeypatch.chdir(tmp_path)


def printed(capsys, *arguments):
    assert main(["serve", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        main(["serve", *arguments])
    _, err = capsys.readouterr()
    assert raised.value.code == 2 and err.count("\n") == 1
    return err


def test_without_options_some_prompts_are_continued_together(capsys):
    out = printed(capsys, "--random", "--max-tokens", "5")
    given = sum(map(len, serve._PROMPTS))
    assert f"{given} tokens of prompts, of which 48 were shared; 20 generated" in out
    assert "with up to 4 sequences" in out and all(f"{prompt}│" in out for prompt in serve._PROMPTS)


@pytest.mark.slow
def test_drafts_are_counted(capsys):
    out = printed(
        capsys, "--random", "--prompt", "abcabcabc", "--max-tokens", "30", "--drafts", "3", "--temperature", "0"
    )
    assert "9 tokens of prompts" in out and "drafts, of which" in out and "\nabcabcabc│" in out


@pytest.mark.slow
def test_a_model_is_trained_once_and_kept(capsys, monkeypatch):
    trained = []
    weights = initialise(Model(128, 32, 4, 2, 8, 64, (6, None)), jax.random.key(3))
    monkeypatch.setattr(_served, "_trained", lambda steps, seed: trained.append(steps) or weights)
    ask = "--weights", "kept/here.npz", "--prompt", "a", "--max-tokens", "5", "--steps", "7"
    assert printed(capsys, *ask) == printed(capsys, *ask) and trained == [7]
    other = SMALL.decoder.__class__(128, 32, 4, 2, 8, 64, (6,))
    monkeypatch.setitem(_served.MODELS, "demo", _served.Served(other, *list(vars(SMALL).values())[1:]))
    assert "here.npz has not the weights of this model" in refused(capsys, *ask)


@pytest.mark.parametrize("damage", ["none", "text", "array", "cut", "changed", "names", "shapes"])
def test_damaged_weights_are_told_in_one_line(capsys, tmp_path, damage):
    file, name = tmp_path / "weights.npz", "['layers'][0]['query']"
    np.savez(file, **{name if damage == "shapes" else "['layers'][one]": np.ones(5000, np.float32)})
    whole = file.read_bytes()
    written = {"none": b"", "text": b"weights", "cut": whole[:9000], "changed": whole[:9000] + b"!" + whole[9001:]}
    if damage in written:
        file.write_bytes(written[damage])
    elif damage == "array":
        np.save(file.open("wb"), np.ones(3))
    told = refused(capsys, "--weights", str(file), "--prompt", "a", "--max-tokens", "2")
    whats = {"changed": "is damaged", "names": "has not the weights", "shapes": "has not the weights"}
    assert f"weights.npz {whats.get(damage, 'is no file of weights, or a damaged one')}" in told


def test_the_demo_trains_weights_of_the_served_shapes():
    """The names and shapes of its weights are those of the decoder, once they are joined."""
    decoder = _served._of_demo()
    shapes = jax.tree.map(np.shape, joined(_served._trained(1, 0)))
    assert shapes == _served.weight_shapes(decoder) and decoder.windows == (64, None, None, None)


def test_the_served_model_has_the_logits_of_the_demo():
    """Its joined products are those of the demo's separate ones."""
    model, tokens = Model(128, 32, 4, 2, 8, 64, (6, None)), jax.random.randint(jax.random.key(1), (2, 12), 0, 128)
    weights = initialise(model, jax.random.key(0))
    expected, _ = logits(model, _served._OPERATIONS, weights, tokens, jax.numpy.float32)
    decoder = replace(SMALL.decoder, softcap=model.softcap)
    np.testing.assert_allclose(logits_of_text(decoder, joined(weights), tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model llama-1b", "there are no weights of llama-1b here; --random makes random ones"),
        ("--random --pages 0", "pages is 0"),
        ("--random --drafts 2 --branches 3", "branches is 3 and drafts 2"),
        ("--random --devices 99", "--devices is 99; there are 8"),
        ("--random --devices 0", "--devices is 0; it must be at least 1"),
        ("--random --max-tokens 0", "max_tokens is 0"),
        ("--random --max-tokens 120", "together they may be 128"),
        ("--prompt é", "character 0 of the prompt"),
        ("--random --http --port 70000", "--port is 70000; it must be at most 65535"),
        ("--random --http --port -1", "--port is -1; it must be at least 0"),
        ("--random --http --top-k 5", "--top-k has no effect: a client asks for its own"),
        ("--random --bench --max-tokens 5", "--max-tokens has no effect: a replay takes the most likely tokens"),
        ("--random --requests 5", "--requests has no effect: it is one of --bench"),
        ("--random --bench --queue 5", "--queue has no effect: it is one of --http"),
        ("--random --steps 5", "--steps has no effect: --random neither reads weights nor trains them"),
        ("--http --bench", "not allowed with"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments.split())


# --- The replay


def test_a_replay_is_measured_and_plotted(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = printed(capsys, "--random", "--bench", "--requests", "8")
    assert "8 requests, " in out and "share of bandwidth" in out and "times fewer" in out
    assert (tmp_path / "ejkernel-serve" / "replay.png").stat().st_size > 10_000


def test_one_request_at_a_time_has_drafts_as_many_as_the_budget(monkeypatch):
    limits = replace(SMALL.limits, drafts=SMALL.limits.buckets[-1] - 1)
    engine = Engine(SMALL.decoder, random_weights(SMALL.decoder, jax.random.key(0)), limits)
    monkeypatch.setattr(serve, "_ALONE_TOKENS", 2)
    assert serve._alone(engine, [[1, 2, 3]]) > 0


def test_without_matplotlib_a_replay_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    serve._plot(SMALL.limits, Replay(), "", tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_two_devices_replay_too(capsys):
    assert "on 2 × cpu" in printed(capsys, "--random", "--prompt", "a", "--max-tokens", "2", "--devices", "2")


def test_lengths_are_spread_evenly_between_their_bounds():
    found = lengths(256, (100, 1024), serve._GOLDEN)
    assert min(found) == 100 and 1010 < max(found) <= 1024 and abs(np.mean(found) - 562) < 5
    assert [x.step for x in arrivals([[1]] * 9, [1] * 9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.slow
def test_every_token_of_a_replay_is_timed():
    engine = Engine(SMALL.decoder, random_weights(SMALL.decoder, jax.random.key(0)), SMALL.limits)
    prompts, outputs = [[1] * n for n in (3, 40, 5, 6, 7)], [4, 1, 9, 2, 3]
    found = replay(engine, arrivals(prompts, outputs), lambda done, text: None)
    assert found.generated == 19 and len(found.first) == 5 and len(found.between) == 14
    assert min(step.seconds for step in found.steps) > 0
    assert sum(step.tokens for step in found.steps) == sum(map(len, prompts)) + sum(outputs) - 5


def test_bytes_are_those_of_the_weights_and_of_what_is_visible():
    decoder = SMALL.decoder
    weights = random_weights(decoder, jax.random.key(0))
    engine = SimpleNamespace(decoder=decoder, weights=weights, limits=SMALL.limits)
    engine.cache_bytes = 2 * 64 * 16 * 2 * 2 * 8 * 4  # layers, pages, slots, keys and values, heads, features, float32
    of_weights = 4 * (sum(x.size for x in jax.tree.leaves(weights)) - 128 * 32)
    none = Drafts([], [])
    chunks = [Chunk(None, 29, 30, none, 30, True), Chunk(None, 0, 3, none, 3, False)]
    visible = (6 + 1) + 30 + 3 + 3
    assert bytes_moved_by(engine)(Done(chunks, 4, [])) == of_weights + visible * 2 * 2 * 8 * 4


def test_the_summary_is_of_the_measurements():
    steps = [StepRecord(0.1, 20, 2, 5, False, 10**7), StepRecord(0.1, 2, 2, 6, True, 2 * 10**7)]
    rows = summary(Replay(steps, [0.1, 0.3], [0.1] * 3, generated=5, seconds=0.2), alone=5.0, copy=1e9, pages=9)
    assert rows["generated"] == "25 tokens a second; one request at a time 5, 5.0 times fewer"
    assert rows["share of bandwidth"] == "20.0% of steps that decode, 15.0% of all, of 1 GB/s"
    assert rows["pages in use"] == "6 on average, 6 of 9 at most" and rows["sequences in a step"].startswith("2.0 on")
    assert rows["to the first token"].startswith("200.0 ms") and rows["computed"].startswith("110 tokens")


# --- The server


def test_a_server_names_missing_requirements(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "--http needs starlette and uvicorn: pip install 'ejkernel[serve]'" in refused(capsys, "--http", "--random")


def test_a_server_listens_on_this_machine_unless_told_otherwise(monkeypatch):
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    pytest.importorskip("starlette", reason="starlette is not installed")
    ran = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **how: ran.append((how["host"], how["port"])))
    assert main(["serve", "--http", "--random"]) == 0
    assert main(["serve", "--http", "--random", "--host", "0.0.0.0", "--port", "80"]) == 0
    assert ran == [("127.0.0.1", 8000), ("0.0.0.0", 80)]
