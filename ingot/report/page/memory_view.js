// The memory of serving, and the memory of each bucket class's largest step, instruction by instruction.

import { stackedBar } from "./bars.js";
import { h, svg } from "./dom.js";
import { bytes } from "./format.js";
import { bucketName } from "./step_names.js";

const WIDTH = 1000;
const HEIGHT = 180;
const LISTED = 12; // the largest values alive at an instruction

export function memoryView(app) {
  return h(
    "div",
    { class: "columns" },
    residentBar(app.data),
    cachePanel(app.data.caches),
    app.data.memory.map((one) => stepPanel(app, one)),
  );
}

function residentBar({ resident, memory, model }) {
  const activations = Math.max(...memory.map((one) => one.activations));
  const parts = [
    ["weights", resident.weights, "each tensor once"],
    ["KV cache", resident.sequence, `one sequence at full length, ${bytes(resident.page)} a page`],
    ...(resident.scratch_pages
      ? [["scratch pages", resident.scratch_pages, "of windows: for reads of one step"]]
      : []),
    ["activations", activations, "at the peak of the largest step"],
    ["inputs and outputs", resident.inputs + resident.outputs, "of a step"],
    ["other states", resident.states, "they do not grow"],
  ];
  const note = `up to ${model.max_batch} sequences of ${model.max_seq_len} tokens, ${model.max_tokens} tokens a step`;
  return h(
    "div",
    { class: "panel wide" },
    stackedBar("Memory to serve one sequence", parts, bytes),
    h("p", { class: "quiet" }, note),
  );
}

/** The cache groups: the tokens that each keeps, and its pages per sequence. */
function cachePanel({ groups, step_tokens, together }) {
  const columns = ["group", "keeps", "a page", "pages between steps", "in a step", "layers", "a token in each layer"];
  const rows = groups.map((one) => [
    one.name,
    one.keeps,
    bytes(one.page_bytes),
    one.between_steps,
    one.in_step,
    one.layers,
    one.forms.join("; "),
  ]);
  const note = groups.length
    ? `pages that one sequence at full length holds at most; a step has up to ${step_tokens} tokens`
    : "none: the model has no paged KV cache";
  return h(
    "div",
    { class: "panel wide" },
    h("h3", {}, "Cache groups"),
    groups.length > 0 &&
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Cache groups" },
        h(
          "table",
          { class: "alive" },
          h("thead", {}, h("tr", {}, columns.map((title) => h("th", { scope: "col" }, title)))),
          h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", {}, `${value}`))))),
        ),
      ),
    h("p", { class: "quiet" }, note),
    groups.map((one) => scratchNote(one)).map((text) => text && h("p", { class: "quiet" }, text)),
    Object.entries(together).map(([entry, text]) => h("p", { class: "quiet" }, `${entry}: ${text}`)),
  );
}

/** The scratch pages of a group, or why a group with a window has none. */
function scratchNote({ name, scratch_pages, scratch_bytes, why_none }) {
  if (scratch_pages)
    return `${name}: ${scratch_pages} scratch pages, ${bytes(scratch_bytes)} for all layers, hold keys and values of a long prompt for one step`;
  return why_none && `${name}: no scratch pages, because ${why_none}`;
}

/** Bytes during each instruction: the live values, and the call's own scratch. */
function curve(memory) {
  const steps = new Array(memory.calls.length + 1).fill(0);
  for (const [, size, first, last] of memory.storages) {
    steps[first] += size;
    steps[last + 1] -= size;
  }
  let alive = 0;
  return memory.calls.map((_, at) => (alive += steps[at]) + memory.scratch[at]);
}

