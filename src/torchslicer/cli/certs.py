"""``torchslicer certs``: make certificates for a fixed set of machines."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import click

from torchslicer.errors import SecurityError


@click.group()
def certs() -> None:
    """Make the certificates of a deployment."""


@certs.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the files.")
@click.option("--workers", required=True, help="Names of the workers, separated by commas: worker-0,worker-1.")
@click.option(
    "--hosts",
    multiple=True,
    metavar="NODE=HOST,...",
    help="DNS names and IP addresses of a node, besides its name; may be repeated, also for NODE 'coordinator'.",
)
@click.option("--days", type=click.IntRange(1, 90), default=90, show_default=True, help="How long they are good.")
def init(out: Path, workers: str, hosts: tuple[str, ...], days: int) -> None:
    """Make a private authority and, signed by it, a certificate and a key for the coordinator and each worker.

    Give each machine ca.pem, its own NAME.pem and its own NAME.key, and nobody else the key. The authority's key is not
    kept: to add a worker or to renew, run the command again with another folder.
    """
    # cryptography is an extra, and slow to import
    from torchslicer.cluster.security.authority import write_deployment  # noqa: PLC0415

    names = [name.strip() for name in workers.split(",")]
    for path in write_deployment(out, names, hosts=_by_node(hosts), lifetime=timedelta(days=days)):
        click.echo(path)


def _by_node(hosts: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in hosts:
        node, equals, names = text.partition("=")
        if not equals or not node or not names:
            raise SecurityError(f"--hosts: expected NODE=HOST,..., got {text!r}")
        found.setdefault(node.strip(), []).extend(name.strip() for name in names.split(","))
    return found
