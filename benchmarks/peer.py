"""Another engine on the same checkpoint, in the same way: its first start, its next one, decoding and serving.

    python benchmarks/peer.py CHECKPOINT --peer vllm|sglang [--site FOLDER] [--batch 1,32] [--load-format dummy]
        [--prompt 4000 …] [--one-start] [--json FILE]

The first start finds empty caches (the peer compiles then), the next ones what it left; each is a process of its own
and ends with the first token behind a prompt of 128 tokens. With `--one-start` there is the first one alone. After the
last one decoding is measured by decode_method.py, serving by serve_method.py, whose options are those of serve.py. The
peer's version is part of the names of its figures. With `--load-format dummy`, the default, the peer makes weights up
and need not read any; "auto" has it read the checkpoint's. Its prefix cache is on where requests have a common
beginning, and else off: no other two prompts have anything in common. FOLDER holds the peer where it is not installed.
Where there is none, the benchmark says so and ends.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cold_start import first_token_figures
from decode_method import Decoded, Lengths, add_length_options, length_arguments
from engine_figures import serve_figures, step_figures
from peers import PEERS, Peer
from results import Figure, add_json_option, report
from serve_method import add_load_options, load_arguments, load_of, served_of

from ingot.bench.children import ChildError, Ended, run_child
from ingot.bench.startup import start_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--site", type=Path, help="a folder to import the peer from")
    parser.add_argument("--batch", default="1,32", help="sequences at once, separated by commas")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    counted = parser.add_mutually_exclusive_group()
    counted.add_argument("--warm-starts", type=int, default=1, help="after the first one")
    counted.add_argument("--one-start", action="store_true", help="measure in the first start, and not the starts")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a process, in seconds")
    add_length_options(parser)
    parser.add_argument("--no-serve", action="store_true", help="leave out what serve.py measures")
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    peer = PEERS[options.peer]
    if not is_there(peer, options.site):
        where = "installed" if options.site is None else f"in {options.site}"
        sys.exit(f"{peer.title} is not {where}: it was not measured")
    load = load_of(options)
    command = [peer.child, options.checkpoint, "--load-format", options.load_format]
    if not options.no_serve:  # said at every start: another length or a cache is another compile
        command += [*load_arguments(load), *(["--prefix-caching"] if load.sharing else [])]
    with tempfile.TemporaryDirectory(prefix=f"ingot-{peer.name}-") as caches:
        env = environment(peer, options.site, Path(caches))
        try:
            before = 0 if options.one_start else options.warm_starts
            starts = [run_child(command, env=env, timeout=options.timeout) for _ in range(before)]
            measuring = ["--batch", options.batch, *length_arguments(options)]
            if not options.no_serve:
                measuring.append("--serve")
            last = run_child([*command, *measuring], env=env, timeout=options.timeout)
        except ChildError as error:
            sys.exit(f"{peer.title} did not come to an end: {error}")
    settings = {"checkpoint": options.checkpoint.name, "batch": options.batch, "load_format": options.load_format}
    version = last.value["version"]
    report(
        options.json,
        settings,
        {peer.figure(version, name): figure for name, figure in figures(starts, last).items()},
    )


def is_there(peer: Peer, site: Path | None) -> bool:
    if site is None:
        return importlib.util.find_spec(peer.name) is not None
    return (site / peer.name / "__init__.py").is_file()


def environment(peer: Peer, site: Path | None, caches: Path) -> dict[str, str]:
    """What the peer's processes get beside this one's environment."""
    path = {} if site is None else {"PYTHONPATH": os.fspath(site)}  # and nothing of Ingot
    return {**path, **{name: os.fspath(caches / name.lower()) for name in peer.caches}}


def figures(starts: list[Ended], last: Ended) -> dict[str, Figure]:
    """Of the peer's starts and steps, under the names of Ingot's. `starts` are those before the `last` one, in which
    steps were measured."""
    cold, *warm = [start_of(one) for one in (*starts, last)]
    found = {f"cold_{name}": figure for name, figure in first_token_figures([cold]).items()}
    if warm:
        found |= first_token_figures(warm)
    for batch, measured in last.value["decode"].items():
        found |= step_figures(int(batch), _decoded(measured))
    if served := last.value["served"]:
        found |= serve_figures(served_of(served))
    return found


def _decoded(measured: Mapping[str, Any]) -> Decoded:
    return Decoded(Lengths(**measured["lengths"]), tuple(measured["long"]), tuple(measured["short"]))


if __name__ == "__main__":
    main()
