// The roofline plot of a step: each call's flops per second, over its flops per byte moved.

import { h, svg } from "./dom.js";
import { count, microseconds } from "./format.js";

const WIDTH = 640;
const HEIGHT = 320;
const LEFT = 54; // width of the axis labels
const BELOW = 34;
const ABOVE = 20;
const LEAST = 3; // units: the radius of a call with no time

/** `calls` with their times, under the roofline of `time`; `hueOf` returns a kind's colour, `select` shows a call. */
export function rooflinePlot({ time, calls }, hueOf, select) {
  const shown = distinct(calls.filter(({ flops, bytes }) => flops > 0 && bytes > 0));
  const intensities = shown.map(({ flops, bytes }) => flops / bytes);
  const rates = shown.map(({ flops, taken }) => flops / taken);
  const ridge = time.rate / time.bandwidth;
  const x = scale(Math.min(...intensities, ridge) / 2, Math.max(...intensities, ridge) * 4, LEFT, WIDTH);
  const y = scale(Math.min(...rates, time.rate) / 2, time.rate * 2, HEIGHT - BELOW, ABOVE);
  const most = Math.max(...shown.map(({ all }) => all), 1e-12);
  const roof = `M${x(x.low)},${y(time.bandwidth * x.low)}L${x(ridge)},${y(time.rate)}H${WIDTH}`;
  const points = shown.map((call) =>
    svg(
      "circle",
      {
        cx: x(call.flops / call.bytes),
        cy: y(call.flops / call.taken),
        r: LEAST + 12 * Math.sqrt(call.all / most),
        class: hueOf(call.kind),
        onclick: () => select(call.name),
      },
      svg("title", {}, `${call.name}${call.times > 1 ? ` and ${call.times - 1} like it` : ""}: ${said(call)}`),
    ),
  );
  return h(
    "figure",
    { class: "roofline" },
    h("figcaption", {}, h("h3", {}, "Roofline")),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        role: "img",
        "aria-label": `Roofline of ${shown.length} kinds of calls under ${count(time.rate)}flop/s`,
      },
      ticks(x, (place, value) => [
        svg("line", { x1: place, x2: place, y1: ABOVE, y2: HEIGHT - BELOW, class: "grid" }),
        svg("text", { x: place, y: HEIGHT - BELOW + 14, class: "tick middle" }, short(value)),
      ]),
      ticks(y, (place, value) => [
        svg("line", { x1: LEFT, x2: WIDTH, y1: place, y2: place, class: "grid" }),
        svg("text", { x: LEFT - 6, y: place + 4, class: "tick end" }, short(value)),
      ]),
      svg("text", { x: WIDTH, y: HEIGHT - 4, class: "tick end" }, "flops a byte"),
      svg("text", { x: 0, y: 11, class: "tick" }, "flops a second"),
      svg("path", { d: roof, class: "roof" }),
      points,
    ),
  );
}

/** Equal calls as one, with their number and total time. */
function distinct(calls) {
  const groups = new Map();
  for (const call of calls) {
    const key = [call.kind, call.flops, call.bytes, call.taken].join();
    const group = groups.get(key) ?? { ...call, times: 0, all: 0 };
    groups.set(key, { ...group, times: group.times + 1, all: group.all + call.taken });
  }
  return [...groups.values()];
}

function said(call) {
  const share = ((100 * call.roofline) / call.taken).toFixed(0);
  return `${microseconds(call.taken)}, ${share} % of the roofline`;
}

/** A logarithmic axis from `low` to `high` onto two places. */
function scale(low, high, from, to) {
  const along = (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  return Object.assign(along, { low, high });
}

/** Powers of ten, fewer if there are many. */
function ticks(axis, make) {
  const first = Math.ceil(Math.log10(axis.low));
  const last = Math.floor(Math.log10(axis.high));
  const by = Math.max(1, Math.ceil((last - first + 1) / 8));
  const made = [];
  for (let power = first; power <= last; power += by) made.push(make(axis(10 ** power), 10 ** power));
  return made;
}

/** A power of ten: 0.01, 100, 10 k, 1 T. */
function short(value) {
  return value < 1 ? String(Number(value.toPrecision(1))) : count(value);
}
