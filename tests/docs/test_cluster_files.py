"""The files of examples/cluster are what their readers take: KubeRay, `ray up`, `ray start`, `raysgd train`.

The Slurm script runs in test_slurm.py, the commands of the Dockerfile in `make wheel`.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support import dockerfile
from support.project import ROOT

FOLDER = ROOT / "examples" / "cluster"
DIGITS = ROOT / "examples" / "declarative" / "digits.yaml"
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "rayjob.json").read_text(encoding="utf-8"))


def _read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a manifest whose keys are fields: rayStartParams and quantities have names of their own."""
    if isinstance(value, dict):
        yield value
        value = [each for name, each in value.items() if name not in ("rayStartParams", "requests", "limits")]
    if isinstance(value, list):
        for each in value:
            yield from _mappings(each)


def test_rayjob_has_fields_that_kuberay_knows() -> None:
    jsonschema.validate(_read("rayjob.yaml"), SCHEMA)


def test_schema_refuses_a_wrong_name_or_type_anywhere_in_the_rayjob() -> None:
    manifest = _read("rayjob.yaml")
    schema = jsonschema.Draft202012Validator(SCHEMA)
    num_mappings = len(list(_mappings(manifest)))
    num_changed = 0
    for place in range(num_mappings):
        for name in list(_mappings(manifest))[place]:
            for new_name, new_value in [(name + "s", None), (name, [None])]:
                changed = copy.deepcopy(manifest)
                fields = list(_mappings(changed))[place]
                fields[new_name] = fields.pop(name) if new_value is None else new_value
                num_changed += 1
                assert not schema.is_valid(changed), (name, new_name, fields)
    assert num_changed > 60


def test_ray_reads_the_nodes_of_the_rayjob() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    spec = _read("rayjob.yaml")["spec"]
    cluster = {"metadata": {"name": "digits", "namespace": "default"}, "spec": spec["rayClusterSpec"]}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    workers = types["workers"]
    assert (workers["min_workers"], workers["max_workers"], workers["resources"]["CPU"]) == (2, 2, 4)
    pinned = re.search(r"^ray==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None and spec["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_ray_up_takes_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = _read("ray-up.yaml")
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["docker"]["image"] == cluster["docker"]["image"]
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config({**cluster, "head_node": "head", "setup_command": []}))


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # of Ray Serve
def test_ray_start_takes_the_options_of_ray_up() -> None:
    from ray.scripts.scripts import cli

    cluster = _read("ray-up.yaml")
    lines = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert len(lines) == 4
    for line in lines:
        program, command, *words = shlex.split(line)
        assert program == "ray"
        cli.commands[command].make_context(command, words)


def _training_of_slurm() -> list[str]:
    text = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r" raysgd (train .*) &$", text, re.MULTILINE)
    values = {"$1": "digits.yaml", "${@:2}": "--max_epochs", "$SLURM_JOB_NUM_NODES": "2", "$SLURM_CPUS_PER_TASK": "4"}
    return [values.get(word, word) for word in shlex.split(line)] + ["10"]


def _trainings() -> dict[str, list[str]]:
    """Return what follows `raysgd` in each file."""
    (of_ray_up,) = re.findall(r'"raysgd (train .*)"$', (FOLDER / "ray-up.yaml").read_text(), re.MULTILINE)
    return {
        "Dockerfile": json.loads(dockerfile.read(FOLDER / "Dockerfile")["CMD"][0])[1:],
        "rayjob.yaml": shlex.split(_read("rayjob.yaml")["spec"]["entrypoint"])[1:],
        "slurm.sbatch": _training_of_slurm(),
        "ray-up.yaml": shlex.split(of_ray_up),
    }


def test_raysgd_takes_the_trainings_of_all_files() -> None:
    from raysgd.declarative.checking import load_args

    for name, (command, flag, path, *words) in _trainings().items():
        assert (command, flag, Path(path).name) == ("train", "-f", "digits.yaml"), name
        args = load_args(str(DIGITS), words)
        assert args.checkpoint.resume_from == "last", name
        if name != "Dockerfile":  # there the machine is all
            assert args.trainer["cpus_per_worker"] == 4, name
            assert args.trainer["failure_config"]["wait_for_nodes_s"] > 0, name


def test_image_has_the_folder_that_the_trainings_name() -> None:
    assert dockerfile.read(FOLDER / "Dockerfile")["WORKDIR"] == ["/training"]
    paths = [Path(words[2]) for name, words in _trainings().items() if name in ("rayjob.yaml", "ray-up.yaml")]
    assert {path.parent.as_posix() for path in paths} == {"/training"}
