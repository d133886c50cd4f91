// Metrics in Prometheus' text form.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/;

// Shares of a whole, of which each engine has its own.
const SHARES = new Set(["vllm:kv_cache_usage_perc"]);

/**
 * Return a map from each metric's name to its value, summed over labels. The value of a share is the mean over the
 * engines. Buckets of histograms are left out.
 */
export function readMetrics(text) {
  const found = new Map();
  const counts = new Map();
  for (const line of text.split("\n")) {
    const [, name, value] = SAMPLE.exec(line) ?? [];
    if (!name || name.endsWith("_bucket")) continue;
    found.set(name, (found.get(name) ?? 0) + Number(value));
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  for (const name of SHARES) if (found.has(name)) found.set(name, found.get(name) / counts.get(name));
  return found;
}
