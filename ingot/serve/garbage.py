"""Python's garbage collection in processes that serve."""

import gc


def keep_loaded_objects() -> None:
    """Collect garbage once, and exclude all objects that exist now from later collections.

    Modules and the loaded model live as long as the process. Without this, each full collection visits them: 0.1 s of
    an engine with 210,000 objects, in which no step runs, and 25 ms of a server with 64,000.
    """
    gc.collect()
    gc.freeze()
