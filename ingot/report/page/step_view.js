// The time of a step on the GPU: by kinds of calls, along the step, under the roofline, and what would shorten it.

import { stackedBar } from "./bars.js";
import { h, svg } from "./dom.js";
import { bytes, count, microseconds, plural } from "./format.js";
import { rooflinePlot } from "./roofline.js";
import { bucketName } from "./step_names.js";

const FIELDS = "name kind flops bytes roofline taken".split(" ");
const WIDTH = 1000; // in the drawing's own units; it is scaled to the available width
const HEIGHT = 44;
const FLOOR = 14; // height of the strip that shows the roofline's times

export function stepView(app) {
  const steps = app.data.step_times.map((one) => ({
    ...one,
    calls: one.calls.map((fields) => Object.fromEntries(FIELDS.map((field, at) => [field, fields[at]]))),
  }));
  if (!steps.length)
    return h(
      "div",
      { class: "panel" },
      h("p", { class: "quiet" }, "Times of a step follow for a GPU; this artifact is not for one."),
    );
  const shown = h("div", { class: "columns" });
  const bucket = h(
    "select",
    { "aria-label": "Bucket class of the step" },
    steps.map(({ step }, at) => h("option", { value: at }, bucketName(app.data.steps[step]))),
  );
  const change = () => shown.replaceChildren(...panels(app, steps[Number(bucket.value)]));
  bucket.addEventListener("change", change);
  change();
  return h("div", {}, h("div", { class: "controls" }, bucket), shown);
}

function panels(app, one) {
  const { time } = one;
  const kinds = time.kinds.map(({ kind }) => kind);
  const hueOf = (kind) => `hue-${kinds.indexOf(kind) % 8}`;
  const select = (name) => app.select(name, one.step, true);
  const device = `${time.device}: ${bytes(time.bandwidth)}/s, ${count(time.rate)}flop/s; ${time.basis}`;
  // Overlapping calls make negative gaps, which a bar cannot show.
  const parts = time.kinds.map(({ kind, calls, predicted }) => [
    kind,
    Math.max(0, predicted),
    calls ? plural(calls, "call") : "between calls",
  ]);
  const share = ((100 * time.roofline) / time.predicted).toFixed(0);
  return [
    h(
      "div",
      { class: "panel" },
      stackedBar("A step, by kind", parts, microseconds),
      h("p", { class: "quiet" }, `${one.basis}; ${time.captured ? "a captured graph" : "launched call by call"}`),
      h("p", { class: "quiet" }, `${share} % of the roofline on ${device}`),
    ),
    h("div", { class: "panel" }, rooflinePlot(one, hueOf, select)),
    h("div", { class: "panel wide" }, timeline(one, hueOf, select)),
    time.gaps.length > 0 && h("div", { class: "panel wide" }, gapTable(time.gaps)),
  ].filter(Boolean);
}

/** Every call in order, as wide as its time; the strip below shows the time of its roofline. */
function timeline({ time, calls }, hueOf, select) {
  const total = Math.max(
    time.predicted,
    calls.reduce((sum, { taken }) => sum + taken, 0),
  );
  const units = (value) => (value / total) * WIDTH;
  let place = 0;
  const pieces = calls.map((call) => {
    const at = units(place);
    place += call.taken;
    const text = `${call.name}: ${microseconds(call.taken)}, at least ${microseconds(call.roofline)}`;
    return [
      svg(
        "rect",
        {
          x: at,
          y: 0,
          width: units(call.taken),
          height: HEIGHT - FLOOR - 2,
          class: hueOf(call.kind),
          onclick: () => select(call.name),
        },
        svg("title", {}, text),
      ),
      svg("rect", {
        x: at,
        y: HEIGHT - FLOOR,
        width: units(Math.min(call.roofline, call.taken)),
        height: FLOOR,
        class: "floor",
      }),
    ];
  });
  return h(
    "figure",
    { class: "stacked along" },
    h("figcaption", {}, h("h3", {}, "Along the step"), h("b", {}, microseconds(time.predicted))),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${calls.length} calls of a step of ${microseconds(time.predicted)}`,
      },
      pieces,
    ),
    h("p", { class: "quiet" }, "above: the time of each call; below: the time of its roofline"),
  );
}

function gapTable(gaps) {
  const cell = (tag, text, figure) => h(tag, { class: figure ? "figure" : null }, text);
  return [
    h("h3", {}, "Above the roofline"),
    h(
      "table",
      { class: "parts above" },
      h(
        "tbody",
        {},
        gaps.map((gap) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, gap.what, gap.calls > 0 && h("span", { class: "quiet" }, ` ${plural(gap.calls, "call")}`)),
            cell("td", microseconds(gap.seconds), true),
            cell("td", gap.closing),
          ),
        ),
      ),
    ),
  ];
}
