"""infra/ can't be run in the tests, so it is read: what it starts must be commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import yaml

from async_rl.cli.main import cli
from async_rl.cli.runfile import read_run_file, read_worker_options

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "infra/compose.yaml").read_text())
OURS = {
    name: service for name, service in COMPOSE["services"].items() if service.get("image") == "async-rl"
}


def parsed(argv: list[str]) -> dict[str, object]:
    """The parameters that the CLI takes from `argv`; raises click.UsageError for what it does not know."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name, command, argv = command.resolve_command(context, list(argv))
        assert command is not None
        context = click.Context(command, parent=context, info_name=name)
    return command.make_context(command.name, list(argv), parent=context.parent).params


@pytest.mark.parametrize("service", OURS)
def test_each_compose_service_runs_a_command_that_exists(service):
    assert parsed(OURS[service]["command"])


def test_the_compose_trainer_has_a_valid_run_file_and_the_worker_dials_it():
    trainer = parsed(OURS["trainer"]["command"])
    path = ROOT / str(trainer["run_file"]).lstrip("/")
    config = read_run_file(path, trainer["overrides"])
    rollout = parsed(OURS["rollout"]["command"])
    read_worker_options(rollout["overrides"])
    assert config.run.store == rollout["store_url"]
    port = config.orchestrator.bind.rpartition(":")[2]
    assert rollout["orchestrator_address"] == f"tcp://trainer:{port}"
    assert config.orchestrator.insecure_remote


def test_compose_waits_for_health_and_pins_its_images():
    services = COMPOSE["services"]
    assert services["trainer"]["depends_on"]["bucket"]["condition"] == "service_completed_successfully"
    assert services["bucket"]["depends_on"]["minio"]["condition"] == "service_healthy"
    assert "healthcheck" in services["minio"]
    assert re.fullmatch(r"minio/minio:RELEASE\.\d{4}-\d{2}-\d{2}T[\d-]+Z", services["minio"]["image"])


def test_a_trainer_that_was_killed_is_started_again_where_its_spool_and_its_model_are():
    trainer = COMPOSE["services"]["trainer"]
    assert re.fullmatch(r"on-failure:\d+", trainer["restart"])
    kept = [volume.partition(":")[2] for volume in trainer["volumes"] if volume.startswith("data:")]
    config = read_run_file(
        ROOT / str(parsed(trainer["command"])["run_file"]).lstrip("/"),
        parsed(trainer["command"])["overrides"],
    )
    assert all(path.startswith(kept[0] + "/") for path in (config.trainer.out, config.model.path))


def test_the_dockerfile_copies_what_the_wheel_holds():
    text = (ROOT / "infra/Dockerfile").read_text()
    for package in ("async_rl", "orchestrator", "workers"):
        assert f"COPY {package} {package}" in text


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda p: p.name)
def test_every_example_is_a_valid_run_file(example):
    read_run_file(example, ("run.store=s3://b/p", "model.path=m"))


def test_the_readme_names_commands_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        if "://" not in target:
            assert (ROOT / target).exists(), f"README links to {target}"
    for path in re.findall(r"`((?:async_rl|orchestrator|workers|infra|tests|examples)/[\w./-]+)`", readme):
        assert (ROOT / path).exists(), f"README names {path}"
    for command in re.findall(r"^(?:\s*)async-rl ([a-z]+)", readme, re.M):
        assert cli.get_command(click.Context(cli), command) is not None
