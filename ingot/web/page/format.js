// Format numbers and names for readers.

/** Bytes in decimal units: 13.6 MB. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 999.95 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${value} B` : `${value.toFixed(1)} ${units[unit]}`;
}

/** Seconds with three significant digits: 18.8 s, 451 ms, 70 µs. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  for (const [unit, scale] of [
    ["s", 1],
    ["ms", 1e3],
  ]) {
    const scaled = value * scale;
    if (scaled >= 0.9995) return `${scaled >= 999.5 ? Math.round(scaled) : scaled.toPrecision(3)} ${unit}`;
  }
  return `${Math.round(value * 1e6)} µs`;
}

/** Seconds on a GPU: 6.5 µs, 1.24 ms. */
export function microseconds(value) {
  return Math.abs(value) < 1e-3 ? `${(value * 1e6).toFixed(1)} µs` : `${(value * 1e3).toFixed(2)} ms`;
}

/** A whole number with a unit prefix: 3.4 G. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10000) return String(value);
  const exponent = Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** exponent).toPrecision(3))} ${["", "k", "M", "G", "T"][exponent]}`;
}

export function plural(number, noun, nouns = `${noun}s`) {
  return `${number} ${number === 1 ? noun : nouns}`;
}

/** Ascending numbers, even steps as ranges: "0–31", "0, 2, …, 30", "0, 5–7". */
export function ranges(numbers) {
  const step = numbers[1] - numbers[0];
  const even = numbers.length > 3 && step > 1 && numbers.every((each, at) => each === numbers[0] + at * step);
  if (even) return `${numbers[0]}, ${numbers[1]}, …, ${numbers.at(-1)}`;
  const runs = [];
  for (const number of numbers) {
    if (runs.length && runs.at(-1)[1] === number - 1) runs.at(-1)[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}
