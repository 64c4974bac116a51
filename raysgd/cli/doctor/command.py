"""The command ``raysgd doctor``: prints what was found, problems first, and what to do about it. Driver side."""

from __future__ import annotations

import click

from raysgd.cli import cluster
from raysgd.cli.console import FAILED, SUCCEEDED, address_flag, json_flag, print_json, print_table, storage_flag
from raysgd.cli.doctor.checks import OK, WARNING, WRONG, Finding, check_machine
from raysgd.errors import ConfigError


@click.command("doctor")
@click.option(
    "--cluster", "is_cluster", is_flag=True, help="Examine each node of the running cluster, and their network."
)
@storage_flag
@address_flag
@json_flag
def command(is_cluster: bool, storage_path: str, address: str | None, as_json: bool) -> int:
    """Check this machine, or with --cluster each node of the running cluster: what is wrong, and what to do.

    Checked are versions, ports, the storage path, shared memory, limits and GPUs; with --cluster also clocks, ports between
    all nodes, the network's speed, and whether all see the same storage, within 30 s. Exit status 1 if something is wrong;
    warnings are not.
    """
    if is_cluster:
        from raysgd.cli.doctor.nodes import check_cluster

        found = check_cluster(cluster.must_connect(address), storage_path)
    else:
        found = [*check_machine(storage_path), _find_cluster(address)]
    found.sort(key=lambda one: (WRONG, WARNING, OK).index(one.state))
    if as_json:
        print_json([vars(one) for one in found])
    else:
        print_table(("check", "", "found", "what to do"), [(f.check, f.state, f.what, f.advice) for f in found])
    return FAILED if found[0].state == WRONG else SUCCEEDED


def _find_cluster(address: str | None) -> Finding:
    try:
        found = cluster.find_address(address)
    except ConfigError as error:
        return Finding("cluster", WRONG, str(error), "see the log of `ray start` on the head node")
    if found is None:
        return Finding("cluster", OK, "none runs here; `raysgd run` starts one of its own")
    return Finding("cluster", OK, f"one runs at {found}", "`raysgd doctor --cluster` examines its nodes")
