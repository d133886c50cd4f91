"""Measure another engine on the same checkpoint in the same way: first start, later starts, decode and serving.

    python benchmarks/peer.py CHECKPOINT --peer vllm|sglang [--site FOLDER] [--batch 1,32] [--load-format dummy]
        [--prompt 4000 …] [--one-start] [--caches FOLDER] [--tensor-parallel 2] [--json FILE]

The first start of the peer, the other engine, has empty caches, and it compiles then; later starts use the filled
caches. Each is a process of its own and ends with the first token after a prompt of 128 tokens. With `--one-start`
there is only the first one. With `--caches`, caches are kept in that folder, which an earlier run may have filled, and
starts are not measured; `--fill-caches` only starts the peer there. After the last start, decode_method.py measures
decode and serve_method.py serving, with the options of serve.py. The names of figures contain the peer's version. With
`--load-format dummy`, the default, the peer makes random weights and reads none; with "auto" it reads the checkpoint's.
Its prefix cache is on if requests have a common prefix, and off otherwise: no other prompts share a prefix. FOLDER
holds the peer's packages if they are not installed here. Without them, the script reports that and exits.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
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
    parser.add_argument("--site", type=Path, help="folder to import the peer from")
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    counted = parser.add_mutually_exclusive_group()
    counted.add_argument("--warm-starts", type=int, default=1, help="starts after the first one")
    counted.add_argument(
        "--one-start", action="store_true", help="measure in the first start, without measuring starts"
    )
    parser.add_argument("--caches", type=Path, help="folder for caches that are kept; starts are not measured then")
    parser.add_argument("--fill-caches", action="store_true", help="only start the peer, to fill the caches")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each layer; vLLM only")
    parser.add_argument("--timeout", type=float, default=300.0, help="timeout of a process, in seconds")
    add_length_options(parser)
    parser.add_argument("--no-serve", action="store_true", help="leave out the measurements of serve.py")
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    peer = PEERS[options.peer]
    if not is_there(peer, options.site):
        where = "installed" if options.site is None else f"in {options.site}"
        sys.exit(f"{peer.title} is not {where}: it was not measured")
    load = load_of(options)
    command = [peer.child, options.checkpoint, "--load-format", options.load_format]
    if options.tensor_parallel > 1:
        if peer.name != "vllm":
            sys.exit(f"{peer.title} is measured on one GPU only")
        command += ["--tensor-parallel", str(options.tensor_parallel)]
    if not options.no_serve:  # passed at every start, since another length or cache changes the compile
        command += [*load_arguments(load), *(["--prefix-caching"] if load.sharing else [])]
    kept = options.caches
    if options.fill_caches and kept is None:
        sys.exit("--fill-caches needs a folder: --caches FOLDER")
    with tempfile.TemporaryDirectory(prefix=f"ingot-{peer.name}-") if kept is None else nullcontext(kept) as caches:
        env = environment(peer, options.site, Path(caches))
        try:
            if options.fill_caches:
                run_child(command, env=env, timeout=options.timeout)
                return
            before = 0 if options.one_start or kept is not None else options.warm_starts
            starts = [run_child(command, env=env, timeout=options.timeout) for _ in range(before)]
            measuring = ["--batch", options.batch, *length_arguments(options)]
            if not options.no_serve:
                measuring.append("--serve")
            last = run_child([*command, *measuring], env=env, timeout=options.timeout)
        except ChildError as error:
            sys.exit(f"{peer.title} did not finish: {error}")
    settings = {"checkpoint": options.checkpoint.name, "batch": options.batch, "load_format": options.load_format}
    if options.tensor_parallel > 1:
        settings["tensor_parallel"] = options.tensor_parallel
    version = last.value["version"]
    report(
        __file__,
        options.json,
        settings,
        {peer.figure(version, name): one for name, one in figures(starts, last, measured=kept is None).items()},
    )


def is_there(peer: Peer, site: Path | None) -> bool:
    if site is None:
        return importlib.util.find_spec(peer.name) is not None
    return (site / peer.name / "__init__.py").is_file()


def environment(peer: Peer, site: Path | None, caches: Path) -> dict[str, str]:
    """Return the environment variables to add for processes of another engine.

    They are the engine's import path, if it is installed in `site`, and its cache folders within `caches`.
    """
    path = {} if site is None else {"PYTHONPATH": os.fspath(site)}  # without Ingot
    return {**path, **{name: os.fspath(caches / name.lower()) for name in peer.caches}}


def figures(starts: list[Ended], last: Ended, *, measured: bool) -> dict[str, Figure]:
    """Return the figures of another engine, under the names of Ingot's figures.

    `starts` are its runs before the `last` one. In these only the start is measured. In the last run, decode and
    serving are measured too. `measured` says whether the starts are.
    """
    found: dict[str, Figure] = {}
    if measured:
        cold, *warm = [start_of(one) for one in (*starts, last)]
        found = {f"cold_{name}": figure for name, figure in first_token_figures([cold]).items()}
        if warm:
            found |= first_token_figures(warm)
    for batch, decoded in last.value["decode"].items():
        found |= step_figures(int(batch), _decoded(decoded))
    if served := last.value["served"]:
        found |= serve_figures(served_of(served))
    return found


def _decoded(measured: Mapping[str, Any]) -> Decoded:
    return Decoded(Lengths(**measured["lengths"]), tuple(measured["long"]), tuple(measured["short"]))


if __name__ == "__main__":
    main()
