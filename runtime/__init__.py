"""From an artifact to tokens: loader, executor, cache, scheduler, sampler."""
