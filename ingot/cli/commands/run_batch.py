"""`ingot run-batch`: serve the requests of a file."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ingot.cli.commands import Flag
from ingot.cli.commands.serve import Several, names_of
from ingot.cli.console import console


def run_batch_file(
    *,
    input_file: Annotated[str, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[str, Parameter(name=["--output-file", "-o"])],
    model: str,
    served_model_name: Several = (),
    chat_template: Path | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    strict: Flag = False,
    quantize: str | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    distributed_executor_backend: Literal["mp", "ray"] = "mp",
    memory: int | None = None,
    num_kv_pages: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    no_prefix_caching: Flag = False,
    seed: int = 0,
    cuda_graphs: Literal["idle", "need", "all", "none"] = "idle",
) -> None:
    """Serve the requests of a file in the form of OpenAI's batches, without a network.

    Each line is a request: {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}. The output has
    a line for each, in the same order. It appears when all are done.

    Parameters
    ----------
    input_file
        A local file with a request in each line.
    output_file
        The file for the answers, which is replaced if it exists.
    model
        An artifact folder, or a checkpoint: a folder or a repository on the hub, which is compiled first and cached.
    served_model_name
        A name of the model for requests; may be repeated. Default: "pico" for pico.ingot, and MODEL as given.
    chat_template
        A Jinja file that replaces the model's chat template.
    tool_call_parser
        The format of the model's tool calls, by vLLM's names; "auto" finds it in the chat template, "none" is none.
    reasoning_parser
        The format of the model's reasoning, likewise.
    strict
        Refuse requests with unknown fields, instead of logging a warning.
    quantize
        Store the weights of a checkpoint in this format, rounded to nearest, as in fp8 or int4_g128.
    tensor_parallel_size
        Processes that share each layer. A checkpoint is compiled for them. Default: as compiled, or 1.
    pipeline_parallel_size
        Stages of layers, each with processes of its own. Default: as compiled, or 1.
    distributed_executor_backend
        "mp": these processes are on this host. "ray": on the hosts of a Ray cluster, to which this host belongs.
    memory
        Bytes that serving may use, with weights. Default: the machine's memory, or nine tenths of a GPU's.
    num_kv_pages
        Pages of the KV cache, instead of --memory.
    max_num_seqs
        Most sequences in a step. Default: as compiled.
    max_num_batched_tokens
        Most tokens in a step. Default: as compiled.
    no_prefix_caching
        Do not share the KV pages of common prefixes.
    seed
        Seeds requests without a seed.
    cuda_graphs
        When to capture CUDA graphs.
    """
    import asyncio
    import logging
    import signal
    import sys

    from ingot.serve.async_llm import AsyncLLM
    from ingot.serve.batch.runner import BATCH_LIMITS, check_paths, run_batch
    from ingot.serve.http.options import HttpOptions
    from ingot.serve.parsers.choice import chosen_parsers

    chosen_parsers(tool_call_parser, reasoning_parser, "")  # an unknown name is an error before the model is compiled
    source, target = check_paths(input_file, output_file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    llm = AsyncLLM(
        model,
        chat_template=chat_template,
        limits=BATCH_LIMITS,
        quantize=quantize,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        distributed_executor_backend=distributed_executor_backend,
        memory=memory,
        num_kv_pages=num_kv_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False if no_prefix_caching else None,
        seed=seed,
        cuda_graphs=cuda_graphs,
    )
    options = HttpOptions(
        model_names=served_model_name or names_of(model),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        strict=strict,
    )
    # SIGTERM acts like Ctrl-C, so that it leaves no part of an output.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        counts = asyncio.run(run_batch(llm, options, source, target))
    finally:
        signal.signal(signal.SIGTERM, before)
    text = f"Wrote {output_file}: {counts.answered} answers, {counts.failed} errors"
    console().print(text, markup=False, soft_wrap=True)
