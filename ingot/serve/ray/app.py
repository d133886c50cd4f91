"""The application for Ray Serve:

serve run ingot.serve.ray.app:build model=models/pico replicas=2
"""

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from ingot.serve.http.options import HttpOptions
from ingot.serve.ray.front import Front
from ingot.serve.ray.model_replica import ModelReplica
from ingot.serve.ray.prefix_router import PrefixRouter


class RayArguments(BaseModel):
    """The arguments of the application. Those that `ingot serve` has too mean the same.

    model           an artifact, a checkpoint folder or a name on the hub, which each node of the cluster can read
    served_model_name
                    the name of the model for clients; None: the last part of `model`
    replicas        replicas of the model; with `max_replicas`, the least number
    max_replicas    Ray adds replicas up to this number while the load is high; None: it does not
    target_ongoing_requests
                    requests that a replica should have at a time, if Ray adds replicas
    gpus            GPUs of a replica; 0: it runs on cores
    cpus            cores of a replica
    fronts          processes that take HTTP requests. Each chooses replicas by the requests that it has seen itself
    prefix_bound    requests that a replica with the whole prompt may have more than the least loaded one
    api_keys        keys that clients may send; default: those of the variable INGOT_API_KEY, separated by commas
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    served_model_name: str | None = None
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    target_ongoing_requests: float = Field(64, gt=0)
    gpus: float = Field(1, ge=0)
    cpus: float = Field(1, ge=0)
    fronts: int = Field(1, ge=1)
    prefix_bound: int = Field(16, ge=0)
    api_keys: tuple[str, ...] = Field(
        default_factory=lambda: tuple(key for key in os.environ.get("INGOT_API_KEY", "").split(",") if key.strip())
    )
    strict: bool = False
    max_queue: int = Field(4096, ge=1)
    memory: int | None = None
    num_kv_pages: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    seed: int = 0

    def llm_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `AsyncLLM`."""
        names = (
            *("memory", "num_kv_pages", "max_model_len", "max_num_seqs"),
            *("max_num_batched_tokens", "max_num_mixed_tokens", "scheduling_policy", "seed"),
        )
        return {name: getattr(self, name) for name in names}


def build(args: RayArguments) -> Application:
    """Return the application, for `serve run` and for `import_path` of a Serve config: a front, and replicas of the
    model. Stored responses of `/v1/responses` are off, because replicas share no memory."""
    name = args.served_model_name or args.model.rstrip("/").rpartition("/")[2].removesuffix(".ingot")
    options = HttpOptions(
        model_names=tuple(dict.fromkeys((name, args.model))),
        host="0.0.0.0",  # clients reach Ray's proxy, under any name
        api_keys=args.api_keys,
        ui=False,
        strict=args.strict,
        max_stored_responses=0,
    )
    scale: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        scale = {
            "autoscaling_config": {
                "min_replicas": args.replicas,
                "max_replicas": args.max_replicas,
                "target_ongoing_requests": args.target_ongoing_requests,
            }
        }
    # A replica queues requests itself, and answers 429 when its queue is full.
    most = args.max_queue + 1024
    replica = serve.deployment(
        ModelReplica,
        name="ModelReplica",
        user_config={},  # without one, Ray does not call `reconfigure`
        max_ongoing_requests=most,
        ray_actor_options={"num_gpus": args.gpus, "num_cpus": args.cpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"bound": args.prefix_bound}
        ),
        **scale,
    )
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=args.fronts,
        max_ongoing_requests=most * max(args.replicas, args.max_replicas or 1),
    )
    application: Application = front.bind(replica.bind(args.model, options, args.max_queue, args.llm_options()))
    return application
