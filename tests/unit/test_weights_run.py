"""run.json: created once, by one of several trainers, and checked by all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.errors import ConfigError, Corrupt, ModelMismatch, StoreUnavailable, WeightsError
from async_rl.weights.run import (
    FORMAT,
    READABLE,
    RunInfo,
    ensure_run,
    fetch_model_files,
    find_run,
    open_run,
)
from tests.weights_support import SHAPES, MemoryStore, ScriptedStore, raises, shapes, write_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


def test_a_run_holds_the_table_and_every_file_but_weights_and_documents(model_dir: Path) -> None:
    for name in ("README.md", "pytorch_model.bin", "model.safetensors.index.json", ".gitattributes"):
        (model_dir / name).write_text("not part of the model")
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    assert {tensor.name: tensor.shape for tensor in run.tensors} == SHAPES
    assert [file.name for file in run.model_files] == [
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert (run.vocab_size, run.dtype, run.format) == (9, "bfloat16", FORMAT)
    assert open_run(store) == run


def test_the_files_come_back_bit_by_bit_with_the_dtype_of_the_versions(
    model_dir: Path, tmp_path: Path
) -> None:
    write_model_dir(model_dir, dtype="float32", text_config={"torch_dtype": "float32"})
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes(), "float16")
    fetch_model_files(store, run, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (
        model_dir / "tokenizer.json"
    ).read_bytes()
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["torch_dtype"]) == ("float16", "float16")


def test_the_second_trainer_of_the_same_model_gets_the_same_run(model_dir: Path) -> None:
    store = MemoryStore()
    assert ensure_run(store, model_dir, shapes()) == ensure_run(store, model_dir, shapes())


def test_of_two_trainers_that_start_at_once_both_end_with_one_run(model_dir: Path) -> None:
    store = ScriptedStore(MemoryStore())
    faster: list[RunInfo] = []
    store.on("put_if_absent", "run.json", lambda: faster.append(ensure_run(store, model_dir, shapes())))
    assert ensure_run(store, model_dir, shapes()) == faster[0]


def test_of_two_models_that_start_at_once_the_slower_is_refused_and_harms_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    other_dir = write_model_dir(tmp_path / "other")
    (other_dir / "tokenizer.json").write_text('{"model": "another"}')
    store = ScriptedStore(MemoryStore())
    store.on("put", "model/", lambda: ensure_run(store, model_dir, shapes()))
    with pytest.raises(ModelMismatch, match=r"tokenizer\.json"):
        ensure_run(store, other_dir, shapes())
    fetch_model_files(store, open_run(store), tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == '{"model": "characters"}'


def test_a_trainer_that_dies_before_run_json_leaves_no_run(model_dir: Path) -> None:
    store = ScriptedStore(MemoryStore())
    store.on("put_if_absent", "run.json", raises(StoreUnavailable("gone")))
    with pytest.raises(StoreUnavailable):
        ensure_run(store, model_dir, shapes())
    with pytest.raises(WeightsError, match="there is no run"):
        open_run(store)
    assert ensure_run(store, model_dir, shapes()) == open_run(store)


@pytest.mark.parametrize(
    ("config", "tensors", "dtype", "said"),
    [
        ({}, shapes(), "float16", "dtype: the run publishes bfloat16, this trainer float16"),
        ({"vocab_size": 12}, shapes(), "bfloat16", "vocabulary: 9 tokens in the run, 12 here"),
        (
            {},
            shapes(embed_weight=(12, 4)),
            "bfloat16",
            r"embed\.weight: shape \[9, 4\] in the run, \[12, 4\] here",
        ),
        ({}, shapes(extra_weight=(1,)), "bfloat16", r"tensors only here: extra\.weight"),
        (
            {},
            {"norm.weight": shapes()["norm.weight"]},
            "bfloat16",
            "tensors only in the run: embed.weight, layer",
        ),
        (
            {"rope_theta": 5.0},
            shapes(),
            "bfloat16",
            r"config\.json: rope_theta is None in the run, 5\.0 here",
        ),
    ],
    ids=["dtype", "vocabulary", "shape", "more", "fewer", "config"],
)
def test_another_model_is_refused_with_what_differs(
    model_dir: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], dtype: Any, said: str
) -> None:
    store = MemoryStore()
    ensure_run(store, model_dir, shapes())
    with pytest.raises(ModelMismatch, match=said) as caught:
        ensure_run(store, write_model_dir(tmp_path / "other", **config), tensors, dtype)
    assert "run URL of its own" in caught.value.hint


@pytest.mark.parametrize("change", ["changed", "missing", "added"])
def test_other_files_are_refused_by_name(model_dir: Path, change: str) -> None:
    store = MemoryStore()
    ensure_run(store, model_dir, shapes())
    if change == "changed":
        (model_dir / "tokenizer.json").write_text("{}")
    elif change == "missing":
        (model_dir / "tokenizer.json").unlink()
    else:
        (model_dir / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelMismatch, match="tokenizer"):
        ensure_run(store, model_dir, shapes())


def test_what_says_nothing_about_the_weights_may_change(model_dir: Path) -> None:
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    write_model_dir(model_dir, transformers_version="99", use_cache=False, dtype="float32")
    assert ensure_run(store, model_dir, shapes()) == run


def test_the_fingerprint_tells_models_apart(model_dir: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, tensors: dict[str, Any]) -> str:
        return ensure_run(MemoryStore(), folder, tensors).fingerprint

    other = write_model_dir(tmp_path / "other", rms_norm_eps=1e-5)
    same = write_model_dir(tmp_path / "same", transformers_version="99")
    assert fingerprint(model_dir, shapes()) == fingerprint(same, shapes())
    assert (
        len({fingerprint(f, t) for f in (model_dir, other) for t in (shapes(), shapes(norm_weight=(5,)))})
        == 4
    )


def test_a_tied_parameter_stands_once_under_its_first_name(model_dir: Path, tmp_path: Path) -> None:
    tensors = shapes()
    tensors["lm_head.weight"] = tensors["embed.weight"]
    tied = ensure_run(MemoryStore(), model_dir, tensors)
    assert [tensor.name for tensor in tied.tensors] == list(SHAPES)
    # Where the config doesn't tie, from_pretrained would not find the second name: both are written.
    untied_dir = write_model_dir(tmp_path / "untied", tie_word_embeddings=False)
    untied = ensure_run(MemoryStore(), untied_dir, tensors)
    assert [tensor.name for tensor in untied.tensors] == [*SHAPES, "lm_head.weight"]


def test_a_folder_without_a_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ensure_run(MemoryStore(), tmp_path, shapes())
    with pytest.raises(ConfigError, match="no vocab_size"):
        ensure_run(MemoryStore(), write_model_dir(tmp_path / "vision", vocab_size=None), shapes())


def test_a_run_is_found_once_it_has_begun(model_dir: Path) -> None:
    store = MemoryStore()
    assert find_run(store) is None
    with pytest.raises(WeightsError, match="there is no run"):
        open_run(store)
    run = ensure_run(store, model_dir, shapes())
    assert find_run(store) == open_run(store) == run


def test_a_run_of_a_newer_format_asks_for_an_upgrade(model_dir: Path) -> None:
    store = MemoryStore()
    ensure_run(store, model_dir, shapes())
    newer = {**msgspec.json.decode(store.objects["run.json"]), "format": FORMAT + 1, "tensors": "elsewhere"}
    store.put("run.json", msgspec.json.encode(newer))
    with pytest.raises(WeightsError, match="upgrade async-rl"):
        open_run(store)


def test_a_run_of_an_older_format_is_not_taken_for_a_damaged_one(model_dir: Path) -> None:
    store = MemoryStore()
    ensure_run(store, model_dir, shapes())
    older = {**msgspec.json.decode(store.objects["run.json"]), "format": READABLE[0] - 1}
    store.put("run.json", msgspec.json.encode(older))
    with pytest.raises(
        WeightsError, match=f"of format {READABLE[0] - 1}, this async-rl reads formats {READABLE[0]}"
    ):
        open_run(store)


def test_a_run_of_a_readable_older_format_goes_on_as_it_is(model_dir: Path) -> None:
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    older = msgspec.structs.replace(run, format=READABLE[0], seal="")
    store.put("run.json", msgspec.json.encode(older))
    assert open_run(store) == ensure_run(store, model_dir, shapes()) == older


def test_a_broken_run_json_is_corrupt() -> None:
    store = MemoryStore()
    store.put("run.json", f'{{"format": {FORMAT}, "run":'.encode())
    with pytest.raises(Corrupt, match=r"run\.json"):
        open_run(store)


def test_a_damaged_model_file_is_never_given_out(model_dir: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    key = next(file.key for file in run.model_files if file.name == "tokenizer.json")
    whole = store.objects[key]
    store.put(key, whole[:-1] + b"!")
    with pytest.raises(Corrupt, match=key):
        fetch_model_files(store, run, tmp_path / "copy")
    assert not (tmp_path / "copy" / "tokenizer.json").exists()
    store.put(key, whole)
    torn = ScriptedStore(store)
    torn.on("get", key, lambda: whole[:-1])  # once
    fetch_model_files(torn, run, tmp_path / "copy")
    assert torn.calls.count(("get", key)) == 2
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == whole


def test_a_local_model_file_that_was_changed_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    fetch_model_files(store, run, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("edited")
    fetch_model_files(store, run, tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == '{"model": "characters"}'


def test_a_file_name_that_leaves_the_folder_is_refused(model_dir: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    run = ensure_run(store, model_dir, shapes())
    hostile = msgspec.structs.replace(run.model_files[0], name="../outside.json")
    with pytest.raises(Corrupt, match="outside the model folder"):
        fetch_model_files(store, msgspec.structs.replace(run, model_files=(hostile,)), tmp_path / "copy")
