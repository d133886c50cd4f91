"""`ingot serve`: serve a model over HTTP, with OpenAI's API."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ingot.cli.commands import Flag
from ingot.cli.option_sources import OptionSources
from ingot.ir.errors import OptionError

Several = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
_KEY_VARIABLE, _ADMIN_KEY_VARIABLE = "INGOT_API_KEY", "INGOT_ADMIN_KEY"
# The command line goes before variables, and these before the file of --config.
SERVE_SOURCES = OptionSources(
    "INGOT_SERVE_", {"api-key": f"set {_KEY_VARIABLE}", "admin-key": f"set {_ADMIN_KEY_VARIABLE}"}
)


def serve_model(
    model: str,
    /,
    *,
    config: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: Path | None = None,
    root_path: str = "",
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
    ssl_ca_certs: Path | None = None,
    api_key: Several = (),
    served_model_name: Several = (),
    chat_template: Path | None = None,
    generation_config: str = "auto",
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    enable_auto_tool_choice: Flag = False,
    allowed_origin: Several = (),
    allowed_host: Several = (),
    no_ui: Flag = False,
    strict: Flag = False,
    access_log: Flag = False,
    log_format: Literal["text", "json"] = "text",
    otlp_traces_endpoint: str | None = None,
    drain_seconds: int = 30,
    read_seconds: float = 30.0,
    busy_poll: Literal["auto", "on", "off"] = "auto",
    admin_uds: Path | None = None,
    admin_host: str = "127.0.0.1",
    admin_port: int | None = None,
    admin_key: str = "",
    profile_dir: Path | None = None,
    replicas: int = 1,
    max_queue: int = 4096,
    max_stored_responses: int = 1000,
    quantize: str | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    distributed_executor_backend: Literal["mp", "ray"] = "mp",
    memory: int | None = None,
    num_kv_pages: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_mixed_tokens: int | None = None,
    no_prefix_caching: Flag = False,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    seed: int = 0,
    cuda_graphs: Literal["idle", "need", "all", "none"] = "idle",
    enable_lora: Flag = False,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    max_cpu_loras: int | None = None,
    lora_modules: Several = (),
    adapter_dir: Path | None = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. SIGTERM lets running requests end.

    Parameters
    ----------
    model
        An artifact folder, or a checkpoint: a folder or a repository on the hub, which is compiled first and cached.
    config
        A YAML file with options by name, as in `port: 8000`. The command line, then variables such as
        INGOT_SERVE_PORT, go before it.
    host
        The address to listen on; 0.0.0.0 for all.
    port
        The port to listen on; 0 for any free one.
    uds
        The path of a Unix socket to listen on instead.
    root_path
        The prefix of all paths, if a proxy passes it on.
    ssl_certfile
        A certificate with its chain, as a PEM file: the server then speaks HTTPS.
    ssl_keyfile
        The private key of the certificate, as a PEM file. Default: in the same file.
    ssl_ca_certs
        Certificates of authorities, as a PEM file. Clients must then present a certificate that one of them signed.
    api_key
        A key that clients must send; may be repeated. The variable INGOT_API_KEY has further ones, separated by commas.
    served_model_name
        A name of the model for clients; may be repeated. Default: "pico" for pico.ingot, and MODEL as given.
    chat_template
        A Jinja file that replaces the model's chat template.
    generation_config
        A folder whose generation_config.json has the sampling defaults of requests; "auto" is the model's, "none" (or
        vLLM's "vllm") is no file.
    tool_call_parser
        The format of the model's tool calls, by vLLM's names; "auto" finds it in the chat template, "none" is none.
    reasoning_parser
        The format of the model's reasoning, likewise.
    enable_auto_tool_choice
        No effect, for command lines of vLLM: tools are always served.
    allowed_origin
        An origin of web pages that may send requests, as https://chat.example; may be repeated; "*" for all.
    allowed_host
        A further value of the header Host on a loopback address without keys, as a proxy sends it; may be repeated.
    no_ui
        Do not serve the chat page at `/`.
    strict
        Refuse requests with unknown fields, instead of logging a warning.
    access_log
        Log each request at its end.
    log_format
        Lines of text, or of JSON.
    otlp_traces_endpoint
        The URL of an OpenTelemetry collector, which gets a span for each request by OTLP over HTTP.
    drain_seconds
        After SIGTERM, how long running requests may take.
    read_seconds
        How long a client may take to send the headers of a request, and again for its body.
    busy_poll
        While requests run, poll sockets instead of sleeping: the server need not wake up, and uses a core. "auto" polls
        with at least 8 cores.
    admin_uds
        The path of a Unix socket for operators: pause, sleep, cache, profile. Only its owner may open it.
    admin_host
        The address of --admin-port.
    admin_port
        A port for operators, with --admin-key instead of a Unix socket.
    admin_key
        The key of --admin-port. Default: the variable INGOT_ADMIN_KEY.
    profile_dir
        The folder of profiles that operators record.
    replicas
        Engine processes, each with a GPU of its own, or with a share of the cores. Requests with a common prefix go to
        the same one.
    max_queue
        Sequences that may wait; further requests get the status 429.
    max_stored_responses
        Responses that /v1/responses stores in memory for each API key; the least recently used are dropped.
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
    max_model_len
        Most tokens of a sequence, prompt and output together. Default: as compiled.
    max_num_seqs
        Most sequences in a step. Default: as compiled.
    max_num_batched_tokens
        Most tokens in a step. Default: as compiled.
    max_num_mixed_tokens
        Most prompt tokens in a step while a streamed request decodes. Default: 2048.
    no_prefix_caching
        Do not share the KV pages of common prefixes.
    scheduling_policy
        "priority" serves requests with a lower priority field first.
    seed
        Seeds requests without a seed.
    cuda_graphs
        When to capture CUDA graphs.
    enable_lora
        Serve LoRA adapters. An artifact must have been compiled with --max-loras.
    max_loras
        Adapters on the device at once, for a checkpoint. Default: 1.
    max_lora_rank
        The largest rank of an adapter, for a checkpoint. Default: 16.
    max_cpu_loras
        Adapters that the host keeps. Default: 64.
    lora_modules
        An adapter as NAME=FOLDER; may be repeated. Its name is a model for clients.
    adapter_dir
        A folder below which clients may load adapters, with /v1/load_lora_adapter.
    """
    if not 0 <= port <= 65535:
        raise OptionError(f"--port is {port}", expected="0 to 65535")
    least_values = (
        ("--drain-seconds", drain_seconds, 0),
        ("--replicas", replicas, 1),
        ("--max-queue", max_queue, 1),
        ("--max-stored-responses", max_stored_responses, 0),
        ("--read-seconds", read_seconds, 0.01),
    )
    for name, value, least in least_values:
        if not value >= least:
            raise OptionError(f"{name} is {value}", expected=f"at least {least}")
    if root_path and (not root_path.startswith("/") or root_path.endswith("/")):
        raise OptionError(f"--root-path is {root_path!r:.80}", expected="a path such as /models/pico")
    keys = (*api_key, *os.environ.get(_KEY_VARIABLE, "").split(","))
    from ingot.cli.lora_modules import checked_folder, read_lora_modules
    from ingot.serve.async_llm import AsyncLLM
    from ingot.serve.engine.client import EngineLimits
    from ingot.serve.http.admin.options import AdminOptions
    from ingot.serve.http.options import HttpOptions
    from ingot.serve.http.server import serve
    from ingot.serve.parsers.choice import chosen_parsers

    chosen_parsers(tool_call_parser, reasoning_parser, "")  # an unknown name is an error before the model is compiled
    options = HttpOptions(
        model_names=served_model_name or names_of(model),
        host=host,
        port=port,
        uds=uds,
        root_path=root_path,
        api_keys=tuple(key.strip() for key in keys if key.strip()),
        allowed_origins=allowed_origin,
        allowed_hosts=allowed_host,
        ui=not no_ui,
        strict=strict,
        access_log=access_log,
        log_format=log_format,
        otlp_traces_endpoint=otlp_traces_endpoint,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        drain_seconds=drain_seconds,
        read_seconds=read_seconds,
        max_stored_responses=max_stored_responses,
        adapter_dir=None if adapter_dir is None else checked_folder(adapter_dir),
    )
    compiling: dict[str, Any] = {"max_loras": max_loras, "max_lora_rank": max_lora_rank}
    if admin_port is not None and not admin_key:
        admin_key = os.environ.get(_ADMIN_KEY_VARIABLE, "")
    admin = AdminOptions(admin_uds, admin_host, admin_port, admin_key.strip(), profile_dir)
    admin.check(options)
    llm = AsyncLLM(
        model,
        chat_template=chat_template,
        generation_config=generation_config,
        limits=EngineLimits(max_waiting=max_queue),
        replicas=replicas,
        quantize=quantize,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        distributed_executor_backend=distributed_executor_backend,
        memory=memory,
        num_kv_pages=num_kv_pages,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_mixed_tokens=max_num_mixed_tokens,
        enable_prefix_caching=False if no_prefix_caching else None,
        scheduling_policy=scheduling_policy,
        seed=seed,
        cuda_graphs=cuda_graphs,
        enable_lora=True if enable_lora or lora_modules or adapter_dir else None,
        max_cpu_loras=max_cpu_loras,
        lora_modules=read_lora_modules(lora_modules, options.model_names),
        **{name: value for name, value in compiling.items() if value is not None},
    )
    serve(llm, options, admin)


def names_of(model: str) -> tuple[str, ...]:
    """Return the names of a model for clients: the last part of its path without ".ingot", and all of it as given."""
    last = Path(model).name.removesuffix(".ingot")
    return tuple(dict.fromkeys((last, model))) if last else (model,)
