"""A worker from Python: ``torchslicer worker --trust models`` does the same from a shell.

It may start before the coordinator, serves run after run, and ends with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging

import torchslicer as ts


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--coordinator", metavar="HOST:PORT", help="where the coordinator is")
    where.add_argument("--listen", metavar="HOST:PORT", help="P2P: wait here for a driver instead")
    parser.add_argument("--name", help="stages are given out in the order of names")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0 ... (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (default: the cores, shared with others on this host)")
    parser.add_argument("--join-file", help="a file, readable for you only, with the join string of the coordinator")
    parser.add_argument("--once", action="store_true", help="end with the first coordinator")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")  # noqa: TID251 - a program, not a library
    logging.getLogger("torchslicer").setLevel(logging.INFO)

    ts.run_worker(
        arguments.coordinator,
        listen=arguments.listen,
        name=arguments.name,
        device=arguments.device,
        threads=arguments.threads,
        join_file=arguments.join_file,  # or the variable TORCHSLICER_JOIN
        once=arguments.once,
        trust=["models"],  # classes of models.py beside this file are accepted, besides torch's and the library's
    )


if __name__ == "__main__":
    main()
