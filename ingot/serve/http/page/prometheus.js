// Metrics in Prometheus' text form.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/;

/** Return a map from each metric's name to its value, summed over labels. Buckets of histograms are left out. */
export function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, value] = SAMPLE.exec(line) ?? [];
    if (name && !name.endsWith("_bucket")) found.set(name, (found.get(name) ?? 0) + Number(value));
  }
  return found;
}
