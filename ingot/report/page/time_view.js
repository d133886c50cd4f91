// The time of compiling by phase, and the time of a start.

import { stackedBar } from "./bars.js";
import { h } from "./dom.js";
import { plural, seconds } from "./format.js";
import { stepName } from "./step_names.js";

const EXE_SHOWN = 12; // hexadecimal digits of an executable's id: enough to distinguish a few thousand

export function timeView(app) {
  const { phases, executables, cached } = app.data.times;
  const passes = app.data.steps
    .filter((step) => step.seconds !== null)
    .map((step) => [stepName(step), step.seconds, ""]);
  const built = Object.entries(executables).filter(([id]) => !cached.includes(id));
  const parts = (times) =>
    Object.entries(times)
      .sort(([, one], [, other]) => other - one)
      .map(([name, value]) => [name, value, ""]);
  const left = [
    bar("Compile, by phase", parts(phases)),
    bar(
      "Executables built",
      parts(Object.fromEntries(built)).map(([id, ...rest]) => [id.slice(0, EXE_SHOWN), ...rest]),
      [
        "built side by side: the sum is longer than the wait",
        cached.length > 0 && `; ${plural(cached.length, "executable")} came from the cache`,
      ],
    ),
    bar(
      "Start-up",
      app.data.start_up,
      "from a new process to its first token, on the machine that made this page",
      "not measured: ingot report --start-up does",
    ),
  ];
  return h("div", { class: "columns" }, h("div", {}, left), h("div", {}, bar("Passes", passes)));
}

function bar(title, parts, note, missing = "not recorded in this artifact") {
  if (!parts.length) return empty(title, missing);
  return h("div", { class: "panel" }, stackedBar(title, parts, seconds), note && h("p", { class: "quiet" }, note));
}

function empty(title, missing) {
  return h("div", { class: "panel" }, h("h3", {}, title), h("p", { class: "quiet" }, missing));
}
