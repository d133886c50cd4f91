"""`ingot bench`: measure start, latency, throughput and serving of an artifact, one command each."""

from cyclopts import App

from ingot.cli.commands.bench.latency import bench_latency
from ingot.cli.commands.bench.serve_sim import bench_serve_sim
from ingot.cli.commands.bench.startup import bench_startup
from ingot.cli.commands.bench.throughput import bench_throughput

BENCH = App(
    name="bench",
    help="Measure how fast an artifact starts, answers and serves, in the terms of `vllm bench`.",
    usage="Usage: ingot bench COMMAND ARTIFACT [OPTIONS]",
)
BENCH.command(bench_latency, name="latency", usage="Usage: ingot bench latency ARTIFACT [OPTIONS]")
BENCH.command(bench_throughput, name="throughput", usage="Usage: ingot bench throughput ARTIFACT [OPTIONS]")
BENCH.command(bench_startup, name="startup", usage="Usage: ingot bench startup ARTIFACT [OPTIONS]")
BENCH.command(bench_serve_sim, name="serve-sim", usage="Usage: ingot bench serve-sim ARTIFACT [OPTIONS]")
