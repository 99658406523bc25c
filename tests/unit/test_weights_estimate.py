"""`weights estimate`: two checkpoints compared, whatever they hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from async_rl.cli.weights_estimate import estimate as command
from async_rl.errors import ConfigError, Corrupt, WeightsError
from async_rl.weights.estimate import estimate, step_counts
from async_rl.weights.peers import Peer
from async_rl.weights.statefiles import StateFiles, rounded

TYPES = {
    np.dtype(np.uint16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
}


def write(path: Path, tensors: dict[str, np.ndarray], *, padding: int = 0) -> StateFiles:
    """A safetensors file, written by hand so that its bytes can be unusual; uint16 is the bits of bfloat16."""
    entries = {}
    at = 0
    for name, tensor in tensors.items():
        span = [at, at + tensor.nbytes]
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": span}
        at += tensor.nbytes
    header = json.dumps(entries).encode() + b" " * padding
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        struct.pack("<Q", len(header)) + header + b"".join(t.tobytes() for t in tensors.values())
    )
    return StateFiles(path)


def weights(n: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.05, n).astype(np.float32)
    return rounded(values.view(np.uint32))


def moved(base: np.ndarray, every: int) -> np.ndarray:
    new = base.copy()
    new.reshape(-1)[::every] += 1
    return new


def test_totals_are_those_of_the_tensors(tmp_path):
    base = {"a": weights(5000).reshape(50, 100), "b": weights(70_000, 1), "same": weights(300, 2)}
    new = {"a": moved(base["a"], 50), "b": moved(base["b"], 100), "same": base["same"]}
    found = estimate(write(tmp_path / "old.safetensors", base), write(tmp_path / "new.safetensors", new))
    assert (found.weights, found.changed) == (75_300, 100 + 700)
    assert {row.name: row.changed for row in found.tensors} == {"a": 100, "b": 700, "same": 0}
    assert found.formats["full"].nbytes == 2 * 75_300
    assert found.formats["ours, default"].nbytes < found.formats["xor, zstd-1"].nbytes
    rows = {row.name: row for row in found.tensors}
    assert found.no_context_bytes == pytest.approx(sum(row.no_context_bytes for row in found.tensors))
    assert rows["same"].formats["ours, small"] == rows["same"].no_context_bytes == 0


def test_a_folder_may_hold_the_tensors_in_other_files_than_the_other_folder(tmp_path):
    base = {name: weights(2000, seed) for seed, name in enumerate("abc")}
    new = {name: moved(tensor, 10) for name, tensor in base.items()}
    write(tmp_path / "old" / "one.safetensors", {"a": base["a"]})
    write(tmp_path / "old" / "two.safetensors", {"b": base["b"], "c": base["c"]})
    write(tmp_path / "new" / "all.safetensors", new)
    found = estimate(StateFiles(tmp_path / "old"), StateFiles(tmp_path / "new"))
    assert (found.weights, found.changed) == (6000, 600)
    assert not (found.missing or found.extra or found.unlike)


def test_what_cannot_be_compared_is_named_and_the_rest_compared(tmp_path):
    a, b = weights(100), weights(100, 1)
    old = write(tmp_path / "o.safetensors", {"a": a, "gone": b, "grown": b, "wide": b, "none": a[:0]})
    now = {"a": moved(a, 2), "came": b, "grown": np.tile(b, 2), "wide": b.astype(np.float32), "none": a[:0]}
    found = estimate(old, write(tmp_path / "n.safetensors", now))
    assert (found.missing, found.extra) == (["gone"], ["came"])
    assert found.unlike == {"grown": "shape 100 became 200", "wide": "BF16 became F32"}
    assert (found.weights, found.changed) == (100, 50)


def test_other_dtypes_are_counted_apart(tmp_path):
    base = {"w": weights(1000), "ids": np.arange(512), "scale": np.ones(1000, np.float32)}
    new = {"w": moved(base["w"], 10), "ids": base["ids"], "scale": base["scale"].copy()}
    new["scale"][7] = 2.0
    found = estimate(write(tmp_path / "o.safetensors", base), write(tmp_path / "n.safetensors", new))
    assert found.weights == 1000
    assert found.other_bytes == 512 * 8 + 4000
    assert {row.name: row.changed for row in found.tensors} == {"w": 100, "ids": 0, "scale": 1}
    assert 0 < found.other.nbytes < 200


def test_float32_masters_can_be_rounded_as_a_trainer_does(tmp_path):
    masters = np.random.default_rng(0).normal(0, 0.05, 50_000).astype(np.float32)
    after = masters + np.float32(3e-5)
    states = (
        write(tmp_path / "o.safetensors", {"w": masters}),
        write(tmp_path / "n.safetensors", {"w": after}),
    )
    as_stored = estimate(*states)
    found = estimate(*states, bfloat16=True)
    assert (as_stored.weights, as_stored.tensors[0].changed) == (0, 50_000)
    assert found.weights == 50_000
    expected = np.count_nonzero(rounded(masters.view(np.uint32)) != rounded(after.view(np.uint32)))
    assert found.changed == expected < 20_000


def test_rounding_goes_to_the_nearest_even_and_keeps_nan():
    cases = {
        0x3F808000: 0x3F80,  # half way: to even
        0x3F818000: 0x3F82,
        0x3F808001: 0x3F81,
        0x7F7FFFFF: 0x7F80,  # the largest float32 is nearer to infinity
        0x7F800001: 0x7FC0,  # a NaN whose payload is cut off
        0xFFFFFFFF: 0xFFFF,
        0x80000000: 0x8000,
    }
    assert rounded(np.array(list(cases), np.uint32)).tolist() == list(cases.values())


def test_a_tensor_at_an_odd_byte_is_read(tmp_path):
    base = weights(1000)
    pads = [write(tmp_path / f"{pad}.safetensors", {"w": moved(base, 9)}, padding=pad) for pad in (0, 1)]
    old = write(tmp_path / "old.safetensors", {"w": base})
    assert [estimate(old, new).changed for new in pads] == [112, 112]


def test_nothing_in_common_is_an_error_that_names_a_difference(tmp_path):
    old = write(tmp_path / "o.safetensors", {"model.a": weights(4)})
    new = write(tmp_path / "n.safetensors", {"a": weights(4)})
    with pytest.raises(WeightsError, match=r"no tensor .* in common .*has model\.a, the second a\b"):
        estimate(old, new)


def test_a_format_that_loses_a_bit_is_an_error(tmp_path, monkeypatch):
    base = weights(1000)
    old = write(tmp_path / "o.safetensors", {"w": base})
    new = write(tmp_path / "n.safetensors", {"w": moved(base, 10)})
    monkeypatch.setattr("async_rl.weights.estimate.rehearse", lambda: None)
    monkeypatch.setattr(
        "async_rl.weights.estimate.PEERS", [Peer("lossy", lambda c: b"", lambda d, v: None)]
    )
    with pytest.raises(WeightsError, match="lossy did not give"):
        estimate(old, new)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"short", "5 bytes"), (b"\xff" * 64, "a header of"), (struct.pack("<Q", 4) + b"{oo}", "broken")],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content, says):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(Corrupt, match=says):
        StateFiles(tmp_path / "x.safetensors")


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    write(tmp_path / "x.safetensors", {"w": weights(1000)})
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-1])
    with pytest.raises(Corrupt, match="past the end"):
        StateFiles(tmp_path / "x.safetensors")


def test_a_folder_without_checkpoint_and_a_missing_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no"):
        StateFiles(tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        StateFiles(tmp_path / "nowhere")


def test_steps_are_counted_by_size():
    steps = np.array([1, -1, 1, 2, -3, 4, 9, -32768, 32767], np.int16)
    counted = step_counts(steps)
    assert dict(zip(counted.up_to, counted.count, strict=True)) == {
        1: 3, 2: 1, 4: 2, 8: 0, 16: 1, 32: 0, 64: 0, 256: 0, 1024: 0, 1 << 15: 2,
    }  # fmt: skip


def test_the_command_prints_a_table_and_json(tmp_path):
    base = {"w": weights(20_000).reshape(100, 200), "gone": weights(4)}
    write(tmp_path / "o.safetensors", base)
    write(tmp_path / "n.safetensors", {"w": moved(base["w"], 40)})
    paths = [str(tmp_path / "o.safetensors"), str(tmp_path / "n.safetensors")]
    text = CliRunner().invoke(command, paths, env={"COLUMNS": "140"}, catch_exceptions=False)
    assert text.exit_code == 0
    assert "500 changed (2.5 %)" in text.output
    assert "only in OLD" in text.output and "class gaps" in text.output
    told = CliRunner().invoke(command, [*paths, "--json"], catch_exceptions=False)
    report = json.loads(told.stdout)
    assert report["changed"] == 500
    assert report["formats"]["int32 + value"]["nbytes"] == pytest.approx(3000, abs=40)
    assert report["tensors"][0]["shape"] == [100, 200]
