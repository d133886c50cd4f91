// A stacked bar with a table of its parts, which says in words and numbers what the bar shows.

import { h, svg } from "./dom.js";

const WIDTH = 1000; // of the drawing's own units; it is stretched to the width that there is
const LEAST = 2; // units: what is drawn at all can be seen

/** `parts` are [name, value, note]; `text` writes a value. A part of no size has a row and no place in the bar. */
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
