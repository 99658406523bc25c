"""The pure parts of the engines: version spans, safetensors headers, facts of a model folder."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from async_rl.errors import EngineError
from workers.context import longest_of
from workers.engines.model_files import longest_sequence, stop_tokens
from workers.engines.shards import check_same_model, find_shards, read_table
from workers.engines.spans import version_spans

counts = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(counts, st.integers(0, 5))
def test_spans_name_every_token_once_and_in_order(lengths, cut):
    """`lengths`: what each version sampled; the last `cut` tokens were cut off at a stop."""
    sampled = [version for version, length in enumerate(lengths) for _ in range(length)]
    starts = [(version, sum(lengths[:version])) for version in range(len(lengths))]
    kept = sampled[: max(0, len(sampled) - cut)]
    spans = version_spans(starts, len(kept))
    assert [version for version, length in spans for _ in range(length)] == kept
    assert all(length > 0 for _, length in spans)


def test_a_version_that_sampled_nothing_has_no_span():
    assert version_spans([(3, 0), (4, 5), (5, 5), (6, 9)], 9) == ((3, 5), (5, 4))
    assert version_spans([(3, 0)], 0) == ()


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": np.zeros((3, 4), np.float16), "b": np.zeros(5, np.float32)}, path)
    return path


def test_a_table_lists_dtypes_and_shapes(shard):
    assert read_table([shard]) == {"a.weight": ("F16", (3, 4)), "b": ("F32", (5,))}
    assert find_shards(shard.parent) == [shard]


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_file_that_is_cut_short_is_refused(shard, kept):
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(EngineError, match="can't be read as safetensors"):
        read_table([shard])


def test_a_folder_without_weights_and_a_tensor_in_two_shards_are_refused(shard, tmp_path):
    with pytest.raises(EngineError, match="two shards"):
        read_table([shard, shard])
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="no \\*.safetensors"):
        find_shards(tmp_path / "empty")


def test_only_the_same_names_and_shapes_are_the_same_model():
    served = {"a": ("BF16", (2, 3)), "b": ("BF16", (4,))}
    check_same_model(served, {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}, "version 1")
    for offered, said in (
        ({"a": ("BF16", (2, 3))}, "1 tensors missing ['b']"),
        (served | {"c": ("BF16", (1,))}, "1 unknown ['c']"),
        (served | {"a": ("BF16", (3, 2))}, "a has shape (3, 2), served is (2, 3)"),
    ):
        with pytest.raises(EngineError) as caught:
            check_same_model(served, offered, "version 1")
        assert said in caught.value.message


def write_config(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_stop_tokens_are_of_both_files_and_nothing_else_is_taken_from_generation_config(tmp_path):
    write_config(tmp_path, config={"eos_token_id": 7})
    assert stop_tokens(tmp_path) == {7}
    write_config(tmp_path, generation_config={"eos_token_id": [7, 8], "top_k": 20})
    assert stop_tokens(tmp_path) == {7, 8}
    write_config(tmp_path, config={}, generation_config={})
    with pytest.raises(EngineError, match="no end token"):
        stop_tokens(tmp_path)


def test_the_longest_sequence_is_the_models_bounded_on_a_cpu(tmp_path):
    write_config(tmp_path, config={"max_position_embeddings": 40960})
    assert longest_sequence(tmp_path, 0, on_cpu=True) == 4096
    assert longest_sequence(tmp_path, 0, on_cpu=False) == 40960
    assert longest_sequence(tmp_path, 10000, on_cpu=True) == 10000
    with pytest.raises(EngineError, match="40960"):
        longest_sequence(tmp_path, 50000, on_cpu=False)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, 131072),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 2048}}, 131072),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, 131072),
        ({"rope_scaling": None, "max_position_embeddings": None}, 0),
    ],
)
def test_with_two_tables_of_positions_a_sequence_stays_within_the_first(changes, allowed):
    assert longest_of({"max_position_embeddings": 131072, **changes}) == allowed


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(EngineError, match="config.json is missing"):
        stop_tokens(tmp_path)


def test_an_engine_process_ends_when_its_worker_is_killed_and_not_before():
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import threading; from workers.engines.vllm_extension import end_with;"
        f"t = threading.Thread(target=end_with, args=({owner.pid},)); t.start(); print('watching', flush=True)"
    )
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert engine.stdout is not None and engine.stdout.readline() == b"watching\n"
    assert engine.poll() is None
    owner.kill()
    owner.wait()
    assert engine.wait(timeout=20) == 1