function stepPanel(app, memory) {
  const heights = curve(memory);
  const top = Math.max(...heights, 1);
  const wide = WIDTH / heights.length;
  const y = (value) => HEIGHT - (value / top) * (HEIGHT - 8);
  const line = heights.map((value, at) => `${at ? "L" : "M"}${at * wide},${y(value)}H${(at + 1) * wide}`).join("");
  const marker = svg("rect", { class: "cursor", y: 0, width: Math.max(1.5, wide), height: HEIGHT });
  const chart = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      class: "curve",
      "aria-label": `Memory over ${heights.length} instructions, at most ${bytes(top)}`,
    },
    svg("path", { class: "area", d: `${line}V${HEIGHT}H0Z` }),
    svg("path", { class: "line", d: line }),
    marker,
  );
  const cursor = h("input", {
    type: "range",
    min: 0,
    max: heights.length - 1,
    value: memory.peak,
    "aria-label": `Instruction, ${memory.bucket}`,
  });
  const detail = h("div", { class: "detail" });
  const show = (at) => {
    cursor.value = at;
    marker.setAttribute("x", at * wide);
    cursor.setAttribute("aria-valuetext", `${at}: ${memory.calls[at]}, ${bytes(heights[at])}`);
    detail.replaceChildren(...instruction(app, memory, at, heights[at]));
  };
  cursor.addEventListener("input", () => show(Number(cursor.value)));
  const point = (event) => {
    const { left, width } = chart.getBoundingClientRect();
    show(Math.min(heights.length - 1, Math.max(0, Math.floor(((event.clientX - left) / width) * heights.length))));
  };
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointermove", (event) => event.buttons && point(event));
  show(memory.peak);
  const sizes = Object.entries(memory.sizes).filter(([name]) => ["T", "B", "L"].includes(name));
  return h(
    "div",
    { class: "panel wide memory", "data-bucket": memory.bucket },
    h("h3", {}, `A step of ${bucketName(memory)}`),
    h(
      "p",
      { class: "quiet" },
      `the largest: ${sizes.map(([name, value]) => `${name} = ${value}`).join(", ")}; `,
      `at most ${bytes(memory.activations)}, in ${memory.calls[memory.peak]}`,
    ),
    h(
      "p",
      { class: "quiet" },
      "The plot has the live values, the scratch of regions, and the scratch of calls like the one at the peak; ",
      "the plan has no figures for other ops.",
    ),
    h("div", { class: "chart" }, h("span", { class: "axis" }, bytes(top)), chart),
    cursor,
    detail,
  );
}

function instruction(app, memory, at, height) {
  const alive = memory.storages
    .filter(([, , first, last]) => first <= at && at <= last)
    .sort(([, one], [, other]) => other - one);
  const name = (value) =>
    h("button", { type: "button", class: "link", onclick: () => app.showValue(memory, value) }, `%${value}`);
  const note = (first, last) =>
    [first === at && "made here", last === at && "freed after"].filter(Boolean).join(", ");
  const parts = alive
    .slice(0, LISTED)
    .map(([value, size, first, last]) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, name(value)),
        h("td", { class: "figure" }, bytes(size)),
        h("td", { class: "figure" }, `${first}–${last}`),
        h("td", { class: "quiet" }, note(first, last)),
      ),
    );
  const rest = alive.slice(LISTED);
  const sum = alive.reduce((total, [, size]) => total + size, 0);
  const own = height - sum;
  return [
    h(
      "p",
      { class: "at" },
      h("b", {}, `Instruction ${at} of ${memory.calls.length - 1}`),
      ` ${memory.calls[at]}`,
      h("b", { class: "figure" }, bytes(height)),
    ),
    h(
      "table",
      { class: "alive" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["value", "size", "alive in", ""].map((title) => h("th", { scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        parts,
        rest.length > 0 &&
          h(
            "tr",
            { class: "quiet" },
            h("td", {}, `and ${rest.length} more`),
            h("td", { class: "figure" }, bytes(rest.reduce((total, [, size]) => total + size, 0))),
            h("td"),
            h("td"),
          ),
        own > 0 &&
          h(
            "tr",
            { class: "quiet" },
            h("td", {}, "the call's own"),
            h("td", { class: "figure" }, bytes(own)),
            h("td"),
            h("td"),
          ),
      ),
    ),
  ];
}
