"""`[loss]` and `[advantage]` in a run file, and what is said about choices that look like mistakes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from async_rl.algo.advantages import AdvantageConfig, advantage_cautions
from async_rl.algo.losses import LOSSES, REGISTRY, cautions
from async_rl.algo.losses.custom import Custom
from async_rl.algo.losses.sequences import Gspo, TisSequence
from async_rl.algo.losses.tokens import Cispo, Decoupled, DppoTv, IcePop, PpoClip, Reinforce, TisToken
from async_rl.cli.runfile import cautions as of_run_file
from async_rl.cli.runfile import read_run_file
from async_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("run.store=s3://b/r", "model.path=m")


def read(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_run_file(path, (*NEEDED, *overrides))


def test_a_run_file_without_a_loss_or_with_the_old_keys_means_the_default(tmp_path: Path):
    assert read(tmp_path, "").loss == DppoTv()
    old = read(tmp_path, '[loss]\nname = "dppo_tv"\ntv_clip = 0.1\nratio_cap = 4.0\nkl_coef = 0.0\n')
    assert old.loss == DppoTv(tv_clip=0.1, ratio_cap=4.0, kl_coef=0.0)
    assert old.advantage == AdvantageConfig()


def test_the_name_chooses_the_keys_also_on_the_command_line(tmp_path: Path):
    assert read(tmp_path, "", "loss.name=gspo", "loss.clip_high=0.1").loss == Gspo(clip_high=0.1)
    text = '[loss]\nname = "cispo"\nclip_high = 3.0\n'
    assert read(tmp_path, text, "loss.name=ppo_clip").loss == PpoClip(clip_high=3.0)
    assert read(tmp_path, '[loss]\ncustom = "mine:loss"\n').loss == Custom(custom="mine:loss")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("loss.name=gpso",), ["loss.name = 'gpso'", "did you mean 'gspo'?", "custom, decoupled"]),
        (("loss.name=gspo", "loss.tv_clip=0.1"), ["unknown key 'tv_clip' in [loss]", "clip_high"]),
        (("loss.clip_high=0.1",), ["unknown key 'clip_high' in [loss]", "tv_clip"]),
        (("loss.name=cispo", "loss.custom=m:f"), ["unknown key 'custom'"]),
        (("loss.name=ppo_clip", "loss.clip_low=0"), ["loss.clip_low", "> 0"]),
        (("advantage.estimator=mean",), ["advantage.estimator", "'mean'"]),
    ],
)
def test_a_key_of_another_loss_is_refused_with_those_that_there_are(
    tmp_path: Path, overrides: tuple[str, ...], said: list[str]
):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "", *overrides)
    for part in said:
        assert part in f"{caught.value.message} {caught.value.hint}"


def test_every_loss_is_in_the_docs_with_its_formula_and_its_settings():
    page = (ROOT / "docs/losses.md").read_text()
    for name, config in LOSSES.classes.items():
        assert f"`{name}`" in page, name
        common = {field.name for field in msgspec.structs.fields(DppoTv.__mro__[1])}
        for field in msgspec.structs.fields(config):
            assert field.name in common or f"`{field.name}`" in page, (name, field.name)
    for name, (function, _) in REGISTRY.items():
        sources = ("arXiv", "Williams 1992", "et al.")
        assert function.__doc__ and any(each in function.__doc__ for each in sources), name


# ---------------------------------------------------------------- cautions


@pytest.mark.parametrize(
    ("config", "max_lag", "minibatches", "said"),
    [
        (Decoupled(), 4, 1, "one minibatch|minibatches = 1 has no clip"),
        (Decoupled(proximal="interpolated"), 0, 1, "max_lag = 0 and one minibatch clips nothing"),
        (Reinforce(), 1, 1, "corrects for nothing"),
        (Reinforce(), 0, 2, "corrects for nothing"),
        (TisSequence(), 2, 1, "a product over its tokens"),
        (Gspo(), 2, 1, "so narrow a clip"),
        (PpoClip(dual_clip=0.0), 2, 1, "dual_clip = 0 with max_lag = 2"),
        (IcePop(clip_high=0.3), 2, 1, "clip_low and clip_high of icepop do nothing"),
        (DppoTv(tv_clip=1.0), 2, 1, "nothing is ever masked"),
        (DppoTv(reference_coef=0.1, reference_estimator="k1"), 0, 1, "mean is zero"),
        (DppoTv(reference="folder"), 0, 1, "loss.reference does nothing"),
        (DppoTv(length_budget=7), 0, 1, 'does nothing with loss.normalise = "token"'),
    ],
)
def test_a_choice_that_does_nothing_or_is_unsafe_at_this_lag_is_told(config, max_lag, minibatches, said):
    (sentence,) = cautions(config, max_lag, minibatches)
    assert any(part in sentence for part in said.split("|"))


@pytest.mark.parametrize(
    ("config", "max_lag", "minibatches"),
    [
        (DppoTv(), 16, 1),
        (PpoClip(), 4, 1),
        (Decoupled(), 4, 2),
        (Decoupled(proximal="interpolated"), 2, 1),
        (TisToken(), 4, 1),
        (TisSequence(), 0, 1),
        (Cispo(), 4, 1),
        (Gspo(), 0, 4),
        (Gspo(clip_low=0.1, clip_high=0.1), 4, 1),
        (IcePop(), 4, 1),
        (IcePop(clip_high=0.3), 4, 2),
        (Reinforce(), 0, 1),
        (DppoTv(reference_coef=0.1, reference="folder", normalise="constant", length_budget=9), 4, 1),
    ],
)
def test_nothing_is_said_about_what_is_meant(config, max_lag, minibatches):
    assert cautions(config, max_lag, minibatches) == []


def test_a_baseline_that_needs_what_is_filtered_is_told(tmp_path: Path):
    assert advantage_cautions(AdvantageConfig(), True) == []
    assert advantage_cautions(AdvantageConfig(estimator="global"), False) == []
    assert "drop_no_signal" in advantage_cautions(AdvantageConfig(estimator="global"), True)[0]
    assert "drop_no_signal" in advantage_cautions(AdvantageConfig(truncated="penalty"), True)[0]
    run_file = read(tmp_path, "", "loss.name=reinforce", "advantage.estimator=global")
    assert len(of_run_file(run_file)) == 2
    assert of_run_file(read_run_file(ROOT / "examples/demo.toml")) == []


def test_targets_of_adapters_that_are_off_are_told(tmp_path: Path):
    text = '[model]\nlora_targets = ["q_proj"]\n'
    (sentence,) = of_run_file(read(tmp_path, text))
    assert "model.lora_targets does nothing" in sentence
    assert of_run_file(read(tmp_path, text, "model.lora_rank=8")) == []
