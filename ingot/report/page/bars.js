// A stacked bar with a table of its parts, with the same values in words and numbers.

import { h, svg } from "./dom.js";

const WIDTH = 1000; // in the drawing's own units; it is scaled to the available width
const LEAST = 2; // units: the minimum visible width

/** `parts` are [name, value, note]; `text` formats a value. A part of size 0 has a row but no place in the bar. */
export function stackedBar(title, parts, text) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  let place = 0;
  const pieces = parts.map(([name, value], at) => {
    if (!value) return null;
    const width = (value / total) * WIDTH;
    const piece = svg(
      "rect",
      { x: place, y: 0, width: Math.max(LEAST, width - 1), height: 26, class: `hue-${at % 8}` },
      svg("title", {}, `${name}: ${text(value)}`),
    );
    place += width;
    return piece;
  });
  const share = (value) => (total ? `${((100 * value) / total).toFixed(1)} %` : "–");
  return h(
    "figure",
    { class: "stacked" },
    h("figcaption", {}, h("h3", {}, title), h("b", {}, text(total))),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} 26`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${title}: ${text(total)}`,
      },
      pieces,
    ),
    h(
      "table",
      { class: "parts" },
      h(
        "tbody",
        {},
        parts.map(([name, value, note], at) =>
          h(
            "tr",
            {},
            h(
              "td",
              { class: "swatch" },
              svg(
                "svg",
                { viewBox: "0 0 10 10", "aria-hidden": "true" },
                svg("rect", { width: 10, height: 10, rx: 2, class: `hue-${at % 8}` }),
              ),
            ),
            h("th", { scope: "row" }, name, note && h("span", { class: "quiet" }, ` ${note}`)),
            h("td", { class: "figure" }, text(value)),
            h("td", { class: "figure quiet" }, share(value)),
          ),
        ),
      ),
    ),
  );
}
