"""`async-rl weights`: every command over a run in a folder, as text and as JSON, and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from async_rl.cli.weights import command
from async_rl.errors import Corrupt, WeightsError
from async_rl.store.file import FileStore
from async_rl.weights.lineage import version_key
from async_rl.weights.shadow import shards_in
from async_rl.weights.ways import list_edges
from tests.weights_support import History, same_state, state_of

SHAPES = {"embed.weight": (60, 20), "layer.weight": (33, 9), "norm.weight": (7,)}


@pytest.fixture
def history(tmp_path) -> History:
    made = History(tmp_path, FileStore(f"file://{tmp_path}/run"), SHAPES)
    made.full(made.random())
    for number in range(1, 10):
        made.delta(made.changed(0.03, seed=number))
    made.anchor(5)
    return made


def run(history: History, *argv: str) -> str:
    """What the command wrote to standard output; errors of ours are raised."""
    done = CliRunner().invoke(
        command, [*argv, "--store", history.store.url], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(history: History, *argv: str):
    return json.loads(run(history, *argv, "--json"))


def test_ls_shows_the_newest_versions_and_all_on_demand(history):
    text = run(history, "ls", "--last", "3")
    assert [int(n) for n in re.findall(r"^│ +(\d+) │", text, re.MULTILINE)] == [7, 8, 9]
    assert "--all" in text
    rows = [json.loads(line) for line in run(history, "ls", "--all", "--json").splitlines()]
    assert [row["version"] for row in rows] == list(range(10))
    assert rows[5]["bases"] == [4, -1]


def test_ls_marks_what_a_replaced_trainer_wrote(history):
    history.commit(
        history.states[3], lambda _: history.manifests[4].way, version=10, nonce="somebody else's"
    )
    assert "ignored" in run(history, "ls").splitlines()[-2]
    rows = [json.loads(line) for line in run(history, "ls", "--json").splitlines()]
    assert [row["version"] for row in rows if row["ignored"]] == [10]


def test_show_tells_ways_paths_packs_and_tensors(history):
    text = run(history, "show", "5")
    assert "from nothing" in text
    assert "from version 4" in text
    assert history.manifests[5].digest in text
    assert "embed.weight" in text
    shown = as_json(history, "show", "newest")
    assert shown["manifest"]["version"] == 9
    assert as_json(history, "show", "5", "--from", "-1")["base"] == -1


def test_diff_counts_what_moved_and_says_how_it_was_read(history):
    first, last = history.states[6], history.states[9]
    changed = sum(int((first[name] != last[name]).sum()) for name in first)
    assert as_json(history, "diff", "6", "9")["changed"] == changed
    text = run(history, "diff", "6", "9")
    assert f"{changed:,} of" in text
    assert text.startswith("read ")


def test_show_counts_the_tiles_of_a_full_version_and_does_not_print_their_digests(history):
    shown = as_json(history, "show", "0")
    assert sum(pack["tiles"] for pack in shown["packs"]) == len(history.run.tensors)
    assert "tile_digests" not in shown["manifest"]["way"]


def test_verify_is_content_with_a_sound_run_and_names_what_is_damaged(history):
    assert "11 ways right" in run(history, "verify", "--all")
    assert as_json(history, "verify", "9")["ways"][0]["verdict"] == "right"
    key = history.manifests[8].way.packs[0].key
    data = bytearray(history.store.get(key))
    data[-30] ^= 4
    history.store.put(key, bytes(data))
    done = CliRunner().invoke(
        command, ["verify", "8", "--store", history.store.url], env={"COLUMNS": "300"}
    )
    assert isinstance(done.exception, Corrupt)
    assert key in done.stdout


def test_pull_makes_a_working_copy_that_the_next_pull_moves_along(history, tmp_path):
    out = tmp_path / "copy"
    for version in ("3", "newest"):
        text = run(history, "pull", version, "--out", str(out))
        number = 9 if version == "newest" else 3
        assert f"version {number} (step {10 * number})" in text
        assert same_state(state_of(history.run, shards_in(out)), history.states[number])
    assert "from version 3" in text


def test_export_writes_a_plain_folder(history, tmp_path):
    out = tmp_path / "folder"
    told = as_json(history, "export", "4", "--out", str(out))
    assert told["version"] == 4
    assert told["path"][0].startswith("from nothing")
    assert same_state(state_of(history.run, shards_in(out)), history.states[4])
    assert (out / "config.json").is_file()


def test_compact_writes_the_missing_skips_once(history):
    written = as_json(history, "compact", "--span", "4")
    assert [(each["base"], each["version"]) for each in written] == [(0, 4), (4, 8)]
    assert {edge.base for edge in list_edges(history.store)} == {-1, 0, 4}
    assert "0 skip deltas written" in run(history, "compact", "--span", "4")


def test_gc_says_the_same_dry_and_for_real(history):
    options = ("gc", "--keep-versions", "1", "--grace-s", "0")
    before = {info.key for info in history.store.list_after("")}
    dry = as_json(history, *options, "--dry-run")
    assert {info.key for info in history.store.list_after("")} == before
    assert dry["doomed"]
    real = as_json(history, *options)
    assert {**real, "dry_run": True} == dry
    assert "deleted: " in run(history, *options)
    left = {info.key for info in history.store.list_after("packs/")}
    assert left.isdisjoint(each["key"] for each in dry["doomed"])


def test_du_counts_by_kind(history):
    found = as_json(history, "du")
    parts = {part["kind"]: part["nbytes"] for part in found["parts"]}
    assert parts["deltas"] == sum(history.manifests[n].way.total_bytes for n in range(1, 10))
    assert 0 < found["saved_part"] < 1
    assert "saved" in run(history, "du")


def test_a_version_that_is_not_there_is_named_with_those_that_are(history):
    with pytest.raises(WeightsError, match="has no version 99"):
        run(history, "show", "99")
    done = CliRunner().invoke(command, ["show", "latest", "--store", history.store.url])
    assert done.exit_code == 2
    assert "neither a number nor newest" in done.output
    done = CliRunner().invoke(command, ["verify", "--store", history.store.url])
    assert "name a version, or give --all" in done.output


def test_an_unreadable_manifest_is_a_row_and_not_the_end_of_the_list(history):
    history.store.put(version_key(3), b"{")
    assert "unreadable" in run(history, "ls")


def test_help_of_every_command_loads_nothing_heavy():
    code = (
        "import sys\nfrom async_rl.cli.weights import command\n"
        "for name in command.commands:\n"
        "    try: command.main([name, '--help'], prog_name='x')\n    except SystemExit as e: assert not e.code\n"
        "print('LOADED', [m for m in ('torch', 'numba', 'boto3', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr
